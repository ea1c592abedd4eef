"""Which back end a device has: the only place that asks."""

from __future__ import annotations

from importlib import import_module

from jettison.device.backend import BackEnd
from jettison.device.spec import CUDA, HOST
from jettison.errors import ConfigError

_BACK_ENDS = {HOST: "jettison.device.backend_host:HostBackEnd", CUDA: "jettison.device.cuda.backend:CudaBackEnd"}
"""Name to ``module:class``, imported when it is chosen: one that is not needs nothing installed."""


def choose_back_end(name: str = HOST) -> BackEnd:
    """The back end of ``DeviceSpec.back_end``. Raises ConfigError for a name that there is not."""
    if name not in _BACK_ENDS:
        raise ConfigError(f"devices are {' or '.join(_BACK_ENDS)}, not {name!r}")
    module, _, class_name = _BACK_ENDS[name].partition(":")
    back_end: BackEnd = getattr(import_module(module), class_name)()
    return back_end

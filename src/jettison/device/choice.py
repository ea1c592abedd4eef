"""Which back end a device has: the only place that asks."""

from __future__ import annotations

from importlib import import_module

from jettison.device.backend import BackEnd
from jettison.device.spec import HOST, DeviceSpec
from jettison.errors import ConfigError

_BACK_ENDS = {HOST: "jettison.device.backend_host:HostBackEnd"}
"""Name to ``module:class``, imported when it is chosen: one that is not needs nothing installed."""


def choose_back_end(spec: DeviceSpec) -> BackEnd:
    """The back end that a spec names. Raises ConfigError for a name that there is not."""
    if spec.back_end not in _BACK_ENDS:
        raise ConfigError(f"devices are {' or '.join(_BACK_ENDS)}, not {spec.back_end!r}")
    module, _, name = _BACK_ENDS[spec.back_end].partition(":")
    back_end: BackEnd = getattr(import_module(module), name)()
    return back_end

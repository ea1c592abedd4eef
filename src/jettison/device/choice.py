"""Which kind of device there is, and its back end: the only place that asks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jettison.device.spec import CUDA, HOST
from jettison.errors import ConfigError

if TYPE_CHECKING:
    from jettison.device.backend import BackEnd
    from jettison.device.kind import DeviceKind

_KINDS = {HOST: "jettison.device.kind_host:HostKind", CUDA: "jettison.device.cuda.kind:CudaKind"}
_BACK_ENDS = {HOST: "jettison.device.backend_host:HostBackEnd", CUDA: "jettison.device.cuda.backend:CudaBackEnd"}
"""Name to ``module:class``, imported when it is chosen: one that is not needs nothing installed."""


def kind_of(name: str = HOST) -> DeviceKind:
    """The kind that ``DeviceSpec.back_end`` names. Raises ConfigError for a name that there is not."""
    kind: DeviceKind = _chosen(_KINDS, name)
    return kind


def choose_back_end(name: str = HOST) -> BackEnd:
    """The back end of ``DeviceSpec.back_end``, with torch. Raises ConfigError for a name that there is not."""
    back_end: BackEnd = _chosen(_BACK_ENDS, name)
    return back_end


def _chosen(places: dict[str, str], name: str) -> Any:
    if name not in places:
        raise ConfigError(f"devices are {' or '.join(places)}, not {name!r}")
    module, _, class_name = places[name].partition(":")
    return getattr(import_module(module), class_name)()

"""Kernels that can be called, by a configured or a resolved name. Not here: what a name means (``choosing``)."""

from __future__ import annotations

from jettison.device.dtypes import Dtype
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.choosing import resolve_kernels
from jettison.device.kernels.processor import Processor
from jettison.device.kernels.registry import KernelsUnavailableError, find_kernels
from jettison.device.spec import HOST
from jettison.errors import ConfigError


def load_kernels(name: str = "auto", dtype: Dtype = "float64", processor: Processor | None = None) -> Kernels:
    """The kernels that ``resolve_kernels`` finds. Raises ConfigError, as it does, and where they cannot be loaded."""
    kernels, variant = find_kernels(resolve_kernels(name, dtype, processor), HOST)
    try:
        return kernels.load(variant)
    except KernelsUnavailableError as error:
        raise ConfigError(str(error)) from error

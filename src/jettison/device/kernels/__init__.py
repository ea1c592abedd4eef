"""Compute kernels of a device behind one protocol, and the choice among those for tensors in host memory.

``load_kernels`` is the only way in. The native kernels (a C library beside this file, called through ctypes) are built
with the package or by ``python -m jettison.device.kernels.build``; torch is the fallback. The controller resolves the
configured name once (``resolve_kernels``), and all workers of a cluster load what it names. Sets of kernels are known
by name (``registry``); one that is not asked for is not imported.
"""

from __future__ import annotations

import logging

import torch

from jettison.device.kernels import native
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.processor import (
    NATIVE,
    TORCH,
    TORCH_LINEAR,
    Processor,
    choose_kind,
    processor_features,
)
from jettison.device.kernels.registry import KernelsUnavailableError, find_kernels
from jettison.device.spec import HOST
from jettison.errors import ConfigError

__all__ = [
    "Kernels", "Processor", "load_kernels", "parts_are_exact", "resolve_kernels", "rows_are_independent",
    "this_processor",
]

logger = logging.getLogger(__name__)


def this_processor() -> Processor:
    """The processor of this process, and the native kernels that it can use on it."""
    return Processor(processor_features(), tuple(native.supported_variants()))


def resolve_kernels(name: str, dtype: torch.dtype, processor: Processor | None = None) -> str:
    """The full name of the kernels that a configuration calls ``name``: ``auto`` is resolved and the instruction set
    included, so that all workers compute alike, and profiles can be told apart. Raises as ``load_kernels`` does.
    """
    return load_kernels(name, dtype, processor).name


def rows_are_independent(name: str, dtype: torch.dtype) -> bool:
    """Whether a row's result has the same bits in every batch, with kernels of this (resolved) name in this precision.

    False: requests in one step may change each other's last bits, and so, rarely, a token.
    """
    kernels, _ = find_kernels(name)
    return dtype not in kernels.dependent


def parts_are_exact(name: str, dtype: torch.dtype) -> bool:
    """Whether a step whose rows are computed in parts yields the tokens of the whole one: in double precision with any
    kernels, else where no row depends on the others."""
    return dtype == torch.float64 or rows_are_independent(name, dtype)


def load_kernels(
    name: str = "auto", dtype: torch.dtype = torch.float64, processor: Processor | None = None
) -> Kernels:
    """The kernels called ``name``: ``"auto"``, ``"torch"``, ``"native"`` or ``"native-<variant>"``, the latter two
    also with ``"+torch-linear"``, which leaves products in bfloat16 to torch.

    ``auto`` depends on the precision of the model: see ``choose_kind``. Where the library was not built, or does not
    work here, it is torch, with one note in the log. ``processor``: the processor to assume, with some of the
    instruction sets that run here (None: the actual one). Raises ConfigError for an unknown name, or when native
    kernels were requested and are not available.
    """
    among = None if processor is None else processor.variants
    try:
        if name == "auto":
            return _load_best(dtype, processor or this_processor(), among)
        kernels, variant = find_kernels(name, HOST)
        return kernels.load(variant, among)
    except KernelsUnavailableError as error:
        if name != "auto":
            raise ConfigError(str(error)) from error
        logger.warning("using the slower torch kernels: %s", error)
        return find_kernels(TORCH)[0].load()


def _load_best(dtype: torch.dtype, processor: Processor, among: tuple[str, ...] | None) -> Kernels:
    """What ``auto`` means. Raises KernelsUnavailableError where it cannot be native kernels of any kind."""
    kernels = find_kernels(NATIVE)[0].load(None, among)
    # What was built with tiles counts where it works: one that computes wrong results was passed over.
    has_tiles = kernels.name == f"{NATIVE}-{native.TILES}"
    if choose_kind(dtype, processor.features, has_native_tiles=has_tiles) == TORCH_LINEAR:
        return find_kernels(TORCH_LINEAR)[0].load(kernels.name.removeprefix(f"{NATIVE}-"))
    return kernels

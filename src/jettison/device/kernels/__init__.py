"""Compute kernels of a device behind one protocol, and the choice between the back ends.

``load_kernels`` is the only way in. The native back end (a C library beside this file, called through ctypes)
is built with the package or by ``python -m jettison.device.kernels.build``; torch is the fallback. The controller
resolves the configured name once (``resolve_kernels``), and all workers of a cluster load what it names.
"""

from __future__ import annotations

import logging

import torch

from jettison.device.kernels.base import CUDA_INVARIANT, Kernels
from jettison.device.kernels.processor import (
    NATIVE,
    TORCH,
    TORCH_LINEAR,
    Processor,
    choose_kind,
    processor_features,
)
from jettison.device.kernels.torch_kernels import TorchKernels
from jettison.errors import ConfigError

__all__ = ["Kernels", "Processor", "load_kernels", "resolve_kernels", "rows_are_independent", "this_processor"]

logger = logging.getLogger(__name__)

_SUFFIX = TORCH_LINEAR.removeprefix(NATIVE)


def this_processor() -> Processor:
    """The processor of this process, and the native kernels that it can use on it."""
    from jettison.device.kernels.native import supported_variants

    return Processor(processor_features(), tuple(supported_variants()))


def resolve_kernels(name: str, dtype: torch.dtype, processor: Processor | None = None) -> str:
    """The full name of the back end that a configuration calls ``name``: ``auto`` is resolved and the instruction set
    included, so that all workers compute alike, and profiles can be told apart. Raises as ``load_kernels`` does.
    """
    return load_kernels(name, dtype, processor).name


def rows_are_independent(name: str, dtype: torch.dtype) -> bool:
    """Whether a row's result has the same bits in every batch, with kernels of this (resolved) name in this precision.

    False: requests in one step may change each other's last bits, and so, rarely, a token.
    """
    if name == CUDA_INVARIANT:
        return True
    return name.startswith(NATIVE) and not (dtype == torch.bfloat16 and name.endswith(_SUFFIX))


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
    if name == TORCH:
        return TorchKernels()
    base = name.removesuffix(_SUFFIX)
    if name != "auto" and base != NATIVE and not base.startswith("native-"):
        raise ConfigError(f"kernels must be auto, {NATIVE}, {TORCH_LINEAR} or {TORCH}, not {name!r}")
    from jettison.device.kernels.native import TILES, NativeUnavailableError, load_native
    from jettison.device.kernels.torch_linear import TorchLinearKernels

    there = processor or this_processor()
    variant = base.removeprefix("native-") if base.startswith("native-") else None
    among = None if processor is None else processor.variants
    try:
        if name != "auto":
            return load_native(variant, TorchLinearKernels if name.endswith(_SUFFIX) else None, among)
        kernels = load_native(None, None, among)
        # The kernels built with tiles count only where they work: a variant with wrong results was skipped.
        has_tiles = kernels.name == f"{NATIVE}-{TILES}"
        if choose_kind(dtype, there.features, has_native=True, has_native_tiles=has_tiles) == TORCH_LINEAR:
            return load_native(kernels.name.removeprefix(f"{NATIVE}-"), TorchLinearKernels)
        return kernels
    except NativeUnavailableError as error:
        if name != "auto":
            raise ConfigError(str(error)) from error
        logger.warning("using the slower torch kernels: %s", error)
        return TorchKernels()

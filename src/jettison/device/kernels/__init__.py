"""Compute kernels of a device behind one protocol, and the choice between the back ends.

``load_kernels`` is the only way in. The native back end (a C library beside this file, called through ctypes)
is built with the package or by ``python -m jettison.device.kernels.build``; torch is the fallback. The controller
resolves the configured name once (``resolve_kernels``), and all workers of a cluster load what it names.
"""

from __future__ import annotations

import logging

import torch

from jettison.device.kernels.base import Kernels
from jettison.device.kernels.processor import NATIVE, TORCH, TORCH_LINEAR, choose_kind, processor_features
from jettison.device.kernels.torch_kernels import TorchKernels
from jettison.errors import ConfigError

__all__ = ["Kernels", "load_kernels", "resolve_kernels", "rows_are_independent"]

logger = logging.getLogger(__name__)

_SUFFIX = TORCH_LINEAR.removeprefix(NATIVE)


def resolve_kernels(name: str, dtype: torch.dtype) -> str:
    """The back end's own name of what a configuration calls ``name``: no ``auto`` is left, and the instruction set is
    said, so that workers who load it compute alike, and profiles are told apart. Raises as ``load_kernels`` does.
    """
    return load_kernels(name, dtype).name


def rows_are_independent(name: str, dtype: torch.dtype) -> bool:
    """Whether a row's result has the same bits in every batch, with kernels of this (resolved) name in this precision.

    False: requests in one step may change each other's last bits, and so, rarely, a token.
    """
    return name.startswith(NATIVE) and not (dtype == torch.bfloat16 and name.endswith(_SUFFIX))


def load_kernels(name: str = "auto", dtype: torch.dtype = torch.float64) -> Kernels:
    """The kernels called ``name``: ``"auto"``, ``"torch"``, ``"native"`` or ``"native-<variant>"``, the latter two
    also with ``"+torch-linear"``, which leaves products in bfloat16 to torch.

    ``auto`` depends on the precision that the model is computed in: see ``choose_kind``. Where the library was not
    built, or does not work here, it is torch, with one note in the log.
    Raises ConfigError for an unknown name, or when native kernels were asked for and cannot be had.
    """
    if name == TORCH:
        return TorchKernels()
    base = name.removesuffix(_SUFFIX)
    if name != "auto" and base != NATIVE and not base.startswith("native-"):
        raise ConfigError(f"kernels must be auto, {NATIVE}, {TORCH_LINEAR} or {TORCH}, not {name!r}")
    from jettison.device.kernels.native import TILES, NativeUnavailableError, load_native, supported_variants
    from jettison.device.kernels.torch_linear import TorchLinearKernels

    kind: str = name
    if name == "auto":
        has_tiles = TILES in supported_variants()
        kind = choose_kind(dtype, processor_features(), has_native=True, has_native_tiles=has_tiles)
    variant = base.removeprefix("native-") if base.startswith("native-") else None
    try:
        return load_native(variant, TorchLinearKernels if kind.endswith(_SUFFIX) else None)
    except NativeUnavailableError as error:
        if name != "auto":
            raise ConfigError(str(error)) from error
        logger.warning("using the slower torch kernels: %s", error)
        return TorchKernels()

"""Which kernels a configured name means on this host, and what a resolved name promises. No torch: a controller asks.

Not here: kernels that can be called (``loading``).
"""

from __future__ import annotations

import logging

from jettison.device.dtypes import Dtype
from jettison.device.kernels import library
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

logger = logging.getLogger(__name__)


def this_processor() -> Processor:
    """The processor of this process, and the native kernels that it can use on it."""
    return Processor(processor_features(), tuple(library.supported_variants()))


def resolve_kernels(name: str = "auto", dtype: Dtype = "float64", processor: Processor | None = None) -> str:
    """The full name of the kernels that a configuration calls ``name``: ``"auto"``, ``"torch"``, ``"native"`` or
    ``"native-<variant>"``, the latter two also with ``"+torch-linear"``, which leaves products in bfloat16 to torch.
    ``auto`` is resolved and the instruction set included, so that all workers compute alike, and profiles can be told
    apart.

    ``auto`` depends on the precision of the model: see ``choose_kind``. Where the library was not built, or does not
    work here, it is torch, with one note in the log. ``processor``: the processor to assume, with some of the
    instruction sets that run here (None: the actual one). Raises ConfigError for an unknown name, or when native
    kernels were requested and are not available.
    """
    among = None if processor is None else processor.variants
    try:
        if name == "auto":
            return _best(dtype, processor or this_processor(), among)
        kernels, variant = find_kernels(name, HOST)
        if not kernels.has_variants:
            return name
        return _named(TORCH_LINEAR if name.endswith(_LINEAR) else NATIVE, library.working_variant(variant, among))
    except KernelsUnavailableError as error:
        if name != "auto":
            raise ConfigError(str(error)) from error
        logger.warning("using the slower torch kernels: %s", error)
        return TORCH


def rows_are_independent(name: str, dtype: Dtype) -> bool:
    """Whether a row's result has the same bits in every batch, with kernels of this (resolved) name in this precision.

    False: requests in one step may change each other's last bits, and so, rarely, a token.
    """
    kernels, _ = find_kernels(name)
    return dtype not in kernels.dependent


def parts_are_exact(name: str, dtype: Dtype) -> bool:
    """Whether a step whose rows are computed in parts yields the tokens of the whole one: in double precision with any
    kernels, else where no row depends on the others."""
    return dtype == "float64" or rows_are_independent(name, dtype)


_LINEAR = TORCH_LINEAR.removeprefix(NATIVE)


def _best(dtype: Dtype, processor: Processor, among: tuple[str, ...] | None) -> str:
    """What ``auto`` means. Raises KernelsUnavailableError where it cannot be native kernels of any kind."""
    variant = library.working_variant(None, among)
    # What was built with tiles counts where it works: one that computes wrong results was passed over.
    kind = choose_kind(dtype, processor.features, has_native_tiles=variant == library.TILES)
    return _named(kind, variant)


def _named(kind: str, variant: str) -> str:
    """``native-avx2``, ``native-avx2+torch-linear``."""
    return f"{NATIVE}-{variant}{kind.removeprefix(NATIVE)}"

"""Sets of kernels by name. A set is imported when its kernels are first asked for, so that a name costs nothing.

Not here: which set ``auto`` means (``choosing`` for the host).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from jettison.device.dtypes import DTYPES, Dtype
from jettison.device.kernels.processor import NATIVE, TORCH, TORCH_LINEAR
from jettison.device.spec import HOST
from jettison.errors import ConfigError

if TYPE_CHECKING:
    from jettison.device.kernels.base import Kernels

    LoadKernels = Callable[[str | None], Kernels]
    """``(variant)``: kernels of that instruction set (None: of the best that works). Raises
    KernelsUnavailableError."""

CUDA, CUDA_INVARIANT = "cuda", "cuda-invariant"
"""Kernels of ``device.cuda.kernels``: the fast ones, and the ones with rows that do not depend on the batch."""

_HALF, _ALL = frozenset[Dtype]({"bfloat16"}), frozenset(DTYPES)


class KernelsUnavailableError(Exception):
    """Kernels cannot be had here; the message says why and how to mend it."""


@dataclass(frozen=True, slots=True)
class KernelSet:
    """What is known of kernels before they are loaded."""

    back_end: str
    """Of the tensors that they take: ``DeviceSpec.back_end``."""
    where: str
    """``module:function`` of a ``LoadKernels``."""
    dependent: frozenset[Dtype] = frozenset()
    """Precisions in which a row's last bits may depend on its batch."""
    has_variants: bool = False
    """A name may say an instruction set: ``native-avx2``, ``native-avx2+torch-linear``."""

    def load(self, variant: str | None = None) -> Kernels:
        """Import and load them. Raises KernelsUnavailableError."""
        module, _, function = self.where.partition(":")
        try:
            load: LoadKernels = getattr(import_module(module), function)
        except ImportError as error:
            raise KernelsUnavailableError(f"{module} cannot be imported here: {error}") from error
        return load(variant)


_SETS = {
    NATIVE: KernelSet(HOST, "jettison.device.kernels.native:load_native", has_variants=True),
    TORCH_LINEAR: KernelSet(HOST, "jettison.device.kernels.torch_linear:load_torch_linear", _HALF, has_variants=True),
    TORCH: KernelSet(HOST, "jettison.device.kernels.torch_kernels:load_torch", _ALL),
    CUDA: KernelSet("cuda", "jettison.device.cuda.kernels:load_fast", _ALL),
    CUDA_INVARIANT: KernelSet("cuda", "jettison.device.cuda.kernels:load_invariant"),
}


def register(name: str, kernels: KernelSet) -> None:
    """Have ``find_kernels`` know a set. Raises ValueError for a name that is taken."""
    if name in _SETS:
        raise ValueError(f"kernels {name!r} are registered already")
    _SETS[name] = kernels


def kernel_names(back_end: str) -> list[str]:
    """Of the sets for a back end's tensors."""
    return [name for name, kernels in _SETS.items() if kernels.back_end == back_end]


def find_kernels(name: str, back_end: str | None = None) -> tuple[KernelSet, str | None]:
    """The set that a configured or resolved name stands for, and the variant that the name says.

    ``back_end``: the one that the set must be for (None: any). Raises ConfigError with the names that there are.
    """
    names = list(_SETS) if back_end is None else kernel_names(back_end)
    if name in names:
        return _SETS[name], None
    base, plus, rest = name.partition("+")
    kind, _, variant = base.partition("-")
    family = f"{kind}{plus}{rest}"
    if not variant or family not in names or not _SETS[family].has_variants:
        *others, last = ["auto", *names]
        raise ConfigError(f"kernels must be {', '.join(others)} or {last}, not {name!r}")
    return _SETS[family], variant

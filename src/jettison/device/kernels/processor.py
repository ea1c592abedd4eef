"""The features of this processor, and the choice of kernels for ``auto`` by them. The choice is a pure function.

Features are only read here: the permission to use tiles belongs to a process, and the code that multiplies with tiles
requests it (``csrc/dispatch.c``; oneDNN).
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Literal, NamedTuple

from jettison.device.dtypes import Dtype

Kind = Literal["native", "native+torch-linear", "torch"]

NATIVE: Kind = "native"
TORCH_LINEAR: Kind = "native+torch-linear"
"""Native kernels, but torch's ``linear`` in bfloat16."""
TORCH: Kind = "torch"

TILES_GRANTED = "tiles_granted"
"""A flag besides the processor's: the operating system lets processes use the tile registers."""

AMX_BF16 = frozenset({"amx_tile", "amx_bf16", TILES_GRANTED})
"""The flags that products of bfloat16 tiles need."""


class Processor(NamedTuple):
    """The basis of the choice of kernels. It is an argument, so that tests can assume any processor."""

    features: frozenset[str]
    """See ``processor_features``."""
    variants: tuple[str, ...]
    """Instruction sets that the native library was built for and that run here, best first; empty without a library."""


_SYS_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_SUPP = 0x1021
_XTILE_DATA = 1 << 18


def choose_kind(dtype: Dtype, features: AbstractSet[str], *, has_native_tiles: bool) -> Kind:
    """The kind of native kernels for a model that is computed in ``dtype`` on a processor with these features.

    ``has_native_tiles``: the native library was built with AMX, and may use it here. Where the processor has AMX and
    the library lacks it, torch computes all products in bfloat16, whatever their number of rows. AMX has no use in
    other precisions.
    """
    is_torch_better = dtype == "bfloat16" and features >= AMX_BF16 and not has_native_tiles
    return TORCH_LINEAR if is_torch_better else NATIVE


def processor_features() -> frozenset[str]:
    """Flags of the first processor as Linux names them, and ``TILES_GRANTED`` where it holds; empty on other
    systems."""
    try:
        flags = cpu_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return frozenset()
    return flags | {TILES_GRANTED} if grants_tiles() else flags


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Flags of the first processor in the text of ``/proc/cpuinfo``."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def grants_tiles() -> bool:
    """Whether this kernel lets processes ask for tile registers (Linux 5.16 and later; a guest's may forbid it)."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    supported = ctypes.c_uint64(0)
    try:
        code = ctypes.CDLL(None, use_errno=True).syscall(
            ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(_ARCH_GET_XCOMP_SUPP), ctypes.byref(supported)
        )
    except (OSError, AttributeError):
        return False
    return code == 0 and bool(supported.value & _XTILE_DATA)

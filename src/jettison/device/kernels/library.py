"""The native library: whether it is there, which instruction sets it has for this processor, and which of them compute
what they should. No torch: the choice of kernels is made where there are no tensors.

Not here: calling its operations with tensors (``native``), and compiling it (``build``).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jettison.device.kernels import build
from jettison.device.kernels.registry import KernelsUnavailableError
from jettison.device.kernels.selfcheck import passes_self_check

LIBRARY_PATH = Path(__file__).resolve().parent / build.LIBRARY_NAME

TILES = "amxbf16"
"""The variant with bfloat16 products in tile registers."""

_P, _L = ctypes.c_void_p, ctypes.c_long


@functools.cache
def open_library() -> ctypes.CDLL:
    """The library, built from the sources beside it. Raises KernelsUnavailableError."""
    how = "build it with `python -m jettison.device.kernels.build`"
    if not LIBRARY_PATH.exists():
        raise KernelsUnavailableError(f"the kernel library is not built; {how}")
    try:
        library = ctypes.CDLL(str(LIBRARY_PATH))
    except OSError as error:
        raise KernelsUnavailableError(f"the kernel library does not load ({error}); {how}") from error
    library.jettison_build_id.restype = library.jettison_variants.restype = ctypes.c_char_p
    if build.SOURCES.is_dir() and library.jettison_build_id().decode() != build.build_id():
        raise KernelsUnavailableError(f"the kernel library was built from other sources; {how}")
    return library


def supported_variants() -> list[str]:
    """Instruction sets that are both built and supported by this CPU, best first; empty without a library."""
    try:
        return _variants(open_library())
    except KernelsUnavailableError:
        return []


def working_variant(variant: str | None = None, among: Sequence[str] | None = None) -> str:
    """``variant``, or the best instruction set, that this CPU runs *and* that passes a self-check.

    ``among``: the instruction sets to choose from, best first (None: all that this CPU runs). Raises
    KernelsUnavailableError.
    """
    library = open_library()
    there = _variants(library)
    supported = there if among is None else [name for name in among if name in there]
    if variant is not None and variant not in supported:
        raise KernelsUnavailableError(f"no kernels for {variant!r} here; there are {', '.join(supported)}")
    failed = []
    for name in [variant] if variant is not None else supported:
        if passes_self_check(library, name):
            return name
        failed.append(name)
    raise KernelsUnavailableError(f"native kernels compute wrong results here ({', '.join(failed)})")


def _variants(library: ctypes.CDLL) -> list[str]:
    names = library.jettison_variants().decode().split()
    return [name for name in names if library.jettison_cpu_supports(name.encode())]


@functools.cache
def load_copy_rows() -> Any:
    """``jettison_copy_rows`` of csrc/copies.c; it needs no instruction set. Raises KernelsUnavailableError."""
    function = open_library().jettison_copy_rows
    function.argtypes, function.restype = (_P, _P, _L, _L, _L, _L, _P), None
    return function

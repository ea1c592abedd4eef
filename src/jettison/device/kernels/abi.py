"""The functions of the native library as ctypes calls them: types of arguments, codes of types and of errors.

No torch. Not here: loading the library (``library``), calling it with tensors (``native``), and their structs
(``bound``).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NoReturn

from jettison.device.dtypes import Dtype
from jettison.device.model.arithmetic import RmsNorm
from jettison.device.model.integers import IntegerForm

CODES: dict[Dtype, int] = {"float64": 0, "float32": 1, "bfloat16": 2}
"""Of types in ``kernels.c``."""

RMS_NORM_CODES: dict[RmsNorm, int] = {"rms": 0, "rms_once": 1, "rms_plus_one": 2}
"""Of kinds of norms, likewise."""

_P, _L, _I, _D = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_double
_ROWS = (_P, _L, _L, _P, _P, _L, _L)  # tables, row stride, max blocks, query lens, context lens, R, T
_ARENA = (_P, _L, _L, _L, _L)  # pointer, blocks, KV heads, block size, head dim
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "write_kv": (_I, _P, _L, _P, _L, *_ARENA, *_ROWS),
    "attention": (_I, _P, _L, _L, *_ARENA, *_ROWS, _P, _L, _P, _I, _P, _L, _D, _D, _I),
    "linear": (_I, _P, _L, _P, _L, _P, _P, _L, _I, _L, _L, _L, _I),
    "linear_slab": (_I, _P, _P, _L, _P, _P, _P, _L, _I, _L, _L, _L, _I),
    "pack_integers": (_P, _P, _P, _L, _P, _L, _L, _L, _L, _P),
    "gather_integers": (_I, _P, _P, _L, _L, _P, _L, _P, _L),
    "pack_rows": (_I, _P, _L, _L, _L, _L, _L, _P),
    "gather_rows": (_I, _P, _L, _L, _P, _L, _P, _L),
    "rms_norm": (_I, _P, _L, _P, _D, _P, _L, _L, _L, _L),
    "add_rms_norm": (_I, _P, _L, _P, _L, _P, _D, _P, _L, _L, _L, _I),
    "head_rms_norm": (_I, _P, _L, _P, _D, _L, _L, _L, _L),
    "rotary": (_I, _P, _L, _L, _P, _L, _L, _P, _P, _P, _I, _L, _L, _L, _L),
    "silu_mul": (_I, _P, _L, _P, _L, _L, _L),
    "attend_layer": (_I, _P, _P, _P, _P, _I),
    "feed_forward": (_I, _P, _P, _D, _L, _I),
    "experts": (_I, _P, _I),
    "argmax": (_I, _P, _L, _L, _L, _P, _I),
}
"""By the name of the operation; all return a code."""

Functions = dict[str, Any]
"""By the name of the operation."""


def functions_of(library: ctypes.CDLL, variant: str) -> Functions:
    """The library's, of one instruction set."""
    functions = {}
    for operation, argument_types in SIGNATURES.items():
        function = functions[operation] = getattr(library, f"jettison_{variant}_{operation}")
        function.argtypes, function.restype = argument_types, ctypes.c_int
    return functions


def int64s(*values: int) -> ctypes.Array[ctypes.c_int64]:
    """A struct of these fields; it must live as long as its address is used."""
    return (ctypes.c_int64 * len(values))(*values)


def form_fields(form: IntegerForm | None) -> tuple[int, int, int, int]:
    """``Form`` of csrc/integers.h. None: zeros, of another matrix."""
    if form is None:
        return 0, 0, 0, 0
    return form.bits, form.group_size, form.scale == "bfloat16", ("none", "zero", "min").index(form.offset)


@functools.cache
def form_struct(form: IntegerForm) -> ctypes.Array[ctypes.c_int64]:
    """The same, kept."""
    return int64s(*form_fields(form))


_ERRORS: dict[int, tuple[type[Exception], str]] = {
    1: (IndexError, "a block id lies outside the arena"),
    2: (IndexError, "a row needs more blocks than its block table has"),
    4: (ValueError, "lengths must be >= 0 and query_lens must add up to the number of tokens"),
    8: (IndexError, "a position lies outside the rotary tables"),
    16: (MemoryError, "no memory for the kernels' working space"),
    64: (IndexError, "a row lies outside the matrix"),
    128: (IndexError, "a token's expert is none of the layer's"),
}


def raise_error(code: int) -> NoReturn:
    """The exception that a code stands for."""
    error, message = _ERRORS.get(code, (RuntimeError, f"the kernel library failed with code {code}"))
    raise error(message)

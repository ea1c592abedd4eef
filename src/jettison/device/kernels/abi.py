"""The functions of the native library as ctypes calls them: types of arguments, codes of types and of errors.

Not here: loading the library and calling it (``native``), and the structs that it takes (``bound``).
"""

from __future__ import annotations

import ctypes
from typing import Any, NoReturn

import torch

from jettison.device.model.arithmetic import RmsNorm

DTYPE_CODES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2}
"""Codes of types in ``kernels.c``."""

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

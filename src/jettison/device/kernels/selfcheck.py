"""Small products and gates with known results: they guard against a variant of the C kernels that was miscompiled.

In numpy, as a controller checks, too, and has no tensors. Not here: which variants there are (``library``).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from jettison.device.dtypes import Dtype
from jettison.device.kernels.abi import CODES, Functions, form_struct, functions_of
from jettison.device.model.integers import IntegerForm

Array = npt.NDArray[Any]

_TOLERANCES: dict[Dtype, float] = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}


def passes_self_check(library: ctypes.CDLL, variant: str) -> bool:
    """Whether all of them have these results."""
    functions = functions_of(library, variant)
    # Sizes that go through every tile: 13 rows = 6 + 7 (or 3 and 2), 9 outputs = 2 * 4 + 1, 70 = whole chunks + rest.
    x = (np.arange(-70.0, 12 * 70) % 7).reshape(13, 70)
    w = (np.arange(9.0 * 70) % 5).reshape(9, 70)
    for dtype in CODES:
        gated = _gated(functions, dtype, np.concatenate((x, x), axis=1))
        if not _is_close(_product(functions, dtype, x, w), x @ w.T, dtype):
            return False
        if not _is_close(gated, x * x / (1 + np.exp(-x)), dtype):
            return False
        if dtype != "float64" and not (_multiplies_packed(functions, dtype) and _multiplies_integers(functions, dtype)):
            return False
    return True


def _multiplies_packed(functions: Functions, dtype: Dtype) -> bool:
    """49 rows = 32 + 16 + 1 of tiles (or 5 x 10 of registers), 75 outputs = 2 groups + 11 plain rows."""
    x = (np.arange(49.0 * 64) % 7).reshape(49, 64)
    w = (np.arange(75.0 * 64) % 5).reshape(75, 64)
    plain = _stored(w, dtype)
    packed = np.empty_like(plain)
    functions["pack_rows"](CODES[dtype], _at(plain), 64, 0, 75, 75, 64, _at(packed))
    return _is_close(_slab_product(functions, dtype, x, packed, 75, None), x @ w.T, dtype)


def _multiplies_integers(functions: Functions, dtype: Dtype) -> bool:
    """By 1 row and by 49, whose widening differs."""
    whole = (np.arange(64 * 64) % 15 - 7).astype(np.int8).reshape(64, 64)
    halves = np.full((64, 2), 0.5, dtype=np.float16)
    x = (np.arange(49.0 * 64) % 7).reshape(49, 64)
    for form in (IntegerForm(4, 32, "float16", "min"), IntegerForm(8, 32, "float16", "none")):
        has_offsets = form.offset == "min"
        slab = np.empty(form.num_bytes(64, 64), dtype=np.uint8)
        offsets = (_at(halves), 2) if has_offsets else (None, 0)
        functions["pack_integers"](form_struct(form), _at(whole), _at(halves), 2, *offsets, 0, 64, 64, _at(slab))
        weights = whole / 2.0 + (4.5 if has_offsets else 0.0)
        for rows in (x[:1], x):
            if not _is_close(_slab_product(functions, dtype, rows, slab, 64, form), rows @ weights.T, dtype):
                return False
    return True


def _product(functions: Functions, dtype: Dtype, x: Array, w: Array) -> Array:
    (rows, inner), columns = x.shape, len(w)
    left, right, out = _stored(x, dtype), _stored(w, dtype), _stored(np.zeros((rows, columns)), dtype)
    functions["linear"](
        CODES[dtype], _at(left), inner, _at(right), inner, None, _at(out), columns, False, rows, columns, inner, 1)
    return _read(out, dtype)


def _slab_product(
    functions: Functions, dtype: Dtype, x: Array, slab: Array, columns: int, form: IntegerForm | None
) -> Array:
    """By a matrix that is packed (None), or kept as integers."""
    rows, inner = x.shape
    left, out = _stored(x, dtype), _stored(np.zeros((rows, columns)), dtype)
    functions["linear_slab"](
        CODES[dtype], None if form is None else form_struct(form), _at(left), inner, _at(slab), None, _at(out), columns,
        False, rows, columns, inner, 1)
    return _read(out, dtype)


def _gated(functions: Functions, dtype: Dtype, gate_up: Array) -> Array:
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    both, out = _stored(gate_up, dtype), _stored(np.zeros((rows, columns)), dtype)
    functions["silu_mul"](CODES[dtype], _at(both), 2 * columns, _at(out), columns, rows, columns)
    return _read(out, dtype)


def _stored(values: Array, dtype: Dtype) -> Array:
    """As kernels take them. Numpy has no bfloat16, which is the upper half of a float32: all values here fit in it."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, dtype=dtype)
    return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _read(values: Array, dtype: Dtype) -> Array:
    if dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


def _is_close(actual: Array, wanted: Array, dtype: Dtype) -> bool:
    tolerance = _TOLERANCES[dtype]
    return np.allclose(actual, wanted, rtol=tolerance, atol=tolerance)


def _at(array: Array) -> int:
    return array.ctypes.data

"""A step's block tables, lengths and positions as addresses for C: their types and shapes are checked here, what is in
them there.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from jettison.device.kernels.base import fail
from jettison.device.kernels.operands import Int32Array

_NUMPY_INT32 = np.dtype(np.int32)


def pointer(array: Int32Array) -> int:
    """Address of a host int32 array with a contiguous last dimension."""
    if isinstance(array, Tensor):
        good, strides, unit, address = array.dtype is torch.int32, array.stride(), 1, array.data_ptr()
    else:
        good, strides, unit, address = array.dtype is _NUMPY_INT32, array.strides, 4, array.ctypes.data
    if not good and array.dtype not in (torch.int32, _NUMPY_INT32):
        fail(f"expected int32, got {array.dtype}")
    if strides[-1] != unit and array.shape[-1] > 1:
        fail("int32 rows must be contiguous")
    return address


def positions_pointer(positions: Int32Array) -> tuple[int, bool]:
    """Address of contiguous positions, and whether they are int64."""
    if positions.dtype is _NUMPY_INT32 or positions.dtype is torch.int32:
        return pointer(positions), False
    tensor = positions if isinstance(positions, Tensor) else torch.from_numpy(positions)
    if tensor.dtype != torch.int64 or not tensor.is_contiguous():
        fail(f"positions: expected contiguous int32 or int64, got {tensor.dtype}")
    return tensor.data_ptr(), True


class TableRows:
    """Pointers and sizes of a step's block tables and lengths, checked."""

    __slots__ = ("arguments", "keys")

    def __init__(self, tables: Int32Array, query_lens: Int32Array, context_lens: Int32Array) -> None:
        self.keys = (tables, query_lens, context_lens)
        if len(tables.shape) != 2:
            fail(f"block_tables: expected [rows, blocks], got {tuple(tables.shape)}")
        rows, blocks = tables.shape
        if tuple(query_lens.shape) != (rows,) or tuple(context_lens.shape) != (rows,):
            fail(
                f"block_tables {tuple(tables.shape)}, query_lens {tuple(query_lens.shape)}, "
                f"context_lens {tuple(context_lens.shape)} do not match"
            )
        stride = tables.stride()[0] if isinstance(tables, Tensor) else tables.strides[0] // 4
        self.arguments = (pointer(tables), stride, blocks, pointer(query_lens), pointer(context_lens), rows)


class StepRows(NamedTuple):
    """A step's rows and positions for C, and the arrays that they point to."""

    tables: Int32Array
    positions: Int32Array
    others: tuple[Int32Array, ...]
    addresses: ctypes.Array[ctypes.c_int64]

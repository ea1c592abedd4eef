"""Tensors as they lie in a safetensors file, of which only what is asked for is read.

Not here: the file and its header (``tensorfile``), and what is made of tensors (``quantized``).
"""

from __future__ import annotations

import math
from pathlib import Path
from types import EllipsisType
from typing import NamedTuple, Protocol, overload

import torch
from safetensors import SafetensorError
from torch import Tensor

from jettison.device.bytesview import as_numpy_uint8
from jettison.device.model.tensorfile import TensorFile, errors_of

WINDOW_BYTES = 16 << 20
"""Of a matrix that is read by columns, as many are read at once as have so many bytes: a row is a read of its own."""
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
    "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class Lazy(Protocol):
    """A stored tensor. What is cut out of it by slices is read; so is all, by ``[...]``. A tensor in memory is one,
    too."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @overload
    def __getitem__(self, at: int) -> Lazy: ...
    @overload
    def __getitem__(self, at: slice | tuple[slice, slice] | EllipsisType) -> Tensor: ...


class _Window(NamedTuple):
    first: int
    """Column."""
    data: Tensor


class StoredFile(TensorFile):
    """One file, open while inside. Raises ModelError, also where what its header names is not there."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.windows: dict[int, _Window] = {}
        """Columns that have been read, by where their matrix begins. For the owner to clear."""

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.windows.clear()

    def tensor(self, name: str) -> tuple[str, StoredTensor]:
        """One by its name, with its number type."""
        entry, at = self.entry(name)
        dtype, (start, end) = _TYPES.get(entry.dtype), entry.data_offsets
        num_bytes = None if dtype is None else math.prod(entry.shape) * dtype.itemsize
        if dtype is None or min(entry.shape, default=0) < 0 or start < 0 or end - start != num_bytes:
            what = f"tensor {name} of type {entry.dtype}, shape {entry.shape} has {end - start} bytes"
            with errors_of(self.path):
                raise SafetensorError(what)
        return entry.dtype, StoredTensor(self, dtype, entry.shape, at)

    def read(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int, row_step_bytes: int = 0) -> Tensor:
        """A new tensor, from there on in the file. ``row_step_bytes``: from one row to the next; 0: they are all in one
        piece."""
        tensor = torch.empty(shape, dtype=dtype)
        into = as_numpy_uint8(tensor).data
        size = len(into) // shape[0] if row_step_bytes else len(into)
        with errors_of(self.path):
            for row in range(shape[0] if row_step_bytes else 1):
                self.fill(into[row * size : (row + 1) * size], offset + row * row_step_bytes)
        return tensor


class StoredTensor:
    """``Lazy`` over a file."""

    def __init__(self, file: StoredFile, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> None:
        self.shape = shape
        self._file = file
        self._dtype = dtype
        self._offset = offset

    @overload
    def __getitem__(self, at: int) -> StoredTensor: ...
    @overload
    def __getitem__(self, at: slice | tuple[slice, slice] | EllipsisType) -> Tensor: ...
    def __getitem__(self, at: int | slice | tuple[slice, slice] | EllipsisType) -> StoredTensor | Tensor:
        if isinstance(at, tuple):
            rows, columns = at
            return self._columns(columns)[rows]
        if isinstance(at, EllipsisType):
            return self._file.read(self.shape, self._dtype, self._offset)
        row_bytes = math.prod(self.shape[1:]) * self._dtype.itemsize
        if isinstance(at, int):
            return StoredTensor(self._file, self._dtype, self.shape[1:], self._offset + at * row_bytes)
        start, end, _ = at.indices(self.shape[0])
        return self._file.read((end - start, *self.shape[1:]), self._dtype, self._offset + start * row_bytes)

    def _columns(self, wanted: slice) -> Tensor:
        """Of a matrix."""
        num_rows, num_columns = self.shape
        start, end, _ = wanted.indices(num_columns)
        window = self._file.windows.get(self._offset)
        if window is None or not window.first <= start <= end <= window.first + window.data.shape[1]:
            width = max(end - start, WINDOW_BYTES // (num_rows * self._dtype.itemsize))
            window = self._file.windows[self._offset] = self._window(start, min(start + width, num_columns))
        return window.data[:, start - window.first : end - window.first]

    def _window(self, first: int, end: int) -> _Window:
        num_rows, num_columns = self.shape
        if (first, end) == (0, num_columns):
            return _Window(0, self[...])
        size = self._dtype.itemsize
        rows = self._file.read((num_rows, end - first), self._dtype, self._offset + first * size, num_columns * size)
        return _Window(first, rows)

"""Tensors as they lie in a safetensors file, of which only what is asked for is read.

The file is read, not mapped: where another process cuts a mapped file short (``cp`` over it begins with that), the
kernel ends its reader by SIGBUS, and no line names the file.
Not here: which tensors a file has to hold (``checkpoint``), and what is made of them (``quantized``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import NamedTuple, Protocol, overload

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from jettison.device.bytesview import as_numpy_uint8
from jettison.device.model.standins import why_not_itself
from jettison.errors import ModelError

WINDOW_BYTES = 16 << 20
"""Of a matrix that is read by columns, as many are read at once as have so many bytes: a row is a read of its own."""
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
    "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
"""As the library has it: the first bytes of a file of another kind may say anything."""
_METADATA = "__metadata__"


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Errors of the library and the system become ModelError, which names the file."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        reason = str(error).partition("\n")[0]
        told = why_not_itself(path) or f"truncated or not safetensors ({reason}); download the file again"
        raise ModelError(f"{path}: {told}") from None


class Lazy(Protocol):
    """A stored tensor. What is cut out of it by slices is read; so is all, by ``[...]``. A tensor in memory is one,
    too."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @overload
    def __getitem__(self, at: int) -> Lazy: ...
    @overload
    def __getitem__(self, at: slice | tuple[slice, slice] | EllipsisType) -> Tensor: ...


class Entry(msgspec.Struct):
    """A tensor in a file's header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Window(NamedTuple):
    first: int
    """Column."""
    data: Tensor


class StoredFile:
    """One file, open while inside. Raises ModelError, also where what its header names is not there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header: dict[str, msgspec.Raw] = {}
        self._data_at = 0
        self.windows: dict[int, _Window] = {}
        """Columns that have been read, by where their matrix begins. For the owner to clear."""

    def __enter__(self) -> StoredFile:
        with errors_of(self._path):
            self._file = open(self._path, "rb", buffering=0)
        try:
            with errors_of(self._path):
                self._read_header()
        except BaseException:
            self._file.close()
            raise
        return self

    def _read_header(self) -> None:
        length = int.from_bytes(self._file.read(_LENGTH_BYTES) or b"", "little")
        self._data_at = _LENGTH_BYTES + length
        if length > _MOST_HEADER_BYTES or self._data_at > self._size():
            raise SafetensorError("its header is cut off")
        header = bytearray(length)
        self._fill(memoryview(header), _LENGTH_BYTES)
        try:
            self._header = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError as error:
            raise SafetensorError(f"its header: {error}") from None

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.windows.clear()

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def entries(self) -> dict[str, Entry]:
        """All tensors by their names, of any number types, where the file has just the bytes that its header names."""
        with errors_of(self._path):
            try:
                entries = {
                    name: msgspec.json.decode(raw, type=Entry) for name, raw in self._header.items()
                    if name != _METADATA}
            except msgspec.DecodeError as error:
                raise SafetensorError(f"its header: {error}") from None
            end = self._data_at
            for start, until in sorted(entry.data_offsets for entry in entries.values()):
                if self._data_at + start != end or until < start:
                    raise SafetensorError(f"its header: no tensor begins at byte {end}")
                end = self._data_at + until
            if end != self._size():
                raise SafetensorError(f"it has {self._size()} bytes where its header names {end}")
            return entries

    def tensor(self, name: str) -> tuple[str, StoredTensor]:
        """One by its name, with its number type."""
        with errors_of(self._path):
            return self._entry(name)

    def _entry(self, name: str) -> tuple[str, StoredTensor]:
        try:
            entry = msgspec.json.decode(self._header[name], type=Entry)
        except (KeyError, msgspec.DecodeError):
            raise SafetensorError(f"it has no tensor {name}") from None
        dtype, (start, end) = _TYPES.get(entry.dtype), entry.data_offsets
        num_bytes = None if dtype is None else math.prod(entry.shape) * dtype.itemsize
        if dtype is None or min(entry.shape, default=0) < 0 or start < 0 or end - start != num_bytes:
            raise SafetensorError(f"tensor {name} of type {entry.dtype}, shape {entry.shape} has {end - start} bytes")
        return entry.dtype, StoredTensor(self, dtype, entry.shape, self._data_at + start)

    def read(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int, row_step_bytes: int = 0) -> Tensor:
        """A new tensor, from there on in the file. ``row_step_bytes``: from one row to the next; 0: they are all in one
        piece."""
        tensor = torch.empty(shape, dtype=dtype)
        into = as_numpy_uint8(tensor).data
        size = len(into) // shape[0] if row_step_bytes else len(into)
        with errors_of(self._path):
            for row in range(shape[0] if row_step_bytes else 1):
                self._fill(into[row * size : (row + 1) * size], offset + row * row_step_bytes)
        return tensor

    def _fill(self, into: memoryview, offset: int) -> None:
        while into.nbytes:
            num_bytes = os.preadv(self._file.fileno(), [into], offset)
            if not num_bytes:
                raise OSError(f"it ends at byte {offset}")
            into, offset = into[num_bytes:], offset + num_bytes


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

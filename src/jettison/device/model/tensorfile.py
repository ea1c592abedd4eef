"""A safetensors file as its header describes it. No torch.

The file is read, not mapped: where another process cuts a mapped file short (``cp`` over it begins with that), the
kernel ends its reader by SIGBUS, and no line names the file.
Not here: which tensors a file has to hold (``checkpoint``), and tensors (``stored``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec
from safetensors import SafetensorError

from jettison.device.model.standins import why_not_itself
from jettison.errors import ModelError

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


class Entry(msgspec.Struct):
    """A tensor in a file's header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class TensorFile:
    """One file, open while inside. Raises ModelError, also where what its header names is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header: dict[str, msgspec.Raw] = {}
        self._data_at = 0

    def __enter__(self) -> Self:
        with errors_of(self.path):
            self._file = open(self.path, "rb", buffering=0)
        try:
            with errors_of(self.path):
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
        self.fill(memoryview(header), _LENGTH_BYTES)
        try:
            self._header = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError as error:
            raise SafetensorError(f"its header: {error}") from None

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def entries(self) -> dict[str, Entry]:
        """All tensors by their names, of any number types, where the file has just the bytes that its header names."""
        with errors_of(self.path):
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

    def entry(self, name: str) -> tuple[Entry, int]:
        """One tensor by its name, and the byte of the file at which it begins."""
        with errors_of(self.path):
            try:
                entry = msgspec.json.decode(self._header[name], type=Entry)
            except (KeyError, msgspec.DecodeError):
                raise SafetensorError(f"it has no tensor {name}") from None
            return entry, self._data_at + entry.data_offsets[0]

    def fill(self, into: memoryview, offset: int) -> None:
        """With the bytes from there on in the file. Raises OSError."""
        while into.nbytes:
            num_bytes = os.preadv(self._file.fileno(), [into], offset)
            if not num_bytes:
                raise OSError(f"it ends at byte {offset}")
            into, offset = into[num_bytes:], offset + num_bytes

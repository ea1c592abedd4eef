"""The files of a batch that ends: every line of its input once, in order, in one of the two. Runs in a thread."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from jettison.errors import NotReadyError
from jettison.jsontext import in_one_line
from jettison.server.batches.lines import custom_id_in, read_lines
from jettison.server.batches.records import (
    ERROR_SUFFIX,
    NEVER_RUN,
    OUTPUT_SUFFIX,
    Batch,
    BatchError,
    Result,
    Status,
    StoredFile,
    error_line,
    new_id,
)
from jettison.server.batches.store import Store

PIECE_BYTES = 256 << 10
PAUSE_S = 0.002
"""Pause between pieces: a file of 200 MB takes some seconds, and streams are not delayed."""


def write_outcome(store: Store, batch: Batch, ends_as: Status, now_s: int, max_line_bytes: int) -> list[StoredFile]:
    """Output and error file, each only if it has a line, written and synced among the store's incoming files."""
    files: list[StoredFile] = []
    with ExitStack() as opened:
        writers = {
            is_error: opened.enter_context(_Writer(store, batch, is_error, now_s)) for is_error in (False, True)
        }
        for result in _lines(store, batch, ends_as, max_line_bytes):
            writers[result.is_error].write(in_one_line(result.body))  # older stores may have line ends in it
        files += [file for is_error in (False, True) if (file := writers[is_error].finish()) is not None]
    return files


def _lines(store: Store, batch: Batch, ends_as: Status, max_line_bytes: int) -> Iterator[Result]:
    """A result for each line: its own, or the reason why it never ran."""
    results = store.results(batch.seq)
    at = next(results, None)
    for number, raw in read_lines(store.path_of(batch.input_file_id), max_line_bytes):
        if at is not None and at.line == number:
            yield at
            at = next(results, None)
        elif ends_as in NEVER_RUN:
            code, message = NEVER_RUN[ends_as]
            error = BatchError(code=code, message=message, line=number)
            yield Result(number, True, error_line(custom_id_in(raw), error))
    assert at is None, "a result of a line that the file does not have"


class _Writer:
    """One of the two files; it appears with its first line."""

    def __init__(self, store: Store, batch: Batch, is_error: bool, now_s: int) -> None:
        self._store = store
        self._id, self._owner, self._now_s = new_id("file-"), batch.owner, now_s
        self._name = f"{batch.id}{ERROR_SUFFIX if is_error else OUTPUT_SUFFIX}"
        self._path: Path = store.incoming(self._id)
        self._file: IO[bytes] | None = None
        self._num_bytes = self._num_since_pause = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is None:
            return
        with suppress(OSError):  # a full disk, or the server's end: the file is written again
            self._file.close()
        if kind is not None:
            self._path.unlink(missing_ok=True)

    def write(self, line: bytes) -> None:
        if self._file is None:
            self._file = open_private(self._path)
        self._file.write(line + b"\n")
        self._num_bytes += len(line) + 1
        self._num_since_pause += len(line) + 1
        if self._num_since_pause >= PIECE_BYTES:
            self._num_since_pause = 0
            if not self._store.is_open:
                raise NotReadyError("The server has ended.")  # this thread must not keep its process
            time.sleep(PAUSE_S)

    def finish(self) -> StoredFile | None:
        if self._file is None:
            return None
        self._file.flush()
        os.fsync(self._file.fileno())
        return StoredFile(
            id=self._id, owner=self._owner, filename=self._name, purpose="batch_output", num_bytes=self._num_bytes,
            created_at=self._now_s)


def open_private(path: Path) -> IO[bytes]:
    """A new file that only this user can read, as it holds prompts and answers."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")

"""The lines of a trace file, plain or packed: with their numbers, bounded in length, and with one error for whatever
stands in the way. What a line says is for ``traces``."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from jettison.errors import TraceError

MAX_LINE_CHARS = 8 << 20
"""Most characters of a line; Mooncake's longest have a few thousand."""


@dataclass(slots=True)
class Lines:
    """Lines of a file with the number (from 1) of the last one taken."""

    file: IO[str]
    number: int = 0
    _ahead: list[str] = field(default_factory=list)
    """Lines that were put back, the next one last."""

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        line = self._ahead.pop() if self._ahead else self.file.readline(MAX_LINE_CHARS)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) >= MAX_LINE_CHARS:
            raise TraceError(f"line {self.number} has more than {MAX_LINE_CHARS} characters")
        return line

    def put_back(self, taken: Sequence[str]) -> None:
        """Have the lines that were ``taken`` last come again."""
        self._ahead += reversed(taken)
        self.number -= len(taken)


@contextmanager
def opened(path: Path) -> Iterator[Lines]:
    """The file's lines, unpacked; every error while they are read becomes a TraceError with the file's name."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            binary = gzip.GzipFile(fileobj=raw) if packed else raw
            with io.TextIOWrapper(binary, encoding="utf-8-sig", newline=None) as text:
                yield Lines(text)
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError; a cut member is an EOFError
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        why = f"not a text file in UTF-8 ({error.reason} at byte {error.start})"
        raise TraceError(f"{path}: {why}; it may be in UTF-16 or Latin-1, or packed otherwise than by gzip") from error
    except TraceError as error:
        raise error if str(error).startswith(str(path)) else TraceError(f"{path}: {error}") from None

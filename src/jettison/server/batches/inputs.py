"""Detects files of requests that are not plain lines of JSON: their kind is named in errors, and unambiguous kinds are
accepted.

Files come from spreadsheets, from shells that write UTF-16, from ``json.dump(..., indent=2)``, packed or cut off; each
looks like a first line that is no JSON. Files are processed as streams, never whole in memory.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from jettison.errors import UserError
from jettison.server.batches.values import MAX_VALUE_CHARS, json_values

Shape = Literal["lines", "array", "values", "csv", "markup", "text", "nul", "empty"]

_HEAD_BYTES = 1 << 20

_PACKED = ((b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ\x00", "xz"))
_OTHERS = (
    (b"\x28\xb5\x2f\xfd", "a zstd file: unpack it (zstd -d)"), (b"PK\x03\x04", "a zip archive: unpack it"),
    (b"PAR1", "a Parquet file: write its rows as JSON lines"), (b"%PDF", "a PDF"), (b"SQLite format 3", "a database"),
    (b"version https://git-lfs", "a Git LFS pointer: fetch what it stands for (git lfs pull)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it"), (b"\x04\x22\x4d\x18", "an lz4 file: unpack it"),
)  # fmt: skip
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
"""Byte order marks. UTF-32's come before UTF-16's, as one of them begins with one of UTF-16."""
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)

ONE_A_LINE = "a batch file has one JSON object a line, in UTF-8"
SAVE = "save it as UTF-8"


@dataclass(frozen=True, slots=True)
class InputKind:
    """The way to read a file."""

    packing: str | None
    """``gzip``, ``bzip2`` or ``xz``; None: not packed."""
    encoding: str
    """Python's name of the encoding; ``utf-8`` where bytes may stay as they are."""
    shape: Shape
    other: str | None = None
    """The kind of a file that holds no requests; None: it may hold some."""

    @property
    def is_plain(self) -> bool:
        """Whether it has lines in UTF-8, of any content."""
        return self.packing is None and self.encoding in ("utf-8", "utf-8-sig") and not self.is_apart

    @property
    def is_apart(self) -> bool:
        """Whether its requests are JSON values that are not one in a line."""
        return self.shape in ("array", "values")

    @property
    def cause(self) -> str | None:
        """Why it is no file of JSON lines, as the end of a sentence that begins with the file; None: it may be one."""
        if self.other is not None:
            return f"is {self.other}; {ONE_A_LINE}"
        told = []
        if self.packing is not None:
            told.append(f"is compressed ({self.packing})")
        if self.encoding not in ("utf-8", "utf-8-sig"):
            told.append(f"is in {self.encoding.upper()}")
        if (shape := _SHAPES.get(self.shape)) is not None:
            told.append(shape)
        return f"{' and '.join(told)}; {ONE_A_LINE}" if told else None

    @property
    def note(self) -> str | None:
        """The conversion of the file, for people; None where it needs none."""
        done = []
        if self.packing is not None:
            done.append(f"{self.packing}, unpacked")
        if self.encoding not in ("utf-8", "utf-8-sig"):
            done.append(f"{self.encoding.upper()}, read as that")
        if self.shape == "array":
            done.append("a JSON array, its elements taken as lines (line numbers count them)")
        elif self.shape == "values":
            done.append("JSON objects that are no lines, each taken as one (line numbers count them)")
        return "; ".join(done) or None

    @property
    def is_taken(self) -> bool:
        """Whether it is read: its requests are unambiguous, or the error of its first line is the clearest message."""
        return self.other is None and self.shape in ("lines", "array", "values", "text")


_SHAPES: dict[str, str] = {
    "array": "is one JSON array",
    "values": "has JSON objects that do not stand one in a line (spread over several, or with commas between them)",
    "csv": "looks like a table (CSV)",
    "markup": "is HTML or XML, perhaps the page of a download that failed",
    "nul": "has nothing but NUL bytes: it was not written, or not all of it came",
    "empty": "is empty",
}


def kind_of(path: Path) -> InputKind:
    """The kind of a file, by its first bytes. Raises OSError; UserError for a packed file with a damaged begin."""
    with path.open("rb") as file:
        begin = file.read(32)
    for magic, other in _OTHERS:
        if begin.startswith(magic):
            return InputKind(None, "utf-8", "text", other)
    packing = next((name for magic, name in _PACKED if begin.startswith(magic)), None)
    with _unpacked(path, packing) as stream:
        head = stream.read(_HEAD_BYTES)
    if head[257:262] == b"ustar":
        return InputKind(packing, "utf-8", "text", "a tar archive: unpack it")
    encoding = _encoding(head)
    text = codecs.getincrementaldecoder(encoding)("replace").decode(head)
    return InputKind(packing, encoding, _shape(text, is_all=len(head) < _HEAD_BYTES))


def _encoding(head: bytes) -> str:
    for bom, name in _BOMS:
        if head.startswith(bom):
            return name
    # JSON begins with two ASCII characters: the places of zeros give the width of its characters (RFC 4627).
    zeros = "".join("0" if byte == 0 else "x" for byte in head[:4])
    widths = {"x0x0": "utf-16-le", "0x0x": "utf-16-be", "x000": "utf-32-le", "000x": "utf-32-be"}
    return widths.get(zeros, "utf-8")


def _shape(text: str, *, is_all: bool) -> Shape:
    text = text.removeprefix("\ufeff").lstrip()
    if not text.strip("\0 \r\n\t"):
        return "nul" if "\0" in text else "empty"
    if text[0] == "[":
        first, _, rest = text.partition("\n")
        return "lines" if rest.strip("\0 \r\n\t") and _is_json(first) else "array"
    if text[0] == "{":
        return _shape_of_objects(text, is_all)
    first = text.partition("\n")[0]
    if text[0] == "<":
        return "markup"
    return "csv" if sum(map(first.count, ",;\t")) >= 2 and "{" not in first[:40] else "text"


def _shape_of_objects(text: str, is_all: bool) -> Shape:
    first, end, _ = text.partition("\n")
    if not end and not is_all:
        return "lines"  # a line longer than the bytes read
    if _is_json(first):
        return "lines"
    try:
        value, stop = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        # A value that ends beyond the bytes read: an object that begins with a line of its brace alone, or with one
        # key.
        return "values" if not is_all and len(first.strip()) < 80 and _opens(first) else "lines"
    rest = text[stop:].partition("\n")[0].strip()
    is_apart = "\n" in text[:stop] or rest in ("", ",")
    return "values" if isinstance(value, dict) and is_apart else "lines"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _opens(first: str) -> bool:
    return first.rstrip()[-1:] in ("{", ",", "[")


@contextmanager
def _unpacked(path: Path, packing: str | None) -> Iterator[IO[bytes]]:
    openers = {None: io.open, "gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
    try:
        with openers[packing](path, "rb") as stream:  # type: ignore[operator]  # four functions of one use
            yield stream
    except _DAMAGE as error:
        raise UserError(f"{path}: {packing}, and damaged: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {_bad_text(error)}") from None
    except OSError as error:
        if packing is None or error.errno is not None:
            raise
        raise UserError(f"{path}: {packing}, and damaged: {error}") from None  # bz2 has no error of its own


def _bad_text(error: UnicodeDecodeError) -> str:
    if error.encoding.lower().replace("_", "-").startswith("utf-8"):
        return f"not UTF-8 (byte 0x{error.object[error.start]:02X}): it may be Latin-1 or Windows-1252; {SAVE}"
    return f"cut off, or not all in {error.encoding.upper()} ({error.reason})"


def whole_cause(path: Path) -> str | None:
    """The single cause, as a sentence, why no line of a file can run; None where the lines have faults of their own."""
    try:
        cause = kind_of(path).cause
    except UserError as error:
        cause = f"cannot be unpacked ({str(error).removeprefix(f'{path}: ')}); {ONE_A_LINE}"
    return None if cause is None else f"The file {cause}."


def lines_of(path: Path, kind: InputKind) -> Iterator[bytes]:
    """The file's requests in UTF-8, each as one line. Raises UserError where the file is damaged, OSError."""
    with _unpacked(path, kind.packing) as stream:
        if not kind.is_apart and kind.encoding.startswith("utf-8"):
            while raw := stream.readline(MAX_VALUE_CHARS):
                yield raw
            return
        text = io.TextIOWrapper(stream, kind.encoding, newline=None if kind.is_apart else "\n")
        if not kind.is_apart:
            while line := text.readline(MAX_VALUE_CHARS):
                yield line.encode()
            return
        for value in json_values(path, text, is_array=kind.shape == "array"):
            yield value.replace("\n", " ").encode() + b"\n"

"""Trace files in and out. A reader turns a file into a :class:`Workload` or raises; nothing is ever half-loaded.

The formats are in ``formats``. Cutting, thinning and rescaling are in ``shaping``, made-up arrivals in ``synthetic``;
nothing here knows about servers.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from jettison.errors import ConfigError, TraceError
from jettison.workload.formats import (
    CLASSES,
    FORMATS,
    MOONCAKE_STAMP_STEP_S,
    OUR_COLUMNS,
    OUR_EXTRA_COLUMNS,
    PART,
    TENANT_COLUMN,
    BadRow,
    Record,
    TraceFormat,
)
from jettison.workload.rows import Columns, Floats, TraceRow, Workload
from jettison.workload.stamps import Stamps, fit, look_at

__all__ = ["MOONCAKE_STAMP_STEP_S", "TraceRow", "Workload", "read_csv", "read_trace", "write_trace"]

_SHOWN_BAD_ROWS = 5
_MAX_LINE_CHARS = 8 << 20
"""Longer lines are no trace's; Mooncake's longest have a few thousand characters."""


def read_trace(
    path: Path, *, jitter: bool | None = None, seed: int = 0, skip_bad_rows: bool = False
) -> Workload:
    """Read a trace file (gzip or plain), recognising its format by the first line.

    ``jitter`` spreads each arrival uniformly inside the file's time-stamp step with a generator seeded by
    ``seed``; None means the format's default: for Mooncake on where its stamps are seen to be steps (``stamps``), off
    for the others. ``skip_bad_rows``: leave them out; the workload says how many and which (``skipped_rows``).
    Arrivals are shifted so that the first source stamp is time 0; not those of our own format, which count from their
    workload's start, but for a recording's second part and later ones, before which nothing is in the file. Parts that
    follow each other in one file are one recording.

    Raises TraceError for a file that cannot be read, has no known header, has no usable row, or has bad
    rows and these are not to be left out: the message lists the first few line numbers with reasons, and the count.
    Raises ConfigError for ``jitter=True`` on a file whose stamps are no steps.
    """
    with _opened(path) as lines:
        found = _detect(path, lines)
        read, bad = _parse_rows(path, found, lines)
    skipped = bad.end(skip_bad_rows)
    trace_format, columns = found.trace_format, read.columns()
    if not len(columns):
        raise TraceError(f"{path}: no usable request in the file{f' ({skipped})' if skipped else ''}")
    notes = [*found.notes, f"{len(columns)} requests read as {trace_format.name}"]
    if read.num_failed:
        notes.append(f"{read.num_failed} failed requests (0 response tokens) dropped")
    if skipped:
        notes.append(skipped)
    stamps = look_at(columns.arrival_s)
    if not trace_format.is_ours or found.first_part > 1:
        start_s = float(columns.arrival_s.min())
        columns = columns.with_arrivals(columns.arrival_s - start_s)
        if trace_format.is_ours:
            notes.append(f"part {found.first_part} of a recording: arrivals count from {start_s:.2f} s of it")
    step_s = _jitter_step_s(path, trace_format, columns.arrival_s, stamps, jitter)
    if step_s is not None:
        offsets = np.random.default_rng(seed).uniform(0.0, step_s, size=len(columns))
        columns = columns.with_arrivals(columns.arrival_s + offsets)
        notes.append(f"arrivals jittered uniformly inside {step_s:g} s steps, seed {seed}")
    return Workload(
        columns.in_order(), name=stem(path), source=found.source or f"{trace_format.name} ({path.name})",
        notes=tuple(notes), span_s=found.span_s, stamps=stamps.describe(), skipped_rows=(skipped,) if skipped else (),
    )


def _jitter_step_s(
    path: Path, trace_format: TraceFormat, arrival_s: Floats, stamps: Stamps, jitter: bool | None
) -> float | None:
    """The step to jitter in; None: arrivals stay. Raises ConfigError where it is asked for and there is none."""
    if jitter is False or (jitter is None and not (trace_format.jitter_by_default and stamps.step_s)):
        return None
    published_s = trace_format.stamp_step_s
    if published_s is not None and fit(arrival_s, published_s):
        return published_s
    if stamps.step_s is None:
        raise ConfigError(f"{path}: time stamps are exact, there is no step to jitter in: {stamps.describe()}")
    return stamps.step_s


def stem(path: Path) -> str:
    """The file's name without what says how it is packed."""
    name = path.name
    for suffix in (".gz", ".csv", ".jsonl"):
        name = name.removesuffix(suffix)
    return name


# --- lines


@dataclass(slots=True)
class _Lines:
    """Lines of a file with the number (from 1) of the last one taken."""

    file: IO[str]
    number: int = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self.file.readline(_MAX_LINE_CHARS)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) >= _MAX_LINE_CHARS:
            raise TraceError(f"line {self.number} has more than {_MAX_LINE_CHARS} characters")
        return line


@contextmanager
def _opened(path: Path) -> Iterator[_Lines]:
    """The file's lines, unpacked; whatever goes wrong while they are read is a TraceError with the file's name."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            binary = gzip.GzipFile(fileobj=raw) if packed else raw
            with io.TextIOWrapper(binary, encoding="utf-8-sig", newline=None) as text:
                yield _Lines(text)
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError; a cut member is an EOFError
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a text file ({error.reason} at byte {error.start})") from error
    except TraceError as error:
        raise error if str(error).startswith(str(path)) else TraceError(f"{path}: {error}") from None


# --- recognising


@dataclass(slots=True)
class _Found:
    trace_format: TraceFormat
    header: list[str]
    first: str | None
    """A line of data that was read ahead."""
    notes: list[str] = field(default_factory=list)
    source: str | None = None
    span_s: float | None = None
    first_part: int = 1
    last_part: int | None = None
    """Of a recording, as far as it has been read; None: it is none."""


def _detect(path: Path, lines: _Lines) -> _Found:
    comments: list[str] = []
    first = next(lines, None)
    while first is not None and first.startswith("#"):
        comments.append(first[1:].strip())
        first = next(lines, None)
    if first is None:
        raise TraceError(f"{path}: the file is empty")
    names, is_json = _names(first)
    candidates = [f for f in FORMATS if f.is_json_lines == is_json and set(f.columns) <= set(names)]
    if not candidates:
        known = "; ".join(f"{item.name}: {', '.join(item.columns)}" for item in FORMATS)
        raise TraceError(f"{path}: line {lines.number} is no header of a known trace format ({known})")
    ahead = first if is_json else next(lines, None)
    chosen = next((f for f in candidates if _fits(f, names, ahead)), candidates[-1])
    found = _Found(chosen, names, ahead)
    for comment in comments if chosen.is_ours else ():
        key, _, value = comment.partition(": ")
        if key == "source":
            found.source = value
        elif key == "span_s":
            found.span_s = _span_s(path, value)
        elif key == "note":
            found.notes.append(value)
        elif key == PART:
            found.first_part = found.last_part = _part(path, value)
    return found


def _part(path: Path, text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) >= 1:
        return int(text)
    raise TraceError(f"{path}: {PART} is {text!r}, a number from 1 is expected")


def _span_s(path: Path, text: str) -> float:
    try:
        value = float(text)
        if 0 <= value < float("inf"):
            return value
    except ValueError:
        pass
    raise TraceError(f"{path}: span_s is {text!r}, seconds are expected")


def _names(first: str) -> tuple[list[str], bool]:
    try:
        parsed = json.loads(first)
    except (ValueError, RecursionError):
        return [name.strip() for name in _cells(first.strip())], False
    return (list(parsed), True) if isinstance(parsed, dict) else ([], False)


def _fits(trace_format: TraceFormat, names: list[str], ahead: str | None) -> bool:
    if trace_format.matches is None:
        return True
    cells = _cells(ahead) if ahead is not None else []
    return len(cells) == len(names) and trace_format.matches(dict(zip(names, cells, strict=True)))


# --- rows


class _Read:
    """Growing columns, 25 bytes a request."""

    def __init__(self) -> None:
        self.arrival_s, self.input_tokens, self.output_tokens = array("d"), array("i"), array("i")
        self.cached_tokens, self.is_offline, self.tenant = array("i"), bytearray(), array("i")
        self.num_failed = 0

    def add(self, row: TraceRow) -> None:
        self.arrival_s.append(row.arrival_s)
        self.input_tokens.append(row.input_tokens)
        self.output_tokens.append(row.output_tokens)
        self.cached_tokens.append(row.cached_tokens)
        self.is_offline.append(row.is_offline)
        self.tenant.append(row.tenant)

    def columns(self) -> Columns:
        return Columns(
            np.array(self.arrival_s), np.array(self.input_tokens), np.array(self.output_tokens),
            np.array(self.cached_tokens), np.frombuffer(bytes(self.is_offline), dtype=np.bool_),
            np.array(self.tenant),
        )  # fmt: skip


def _parse_rows(path: Path, found: _Found, lines: _Lines) -> tuple[_Read, BadRows]:
    read, bad = _Read(), BadRows(path)
    for number, line in _data_lines(path, found, lines):
        try:
            row = found.trace_format.parse(_record(found, line))
        except BadRow as error:
            bad.add(number, error)
            continue
        if row is None:
            read.num_failed += 1
        else:
            read.add(row)
    return read, bad


class BadRows:
    """Lines of one file that cannot be used: the first few with their reasons, and how many."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shown: list[str] = []
        self._count = 0

    def add(self, number: int, error: BadRow) -> None:
        """One more."""
        self._count += 1
        if len(self._shown) < _SHOWN_BAD_ROWS:
            self._shown.append(f"line {number}: {error}")

    def end(self, skips: bool) -> str | None:
        """When all rows have been read: what to tell of those that are left out; None where there are none.

        Raises TraceError unless ``skips``: nothing of the file is loaded then.
        """
        if not self._count:
            return None
        more = f"; and {self._count - len(self._shown)} more" if self._count > len(self._shown) else ""
        how_many = "1 bad row" if self._count == 1 else f"{self._count:,} bad rows"
        which = f"{'; '.join(self._shown)}{more}"
        if not skips:
            raise TraceError(f"{self._path}: {how_many}, nothing loaded: {which}")
        return f"{how_many} of {self._path.name} left out: {which}"


def read_csv(
    path: Path, columns: tuple[str, ...], parse: Callable[[Record], None], *, has_header: bool = True,
    skip_bad_rows: bool = False,
) -> str | None:
    """Feed every row of a CSV file (gzip or plain) with exactly these columns to ``parse``, which raises BadRow and
    then has kept nothing of the row. Without a header the first line is a row.

    Returns what to tell of bad rows that were left out; None where there are none. Raises TraceError as
    :func:`read_trace` does, after the last row: what ``parse`` kept is not to be used then.
    """
    bad = BadRows(path)
    with _opened(path) as lines:
        if has_header and [name.strip() for name in _cells(next(lines, ""))] != list(columns):
            raise TraceError(f"{path}: line 1 must be {','.join(columns)}")
        for line in lines:
            if line.isspace():
                continue
            cells = _cells(line)
            try:
                if len(cells) != len(columns):
                    raise BadRow(f"{len(cells)} columns, {len(columns)} are expected ({','.join(columns)})")
                parse(dict(zip(columns, cells, strict=True)))
            except BadRow as error:
                bad.add(lines.number, error)
    return bad.end(skip_bad_rows)


def _data_lines(path: Path, found: _Found, lines: _Lines) -> Iterator[tuple[int, str]]:
    """Line numbers (from 1) with what stands there; blank lines are passed over, and heads of a recording's next parts.

    Raises TraceError where a part does not follow the one before it.
    """
    line = found.first
    while line is not None:
        if found.last_part is not None and line.startswith(_PART_LINE):
            _take_head(path, found, lines, found.last_part, line)
        elif not line.isspace():
            yield lines.number, line
        line = next(lines, None)


_PART_LINE = f"# {PART}: "


def _take_head(path: Path, found: _Found, lines: _Lines, last_part: int, line: str) -> None:
    """Of a recording's part that stands behind another, down to its header."""
    where, part = f"{path}: line {lines.number}", _part(path, line.removeprefix(_PART_LINE).strip())
    if part != last_part + 1:
        raise TraceError(f"{where}: part {part} of a recording does not follow part {last_part}")
    found.last_part = part
    header = next((other for other in lines if not other.startswith("#")), "")
    if [name.strip() for name in _cells(header)] != found.header:
        raise TraceError(f"{where}: part {part} of a recording has no header like the one before it")


def _record(found: _Found, line: str) -> Record:
    if found.trace_format.is_json_lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise BadRow("not JSON") from None
        if not isinstance(record, dict):
            raise BadRow("not a JSON object")
        return record
    cells = _cells(line)
    if len(cells) != len(found.header):
        raise BadRow(f"{len(cells)} columns, the header has {len(found.header)}")
    return dict(zip(found.header, cells, strict=True))


def _cells(line: str) -> list[str]:
    line = line.rstrip("\n")
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line]), [])
    except csv.Error:  # a cell of more than 128 KiB, say
        return []


# --- writing


def write_trace(path: Path, workload: Workload) -> None:
    """Write our own format (CSV; gzip if the name ends in ``.gz``): source and notes above the header, then the rows.

    Arrivals keep microseconds. The file appears whole or not at all. Raises ConfigError where it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as raw:
            # No name and no time inside, so that equal workloads are equal files.
            packed = gzip.GzipFile("", "wb", 6, raw, mtime=0) if path.suffix == ".gz" else raw
            with io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as text:
                _write_rows(text, workload)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def _write_rows(text: IO[str], workload: Workload) -> None:
    about = [f"source: {workload.source}", *(f"note: {note}" for note in workload.notes)]
    if workload.span_s is not None:
        about.append(f"span_s: {workload.span_s!r}")
    text.writelines(f"# {' '.join(line.split())}\n" for line in about)
    columns = workload.columns
    names = OUR_COLUMNS if columns.is_plain else (*OUR_COLUMNS, *OUR_EXTRA_COLUMNS)
    tells_tenants = columns.tenant is not None
    text.write(",".join((*names, TENANT_COLUMN) if tells_tenants else names) + "\n")
    for row in columns:
        line = f"{row.arrival_s:.6f},{row.input_tokens},{row.output_tokens}"
        if not columns.is_plain:
            line += f",{row.cached_tokens},{CLASSES[row.is_offline]}"
        text.write(f"{line},{row.tenant}\n" if tells_tenants else f"{line}\n")

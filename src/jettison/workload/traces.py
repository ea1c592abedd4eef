"""Trace files in. A reader turns a file into a :class:`Workload` or raises; nothing is ever half-loaded.

The formats are in ``formats``, writing in ``writing``. Cutting, thinning and rescaling are in ``shaping``, made-up
arrivals in ``synthetic``; nothing here knows about servers.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from jettison.errors import ConfigError, TraceError
from jettison.workload.formats import (
    MOONCAKE_STAMP_STEP_S,
    PART,
    BadRow,
    OpenFormat,
    Record,
    TraceFormat,
    formats_of,
    is_date,
)
from jettison.workload.lines import Lines, opened
from jettison.workload.rows import Columns, Floats, TraceRow, Workload
from jettison.workload.stamps import Stamps, fit, look_at
from jettison.workload.units import LATEST_START_S, LEAST_REQUESTS, LONGEST_GAP_EVER_S, PER_S, Reading, doubt
from jettison.workload.writing import write_trace

__all__ = ["MOONCAKE_STAMP_STEP_S", "TraceRow", "Workload", "read_csv", "read_trace", "write_trace"]

_JITTER = 0x6A69
"""Which of a seed's streams draws jitter: one of its own, so that thinning by the same seed does not go by it."""

_ROUNDED_S = 1e-6
"""Our own files have arrivals to this, and the span exactly."""
_SHOWN_BAD_ROWS = 5
_MOST_AHEAD = 1000
"""Lines that are looked at for one by which to know the format."""


def read_trace(
    path: Path, *, jitter: bool | None = None, seed: int = 0, skip_bad_rows: bool = False,
    reading: Reading | None = None, only_lengths: bool = False,
) -> Workload:
    """Read a trace file (gzip or plain), recognising its format by all columns that the first line names.

    ``reading`` gives what the file leaves open: its format where several formats have its columns, and the unit of time
    stamps that are bare numbers. Where the unit is not given it is checked (``units``): a trace of ``LEAST_REQUESTS``
    and more that would be implausibly fast or slow in its format's unit is refused; for a shorter one the workload
    carries a doubt (``doubts``). ``only_lengths``: its times give the order only, so any unit will do. ``jitter``
    spreads each arrival uniformly inside the file's time-stamp step with a generator seeded by ``seed``; None means the
    format's default: on for Mooncake's files with stepped stamps (``stamps``), off for the others. ``skip_bad_rows``:
    leave bad rows out; the workload tells their number and the first of them (``skipped_rows``). Arrivals are shifted
    so that the first source stamp is time 0. Our own format is not shifted, as its arrivals count from the workload's
    start; a recording that begins with its second part or a later one is. Parts that follow each other in one file are
    one recording.

    Raises TraceError for a file that cannot be read, has no known header, no usable row or a doubtful unit, and for bad
    rows without ``skip_bad_rows``: the message lists the first few line numbers with reasons, and the count. Raises
    ConfigError for ``jitter=True`` on a file without stepped stamps, for an unknown format or unit, and for a unit
    given for dates. Where several formats have the file's columns, the only one with a plausible unit is taken, and the
    workload carries a line on it; where there is no single one, TraceError names them all.
    """
    reading = reading or Reading()
    reading.check()
    read = partial(_read_as, path, jitter=jitter, seed=seed, skip_bad_rows=skip_bad_rows, only_lengths=only_lengths)
    try:
        return read(reading)
    except _OpenTrace as error:
        return _the_likely_one(error, [(name, partial(read, replace(reading, format=name))) for name in error.names])


class _OpenTrace(TraceError):
    """A file with columns that several formats have."""

    def __init__(self, message: str, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.names = names


def _the_likely_one(error: _OpenTrace, ways: list[tuple[str, Callable[[], Workload]]]) -> Workload:
    """The file read in the only one of several formats with a plausible unit; the workload carries a line on it. Where
    there is no single one, raises the error with the result of each format."""
    likely, told = [], []
    for name, read in ways:
        try:
            load = read()
        except TraceError as refused:
            told.append(str(refused))
            continue
        told += load.doubts
        if not load.doubts:
            likely.append((name, load))
    if len(likely) != 1:
        raise TraceError("; ".join([str(error), *told])) from None
    [(name, load)] = likely
    others = " and ".join(other for other, _ in ways if other != name)
    caution = f"{load.name}: its keys are those of {others}, too; read as {name}, by whose unit its rate is plausible"
    return replace(load, doubts=(caution,))


def _read_as(
    path: Path, reading: Reading, *, jitter: bool | None, seed: int, skip_bad_rows: bool, only_lengths: bool
) -> Workload:
    with opened(path) as lines:
        found = _detect(path, lines, reading, only_lengths)
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
    if reading.unit is not None:
        notes.append(f"time stamps read in {reading.unit}, as asked")
    doubts = () if only_lengths else _doubts(path, found, columns.arrival_s, reading)
    stamps = look_at(columns.arrival_s)
    if not trace_format.is_ours or found.first_part > 1:
        start_s = float(columns.arrival_s.min())
        columns = columns.with_arrivals(columns.arrival_s - start_s)
        if trace_format.is_ours:
            notes.append(f"part {found.first_part} of a recording: arrivals count from {start_s:.2f} s of it")
    span_s, last_s = found.span_s, float(columns.arrival_s.max())
    if span_s is not None and last_s > span_s + _ROUNDED_S:
        raise TraceError(f"{path}: span_s is {span_s:g}, and a request arrives at {last_s:g} s")
    step_s = _jitter_step_s(path, trace_format, columns.arrival_s, stamps, jitter)
    if step_s is not None:
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_JITTER,)))
        offsets = rng.uniform(0.0, step_s, size=len(columns))
        columns = columns.with_arrivals(columns.arrival_s + offsets)
        notes.append(f"arrivals jittered uniformly inside {step_s:g} s steps, seed {seed}")
    span_s = None if span_s is None else max(span_s, float(columns.arrival_s.max()))
    return Workload(
        columns.in_order(), name=stem(path), source=found.source or f"{trace_format.name} ({path.name})",
        notes=tuple(notes), span_s=span_s, stamps=stamps.describe(), skipped_rows=(skipped,) if skipped else (),
        doubts=doubts,
    )


def _doubts(path: Path, found: _Found, arrival_s: Floats, reading: Reading) -> tuple[str, ...]:
    """Lines on a doubtful unit of the stamps. Raises TraceError where the doubt is too strong to read on."""
    trace_format = found.trace_format
    if trace_format.is_ours and (start_s := float(arrival_s.min())) > LATEST_START_S:
        raise TraceError(
            f"{path}: {trace_format.columns[0]} counts from the workload's start, and the first request arrives "
            f"{start_s:,.0f} s behind it: they look like dates, as seconds since 1970")
    if reading.unit is not None or found.per_s is None:
        return ()
    unit = trace_format.unit or "s"
    told = doubt(arrival_s, unit, trace_format.longest_gap_s)
    is_short = len(arrival_s) < LEAST_REQUESTS
    if told is None and trace_format.longest_gap_s > LONGEST_GAP_EVER_S:  # the format's own traces may be as quiet
        told, is_short = doubt(arrival_s, unit), True
    if told is None or (trace_format.is_ours and (found.has_head or is_short)):
        return ()  # files written by these tools are in seconds, however quiet the server was
    if is_short or trace_format.is_ours:
        return (f"{path.name}: {told} (--unit says which)",)
    say = "Say which with --unit (in a spec: unit)"
    raise TraceError(f"{path}: the unit of its time stamps is in doubt: {told}. {say}")


def _jitter_step_s(
    path: Path, trace_format: TraceFormat, arrival_s: Floats, stamps: Stamps, jitter: bool | None
) -> float | None:
    """The step to jitter in; None: arrivals stay. Raises ConfigError where jitter is requested and there is no step."""
    if jitter is False or (jitter is None and not (trace_format.jitter_by_default and stamps.step_s)):
        return None
    published_s = trace_format.stamp_step_s
    if published_s is not None and fit(arrival_s, published_s):
        return published_s
    if stamps.step_s is None:
        raise ConfigError(f"{path}: time stamps are exact, there is no step to jitter in: {stamps.describe()}")
    return stamps.step_s


def stem(path: Path) -> str:
    """The file's name without the suffixes of format and compression."""
    name = path.name
    for suffix in (".gz", ".csv", ".jsonl"):
        name = name.removesuffix(suffix)
    return name


# --- recognising


@dataclass(slots=True)
class _Found:
    trace_format: TraceFormat
    header: list[str]
    notes: list[str] = field(default_factory=list)
    source: str | None = None
    span_s: float | None = None
    per_s: float | None = None
    """The number of the stamps' units in a second; None: the stamps are dates."""
    has_head: bool = False
    """Whether there are lines above the header, which tell the source."""
    first_part: int = 1
    last_part: int | None = None
    """Number of the last part read of a recording; None: the file is no recording."""


def _detect(path: Path, lines: Lines, reading: Reading, only_lengths: bool) -> _Found:
    comments: list[str] = []
    first = next(lines, None)
    while first is not None and first.startswith("#"):
        comments.append(first[1:].strip())
        first = next(lines, None)
    if first is None:
        raise TraceError(f"{path}: the file is empty")
    names, is_json = _names(first)
    where = f"{path}: line {lines.number}"
    try:
        candidates = formats_of(names, is_json, reading.format, reads_times=reading.unit is None and not only_lengths)
    except OpenFormat as error:
        raise _OpenTrace(f"{where}: {error}", error.names) from None
    except BadRow as error:
        raise TraceError(f"{where}: {error}{_hint(first)}") from None
    if is_json:
        lines.put_back([first])
    find_per_s = partial(_per_s, path, reading=reading, only_lengths=only_lengths)
    chosen, row = _first_row(names, lines, candidates, find_per_s)
    per_s = find_per_s(chosen, row.get(chosen.columns[0]))
    found = _Found(chosen, names, per_s=per_s, has_head=bool(comments))
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


def _first_row(
    names: list[str], lines: Lines, candidates: list[TraceFormat],
    find_per_s: Callable[[TraceFormat, object], float | None],
) -> tuple[TraceFormat, Record]:
    """The first row that one of the formats can read, and that format; else the last format and the first record. All
    lines are still to come. ``find_per_s`` tells the unit of a format's stamp (``_per_s``)."""
    taken: list[str] = []
    first: Record = {}
    try:
        for line in islice(lines, _MOST_AHEAD):
            taken.append(line)
            if line.startswith(_PART_LINE):
                break
            for known in candidates:
                try:
                    row = _record(known, names, line)
                    first = first or row
                    if known.matches is None or known.matches(row):
                        known.parse(row, find_per_s(known, row.get(known.columns[0])))
                        return known, row
                except BadRow:
                    continue
        return candidates[-1], first
    finally:
        lines.put_back(taken)


def _per_s(
    path: Path, trace_format: TraceFormat, stamp: object, *, reading: Reading, only_lengths: bool
) -> float | None:
    """The number of the stamps' units in a second; None: the stamps are dates. With ``only_lengths``, for which only
    their order matters, numbers are read in the unit in which none is too late. Raises ConfigError for a unit given for
    dates."""
    says_itself = not trace_format.is_ours and is_date(stamp)
    if says_itself and reading.unit is not None:
        raise ConfigError(f"{path}: its time stamps are dates, which have no unit")
    unit = reading.unit or ("ns" if only_lengths else trace_format.unit or ("s" if trace_format.is_ours else None))
    return None if says_itself or unit is None else PER_S[unit]


def _hint(first: str) -> str:
    """A hint at the likely kind of a first line that is no header."""
    apart = max(";\t|", key=first.count)
    if first.count(apart) >= 2 and "," not in first:
        return f"; its cells stand apart by {apart!r}, those of a trace by commas"
    begins = first.lstrip()[:1]
    is_whole = begins == "{" and first.rstrip()[-1:] == "}"
    return "; of JSON, a trace has one object a line" if begins in ("[", "{") and not is_whole else ""


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


def _parse_rows(path: Path, found: _Found, lines: Lines) -> tuple[_Read, BadRows]:
    read, bad = _Read(), BadRows(path)
    for number, line in _data_lines(path, found, lines):
        try:
            row = found.trace_format.parse(_record(found.trace_format, found.header, line), found.per_s)
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
        """Count one bad row."""
        self._count += 1
        if len(self._shown) < _SHOWN_BAD_ROWS:
            self._shown.append(f"line {number}: {error}")

    def end(self, skips: bool) -> str | None:
        """The line on the rows that are left out, after all rows have been read; None where there are none.

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
    """Feed every row of a CSV file (gzip or plain) with exactly these columns to ``parse``, which raises BadRow for a
    row that it has kept nothing of. Without a header the first line is a row.

    Returns a line on the bad rows that were left out; None where there are none. Raises TraceError as
    :func:`read_trace` does, after the last row: the caller must then not use the rows that ``parse`` kept.
    """
    bad = BadRows(path)
    with opened(path) as lines:
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


def _data_lines(path: Path, found: _Found, lines: Lines) -> Iterator[tuple[int, str]]:
    """Line numbers (from 1) with the lines of data; blank lines and the heads of a recording's further parts are
    skipped.

    Raises TraceError where a part does not follow its predecessor.
    """
    for line in lines:
        if found.last_part is not None and line.startswith(_PART_LINE):
            _take_head(path, found, lines, found.last_part, line)
        elif not line.isspace():
            yield lines.number, line


_PART_LINE = f"# {PART}: "


def _take_head(path: Path, found: _Found, lines: Lines, last_part: int, line: str) -> None:
    """Read the head of a recording's further part, down to its header."""
    where, part = f"{path}: line {lines.number}", _part(path, line.removeprefix(_PART_LINE).strip())
    if part != last_part + 1:
        raise TraceError(f"{where}: part {part} of a recording does not follow part {last_part}")
    found.last_part = part
    header = next((other for other in lines if not other.startswith("#")), "")
    if [name.strip() for name in _cells(header)] != found.header:
        raise TraceError(f"{where}: part {part} of a recording has no header like the one before it")


def _record(trace_format: TraceFormat, header: list[str], line: str) -> Record:
    if trace_format.is_json_lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise BadRow("not JSON") from None
        if not isinstance(record, dict):
            raise BadRow("not a JSON object")
        return record
    cells = _cells(line)
    if len(cells) != len(header):
        raise BadRow(f"{len(cells)} columns, the header has {len(header)}")
    return dict(zip(header, cells, strict=True))


def _cells(line: str) -> list[str]:
    line = line.rstrip("\n")
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line]), [])
    except csv.Error:  # a cell of more than 128 KiB, say
        return []

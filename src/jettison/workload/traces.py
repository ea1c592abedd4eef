"""Readers of published request traces, and the two types every workload is made of.

Each format is one entry of :data:`FORMATS`, recognised by the file's first line. A reader turns a file
into a :class:`Workload` or raises; nothing is ever half-loaded. Cutting, thinning and rescaling are in
``shaping``, made-up arrivals in ``synthetic``; nothing here knows about servers.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jettison.errors import ConfigError, TraceError

MOONCAKE_STAMP_STEP_S = 3.0
"""Mooncake's conversation stamps are multiples of 3 s: bursts measured on them are an artefact."""

_SHOWN_BAD_ROWS = 5
_EPOCH = datetime(2020, 1, 1)
"""Near the stamps, so that float seconds keep their seven fractional digits."""


class TraceRow(NamedTuple):
    """One request: arrival in seconds from the workload's start, lengths in tokens."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests sorted by arrival. ``notes`` says in order what was done to them since the source."""

    rows: tuple[TraceRow, ...]
    name: str
    source: str
    notes: tuple[str, ...] = ()
    span_s: float | None = None
    """Length of the observation window where it is known (a slice's width); else up to the last arrival."""

    @property
    def duration_s(self) -> float:
        """``span_s``, or the time of the last arrival."""
        if self.span_s is not None:
            return self.span_s
        return self.rows[-1].arrival_s if self.rows else 0.0

    @property
    def mean_rate_per_s(self) -> float:
        """Requests per second over ``duration_s``; 0 when that is empty."""
        return len(self.rows) / self.duration_s if self.duration_s > 0 else 0.0

    def with_rows(self, rows: Sequence[TraceRow], note: str, *, span_s: float | None = None) -> Workload:
        """The same workload with other rows, sorted by arrival (stable), and one note more."""
        ordered = tuple(sorted(rows, key=lambda row: row.arrival_s))
        return replace(self, rows=ordered, notes=(*self.notes, note), span_s=span_s)


class _BadRow(ValueError):
    """Why one line cannot be used; becomes part of a TraceError."""


Record = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How to recognise and read one published format."""

    name: str
    columns: tuple[str, ...]
    """Columns (CSV) or keys (JSON lines) that must all be there."""
    is_json_lines: bool
    parse: Callable[[Record], TraceRow | None]
    """One line's request; None where the source says that it failed. Raises _BadRow."""
    stamp_step_s: float | None = None
    """Width of the steps to which the source rounded arrivals down, None where it did not."""
    jitter_by_default: bool = False


def read_trace(path: Path, *, jitter: bool | None = None, seed: int = 0) -> Workload:
    """Read a trace file (gzip or plain), recognising its format by the first line.

    ``jitter`` spreads each arrival uniformly inside the source's time-stamp step with a generator seeded by
    ``seed``; None means the format's default: on for Mooncake (3 s steps), off for BurstGPT (1 s steps).
    Arrivals are shifted so that the first source stamp is time 0.

    Raises TraceError for a file that cannot be read, has no known header, has no usable row, or has bad
    rows: the message lists the first few line numbers with reasons, and the count. Raises ConfigError
    for ``jitter=True`` on a source whose stamps are exact.
    """
    lines = _read_lines(path)
    trace_format, header = _detect(path, lines)
    rows, num_failed = _parse_rows(path, trace_format, header, lines)
    if not rows:
        raise TraceError(f"{path}: no usable request in the file")
    notes = [f"{len(rows)} requests read as {trace_format.name}"]
    if num_failed:
        notes.append(f"{num_failed} failed requests (0 response tokens) dropped")
    start_s = min(row.arrival_s for row in rows)
    rows = [row._replace(arrival_s=row.arrival_s - start_s) for row in rows]
    if trace_format.jitter_by_default if jitter is None else jitter:
        if trace_format.stamp_step_s is None:
            raise ConfigError(f"{path}: {trace_format.name} stamps are exact, there is no step to jitter in")
        rows = _jittered(rows, trace_format.stamp_step_s, seed)
        notes.append(f"arrivals jittered uniformly inside {trace_format.stamp_step_s:g} s steps, seed {seed}")
    rows.sort(key=lambda row: row.arrival_s)
    return Workload(rows=tuple(rows), name=_stem(path), source=f"{trace_format.name} ({path.name})", notes=tuple(notes))


def _jittered(rows: Sequence[TraceRow], step_s: float, seed: int) -> list[TraceRow]:
    offsets = np.random.default_rng(seed).uniform(0.0, step_s, size=len(rows))
    return [row._replace(arrival_s=row.arrival_s + float(offset)) for row, offset in zip(rows, offsets, strict=True)]


def _read_lines(path: Path) -> list[str]:
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        return raw.decode("utf-8-sig").splitlines()
    except (OSError, EOFError) as error:  # gzip.BadGzipFile is an OSError; a truncated member is an EOFError
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a text file ({error.reason} at byte {error.start})") from error


def _detect(path: Path, lines: Sequence[str]) -> tuple[TraceFormat, list[str]]:
    if not lines:
        raise TraceError(f"{path}: the file is empty")
    first = lines[0].strip()
    names: list[str]
    try:
        parsed = json.loads(first)
        names = list(parsed) if isinstance(parsed, dict) else []
        is_json = isinstance(parsed, dict)
    except ValueError:
        names, is_json = [name.strip() for name in next(csv.reader([first]))], False
    for candidate in FORMATS:
        if candidate.is_json_lines == is_json and set(candidate.columns) <= set(names):
            return candidate, names
    known = "; ".join(f"{item.name}: {', '.join(item.columns)}" for item in FORMATS)
    raise TraceError(f"{path}: line 1 is no header of a known trace format ({known})")


def _parse_rows(
    path: Path, trace_format: TraceFormat, header: list[str], lines: Sequence[str]
) -> tuple[list[TraceRow], int]:
    rows: list[TraceRow] = []
    bad: list[str] = []
    num_bad = num_failed = 0
    for number, record in _records(trace_format, header, lines):
        try:
            if isinstance(record, _BadRow):
                raise record
            parsed = trace_format.parse(record)
        except _BadRow as error:
            num_bad += 1
            if len(bad) < _SHOWN_BAD_ROWS:
                bad.append(f"line {number}: {error}")
            continue
        if parsed is None:
            num_failed += 1
        else:
            rows.append(parsed)
    if num_bad:
        more = f"; and {num_bad - len(bad)} more" if num_bad > len(bad) else ""
        count = "1 bad row" if num_bad == 1 else f"{num_bad} bad rows"
        raise TraceError(f"{path}: {count}, nothing loaded: {'; '.join(bad)}{more}")
    return rows, num_failed


def _records(
    trace_format: TraceFormat, header: list[str], lines: Sequence[str]
) -> Iterator[tuple[int, Record | _BadRow]]:
    """Line numbers (from 1) with what stands there; blank lines are passed over."""
    start = 0 if trace_format.is_json_lines else 1
    for number, line in enumerate(lines[start:], start + 1):
        if not line.strip():
            continue
        if trace_format.is_json_lines:
            yield number, _json_record(line)
            continue
        cells = next(csv.reader(io.StringIO(line)))
        if len(cells) != len(header):
            yield number, _BadRow(f"{len(cells)} columns, the header has {len(header)}")
        else:
            yield number, dict(zip(header, cells, strict=True))


def _json_record(line: str) -> Record | _BadRow:
    try:
        record = json.loads(line)
    except ValueError:
        return _BadRow("not JSON")
    return record if isinstance(record, dict) else _BadRow("not a JSON object")


def _cell(record: Record, key: str) -> object:
    if key not in record:
        raise _BadRow(f"no {key}")
    return record[key]


def _count(record: Record, key: str, *, minimum: int = 1) -> int:
    raw = _cell(record, key)
    try:
        if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
            raise ValueError
        value = int(raw)  # type: ignore[call-overload]  # strings and numbers; anything else raises below
    except (TypeError, ValueError):
        raise _BadRow(f"{key} is {raw!r}, a whole number is expected") from None
    if value < minimum:
        raise _BadRow(f"{key} is {value}, at least {minimum} is expected")
    return int(value)


def _seconds(record: Record, key: str) -> float:
    raw = _cell(record, key)
    try:
        value = float(raw)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _BadRow(f"{key} is {raw!r}, a number is expected") from None
    if not math.isfinite(value) or value < 0:
        raise _BadRow(f"{key} is {raw!r}, a finite number of at least 0 is expected")
    return value


def _parse_azure(record: Record) -> TraceRow | None:
    raw = str(record["TIMESTAMP"])
    # Seven fractional digits; fromisoformat takes six, so the fraction is added by hand.
    whole, _, fraction = raw.partition(".")
    try:
        arrival_s = (datetime.fromisoformat(whole) - _EPOCH).total_seconds()
        arrival_s += float(f"0.{fraction}") if fraction else 0.0
    except (TypeError, ValueError):  # TypeError: a stamp with a time zone
        raise _BadRow(f"TIMESTAMP is {raw!r}, 'YYYY-MM-DD HH:MM:SS.fffffff' is expected") from None
    return TraceRow(arrival_s, _count(record, "ContextTokens"), _count(record, "GeneratedTokens"))


def _parse_burstgpt(record: Record) -> TraceRow | None:
    arrival_s = _seconds(record, "Timestamp")
    output_tokens = _count(record, "Response tokens", minimum=0)
    # A failed request may have an empty prompt too: only the rows that are kept must have one.
    input_tokens = _count(record, "Request tokens", minimum=0 if output_tokens == 0 else 1)
    return TraceRow(arrival_s, input_tokens, output_tokens) if output_tokens else None


def _parse_mooncake(record: Record) -> TraceRow | None:
    arrival_s = _seconds(record, "timestamp") / 1000.0
    return TraceRow(arrival_s, _count(record, "input_length"), _count(record, "output_length"))


def _stem(path: Path) -> str:
    name = path.name
    for suffix in (".gz", ".csv", ".jsonl"):
        name = name.removesuffix(suffix)
    return name


FORMATS: tuple[TraceFormat, ...] = (
    TraceFormat("azure-2023", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), False, _parse_azure),
    TraceFormat("burstgpt", ("Timestamp", "Request tokens", "Response tokens"), False, _parse_burstgpt, 1.0),
    TraceFormat(
        "mooncake", ("timestamp", "input_length", "output_length"), True, _parse_mooncake, MOONCAKE_STAMP_STEP_S, True
    ),
)
"""Add a format here and nowhere else."""

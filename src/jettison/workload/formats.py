"""Formats of published traces: how to recognise each, and what one of its lines says.

Reading files, counting bad lines and sorting are ``traces``' business; a parser sees one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from jettison.workload.rows import MAX_ARRIVAL_S, MAX_TOKENS, TraceRow

MOONCAKE_STAMP_STEP_S = 3.0
"""Mooncake's published conversation stamps are multiples of 3 s: bursts measured on them are an artefact."""

_EPOCH = datetime(2020, 1, 1)
"""Near the stamps, so that float seconds keep their seven fractional digits."""

Record = Mapping[str, object]


class BadRow(ValueError):
    """Why one line cannot be used; becomes part of a TraceError."""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How to recognise and read one published format."""

    name: str
    columns: tuple[str, ...]
    """Columns (CSV) or keys (JSON lines) that must all be there."""
    is_json_lines: bool
    parse: Callable[[Record], TraceRow | None]
    """One line's request; None where the source says that it failed. Raises BadRow."""
    stamp_step_s: float | None = None
    """Width of the steps to which the published files of this format are rounded down, None where they are not. Of a
    file it holds where its stamps are multiples of it."""
    jitter_by_default: bool = False
    """Where a file's stamps are seen to be steps (``stamps``)."""
    matches: Callable[[Record], bool] | None = None
    """Tells formats with the same columns apart by their first line of data."""
    is_ours: bool = False
    """Arrivals count from the workload's start, and its notes stand above the header."""


def cell(record: Record, key: str) -> object:
    """What stands there. Raises BadRow."""
    if key not in record:
        raise BadRow(f"no {key}")
    return record[key]


def count(record: Record, key: str, *, minimum: int = 1) -> int:
    """A whole number. Raises BadRow."""
    raw = cell(record, key)
    try:
        if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
            raise ValueError
        value = int(raw)  # type: ignore[call-overload]  # strings and numbers; anything else raises below
    except (TypeError, ValueError):
        raise BadRow(f"{key} is {raw!r}, a whole number is expected") from None
    if value < minimum:
        raise BadRow(f"{key} is {value}, at least {minimum} is expected")
    if value > MAX_TOKENS:
        raise BadRow(f"{key} is {value}, at most {MAX_TOKENS} is expected")
    return int(value)


def number(record: Record, key: str) -> float:
    """A finite number of at least 0. Raises BadRow."""
    raw = cell(record, key)
    try:
        value = float(raw)  # type: ignore[arg-type]
    except OverflowError:
        raise BadRow(f"{key} is a number of more than 308 digits") from None
    except (TypeError, ValueError):
        raise BadRow(f"{key} is {raw!r}, a number is expected") from None
    if not math.isfinite(value) or value < 0 or value > MAX_ARRIVAL_S:
        raise BadRow(f"{key} is {raw!r}, a finite number of at least 0 is expected")
    return value


def _stamp_s(raw: str) -> float:
    """``YYYY-MM-DD HH:MM:SS`` with up to seven fractional digits, and with or without an offset from UTC."""
    # Seven fractional digits; fromisoformat takes six, so the fraction is added by hand.
    whole, dot, rest = raw.partition(".")
    fraction = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    offset = rest[len(fraction) :]
    if dot and not fraction:
        raise ValueError(raw)
    stamp = datetime.fromisoformat(whole + offset)
    utc_offset = stamp.utcoffset()
    seconds = (stamp.replace(tzinfo=None) - _EPOCH).total_seconds()
    if utc_offset is not None:
        seconds -= utc_offset.total_seconds()
    return seconds + float(f"0.{fraction}") if fraction else seconds


def _parse_azure(record: Record) -> TraceRow | None:
    raw = str(record["TIMESTAMP"])
    try:
        arrival_s = _stamp_s(raw)
    except (TypeError, ValueError):
        raise BadRow(f"TIMESTAMP is {raw!r}, 'YYYY-MM-DD HH:MM:SS.fffffff' is expected") from None
    return TraceRow(arrival_s, count(record, "ContextTokens"), count(record, "GeneratedTokens"))


def _parse_azure_2024(record: Record) -> TraceRow | None:
    # Unlike 2023's, a few of its rows have generated nothing: not answered.
    if str(record["GeneratedTokens"]).strip() == "0":
        return None
    return _parse_azure(record)


def _has_offset(record: Record) -> bool:
    return str(record["TIMESTAMP"])[19:].lstrip(".0123456789")[:1] in ("+", "-", "Z")


def _parse_burstgpt(record: Record) -> TraceRow | None:
    arrival_s = number(record, "Timestamp")
    output_tokens = count(record, "Response tokens", minimum=0)
    # A failed request may have an empty prompt too: only the rows that are kept must have one.
    input_tokens = count(record, "Request tokens", minimum=0 if output_tokens == 0 else 1)
    return TraceRow(arrival_s, input_tokens, output_tokens) if output_tokens else None


def _parse_mooncake(record: Record) -> TraceRow | None:
    arrival_s = number(record, "timestamp") / 1000.0
    return TraceRow(arrival_s, count(record, "input_length"), count(record, "output_length"))


CLASSES = ("online", "offline")


def _parse_ours(record: Record) -> TraceRow | None:
    row = TraceRow(number(record, "arrival_s"), count(record, "input_tokens"), count(record, "output_tokens"))
    if "cached_tokens" in record:
        cached = count(record, "cached_tokens", minimum=0)
        if cached > row.input_tokens:
            raise BadRow(f"cached_tokens is {cached}, more than the input's {row.input_tokens}")
        row = row._replace(cached_tokens=cached)
    if "class" in record:
        if record["class"] not in CLASSES:
            raise BadRow(f"class is {record['class']!r}, {' or '.join(CLASSES)} is expected")
        row = row._replace(is_offline=record["class"] == "offline")
    if TENANT_COLUMN in record:
        row = row._replace(tenant=count(record, TENANT_COLUMN, minimum=0))
    return row


OUR_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
OUR_EXTRA_COLUMNS = ("cached_tokens", "class")
TENANT_COLUMN = "tenant"
"""Behind those, where tenants are told apart."""

PART = "part"
"""Key of the first line above the header of a recording's file: its number from 1. Times of all parts count from the
recording's start."""

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

FORMATS: tuple[TraceFormat, ...] = (
    TraceFormat("azure-2024", _AZURE, False, _parse_azure_2024, matches=_has_offset),
    TraceFormat("azure-2023", _AZURE, False, _parse_azure),
    TraceFormat("burstgpt", ("Timestamp", "Request tokens", "Response tokens"), False, _parse_burstgpt, 1.0),
    TraceFormat(
        "mooncake", ("timestamp", "input_length", "output_length"), True, _parse_mooncake, MOONCAKE_STAMP_STEP_S, True
    ),
    TraceFormat("jettison", OUR_COLUMNS, False, _parse_ours, is_ours=True),
)
"""Add a format here and nowhere else. The first one that fits is taken."""

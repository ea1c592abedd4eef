"""Formats of published traces: how to recognise each, and how to parse one of its lines.

``traces`` reads files, counts bad lines and sorts; a parser here sees one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime

from jettison.errors import ConfigError
from jettison.workload.rows import MAX_ARRIVAL_S, MAX_TOKENS, TraceRow
from jettison.workload.units import LONGEST_GAP_EVER_S, NIGHTLY_GAP_S, PER_S

MOONCAKE_STAMP_STEP_S = 3.0
"""Mooncake's published conversation stamps are multiples of 3 s: bursts measured on them are an artefact."""

_EPOCH = datetime(2020, 1, 1)
"""Near the stamps, so that float seconds keep their seven fractional digits."""

Record = Mapping[str, object]


class BadRow(ValueError):
    """A line that cannot be used; the message becomes part of a TraceError."""


class OpenFormat(BadRow):
    """Several formats have a file's columns. Its time stamps may tell which it is."""

    def __init__(self, message: str, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.names = names


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How to recognise and read one published format."""

    name: str
    columns: tuple[str, ...]
    """Columns (CSV) or keys (JSON lines) that are read, the time stamp first."""
    is_json_lines: bool
    parse: Callable[[Record, float | None], TraceRow | None]
    """Makes a line's request of its record and the number of the stamp's units in a second (None: stamps are dates).
    Returns None for a request that failed, by its source. Raises BadRow."""
    unit: str | None = None
    """Unit of time stamps that are bare numbers; None where the column's name or the stamp itself states it."""
    marks: tuple[str, ...] = ()
    """Further columns in every file, which tell the format from others that have all of ``columns`` too."""
    may_have: tuple[str, ...] = ()
    """Columns that only some files have."""
    longest_gap_s: float = LONGEST_GAP_EVER_S
    """Longest mean gap between two requests at which the unit is not doubted (``units``)."""
    stamp_step_s: float | None = None
    """Width of the steps that the published files' stamps are rounded down to; None where they are not rounded. It
    applies to a file whose stamps are multiples of it."""
    jitter_by_default: bool = False
    """Whether arrivals are jittered by default, in files with stepped stamps (``stamps``)."""
    matches: Callable[[Record], bool] | None = None
    """Tells formats with the same columns apart by the first row that can be read."""
    is_ours: bool = False
    """Whether it is this package's own format: arrivals count from the workload's start, and its notes precede the
    header."""

    def has_all_of(self, names: Collection[str]) -> bool:
        """Whether the format knows all of these columns."""
        return set(names) <= {*self.columns, *self.marks, *self.may_have, *_OF_NO_FORMAT}


_OF_NO_FORMAT = ("", "Unnamed: 0", "index")
"""Names of the column of row numbers that table programs add."""


def formats_of(
    names: Collection[str], is_json_lines: bool, asked: str | None, *, reads_times: bool = True
) -> list[TraceFormat]:
    """The formats that a file with these columns may have; several only where its first rows tell them apart.

    A format is recognised by all of its columns. A file with further columns may have an unknown format, with stamps in
    another unit; a file with fewer may fit several formats. Without ``reads_times`` (the unit is given, or times are
    not used) the first fitting format is taken.

    Raises ConfigError for an unknown name, BadRow where no format fits, OpenFormat where more than one does.
    """
    if asked is not None:
        chosen = [f for f in FORMATS if f.name == asked]
        if not chosen:
            raise ConfigError(f"there is no trace format {asked!r}: {', '.join(f.name for f in FORMATS)}")
        missing = [name for name in chosen[0].columns if name not in names]
        if missing or chosen[0].is_json_lines != is_json_lines:
            kind = "JSON lines with" if chosen[0].is_json_lines else "CSV with a header of"
            raise BadRow(f"{asked} is {kind} {', '.join(chosen[0].columns)}")
        return chosen
    fits = [f for f in FORMATS if f.is_json_lines == is_json_lines and set(f.columns) <= set(names)]
    if whole := [f for f in fits if set(f.marks) <= set(names) and f.has_all_of(names)]:
        return whole
    if not fits:
        known = "; ".join(f"{f.name}: {', '.join((*f.columns, *f.marks))}" for f in FORMATS)
        raise BadRow(f"no header of a known trace format ({known})")
    parts = [f for f in fits if f.has_all_of(names)]
    if len(parts) == 1:
        return parts
    if not reads_times or (not parts and fits[0].unit is None):
        return fits  # the further columns are not read, and the stamps' unit is given
    told = ", ".join(f"{f.name} (stamps in {f.unit})" for f in parts or fits)
    if parts:
        told = f"its keys are those of more than one trace format: {told}; say which with --format (in a spec: format)"
        raise OpenFormat(told, tuple(f.name for f in parts))
    unknown = ", ".join(repr(name)[:40] for name in names if all(not f.has_all_of([name]) for f in fits))
    raise BadRow(f"it may be of a trace format that is unknown here: {unknown} is in none that has its other keys: "
                 f"{told}; to read it as one of them say --format (in a spec: format)")  # fmt: skip


def cell(record: Record, key: str) -> object:
    """The value of a record's key. Raises BadRow where it is missing."""
    if key not in record:
        raise BadRow(f"no {key}")
    return record[key]


def count(record: Record, key: str, *, minimum: int = 1) -> int:
    """A whole number. Raises BadRow."""
    raw = cell(record, key)
    try:
        if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
            raise ValueError
        value = _whole(raw)
    except (TypeError, ValueError):
        raise BadRow(f"{key} is {raw!r}, a whole number is expected") from None
    if value < minimum:
        raise BadRow(f"{key} is {value}, at least {minimum} is expected")
    if value > MAX_TOKENS:
        raise BadRow(f"{key} is {value}, at most {MAX_TOKENS} is expected")
    return int(value)


def _whole(raw: object) -> int:
    try:
        return int(raw)  # type: ignore[call-overload]  # strings and numbers; anything else raises
    except ValueError:
        value = float(str(raw))  # a table program writes 10.0 in a column that has gaps
        if not value.is_integer():
            raise
        return int(value)


def number(record: Record, key: str, per_unit: float = 1.0) -> float:
    """A finite number of at least 0, over ``per_unit``. Raises BadRow."""
    raw = cell(record, key)
    try:
        value = float(raw) / per_unit  # type: ignore[arg-type]
    except OverflowError:
        raise BadRow(f"{key} is a number of more than 308 digits") from None
    except (TypeError, ValueError):
        raise BadRow(f"{key} is {raw!r}, a number is expected") from None
    if not math.isfinite(value) or value < 0:
        raise BadRow(f"{key} is {raw!r}, a finite number of at least 0 is expected")
    if value > MAX_ARRIVAL_S:
        raise _TooLate(f"{key} is {raw!r}, which is {value:.3g} s, at most {MAX_ARRIVAL_S:.0g} are possible", value)
    return value


class _TooLate(BadRow):
    """A number that is too large for seconds."""

    def __init__(self, message: str, value_s: float) -> None:
        super().__init__(message)
        self.value_s = value_s


def arrival_s(record: Record, key: str, per_s: float | None) -> float:
    """A time stamp in seconds, from a number in units of which ``per_s`` make a second, or, with None, from a date.
    Raises BadRow."""
    if per_s is not None:
        try:
            return number(record, key, per_s)
        except _TooLate as late:
            raise BadRow(f"{late}{_likely_unit(late.value_s * per_s)}") from None
    raw = str(cell(record, key))
    try:
        return _stamp_s(raw)
    except (TypeError, ValueError):
        unit = " (of a number say the unit with --unit)" if raw.strip().replace(".", "", 1).isdigit() else ""
        raise BadRow(f"{key} is {raw!r}, 'YYYY-MM-DD HH:MM:SS.fffffff' is expected{unit}") from None


def _likely_unit(stamp: float) -> str:
    """A hint at the longest unit in which the stamp is possible."""
    for unit, per_s in PER_S.items():
        if stamp / per_s <= MAX_ARRIVAL_S:
            return f" (in {unit} it is {stamp / per_s:.3g} s: say so with --unit)"
    return ""


def is_date(stamp: object) -> bool:
    """Whether a time stamp is a date, which needs no unit."""
    if not isinstance(stamp, str) or stamp.replace(".", "", 1).strip().isdigit():  # 20240510.5 is read as a number
        return False
    try:
        _stamp_s(stamp)
    except (TypeError, ValueError):
        return False
    return True


def _stamp_s(raw: str) -> float:
    """``YYYY-MM-DD HH:MM:SS`` with up to seven fractional digits, and with or without an offset from UTC."""
    # Seven fractional digits; fromisoformat takes six, so the fraction is added by hand.
    for sign in "+-Z":  # some write a blank before the offset
        raw = raw.replace(f" {sign}", sign)
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


def _parse_azure(record: Record, per_s: float | None) -> TraceRow | None:
    at_s = arrival_s(record, "TIMESTAMP", per_s)
    return TraceRow(at_s, count(record, "ContextTokens"), count(record, "GeneratedTokens"))


def _parse_azure_2024(record: Record, per_s: float | None) -> TraceRow | None:
    # Unlike 2023's, it has a few rows without generated tokens: requests that were not answered.
    if count(record, "GeneratedTokens", minimum=0) == 0:
        return None
    return _parse_azure(record, per_s)


def _has_offset(record: Record) -> bool:
    return str(record["TIMESTAMP"])[19:].lstrip(" .0123456789")[:1] in ("+", "-", "Z")


def _parse_burstgpt(record: Record, per_s: float | None) -> TraceRow | None:
    at_s = arrival_s(record, "Timestamp", per_s)
    output_tokens = count(record, "Response tokens", minimum=0)
    # A failed request may have an empty prompt too: only the rows that are kept must have one.
    input_tokens = count(record, "Request tokens", minimum=0 if output_tokens == 0 else 1)
    return TraceRow(at_s, input_tokens, output_tokens) if output_tokens else None


def _parse_mooncake(record: Record, per_s: float | None) -> TraceRow | None:
    at_s = arrival_s(record, "timestamp", per_s)
    return TraceRow(at_s, count(record, "input_length"), count(record, "output_length"))


CLASSES = ("online", "offline")


def _parse_ours(record: Record, per_s: float | None) -> TraceRow | None:
    assert per_s is not None, "only other formats' stamps may be dates"
    at_s = number(record, "arrival_s", per_s)
    row = TraceRow(at_s, count(record, "input_tokens"), count(record, "output_tokens"))
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
"""A further column, where tenants are told apart."""

PART = "part"
"""Key of the first line above the header of a recording's file: its number from 1. Times of all parts count from the
recording's start."""

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_BLOCKS = ("timestamp", "input_length", "output_length")
"""Columns of formats with prefixes in numbered blocks: of 512 tokens in Mooncake's, of 16 in Bailian's."""

FORMATS: tuple[TraceFormat, ...] = (
    TraceFormat("azure-2024", _AZURE, False, _parse_azure_2024, matches=_has_offset),
    TraceFormat("azure-2023", _AZURE, False, _parse_azure),
    TraceFormat(
        "burstgpt", _BURSTGPT, False, _parse_burstgpt, unit="s", stamp_step_s=1.0, longest_gap_s=NIGHTLY_GAP_S,
        may_have=("Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"),
    ),
    TraceFormat(
        "mooncake", _BLOCKS, True, _parse_mooncake, unit="ms", marks=("hash_ids",), stamp_step_s=MOONCAKE_STAMP_STEP_S,
        jitter_by_default=True,
    ),
    TraceFormat(
        "bailian", _BLOCKS, True, _parse_mooncake, unit="s",
        marks=("chat_id", "parent_chat_id", "type", "turn", "hash_ids"),
    ),
    TraceFormat(
        "jettison", OUR_COLUMNS, False, _parse_ours, is_ours=True, may_have=(*OUR_EXTRA_COLUMNS, TENANT_COLUMN)
    ),
)
"""All formats, registered only here. The first one that fits a file's columns and first row is taken."""

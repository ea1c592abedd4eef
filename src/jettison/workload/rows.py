"""The requests of a workload by arrival: stored as columns, read as rows.

A day of production traffic is a million requests and more: as columns they take 20 bytes each, and a row is made when
it is read. ``traces`` reads files and ``synthetic`` draws arrivals; nothing here knows of either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from jettison.errors import ConfigError

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

_ROWS_AT_ONCE = 1 << 16

MAX_TOKENS = 2**31 - 1
"""Most tokens of one input or one output: columns hold four bytes each."""

MAX_ARRIVAL_S = 1e11
"""Latest arrival, three thousand years: beyond it float seconds lose their milliseconds."""

MAX_REQUESTS = 10**8
"""Most requests of one workload: two gigabytes of columns, several times as many as the largest public traces."""


def check_number(num_requests: float, what: str) -> None:
    """Raises ConfigError, beginning with ``what``, where a workload would have or expect more than ``MAX_REQUESTS``."""
    if not num_requests <= MAX_REQUESTS:
        raise ConfigError(f"{what}: more than {MAX_REQUESTS:,} requests, which is too many")


class TraceRow(NamedTuple):
    """One request: arrival in seconds from the workload's start, lengths in tokens."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Tokens of the input that came from a prefix cache where the request was recorded."""
    is_offline: bool = False
    """Whether the request is offline (best effort)."""
    tenant: int = 0
    """Tenant of the request, from 1; 0 where tenants are not told apart."""


class Columns(Sequence[TraceRow]):
    """Requests as equally long arrays; a sequence of :class:`TraceRow` that makes a row when it is read.

    ``cached_tokens``, ``is_offline`` and ``tenant`` are None where all are 0 and False. The arrays must not be changed
    afterwards.

    Raises ConfigError for token counts and tenants that are not from 0 to ``MAX_TOKENS``.
    """

    __slots__ = ("arrival_s", "cached_tokens", "input_tokens", "is_offline", "output_tokens", "tenant")

    def __init__(
        self,
        arrival_s: npt.ArrayLike,
        input_tokens: npt.ArrayLike,
        output_tokens: npt.ArrayLike,
        cached_tokens: npt.ArrayLike | None = None,
        is_offline: npt.ArrayLike | None = None,
        tenant: npt.ArrayLike | None = None,
    ) -> None:
        self.arrival_s: Floats = np.asarray(arrival_s, dtype=np.float64)
        self.input_tokens: Counts = _counted(input_tokens)
        self.output_tokens: Counts = _counted(output_tokens)
        cached = None if cached_tokens is None else _counted(cached_tokens)
        offline = None if is_offline is None else np.asarray(is_offline, dtype=np.bool_)
        self.cached_tokens: Counts | None = cached if cached is not None and cached.any() else None
        self.is_offline: Flags | None = offline if offline is not None and offline.any() else None
        whose = None if tenant is None else _counted(tenant, "tenant number {}")
        self.tenant: Counts | None = whose if whose is not None and whose.any() else None
        for column in (self.input_tokens, self.output_tokens, cached, offline, whose):
            if column is not None and column.shape != self.arrival_s.shape:
                raise ValueError("columns of different lengths")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __iter__(self) -> Iterator[TraceRow]:
        for start in range(0, len(self), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            columns = [each[part].tolist() for each in (self.arrival_s, self.input_tokens, self.output_tokens)]
            if self.is_plain:
                yield from map(TraceRow, *columns)
            else:
                more = (self.all_cached, self.all_offline, self.all_tenants)
                yield from map(TraceRow, *columns, *(each[part].tolist() for each in more))

    @overload
    def __getitem__(self, index: int) -> TraceRow: ...

    @overload
    def __getitem__(self, index: slice) -> Columns: ...

    def __getitem__(self, index: int | slice) -> TraceRow | Columns:
        if isinstance(index, slice):
            return self.at(index)
        return TraceRow(
            float(self.arrival_s[index]),
            int(self.input_tokens[index]),
            int(self.output_tokens[index]),
            0 if self.cached_tokens is None else int(self.cached_tokens[index]),
            False if self.is_offline is None else bool(self.is_offline[index]),
            0 if self.tenant is None else int(self.tenant[index]),
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # arrays inside

    def __repr__(self) -> str:
        return f"<{len(self)} requests>"

    @property
    def is_plain(self) -> bool:
        """Whether the requests have arrivals and lengths only."""
        return self.cached_tokens is None and self.is_offline is None and self.tenant is None

    @property
    def all_tenants(self) -> Counts:
        """``tenant`` as an array, also where the column is None."""
        return np.zeros(len(self), dtype=np.int32) if self.tenant is None else self.tenant

    @property
    def all_cached(self) -> Counts:
        """``cached_tokens`` as an array, also where the column is None."""
        return np.zeros(len(self), dtype=np.int32) if self.cached_tokens is None else self.cached_tokens

    @property
    def all_offline(self) -> Flags:
        """``is_offline`` as an array, also where the column is None."""
        return np.zeros(len(self), dtype=np.bool_) if self.is_offline is None else self.is_offline

    def at(self, index: slice | npt.NDArray[np.generic]) -> Columns:
        """The rows that a slice, a mask or positions choose, in their order."""
        return Columns(
            self.arrival_s[index],
            self.input_tokens[index],
            self.output_tokens[index],
            None if self.cached_tokens is None else self.cached_tokens[index],
            None if self.is_offline is None else self.is_offline[index],
            None if self.tenant is None else self.tenant[index],
        )

    def with_arrivals(self, arrival_s: npt.ArrayLike) -> Columns:
        """The same requests at other times."""
        return Columns(
            arrival_s, self.input_tokens, self.output_tokens, self.cached_tokens, self.is_offline, self.tenant
        )

    def with_lengths(self, input_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike) -> Columns:
        """Other lengths at the same times; cached tokens are cut to the new inputs."""
        cached = None if self.cached_tokens is None else np.minimum(self.cached_tokens, input_tokens)
        return Columns(self.arrival_s, input_tokens, output_tokens, cached, self.is_offline, self.tenant)

    def in_order(self) -> Columns:
        """The requests sorted by arrival; requests that arrive together keep their order."""
        if np.all(self.arrival_s[1:] >= self.arrival_s[:-1]):
            return self
        return self.at(np.argsort(self.arrival_s, kind="stable"))


def _counted(tokens: npt.ArrayLike, what: str = "a length of {} tokens") -> Counts:
    """Counts as a column. Raises ConfigError for a count that does not fit, which a cast would change silently."""
    counts = np.asarray(tokens)
    if counts.dtype == np.int32 or not counts.size:
        return counts.astype(np.int32, copy=False)
    low, high = counts.min(), counts.max()
    if not (low >= 0 and high <= MAX_TOKENS):
        shown = what.format(f"{low if low < 0 else high:.4g}")
        raise ConfigError(f"{shown}, 0 to {MAX_TOKENS} are possible")
    return counts.astype(np.int32)


def as_columns(rows: Iterable[TraceRow]) -> Columns:
    """Rows of any kind as columns."""
    if isinstance(rows, Columns):
        return rows
    listed = list(rows)
    columns = zip(*listed, strict=True) if listed else ((),) * len(TraceRow._fields)
    return Columns(*(list(column) for column in columns))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests sorted by arrival. ``notes`` lists in order the changes made to them since the source."""

    rows: Sequence[TraceRow]
    name: str
    source: str
    notes: tuple[str, ...] = ()
    span_s: float | None = None
    """Length of the observation window where it is known (a slice's width); else up to the last arrival."""
    stamps: str | None = field(default=None, compare=False)
    """Description of the time stamps in the file; None where the requests come from no file."""
    skipped_rows: tuple[str, ...] = field(default=(), compare=False)
    """A line for each file with bad rows that were left out: their number, and the first of them. Shown before the
    workload is used."""
    doubts: tuple[str, ...] = field(default=(), compare=False)
    """Lines on time stamps that may have another unit than the one assumed. Shown before the workload is used."""

    @property
    def columns(self) -> Columns:
        """``rows`` as arrays."""
        return as_columns(self.rows)

    @property
    def duration_s(self) -> float:
        """``span_s``, or the time of the last arrival."""
        if self.span_s is not None:
            return self.span_s
        return self.rows[-1].arrival_s if self.rows else 0.0

    @property
    def mean_rate_per_s(self) -> float:
        """Requests per second over ``duration_s``; 0 where that is 0."""
        return len(self.rows) / self.duration_s if self.duration_s > 0 else 0.0

    def with_rows(self, rows: Iterable[TraceRow], note: str, *, span_s: float | None = None) -> Workload:
        """The same workload with other rows, sorted by arrival (stable), and one note more. A span ends no sooner than
        the last arrival, which may have been moved beyond it."""
        columns = as_columns(rows).in_order()
        if span_s is not None and len(columns):
            span_s = max(span_s, float(columns.arrival_s[-1]))
        return replace(self, rows=columns, notes=(*self.notes, note), span_s=span_s)

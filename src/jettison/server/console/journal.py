"""The last requests that ended, a row each: when they came and got what, in numbers. No text of any of them.

One row is made for each choice of an answer, at its end; ``NUM_ROWS`` are kept. Times are nanoseconds of the monotonic
clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NUM_ROWS = 1000
"""Rows kept: 1,000 of them are about 500 KB."""
NUM_FIRSTS = 20_000
"""First tokens kept for quantiles: those of a minute with 333 requests a second."""


@dataclass(frozen=True, slots=True)
class Row:
    """One choice of one request."""

    request_id: str
    """The engine's, which the event log has."""
    names: tuple[str, ...]
    """The answer's id, and the ``x-request-id`` of the HTTP request; either may be of the client's making."""
    tenant: str
    is_offline: bool
    reason: str
    """stop, length, abort or error; empty while it runs."""
    arrival_ns: int
    scheduled_ns: int | None
    first_ns: int | None
    """When the server got its first token."""
    ended_ns: int | None
    num_prompt: int
    num_cached: int
    num_output: int
    num_preemptions: int
    num_beside: int
    """Other requests in the server when it came; batches' lines are not among them."""

    @property
    def ttft_ns(self) -> int | None:
        """From its arrival to its first token; None: it got none."""
        return None if self.first_ns is None else self.first_ns - self.arrival_ns

    def is_named(self, name: str) -> bool:
        """Whether this is its id: the engine's, the answer's, or the HTTP request's."""
        return name == self.request_id or name in self.names


class Journal:
    """Rows of one server."""

    def __init__(self) -> None:
        self.rows: deque[Row] = deque(maxlen=NUM_ROWS)
        """In the order of their ends."""
        self._firsts: deque[tuple[int, float]] = deque(maxlen=NUM_FIRSTS)

    def note_first(self, at_ns: int, ttft_s: float) -> None:
        """An online request has got its first token."""
        self._firsts.append((at_ns, ttft_s))

    def firsts_since(self, since_ns: int) -> list[float]:
        """Times to first tokens of online requests that got them later than this, in seconds, ascending."""
        found: list[float] = []
        for at_ns, ttft_s in reversed(self._firsts):
            if at_ns <= since_ns:
                break
            found.append(ttft_s)
        return sorted(found)

    def of(self, name: str, tenant: str | None) -> list[Row]:
        """The choices of a request by any of its ids, newest first; of one tenant, or of all (None)."""
        return [row for row in reversed(self.rows) if is_of(row, tenant) and row.is_named(name)]


def is_of(row: Row, tenant: str | None) -> bool:
    """Whether a row is a tenant's; None: any tenant's."""
    return tenant is None or row.tenant == tenant


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """The value that ``share`` of them do not exceed; None where there are none."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)] if ascending else None


def slowest(rows: Iterable[Row], most: int) -> list[Row]:
    """Online rows with the latest first tokens, the latest first."""
    known = [row for row in rows if row.first_ns is not None and not row.is_offline]
    return sorted(known, key=lambda row: (row.first_ns or 0) - row.arrival_ns, reverse=True)[:most]

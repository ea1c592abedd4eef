"""The last requests that ended: when they came and got what, in numbers. No text of any of them.

A row is made for each choice of an answer, at its end. A request is kept once all its choices are over: ``NUM_KEPT``
online ones, with ``NUM_ROWS`` choices together, and as many offline ones, so that a batch displaces no chat. Times are
nanoseconds of the monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import merge, nlargest

NUM_KEPT = 1000
"""Requests kept of either class: 1,000 with one choice each are about 500 KB."""
NUM_ROWS = 8 * NUM_KEPT
"""Choices kept of either class: about 4 MB."""
MOST_CHOICES = 8
"""Choices told at one time: each takes a look at all that happened meanwhile."""
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
    is_timed: bool = True
    """Whether the engine has told its milestones: else ``scheduled_ns`` is not known."""
    num_choices: int = 1
    """Of its request."""
    trace_parent: str = ""
    """Its header ``traceparent``, where requests are traced."""

    @property
    def ttft_ns(self) -> int | None:
        """From its arrival to its first token; None: it got none."""
        return None if self.first_ns is None else self.first_ns - self.arrival_ns


Rows = Sequence[Row]
"""Of the choices of one request, in the order of its choices."""


class Journal:
    """Requests of one server."""

    def __init__(self, on_end: Callable[[Rows], None] | None = None) -> None:
        """``on_end`` is called with the rows of each request that has ended."""
        self._on_end = on_end
        self.online: deque[Rows] = deque()
        self.offline: deque[Rows] = deque()
        """Each in the order of their ends."""
        self._num_rows = {False: 0, True: 0}
        """By whether they are offline."""
        self._firsts: deque[tuple[int, float]] = deque(maxlen=NUM_FIRSTS)

    def note_first(self, at_ns: int, ttft_s: float) -> None:
        """An online request has got its first token."""
        self._firsts.append((at_ns, ttft_s))

    def firsts_since(self, since_ns: int) -> list[float]:
        """Times to first tokens of online requests that got them later than this, in seconds, the newest
        first."""
        found: list[float] = []
        for at_ns, ttft_s in reversed(self._firsts):
            if at_ns <= since_ns:
                break
            found.append(ttft_s)
        return found

    def add(self, rows: Rows) -> None:
        """A request is over; ``rows``: of its choices, one at least."""
        is_offline = rows[0].is_offline
        kept = self.offline if is_offline else self.online
        kept.append(rows)
        self._num_rows[is_offline] += len(rows)
        while len(kept) > NUM_KEPT or (self._num_rows[is_offline] > NUM_ROWS and len(kept) > 1):
            self._num_rows[is_offline] -= len(kept.popleft())
        if self._on_end is not None:
            self._on_end(rows)

    def kept(self, tenant: str | None) -> list[Rows]:
        """Requests of one tenant, or of all (None), those that ended last first."""
        both = [[rows for rows in reversed(each) if is_of(rows[0].tenant, tenant)]
                for each in (self.online, self.offline)]
        return list(merge(*both, key=_ended_ns, reverse=True))


def is_of(owner: str, tenant: str | None) -> bool:
    """Whether what is this owner's may be shown to a tenant; None: to one that sees all."""
    return tenant is None or owner == tenant


def has_name(rows: Rows, name: str) -> bool:
    """Whether this is an id of the request: the answer's, the HTTP request's, or the engine's of one of its choices."""
    return name in rows[0].names or any(name == row.request_id for row in rows)


def _ended_ns(rows: Rows) -> int:
    return rows[0].ended_ns or 0  # its choices end near each other, and a look at each would cost eight times as much


def slowest(requests: Iterable[Rows], most: int) -> list[Row]:
    """Of the online requests with the latest first tokens the choice that had it, the latest first."""
    latest = (
        rows[0] if len(rows) == 1 else max(rows, key=lambda row: row.ttft_ns or 0)
        for rows in requests if not rows[0].is_offline
    )
    return nlargest(most, (row for row in latest if row.ttft_ns is not None), key=lambda row: row.ttft_ns or 0)

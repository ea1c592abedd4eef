"""Rates of totals as if each total had been sampled on every tick, at the cost of the changes alone.

A rate is the change of a monotone total over a window that ends at the last tick and begins at a tick. Sampling a
thousand groups ten times a second is work for numbers that policies hardly ever read. A total that has not changed
since the tick before would give the same sample again. So it is enough to note totals when they change, with the number
of the tick that sees them first, and to remember the times of the last ticks. The rates are the same, to the last bit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from jettison.types import NANOSECONDS

LONGEST_WINDOW_NS = 40 * NANOSECONDS
"""No rate is a mean over a longer time: older ticks are forgotten."""


class TickTimes:
    """Times of the last ticks. Ticks are numbered from 0; times must not decrease."""

    __slots__ = ("_first", "_times", "_trim_at")

    def __init__(self) -> None:
        self._times: list[int] = []
        self._first = 0
        """Number of the first tick that is remembered."""
        self._trim_at = 256

    @property
    def num_ticks(self) -> int:
        """Ticks so far; also the number of the next one."""
        return self._first + len(self._times)

    def add(self, now_ns: int) -> None:
        """Note a tick at this time; ticks before the longest window are forgotten from time to time."""
        self._times.append(now_ns)
        if len(self._times) >= self._trim_at:
            self._trim()

    def add_all(self, times_ns: Iterable[int]) -> None:
        """Note ticks at these times, ascending, between which nothing has changed."""
        self._times += times_ns
        if len(self._times) >= self._trim_at:
            self._trim()

    def _trim(self) -> None:
        # The last tick at or before the beginning of the longest window is still where that window begins.
        num_old = bisect_right(self._times, self._times[-1] - LONGEST_WINDOW_NS) - 1
        if num_old > 0:
            del self._times[:num_old]
            self._first += num_old
        self._trim_at = 2 * len(self._times) + 256

    def number_at(self, time_ns: int) -> int:
        """Number of the first tick at that time or later; the next tick's number where there was none yet."""
        return self._first + bisect_left(self._times, time_ns)

    def window(self, window_ns: int, not_before: int = 0) -> tuple[int, int, int] | None:
        """(number of the tick that begins the window, its time, time of the last tick); None before two ticks.

        It begins at the last tick that is a whole window before the last one, or else at the first; ``not_before``: the
        first tick that counts. Windows of less than a quarter of their length do not count: None.
        """
        times = self._times
        last = len(times) - 1
        begin = bisect_right(times, times[last] - window_ns) - 1 if times else 0
        begin = max(begin, not_before - self._first, 0)
        if begin >= last or times[last] - times[begin] < window_ns // 4:
            return None
        return self._first + begin, times[begin], times[last]


class Totals:
    """The history of a few totals that are noted together: what they were at each change, and which tick saw that
    first."""

    __slots__ = ("_born", "_notes", "_ticks", "_trim_at")

    def __init__(self, ticks: TickTimes, *totals: int) -> None:
        """``totals``: what they are now; earlier ticks do not count."""
        self._ticks = ticks
        self._born = ticks.num_ticks
        self._notes: list[tuple[int, tuple[int, ...]]] = [(self._born, totals)]
        """Ascending and distinct numbers of ticks, each with the totals that it sees, or will see."""
        self._trim_at = 64

    def note(self, *totals: int) -> None:
        """Note the present totals, which the next tick sees. Nothing where they have not changed."""
        self.note_since(self._ticks.num_ticks, *totals)

    def note_since(self, tick: int, *totals: int) -> None:
        """Note the totals that the tick with this number saw first, or will see; nothing later may have been noted.
        They replace what that tick would have seen. Nothing where they have not changed; notes before the longest
        window are forgotten from time to time."""
        number, before = self._notes[-1]
        if totals == before:
            return
        if number == tick:
            self._notes[-1] = (number, totals)
            return
        self._notes.append((tick, totals))
        if len(self._notes) >= self._trim_at:
            window = self._ticks.window(LONGEST_WINDOW_NS)
            if window is not None:
                del self._notes[: self._index_at(window[0])]
            self._trim_at = 2 * len(self._notes) + 64

    def _index_at(self, tick: int) -> int:
        """Index of the note that a tick has seen; -1 where it came before the first."""
        # A pair with an empty tuple sorts before all others of its tick.
        return bisect_right(self._notes, (tick + 1, ())) - 1

    def changes(self, window_ns: int) -> tuple[tuple[int, ...], int] | None:
        """By how much each total has changed over the last window of ``window_ns``, as its first and last tick saw it,
        and the window's length in ns. None while too little was seen."""
        window = self._ticks.window(window_ns, self._born)
        if window is None:
            return None
        tick, begin_ns, last_ns = window
        then = self._notes[max(0, self._index_at(tick))][1]
        now = self._notes[self._index_at(self._ticks.num_ticks - 1)][1]
        return tuple(b - a for a, b in zip(then, now, strict=True)), last_ns - begin_ns


def per_s(change: int, duration_ns: int) -> float:
    """A change over ``duration_ns`` as a rate a second."""
    return change * NANOSECONDS / duration_ns

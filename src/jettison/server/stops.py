"""Stop strings, found across token boundaries. Pure text in, text out."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string begins, and holds back what may be the beginning of one.

    After a match nothing more comes out. Work per push is bounded by the pushed text and the longest stop string.
    ``keeps_stop``: whether the stop string is part of the output, as its end.
    """

    __slots__ = ("_held", "_keeps_stop", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._keeps_stop = keeps_stop
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str) -> str:
        """Text that can no longer be part of a stop string.

        The stop string that *ends* first wins, and of several the longest, so the result does not depend on the cuts of
        the text.
        """
        if self.matched is not None or not text:
            return ""
        pending = self._held + text
        num_old = len(self._held)  # no stop string ends in these
        found = [(at + len(stop), at, stop) for stop in self._stops
                 if (at := pending.find(stop, max(0, num_old + 1 - len(stop)))) >= 0]
        if found:
            end, at, self.matched = min(found)
            self._held = ""
            return pending[: end if self._keeps_stop else at]
        num_held = self._possible_prefix(pending)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]

    def flush(self) -> str:
        """The held-back text, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _possible_prefix(self, pending: str) -> int:
        """Length of the longest end of ``pending`` that begins a stop string."""
        for length in range(min(len(pending), self._longest - 1), 0, -1):
            tail = pending[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

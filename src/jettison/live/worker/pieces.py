"""How large a bulk piece may be, so that an activation behind it waits for about one stage's time (design 5.1).

One object a link. It learns from back-pressure only. A link that refuses is full; what it takes from one refusal to a
later one is what it has carried meanwhile, whatever its buffers hold. A link that refuses nothing is faster than this
worker, and pieces grow.
"""

from __future__ import annotations

from jettison.memory.kvtransfers import MAX_PIECE_NS

MIN_PIECE_BYTES = 8 << 10
START_PIECE_BYTES = 32 << 10
WINDOW_NS = 30_000_000
"""Over which a rate is measured, and after which pieces grow."""
PAUSE_NS = 500_000_000
"""Without a piece for so long, a new measurement begins."""
FADING = 0.95
"""Of a known rate, from window to window."""
MIN_PIECE_NS = 2_000_000
"""Least time of a piece, whatever a stage takes: shorter ones cost more handling than they save waiting."""


class PieceSizer:
    """Size of the next piece on one link."""

    def __init__(self, max_bytes: int, adapt: bool) -> None:
        self._max_bytes = max_bytes
        self._adapt = adapt
        self._bytes_per_ns: float | None = None
        self._full_ns: int | None = None
        """When the window began, with a refusal."""
        self._num_bytes = 0
        """Taken since then."""
        self._last_ns = 0
        self._free_since_ns = 0
        """Nothing has been refused since."""
        self.piece_bytes = min(START_PIECE_BYTES, max_bytes) if adapt else max_bytes

    def sent(self, num_bytes: int, now_ns: int, stage_ns: int) -> None:
        """The link took a piece; ``stage_ns``: what an activation may wait."""
        if not self._adapt:
            return
        if now_ns - self._last_ns > PAUSE_NS:
            self._full_ns, self._free_since_ns = None, now_ns
        self._last_ns = now_ns
        self._num_bytes += num_bytes
        if now_ns - self._free_since_ns >= WINDOW_NS:
            self._bytes_per_ns, self._free_since_ns = None, now_ns
            self.piece_bytes = min(self._max_bytes, 2 * self.piece_bytes)
        elif self._bytes_per_ns is not None:
            wanted = int(self._bytes_per_ns * min(MAX_PIECE_NS, max(MIN_PIECE_NS, stage_ns)))
            self.piece_bytes = min(self._max_bytes, max(MIN_PIECE_BYTES, wanted))

    def refused(self, now_ns: int) -> None:
        """The link had no room."""
        self._free_since_ns = now_ns
        if self._full_ns is None:
            self._full_ns, self._num_bytes = now_ns, 0
        elif now_ns - self._full_ns >= WINDOW_NS:
            # A link that had to wait for this worker carried less than it could: believe the best of late.
            rate = self._num_bytes / (now_ns - self._full_ns)
            self._bytes_per_ns = max(rate, FADING * (self._bytes_per_ns or 0.0))
            self._full_ns, self._num_bytes = now_ns, 0


class SpareTime:
    """What pieces may take between the layers of a step: a share of what the layers take, saved up for large ones, to
    a bound."""

    def __init__(self, share: int, max_ns: int) -> None:
        """One part in ``share`` is earned."""
        self._share = share
        self._max_ns = max_ns
        self._left_ns = 0
        """Less than 0: a piece took more than there was."""
        self._since_ns = 0
        """Up to when it has been earned and spent."""

    def __bool__(self) -> bool:
        return self._left_ns > 0

    def begin(self, now_ns: int) -> None:
        """A step begins: what was not used before it is gone."""
        self._left_ns, self._since_ns = min(0, self._left_ns), now_ns

    def earn(self, now_ns: int) -> None:
        """Layers have been computed since the last call."""
        self._left_ns = min(self._max_ns, self._left_ns + (now_ns - self._since_ns) // self._share)
        self._since_ns = now_ns

    def spend(self, now_ns: int) -> None:
        """Pieces have been sent since the last call."""
        self._left_ns -= now_ns - self._since_ns
        self._since_ns = now_ns

"""The rate of a link, learned from the transfers that have ended on it. Pure."""

from __future__ import annotations

FORGETTING = 0.8
"""Weight of all earlier transfers, at each new one."""


class LinkRate:
    """Bytes per second of one direction of one link: bytes over time, older transfers counting less."""

    def __init__(self) -> None:
        self._num_bytes = 0.0
        self._seconds = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Add a finished transfer. One that took no time or carried nothing is ignored."""
        if num_bytes > 0 and seconds > 0.0:
            self._num_bytes = FORGETTING * self._num_bytes + num_bytes
            self._seconds = FORGETTING * self._seconds + seconds

    @property
    def bytes_per_s(self) -> float | None:
        """The learned rate; None before the first transfer."""
        return self._num_bytes / self._seconds if self._seconds else None

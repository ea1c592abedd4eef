"""What the event log is told of a packing: records of epochs, refused moves, and the groups that these cost. Nothing is
decided here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jettison.core.ladder.packing.desired import Desired
from jettison.core.ports import Record
from jettison.types import NANOSECONDS, RequestId

LOST_S = 10.0
"""Seconds between two counts of the groups that refused moves cost: each packs all requests anew."""


class Told:
    """What was told last, so that an epoch like the one before needs no record."""

    def __init__(self, desired: Desired) -> None:
        self._desired = desired
        self.refused: dict[RequestId, tuple[float, float]] = {}
        """By request whose move the last epoch refused: what the move costs and saves, device-seconds."""
        self.num_lost = 0
        """Groups that refused moves cost when they were counted last."""
        self._lost_due_ns = 0
        """The time from which on they are counted again."""
        self._last: Mapping[str, object] = {}

    def count_lost(self, now_ns: int) -> None:
        """Count the groups that refused moves cost, if it is time; 0 where no move is refused."""
        if not self._desired.refuses():
            self.num_lost = 0
        elif now_ns >= self._lost_due_ns:
            self.num_lost = self._desired.num_lost()
            self._lost_due_ns = now_ns + round(LOST_S * NANOSECONDS)

    def epoch(self, fields: Mapping[str, object], now_ns: int, *, is_news: bool) -> Iterator[Record]:
        """Yield the record of an epoch with these fields and the refused moves, unless they are the last ones but for
        ``utilisation``. ``is_news``: whatever they are."""
        told = dict(fields)
        if self.refused:
            told["refused"] = [
                {"request": r, "cost_device_s": cost_s, "saved_device_s": saved_s}
                for r, (cost_s, saved_s) in sorted(self.refused.items())
            ]
        compared = {key: value for key, value in told.items() if key != "utilisation"}
        if compared != self._last or is_news:
            self._last = compared
            yield Record("packed", now_ns, told)

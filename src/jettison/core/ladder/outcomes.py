"""What came of a forecast: the same request-seconds, counted from the decision on. Nothing is decided by it."""

from __future__ import annotations

from itertools import chain

from jettison.core.ports import Record
from jettison.core.state import ClusterState
from jettison.policy.forecast import FIRST_TOKEN, Forecast
from jettison.types import NANOSECONDS

OUTCOME_S = 5.0
"""Time after which a forecast is compared with what came: half of its horizon, as the further half depends on arrivals
that no forecast knows."""


class Watch:
    """Counts the request-seconds that one forecast spoke of, on every tick."""

    def __init__(self, state: ClusterState, forecast: Forecast, now_ns: int) -> None:
        self._state, self._forecast = state, forecast
        self._begun_ns = self._seen_ns = now_ns
        self._rate = self._present()
        self._counted = 0.0

    def _present(self) -> float:
        """Request-seconds a second, as the forecast counts them: online requests, those without a first token more."""
        found = 0.0
        for group in self._state.groups.values():
            queues = group.queues
            for each in chain(queues.running.values(), queues.moving.values(), queues.waiting):
                if not each.is_offline:
                    found += 1.0 if each.first_token_ns is not None else FIRST_TOKEN
        return found

    def note(self, now_ns: int) -> None:
        """Count what has passed since the last call."""
        self._counted += self._rate * (now_ns - self._seen_ns) / NANOSECONDS
        self._seen_ns, self._rate = now_ns, self._present()

    def is_over(self, now_ns: int) -> bool:
        """Whether enough time has passed to compare."""
        return now_ns - self._begun_ns >= OUTCOME_S * NANOSECONDS

    def outcome(self, now_ns: int) -> Record:
        """The log record of what was foreseen and what came, up to now."""
        after_s = (now_ns - self._begun_ns) / NANOSECONDS
        return Record("forecast_outcome", now_ns, {
            "after_s": after_s, "foreseen_request_s": self._forecast.cost_until(after_s),
            "seen_request_s": self._counted,
        })  # fmt: skip


class Outcomes:
    """The outcome of the last decision that was made by a forecast."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._watch: Watch | None = None

    @property
    def is_watching(self) -> bool:
        """Whether the outcome of a forecast is being counted."""
        return self._watch is not None

    def begin(self, forecast: Forecast, now_ns: int) -> list[Record]:
        """Count what comes of a forecast from now on; return the record of the one before, if it was still counted."""
        told = self._end(now_ns)
        self._watch = Watch(self._state, forecast, now_ns)
        return told

    def on_tick(self, now_ns: int) -> list[Record]:
        """Count; return the record of an outcome whose time has come. May be called several times on one tick."""
        if self._watch is None:
            return []
        self._watch.note(now_ns)
        return self._end(now_ns) if self._watch.is_over(now_ns) else []

    def _end(self, now_ns: int) -> list[Record]:
        if self._watch is None:
            return []
        self._watch.note(now_ns)
        told, self._watch = self._watch.outcome(now_ns), None
        return [told]

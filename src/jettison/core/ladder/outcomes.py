"""What came of a forecast: the same request-seconds, counted from the decision on. Nothing is decided by it."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from jettison.core.ports import Record
from jettison.core.state import ClusterState
from jettison.policy.forecast import Forecast
from jettison.types import NANOSECONDS, GroupId, WorkerId

OUTCOME_S = 5.0
"""Time after which a forecast is compared with what came: half of its horizon, as the further half depends on arrivals
that no forecast knows."""


class Decided(NamedTuple):
    """A decision that a forecast was made for."""

    kind: str
    """Of its log record."""
    group_id: GroupId | None
    """The group that it is about; None: no group in particular."""
    forecast: Forecast
    """Of what was chosen."""
    worker_ids: frozenset[WorkerId] | None = None
    """The workers whose requests the forecast speaks of; None: those of all."""


class Watch:
    """Counts the request-seconds that one forecast spoke of, on every tick."""

    def __init__(self, state: ClusterState, decided: Decided, now_ns: int) -> None:
        self._state, self._decided = state, decided
        self._begun_ns = self._seen_ns = now_ns
        self._rate = self._present()
        self._counted = 0.0

    def _present(self) -> float:
        """Request-seconds a second, as the forecast counts them: online requests, those without a first token more."""
        found, only, waiting = 0.0, self._decided.worker_ids, self._decided.forecast.first_token_weight
        for group in self._state.groups.values():
            if only is not None and only.isdisjoint(group.worker_ids):
                continue
            queues = group.queues
            for each in chain(queues.served(), queues.waiting):
                if not each.is_offline:
                    found += 1.0 if each.first_token_ns is not None else waiting
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
        group_id = self._decided.group_id
        return Record("forecast_outcome", now_ns, {
            "decision": self._decided.kind, **({} if group_id is None else {"group": group_id}), "after_s": after_s,
            "foreseen_request_s": self._decided.forecast.cost_until(after_s), "seen_request_s": self._counted,
        })  # fmt: skip


class Outcomes:
    """The outcome of the last decision that was made by a forecast. The next decision ends it: what comes after that
    is another forecast's."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._watch: Watch | None = None

    @property
    def is_watching(self) -> bool:
        """Whether the outcome of a forecast is being counted."""
        return self._watch is not None

    def begin(self, decided: Decided, now_ns: int) -> list[Record]:
        """Count what comes of a decision from now on; return the record of the one before, if it was still counted."""
        told = self._end(now_ns)
        self._watch = Watch(self._state, decided, now_ns)
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

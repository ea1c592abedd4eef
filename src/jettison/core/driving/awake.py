"""Which workers have to be awake whatever rungs decide: the first request wakes one, and a request that needs sleepers'
memory wakes them.

The memory of sleeping workers counts: a request that fits with it is accepted. So no accepted request may wait for a
worker that nothing wakes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from jettison.core.changes import WaitsFor
from jettison.core.moving.moves import Moves
from jettison.core.moving.recovering import Recoveries
from jettison.core.moving.sleeping import Sleepers
from jettison.core.ports import Action
from jettison.core.requests import RequestState
from jettison.core.state import ClusterState
from jettison.types import WorkerId

WhyTooLarge = Callable[[RequestState, Collection[WorkerId]], str | None]
"""Why a request could never be held without these workers; None: it could."""


class Awake:
    """Wakes the workers that requests cannot do without."""

    def __init__(
        self, cluster: ClusterState, moves: Moves, recoveries: Recoveries, sleepers: Sleepers,
        why_too_large: WhyTooLarge,
    ) -> None:
        self._cluster = cluster
        self._moves = moves
        self._recoveries = recoveries
        self._sleepers = sleepers
        self._why_too_large = why_too_large
        self.waits_for: WaitsFor = (cluster.unplaced,)

    def for_request(self, state: RequestState, now_ns: int) -> list[Action]:
        """Wake workers, in the order of ``Sleepers.can_wake``, until the memory of all workers that do not sleep could
        hold the request, or no further worker can be woken. Memory whose wake is overdue counts as asleep. Returns the
        actions; none where that memory could hold it already."""
        actions: list[Action] = []
        while (can_wake := self._sleepers.can_wake) and self._why_too_large(state, self._sleepers.absent(now_ns)):
            actions += self._sleepers.wake(can_wake[0], now_ns)
        return actions

    def for_outgrown(self, now_ns: int) -> list[Action]:
        """Wake the first worker that can be woken, where a waiting request has outgrown all memory that does not sleep,
        as an answer without a given length may. Returns the actions; none while a worker is already being woken and
        not overdue, as only its memory will tell whether others are needed."""
        if not self._sleepers.can_wake or self._sleepers.coming_s(now_ns):
            return []
        queued = [self._cluster.groups[g] for g in sorted(self._cluster.changes.queued)]
        outgrown = (state for group in queued for state in group.oversized())
        absent = self._sleepers.absent(now_ns)
        if any(self._why_too_large(state, absent) for state in outgrown):
            return self._sleepers.wake(self._sleepers.can_wake[0], now_ns)
        return []

    def advance(self, now_ns: int) -> list[Action]:
        """Wake the first worker that can be woken, and return the actions. Nothing where none can, a group is open to
        requests, a recovery is under way, or a worker is already to be woken; and no process is asked for while one
        is being started that is not overdue, or a dead worker's is started again. The core calls it only while some
        request has no group."""
        if not (can_wake := self._sleepers.can_wake):
            return []
        if self._moves.serving_groups() or not self._recoveries.is_idle or self._sleepers.is_waking:
            return []
        workers = self._cluster.workers
        if not workers[can_wake[0]].is_provisioned and (
            not self._sleepers.coming_s(now_ns).keys().isdisjoint(self._sleepers.provisioning.starting)
            or any(w.is_missed for w in workers.values())
        ):
            return []
        return self._sleepers.wake(can_wake[0], now_ns)

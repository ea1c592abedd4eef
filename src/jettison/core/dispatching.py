"""Which group takes a request: on its arrival, and again when a full batch keeps it waiting elsewhere.

The choices are ``policy.dispatch``'s and ``policy.rebalance``'s; here are their views of groups.
"""

from __future__ import annotations

from jettison.core.group import GroupCore
from jettison.core.loads import Loads
from jettison.core.moves import Moves
from jettison.core.ports import Action, Record
from jettison.core.request import RequestState
from jettison.core.state import ClusterState
from jettison.policy.dispatch import GroupFreeness, choose_group
from jettison.policy.rebalance import GroupQueue, QueuedRequest, plan_rebalance
from jettison.types import WorkerId


class Dispatcher:
    """Queues requests in groups."""

    def __init__(self, state: ClusterState, loads: Loads, moves: Moves) -> None:
        self._state = state
        self._loads = loads
        self._moves = moves

    def place(self, state: RequestState) -> bool:
        """Queue a request in the freest group; False if there is none and it has to wait for one."""
        open_groups = [g for g in self._state.groups.values() if not self._moves.is_emptying(g)]
        if not open_groups:
            self._state.homeless[state.request_id] = state
            return False
        self._state.homeless.pop(state.request_id, None)
        needed = open_groups[0].blocks_for(len(state.tokens))
        chosen = choose_group([self._freeness(g) for g in open_groups], needed)
        assert chosen is not None
        self._state.groups[chosen].enqueue(state)
        return True

    def rebalance(self, now_ns: int) -> list[Action]:
        """Waiting requests that a full batch or the size of their group keeps out go to groups that can run them."""
        groups = self._state.groups.values()
        if len(groups) < 2 or not any(g.waiting for g in groups):
            return []
        for state in [s for g in groups for s in g.waiting if g.is_oversized(s) and self._fits_elsewhere(s, g)]:
            self._state.groups[state.group_id].take_out(state)
            self.place(state)
        if not self._loads.params.rebalance:
            return []
        busy = self._moves.busy_workers()
        plan = plan_rebalance([self._group_queue(g, busy) for g in groups])
        for entry in plan:
            state = self._state.requests[entry.request_id]
            self._state.groups[entry.source].take_out(state)
            self._state.groups[entry.destination].enqueue(state)
        if not plan:
            return []
        self._state.counters.num_rebalanced += len(plan)
        return [Record("rebalanced", now_ns, {"requests": len(plan), "to": sorted({e.destination for e in plan})})]

    def _fits_elsewhere(self, state: RequestState, home: GroupCore) -> bool:
        needed = home.blocks_for(len(state.tokens))
        others = (g for g in self._state.groups.values() if g is not home and not self._moves.is_emptying(g))
        return any(g.capacity_blocks >= needed for g in others)

    def _group_queue(self, group: GroupCore, busy: set[WorkerId]) -> GroupQueue:
        self._state.catch_up(group.group_id)
        num_stages, profile, most = len(group.stages), self._loads.params.profile, self._state.limits.max_num_seqs
        limit = self._loads.params.batch_limit or (profile.batch_limit(num_stages) if profile is not None else None)
        return GroupQueue(
            group.group_id,
            # A pipeline has as many microbatches in flight as stages, each of them a batch.
            most if limit is None else min(limit * num_stages, most),
            len(group.running) + len(group.moving),
            group.num_free_blocks - group.watermark_blocks(),
            [QueuedRequest(s.request_id, group.blocks_for(len(s.tokens))) for s in group.waiting],
            takes_new=not set(group.worker_ids) & busy and group.admission_cap_blocks is None,
        )

    def _freeness(self, group: GroupCore) -> GroupFreeness:
        self._state.catch_up(group.group_id)
        return GroupFreeness(
            group.group_id,
            min(group.capacity_blocks, group.admission_cap_blocks or group.capacity_blocks),
            group.used_blocks,
            group.queued_blocks() + self._moves.relief.owed_blocks(group),
            len(group.running) + len(group.moving) + len(group.waiting),
            len(group.stages),
        )

"""Which group takes a request: on its arrival, and again while a full batch or full memory keeps it waiting.

It is asked again on every tick, and at the moment a merge has been executed: the merged group has the memory for its
whole queue and would admit all of it in its next step, more than it can usefully run at once. Requests that no other
group can run are admitted there all the same, up to ``max_num_seqs``: a batch above the limit costs latency, an idle
place throughput.

The choices are ``policy.dispatch``'s and ``policy.rebalance``'s; here are their views of groups.
"""

from __future__ import annotations

from collections.abc import Mapping

from jettison.core.changes import WaitsFor
from jettison.core.driving.grouporder import GroupOrder
from jettison.core.ladder.climb import Ladder
from jettison.core.moving.hosted import Hosted
from jettison.core.moving.moves import Moves
from jettison.core.params import ClusterParams
from jettison.core.ports import Action, Record
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.serving.waiting import WaitingQueue
from jettison.core.state import ClusterState
from jettison.policy.batching import BlockedBy
from jettison.policy.dispatch import GroupFreeness
from jettison.policy.rebalance import GroupQueue, QueuedRequest, plan_rebalance
from jettison.types import GroupId

_BatchLimits = Mapping[int, int]
"""Requests that groups can usefully run at once, by their number of stages."""


class Dispatcher:
    """Chooses the queue that each request waits in, when it arrives and again while it waits."""

    def __init__(self, state: ClusterState, moves: Moves, hosted: Hosted, ladder: Ladder) -> None:
        self._state = state
        self._moves = moves
        self._hosted = hosted
        self._ladder = ladder
        self.waits_for: WaitsFor = (state.changes.merged,)
        """For ``rebalance_merged``."""
        self._ordered_by: ClusterParams | None = None
        """The parameters that groups are ordered by: ``reconfigure`` may replace them."""
        self._orders: dict[bool, GroupOrder] = {}
        """Orders by whether offline requests count in them; only those asked for since ``_ordered_by`` changed."""

    def place(self, state: RequestState) -> bool:
        """Queue a request in the group that a rung names or, where no rung does, in the first group of dispatch's order
        that could hold its tokens (the largest one where none could). Returns True, and the request is unplaced no
        more. Where no group is open, note the request as unplaced and return False."""
        cluster = self._state
        if (packed := self._ladder.place(state)) is not None:
            cluster.unplaced.pop(state.request_id, None)
            cluster.groups[packed].queues.enqueue(state)
            return True
        order = self._order_of(counts_offline=state.is_offline or not cluster.params.offline.slo_aware)
        chosen = order.choose(-(-state.num_tokens // cluster.limits.block_size))
        if chosen is None:
            cluster.unplaced[state.request_id] = state
            return False
        cluster.unplaced.pop(state.request_id, None)
        cluster.groups[chosen].queues.enqueue(state)
        return True

    def _order_of(self, *, counts_offline: bool) -> GroupOrder:
        """The open groups in dispatch order, as they are now; the order is made where it is missing. Orders made for
        other parameters are dropped, groups that may have become freer are ranked again in all others, and
        ``changes.freer`` is emptied.

        ``counts_offline`` False: offline requests count for nothing, as they make way for online ones. The blocks that
        they hold would send all newcomers to one group.
        """
        cluster, orders = self._state, self._orders
        cluster.resolve_ledgers()
        if self._ordered_by is not cluster.params:
            self._ordered_by = cluster.params
            orders.clear()
        for group_id in cluster.changes.freer if orders else ():
            for order in orders.values():
                order.refresh(group_id)
        cluster.changes.freer.clear()
        if counts_offline not in orders:
            order = GroupOrder(
                lambda group_id: self._freeness(group_id, counts_offline=counts_offline),
                lambda group_id: cluster.catch_up(group_id),
            )
            order.reorder(cluster.params.dispatch, cluster.groups)
            orders[counts_offline] = order
        return orders[counts_offline]

    def _freeness(self, group_id: GroupId, *, counts_offline: bool = True) -> GroupFreeness | None:
        group = self._state.groups.get(group_id)
        if group is None or self._moves.is_emptying(group):
            return None
        blocks, queues = group.blocks, group.queues
        capacity = blocks.capacity
        num_used, num_served = _taken(group, counts_offline=counts_offline)
        return GroupFreeness(
            group_id,
            min(capacity, blocks.admission_cap or capacity),
            num_used,
            queues.queued_blocks() + self._hosted.absent_blocks(group),
            num_served + len(queues.waiting),
            len(group.stages),
            queues.queued_tokens() + queues.unfinished_tokens(),
            group.limits.max_num_batched_tokens,
            self._apart_blocks(group),
            group.queues.num_served + len(group.queues.waiting) + len(group.queues.waiting_offline),
        )

    def _apart_blocks(self, group: Group) -> int | None:
        params = self._state.params
        if len(group.stages) == 1 or params.static_pipeline or not params.auto_restore:
            return None
        return sum(self._state.workers[w].full_blocks for w in group.worker_ids)

    # --- rebalancing ------------------------------------------------------------------------------------------

    def rebalance(self, now_ns: int) -> list[Action]:
        """Dispatch waiting requests anew that are too large for their own group, where an open group could hold them.
        Then, if ``params.rebalance`` is set, move waiting requests that a full batch or full memory keeps out to the
        queues of groups that can run them: online requests first, then offline ones.

        Counts the latter moves and returns one record of them; no record without one. Nothing happens with fewer than
        two groups, or while no request waits.
        """
        groups, queued = self._state.groups, sorted(self._state.changes.queued)
        if len(groups) < 2 or not queued:
            return []
        for state in self._fitting_elsewhere([s for g in queued for s in groups[g].oversized()]):
            groups[state.group_id].queues.take_out(state)
            self.place(state)
        if not self._state.params.rebalance:
            return []
        limits = {n: self._batch_limit(n) for n in {len(g.stages) for g in groups.values()}}
        destinations: list[GroupId] = []
        for group_queues in (self._group_queues, self._offline_queues):
            for entry in plan_rebalance(group_queues(limits)):
                state = self._state.requests[entry.request_id]
                groups[entry.source].queues.take_out(state)
                groups[entry.destination].queues.enqueue(state)
                destinations.append(entry.destination)
        if not destinations:
            return []
        self._state.counters.num_rebalanced += len(destinations)
        return [Record("rebalanced", now_ns, {"requests": len(destinations), "to": sorted(set(destinations))})]

    def rebalance_merged(self, now_ns: int) -> list[Action]:
        """Forget which groups have just merged, then ``rebalance``; return its records. The core calls it in the event
        that has executed a merge, before the merged group plans a step."""
        self._state.changes.merged.clear()
        return self.rebalance(now_ns)

    def _fitting_elsewhere(self, oversized: list[RequestState]) -> list[RequestState]:
        """Those of the oversized requests that the largest open group could hold; none without an open group."""
        if not oversized:
            return []
        largest = max((g.blocks.capacity for g in self._moves.serving_groups()), default=0)
        return [s for s in oversized if -(-s.num_tokens // self._state.limits.block_size) <= largest]

    def _group_queues(self, limits: _BatchLimits) -> list[GroupQueue]:
        """The views, for ``plan_rebalance``, of groups with too many online requests (more of them wait than there are
        free places, or memory blocks the head) and of groups that may take some (``_takers``); all of these are caught
        up. Empty unless there are both."""
        groups = self._state.groups
        queued = [groups[g] for g in sorted(self._state.changes.queued_online)]
        full = {
            g.group_id for g in queued
            if len(g.queues.waiting) > max(0, self._num_free_places(g, limits)) or self._is_blocked(g)
        }
        if not full:
            return []
        takers = self._takers(limits) - self._ladder.shut()
        if not takers:
            return []
        return [
            self._group_queue(g, limits, takes_new=i in takers) for i, g in groups.items() if i in full or i in takers
        ]

    def _offline_queues(self, limits: _BatchLimits) -> list[GroupQueue]:
        """The views, for ``plan_rebalance``, of groups where offline requests wait, and of takers (``_takers``) where
        no request waits; all of these are caught up. Empty unless there are both."""
        groups, changes = self._state.groups, self._state.changes
        queued = [groups[g] for g in sorted(changes.queued) if groups[g].queues.waiting_offline]
        if not queued:
            return []
        dry = [groups[g] for g in sorted(self._takers(limits) - changes.queued)]
        return [self._offline_queue(g, limits) for g in (*queued, *dry)] if dry else []

    def _takers(self, limits: _BatchLimits) -> set[GroupId]:
        """Ids of the groups with more free places than waiting online requests, without a cap on admission, and whose
        workers no move, recovery or rung uses."""
        busy = self._ladder.worker_ids().union(self._moves.moving_workers())
        return {
            g.group_id for g in self._state.groups.values()
            if self._num_free_places(g, limits) > len(g.queues.waiting) and g.blocks.admission_cap is None
            and busy.isdisjoint(g.worker_ids)
        }

    def _is_blocked(self, group: Group) -> bool:
        """Whether memory keeps the head of the group's online queue out."""
        return group.head_blocked_by is BlockedBy.MEMORY

    def _num_free_places(self, group: Group, limits: _BatchLimits) -> int:
        """Places of the group's batch limit that no admitted request has; negative above the limit. Where offline
        requests make way for online ones, only online requests count."""
        return limits[len(group.stages)] - _served(group, counts_offline=not self._state.params.offline.slo_aware)

    def _batch_limit(self, num_stages: int) -> int:
        params, most = self._state.params, self._state.limits.max_num_seqs
        profile = params.profile
        limit = params.batch_limit or (profile.batch_limit(num_stages) if profile is not None else None)
        # A pipeline has as many microbatches in flight as stages, each of them a batch.
        return num_stages * (most if limit is None else min(limit, most))

    def _group_queue(self, group: Group, limits: _BatchLimits, *, takes_new: bool) -> GroupQueue:
        self._state.catch_up(group.group_id)
        num_used, num_served = _taken(group, counts_offline=not self._state.params.offline.slo_aware)
        return GroupQueue(
            group.group_id,
            limits[len(group.stages)],
            num_served,
            group.blocks.num_free - group.blocks.watermark + group.blocks.num_used - num_used,
            _rows(group, group.queues.waiting),
            takes_new=takes_new,
            sends_blocked=self._is_blocked(group),
        )

    def _offline_queue(self, group: Group, limits: _BatchLimits) -> GroupQueue:
        self._state.catch_up(group.group_id)
        queues = group.queues
        return GroupQueue(
            group.group_id,
            limits[len(group.stages)],
            queues.num_served + len(queues.waiting),
            group.blocks.num_free - group.blocks.watermark - queues.queued_blocks(),
            _rows(group, queues.waiting_offline),
            takes_new=not queues.has_waiting,
            sends_blocked=True,
            most_kept=-(-len(queues.waiting_offline) // 2),
        )


def _taken(group: Group, *, counts_offline: bool) -> tuple[int, int]:
    """(held blocks, places of admitted requests) of a group. ``counts_offline`` False: without the places of offline
    requests, and without the blocks that one of them holds alone."""
    blocks, num_served = group.blocks, _served(group, counts_offline=counts_offline)
    if num_served == group.queues.num_served:
        return blocks.num_used, num_served
    return blocks.num_used_without(s.request_id for s in group.queues.holding_offline()), num_served


def _served(group: Group, *, counts_offline: bool) -> int:
    """How many requests the group has admitted; ``counts_offline`` False: how many online ones. Blocks are counted
    apart (``_taken``): that takes long, and is done for few groups."""
    return group.queues.num_served if counts_offline else group.queues.num_served_online


def _rows(group: Group, waiting: WaitingQueue) -> list[QueuedRequest]:
    return [QueuedRequest(s.request_id, group.limits.blocks_for(s.num_tokens)) for s in waiting]

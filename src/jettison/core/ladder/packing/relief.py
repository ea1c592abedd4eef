"""Relief: running requests leave a group to make room for the first request in a queue. Views of groups for
``policy.relief`` are made here, and the rung ``pack`` begins what is offered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from typing import NamedTuple

from jettison.core.load.distances import machine_distance
from jettison.core.load.views import Loads
from jettison.core.moving.migrations import Migrations, may_go
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.policy.relief import Holder, Movable, Relief, plan_relief
from jettison.types import GroupId, RequestId


class LetIn(NamedTuple):
    """The first request in a group's queue, and the moves that let it in, there or in another group."""

    head: RequestState
    source: Group
    """The group where it waits."""
    relief: Relief


class Reliefs:
    """Finds moves of running requests that let in the first requests of queues which memory keeps out. It begins
    nothing."""

    def __init__(
        self, state: ClusterState, loads: Loads, migrations: Migrations, may_take_part: Callable[[Group], bool],
        growth_blocks: Callable[[GroupId], int], closed: Callable[[], Set[GroupId]],
    ) -> None:
        """``may_take_part``: whether running requests may leave a group and come to it. ``growth_blocks``: blocks by
        which one request of a group grows in the time that packing looks ahead. ``closed``: the groups that take part
        only where the others have no room, as no online request lives there."""
        self._closed = closed
        self._state, self._loads, self._migrations = state, loads, migrations
        self._may_take_part, self._growth_blocks = may_take_part, growth_blocks

    def wanted(self, not_before_ns: Mapping[RequestId, int], now_ns: int) -> Iterator[LetIn]:
        """Yield a way to let in the first request of each queue that memory keeps out; nothing for a queue where other
        requests already make room, or for which all groups together have no room. ``not_before_ns``: by request whose
        move failed, when it may move again. The caller begins each before it asks for the next."""
        for group_id in sorted(self._loads.kept_out):
            group = self._state.groups.get(group_id)
            head = None if group is None else group.queues.waiting.head
            if group is None or head is None or not self._may_take_part(group):
                continue
            head_blocks = group.limits.blocks_for(head.num_tokens)
            leaving = self._leaving_blocks()
            if group.blocks.num_free - group.blocks.watermark + leaving[group_id] >= head_blocks:
                continue  # a request that makes room is on its way
            free = {g: self._num_free(g, head) for g in self._state.groups.values() if self._may_take_part(g)}
            if sum(max(0, num) for num in free.values()) < head_blocks:
                continue  # all together have no room for it: a full cluster need not look at every request
            staying = {r for r, at_ns in not_before_ns.items() if at_ns > now_ns}
            staying.update(passage.state.request_id for passage in self._migrations.under_way)
            holders = [self._holder(g, head, num, leaving[g.group_id], staying) for g, num in free.items()]
            closed = self._closed()
            distance = machine_distance(self._state)
            relief = plan_relief(head_blocks, [h for h in holders if h.group_id not in closed], distance)
            relief = relief or plan_relief(head_blocks, holders, distance)
            if relief is not None:
                yield LetIn(head, group, relief)

    def _leaving_blocks(self) -> Counter[GroupId]:
        """Blocks that each group gets back from requests on their way out of it; 0 without any."""
        leaving: Counter[GroupId] = Counter()
        for passage in self._migrations.under_way:
            source = passage.source
            leaving[source.group_id] += source.blocks.ledgers[0].num_blocks_of(passage.state.request_id)
        return leaving

    def _num_free(self, group: Group, head: RequestState) -> int:
        """Free blocks of a group above the watermark, less the growth of the requests that run there and the room of
        those that wait there, but for the head; may be negative. 0 where no other request may run."""
        if len(group.queues.running) >= group.max_running:
            return 0
        self._state.catch_up(group.group_id)
        blocks, queued = group.blocks, group.queues.queued_blocks()
        queued += (1 + len(group.queues.running)) * self._growth_blocks(group.group_id)
        if head.group_id == group.group_id:
            queued -= group.limits.blocks_for(head.num_tokens)
        return blocks.num_free - blocks.watermark - queued

    def _holder(
        self, group: Group, head: RequestState, num_free: int, num_leaving: int, staying: Set[RequestId]
    ) -> Holder:
        """A group as ``policy.relief`` sees it: its room, the online requests that may leave it (none of ``staying``),
        and whether the head may wait there."""
        ledger, running = group.blocks.ledgers[0], group.queues.running
        movable = [
            Movable(r, ledger.num_blocks_of(r)) for r, s in running.items()
            if may_go(s) and not s.is_offline and r not in staying
        ]
        num_others = len(group.queues.waiting) - (head.group_id == group.group_id)
        takes_head = len(running) < group.max_running and not num_others and not num_leaving
        worker_id = group.worker_ids[0]
        machine = self._state.params.machine_of.get(worker_id, worker_id)
        return Holder(group.group_id, num_free, movable, takes_head, machine)

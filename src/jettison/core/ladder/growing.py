"""How fast requests grow, and which may have outgrown what a packing reserves for them."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from jettison.core.ladder.prompts import decoding_of
from jettison.core.ladder.seats import Seat, Seats
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.cost.stepwork import step_of
from jettison.policy.packing.reserve import reserved_blocks
from jettison.types import GroupId, RequestId

SPARE_ENTRIES = 64
"""Of a group's heap, beyond twice those of its requests, before what is out of date is taken out of it."""


def growth_rates(cluster: ClusterState) -> Callable[[Group], float]:
    """By what is known now, blocks a second of one request that decodes in a group; 0 while too little is known. Not to
    be kept."""
    predictor, pipelines = cluster.predictor, cluster.pipelines.values()
    decoding = {n: predictor.decoding(step_of(n)) for n in {1, *(len(group.stages) for group in pipelines)}}

    def rate(group: Group) -> float:
        seconds_of = decoding[len(group.stages)]
        step_s = 0.0 if seconds_of is None else seconds_of(*decoding_of(group))
        return 1.0 / (step_s * group.limits.block_size) if step_s else 0.0

    return rate


def held_blocks(group: Group, state: RequestState) -> int:
    """That a request holds in a group, or would."""
    return max(1, group.limits.blocks_for(state.num_tokens))


def size_of(cluster: ClusterState, state: RequestState, capacity: int, num_blocks: int, rate: float) -> int:
    """With which a request that holds so many blocks, and grows at such a rate, comes to a packing."""
    limits, packing = cluster.limits, cluster.params.packing
    assert packing is not None, "nothing is packed"
    most = limits.blocks_for(min(state.num_prompt + state.request.params.max_tokens, limits.max_model_len))
    return min(reserved_blocks(num_blocks, rate, capacity, packing.reserve, most), capacity)


class Growths:
    """For each group, which of its requests may have outgrown their reserve.

    A step gives a request one token at most. So from the tokens that its reserve leaves, a number of the group's steps
    follows before which it cannot use the reserve up; a heap has these numbers, and the top is looked at.
    Steps that brought it nothing (it waits, or a step failed) make that early and never late.
    """

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._heaps: dict[GroupId, list[tuple[int, int, RequestId]]] = {}
        self._next_entry = 0

    def arm(self, seat: Seat, state: RequestState, group: Group) -> None:
        """Have it found in time, as it is now. One that has been given a whole device is found when it holds more than
        there is, head-room included: it grows no more in the packing."""
        pool = seat.pool
        most = pool.full if seat.num_blocks >= pool.capacity else seat.num_blocks
        self._next_entry += 1
        seat.armed = self._next_entry
        key = _num_done(group) + most * group.limits.block_size - state.num_tokens
        heap = self._heaps.setdefault(group.group_id, [])
        heapq.heappush(heap, (key, seat.armed, seat.request_id))
        if len(heap) > 2 * len(self._seats.here[group.group_id]) + SPARE_ENTRIES:
            heap[:] = [entry for entry in heap if self._armed(entry) is not None]
            heapq.heapify(heap)

    def _armed(self, entry: tuple[int, int, RequestId]) -> Seat | None:
        """The seat that an entry is of; None where it is out of date."""
        seat = self._seats.by_id.get(entry[2])
        return seat if seat is not None and seat.armed == entry[1] else None

    def due(self, group: Group, spare_blocks: int) -> list[Seat]:
        """Those of whose reserve less than so many blocks may be left; each is found once, until it is armed again."""
        heap = self._heaps.get(group.group_id)
        if not heap:
            return []
        bound = _num_done(group) + spare_blocks * group.limits.block_size
        if heap[0][0] >= bound:
            return []
        found: list[Seat] = []
        while heap and heap[0][0] < bound:
            if (seat := self._armed(heapq.heappop(heap))) is not None:
                seat.armed = 0
                found.append(seat)
        return found

    def forget(self, group_id: GroupId) -> None:
        """The group is packed no more."""
        self._heaps.pop(group_id, None)


def _num_done(group: Group) -> int:
    """Steps of the group that have ended, in whatever way."""
    return group.counters.num_steps - len(group.in_flight)

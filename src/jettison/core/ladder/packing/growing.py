"""How fast decoding requests grow, in blocks a second, and which may have outgrown what a packing reserves for them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from jettison.core.ladder.packing.seats import Seat, Seats
from jettison.core.ladder.prompts import decoding_of
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.serving.limits import SchedulerLimits
from jettison.core.state import ClusterState
from jettison.cost.stepwork import step_of
from jettison.policy.packing.reserve import Growing, growth_blocks, reserved_blocks
from jettison.policy.packing.types import Resize
from jettison.types import GroupId

SPARE_ENTRIES = 64
"""Entries of a group's heap, beyond two for each of its requests, from which on outdated ones are taken out."""


def growth_rates(cluster: ClusterState) -> Callable[[Group], float]:
    """A function from a group to the blocks a second by which one of its decoding requests grows, as known now (0: not
    known). It is out of date once anything changes, so the caller must not keep it."""
    predictor, pipelines, block_size = cluster.predictor, cluster.pipelines, cluster.limits.block_size
    decoding = {n: predictor.decoding(step_of(n)) for n in {1, *(len(group.stages) for group in pipelines.values())}}

    def rate(group: Group) -> float:
        seconds_of = decoding[len(group.stages)]
        step_s = 0.0 if seconds_of is None else seconds_of(*decoding_of(group))
        return 1.0 / (step_s * block_size) if step_s else 0.0

    return rate


def held_blocks(limits: SchedulerLimits, state: RequestState) -> int:
    """Blocks that a request holds in a group, or would hold there, with its present tokens; at least 1."""
    return -(-state.num_tokens // limits.block_size) or 1


def most_blocks(limits: SchedulerLimits, state: RequestState) -> int:
    """The most blocks that a request may ever hold: with its longest answer."""
    return limits.blocks_for(min(state.num_prompt + state.request.params.max_tokens, limits.max_model_len))


def size_of(cluster: ClusterState, state: RequestState, capacity: int, num_blocks: int, rate: float) -> Resize:
    """The size with which a packing takes a request that holds ``num_blocks`` and grows by ``rate`` blocks a second:
    with a reserve, at most the capacity. Raises AssertionError where nothing is packed."""
    limits, packing = cluster.limits, cluster.params.packing
    assert packing is not None, "nothing is packed"
    most = most_blocks(limits, state)
    size = min(reserved_blocks(num_blocks, rate, capacity, packing.reserve, most), capacity)
    return Resize(state.request_id, size, growth_blocks(rate, packing.reserve))


def growing(limits: SchedulerLimits, seat: Seat, state: RequestState, rate: float) -> Growing:
    """A request with a seat, which grows by ``rate`` blocks a second, as it holds blocks now."""
    held = min(held_blocks(limits, state), seat.pool.capacity)
    return Growing(seat.request_id, held, seat.num_blocks, rate, most_blocks(limits, state))


class Growths:
    """How fast a decoding request of each group grows, and which requests may have outgrown their reserve.

    A step gives a request one token at most. So from the tokens that its reserve leaves, a number of the group's steps
    follows before which it cannot use the reserve up. A heap has these numbers, and only its top is looked at. Steps
    that brought a request nothing (it waits, or a step failed) make its number too early, never too late.
    """

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self.rates: dict[GroupId, float] = {}
        """Blocks a second by which one decoding request of each group grows, as of the last look. Callers only read
        it."""
        self._heaps: dict[GroupId, list[tuple[int, int, Seat]]] = {}
        """By group: (number of ended steps at which to look at a seat, unique number of the entry, the seat)."""
        self._soonest: dict[GroupId, int] = {}
        """By group with a heap that is not empty: its first number. A pass reads it for every group."""
        self._next_entry = 0

    def arm(self, seats: Sequence[Seat], states: Sequence[RequestState], group: Group) -> None:
        """Have these requests of a group found once they may have used up what their seats reserve. One whose seat has
        the whole capacity is found when it holds more than the group has, head-room included: it grows no more in the
        packing. One whose seat has all that it may ever hold is not found."""
        heap, num_done = self._heaps.setdefault(group.group_id, []), _num_done(group)
        block_size, entry = group.limits.block_size, self._next_entry
        for seat, state in zip(seats, states, strict=True):
            pool, most = seat.pool, seat.num_blocks
            if most >= pool.capacity:
                most = pool.full
            elif most >= most_blocks(group.limits, state):
                seat.armed = 0
                continue
            seat.armed = entry = entry + 1
            heapq.heappush(heap, (num_done + most * block_size - state.num_tokens, entry, seat))
        self._next_entry = entry
        if len(heap) > 2 * len(self._seats.here[group.group_id]) + SPARE_ENTRIES:
            heap[:] = [row for row in heap if row[2].armed == row[1]]
            heapq.heapify(heap)
        self._note_soonest(group.group_id)

    def _note_soonest(self, group_id: GroupId) -> None:
        """Note the first number of a group's heap, or that it has none."""
        if heap := self._heaps.get(group_id):
            self._soonest[group_id] = heap[0][0]
        else:
            self._soonest.pop(group_id, None)

    def look(
        self, groups: Iterable[Group], rate_of: Callable[[Group], float], ahead_s: float
    ) -> dict[GroupId, list[Seat]]:
        """Note these groups' rates, and take out the seats whose reserve may be used up within ``ahead_s`` seconds, by
        group; groups without any are left out."""
        rates, soonest, found = self.rates, self._soonest, dict[GroupId, list[Seat]]()
        for group in groups:  # all of them in every pass
            group_id = group.group_id
            rates[group_id] = rate = rate_of(group)
            if group_id in soonest:
                spare_blocks = math.ceil(rate * ahead_s)
                if soonest[group_id] < _num_done(group) + spare_blocks * group.limits.block_size:
                    found[group_id] = self.due(group, spare_blocks)
        return found

    def due(self, group: Group, spare_blocks: int) -> list[Seat]:
        """Take out a group's seats that may have less than ``spare_blocks`` left of their reserve. Each is found once,
        until it is armed again; empty: none."""
        heap, found = self._heaps.get(group.group_id, []), list[Seat]()
        bound = _num_done(group) + spare_blocks * group.limits.block_size
        while heap and heap[0][0] < bound:
            _, entry, seat = heapq.heappop(heap)
            if seat.armed == entry:
                seat.armed = 0
                found.append(seat)
        self._note_soonest(group.group_id)
        return found

    def fastest_per_s(self, group_ids: Iterable[GroupId]) -> float:
        """The highest of these groups' rates, in blocks a second as last looked at; 0 where none is known."""
        return max((self.rates.get(group_id, 0.0) for group_id in group_ids), default=0.0)

    def forget(self, group_id: GroupId) -> None:
        """Drop all that is known of a group, as it is packed no more."""
        self._heaps.pop(group_id, None)
        self._soonest.pop(group_id, None)
        self.rates.pop(group_id, None)

    def check(self) -> None:
        """The first number noted for each group is that of its heap. Raises AssertionError otherwise."""
        assert self._soonest == {group_id: heap[0][0] for group_id, heap in self._heaps.items() if heap}, "soonest"


def _num_done(group: Group) -> int:
    """Steps of the group that have ended, in whatever way."""
    return group.counters.num_steps - len(group.in_flight)

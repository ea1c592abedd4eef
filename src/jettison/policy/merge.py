"""The drop plan: which groups to merge (KunServe v3 Fig. 6, v1 section 4.1; design 5.1).

Pure. Every merge frees exactly one copy of the parameters, whatever the sizes. Two strategies:

- ``throughput`` (v3): merge the two smallest groups until enough is freed, so that pipelines stay short. O(N log N).
- ``memory`` (v1): one group takes in all others, until the added memory exceeds what the KV cache had at first.

Which layers each member keeps: ``policy.ranges``, asked once for each group that is left at the end. What a merge frees
does not depend on the ranges; while merging it only matters whether there are any.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jettison.memory.stages import Pull, StagePlan
from jettison.policy.exchange import LinkId
from jettison.policy.links import Links, MachineId
from jettison.policy.ranges import Aims, Member, PlanningWork, RangePlan, StageTerms, has_stages, plan_stages
from jettison.types import GroupId, LayerRange, ModelShape, WorkerId

__all__ = [
    "DropPlan", "GroupMerge", "MergeCandidate", "MergeStrategy", "Partner", "PlannerParams", "choose_partner",
    "plan_drop", "plan_ranges", "pull_seconds", "throughput_cost",
]

MergeStrategy = Literal["throughput", "memory"]

LINK_CHOICES = 8
"""Partners with about equal room that are compared by their link, beside the roomiest of the same machine: a bound on
the work of a tie."""

PARTNER_TRIES = 8
"""Partners of one size that a group is tried with while they do not fit: a bound on the work where none does."""


class MergeCandidate(NamedTuple):
    """A group that may be merged."""

    group_id: GroupId
    members: tuple[WorkerId, ...]
    resident: tuple[LayerRange, ...]
    """Layers that each member still holds, in the order of ``members``."""
    pressure: float
    """Load over capacity."""
    free_bytes: int
    """Free KV bytes of all its stages together."""
    budgets: tuple[int, ...] | None = None
    """Bytes that each member has for parameters and KV: ranges are chosen by what they leave for KV. None = not known,
    and ranges are balanced by parameter bytes."""
    useful_bytes: int = 0
    """KV bytes that as many requests hold as its members have seats for: more are of no use; 0: as many as there are.
    What requests need now is no bound, as a drop begins while a burst still grows."""


@dataclass(frozen=True, slots=True)
class GroupMerge:
    """One new group made of existing ones, stages in pipeline order."""

    sources: tuple[GroupId, ...]
    stages: tuple[StagePlan, ...]
    pulls: tuple[Pull, ...] = ()
    """Shards to fetch before any member drops anything; empty wherever an order of stages fits what members hold."""


@dataclass(frozen=True, slots=True)
class DropPlan:
    """New groups and what they free. ``sufficient`` is False when even merging everything frees too little."""

    merges: tuple[GroupMerge, ...]
    freed_bytes: int
    required_bytes: int

    def only(self, merges: Sequence[GroupMerge], shape: ModelShape) -> DropPlan:
        """The plan with some of its merges, and what those free."""
        num_copies = sum(len(m.sources) - 1 for m in merges)
        return DropPlan(tuple(merges), num_copies * shape.parameter_bytes, self.required_bytes)

    @property
    def sufficient(self) -> bool:
        """Whether the requirement is met."""
        return self.freed_bytes >= self.required_bytes

    def merges_as_fields(self) -> list[dict[str, object]]:
        """For the event log: which groups merge into which stages, each a worker with the first and the end of its
        layers."""
        return [
            {
                "groups": list(merge.sources),
                "stages": [{"worker": s.worker_id, "layers": [s.layers.lo, s.layers.hi]} for s in merge.stages],
            }
            for merge in self.merges
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerParams:
    """How to merge."""

    strategy: MergeStrategy = "throughput"
    kv_region_bytes: int | None = None
    """KV bytes of the undropped cluster: the memory-greedy plan stops when it has added more. None = no bound."""
    link_bytes_per_s: float = 1e9
    """Rate at which one member receives shards."""
    rate_of: Callable[[LinkId], float | None] | None = None
    """The same by link, where links are known to differ; None, and for links where it says so: ``link_bytes_per_s``."""
    max_pull_s: float = 0.0
    """Longest pull that is cheaper than not merging: the wait for memory that the drop is to save. 0 = never pull."""
    links: Links | None = None
    """None where all links are alike."""
    stage_terms: Callable[[float], StageTerms] | None = None
    """What stages take, by the KV bytes of a microbatch's requests (``policy.ranges.Aims``); None: not known, and
    ranges are those that leave the most KV."""
    most_members: int | None = None
    """Most members of a new group: longer pipelines could not keep up. None = no bound."""


class Partner(NamedTuple):
    """A group as another one's choice for a merge. The least is the first choice where distance does not matter: the
    smallest, of those the one with most free memory, then the one under least pressure, then the oldest."""

    num_members: int
    lacking_bytes: int
    """Free bytes, negative."""
    pressure: float
    order: int
    """Its age; no two have the same."""
    machines: frozenset[MachineId] = frozenset()
    """Of its members; empty where all links are alike."""


def choose_partner(
    machines: frozenset[MachineId], others: Iterable[Partner], shape: ModelShape, links: Links | None
) -> Partner | None:
    """The partner of a group whose members are in these machines: the first choice, and of those with about as much
    free memory the nearest. None without any. O(N)."""
    if links is None:
        return min(others, default=None)
    others = list(others)
    choices = heapq.nsmallest(LINK_CHOICES, others)
    if not choices:
        return None
    num_members, lacking_bytes = choices[0][:2]
    if len(machines) == 1:
        choices.append(min((p for p in others if p.machines == machines), default=choices[0]))
    most = lacking_bytes + shape.parameter_bytes // 8  # less free memory than this decides nothing
    near = [p for p in choices if p.num_members == num_members and p.lacking_bytes <= most]
    return min(near, key=lambda p: (links.farthest(machines, p.machines), p))


class _Node(NamedTuple):
    """A group as the planner sees it: an existing one, or one that merges would make."""

    order: int
    candidates: tuple[MergeCandidate, ...]
    pressure: float
    free_bytes: int
    machines: frozenset[MachineId]
    """Of its members; empty where all links are alike."""

    @property
    def size(self) -> int:
        """Members."""
        return sum(len(c.members) for c in self.candidates)

    @property
    def machine(self) -> MachineId | None:
        """The machine that has all of its members; None where they are in several."""
        return next(iter(self.machines)) if len(self.machines) == 1 else None


def plan_drop(
    groups: Sequence[MergeCandidate],
    required_bytes: int,
    shape: ModelShape,
    params: PlannerParams | None = None,
    asking: GroupId | None = None,
    work: PlanningWork | None = None,
) -> DropPlan:
    """Merge groups until ``required_bytes`` are freed or nothing is left to merge (within ``most_members`` a group).

    Ties (all groups, at first): the group under the highest pressure merges with the group of its size that has the
    most free memory; among groups with about as much, with the nearest. The group that asked merges first, with the
    smallest of the others, so that the plan helps it whatever its size. Groups whose members cannot be ordered into
    contiguous ranges inside what they hold merge only where pulling what is missing takes less than ``max_pull_s``.

    ``work`` counts the planner's work: O(N) heap operations, and ranges once for each new group.
    """
    params = params or PlannerParams()
    pool = _Pool(groups, shape, params, work or PlanningWork())
    if params.strategy == "memory":
        return _memory_greedy(pool, required_bytes, shape, params, asking)
    freed = 0
    if asking is not None and freed < required_bytes:
        freed += pool.merge_first(asking)
    while freed < required_bytes:
        gained = pool.merge_two_smallest()
        if gained is None:
            break
        freed += gained
    return pool.plan(freed, required_bytes)


def _memory_greedy(
    pool: _Pool, required_bytes: int, shape: ModelShape, params: PlannerParams, asking: GroupId | None
) -> DropPlan:
    """One group takes in the others, beyond what is required: more KV now, a longer pipeline for it."""
    freed = 0
    bound = params.kv_region_bytes
    first = asking
    while required_bytes > 0 and (bound is None or freed <= bound):
        gained = pool.merge_first(first)
        if gained == 0:
            break
        freed += gained
        first = None  # from here on what was merged last is the largest, and goes on growing
    return pool.plan(freed, required_bytes)


class _Pool:
    """Groups by size, and within a size by pressure and by room: heaps with lazy deletion, O(log N) an operation."""

    def __init__(
        self, groups: Sequence[MergeCandidate], shape: ModelShape, params: PlannerParams, work: PlanningWork
    ) -> None:
        self._shape = shape
        self._params = params
        self._work = work
        self._alive: dict[int, _Node] = {}
        self._sizes: list[int] = []
        self._by_pressure: dict[int, list[tuple[float, int]]] = {}
        self._by_room: dict[int, dict[MachineId | None, list[Partner]]] = {}
        """For each size, all groups (None), and once more the groups with all members in one machine."""
        self._grown: int | None = None
        self._next_order = 0
        self._settled: list[_Node] = []
        links = params.links
        for group in sorted(groups, key=lambda g: g.group_id):
            machines = () if links is None else (links.machine(w) for w in group.members)
            self._push((group,), group.pressure, group.free_bytes, frozenset(machines))

    # --- moves of the planner ---------------------------------------------------------------------------------

    def merge_two_smallest(self) -> int | None:
        """One turn of Fig. 6's loop: bytes freed (0 where no partner fits), None when no group is left to merge."""
        if len(self._alive) < 2:
            return None
        first = self._take_pressed()
        if self._is_too_large(first):
            self._settled.append(first)  # every other pair would be too large as well: this was the smallest size
            return None
        return self._merge(first)

    def merge_first(self, group_id: GroupId | None) -> int:
        """Merge this group (None: the one that grew last) with the smallest other group that fits; 0 where none
        does."""
        chosen = self._grown if group_id is None else self._order_of(group_id)
        if chosen is None:
            chosen = min(self._alive, key=lambda o: (-self._alive[o].pressure, o), default=None)
        if chosen is None:
            return 0
        first = self._alive.pop(chosen)
        refused: list[_Node] = []
        freed = 0
        while self._alive and not freed and not self._is_too_large(first):
            second = self._take_roomy(first)
            freed = self._join(first, second)
            if not freed:
                refused.append(second)
        for node in refused if freed else [first, *refused]:
            self._push(node.candidates, node.pressure, node.free_bytes, node.machines)
        return freed

    def plan(self, freed_bytes: int, required_bytes: int) -> DropPlan:
        """What has become of the groups."""
        merges: list[GroupMerge] = []
        for node in (*self._alive.values(), *self._settled):
            if len(node.candidates) > 1:
                ranges = self._ranges(node.candidates)
                assert ranges is not None, "groups were merged that have no ranges"
                merges.append(GroupMerge(tuple(c.group_id for c in node.candidates), ranges.stages, ranges.pulls))
        merges.sort(key=lambda m: m.sources)
        return DropPlan(tuple(merges), freed_bytes, required_bytes)

    # --- inside -----------------------------------------------------------------------------------------------

    def _merge(self, first: _Node) -> int:
        """Merge with the roomiest of the smallest other groups that fits. Where none of that size fits, the group is
        merged no more."""
        size, freed = self._smallest(), 0
        refused: list[_Node] = []
        while not freed and len(refused) < PARTNER_TRIES and self._alive and self._smallest() == size:
            second = self._take_roomy(first)
            freed = self._join(first, second)
            if not freed:
                refused.append(second)
        if not freed:
            self._settled.append(first)
        for node in refused:
            self._push(node.candidates, node.pressure, node.free_bytes, node.machines)
        return freed

    def _is_too_large(self, first: _Node) -> bool:
        """Whether merging with even the smallest other group would exceed ``most_members``."""
        most = self._params.most_members
        return most is not None and first.size + self._smallest() > most

    def _join(self, first: _Node, second: _Node) -> int:
        candidates = first.candidates + second.candidates
        if not self._may_join(candidates):
            return 0
        copy_bytes = self._shape.parameter_bytes
        # A merged group waits its turn behind groups of its size that no merge has helped yet, first come, first
        # served.
        pressure = -1.0 - self._next_order
        free_bytes = first.free_bytes + second.free_bytes + copy_bytes
        self._grown = self._push(candidates, pressure, free_bytes, first.machines | second.machines)
        return copy_bytes

    def _may_join(self, candidates: Sequence[MergeCandidate]) -> bool:
        if has_stages(_members(candidates), self._shape, self._work):
            return True
        return self._params.max_pull_s > 0.0 and self._ranges(candidates) is not None

    def _ranges(self, candidates: Sequence[MergeCandidate]) -> RangePlan | None:
        """Ranges of a merged group, with pulls only where there are no ranges without; None where the pulls take too
        long."""
        links, may_pull = self._params.links, self._params.max_pull_s > 0.0
        terms = self._params.stage_terms
        plan = plan_stages(
            _members(candidates), self._shape, may_pull=may_pull,
            distance=None if links is None else links.distance, work=self._work,
            aims=None if terms is None else Aims(sum(c.useful_bytes for c in candidates), terms),
        )
        if plan is None or not plan.pulls:
            return plan
        if not _fits(plan.pulls, candidates, self._shape):
            return None
        seconds = pull_seconds(plan.pulls, self._shape, self._params.link_bytes_per_s, self._params.rate_of)
        return plan if seconds <= self._params.max_pull_s else None

    def _push(
        self, candidates: tuple[MergeCandidate, ...], pressure: float, free_bytes: int, machines: frozenset[MachineId]
    ) -> int:
        order = self._next_order
        self._next_order += 1
        node = _Node(order, candidates, pressure, free_bytes, machines)
        size = node.size
        self._alive[order] = node
        if size not in self._by_pressure:
            self._by_pressure[size], self._by_room[size] = [], {}
            heapq.heappush(self._sizes, size)
        heapq.heappush(self._by_pressure[size], (-pressure, order))
        entry = Partner(size, -free_bytes, pressure, order, machines)
        for machine in {None, node.machine}:
            heapq.heappush(self._by_room[size].setdefault(machine, []), entry)
            self._work.num_heap_operations += 1
        self._work.num_heap_operations += 1
        return order

    def _order_of(self, group_id: GroupId) -> int | None:
        return next((o for o, n in self._alive.items() if n.candidates[0].group_id == group_id), None)

    def _smallest(self) -> int:
        """The smallest size of any group that is left; drops stale entries of the heaps on the way."""
        while True:
            size = self._sizes[0]
            heap = self._by_pressure[size]
            while heap and heap[0][1] not in self._alive:
                heapq.heappop(heap)
                self._work.num_heap_operations += 1
            if heap:
                return size
            heapq.heappop(self._sizes)
            self._work.num_heap_operations += 1
            del self._by_pressure[size], self._by_room[size]

    def _take_pressed(self) -> _Node:
        heap = self._by_pressure[self._smallest()]
        self._work.num_heap_operations += 1
        return self._alive.pop(heapq.heappop(heap)[1])

    def _take_roomy(self, first: _Node) -> _Node:
        """``choose_partner`` among the smallest, without a look at all of them."""
        heaps = self._by_room[self._smallest()]
        links = self._params.links
        popped: dict[MachineId | None, list[Partner]] = {
            None: self._pop_roomy(heaps[None], 1 if links is None else LINK_CHOICES)
        }
        if first.machine is not None and first.machine in heaps:
            popped[first.machine] = self._pop_roomy(heaps[first.machine], 1)
        choices = {entry.order: entry for entries in popped.values() for entry in entries}
        taken = choose_partner(first.machines, choices.values(), self._shape, links)
        assert taken is not None, "a size without groups"
        for machine, entries in popped.items():
            for entry in entries:
                if entry.order != taken.order:
                    heapq.heappush(heaps[machine], entry)
                    self._work.num_heap_operations += 1
        return self._alive.pop(taken.order)

    def _pop_roomy(self, heap: list[Partner], num: int) -> list[Partner]:
        """Up to ``num`` groups that are still there, those with most room first."""
        found: list[Partner] = []
        while heap and len(found) < num:
            entry = heapq.heappop(heap)
            self._work.num_heap_operations += 1
            if entry.order in self._alive:
                found.append(entry)
        return found


def plan_ranges(groups: Sequence[MergeCandidate], shape: ModelShape) -> tuple[StagePlan, ...] | None:
    """Stages of all members of ``groups`` without a pull, or None: ``policy.ranges.plan_stages``."""
    plan = plan_stages(_members(groups), shape)
    return None if plan is None else plan.stages


def pull_seconds(
    pulls: Sequence[Pull], shape: ModelShape, link_bytes_per_s: float,
    rate_of: Callable[[LinkId], float | None] | None = None,
) -> float:
    """How long the pulls take: receivers work at the same time, each at the rate of its links."""
    by_receiver: dict[WorkerId, dict[float, int]] = {}
    for pull in pulls:
        rate = (None if rate_of is None else rate_of((pull.src, pull.dst))) or link_bytes_per_s
        at_rates = by_receiver.setdefault(pull.dst, {})
        at_rates[rate] = at_rates.get(rate, 0) + shape.shard_bytes[pull.shard]
    takes_s = (sum(num_bytes / rate for rate, num_bytes in at_rates.items()) for at_rates in by_receiver.values())
    return max(takes_s, default=0.0)


def throughput_cost(group_sizes: Sequence[int], throughput: Callable[[int], float | None]) -> float | None:
    """v1's cost of a configuration: throughput of all instances on their own over that of the groups; 1 is no loss.

    ``throughput`` is the rate of one group of so many instances; None where the rate of some size is not known. A
    member of a larger group is assumed to reach no more than one of a smaller group: a measurement that says otherwise
    is noise, and would make a merge look like a gain. So the cost never falls when groups merge.
    """
    by_member: list[float] = []
    for size in range(1, max(group_sizes, default=0) + 1):
        rate = throughput(size)
        if rate is None:
            return None
        by_member.append(min(rate / size, by_member[-1] if by_member else math.inf))
    if not by_member:
        return None
    together = sum(size * by_member[size - 1] for size in group_sizes)
    return by_member[0] * sum(group_sizes) / together


def _members(groups: Sequence[MergeCandidate]) -> list[Member]:
    return [
        Member(worker_id, resident, budget)
        for g in groups
        for worker_id, resident, budget in zip(
            g.members, g.resident, g.budgets or [None] * len(g.members), strict=True
        )
    ]


def _fits(pulls: Sequence[Pull], groups: Sequence[MergeCandidate], shape: ModelShape) -> bool:
    """Whether every receiver can map what it pulls beside the KV it holds: nothing has been dropped yet."""
    room = {
        worker_id: group.free_bytes * len(resident) // shape.num_layers
        for group in groups
        for worker_id, resident in zip(group.members, group.resident, strict=True)
    }
    for pull in pulls:
        room[pull.dst] -= shape.shard_bytes[pull.shard]
    return all(left >= 0 for left in room.values())

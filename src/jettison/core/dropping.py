"""What the drop planner is told about groups, and when the cluster asks for more instances.

``policy.merge`` decides who merges; ``core.cluster`` carries it out; here is the view in between, and the episode of a
scale-out request: asked once, however many groups are short of memory, until none has been for a while.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from jettison.core.group import GroupCore
from jettison.core.ports import Action, Record
from jettison.core.state import ClusterState
from jettison.policy.merge import MergeCandidate
from jettison.types import NANOSECONDS, GroupId


def merge_candidate(state: ClusterState, group: GroupCore) -> MergeCandidate:
    """A group as the planner sees it."""
    return MergeCandidate(
        group.group_id,
        group.worker_ids,
        tuple(state.workers[w].resident(state.shape) for w in group.worker_ids),
        (group.used_blocks + group.queued_blocks()) / max(1, group.capacity_blocks),
        group.num_free_blocks * block_bytes(state),
    )


def required_bytes(state: ClusterState, overloaded: Sequence[GroupCore], growth_factor: float) -> int:
    """R of KunServe v3 Fig. 6: what all queued prompts need, with room to grow, less what is free where they wait.

    At least one block for each group: it is overloaded, whatever the arithmetic says.
    """
    missing = [int(growth_factor * g.queued_blocks()) - g.num_free_blocks for g in overloaded]
    return sum(max(1, blocks) for blocks in missing) * block_bytes(state)


def kv_region_bytes(state: ClusterState) -> int:
    """KV bytes of all workers with every layer resident."""
    return sum(w.full_blocks for w in state.workers.values()) * block_bytes(state)


def block_bytes(state: ClusterState) -> int:
    """Bytes of one block in all layers."""
    return state.shape.block_bytes_per_layer(state.limits.block_size) * state.shape.num_layers


@dataclass(frozen=True, slots=True)
class ScaleOutParams:
    """When more instances are asked for, and when the request is over."""

    clear_s: float = 5.0
    """An episode ends when nothing has been missing for this long."""
    rise_s: float = 2.0
    """Demand of a merged group has to rise this long without a break ..."""
    horizon_s: float = 5.0
    """... and be on its way to exceed the capacity within this time."""


@dataclass(slots=True)
class _Rise:
    """Demand of a merged group since it last fell, in blocks."""

    since_ns: int
    at_first: int
    last: int


@dataclass(slots=True)
class ScaleOutWatch:
    """At most one open request for more instances; serving goes on meanwhile."""

    params: ScaleOutParams = field(default_factory=ScaleOutParams)
    num_requests: int = 0
    _needed_ns: int | None = None
    """When something was last missing; None while no episode is open."""
    _rises: dict[GroupId, _Rise] = field(default_factory=dict)
    _rising: set[GroupId] = field(default_factory=set)
    """Groups whose demand is above what it was at first."""
    _stale: set[GroupId] = field(default_factory=set)
    """Groups that were touched since the last look."""

    @property
    def is_open(self) -> bool:
        """More instances are asked for now."""
        return self._needed_ns is not None

    def ask(self, group_id: GroupId, missing_bytes: int, reason: str, now_ns: int) -> list[Action]:
        """No plan suffices: a record, unless the request has been made already."""
        was_open = self.is_open
        self._needed_ns = now_ns
        if was_open:
            return []
        self.num_requests += 1
        return [Record("scale_out", now_ns, {"group": group_id, "missing_bytes": missing_bytes, "reason": reason})]

    def note_touched(self, group_ids: Set[GroupId]) -> None:
        """The demand of these groups may be different (at the end of an event)."""
        self._stale |= group_ids

    def look(self, state: ClusterState, now_ns: int) -> list[Action]:
        """On every tick: has a merged group's demand been rising towards its capacity ever since the drop?

        A group that nothing has touched since the last tick, and whose demand has not risen before, is as it was.
        """
        actions: list[Action] = []
        asked = self._stale | self._rising | {g.group_id for g in state.changed_groups()}
        self._stale = set()
        for group_id in sorted(asked):
            group = state.pipelines.get(group_id)
            if group is None:
                self._rises.pop(group_id, None)
                self._rising.discard(group_id)
                continue
            missing = self._missing_blocks(group, now_ns)
            if missing > 0:
                reason = "demand goes on rising after a drop"
                actions += self.ask(group.group_id, missing * block_bytes(state), reason, now_ns)
        if self._needed_ns is not None and now_ns - self._needed_ns >= self.params.clear_s * NANOSECONDS:
            self._needed_ns = None
            actions.append(Record("scale_out_over", now_ns, {}))
        return actions

    def _missing_blocks(self, group: GroupCore, now_ns: int) -> int:
        """What demand will lack at the horizon; 0 while it is not known to rise."""
        demand = group.used_blocks + group.queued_blocks()
        rise = self._rises.get(group.group_id)
        if rise is None or demand < rise.last:
            self._rises[group.group_id] = _Rise(now_ns, demand, demand)
            self._rising.discard(group.group_id)
            return 0
        rise.last = demand
        if demand == rise.at_first:
            return 0
        self._rising.add(group.group_id)
        seconds = (now_ns - rise.since_ns) / NANOSECONDS
        if seconds < self.params.rise_s:
            return 0
        ahead = demand + (demand - rise.at_first) / seconds * self.params.horizon_s
        return max(0, int(ahead) - group.capacity_blocks)

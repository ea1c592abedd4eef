"""Views of groups for the drop planner, in bytes. ``policy.merge`` decides which groups merge, and
``core.moving.moves`` carries it out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from jettison.core.load.distances import known_links
from jettison.core.load.pullrates import PullRates
from jettison.core.load.views import Loads
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.cost.grouprate import rate_between
from jettison.policy.merge import (
    DropPlan,
    MergeCandidate,
    PlannerParams,
    plan_drop,
    throughput_cost,
)
from jettison.types import GroupId


def pressure(group: Group) -> float:
    """Memory pressure of a group: blocks that its requests hold and that waiting online ones need, over its
    capacity."""
    return (group.blocks.num_used + group.queues.queued_blocks()) / max(1, group.blocks.capacity)


def required_bytes(state: ClusterState, overloaded: Sequence[Group], growth_factor: float) -> int:
    """Bytes that overloaded groups lack (R of KunServe v3 Fig. 6): what their queued online prompts need, times
    ``growth_factor``, less the blocks free there. At least one block for each group, as it is overloaded; 0 for no
    groups."""
    missing = [int(growth_factor * g.queues.queued_blocks()) - g.blocks.num_free for g in overloaded]
    return sum(max(1, blocks) for blocks in missing) * block_bytes(state)


def kv_region_bytes(state: ClusterState) -> int:
    """KV bytes that all workers that can serve have together while every layer is resident; 0 without such workers."""
    return sum(w.full_blocks for w in state.workers.values() if w.can_serve) * block_bytes(state)


def block_bytes(state: ClusterState) -> int:
    """Bytes of one block of KV in all layers."""
    return state.shape.block_bytes_per_layer(state.limits.block_size) * state.shape.num_layers


class DropPlanner:
    """Plans drops over the present state: which groups merge, and what links and rates are known for that. It begins
    nothing."""

    def __init__(self, state: ClusterState, loads: Loads) -> None:
        self._state = state
        self._loads = loads
        self._block_bytes = block_bytes(state)

    def plan(
        self, groups: Sequence[Group], required: int, asking: GroupId | None, max_pull_s: float,
        most_members: int | None = None,
    ) -> DropPlan:
        """Merges among these groups that free ``required`` bytes, or as much as can be; ``asking``: the group that has
        to take part. ``max_pull_s``: most seconds that pulling missing shards may take; unless it is infinite (an
        order), no plan pulls over a link of unknown rate. ``most_members``: longest pipeline."""
        state = self._state
        rates = PullRates(state)
        params = PlannerParams(
            strategy=state.params.planner, kv_region_bytes=kv_region_bytes(state),
            link_bytes_per_s=rates.slowest(w for g in groups for w in g.worker_ids),
            rate_of=rates.of if state.params.networks else None, max_pull_s=max_pull_s, links=known_links(state),
            most_members=most_members,
            stage_terms=self._loads.compute.stage_terms(),
        )
        candidates = [self.candidate(g) for g in groups]
        plan = plan_drop(candidates, required, state.shape, params, asking)
        # What an administrator asks for may take as long as it takes.
        if max_pull_s < math.inf and any(rates.of((p.src, p.dst)) is None for m in plan.merges for p in m.pulls):
            plan = plan_drop(candidates, required, state.shape, replace(params, max_pull_s=0.0), asking)
        return plan

    def candidate(self, group: Group) -> MergeCandidate:
        """A group as the drop planner sees it: its workers, their resident shards, its pressure, its free bytes, its
        members' memory and what requests could use of it."""
        state = self._state
        seated_bytes = len(group.worker_ids) * self._loads.compute.seated_bytes()
        return MergeCandidate(
            group.group_id,
            group.worker_ids,
            tuple(state.workers[w].resident(state.shape) for w in group.worker_ids),
            pressure(group),
            group.blocks.num_free * self._block_bytes,
            tuple(state.member_budget_bytes(state.workers[w]) for w in group.worker_ids),
            int(seated_bytes) if seated_bytes < math.inf else 0,
        )

    def throughput_cost(self, plan: DropPlan) -> float | None:
        """Cost of the groups that a plan leaves, by KunServe v1; None without measured or profiled rates of such
        groups."""
        merged = {g for m in plan.merges for g in m.sources}
        sizes = [len(m.stages) for m in plan.merges]
        sizes += [len(g.stages) for g in self._state.groups.values() if g.group_id not in merged]
        rates = self._loads.compute.group_rates()
        return throughput_cost(sizes, lambda num_stages: rate_between(rates, num_stages))

"""When to drop and when to restore: looks at every queue on every tick and after every step.

The tests are policies (``policy.overload``, ``policy.merge``, ``policy.restore``) over the views of ``core.loads``;
what is decided is begun through ``core.moves``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jettison.core.distances import known_links
from jettison.core.dropping import ScaleOutWatch, kv_region_bytes, merge_candidate, required_bytes
from jettison.core.group import GroupCore
from jettison.core.loads import Loads
from jettison.core.moves import Moves
from jettison.core.ports import Action, Record
from jettison.core.pullrates import PullRates
from jettison.core.restoring import Restoring, fits, room_blocks, will_hold
from jettison.core.state import ClusterState
from jettison.cost.grouprate import rate_between
from jettison.policy.batching import BlockedBy
from jettison.policy.merge import DropPlan, GroupMerge, PlannerParams, plan_drop, throughput_cost
from jettison.policy.overload import Assessment
from jettison.policy.restore import MergedLoad, early_overflow_blocks, plan_splits, should_restore, should_yield
from jettison.types import GroupId

MOST_PLANS = 4
"""Plans that are made for one drop, each with shorter pipelines than the one before; mostly the second is accepted."""


class _Choice(NamedTuple):
    """What comes of planning a drop."""

    plan: DropPlan
    """Merges that relieve a group which is overloaded, and could keep up."""
    missing_bytes: int
    """What is required beyond that, and beyond merges that nobody has asked for yet; all of it where none is left."""
    declined: Assessment | None
    """Why the first plan was not accepted; None where it was."""


class Watching:
    """Decides; holds nothing but the episode of a scale-out request."""

    def __init__(self, state: ClusterState, loads: Loads, moves: Moves) -> None:
        self.scale_out = ScaleOutWatch()
        self._state = state
        self._loads = loads
        self._moves = moves

    def look(self, now_ns: int, *, after_step: bool = False) -> list[Action]:
        """Overload and restore checks on every tick; after a step only overload, and only where somebody waits.

        The next step is planned after this: what can wait for the tick would be a bubble here.
        """
        self._loads.forget_dissolved()
        if self._loads.params.overload_policy != "drop":
            return []
        actions: list[Action] = []
        for group_id in self._candidates(after_step=after_step):
            group = self._state.groups.get(group_id)
            if group is None or not self._may_bind(group, after_step):
                continue
            if not self._may_be_overloaded(group, now_ns):
                continue
            monitor = self._loads.monitor(group)
            if monitor.awaits_tick:
                continue
            assessment = self._assess(group, now_ns)
            lasting_s = monitor.note_verdict(assessment.overloaded, assessment.declines, now_ns)
            if assessment.overloaded:
                if lasting_s >= self._loads.params.overload.min_overloaded_s:
                    actions += self._relieve(group, assessment, now_ns)
            elif assessment.declines:
                actions += self._decline(group, assessment, now_ns)
        if self._loads.params.auto_restore and not after_step:
            for group in list(self._state.pipelines.values()):
                actions += self._consider_restore(group, now_ns)
        return actions

    @property
    def foresees(self) -> bool:
        """A group may be overloaded although memory keeps nobody out yet: all are looked at on every tick."""
        params = self._loads.params
        return params.overload_policy == "drop" and params.overload.horizon_s > 0.0

    def _candidates(self, *, after_step: bool) -> list[GroupId]:
        """Groups that may be overloaded, in order."""
        if not self.foresees:
            return sorted(self._loads.kept_out)
        return sorted(self._state.changes.queued) if after_step else list(self._state.groups)

    def _may_bind(self, group: GroupCore, after_step: bool) -> bool:
        """Whether an assessment could come to anything; most groups need none."""
        if self.foresees:
            return bool(group.waiting) or not after_step
        return bool(group.waiting) and group.head_blocked_by is BlockedBy.MEMORY

    def _may_be_overloaded(self, group: GroupCore, now_ns: int) -> bool:
        # From the first look at a group on, the step times of groups of its size are their own, and no others'
        # (``Loads.exchange_costs``), though there may be none yet.
        self._loads.steptime(len(group.stages))
        return self._loads.may_be_overloaded(group, now_ns)

    def _assess(self, group: GroupCore, now_ns: int) -> Assessment:
        return self._loads.assess(group, now_ns, is_restoring=self._moves.restore_of(group) is not None)

    def _is_overloaded(self, group: GroupCore, now_ns: int) -> bool:
        return self._may_be_overloaded(group, now_ns) and self._assess(group, now_ns).overloaded

    # --- drop -------------------------------------------------------------------------------------------------

    def _relieve(self, group: GroupCore, assessment: Assessment, now_ns: int) -> list[Action]:
        """A group is overloaded: turn a restore round, or drop."""
        restore = self._moves.restore_of(group)
        if restore is not None:
            return self._moves.turn_round(restore, now_ns, assessment.reason)
        if self._moves.is_busy(group) or not self._loads.has_dwelled(group, now_ns):
            return []
        busy = self._moves.busy_workers()
        free = [
            g for g in self._state.groups.values()
            if g is group or (busy.isdisjoint(g.worker_ids) and self._loads.has_dwelled(g, now_ns))
        ]
        overloaded = [g for g in free if g is group or self._is_overloaded(g, now_ns)]
        required = required_bytes(self._state, overloaded, self._loads.params.growth_factor)
        max_pull_s = assessment.gain_s
        choice = self._choose(free, required, group, overloaded, max_pull_s, now_ns)
        plan = choice.plan
        actions: list[Action] = []
        if plan.merges:
            made = next((len(m.stages) for m in plan.merges if group.group_id in m.sources), None)
            if made is not None:  # what is told is the verdict on that length
                assessment = self._loads.assess(group, now_ns, is_restoring=False, num_merged=made)
            decision = {
                "group": group.group_id,
                "required_bytes": required,
                "freed_bytes": plan.freed_bytes,
                "sufficient": plan.sufficient,
                "overloaded_groups": [g.group_id for g in overloaded],
                "pulled_shards": sum(len(m.pulls) for m in plan.merges),
                "throughput_cost": self._throughput_cost(plan),
                "merges": plan.merges_as_fields(),
            } | assessment.as_fields()
            actions.append(Record("drop_decided", now_ns, decision))
        elif choice.declined is not None:
            actions += self._decline(group, choice.declined, now_ns)
        # Where others cannot take part just now, the end of a move or of a dwell time may change that at any step.
        if not plan.merges and (choice.declined is not None or len(free) == len(self._state.groups)):
            self._loads.monitor(group).note_unrelieved()
        actions += self._begin(plan, now_ns)
        if choice.missing_bytes > 0 and not busy:
            reason = "no drop plan frees enough" + (" that keeps up" if choice.declined is not None else "")
            actions += self.scale_out.ask(group.group_id, choice.missing_bytes, reason, now_ns)
        return actions

    def _choose(
        self, free: Sequence[GroupCore], required: int, asker: GroupCore, overloaded: Sequence[GroupCore],
        max_pull_s: float, now_ns: int,
    ) -> _Choice:
        """A plan that relieves who is overloaded, with pipelines as long as they keep up.

        The first look at a group takes the shortest pipeline for granted. Where a plan makes longer ones that could
        not keep up, another is made with the longest that could. Merges in which nobody is overloaded are left out:
        they relieve no queue, and their turn comes when somebody asks.
        """
        asking = {g.group_id: g for g in overloaded}
        most_members: int | None = None
        declined: Assessment | None = None
        for _ in range(MOST_PLANS):
            plan = self._plan_drop(free, required, asker.group_id, max_pull_s, most_members)
            kept: list[GroupMerge] = []
            refused: list[GroupMerge] = []
            bounds: list[int] = []
            for merge in plan.merges:
                judges = self._judges(merge, asker, asking)
                if not judges:
                    continue
                verdict = self._verdict(judges, len(merge.stages), now_ns)
                if verdict.overloaded:
                    kept.append(merge)
                else:
                    declined = declined or verdict
                    refused.append(merge)
                    bounds.append(self._longest_accepted(judges, len(merge.stages), now_ns))
            if not refused:
                break
            most_members = min(bounds)
        shape = self._state.shape
        freed = plan.freed_bytes - plan.only(refused, shape).freed_bytes if kept else 0
        return _Choice(plan.only(kept, shape), required - freed, declined)

    def _judges(
        self, merge: GroupMerge, asker: GroupCore, asking: Mapping[GroupId, GroupCore]
    ) -> list[GroupCore]:
        """Who says whether a merge is worth it: the group that asks, in another merge any that is overloaded."""
        return [asker] if asker.group_id in merge.sources else [asking[g] for g in merge.sources if g in asking]

    def _verdict(self, judges: Sequence[GroupCore], num_stages: int, now_ns: int) -> Assessment:
        """On a merged group of so many stages, by the first of them that is in favour."""
        verdicts = [self._loads.assess(g, now_ns, is_restoring=False, num_merged=num_stages) for g in judges]
        return next((v for v in verdicts if v.overloaded), verdicts[0])

    def _longest_accepted(self, judges: Sequence[GroupCore], num_stages: int, now_ns: int) -> int:
        """Most stages, fewer than these, that are accepted, if fewer always keep up where more do: O(log) verdicts."""
        shorter = range(1, num_stages)
        return bisect_left(shorter, True, key=lambda num: not self._verdict(judges, num, now_ns).overloaded)

    def _decline(self, group: GroupCore, assessment: Assessment, now_ns: int) -> list[Action]:
        if not self._loads.monitor(group).is_news(now_ns):
            return []
        return [Record("drop_declined", now_ns, {"group": group.group_id} | assessment.as_fields())]

    def _plan_drop(
        self, groups: Sequence[GroupCore], required: int, asking: GroupId | None, max_pull_s: float,
        most_members: int | None = None,
    ) -> DropPlan:
        rates = PullRates(self._state, self._loads.params)
        members = [self._state.workers[w] for g in groups for w in g.worker_ids]
        params = PlannerParams(
            strategy=self._loads.params.planner, kv_region_bytes=kv_region_bytes(self._state),
            link_bytes_per_s=rates.slowest(m.worker_id for m in members),
            max_pull_s=max_pull_s, links=known_links(self._state), most_members=most_members,
            budget_bytes=self._state.member_budget_bytes(members) if members else None,
        )
        candidates = [merge_candidate(self._state, g) for g in groups]
        plan = plan_drop(candidates, required, self._state.shape, params, asking)
        # What an administrator asks for may take as long as it takes.
        if max_pull_s < math.inf and any(rates.of((p.src, p.dst)) is None for m in plan.merges for p in m.pulls):
            plan = plan_drop(candidates, required, self._state.shape, replace(params, max_pull_s=0.0), asking)
        return plan

    def _begin(self, plan: DropPlan, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        for merge in plan.merges:
            sources = [self._state.groups[g] for g in merge.sources]
            actions += self._moves.merge(sources, merge.stages, now_ns, merge.pulls)
        return actions

    def _throughput_cost(self, plan: DropPlan) -> float | None:
        """v1's cost of the groups that a plan leaves; None without a profile of such groups."""
        merged = {g for m in plan.merges for g in m.sources}
        sizes = [len(m.stages) for m in plan.merges]
        sizes += [len(g.stages) for g in self._state.groups.values() if g.group_id not in merged]
        rates = self._loads.group_rates()
        return throughput_cost(sizes, lambda num_stages: rate_between(rates, num_stages))

    def request_drop(self, now_ns: int) -> list[Action]:
        """Merge the two smallest idle-of-moves groups whatever the load (administration, verification).

        Static pipelines stay as they are.
        """
        if self._loads.params.overload_policy == "pipeline":
            return []
        busy = self._moves.busy_workers()
        for restore in self._moves.restores:
            return self._moves.turn_round(restore, now_ns, "requested")
        idle = [g for g in self._state.groups.values() if busy.isdisjoint(g.worker_ids)]
        plan = self._plan_drop(idle, 1, None, math.inf)
        return self._begin(plan, now_ns)

    # --- restore ----------------------------------------------------------------------------------------------

    def _consider_restore(self, group: GroupCore, now_ns: int) -> list[Action]:
        under_way = self._moves.restore_of(group)
        if under_way is not None and under_way.group is group:
            return self._reconsider(under_way, now_ns)
        if self._moves.is_busy(group):
            return []
        load, params = self._loads.merged_load(group, now_ns), self._loads.params.restore
        patient = replace(params, min_settled_s=self._loads.monitor(group).patience(params.min_settled_s))
        if group.admission_cap_blocks is None:
            if should_restore(load, patient) and self._can_split(group):
                return self._moves.restore(group, now_ns, "its load fits into its members again")
            overflow_blocks = early_overflow_blocks(load, patient)
            if overflow_blocks is not None and self._can_split(group, overflow_blocks):
                reason = "all but a little of its load fits into its members again"
                return self._moves.restore(group, now_ns, reason, max_overflow_blocks=overflow_blocks)
            if not should_yield(load, patient) or self._needs_merging(group):
                return []
            return [self._yield(group, load, now_ns)]
        if self._needs_merging(group):
            group.admission_cap_blocks = None
        elif group.used_blocks <= group.admission_cap_blocks and not group.moving:
            return self._moves.restore(group, now_ns, "compute binds, and its members have more of it apart")
        return []

    def _reconsider(self, restore: Restoring, now_ns: int) -> list[Action]:
        """A restore whose members have not split yet: does what has arrived since let it come to an end, and last?"""
        group = restore.group
        if not restore.may_still_wait:
            return []
        if not will_hold(self._state, group, restore.split_plan):
            return self._moves.turn_round(restore, now_ns, "a request needs all members' memory")
        if not group.waiting:
            return []
        load = self._loads.merged_load(group, now_ns)
        if not restore.takes_queue_along and should_yield(load, self._loads.params.restore):
            record = self._yield(group, load, now_ns)
            return [record, *self._moves.take_queue_along(restore, now_ns)]
        return []

    def _yield(self, group: GroupCore, load: MergedLoad, now_ns: int) -> Record:
        """Compute binds: admit only what the members could hold when they take their layers back."""
        group.admission_cap_blocks = self._fitting_blocks(group)
        fields = {
            "group": group.group_id,
            "merged_compute_load": load.merged_compute_load,
            "separate_compute_load": load.separate_compute_load,
            "cap_blocks": group.admission_cap_blocks,
        }
        return Record("yield", now_ns, fields)

    def _can_split(self, group: GroupCore, max_overflow_blocks: int = 0) -> bool:
        """All requests have room apart, now and as long as they were asked to become."""
        ways = plan_splits(group.stages, self._state.shape.num_layers)
        return any(
            will_hold(self._state, group, way) and fits(self._state, group, way, max_overflow_blocks) for way in ways
        )

    def _needs_merging(self, group: GroupCore) -> bool:
        """Some request is too large for a member on its own."""
        least = min(self._state.workers[w].full_blocks for w in group.worker_ids)
        states = (*group.waiting, *group.running.values(), *group.moving.values())
        return any(group.blocks_for(s.num_tokens_to_hold) > least for s in states)

    def _fitting_blocks(self, group: GroupCore) -> int:
        """Blocks that may be held when the members take layers back, in the way of splitting that has most room."""
        ways = plan_splits(group.stages, self._state.shape.num_layers)
        most = max(min(room_blocks(self._state, part) for part in way.parts) for way in ways)
        return most - most // 7

    def request_restore(self, now_ns: int) -> list[Action]:
        """Restore every merged group that no move is touching (administration, verification), static ones excepted."""
        if self._loads.params.overload_policy == "pipeline":
            return []
        actions: list[Action] = []
        for group in list(self._state.groups.values()):
            if len(group.stages) > 1 and not self._moves.is_busy(group):
                actions += self._moves.restore(group, now_ns, "requested")
        return actions

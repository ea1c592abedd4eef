"""Drop: an overloaded group merges with others, and the layers that they hold twice make room for KV (KunServe).

The rung looks at every queue that memory keeps out on every tick, and after every step. Policies decide
(``policy.overload``, ``policy.merge``) over the views of ``core.load.views``; ``core.moving.merging`` carries merges
out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jettison.core.ladder.dropplans import DropPlanner, required_bytes
from jettison.core.ladder.hooks import Calm
from jettison.core.ladder.rung import Means, Moment, Offer, Rung, register
from jettison.core.ladder.waysout import WaysOut
from jettison.core.load.outlook import Outlook
from jettison.core.moving.restoring import Restoring
from jettison.core.ports import Action, Record
from jettison.core.serving.group import Group
from jettison.policy.batching import BlockedBy
from jettison.policy.merge import DropPlan, GroupMerge
from jettison.policy.forecast import Arrangement, Forecast, Load, Plan, forecast
from jettison.policy.overload import Assessment
from jettison.policy.soonest import Way, is_worth_waiting_for
from jettison.types import NANOSECONDS, GroupId, WorkerId

ASK_EVERY_NS = NANOSECONDS // 10
HORIZON_S = 10.0
FITS = 0.43
import math
import os
MARGIN = float(os.environ.get("DMARGIN", "0.3"))
MOST_PLANS = 4
"""Plans that are made for one drop, each with shorter pipelines than the one before; mostly the second is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropOffer(Offer):
    """Merges that relieve the overloaded group ``groups[0]``. Without a plan, its restore is called off; with an empty
    one, more memory is asked for."""

    plan: DropPlan | None = None
    missing_bytes: int = 0
    """Bytes that are required beyond what the plan frees; 0: none."""
    told: tuple[Record, ...] = field(default=())


class _Choice(NamedTuple):
    """The result of planning a drop."""

    plan: DropPlan
    """Merges that relieve an overloaded group and could keep up."""
    missing_bytes: int
    """Bytes required beyond what the plan frees and what merges that no group has asked for yet would; all of them for
    an empty plan."""
    declined: Assessment | None
    """Why the first plan was not accepted; None where it was."""


class Question(NamedTuple):
    outlook: Outlook
    lengths: Mapping[GroupId, int]
    tokens: float
    load: Load
    stay: Arrangement
    staying: Forecast
    ample: Forecast
    dwell_s: float
    now_ns: int

    def gain(self, merges: Sequence[Sequence[GroupId]]) -> float:
        """Request-seconds that these merges are forecast to save, less what makes them worth their risk."""
        merged = {g for m in merges for g in m}
        lengths = [length for g, length in self.lengths.items() if g not in merged]
        lengths += [sum(self.lengths[g] for g in m) for m in merges]
        tokens = self.tokens + self.outlook.copies_tokens(sum(len(m) - 1 for m in merges))
        arrangement = self.outlook.arrangement(lengths, tokens)
        assert arrangement is not None
        dropping = forecast(self.load, Plan(arrangement, self.stay._replace(starts_s=self.dwell_s), FITS), HORIZON_S)
        possible = max(0.0, self.staying.cost_request_s - self.ample.cost_request_s)
        if os.environ.get("SHOW"):
            print(f"{self.now_ns/1e9:.2f} {merges} stay {self.staying} drop {dropping} ample {self.ample.cost_request_s} n={len(self.load.running)}+{len(self.load.waiting)} {self.load.arrivals[:4]}")
        return self.staying.cost_request_s - dropping.cost_request_s - MARGIN * possible


@register
class DropRung(Rung):
    """Decides when an overloaded group drops, and which groups merge with it. ``core.moving.moves`` carries on what it
    begins."""

    name = "drop"
    rank = 70
    moments = frozenset({Moment.TICK, Moment.STEP_ENDED})
    forms_pipelines = True
    way = Way.DROP

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._state, self._loads, self._moves = means.state, means.loads, means.moves
        self._planner = DropPlanner(means.state, means.loads)
        self._ways = WaysOut(means)
        self._asked_ns: dict[GroupId, int] = {}

    def worker_ids(self) -> Collection[WorkerId]:
        """The members of all merges under way; empty: none."""
        return [w for merge in self._moves.merges for w in merge.worker_ids]

    def decides_nothing_before(self, moment: Moment) -> Calm:
        """No calm where settings have memory foreseen to run out: then all groups are looked at, although memory keeps
        no request out yet. Else calm without end: only a queue that memory keeps out is a reason to look."""
        return Calm(0 if self._foresees else None)

    @property
    def _foresees(self) -> bool:
        """Whether settings have drops begin before memory runs out."""
        return self._state.params.overload.horizon_s > 0.0

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer | Record]:
        """Yield offers for overloaded groups (merges, a restore to be called off, or more memory), and records of why a
        group does not drop; nothing where no group is overloaded."""
        after_step = moment is Moment.STEP_ENDED
        for group_id in self._candidates(after_step=after_step):
            group = self._state.groups.get(group_id)
            if group is None or not self._may_bind(group, after_step) or not self._may_be_overloaded(group, now_ns):
                continue
            monitor = self._loads.monitor(group)
            if monitor.awaits_tick:
                continue
            since = self._asked_ns.get(0)
            if since is not None and now_ns - since < ASK_EVERY_NS:
                continue
            self._asked_ns[0] = now_ns
            assessment = self._assess(group, now_ns)
            yield from self._relieve(group, assessment, now_ns)

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Carry an offer out: without a plan, have the group's restore called off; else have rungs below give way at
        the plan's workers, begin its merges, and tell rungs of bytes that it lacks. Returns the actions and records."""
        assert isinstance(offer, DropOffer), offer
        asking = offer.groups[0]
        actions: list[Action] = [*offer.told]
        if offer.plan is None:
            return actions + self.means.ask_way(self, self._state.groups[asking].worker_ids, offer.why, now_ns)
        members = [s.worker_id for merge in offer.plan.merges for s in merge.stages]
        actions += self.means.ask_way(self, members, offer.why, now_ns)
        for merge in offer.plan.merges:
            sources = [self._state.groups[g] for g in merge.sources]
            actions += self._moves.merge(sources, merge.stages, now_ns, merge.pulls)
        if offer.missing_bytes > 0:
            actions += self.means.tell_unmet(asking, offer.missing_bytes, offer.why, now_ns)
        return actions

    # --- overload ---------------------------------------------------------------------------------------------

    def _candidates(self, *, after_step: bool) -> list[GroupId]:
        """Ids of the groups that may be overloaded, in order. Where memory is foreseen to run out: all, or after a step
        those with online requests waiting. Else those whose queue memory keeps out."""
        if not self._foresees:
            return sorted(self._loads.kept_out)
        return sorted(self._state.changes.queued_online) if after_step else list(self._state.groups)

    def _may_bind(self, group: Group, after_step: bool) -> bool:
        """Whether an assessment of the group could lead to anything: a look at its queue that spares most groups the
        rest."""
        if self._foresees:
            return bool(group.queues.waiting) or not after_step
        return bool(group.queues.waiting) and group.head_blocked_by is BlockedBy.MEMORY

    def _may_be_overloaded(self, group: Group, now_ns: int) -> bool:
        """Whether an assessment could find the group overloaded, or a drop not worth it; a quick look."""
        return self._loads.may_be_overloaded(group, now_ns)

    def _assess(self, group: Group, now_ns: int) -> Assessment:
        """The verdict on whether the group is overloaded now; for a group in a restore, on whether the restore goes
        on."""
        return self._loads.assess(group, now_ns, is_restoring=self._moves.restore_of(group) is not None)

    def _is_overloaded(self, group: Group, now_ns: int) -> bool:
        """Whether the group is overloaded now, by the full assessment."""
        return self._may_be_overloaded(group, now_ns) and self._assess(group, now_ns).overloaded

    def _decline(self, group: Group, assessment: Assessment, now_ns: int) -> Iterator[Record]:
        """Yield the log record that this assessment speaks against a drop; nothing within a few seconds of the group's
        last such record."""
        if self._loads.monitor(group).is_news(now_ns):
            yield Record("drop_declined", now_ns, {"group": group.group_id} | assessment.as_fields())

    # --- plans ------------------------------------------------------------------------------------------------

    def _relieve(self, group: Group, assessment: Assessment, now_ns: int) -> Iterator[Offer | Record]:
        """Yield what would relieve an overloaded group: its restore called off, merges, or more memory. Where a sleeper
        will serve sooner, or a plan is not worth it, yield a record of that. Nothing while a move touches the group or
        its dwell time lasts. Where no plan relieves the group, none is made again before the next tick."""
        if (restore := self._moves.restore_of(group)) is not None:
            question = self._question(now_ns, restore)
            if question is not None and question.gain([[-1 - w for w in restore.worker_ids]]) > 0.0:
                yield DropOffer(groups=(group.group_id,), why=assessment.reason)
            return
        if self._moves.is_moving(group) or not self._loads.has_dwelled(group, now_ns):
            return
        if (held := self._sooner_wake(group, now_ns)) is not None:
            if self._loads.monitor(group).is_news(now_ns):
                yield held
            return
        moving = self._moves.moving_workers()
        nothing_moves = not moving
        free = [
            g for g in self._state.groups.values()
            if g is group or (moving.isdisjoint(g.worker_ids) and self._loads.has_dwelled(g, now_ns))
        ]
        overloaded = [g for g in free if g is group or g.group_id in self._loads.kept_out]
        required = required_bytes(self._state, overloaded, self._state.params.growth_factor)
        choice = self._choose(free, required, group, overloaded, assessment.gain_s, now_ns)
        plan, told = choice.plan, tuple[Record, ...]()
        if plan.merges:
            told = (self._decision(group, assessment, overloaded, required, plan, now_ns),)
        elif choice.declined is not None:
            yield from self._decline(group, choice.declined, now_ns)
        # Where others cannot take part just now, the end of a move or of a dwell time may change that at any step.
        if not plan.merges and (choice.declined is not None or len(free) == len(self._state.groups)):
            self._loads.monitor(group).note_unrelieved()
        missing = choice.missing_bytes if nothing_moves else 0
        if plan.merges or missing > 0:
            why = "no drop plan frees enough" + (" that keeps up" if choice.declined is not None else "")
            yield DropOffer(groups=(group.group_id,), why=why, plan=plan, missing_bytes=missing, told=told)

    def _sooner_wake(self, group: Group, now_ns: int) -> Record | None:
        """The log record that a drop is held back, as a sleeper that is being woken will serve no later than the drop
        would; None: no wake under way is predicted to. Sleepers that are not being woken do not count."""
        sleepers = self.means.sleepers
        for worker_id in sleepers.waking:
            if (expected_ns := sleepers.expected_ns(worker_id)) is None:
                continue
            left_s, drop_s = (expected_ns - now_ns) / NANOSECONDS, self._ways.drop_s(group, now_ns)
            if is_worth_waiting_for(left_s, drop_s):
                fields = {"group": group.group_id, "worker": worker_id, "wake_left_s": left_s, "drop_s": drop_s}
                return Record("drop_held_back", now_ns, fields)
        return None

    def _decision(
        self, group: Group, assessment: Assessment, overloaded: Sequence[Group], required: int,
        plan: DropPlan, now_ns: int,
    ) -> Record:
        """The log record of a drop that is about to begin, with its merges and the verdict on the asking group's merge
        (if it takes part, else on the group as it is)."""
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
            "throughput_cost": self._planner.throughput_cost(plan),
            "merges": plan.merges_as_fields(),
        } | assessment.as_fields()
        return Record("drop_decided", now_ns, decision)

    def _choose(
        self, free: Sequence[Group], required: int, asker: Group, overloaded: Sequence[Group],
        max_pull_s: float, now_ns: int,
    ) -> _Choice:
        """A plan that relieves the overloaded groups, with pipelines as long as they keep up, the bytes that it lacks,
        and the verdict against the first plan, if any.

        The first look at a group takes the shortest pipeline for granted. Where a plan makes longer ones that could not
        keep up, another is made with the longest that could. Merges of groups that are not overloaded are left out:
        they relieve no queue, and their turn comes when one of them asks.
        """
        asking = {g.group_id: g for g in overloaded}
        shape, tried, most_members = self._state.shape, 0, (int(os.environ["MOSTM"]) if "MOSTM" in os.environ else None)
        best: DropPlan | None = None
        best_gain = 0.0
        question = self._question(now_ns)
        while question is not None and tried < MOST_PLANS:
            tried += 1
            plan = self._planner.plan(free, required, asker.group_id, max_pull_s, most_members)
            kept = [m for m in plan.merges if self._judges(m, asker, asking)]
            kept.sort(key=lambda m: asker.group_id not in m.sources)
            for count in {len(kept), (len(kept) + 1) // 2, 1} if kept else ():
                part = plan.only(kept[:count], shape)
                gain = question.gain([m.sources for m in part.merges])
                if gain > best_gain:
                    best, best_gain = part, gain
            longest = max((len(m.stages) for m in plan.merges), default=0)
            if longest <= 2:
                break
            most_members = longest - 1
        if best is None:
            return _Choice(DropPlan((), 0, required), required, self._assess(asker, now_ns))
        return _Choice(best, required - best.freed_bytes, None)

    def _question(self, now_ns: int, restore: Restoring | None = None) -> Question | None:
        """What merges would save the whole cluster: waiting requests go where there is room, so all groups are one
        pool. None while step times are not known. ``restore``: taken to be over."""
        outlook, groups = self._loads.outlook, list(self._state.groups.values())
        apart = () if restore is None else restore.worker_ids
        lengths = {g.group_id: len(g.stages) for g in groups if g.worker_ids[0] not in apart}
        tokens = outlook.capacity_tokens(g for g in groups if g.group_id in lengths) + outlook.apart_tokens(apart)
        lengths |= {-1 - w: 1 for w in apart}
        stay = outlook.arrangement(list(lengths.values()), tokens)
        if stay is None:
            return None
        load = outlook.load(groups)
        staying = forecast(load, Plan(stay), HORIZON_S)
        ample = forecast(load, Plan(stay._replace(capacity_tokens=math.inf)), HORIZON_S)
        return Question(outlook, lengths, tokens, load, stay, staying, ample, self._state.params.restore.min_settled_s, now_ns)

    def _judges(
        self, merge: GroupMerge, asker: Group, asking: Mapping[GroupId, Group]
    ) -> list[Group]:
        """The groups that say whether a merge is worth it: the asking one if it takes part, else all overloaded ones in
        it. Empty: none."""
        return [asker] if asker.group_id in merge.sources else [asking[g] for g in merge.sources if g in asking]

"""Drop: an overloaded group merges with others, and the layers that they hold twice make room for KV (KunServe).

The rung looks at every queue that memory keeps out on every tick, and after every step. ``policy.merge`` plans, the
forecast says whether a plan is worth it (``core.ladder.forecasts``), and ``core.moving.merging`` carries merges out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jettison.core.ladder.dropplans import DropPlanner, required_bytes
from jettison.core.ladder.forecasts import HORIZON_S, Question, Saving, lone
from jettison.core.ladder.hooks import Calm
from jettison.core.ladder.outcomes import Decided
from jettison.core.ladder.rung import Means, Moment, Offer, Rung, Worth, register
from jettison.core.moving.restoring import Restoring
from jettison.core.ports import Action, Record
from jettison.core.serving.group import Group
from jettison.policy.batching import BlockedBy
from jettison.policy.merge import DropPlan
from jettison.policy.overload import Trigger
from jettison.types import GroupId, WorkerId

BINDS = "memory binds"
NOT_WORTH_IT = "a pipeline would cost most of what memory saves"

MOST_PLANS = 4
"""Plans that are made for one drop, each with shorter pipelines than the one before; mostly the second is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropOffer(Offer):
    """Merges that relieve the overloaded group ``groups[0]``. Without a plan, its restore is called off; with an empty
    one, more memory is asked for."""

    plan: DropPlan | None = None
    missing_bytes: int = 0
    """Bytes that are required beyond what the plan frees; 0: none."""
    saving: Saving | None = None
    """What the plan is forecast to save; None: none was weighed."""
    told: tuple[Record, ...] = ()


class _Choice(NamedTuple):
    """The result of planning a drop."""

    plan: DropPlan
    """Merges that relieve an overloaded group, and are worth it."""
    missing_bytes: int
    """Bytes required beyond what the plan frees; all of them for an empty plan."""
    saving: Saving | None
    """What the plan is forecast to save; of an empty one, what the best of those declined would have saved. None: no
    plan could be made, or none was weighed."""


@register
class DropRung(Rung):
    """Decides when an overloaded group drops, and which groups merge with it. ``core.moving.moves`` carries on what it
    begins."""

    name = "drop"
    rank = 70
    moments = frozenset({Moment.TICK, Moment.STEP_ENDED})
    forms_pipelines = True
    relieves = True

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._state, self._loads, self._moves = means.state, means.loads, means.moves
        self._planner = DropPlanner(means.state, means.loads)

    def worker_ids(self) -> Collection[WorkerId]:
        """The members of all merges under way; empty: none."""
        return [w for merge in self._moves.merges for w in merge.worker_ids]

    def decides_nothing_before(self, moment: Moment) -> Calm:
        """Calm without end: only a queue that memory keeps out is a reason to look. No calm where settings look ahead,
        nor on ticks while a forecast's outcome is counted."""
        is_watching = moment is Moment.TICK and self.means.outcomes.is_watching
        return Calm(0 if self._foresees or is_watching else None)

    @property
    def _foresees(self) -> bool:
        """Whether settings have drops begin before memory runs out."""
        return self._state.params.overload.horizon_s > 0.0

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer | Record]:
        """Yield offers for overloaded groups (merges, a restore to be called off, or more memory), and records of why a
        group does not drop; nothing where no group is overloaded. Yield the outcome of the last forecast in time."""
        if moment is Moment.TICK:
            yield from self.means.outcomes.on_tick(now_ns)
        pressed = self._loads.pressed()
        for group_id in self.means.turns.in_turn(pressed) if pressed else ():
            group = self._state.groups.get(group_id)
            if group is None or not self._is_overloaded(group, now_ns) or self._loads.monitor(group).awaits_tick:
                continue
            yield from self._relieve(group, now_ns)

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Carry an offer out: without a plan, have the group's restore called off; else have rungs below give way at
        the plan's workers, begin its merges, and tell rungs of bytes that it lacks. Returns the actions and records."""
        assert isinstance(offer, DropOffer), offer
        asking = offer.groups[0]
        if offer.plan is not None and self._is_stale(offer.plan):
            return []
        actions: list[Action] = []
        if offer.saving is not None:
            actions += self.means.outcomes.begin(Decided("drop_decided", asking, offer.saving.taking), now_ns)
        actions += offer.told
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

    def _is_stale(self, plan: DropPlan) -> bool:
        """Whether something that was begun since the plan was made has taken one of its groups or members."""
        moving = self._moves.moving_workers()
        return any(
            g not in self._state.groups or not moving.isdisjoint(self._state.groups[g].worker_ids)
            for merge in plan.merges for g in merge.sources
        )

    # --- overload ---------------------------------------------------------------------------------------------

    def _is_overloaded(self, group: Group, now_ns: int) -> bool:
        """Whether memory keeps the group's queue out, and has for long enough, or is foreseen to."""
        is_blocked = bool(group.queues.waiting) and group.head_blocked_by is BlockedBy.MEMORY
        return (is_blocked or self._foresees) and self._loads.memory_binds(group, now_ns)

    @property
    def _weighs(self) -> bool:
        """Whether a forecast decides."""
        return self._state.params.overload.trigger is Trigger.FORECAST

    def _may_ask(self, group: Group, now_ns: int) -> bool:
        """Whether it is the group's turn to be asked about. Always True where no forecast is needed."""
        if not self._weighs or self._fits_nowhere(group):
            return True
        return self.means.turns.may_ask(group.group_id, now_ns, self._state.groups)

    def _fits_nowhere(self, group: Group) -> bool:
        """Whether the head of the queue needs more memory than any group that takes requests has, where it would go:
        then it is no matter of time."""
        head = group.queues.waiting.head
        if head is None:
            return False
        largest = max((g.blocks.capacity for g in self._moves.serving_groups()), default=0)
        return group.limits.blocks_for(head.num_tokens) > largest

    # --- plans ------------------------------------------------------------------------------------------------

    def _relieve(self, group: Group, now_ns: int) -> Iterator[Offer | Record]:
        """Yield what would relieve an overloaded group: its restore called off, merges, or more memory. Where a plan is
        not worth it, yield a record of that. Nothing while a move touches the group or its dwell time lasts. Where no
        plan relieves the group, none is made again before the next tick."""
        if (restore := self._moves.restore_of(group)) is not None:
            if self._may_ask(group, now_ns) and self._is_worth_turning(group, restore, now_ns):
                yield DropOffer(groups=(group.group_id,), why=BINDS)
            return
        if self._moves.is_moving(group) or not self._loads.has_dwelled(group, now_ns):
            return
        if not self._may_ask(group, now_ns):
            return
        moving = self._moves.moving_workers()
        free = [
            g for g in self._state.groups.values()
            if g is group or (moving.isdisjoint(g.worker_ids) and self._loads.has_dwelled(g, now_ns))
        ]
        overloaded = [g for g in free if g is group or self._is_overloaded(g, now_ns)]
        required = required_bytes(self._state, overloaded, self._state.params.growth_factor)
        choice = self._choose(free, required, group, overloaded, now_ns)
        plan, told = choice.plan, tuple[Record, ...]()
        if plan.merges:
            told = (self._decision(group, choice, overloaded, required, now_ns),)
        elif choice.saving is not None:
            yield from self._decline(group, choice.saving, now_ns)
        # Where others cannot take part just now, the end of a move or of a dwell time may change that at any step.
        if not plan.merges and (choice.saving is not None or len(free) == len(self._state.groups)):
            self._loads.monitor(group).note_unrelieved()
        saving = choice.saving
        # What moves may free memory; a wake that is overdue may not.
        is_still = not moving or moving <= self.means.sleepers.absent(now_ns)
        is_worth_it = saving is None or saving.is_worth_a_device
        missing = choice.missing_bytes if is_still and is_worth_it else 0
        if plan.merges or missing > 0:
            why = "no drop plan frees enough" + (" and is worth it" if saving is not None else "")
            weighed = saving if plan.merges else None
            # Memory from outside is asked for where no rung has anything better, also where all are merged already.
            worth = None if weighed is None else weighed.worth
            if not plan.merges and self._weighs:
                worth = Worth(0.0)
            yield DropOffer(
                groups=(group.group_id,), why=why, plan=plan, missing_bytes=missing, told=told, saving=weighed,
                worth=worth,
            )

    def _is_worth_turning(self, group: Group, restore: Restoring, now_ns: int) -> bool:
        """Whether calling a group's restore off is worth it."""
        members = restore.worker_ids
        question = Question.of(self.means, now_ns, members) if self._weighs else None
        if question is None or self._fits_nowhere(group):
            return True
        return question.merging([[lone(w) for w in members]]).is_worth_a_pipeline

    def _decline(self, group: Group, saving: Saving, now_ns: int) -> Iterator[Record]:
        """Note that no drop is worth it, and yield the log record of that; no record within a few seconds of the
        group's last one."""
        monitor = self._loads.monitor(group)
        monitor.note_refused(NOT_WORTH_IT, now_ns)
        if monitor.is_news(now_ns):
            told = self._loads.pressure(group, now_ns).as_fields() | saving.as_fields()
            yield Record("drop_declined", now_ns, {"group": group.group_id, "reason": NOT_WORTH_IT} | told)

    def _decision(
        self, group: Group, choice: _Choice, overloaded: Sequence[Group], required: int, now_ns: int
    ) -> Record:
        """The log record of a drop that is about to begin, with its merges and what they are forecast to save."""
        plan = choice.plan
        decision = {
            "group": group.group_id,
            "reason": BINDS,
            "required_bytes": required,
            "freed_bytes": plan.freed_bytes,
            "sufficient": plan.sufficient,
            "overloaded_groups": [g.group_id for g in overloaded],
            "pulled_shards": sum(len(m.pulls) for m in plan.merges),
            "throughput_cost": self._planner.throughput_cost(plan),
            "merges": plan.merges_as_fields(),
        } | self._loads.pressure(group, now_ns).as_fields()
        return Record("drop_decided", now_ns, decision | ({} if choice.saving is None else choice.saving.as_fields()))

    def _choose(
        self, free: Sequence[Group], required: int, asker: Group, overloaded: Sequence[Group], now_ns: int
    ) -> _Choice:
        """The plan that saves most, if it is worth it: with pipelines as long as frees enough or shorter ones, and with
        all of its merges or the first ones.

        Merges of groups that are not overloaded are left out: they relieve no queue, and their turn comes when one of
        them asks. Where nothing is known of steps, where settings have no plan weighed, and where the head of the queue
        fits nowhere as it is, the first plan is taken.
        """
        wait_s = self._loads.pressure(asker, now_ns).memory_wait_s
        question = Question.of(self.means, now_ns) if self._weighs and not self._fits_nowhere(asker) else None
        asking = {g.group_id for g in overloaded}
        best: tuple[DropPlan, Saving, int] | None = None
        # Where the forecast decides, no pull takes longer than it looks ahead, over links of known rates.
        most_pull_s = wait_s if question is None else min(wait_s, HORIZON_S)
        for plan in self._plans(free, required, asker.group_id, most_pull_s):
            relieving = [m for m in plan.merges if asker.group_id in m.sources or not asking.isdisjoint(m.sources)]
            relieving.sort(key=lambda m: asker.group_id not in m.sources)
            if question is None:
                chosen = plan.only(relieving, self._state.shape)
                return _Choice(chosen, required - chosen.freed_bytes, None)
            for count in sorted({len(relieving), (len(relieving) + 1) // 2, min(1, len(relieving))} - {0}):
                part = plan.only(relieving[:count], self._state.shape)
                saving = question.merging(m.sources for m in part.merges)
                if best is None or saving.worth > best[1].worth:
                    best = part, saving, plan.freed_bytes
        if best is None or not best[1].is_worth_a_pipeline:
            return _Choice(DropPlan((), 0, required), required, None if best is None else best[1])
        # Memory that merges which no group has asked for would free is there for the asking: it is not missing.
        return _Choice(best[0], required - best[2], best[1])

    def _plans(
        self, free: Sequence[Group], required: int, asking: GroupId, max_pull_s: float
    ) -> Iterator[DropPlan]:
        """Yield plans, each with shorter pipelines than the one before."""
        most_members: int | None = None
        for _ in range(MOST_PLANS):
            plan = self._planner.plan(free, required, asking, max_pull_s, most_members)
            yield plan
            longest = max((len(m.stages) for m in plan.merges), default=0)
            if longest <= 2:
                return
            most_members = longest - 1

"""The one slice that a group may keep: rows that a step has shed, when they go on, and how they are given up.

What a slice is, is in ``core.serving.slices``; ``core.serving.sliceplan`` says in how many layers it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

from jettison.core.changes import Changes
from jettison.core.discards import Discard, Discarded
from jettison.core.ports import Resumption, RunStep
from jettison.core.requests import RequestState
from jettison.core.serving.counts import GroupCounters
from jettison.core.serving.flights import InFlight, work_of
from jettison.core.serving.groupview import GroupView
from jettison.core.serving.holds import Holder
from jettison.core.serving.sliceplan import fits, is_alone, layers_by_itself, layers_to_join
from jettison.core.serving.slices import Slice
from jettison.memory.stages import StagePlan
from jettison.policy.batching import BatchPlan, BlockedBy
from jettison.policy.filling import added
from jettison.types import GroupId


class SlicedGroup(GroupView, Protocol):
    """The part of a ``Group`` by which its slice goes on, or is given up."""

    @property
    def group_id(self) -> GroupId: ...
    @property
    def epoch(self) -> int: ...
    @property
    def stages(self) -> tuple[StagePlan, ...]: ...
    @property
    def counters(self) -> GroupCounters: ...
    @property
    def paused(self) -> Set[Holder]: ...
    def apply(self, plan: BatchPlan, step_id: int, now_ns: int) -> RunStep | None: ...


class Slices:
    """Of one group."""

    def __init__(self, group: SlicedGroup, changes: Changes) -> None:
        self._group = group
        self._changes = changes
        self.kept: Slice | None = None

    def next_step(self, kept: Slice, step_id: int, now_ns: int) -> RunStep | None:
        """The slice by itself, or the next step of other requests, which it joins as far as there is time; where these
        lack what the slice's requests have, their step without it."""
        group = self._group
        if is_alone(group):
            return self._resume(kept, step_id, now_ns)
        if kept.has_no_place and (num_layers := layers_by_itself(group, kept, now_ns)):
            return self._resume(kept, step_id, now_ns, num_layers)
        plan = group.planner.next_plan(now_ns)
        if plan.preemptions or plan.lacks_blocks or plan.head_blocked_by in (BlockedBy.MEMORY, BlockedBy.SEQUENCES):
            self.discard(Discard.ROOM)
            return group.apply(group.planner.next_plan(now_ns), step_id, now_ns)
        step = group.apply(plan, step_id, now_ns)
        if step is None:
            # No other request can run, and no end of a step would have the group planned again.
            return None if group.in_flight else self._resume(kept, step_id, now_ns)
        flight = group.in_flight[step_id]
        kept.has_no_place = bool(flight.guests) or not fits(group, kept, step.rows)
        num_layers = 0 if kept.has_no_place else layers_to_join(group, kept, step.rows, now_ns)
        return self._resume(kept, step_id, now_ns, num_layers) if num_layers else step

    def _resume(self, kept: Slice, step_id: int, now_ns: int, most_layers: int | None = None) -> RunStep:
        """Have the slice's rows go on, behind those of the step of this id if there is one, as a step that may shed
        them once more."""
        self.kept = None
        group = self._group
        group.queues.note_change()
        group.counters.num_resumptions += 1
        is_cut = most_layers is not None and kept.num_layers + most_layers < len(group.stages[0].layers)
        resumes = Resumption(kept.step_id, kept.num_layers, most_layers if is_cut else None)
        flight = group.in_flight.get(step_id)
        rows = () if flight is None else flight.step.rows
        step = RunStep(
            step_id, group.group_id, group.epoch, group.stages, (*rows, *kept.rows), sheds_from=len(rows),
            resumes=resumes,
        )
        work = kept.work if flight is None else added(flight.work, kept.work)
        group.in_flight[step_id] = InFlight(step, now_ns, work, shed_ns=kept.shed_ns)
        return step

    def shed(self, step_id: int, num_layers: int, now_ns: int) -> Sequence[RequestState]:
        """A step in flight has ended without the rows that it may shed, which have ``num_layers`` of the first stage's
        layers behind them. They are the group's slice from now on, or are discarded where they have none, where they
        cannot go on, or where a later chunk of one is under way. The step is left with its other rows.

        Returns the requests of a slice that was discarded here."""
        flight = self._group.in_flight[step_id]
        step = flight.step
        assert step.sheds_from is not None and not flight.guests, step
        rows = step.rows[step.sheds_from :]
        flight.step = step._replace(rows=step.rows[: step.sheds_from])
        flight.work = work_of(flight.step.rows)
        shed_ns = now_ns if flight.shed_ns is None else flight.shed_ns
        self.discard(Discard.OVERTAKEN)
        kept = self.kept = Slice(step_id, rows, work_of(rows), num_layers, shed_ns)
        self._group.counters.num_shed_steps += step.resumes is None
        why = None
        if any(row.state.num_pending > row.num_tokens for row in rows):
            why = Discard.OVERTAKEN
        elif self._group.paused:
            why = Discard.HELD
        elif not kept.is_sound:
            why = Discard.MOVES
        elif not num_layers:
            why = Discard.NOTHING
        if why is None:
            return ()
        self.discard(why)
        return [row.state for row in rows]

    def discard(self, why: Discard) -> None:
        """Give the slice up, if there is one: its requests are as they were before the step."""
        kept, self.kept = self.kept, None
        if kept is None:
            return
        self._group.queues.note_change()
        for row in kept.rows:
            row.state.num_pending -= row.num_tokens
        self._note_discarded(why, kept.num_tokens, kept.num_layers)

    def lose(self, flight: InFlight, why: Discard) -> None:
        """Count the slice that a step in flight goes on with, if it does, as given up: the step has failed. The caller
        takes the tokens of its rows back."""
        step = flight.step
        num_tokens = sum(row.num_tokens for row in step.rows[step.sheds_from :])
        if step.resumes is not None and num_tokens:  # shed once more, its rows are a slice of their own
            self._note_discarded(why, num_tokens, step.resumes.num_layers)

    def _note_discarded(self, why: Discard, num_tokens: int, num_layers: int) -> None:
        self._group.counters.num_discarded_slices += 1
        self._group.counters.num_discarded_tokens += num_tokens
        self._changes.discarded.append(Discarded(self._group.group_id, why, num_tokens, num_layers))

    def check(self) -> None:
        """Check that the tokens of what is kept are under way. Raises AssertionError."""
        running = self._group.queues.running
        for row in self.kept.rows if self.kept is not None else ():
            assert row.state.num_pending >= row.num_tokens and row.state.request_id in running, row

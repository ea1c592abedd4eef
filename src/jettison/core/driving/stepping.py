"""The life of steps in the core: planned group by group, then completed with their tokens, failed, or abandoned.

The group chooses a step's requests (``core.serving.group``, ``policy.batching``). Where a request ends, its moves are
stopped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from jettison.core.driving.safepoints import Safepoints
from jettison.core.ladder.climb import Ladder
from jettison.core.load.views import Loads
from jettison.core.moving.moves import Moves
from jettison.core.ports import Action, EmitTokens, Record, StepAbandoned, StepCompleted, StepFailed
from jettison.core.requests import RequestState
from jettison.core.serving.flights import InFlight
from jettison.core.serving.group import Group
from jettison.core.serving.holds import LOST_PEER, GroupHold
from jettison.core.serving.outcome import RowEnd
from jettison.core.state import ClusterState
from jettison.policy.safepoints import lengthened_s, shortened_s
from jettison.types import GRAMMAR_FAILED_TOKEN_ID, NANOSECONDS, FinishReason


class Stepping:
    """Plans the steps of all groups, and takes their ends: completed, failed or abandoned."""

    def __init__(
        self, state: ClusterState, loads: Loads, moves: Moves,
        safepoints: Safepoints, stop_moves_of: Callable[[RequestState], list[Action]], ladder: Ladder,
    ) -> None:
        """``stop_moves_of`` is called with a request that is ending; it stops the request's moves and returns the
        actions."""
        self._state = state
        self._loads = loads
        self._moves = moves
        self._safepoints = safepoints
        self._stop_moves_of = stop_moves_of
        self._ladder = ladder
        self._group_of_step: dict[int, Group] = {}
        """The group of each step that has not ended; steps of groups that died meanwhile may be among them."""

    def forget_ended(self) -> None:
        """Forget the steps that their group no longer waits for: the groups of a dead worker have given theirs up."""
        self._group_of_step = {i: g for i, g in self._group_of_step.items() if i in g.in_flight}

    def plan(self, now_ns: int) -> list[Action]:
        """Have every touched group, in order of formation, plan as many steps as it can begin now. Returns the steps,
        which are remembered until they end, those of offline requests alone with safepoints; and a record where a step
        is the first to serve the queue of a merge. Planned groups are touched no more, unless they have changed since;
        ``changes.unnoted`` names them.

        Groups that share a worker change each other's room: groups after a planned one are planned after it in the same
        event, groups before it in the next event.
        """
        state = self._state
        state.resolve_ledgers()
        changes, touched = state.changes, state.changes.touched
        changes.unnoted |= touched
        goes_ahead = state.limits.steps_ahead and not self._ladder.acts_between_steps
        actions: list[Action] = []
        todo = sorted(touched)  # a sorted list is a heap
        while todo:
            group_id = heapq.heappop(todo)
            touched.discard(group_id)
            group = state.groups.get(group_id)
            if group is None:
                continue
            num_before = len(actions)
            while True:
                step = group.next_step(state.next_step_id, now_ns)
                if step is None and goes_ahead and state.shared_workers.isdisjoint(group.worker_ids):
                    step = group.step_ahead(state.next_step_id, now_ns)
                    state.counters.num_steps_ahead += step is not None
                if step is None:
                    break
                # Its own steps are no reason to plan it again; a change without a step (a preemption) is.
                touched.discard(group_id)
                if step.rows[-1].state.is_offline:
                    step = self._safepoints.arm(group, step)
                self._group_of_step[step.step_id] = group
                state.next_step_id += 1
                actions.append(step)
                if self._moves.first_served.open:
                    actions += self._moves.first_served.step_issued(step, now_ns)
            if state.shared_workers and (len(actions) > num_before or group_id in touched):
                for other in state.sharers(group):
                    touched.add(other)
                    if other > group_id and other not in todo:
                        changes.unnoted.add(other)
                        heapq.heappush(todo, other)
        changes.ledgers.clear()  # these were changed by the groups just planned, and by their sharers
        return actions

    def on_completed(self, event: StepCompleted, now_ns: int) -> list[Action]:
        """Commit a step: emit its tokens, end the requests that end with it, free requests that were ending, and have
        the monitors and the predictor learn. A request whose chunk has overtaken an earlier one is distrusted, with a
        record. A step with safepoints that came to its end eases the bound on such steps' time, where there is one. Of
        a step that has shed rows the others are committed.

        Returns the actions; none for a step that no group waits for any more.
        """
        group = self._take_step(event.step_id)
        if group is None:
            return []
        flight = group.in_flight[event.step_id]
        if self._moves.first_served.open:
            self._moves.first_served.step_ended(group, event.step_id, now_ns)
        actions: list[Action] = []
        if event.kept_layers is not None:
            actions += self._shed(group, event.step_id, event.kept_layers, now_ns)
        if self._is_timed(group, flight, event):
            self._loads.note_step(group, flight.step, flight.work, flight.issued_ns, event.compute_ns, now_ns)
        else:
            self._loads.note_untimed(group)
        # A chunk that ran before an earlier chunk of its request had run on KV that was not there.
        for state in group.overtaking(event.step_id):
            self._state.distrust(state)
            overtaken = {"group": group.group_id, "step": event.step_id, "request": state.request_id}
            actions.append(Record("chunk_overtaken", now_ns, overtaken))
        if flight.shed_ns is not None and event.kept_layers is None:
            actions.append(Record("slice_computed", now_ns, {
                "group": group.group_id,
                "tokens": sum(row.num_tokens for row in flight.step.rows[flight.step.sheds_from :]),
                "after_ms": (now_ns - flight.shed_ns) / 1e6,
            }))  # fmt: skip
        fresh = group.counters.fresh
        has_offline = bool(flight.step.rows) and flight.step.rows[-1].state.is_offline
        num_before = fresh.num_offline if has_offline else 0
        outcome = group.commit(event, now_ns)
        if has_offline:
            fresh.note_step(num_before, now_ns)
            if group.longest_alone_s is not None and flight.step.safepoint_layers and flight.step.sheds_from is None \
                    and not event.has_prepared:
                group.longest_alone_s = lengthened_s(group.longest_alone_s, (now_ns - flight.issued_ns) / NANOSECONDS)
        for state in outcome.with_first:
            self._loads.note_first_token(state)
        if outcome.going_on:
            actions.append(EmitTokens(outcome.going_on, outcome.tokens))
        if outcome.is_plain:
            return actions
        for end in outcome.ended:
            actions += self._end(group, end, now_ns)
        for row in flight.step.rows:
            if row.remote:
                self._state.counters.num_live_rows += 1
                row.state.num_live_rows += 1
            if row.state.ending is not None:
                self._state.reap(row.state)
        return actions

    def _is_timed(self, group: Group, flight: InFlight, event: StepCompleted) -> bool:
        """Whether a step's time says what such steps take. Not where rows of it were computed only in part, nor where
        it has prepared later ones; nor that of a pipeline beside a move: copies of shards and of KV lengthen its steps,
        and these would be the last that are seen of pipelines for long."""
        if event.kept_layers is not None or flight.step.resumes is not None or event.has_prepared:
            return False
        if len(group.stages) == 1:
            return True
        return not self._moves.is_moving(group) and not self._loads.has_settled_since(group, flight.issued_ns)

    def _shed(self, group: Group, step_id: int, num_layers: int, now_ns: int) -> list[Action]:
        """Take out the rows that a step has shed, as the group's slice, with a record of the first time. Where they are
        discarded at once, their requests that were ending are freed, and those with a later chunk under way, which has
        run on KV that is not there, are distrusted. Returns the actions."""
        flight = group.in_flight[step_id]
        is_first = flight.step.resumes is None
        actions: list[Action] = []
        for state in group.slices.shed(step_id, num_layers, now_ns):
            if state.ending is None and state.num_pending:
                actions += self._stop_moves_of(state)
                self._state.distrust(state)
            self._state.reap(state)
        if is_first and group.slices.kept is not None:
            actions.append(Record("step_shed", now_ns, {
                "group": group.group_id, "tokens": group.slices.kept.num_tokens, "layers": num_layers,
                "online": len(flight.step.rows), "after_ms": (now_ns - flight.issued_ns) / 1e6,
            }))  # fmt: skip
        return actions

    def _end(self, group: Group, end: RowEnd, now_ns: int) -> list[Action]:
        state, reason = end.state, end.finish_reason
        if reason is FinishReason.ERROR:
            is_grammar = end.token is not None and end.token.token_id == GRAMMAR_FAILED_TOKEN_ID
            error = "its grammar cannot be followed any further" if is_grammar else "no token could be sampled"
            actions = self._state.end(state, reason, now_ns, error=error)
        else:
            self._loads.note_end(group, state, now_ns)
            tokens = () if end.token is None else (end.token,)
            actions = self._state.end(state, reason, now_ns, tokens=tokens, stop_token_id=end.stop_token_id)
        return actions + self._stop_moves_of(state)

    def on_failed(self, event: StepFailed, now_ns: int) -> list[Action]:
        """Record that a step has failed, and count nothing of it. Where a worker is lost, its requests are stranded:
        the group begins no step until the death is declared, and a request with a later chunk under way is distrusted.
        Where a peer did not compute attention, they are computed again (``_compute_again``). Else the step's requests
        end with an error, and their moves stop.

        Guests in the step are marked as failed, unless only a peer's attention is missing. Requests that were ending
        are freed. Returns the actions; none for a step that no group waits for any more.
        """
        group = self._take_step(event.step_id)
        if group is None:
            return []
        actions: list[Action] = [Record("step_failed", now_ns, {"step": event.step_id, "message": event.message})]
        if event.recompute and event.lost_worker is None:
            return actions + self._compute_again(group, event.step_id)
        for guest in group.in_flight[event.step_id].guests:
            guest.failure = "a step with tokens of it failed at the destination"
        for state in group.fail(event.step_id):
            if event.lost_worker is not None:
                # The step is not to blame, and the group cannot go on: the lost worker will be declared dead.
                group.hold(LOST_PEER, GroupHold.STEPS)
                group.stranded[state.request_id] = state
                if state.ending is None and state.num_pending:
                    self._state.distrust(state)  # a later chunk may still arrive there, and run on KV that is not there
                self._state.reap(state)
                continue
            actions += self._state.end(state, FinishReason.ERROR, now_ns, error="the model step failed")
            actions += self._stop_moves_of(state)
            self._state.reap(state)
        return actions

    def on_abandoned(self, event: StepAbandoned, now_ns: int) -> list[Action]:
        """Take back a step that was given up. Its requests are as they were before it: the KV that it has written lies
        behind the tokens that count as computed. A request with a later chunk under way is distrusted, and its moves
        stop.

        The step and its tokens are counted. If it is not the first in a row that was given up, the next steps of
        offline requests get a shorter bound. Returns a record and the actions; none for a step that no group waits for
        any more.
        """
        group = self._take_step(event.step_id)
        if group is None:
            return []
        flight = group.in_flight[event.step_id]
        num_tokens = sum(row.num_tokens for row in flight.step.rows)
        self._state.counters.num_abandoned_steps += 1
        fresh = group.counters.fresh
        fresh.num_abandoned_steps += 1
        ran_s = (now_ns - flight.issued_ns) / NANOSECONDS
        group.longest_alone_s = shortened_s(group.longest_alone_s, ran_s, fresh.num_abandoned_steps)
        self._state.counters.num_abandoned_tokens += num_tokens
        self._moves.first_served.step_ended(group, event.step_id, now_ns)
        actions: list[Action] = [Record("step_abandoned", now_ns, {
            "group": group.group_id, "tokens": num_tokens, "after_ms": 1e3 * ran_s,
        })]  # fmt: skip
        for state in group.fail(event.step_id):
            if state.ending is None and state.num_pending:  # a later chunk has run on KV that is not there
                actions += self._stop_moves_of(state)
                self._state.distrust(state)
            self._state.reap(state)
        return actions

    def _compute_again(self, group: Group, step_id: int) -> list[Action]:
        """Take back a step in which a peer did not compute attention, and return the actions. Rows without remote
        attention run again. Requests with remote attention, or with a later chunk under way, are distrusted: they start
        again from their tokens, and their moves stop."""
        remote = {r.state.request_id for r in group.in_flight[step_id].step.rows if r.remote}
        actions: list[Action] = []
        for state in group.fail(step_id):
            # Chunks that were planned to follow this one have run on KV that is not there.
            if state.ending is None and (state.request_id in remote or state.num_pending):
                actions += self._stop_moves_of(state)
                self._state.distrust(state)
            self._state.reap(state)
        return actions

    def _take_step(self, step_id: int) -> Group | None:
        """The group that waits for a step, which is forgotten here; None for a step that no group waits for any
        more."""
        group = self._group_of_step.pop(step_id, None)
        return group if group is not None and step_id in group.in_flight else None

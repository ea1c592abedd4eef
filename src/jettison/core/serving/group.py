"""The serving loop of one group, sans-I/O: plan, execute, commit.

``next_step`` asks the batching policy and applies its plan (blocks change hands here); the driver runs the step;
``commit`` takes the sampled tokens back. A group has two parts, which know nothing of each other: ``queues`` (the
requests that wait, run, move and are stored) and ``blocks`` (how much room there is, and what is cached). It knows
nothing of other groups, of moves, of time or of devices.

Reading order for newcomers: ``Group.next_step``, ``core.serving.stepplan``, ``Group.commit``, then
``policy.batching``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from operator import attrgetter
from typing import NamedTuple

from jettison.core.changes import Changes
from jettison.core.discards import Discard
from jettison.core.ports import RunStep, StepCompleted, StepRow, step_row
from jettison.core.preemption import Preempted, Preemption
from jettison.core.requests import Hold, RequestState
from jettison.core.residence import NOWHERE, arenas_of, hosted_only
from jettison.core.serving.blocks import GroupBlocks
from jettison.core.serving.counts import GroupCounters
from jettison.core.serving.flights import InFlight, end_of, take_row, work_of
from jettison.core.serving.guests import Guest, Guests, begin_chunks, end_chunks
from jettison.core.serving.holds import GroupHold, Holder
from jettison.core.serving.limits import SchedulerLimits
from jettison.core.serving.outcome import StepOutcome
from jettison.core.serving.queues import Queues
from jettison.core.serving.slicing import Slices
from jettison.core.serving.stepplan import StepPlanner
from jettison.core.serving.stepsahead import step_to_follow, token_sources
from jettison.core.serving.virtualtokens import VirtualTokens
from jettison.cost.predictor import UNKNOWN_PRICES
from jettison.errors import StalePlanError
from jettison.memory.blocks import BlockLedger
from jettison.memory.prefix import PrefixHasher
from jettison.memory.stages import StagePlan
from jettison.policy.batching import BatchPlan, BlockedBy
from jettison.policy.lookahead import ChunkCost
from jettison.policy.slo import Pace
from jettison.policy.standing import Foreseen
from jettison.types import (
    FAILED_TOKEN_ID,
    GroupId,
    LayerRange,
    RequestId,
    TransferId,
    WorkerId,
)

__all__ = ["Group", "SchedulerLimits"]


class Shared(NamedTuple):
    """What the groups of a cluster have in common."""

    changes: Changes
    tokens: VirtualTokens | None = None
    """What each tenant's online requests have been served."""
    offline_tokens: VirtualTokens | None = None
    pace: Callable[[], Pace | None] = lambda: None
    """Bounds on the time of a step; None: offline requests are behind online ones by priority alone."""
    kept_tokens: Callable[[RequestState], int] = lambda state: 0
    """For a request that gives its blocks up, how many leading tokens keep their KV elsewhere."""


class Group:
    """One group: the serving loop over its queues and blocks, with the flags that say what may be done with them."""

    def __init__(
        self,
        group_id: GroupId,
        epoch: int,
        stages: tuple[StagePlan, ...],
        ledgers: Mapping[WorkerId, BlockLedger],
        limits: SchedulerLimits,
        hasher: PrefixHasher,
        prices: Callable[[], ChunkCost] = lambda: UNKNOWN_PRICES,
        shared: Shared | None = None,
    ) -> None:
        """``prices``: the cost of chunks in its last stage, as far as known. ``shared``: None where it is alone."""
        shared = shared or Shared(Changes())
        self.group_id = group_id
        self.epoch = epoch
        self.stages = stages
        self.worker_ids: tuple[WorkerId, ...] = tuple(s.worker_id for s in stages)
        """Its workers, in pipeline order."""
        self.limits = limits
        self._changes = shared.changes
        self.residence = arenas_of(stages)
        """The residence in which its requests run; all of them share it."""
        self.queues = Queues(group_id, self.residence, limits, self._changes, shared.tokens, shared.offline_tokens)
        self.blocks = GroupBlocks(group_id, self.worker_ids, ledgers, limits, hasher, self._changes)
        self.guests = Guests()
        """Requests that run in another group and are to run here."""
        self.counters = GroupCounters()
        self.in_flight: dict[int, InFlight] = {}
        self.copies: dict[TransferId, int] = {}
        """Bytes of copies to or from the host, queued behind its last step: the next step waits for them."""
        self.copies_beside: dict[TransferId, int] = {}
        """Bytes of copies beside steps that began while no step was under way: they go on beside the next one."""
        self.stranded: dict[RequestId, RequestState] = {}
        """Requests of steps that failed because a member is lost, while its death is not known yet."""
        self.head_blocked_by: BlockedBy | None = None
        """What keeps the head of the online queue out; an offline head that has to wait does not count."""
        self.prices = prices
        self.pace = shared.pace
        self._kept_tokens = shared.kept_tokens
        self.planner = StepPlanner(self)
        self.sitting_out: Collection[RequestId] = ()
        """Running offline requests that the next step is planned without; it admits no offline newcomer either."""
        self.foreseen: Foreseen | None = None
        """Memory that online requests are foreseen to need, as looked at last; where it is not there, their steps are
        not filled (``core.driving.filling``). None: not looked at yet, or nothing known."""
        self.abandoning: int | None = None
        """The last step that was told to give up; it may have ended."""
        self.slices = Slices(self, self._changes)
        """Rows that one of its steps has shed, and that are not under way."""
        self.longest_alone_s: float | None = None
        """How long a step of offline requests alone may take; None: no bound (``policy.safepoints.shortened_s``)."""
        self._held: dict[GroupHold, set[Holder]] = {
            GroupHold.STEPS: set(), GroupHold.PREEMPTION: set(), GroupHold.OFFLINE: self.queues.offline_holders,
        }
        self.paused: Set[Holder] = self._held[GroupHold.STEPS]
        """Owners that keep it from beginning a step; empty: none does."""
        self.holds_preemption: Set[Holder] = self._held[GroupHold.PREEMPTION]
        """Owners that keep it from preempting for recomputation: missing blocks will come free without that."""

    def touch(self) -> None:
        """Note that the group has changed: its next step is planned again, and it may be freer for dispatch."""
        self._changes.touch(self.group_id)

    # --- read and set by other modules ------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Grows with every change of its queues, or of a ledger that it uses (other groups may use it, too)."""
        return self.queues.version + self.blocks.version

    @property
    def max_running(self) -> int:
        """Requests that it may run at once: ``max_num_seqs`` for each stage, as its instances by themselves."""
        return self.limits.max_num_seqs * len(self.stages)

    def hold(self, owner: Holder, what: GroupHold) -> None:
        """Keep the group from ``what`` until ``owner`` releases it. Where no other owner does so already, the group is
        planned again and, for steps, counted as reshaped, without its slice. Idempotent."""
        owners = self._held[what]
        if not owners:
            if what is GroupHold.STEPS and self.slices.kept is not None:
                self.slices.discard(Discard.HELD)
            self._changes.reshaped += what is GroupHold.STEPS
            self.touch()
        owners.add(owner)

    def release(self, owner: Holder, what: GroupHold) -> None:
        """``owner`` no longer keeps the group from ``what``. Where no other owner does, the group is planned again and,
        for steps, counted as reshaped. Idempotent."""
        owners = self._held[what]
        if owner in owners:
            owners.remove(owner)
            if not owners:
                self._changes.reshaped += what is GroupHold.STEPS
                self.touch()

    @property
    def shares_steps(self) -> bool:
        """Whether offline requests fill its steps as far as online objectives allow: these are kept, and it has
        requests of both classes. Then a step's content depends on its predicted time."""
        pace = self.pace()
        return pace is not None and pace.offline.slo_aware and self.queues.has_both_classes

    @property
    def absent(self) -> Collection[RequestId]:
        """Running requests that the next step is planned without: those that sit out, or are of the slice, or of rows
        that a step is told to give up or shed, as further tokens would follow on some that may not be computed."""
        rows: tuple[StepRow, ...] = () if self.slices.kept is None else self.slices.kept.rows
        if self.abandoning in self.in_flight:
            step = self.in_flight[self.abandoning].step
            rows += step.rows[step.sheds_from or 0 :]
        return {row.state.request_id for row in rows}.union(self.sitting_out) if rows else self.sitting_out

    @property
    def pending_copies(self) -> tuple[int, int]:
        """(bytes of copies that its next step waits for, bytes copied beside that step)."""
        return sum(self.copies.values()), sum(self.copies_beside.values())

    def note_copy(self, transfer_id: TransferId, num_bytes: int, *, beside_steps: bool) -> None:
        """Note a copy to or from the host that its workers begin. Its bytes count in one step, the next one; those of a
        copy ``beside_steps`` in the newest step under way, if there is one."""
        if not beside_steps:
            self.copies[transfer_id] = num_bytes
        elif not self.in_flight:
            self.copies_beside[transfer_id] = num_bytes
        else:
            flight = next(reversed(self.in_flight.values()))
            flight.work = flight.work._replace(num_beside_bytes=flight.work.num_beside_bytes + num_bytes)

    def note_copied(self, transfer_id: TransferId) -> None:
        """A copy to or from the host has ended: no further step counts it."""
        self.copies.pop(transfer_id, None)
        self.copies_beside.pop(transfer_id, None)

    def have_sit_out(self, request_ids: Iterable[RequestId]) -> None:
        """Plan the next step without these running requests, instead of earlier ones, and admit no offline ones."""
        self.sitting_out = frozenset(request_ids)

    def oversized(self) -> list[RequestState]:
        """Waiting requests that are too large for this group. O(1) where there can be none."""
        queues = self.queues
        if self.limits.blocks_for(queues.largest_queued_tokens) <= self.blocks.capacity:
            return []
        return [s for s in (*queues.waiting, *queues.waiting_offline) if self.blocks.is_oversized(s)]

    # --- plan and apply ---------------------------------------------------------------------------------------

    def next_step(self, step_id: int, now_ns: int) -> RunStep | None:
        """Plan the next microbatch and apply the plan, which may preempt. Returns the step, which is in flight from now
        on; None where steps are held, every stage has one, or no request can run. Sitting out ends here, and does not
        count where no other request can run. A slice goes on here, or is discarded where it is in the way."""
        if self.slices.kept is not None and (self.queues.suspects or not self.slices.kept.is_sound):
            self.slices.discard(Discard.MOVES)
        if self.paused or len(self.in_flight) >= len(self.stages):
            return None
        queues = self.queues
        if not queues.running and not queues.has_waiting and not self.guests:
            return None
        if self.slices.kept is not None:
            return self.slices.next_step(self.slices.kept, step_id, now_ns)
        step = self.apply(self.planner.next_plan(now_ns), step_id, now_ns)
        if self.sitting_out:
            self.sitting_out = ()
            if step is None:  # no other request can run
                step = self.apply(self.planner.next_plan(now_ns), step_id, now_ns)
        if len(self.stages) > 1:
            self.planner.note_applied()
        return step

    def step_ahead(self, step_id: int, now_ns: int) -> RunStep | None:
        """Plan the step behind the one in flight, and apply the plan. None where the next step is to be planned when
        that one has ended (``core.serving.stepsahead``)."""
        before = step_to_follow(self)
        plan = None if before is None else self.planner.plan_ahead(now_ns)
        if before is None or plan is None:
            return None
        step = self.apply(plan, step_id, now_ns)
        if step is None:
            return None
        flight = self.in_flight[step_id]
        flight.step = step._replace(follows=token_sources(before, step))
        return flight.step

    def apply(self, plan: BatchPlan, step_id: int, now_ns: int) -> RunStep | None:
        """Have a plan's step, if it has one, be in flight from now on. Raises StalePlanError."""
        if plan.version != self.version:
            raise StalePlanError(f"batch plan of version {plan.version}, group is at {self.version}")
        self.head_blocked_by = plan.head_blocked_by
        queues = self.queues
        for request_id in plan.preemptions:
            self.preempt(queues.running[request_id], Preemption.STEP)
        rows: list[StepRow] = []
        running = queues.running
        for request_id, num_tokens, num_new_blocks in plan.chunks:
            state = running[request_id]
            if num_new_blocks:
                self.blocks.grow(state, num_new_blocks)
                self.counters.num_grown_blocks += num_new_blocks
            rows.append(self._schedule(state, num_tokens))
        if plan.admissions:
            taken = queues.take_waiting([admission.request_id for admission in plan.admissions], self._steps_aside)
            for index, (admission, state) in enumerate(zip(plan.admissions, taken, strict=True)):
                num_cached = admission.num_cached_tokens  # without any the first takes what was planned
                if (index or num_cached) and not self.blocks.can_admit(state, num_cached):
                    for put_back in taken[index:]:
                        queues.enqueue(put_back)
                    break
                self._admit(state, num_cached, now_ns)
                rows.append(self._schedule(state, min(admission.num_tokens, state.num_ready)))
        if not queues.waiting:
            self.head_blocked_by = None
        if plan.chunks and len(rows) > len(plan.chunks) and rows[len(plan.chunks) - 1].state.is_offline:
            rows.sort(key=attrgetter("state.is_offline"))  # stable: what a step may shed comes last
        guests = self._add_guests(rows) if self.guests else ()
        if not rows:
            return None
        queues.note_change()
        self.counters.num_steps += 1
        step = RunStep(step_id, self.group_id, self.epoch, self.stages, tuple(rows))
        work = work_of(rows)
        if self.copies or self.copies_beside:
            num_copied_bytes, num_beside_bytes = self.pending_copies
            work = work._replace(num_copied_bytes=num_copied_bytes, num_beside_bytes=num_beside_bytes)
            self.copies.clear()
            self.copies_beside.clear()
        self.in_flight[step_id] = InFlight(step, now_ns, work, guests)
        return step

    def _add_guests(self, rows: list[StepRow]) -> tuple[Guest, ...]:
        """Put chunks of guests before the group's own rows of a step, in the room that these leave, and note them as
        under way. Returns these guests. A group with suspects computes no guests."""
        if self.queues.suspects:
            return ()
        limits = self.planner.limits()
        num_tokens = limits.max_num_tokens - sum(row.num_tokens for row in rows)
        guests, rows[:0] = self.guests.plan_rows(num_tokens, limits.max_rows - len(rows), self.blocks)
        begin_chunks(guests, rows[: len(guests)])
        return guests

    def _steps_aside(self, state: RequestState) -> bool:
        is_oversized = self.blocks.is_oversized(state)
        assert is_oversized or self.queues.suspects, f"{state} was passed over"
        return is_oversized

    def _admit(self, state: RequestState, num_cached_tokens: int, now_ns: int) -> None:
        if not state.is_offline:
            self.counters.num_queue_blocks += self.limits.blocks_for(state.num_tokens)
        num_cached_tokens = self.blocks.admit(state, num_cached_tokens)
        if self.blocks.uses_cache(state):
            self.counters.prefix_queries += state.num_tokens
            self.counters.prefix_hits += num_cached_tokens
        if state.first_scheduled_ns is None:
            state.first_scheduled_ns = now_ns
            state.num_cached = num_cached_tokens
            self.queues.charge(state, state.num_prompt - num_cached_tokens)
        state.num_computed = num_cached_tokens
        state.num_prompt_seen = max(state.num_prompt_seen, min(num_cached_tokens, state.num_prompt))
        state.num_sealed = num_cached_tokens // self.limits.block_size
        self.queues.resume(state)

    def _schedule(self, state: RequestState, num_tokens: int) -> StepRow:
        context = state.num_computed + state.num_pending
        state.num_pending += num_tokens
        samples = context + num_tokens >= state.num_tokens and state.wants_output
        return step_row((state, context, num_tokens, samples, state.remote))

    def arm(self, step_id: int, safepoint_layers: int, sheds_from: int | None) -> RunStep:
        """Give a step in flight a safepoint after every ``safepoint_layers`` layers, at which it sheds its rows from
        ``sheds_from`` on, or is given up. Returns the step as it is now."""
        flight = self.in_flight[step_id]
        flight.step = flight.step._replace(safepoint_layers=safepoint_layers, sheds_from=sheds_from)
        return flight.step

    # --- commit -----------------------------------------------------------------------------------------------

    def overtaking(self, step_id: int) -> list[RequestState]:
        """Requests of a step whose chunk has ended before the chunk that it follows, which got stuck in the stages: it
        ran on KV that was not there. Requests that are ending or start again anyway are left out."""
        if len(self.in_flight) < 2:
            return []
        return [
            row.state for row in self.in_flight[step_id].own_rows
            if row.context_len > row.state.num_computed and not row.state.holds & (Hold.ENDING | Hold.RECOMPUTE)
        ]

    def commit(self, done: StepCompleted, now_ns: int) -> StepOutcome:
        """Take a finished step: its tokens and guests' chunks count as computed, full blocks are sealed, and requests
        get what they sampled, which is counted and charged; a suspect may be cleared by that. Requests that start again
        get nothing, ending ones no token. Returns the outcome, with the requests that end here, not yet released."""
        queues = self.queues
        queues.note_change()
        flight = self.in_flight.pop(done.step_id)
        if self.in_flight and len(self.stages) == 1:
            next(iter(self.in_flight.values())).issued_ns = now_ns  # the step behind it begins
        outcome = StepOutcome([], [], [], [], not flight.guests)
        going_on, tokens_of = outcome.going_on, outcome.tokens
        tokens = iter(done.tokens)
        limits, seals = self.limits, self.blocks.seals
        block_size, eos_token_ids, max_model_len = limits.block_size, limits.eos_token_ids, limits.max_model_len
        has_suspects, num_offline = bool(queues.suspects), 0
        if flight.guests:
            end_chunks(flight.guests, self.blocks, are_computed=True)
        for index, row in enumerate(flight.own_rows, len(flight.guests)):
            state, context_len, num_tokens, samples, remote = row
            state.num_pending -= num_tokens
            token = next(tokens) if samples else None
            if token is None or token.token_id <= FAILED_TOKEN_ID or state.holds or remote \
                    or context_len < state.num_prompt:
                entries = done.prompt_logprobs.get(index, ())
                token = take_row(row, token, entries, outcome, self.blocks, limits, self.counters.fresh)
                if token is None:
                    continue
            else:  # a decode, as nearly all rows: what ``take_row`` does with it
                state.num_computed += num_tokens
                if seals and state.num_computed // block_size > state.num_sealed:
                    self.blocks.seal(state)
            if has_suspects and state.on_trial and state.suspicion.note_token_alone():
                queues.note_trusted(state)
            token_id = token.token_id
            state.output.append(token_id)  # ``add_token``, for every row of every step
            state.num_tokens += 1
            num_offline += state.is_offline
            if state.first_token_ns is None:
                state.first_token_ns = now_ns
                outcome.with_first.append(state)
            params = state.request.params
            may_end = (
                token_id in eos_token_ids or params.stop_token_ids
                or state.num_tokens - state.num_prompt >= params.max_tokens or state.num_tokens >= max_model_len)
            if may_end and (end := end_of(state, token, limits)) is not None:
                outcome.ended.append(end)
                continue
            going_on.append(state)
            tokens_of.append(token)
        self._count(outcome, num_offline)
        outcome.is_plain = outcome.is_plain and not outcome.ended
        return outcome

    def _count(self, outcome: StepOutcome, num_offline: int) -> None:
        """Count a step's output tokens (``num_offline`` offline) by class and tenant, and note prompts as computed."""
        queues, fresh = self.queues, self.counters.fresh
        with_token = outcome.with_token() if outcome.ended else outcome.going_on
        fresh.offline_output += num_offline
        fresh.online_output += len(with_token) - num_offline
        if queues.prefilling:
            queues.note_tokens([*outcome.going_on, *[end.state for end in outcome.ended]])
        if queues.are_charged:
            for state in with_token:
                queues.charge(state, 0, 1)

    def fail(self, step_id: int) -> list[RequestState]:
        """Take a failed or abandoned step back: nothing of it counts. Returns the group's own requests in it."""
        self.queues.note_change()
        flight = self.in_flight.pop(step_id)
        end_chunks(flight.guests, self.blocks, are_computed=False)
        self.slices.lose(flight, Discard.FAILED)
        for row in flight.own_rows:
            row.state.num_pending -= row.num_tokens
        return [row.state for row in flight.own_rows]

    # --- ends -------------------------------------------------------------------------------------------------

    def release_blocks(self, state: RequestState) -> None:
        """Give an ended request's blocks back in every stage, and count them. Its KV in host pools stays."""
        self.queues.note_change()
        self.counters.num_freed_blocks += self.blocks.num_exclusive(state)
        self.blocks.release(state)
        state.residences = hosted_only(state.residences)

    def preempt(self, state: RequestState, why: Preemption) -> None:
        """Have a request that is not in flight give its blocks up; this is counted and logged. With a checkpoint it is
        stored and later computes the tokens beyond it again; without one it is queued, and recomputed in whole."""
        assert state.num_pending == 0 and not state.transfers, "a request in flight cannot be preempted"
        num_kept = self._kept_tokens(state)
        self.queues.take_out(state)
        self.blocks.release(state)
        self.counters.num_preemptions += 1
        num_lost = state.num_computed - num_kept
        self.counters.num_recomputed_tokens += num_lost
        self._changes.preempted.append(Preempted(self.group_id, why, state.request_id, num_lost))
        state.num_preemptions += 1
        state.num_computed, state.num_sealed = num_kept, 0
        state.residences = hosted_only(state.residences) if num_kept else NOWHERE
        state.start_again()
        if num_kept:
            self.queues.keep_stored(state)
            return
        if not state.is_offline:
            self.counters.num_queue_blocks -= self.limits.blocks_for(state.num_tokens)
        self.queues.enqueue(state)

    def check(self, *, with_ledgers: bool = True) -> None:
        """Check the group's invariants, those of its ledgers only ``with_ledgers``. Raises AssertionError."""
        if with_ledgers:
            self.blocks.check()
        self.queues.check()
        for state in self.queues.running.values():
            self.blocks.check_holds(state)
        self.slices.check()
        layers = LayerRange(self.stages[0].layers.lo, self.stages[-1].layers.hi)
        assert sum(len(s.layers) for s in self.stages) == len(layers), "stages must be contiguous"

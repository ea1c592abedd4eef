"""The serving loop of one group, sans-I/O: plan, execute, commit.

``next_step`` asks the batching policy and applies its plan (blocks change hands here); the driver runs the step;
``commit`` takes the sampled tokens back. A group knows its stages, its queues and the ledgers of its workers; it knows
nothing of other groups, of moves, of time or of devices.

Reading order for newcomers: ``GroupCore.next_step``, ``core.serving.stepplan``, ``GroupCore.commit``, then
``policy.batching``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jettison.core.changes import Changes
from jettison.core.ports import RunStep, StepCompleted, StepRow
from jettison.core.requests import RequestState
from jettison.core.serving.queues import GroupCounters, GroupQueues, SchedulerLimits
from jettison.core.serving.stepplan import StepPlanner
from jettison.core.serving.waiting import Turns
from jettison.cost.predictor import UNKNOWN_PRICES
from jettison.cost.stepwork import StepWork
from jettison.errors import StalePlanError
from jettison.memory.blocks import BlockLedger
from jettison.memory.prefix import PrefixHasher
from jettison.policy.batching import BatchPlan, BlockedBy
from jettison.policy.lookahead import ChunkCost
from jettison.policy.merge import StagePlan
from jettison.types import (
    FAILED_TOKEN_ID,
    FinishReason,
    GroupId,
    RequestId,
    SampledToken,
    TokenLogprobs,
    WorkerId,
)

__all__ = ["GroupCore", "GroupCounters", "SchedulerLimits", "StepResult"]


@dataclass(slots=True)
class StepResult:
    """What a commit yields for one row that produced a token, or that ends without one."""

    state: RequestState
    token: SampledToken | None
    finish_reason: FinishReason | None
    stop_token_id: int | None = None


@dataclass(slots=True)
class _InFlight:
    """A step that has been issued."""

    step: RunStep
    issued_ns: int
    work: StepWork


class GroupCore(GroupQueues):
    """One group: the serving loop over its queues, stages in pipeline order over the ledgers of their workers."""

    def __init__(
        self,
        group_id: GroupId,
        epoch: int,
        stages: tuple[StagePlan, ...],
        ledgers: Mapping[WorkerId, BlockLedger],
        limits: SchedulerLimits,
        hasher: PrefixHasher,
        prices: Callable[[], ChunkCost] = lambda: UNKNOWN_PRICES,
        changes: Changes | None = None,
        turns: Turns | None = None,
        offline_turns: Turns | None = None,
    ) -> None:
        """``prices``: what chunks cost its last stage, as far as is known; ``changes`` and ``turns``: the cluster's."""
        super().__init__(group_id, stages, ledgers, limits, changes, turns, offline_turns)
        self.epoch = epoch
        self.in_flight: dict[int, _InFlight] = {}
        self.stranded: dict[RequestId, RequestState] = {}
        """Of steps that failed because a member is lost: under way when it died, though its death is not known yet."""
        self.head_blocked_by: BlockedBy | None = None
        """What keeps the head of the online queue out; an offline head that has to wait is no news."""
        self.prices = prices
        self.planner = StepPlanner(self)
        self._hasher = hasher

    # --- plan -------------------------------------------------------------------------------------------------

    def next_step(self, step_id: int, now_ns: int) -> RunStep | None:
        """Plan the next microbatch and apply the plan. None when there is nothing to run now."""
        if self._paused or len(self.in_flight) >= len(self.stages):
            return None
        if not self.running and not self.has_waiting:
            return None
        step = self._apply(self.planner.next_plan(), step_id, now_ns)
        if self._only_ledger is None:
            self.planner.note_applied()
        return step

    def cached_prefix(self, state: RequestState) -> tuple[int, int]:
        """(tokens found in the cache of every stage, allocatable blocks that admission takes)."""
        total = self.blocks_for(state.num_tokens)
        if not self._seals or state.prompt_logprobs is not None:
            return 0, total
        hashes = self._hashes(state, (state.num_tokens - 1) // self.limits.block_size)
        hits = [ledger.lookup(hashes) for ledger in self.ledgers]
        num = min(len(found) for found in hits)
        shared = min(
            sum(ledger.is_held(block) for block in found[:num])
            for ledger, found in zip(self.ledgers, hits, strict=True)
        )
        return num * self.limits.block_size, total - shared

    def _hashes(self, state: RequestState, num_blocks: int) -> list[bytes]:
        """Chain hashes of the request's first ``num_blocks`` full blocks; computed once."""
        known = len(state.hashes)
        if known < num_blocks:
            size = self.limits.block_size
            parent = state.hashes[-1] if state.hashes else None
            state.hashes += self._hasher.chain(
                state.tokens_between(known * size, num_blocks * size), state.request.cache_salt, parent
            )
        return state.hashes[:num_blocks]

    # --- apply ------------------------------------------------------------------------------------------------

    def _apply(self, plan: BatchPlan, step_id: int, now_ns: int) -> RunStep | None:
        if plan.version != self.version:
            raise StalePlanError(f"batch plan of version {plan.version}, group is at {self.version}")
        self.head_blocked_by = plan.head_blocked_by
        for request_id in plan.preemptions:
            self.preempt(self.running[request_id])
        rows: list[StepRow] = []
        for request_id, num_tokens, num_new_blocks in plan.chunks:
            state = self.running[request_id]
            if num_new_blocks:
                self._grow(state, num_new_blocks)
            rows.append(self._schedule(state, num_tokens))
        if plan.admissions:
            taken = self._take_waiting([admission.request_id for admission in plan.admissions])
            for admission, state in zip(plan.admissions, taken, strict=True):
                self._admit(state, admission.num_cached_tokens, now_ns)
                rows.append(self._schedule(state, min(admission.num_tokens, state.num_ready)))
        if not self.waiting:
            self.head_blocked_by = None
        if not rows:
            return None
        self._change()
        self.counters.num_steps += 1
        step = RunStep(step_id, self.group_id, self.epoch, self.stages, tuple(rows))
        self.in_flight[step_id] = _InFlight(step, now_ns, _work(rows))
        return step

    def _take_waiting(self, request_ids: Sequence[RequestId]) -> list[RequestState]:
        """Take these out of the queue, in order; those that have stepped aside stay in front."""
        online = [r for r in request_ids if r not in self._offline_ids] if self._offline_ids else request_ids
        offline = request_ids[len(online) :]
        taken = self.waiting.take(online, self._steps_aside) if online else []
        taken += self.waiting_offline.take(offline, self._steps_aside) if offline else []
        self._offline_ids.difference_update(offline)
        for state in taken:
            self._count_queued(state, -1)
        self._note_unqueued()
        return taken

    def _steps_aside(self, state: RequestState) -> bool:
        is_oversized = self.is_oversized(state)
        assert is_oversized or self.suspects, f"{state} was passed over"
        return is_oversized

    def _grow(self, state: RequestState, num_blocks: int) -> None:
        """Make the request's table longer in every stage."""
        self.counters.num_grown_blocks += num_blocks
        for ledger in self.ledgers:
            ledger.allocate(state.request_id, num_blocks)

    def _admit(self, state: RequestState, num_cached_tokens: int, now_ns: int) -> None:
        assert not self.ledgers[0].has(state.request_id), f"{state} has blocks already"
        total = self.blocks_for(state.num_tokens)
        self.counters.num_queue_blocks += total
        num_cached_blocks = 0
        if num_cached_tokens:
            hashes = state.hashes[: num_cached_tokens // self.limits.block_size]
            found = [ledger.lookup(hashes) for ledger in self.ledgers]
            # An admission before this one in the same plan may have evicted cached blocks that the plan counted on;
            # they were counted as allocatable as well, so there is room to compute them instead.
            num_cached_blocks = min(len(ids) for ids in found)
            num_cached_tokens = num_cached_blocks * self.limits.block_size
            for ledger, ids in zip(self.ledgers, found, strict=True):
                ledger.adopt_prefix(state.request_id, ids[:num_cached_blocks])
        for ledger in self.ledgers:
            ledger.allocate(state.request_id, total - num_cached_blocks)
        if self._seals and state.prompt_logprobs is None:
            self.counters.prefix_queries += state.num_tokens
            self.counters.prefix_hits += num_cached_tokens
        if state.first_scheduled_ns is None:
            state.first_scheduled_ns = now_ns
            state.num_cached = num_cached_tokens
        state.num_computed = num_cached_tokens
        state.num_sealed = num_cached_blocks
        self.resume(state)

    def _schedule(self, state: RequestState, num_tokens: int) -> StepRow:
        context = state.num_computed + state.num_pending
        state.num_pending += num_tokens
        samples = context + num_tokens == state.num_tokens and state.wants_output
        return StepRow(state, context, num_tokens, samples, state.remote)

    # --- commit -----------------------------------------------------------------------------------------------

    def overtaking(self, step_id: int) -> list[RequestState]:
        """Requests of a step whose chunk has ended before the chunk that it follows: that one got stuck on its way
        through the stages, as word of its failure may be later than this, and this one ran on KV that was not there."""
        if len(self.in_flight) < 2:
            return []
        rows = self.in_flight[step_id].step.rows
        return [
            row.state for row in rows
            if row.context_len > row.state.num_computed and row.state.ending is None and not row.state.recompute
        ]

    def commit(self, done: StepCompleted, now_ns: int) -> list[StepResult]:
        """Take the tokens of a finished step. Requests that end here are reported, not yet released."""
        self._change()
        flight = self.in_flight.pop(done.step_id)
        results: list[StepResult] = []
        tokens = iter(done.tokens)
        block_size = self.limits.block_size
        for index, row in enumerate(flight.step.rows):
            state, _, num_tokens, samples, _ = row
            state.num_pending -= num_tokens
            token = next(tokens) if samples else None
            if state.recompute:
                continue
            state.num_computed += num_tokens
            if state.prompt_logprobs is not None and index in done.prompt_logprobs:
                self._add_prompt_logprobs(state, row, done.prompt_logprobs[index])
            if state.num_computed // block_size > state.num_sealed:
                self._seal(state)
            if token is None:
                if state.num_computed == state.num_tokens and state.ending is None and not state.wants_output:
                    results.append(StepResult(state, None, FinishReason.LENGTH))
                continue
            if self._prefilling:
                self._prefilling.pop(state.request_id, None)
            if state.ending is not None:
                continue
            if token.token_id == FAILED_TOKEN_ID:
                results.append(StepResult(state, token, FinishReason.ERROR))
                continue
            if self.suspects and state.on_trial and state.suspicion.note_token_alone():
                self.suspects.pop(state.request_id, None)
            state.add_token(token.token_id)
            if state.first_token_ns is None:
                state.first_token_ns = now_ns
            results.append(StepResult(state, token, *self._finish_reason(state, token.token_id)))
        return results

    def repeat(self, num_steps: int, token_id: int, now_ns: int) -> tuple[RunStep, list[int]]:
        """Commit the step in flight and ``num_steps - 1`` like it, and plan after each the same rows again.

        The caller has made sure that no row ends, nothing else could be planned and the blocks suffice
        (``core.serving.fastforward``). Blocks are taken in the order in which single plans would have taken them.
        Returns the step that is in flight then, and after which of the steps (from 1) each block was taken.
        """
        ((step_id, flight),) = self.in_flight.items()
        rows, size = flight.step.rows, self.limits.block_size
        growth: list[tuple[int, int]] = []
        for index, row in enumerate(rows):
            room = self.ledgers[0].num_blocks_of(row.state.request_id) * size - row.context_len - 1
            growth += ((number, index) for number in range(room + 1, num_steps + 1, size))
        growth.sort()
        for _, index in growth:
            self._grow(rows[index].state, 1)
        repeated: list[StepRow] = []
        for state, context_len, *_ in rows:
            state.num_computed += num_steps
            state.add_tokens(token_id, num_steps)
            repeated.append(StepRow(state, context_len + num_steps, 1, True))
        self._version += 2 * num_steps
        self.counters.num_steps += num_steps
        step = flight.step._replace(rows=tuple(repeated))
        work = StepWork.decodes(len(rows), flight.work.num_kv_tokens + num_steps * len(rows))
        self.in_flight[step_id] = _InFlight(step, now_ns, work)
        return step, [number for number, _ in growth]

    def _add_prompt_logprobs(self, state: RequestState, row: StepRow, entries: list[TokenLogprobs]) -> None:
        """Append what is new: after a preemption the same positions are computed again."""
        assert state.prompt_logprobs is not None
        # Entry i belongs to prompt position context_len + 1 + i.
        known = len(state.prompt_logprobs) - (row.context_len + 1)
        if known >= 0:
            state.prompt_logprobs += entries[known:]

    def fail(self, step_id: int) -> list[RequestState]:
        """A step raised: its rows' requests, with nothing of the step counted."""
        self._change()
        flight = self.in_flight.pop(step_id)
        for row in flight.step.rows:
            row.state.num_pending -= row.num_tokens
        return [row.state for row in flight.step.rows]

    def _seal(self, state: RequestState) -> None:
        """Register the blocks that have become full."""
        # Blocks that lie elsewhere are not in the prefix cache of the stage that lacks them.
        if not self._seals or state.ending is not None or state.remote:
            return
        num_full = state.num_computed // self.limits.block_size
        hashes = self._hashes(state, num_full)
        for index in range(state.num_sealed, num_full):
            for ledger in self.ledgers:
                ledger.seal(state.request_id, index, hashes[index])
        state.num_sealed = num_full

    def _finish_reason(self, state: RequestState, token_id: int) -> tuple[FinishReason | None, int | None]:
        params = state.request.params
        if state.num_output >= params.min_tokens:
            is_eos = not params.ignore_eos and token_id in self.limits.eos_token_ids
            if is_eos or token_id in params.stop_token_ids:
                return FinishReason.STOP, token_id
        if state.num_output >= params.max_tokens or state.num_tokens >= self.limits.max_model_len:
            return FinishReason.LENGTH, None
        return None, None


def _work(rows: Sequence[StepRow]) -> StepWork:
    """``StepWork.of`` rows, of which most are decodes."""
    num_tokens = num_kv_tokens = num_more_pairs = 0
    for _, context_len, num, _, _ in rows:
        num_kv_tokens += context_len
        num_tokens += num
        if num > 1:
            num_more_pairs += (num - 1) * (2 * context_len + num) // 2
    return StepWork(len(rows), num_tokens, num_kv_tokens + num_tokens + num_more_pairs, num_kv_tokens)

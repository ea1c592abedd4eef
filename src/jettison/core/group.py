"""The serving loop of one group, sans-I/O: plan, execute, commit.

``next_step`` asks the batching policy and applies its plan (blocks change hands here); the driver runs the step;
``commit`` takes the sampled tokens back. A group knows its stages, its queues and the ledgers of its workers; it knows
nothing of other groups, of moves, of time or of devices.

Reading order for newcomers: ``GroupCore.next_step``, ``core.stepplan``, ``GroupCore.commit``, then ``policy.batching``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jettison.core.ports import RunStep, StepCompleted, StepRow
from jettison.core.request import Phase, RequestState
from jettison.core.stepplan import StepPlanner
from jettison.cost.online import OnlineChunkCost
from jettison.errors import StalePlanError
from jettison.memory.blocks import BlockLedger
from jettison.memory.prefix import PrefixHasher
from jettison.policy.batching import Admission, BatchPlan, BlockedBy
from jettison.policy.lookahead import LookaheadParams
from jettison.policy.merge import StagePlan
from jettison.types import (
    FAILED_TOKEN_ID,
    FinishReason,
    GroupId,
    LayerRange,
    RequestId,
    SampledToken,
    TokenLogprobs,
    WorkerId,
)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds that hold for every group."""

    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    watermark: float = 0.01
    """Share of the blocks that admission leaves free."""
    eos_token_ids: frozenset[int] = frozenset()
    enable_prefix_caching: bool = True
    lookahead: LookaheadParams = field(default_factory=LookaheadParams)


@dataclass(slots=True)
class GroupCounters:
    """Monotone totals of one group."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    num_freed_blocks: int = 0
    """Blocks given back by ended requests, each counted once (one stage)."""
    num_grown_blocks: int = 0
    """Blocks that running requests took beyond their admission."""


@dataclass(slots=True)
class StepResult:
    """What a commit yields for one row that produced a token."""

    state: RequestState
    token: SampledToken
    finish_reason: FinishReason | None
    stop_token_id: int | None = None


@dataclass(slots=True)
class _InFlight:
    """A step that has been issued."""

    step: RunStep
    issued_ns: int
    num_kv_tokens: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class Landing:
    """Blocks that incoming KV will need, by worker: admission must leave them free."""

    blocks: dict[WorkerId, int] = field(default_factory=dict)

    def of(self, worker_id: WorkerId) -> int:
        """Blocks reserved at one worker."""
        return self.blocks.get(worker_id, 0)


class GroupCore:
    """One group: stages in pipeline order over the ledgers of their workers."""

    def __init__(
        self,
        group_id: GroupId,
        epoch: int,
        stages: tuple[StagePlan, ...],
        ledgers: Mapping[WorkerId, BlockLedger],
        limits: SchedulerLimits,
        hasher: PrefixHasher,
        chunk_cost: OnlineChunkCost | None = None,
    ) -> None:
        """``chunk_cost`` predicts microbatches of this many stages, and learns from them."""
        self.group_id = group_id
        self.epoch = epoch
        self.stages = stages
        self.ledgers = tuple(ledgers[s.worker_id] for s in stages)
        self.limits = limits
        self.waiting: deque[RequestState] = deque()
        self.running: dict[RequestId, RequestState] = {}
        """In service order (oldest first)."""
        self.moving: dict[RequestId, RequestState] = {}
        self.suspects: dict[RequestId, RequestState] = {}
        """Of ``waiting`` and ``running``, those that may be what kills workers."""
        self.in_flight: dict[int, _InFlight] = {}
        self.stranded: dict[RequestId, RequestState] = {}
        """Of steps that failed because a member is lost: under way when it died, though its death is not known yet."""
        self.landing = Landing()
        self.admission_cap_blocks: int | None = None
        """Admission stops here although more is free: the group is to fit into less memory soon."""
        self.paused = False
        """No new steps: the group is about to be remapped."""
        self.holds_preemption = False
        """Nobody is recomputed: requests are on their way to the host or back, and what is missing will be free."""
        self.seals = limits.enable_prefix_caching
        """False while its blocks hold fewer layers than others in the same ledgers."""
        self.head_blocked_by: BlockedBy | None = None
        self.counters = GroupCounters()
        self.chunk_cost = chunk_cost or OnlineChunkCost()
        self.planner = StepPlanner(self)
        self._hasher = hasher
        self._version = 0
        self._num_queued_blocks = 0
        """Need of ``waiting``; kept up to date because dispatch asks at every arrival."""
        self._num_queued_tokens = 0
        """Tokens of ``waiting``; the monitor asks after every step."""

    # --- what others may read ---------------------------------------------------------------------------------

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Its workers, in pipeline order."""
        return tuple(s.worker_id for s in self.stages)

    @property
    def version(self) -> int:
        """Grows with every change of its queues, or of a ledger it uses (others may use it too)."""
        return self._version + sum(ledger.version for ledger in self.ledgers)

    @property
    def capacity_blocks(self) -> int:
        """Blocks of the tightest stage."""
        return min(ledger.capacity for ledger in self.ledgers)

    @property
    def num_free_blocks(self) -> int:
        """Allocatable blocks of the tightest stage, less what incoming KV will need; negative above the cap."""
        num_free = min(
            ledger.num_free - self.landing.of(stage.worker_id)
            for ledger, stage in zip(self.ledgers, self.stages, strict=True)
        )
        if self.admission_cap_blocks is None:
            return num_free
        return min(num_free, self.admission_cap_blocks - self.used_blocks)

    @property
    def used_blocks(self) -> int:
        """Blocks held in the fullest stage."""
        return max(ledger.num_held for ledger in self.ledgers)

    def used_blocks_of_running(self) -> int:
        """Blocks of its own running requests (the ledger may be shared with a pipeline that is being split)."""
        return sum(self.ledgers[0].num_blocks_of(request_id) for request_id in self.running)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.limits.block_size)

    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free."""
        return int(self.limits.watermark * self.capacity_blocks)

    def queued_blocks(self) -> int:
        """Need of all waiting requests."""
        return self._num_queued_blocks

    def queued_tokens(self) -> int:
        """Tokens that all waiting requests have to compute, whatever the prefix cache knows."""
        return self._num_queued_tokens

    # --- queue ------------------------------------------------------------------------------------------------

    def enqueue(self, state: RequestState) -> None:
        """Put a request into the waiting queue, by priority and arrival."""
        self._version += 1
        state.group_id = self.group_id
        state.phase = Phase.WAITING
        self._note_suspect(state)
        self._count_queued(state, 1)
        if not self.waiting or self.waiting[-1].order <= state.order:
            self.waiting.append(state)
            return
        index = next(i for i, other in enumerate(self.waiting) if other.order > state.order)
        self.waiting.insert(index, state)

    def _note_suspect(self, state: RequestState) -> None:
        if state.suspicion.on_trial:
            self.suspects[state.request_id] = state

    def _count_queued(self, state: RequestState, sign: int) -> None:
        self._num_queued_blocks += sign * self.blocks_for(len(state.tokens))
        self._num_queued_tokens += sign * len(state.tokens)

    def resume(self, state: RequestState) -> None:
        """Take a request whose KV is complete in every stage into the running set."""
        self._version += 1
        self.moving.pop(state.request_id, None)
        state.group_id = self.group_id
        state.phase = Phase.RUNNING
        self._note_suspect(state)
        state.kv_at = {s.worker_id: s.layers for s in self.stages}
        last = next(reversed(self.running.values()), None)
        self.running[state.request_id] = state
        if last is not None and last.order > state.order:
            self.running = dict(sorted(self.running.items(), key=lambda item: item[1].order))

    def take_queues(self) -> list[RequestState]:
        """Empty all queues (the group is about to be dissolved) and return what was in them."""
        self._version += 1
        states = [*self.waiting, *self.running.values(), *self.moving.values()]
        self.waiting.clear()
        self.running.clear()
        self.moving.clear()
        self.suspects.clear()
        self._num_queued_blocks = self._num_queued_tokens = 0
        return states

    def take_out(self, state: RequestState) -> None:
        """Remove a request from whatever queue it is in; its blocks stay where they are."""
        self._version += 1
        self.suspects.pop(state.request_id, None)
        if state.phase is Phase.WAITING:
            self.waiting.remove(state)
            self._count_queued(state, -1)
        else:
            self.running.pop(state.request_id, None)
            self.moving.pop(state.request_id, None)

    def release_blocks(self, state: RequestState) -> None:
        """Give back the request's blocks in every stage."""
        self._version += 1
        before = 0
        for ledger in self.ledgers:
            if ledger.has(state.request_id):
                before = max(before, ledger.num_exclusive_blocks(state.request_id))
                ledger.release(state.request_id)
        self.counters.num_freed_blocks += before
        state.kv_at = {}

    def preempt(self, state: RequestState) -> None:
        """Drop the request's KV and queue it again; it is recomputed from all its tokens."""
        assert state.num_pending == 0, "a request in flight cannot be preempted"
        self.take_out(state)
        for ledger in self.ledgers:
            if ledger.has(state.request_id):
                ledger.release(state.request_id)
        self.counters.num_preemptions += 1
        self.counters.num_recomputed_tokens += state.num_computed
        state.num_preemptions += 1
        state.num_computed = 0
        state.num_sealed = 0
        state.kv_at = {}
        state.remote = ()
        state.paused = state.recompute = False
        self.enqueue(state)

    # --- plan -------------------------------------------------------------------------------------------------

    def next_step(self, step_id: int, now_ns: int) -> RunStep | None:
        """Plan the next microbatch and apply the plan. None when there is nothing to run now."""
        if self.paused or len(self.in_flight) >= len(self.stages):
            return None
        if not self.running and not self.waiting:
            return None
        step = self._apply(self.planner.next_plan(), step_id, now_ns)
        self.planner.note_applied()
        return step

    def is_oversized(self, state: RequestState) -> bool:
        """It could not be held even if nobody else were: it has to wait for a larger group."""
        return self.blocks_for(len(state.tokens)) > self.capacity_blocks

    def cached_prefix(self, state: RequestState) -> tuple[int, int]:
        """(tokens found in the cache of every stage, allocatable blocks that admission takes)."""
        total = self.blocks_for(len(state.tokens))
        if not self.seals or state.prompt_logprobs is not None:
            return 0, total
        hashes = self._hashes(state, (len(state.tokens) - 1) // self.limits.block_size)
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
                state.tokens[known * size : num_blocks * size], state.request.cache_salt, parent
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
        for chunk in plan.chunks:
            state = self.running[chunk.request_id]
            if chunk.num_new_blocks:
                self._grow(state, chunk.num_new_blocks)
            rows.append(self._schedule(state, chunk.num_tokens))
        for admission, state in zip(plan.admissions, self._take_waiting(plan.admissions), strict=True):
            self._admit(state, admission.num_cached_tokens, now_ns)
            rows.append(self._schedule(state, min(admission.num_tokens, state.num_ready)))
        if not rows:
            return None
        self._version += 1
        self.counters.num_steps += 1
        step = RunStep(step_id, self.group_id, self.epoch, self.stages, tuple(rows))
        self.in_flight[step_id] = _InFlight(
            step, now_ns, sum(r.context_len for r in rows), sum(r.num_tokens for r in rows)
        )
        return step

    def _take_waiting(self, admissions: Sequence[Admission]) -> list[RequestState]:
        """Take these out of the queue, in order; those that have stepped aside stay in front."""
        taken: list[RequestState] = []
        aside: list[RequestState] = []
        while len(taken) < len(admissions):
            state = self.waiting.popleft()
            if state.request_id == admissions[len(taken)].request_id:
                self._count_queued(state, -1)
                taken.append(state)
            else:
                assert self.is_oversized(state) or self.suspects, f"{state} was passed over"
                aside.append(state)
        self.waiting.extendleft(reversed(aside))
        return taken

    def _grow(self, state: RequestState, num_blocks: int) -> None:
        """Make the request's table longer in every stage."""
        self.counters.num_grown_blocks += num_blocks
        for ledger in self.ledgers:
            ledger.allocate(state.request_id, num_blocks)

    def _admit(self, state: RequestState, num_cached_tokens: int, now_ns: int) -> None:
        hashes = state.hashes[: num_cached_tokens // self.limits.block_size]
        found = [ledger.lookup(hashes) for ledger in self.ledgers]
        # An admission before this one in the same plan may have evicted cached blocks that the plan counted on;
        # they were counted as allocatable as well, so there is room to compute them instead.
        num_cached_blocks = min(len(ids) for ids in found)
        num_cached_tokens = num_cached_blocks * self.limits.block_size
        total = self.blocks_for(len(state.tokens))
        for ledger, ids in zip(self.ledgers, found, strict=True):
            ledger.adopt_prefix(state.request_id, ids[:num_cached_blocks])
            ledger.allocate(state.request_id, total - num_cached_blocks)
        if self.seals and state.prompt_logprobs is None:
            self.counters.prefix_queries += len(state.tokens)
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
        return StepRow(state, context, num_tokens, context + num_tokens == len(state.tokens), state.remote)

    # --- commit -----------------------------------------------------------------------------------------------

    def commit(self, done: StepCompleted, now_ns: int) -> list[StepResult]:
        """Take the tokens of a finished step. Requests that end here are reported, not yet released."""
        self._version += 1
        flight = self.in_flight.pop(done.step_id)
        results: list[StepResult] = []
        tokens = iter(done.tokens)
        for index, row in enumerate(flight.step.rows):
            state = row.state
            state.num_pending -= row.num_tokens
            token = next(tokens) if row.samples else None
            if state.recompute:
                continue
            state.num_computed += row.num_tokens
            if state.prompt_logprobs is not None and index in done.prompt_logprobs:
                self._add_prompt_logprobs(state, row, done.prompt_logprobs[index])
            # Blocks that lie elsewhere are not in the prefix cache of the stage that lacks them.
            if self.seals and state.ending is None and not state.remote:
                self._seal(state)
            if token is None or state.ending is not None:
                continue
            if token.token_id == FAILED_TOKEN_ID:
                results.append(StepResult(state, token, FinishReason.ERROR))
                continue
            if self.suspects and state.suspicion.on_trial and state.suspicion.note_token_alone():
                self.suspects.pop(state.request_id, None)
            state.tokens.append(token.token_id)
            if state.first_token_ns is None:
                state.first_token_ns = now_ns
            results.append(StepResult(state, token, *self._finish_reason(state, token.token_id)))
        return results

    def repeat(self, num_steps: int, token_id: int, now_ns: int) -> RunStep:
        """Commit the step in flight and ``num_steps - 1`` like it, and plan after each the same rows again.

        The caller has made sure that no row ends, nothing else could be planned and the blocks suffice
        (``core.strides``). Blocks are taken in the order in which single plans would have taken them.
        """
        ((step_id, flight),) = self.in_flight.items()
        rows, size = flight.step.rows, self.limits.block_size
        growth: list[tuple[int, int]] = []
        for index, row in enumerate(rows):
            room = self.ledgers[0].num_blocks_of(row.state.request_id) * size - row.context_len - 1
            growth += ((number, index) for number in range(room + 1, num_steps + 1, size))
        for _, index in sorted(growth):
            self._grow(rows[index].state, 1)
        produced = [token_id] * num_steps
        for row in rows:
            row.state.num_computed += num_steps
            row.state.tokens += produced
        self._version += 2 * num_steps
        self.counters.num_steps += num_steps
        repeated = tuple(StepRow(row.state, row.context_len + num_steps, 1, True) for row in rows)
        step = replace(flight.step, rows=repeated)
        num_kv_tokens = flight.num_kv_tokens + num_steps * len(rows)
        self.in_flight[step_id] = _InFlight(step, now_ns, num_kv_tokens, flight.num_tokens)
        return step

    def _add_prompt_logprobs(self, state: RequestState, row: StepRow, entries: list[TokenLogprobs]) -> None:
        """Append what is new: after a preemption the same positions are computed again."""
        assert state.prompt_logprobs is not None
        # Entry i belongs to prompt position context_len + 1 + i.
        known = len(state.prompt_logprobs) - (row.context_len + 1)
        if known >= 0:
            state.prompt_logprobs += entries[known:]

    def fail(self, step_id: int) -> list[RequestState]:
        """A step raised: its rows' requests, with nothing of the step counted."""
        self._version += 1
        flight = self.in_flight.pop(step_id)
        for row in flight.step.rows:
            row.state.num_pending -= row.num_tokens
        return [row.state for row in flight.step.rows]

    def _seal(self, state: RequestState) -> None:
        num_full = state.num_computed // self.limits.block_size
        if num_full <= state.num_sealed:
            return
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
        if state.num_output >= params.max_tokens or len(state.tokens) >= self.limits.max_model_len:
            return FinishReason.LENGTH, None
        return None, None

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self, *, with_ledgers: bool = True) -> None:
        """Invariants of the group, for tests and idle moments. Raises AssertionError."""
        for ledger in self.ledgers if with_ledgers else ():
            ledger.check()
        for state in self.running.values():
            assert state.phase is Phase.RUNNING and state.group_id == self.group_id, state
            assert 0 <= state.num_computed + state.num_pending <= len(state.tokens), state
            for ledger in self.ledgers:
                have = ledger.num_blocks_of(state.request_id) * self.limits.block_size
                assert have >= state.num_computed + state.num_pending, state
        assert self._num_queued_blocks == sum(self.blocks_for(len(s.tokens)) for s in self.waiting)
        assert self._num_queued_tokens == sum(len(s.tokens) for s in self.waiting)
        for state in self.waiting:
            assert state.phase is Phase.WAITING and state.num_pending == 0, state
        layers = LayerRange(self.stages[0].layers.lo, self.stages[-1].layers.hi)
        assert sum(len(s.layers) for s in self.stages) == len(layers), "stages must be contiguous"

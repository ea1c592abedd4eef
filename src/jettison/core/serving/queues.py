"""The queues of one group and the blocks of its workers: who waits, runs and moves, and what room there is.

Everything here that changes is noted (``core.changes``). Which requests go into a step, and what comes of it, is
``core.serving.group``'s, which builds on this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jettison.core.changes import Changes
from jettison.core.requests import Phase, RequestState
from jettison.core.residence import arenas_of, hosted_only
from jettison.core.serving.waiting import Turns, WaitingQueue
from jettison.memory.blocks import BlockLedger
from jettison.memory.stages import StagePlan
from jettison.policy.lookahead import LookaheadParams
from jettison.policy.order import SchedulingPolicy, in_service_order
from jettison.types import NANOSECONDS, GroupId, LayerRange, RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds that hold for every group."""

    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    """Requests running, for each instance; no microbatch has more rows."""
    max_model_len: int
    watermark: float = 0.01
    """Share of the blocks that admission leaves free."""
    eos_token_ids: frozenset[int] = frozenset()
    enable_prefix_caching: bool = True
    lookahead: LookaheadParams = field(default_factory=LookaheadParams)
    prefill_first: bool = False
    """Prompts take a step's token budget before decodes do (in pipelines without lookahead, too)."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """Whose requests go first: ``policy.order``."""


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
    num_queue_blocks: int = 0
    """Blocks of requests that were let in, cached ones included, less those of preempted ones that wait again."""


@dataclass(slots=True)
class Landing:
    """Blocks that incoming KV will need, by worker: admission must leave them free."""

    blocks: dict[WorkerId, int] = field(default_factory=dict)

    def of(self, worker_id: WorkerId) -> int:
        """Blocks reserved at one worker."""
        return self.blocks.get(worker_id, 0)


class GroupQueues:
    """Queues over the ledgers of a group's workers, and the flags that say what may be done with them."""

    def __init__(
        self,
        group_id: GroupId,
        stages: tuple[StagePlan, ...],
        ledgers: Mapping[WorkerId, BlockLedger],
        limits: SchedulerLimits,
        changes: Changes | None = None,
        turns: Turns | None = None,
        offline_turns: Turns | None = None,
    ) -> None:
        self.group_id = group_id
        self.stages = stages
        self.worker_ids: tuple[WorkerId, ...] = tuple(s.worker_id for s in stages)
        """Its workers, in pipeline order."""
        self.ledgers = tuple(ledgers[w] for w in self.worker_ids)
        self.limits = limits
        self.waiting = WaitingQueue(turns, limits.scheduling_policy)
        """Online requests: what waits here is what overload, restores and dispatch are about."""
        self.waiting_offline = WaitingQueue(offline_turns, limits.scheduling_policy)
        """Offline requests: let in behind the others, and no reason for anything."""
        self._offline_ids: set[RequestId] = set()
        """Of ``waiting_offline``."""
        self.running: dict[RequestId, RequestState] = {}
        """In service order (``policy.order``), as it was when the last one came."""
        self._tenants: set[str] = set()
        """Whose requests have run here."""
        self._newest_turn = 0
        """Of those that have run here."""
        self.moving: dict[RequestId, RequestState] = {}
        self.stored: dict[RequestId, RequestState] = {}
        """Requests whose KV is in host pools only: they hold no blocks and wait to be brought back."""
        self.suspects: dict[RequestId, RequestState] = {}
        """Of ``waiting`` and ``running``, those that may be what kills workers."""
        self.landing = Landing()
        """Read it; ``reserve_landing`` sets it."""
        self.counters = GroupCounters()
        changes = changes or Changes()
        self._touched, self._freer, self._queued = changes.touched, changes.freer, changes.queued
        self.residence = arenas_of(stages)
        """Where its requests run; all of them share it."""
        self._only_here = (self.residence,)
        """Where the KV of its running requests is; one table for all of them."""
        # Most groups have one stage: what is asked for at every step then needs no loop.
        self._only_ledger = self.ledgers[0] if len(stages) == 1 else None
        self._version = 0
        self._admission_cap_blocks: int | None = None
        self._paused = False
        self._holds_preemption = False
        self._seals = limits.enable_prefix_caching
        # Sums that would cost O(queue) whenever dispatch or the monitor asks; ``check`` compares.
        self._num_queued_blocks = 0
        self._num_queued_tokens = 0
        self._largest_queued_tokens = 0
        """No waiting request has more; lowered only when the queue is empty."""
        self._prefilling: dict[RequestId, RequestState] = {}
        """Of ``running``, all those with more than one token to compute (and perhaps some with fewer)."""
        self._sum_scheduled_ns = 0
        """When the running requests were first scheduled, summed."""

    def touch(self) -> None:
        """Note that something is different for the group: what it may do next has to be asked again."""
        self._touched.add(self.group_id)
        self._freer.add(self.group_id)

    def _change(self) -> None:
        """Note that its queues are different: plans made before are stale."""
        self._version += 1
        self._touched.add(self.group_id)
        self._freer.add(self.group_id)

    # --- flags ------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """No new steps: the group is about to be remapped."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            self.touch()

    @property
    def admission_cap_blocks(self) -> int | None:
        """Admission stops here although more is free: the group is to fit into less memory soon."""
        return self._admission_cap_blocks

    @admission_cap_blocks.setter
    def admission_cap_blocks(self, cap: int | None) -> None:
        if cap != self._admission_cap_blocks:
            self._admission_cap_blocks = cap
            self.touch()

    @property
    def holds_preemption(self) -> bool:
        """Nobody is recomputed: requests are on their way to the host or back, and what is missing will be free."""
        return self._holds_preemption

    @holds_preemption.setter
    def holds_preemption(self, holds: bool) -> None:
        if holds != self._holds_preemption:
            self._holds_preemption = holds
            self.touch()

    @property
    def seals(self) -> bool:
        """False while its blocks hold fewer layers than others in the same ledgers."""
        return self._seals

    @seals.setter
    def seals(self, seals: bool) -> None:
        if seals != self._seals:
            self._seals = seals
            self.touch()

    def reserve_landing(self, blocks: dict[WorkerId, int]) -> None:
        """Admission leaves so many blocks free at each worker, instead of those before."""
        if blocks != self.landing.blocks:
            self.landing.blocks = blocks
            self.touch()

    # --- what others may read ---------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Grows with every change of its queues, or of a ledger it uses (others may use it too)."""
        if self._only_ledger is not None:
            return self._version + self._only_ledger.version
        return self._version + sum(ledger.version for ledger in self.ledgers)

    @property
    def max_running(self) -> int:
        """Requests that it may run at once: as many as its instances by themselves."""
        return self.limits.max_num_seqs * len(self.stages)

    @property
    def has_waiting(self) -> bool:
        """Requests of some class wait."""
        return bool(self.waiting) or bool(self.waiting_offline)

    def queue_of(self, state: RequestState) -> WaitingQueue:
        """Where a request of its class waits."""
        return self.waiting_offline if state.is_offline else self.waiting

    def all_requests(self) -> list[RequestState]:
        """Waiting, running, moving and stored."""
        served = (*self.running.values(), *self.moving.values(), *self.stored.values())
        return [*self.waiting, *self.waiting_offline, *served]

    @property
    def num_served(self) -> int:
        """Requests that have been admitted: running, moving, or stored."""
        return len(self.running) + len(self.moving) + len(self.stored)

    @property
    def capacity_blocks(self) -> int:
        """Blocks of the tightest stage."""
        if self._only_ledger is not None:
            return self._only_ledger.capacity
        return min(ledger.capacity for ledger in self.ledgers)

    @property
    def num_allocatable_blocks(self) -> int:
        """Free and cached blocks of the tightest stage, whatever they are kept for."""
        if self._only_ledger is not None:
            return self._only_ledger.num_free
        return min(ledger.num_free for ledger in self.ledgers)

    @property
    def num_free_blocks(self) -> int:
        """Allocatable blocks of the tightest stage, less what incoming KV will need; negative above the cap."""
        if self.landing.blocks:
            num_free = min(
                ledger.num_free - self.landing.of(worker_id)
                for ledger, worker_id in zip(self.ledgers, self.worker_ids, strict=True)
            )
        else:
            num_free = self.num_allocatable_blocks
        if self._admission_cap_blocks is None:
            return num_free
        return min(num_free, self._admission_cap_blocks - self.used_blocks)

    @property
    def used_blocks(self) -> int:
        """Blocks held in the fullest stage."""
        if self._only_ledger is not None:
            return self._only_ledger.num_held
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
        """Need of all waiting online requests."""
        return self._num_queued_blocks

    def queued_tokens(self) -> int:
        """Tokens that all waiting online requests have to compute, whatever the prefix cache knows."""
        return self._num_queued_tokens

    def unfinished_tokens(self) -> int:
        """Tokens that running requests have to compute before they decode."""
        return sum(ready for s in self._prefilling.values() if (ready := s.num_tokens - s.num_computed) > 1)

    def mean_age_s(self, now_ns: int) -> float | None:
        """How long ago the running requests were first scheduled, on average; None without any."""
        num = len(self.running)
        return (num * now_ns - self._sum_scheduled_ns) / NANOSECONDS / num if num else None

    def is_oversized(self, state: RequestState) -> bool:
        """It could not be held even if nobody else were: it has to wait for a larger group."""
        return self.blocks_for(state.num_tokens) > self.capacity_blocks

    def oversized(self) -> list[RequestState]:
        """Waiting requests that have to wait for a larger group. O(1) where there can be none."""
        if self.blocks_for(self._largest_queued_tokens) <= self.capacity_blocks:
            return []
        return [state for state in (*self.waiting, *self.waiting_offline) if self.is_oversized(state)]

    def in_order(self, states: Iterable[RequestState]) -> list[RequestState]:
        """Requests as it serves them."""
        return in_service_order(states, self.limits.scheduling_policy)

    # --- queue ------------------------------------------------------------------------------------------------

    def enqueue(self, state: RequestState) -> None:
        """Put a request into the waiting queue."""
        self._version += 1
        self._touched.add(self.group_id)
        self._queued.add(self.group_id)
        state.group_id = self.group_id
        state.phase = Phase.WAITING
        self._note_suspect(state)
        self._count_queued(state, 1)
        if not self.has_waiting:
            self._largest_queued_tokens = 0
        self._largest_queued_tokens = max(self._largest_queued_tokens, state.num_tokens)
        self.queue_of(state).add(state)
        if state.is_offline:
            self._offline_ids.add(state.request_id)

    def _note_suspect(self, state: RequestState) -> None:
        if state.on_trial:
            self.suspects[state.request_id] = state

    def _count_queued(self, state: RequestState, sign: int) -> None:
        if state.is_offline:
            return
        self._num_queued_blocks += sign * self.blocks_for(state.num_tokens)
        self._num_queued_tokens += sign * state.num_tokens

    def _note_unqueued(self) -> None:
        if not self.has_waiting:
            self._queued.discard(self.group_id)

    def resume(self, state: RequestState) -> None:
        """Take a request whose KV is complete in every stage into the running set."""
        assert state.first_scheduled_ns is not None, f"{state} has never been admitted"
        self._change()
        self.moving.pop(state.request_id, None)
        state.group_id = self.group_id
        state.phase = Phase.RUNNING
        self._note_suspect(state)
        hosted = hosted_only(state.residences)
        state.residences = (*self._only_here, *hosted) if hosted else self._only_here
        goes_last = self._goes_last(state)
        self.running[state.request_id] = state
        self._sum_scheduled_ns += state.first_scheduled_ns
        if state.num_tokens - state.num_computed > 1:
            self._prefilling[state.request_id] = state
        if not goes_last:
            self.running = {s.request_id: s for s in self.in_order(self.running.values())}

    def _goes_last(self, state: RequestState) -> bool:
        """Whether a request is certainly the last of the running ones in service order. Hardly ever more than O(1)."""
        self._tenants.add(state.tenant)
        is_newest, self._newest_turn = (state.turn or 0) > self._newest_turn, max(self._newest_turn, state.turn or 0)
        last = next(reversed(self.running.values()), None)
        if last is None:
            return True
        if last.is_offline != state.is_offline:
            return state.is_offline
        if len(self._tenants) == 1:
            return last.order <= state.order
        if not is_newest or (self.limits.scheduling_policy == "priority" and state.order[0] < last.order[0]):
            return False
        own = next((s for s in reversed(self.running.values()) if s.tenant == state.tenant), None)
        return own is None or own.order <= state.order

    def keep_stored(self, state: RequestState) -> None:
        """Take a request whose KV is in host pools only: it was moving here, or comes from another group."""
        self._change()
        self.moving.pop(state.request_id, None)
        state.group_id = self.group_id
        state.phase = Phase.STORED
        self.stored[state.request_id] = state

    def take_queues(self) -> list[RequestState]:
        """Empty all queues (the group is about to be dissolved) and return what was in them."""
        self._change()
        states = self.all_requests()
        self.waiting.clear()
        self.waiting_offline.clear()
        self._offline_ids.clear()
        self.running.clear()
        self.moving.clear()
        self.stored.clear()
        self.suspects.clear()
        self._prefilling.clear()
        self._num_queued_blocks = self._num_queued_tokens = self._sum_scheduled_ns = 0
        self._note_unqueued()
        return states

    def take_out(self, state: RequestState) -> None:
        """Remove a request from whatever queue it is in; its blocks stay where they are."""
        self._change()
        self.suspects.pop(state.request_id, None)
        if state.phase is Phase.WAITING:
            self.queue_of(state).remove(state)
            self._offline_ids.discard(state.request_id)
            self._count_queued(state, -1)
            self._note_unqueued()
            return
        self.moving.pop(state.request_id, None)
        self.stored.pop(state.request_id, None)
        if self.running.pop(state.request_id, None) is not None:
            self._prefilling.pop(state.request_id, None)
            self._sum_scheduled_ns -= state.first_scheduled_ns or 0

    def release_blocks(self, state: RequestState) -> None:
        """Give back the request's blocks in every stage."""
        self._change()
        before = 0
        for ledger in self.ledgers:
            if ledger.has(state.request_id):
                before = max(before, ledger.num_exclusive_blocks(state.request_id))
                ledger.release(state.request_id)
        self.counters.num_freed_blocks += before
        state.residences = hosted_only(state.residences)

    def preempt(self, state: RequestState) -> None:
        """Drop the request's KV and queue it again; it is recomputed from all its tokens."""
        assert state.num_pending == 0, "a request in flight cannot be preempted"
        self.take_out(state)
        for ledger in self.ledgers:
            if ledger.has(state.request_id):
                ledger.release(state.request_id)
        self.counters.num_preemptions += 1
        self.counters.num_queue_blocks -= self.blocks_for(state.num_tokens)
        self.counters.num_recomputed_tokens += state.num_computed
        state.num_preemptions += 1
        state.num_computed = 0
        state.num_sealed = 0
        state.residences = hosted_only(state.residences)
        state.remote = ()
        state.paused = state.recompute = False
        self.enqueue(state)

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self, *, with_ledgers: bool = True) -> None:
        """Invariants of the group, for tests and idle moments. Raises AssertionError."""
        for ledger in self.ledgers if with_ledgers else ():
            ledger.check()
        for state in self.running.values():
            assert state.phase is Phase.RUNNING and state.group_id == self.group_id, state
            assert 0 <= state.num_computed + state.num_pending <= state.num_tokens, state
            assert state.num_tokens == state.num_prompt + len(state.output), state
            for ledger in self.ledgers:
                have = ledger.num_blocks_of(state.request_id) * self.limits.block_size
                assert have >= state.num_computed + state.num_pending, state
        assert self._num_queued_blocks == sum(self.blocks_for(s.num_tokens) for s in self.waiting)
        assert self._num_queued_tokens == sum(s.num_tokens for s in self.waiting)
        assert all(s.num_tokens <= self._largest_queued_tokens for s in (*self.waiting, *self.waiting_offline))
        assert self.has_waiting == (self.group_id in self._queued)
        assert not any(s.is_offline for s in self.waiting) and all(s.is_offline for s in self.waiting_offline)
        classes = [s.is_offline for s in self.running.values()]
        assert classes == sorted(classes), "an offline request runs before an online one"
        unfinished = {r for r, s in self.running.items() if s.num_tokens - s.num_computed > 1}
        assert unfinished <= self._prefilling.keys() <= self.running.keys()
        assert self._sum_scheduled_ns == sum(s.first_scheduled_ns or 0 for s in self.running.values())
        self.waiting.check()
        self.waiting_offline.check()
        assert self._offline_ids == {s.request_id for s in self.waiting_offline}
        for state in (*self.waiting, *self.waiting_offline):
            assert state.phase is Phase.WAITING and state.num_pending == 0, state
        for tenant, is_offline in {(s.tenant, s.is_offline) for s in self.running.values()}:
            own = [s.order for s in self.running.values() if (s.tenant, s.is_offline) == (tenant, is_offline)]
            assert own == sorted(own), f"running requests of {tenant!r} are out of order"
        layers = LayerRange(self.stages[0].layers.lo, self.stages[-1].layers.hi)
        assert sum(len(s.layers) for s in self.stages) == len(layers), "stages must be contiguous"

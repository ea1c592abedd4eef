"""What a group's next microbatch is: its queues as the policies see them, and the microbatches planned ahead.

Reads a group, changes nothing in it; ``Group`` applies the plans. Which tokens go where is decided in
``policy.lookahead`` (pipelines) and ``policy.batching`` (everything else, and all that concerns memory).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jettison.core.requests import Phase, RequestState
from jettison.policy.batching import (
    BatchLimits,
    BatchPlan,
    BatchView,
    RunningRow,
    VictimRow,
    WaitingRow,
    plan_batch,
    plan_prefill_first,
)
from jettison.policy.lookahead import (
    HORIZON_MICROBATCHES,
    LEAST_TOKENS,
    LookaheadView,
    QueuedChunk,
    plan_microbatches,
)
from jettison.policy.order import in_service_order
from jettison.types import RequestId

if TYPE_CHECKING:
    from jettison.core.serving.group import Group


class StepPlanner:
    """Plans the microbatches of one group, one after the other."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ahead: deque[dict[RequestId, int]] = deque()
        """Microbatches planned ahead, as tokens a request; good for ``_ahead_version`` of the group only."""
        self._ahead_version = -1
        self._was_alone = False
        """The last step was a suspect's."""
        self._limits: BatchLimits | None = None
        """Good for ``_limits_capacity``: nothing else in them ever changes."""
        self._limits_capacity = -1

    def next_plan(self) -> BatchPlan:
        """The next microbatch, for the group as it is now."""
        group = self._group
        if group.queues.suspects:
            return self._trial_plan()
        if len(group.stages) > 1 and group.limits.lookahead.enabled:
            plan = self._balanced_plan()
            if plan is not None:
                return plan
        planned = plan_prefill_first if group.limits.prefill_first else plan_batch
        return planned(self.view(), self.limits())

    def note_applied(self) -> None:
        """The plan was applied: what is planned beyond it still holds, until something else happens."""
        self._ahead_version = self._group.version

    def _balanced_plan(self) -> BatchPlan | None:
        """The next of the microbatches planned ahead; they are planned anew whenever the group has changed.

        None where plain budgets apply: there is little to balance, or memory allows nothing of what was planned.
        """
        if not self._ahead or self._ahead_version != self._group.version:
            least_tokens = self._group.limits.lookahead.min_tokens or LEAST_TOKENS
            plan_ahead = plan_microbatches(self._lookahead_view(), self._group.prices(), least_tokens)
            self._ahead = deque(plan_ahead.microbatches)
        if not self._ahead:
            return None
        plan = plan_batch(self.view(), self.limits(), self._ahead.popleft())
        if plan.is_empty or plan.preemptions:
            self._ahead.clear()
        return None if plan.is_empty else plan

    def _trial_plan(self) -> BatchPlan:
        """While some request may be what kills workers: it runs alone, in turn with steps of all others.

        One step is in flight at a time, so what was there when a worker dies is known. Suspects wait for each other;
        no request passes one that waits for memory or a place, or it would never be tried.
        """
        group = self._group
        if group.in_flight:
            return BatchPlan(group.version, (), (), (), group.head_blocked_by)
        running = [s for s in group.queues.suspects.values() if s.phase is Phase.RUNNING]
        suspect = in_service_order(running or group.queues.suspects.values(), group.limits.scheduling_policy)[0]
        limits = self.limits()._replace(num_microbatches=1)
        own_row = [self._waiting_row(suspect)] if suspect.phase is Phase.WAITING else []
        alone = plan_batch(
            self.view()._replace(waiting=own_row), limits, {suspect.request_id: limits.max_num_tokens}
        )
        if not alone.is_empty and not self._was_alone:
            self._was_alone = True
            return alone
        waits = bool(own_row) and alone.is_empty and not own_row[0].is_oversized
        others = self.view()
        others = others._replace(
            running=[row for row in others.running if row.request_id not in group.queues.suspects],
            waiting=() if waits else [self._waiting_row(s) for s in self._waiting() if not s.on_trial],
        )
        together = plan_batch(others, limits)
        self._was_alone = False
        if together.is_empty:
            return alone
        return together._replace(head_blocked_by=together.head_blocked_by or alone.head_blocked_by)

    # --- views ------------------------------------------------------------------------------------------------

    def limits(self) -> BatchLimits:
        """Bounds of one microbatch of this group."""
        group = self._group
        capacity = group.blocks.capacity
        if self._limits is None or capacity != self._limits_capacity:
            self._limits_capacity = capacity
            self._limits = BatchLimits(
                group.limits.max_num_batched_tokens,
                group.max_running,
                group.blocks.watermark,
                group.limits.block_size,
                len(group.stages),
            )
        return self._limits

    def view(self) -> BatchView:
        """The group as ``policy.batching`` sees it."""
        group, blocks, running = self._group, self._group.blocks, self._group.queues.running
        block_size = group.limits.block_size
        tables = blocks.ledgers[0].tables
        rows = []
        for request_id, state in running.items():
            scheduled = state.num_computed + state.num_pending
            ready = state.num_tokens - scheduled
            if ready <= 0 or state.paused or state.recompute or state.ending is not None:
                continue
            room = len(tables[request_id].ids) * block_size - scheduled
            rows.append(RunningRow(request_id, ready, room, state.num_pending > 0, not state.num_output))
        num_allocatable = blocks.num_allocatable
        return BatchView(
            group.version, rows, len(running), self._waiting_rows(), self._victims, num_allocatable,
            num_allocatable - blocks.num_free,
        )

    def _waiting_rows(self) -> Iterator[WaitingRow]:
        return map(self._waiting_row, self._waiting())

    def _waiting(self) -> Iterator[RequestState]:
        """Online requests, then offline ones that may be let in; each in the order of service."""
        return self._group.queues.newcomers()

    def _waiting_row(self, state: RequestState) -> WaitingRow:
        blocks = self._group.blocks
        if blocks.is_oversized(state):
            total = self._group.limits.blocks_for(state.num_tokens)
            return WaitingRow(state.request_id, state.num_tokens, 0, total, True)
        num_cached, num_needed = blocks.cached_prefix(state)
        return WaitingRow(state.request_id, state.num_tokens, num_cached, num_needed)

    def _victims(self) -> list[VictimRow]:
        if self._group.holds_preemption:
            return []
        ledgers = self._group.blocks.ledgers
        return [
            VictimRow(s.request_id, min(ledger.num_exclusive_blocks(s.request_id) for ledger in ledgers))
            for s in reversed(self._group.queues.running.values())
            if s.num_pending == 0 and not (s.paused or s.recompute or s.ending or s.transfers or s.remote)
        ]

    def _lookahead_view(self) -> LookaheadView:
        group = self._group
        decodes: list[QueuedChunk] = []
        decodes_in_flight: list[QueuedChunk] = []
        prompts: list[QueuedChunk] = []
        for request_id, state in group.queues.running.items():
            scheduled = state.num_computed + state.num_pending
            ready = state.num_tokens - scheduled
            if state.ending is not None or state.paused or state.recompute:
                continue
            if ready <= 0:
                # All its tokens are in flight: it decodes next.
                if not state.wants_output:
                    continue
                decodes_in_flight.append(QueuedChunk(request_id, 1, scheduled))
            else:
                (decodes if ready == 1 else prompts).append(QueuedChunk(request_id, ready, scheduled))
        limits = self.limits()
        horizon = HORIZON_MICROBATCHES * len(group.stages) * limits.max_num_tokens
        prompts += self._admissible(horizon - sum(c.num_tokens for c in prompts), limits)
        return LookaheadView(
            group.version, len(group.stages), limits.max_num_tokens, decodes, decodes_in_flight, prompts
        )

    def _admissible(self, horizon: int, limits: BatchLimits) -> list[QueuedChunk]:
        """Waiting requests that memory would admit now, up to ``horizon`` tokens."""
        group = self._group
        chunks: list[QueuedChunk] = []
        num_free = group.blocks.num_free
        for row in self._waiting_rows():
            if row.is_oversized:
                continue
            num_running = len(group.queues.running) + len(chunks)
            watermark = limits.watermark_blocks if num_running else 0
            num_free -= row.num_blocks_needed
            if horizon <= 0 or num_running >= limits.max_num_seqs or num_free < watermark:
                break
            left = row.num_tokens - row.num_cached_tokens
            chunks.append(QueuedChunk(row.request_id, left, row.num_cached_tokens))
            horizon -= left
        return chunks

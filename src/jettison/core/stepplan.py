"""What a group's next microbatch is: its queues as the policies see them, and the microbatches planned ahead.

Reads a group, changes nothing in it; ``GroupCore`` applies the plans. Which tokens go where is decided in
``policy.lookahead`` (pipelines) and ``policy.batching`` (everything else, and all that concerns memory).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jettison.policy.batching import (
    BatchLimits,
    BatchPlan,
    BatchView,
    RunningRow,
    VictimRow,
    WaitingRow,
    plan_batch,
)
from jettison.policy.lookahead import (
    HORIZON_MICROBATCHES,
    LEAST_TOKENS,
    LookaheadView,
    QueuedChunk,
    plan_microbatches,
)
from jettison.types import RequestId

if TYPE_CHECKING:
    from jettison.core.group import GroupCore


class StepPlanner:
    """Plans the microbatches of one group, one after the other."""

    def __init__(self, group: GroupCore) -> None:
        self._group = group
        self._ahead: deque[dict[RequestId, int]] = deque()
        """Microbatches planned ahead, as tokens a request; good for ``_ahead_version`` of the group only."""
        self._ahead_version = -1

    def next_plan(self) -> BatchPlan:
        """The next microbatch, for the group as it is now."""
        group = self._group
        if len(group.stages) > 1 and group.limits.lookahead.enabled:
            plan = self._balanced_plan()
            if plan is not None:
                return plan
        return plan_batch(self.view(), self.limits())

    def note_applied(self) -> None:
        """The plan was applied: what is planned beyond it still holds, until something else happens."""
        self._ahead_version = self._group.version

    def _balanced_plan(self) -> BatchPlan | None:
        """The next of the microbatches planned ahead; they are planned anew whenever the group has changed.

        None where plain budgets apply: there is little to balance, or memory allows nothing of what was planned.
        """
        if not self._ahead or self._ahead_version != self._group.version:
            least_tokens = self._group.limits.lookahead.min_tokens or LEAST_TOKENS
            plan_ahead = plan_microbatches(self._lookahead_view(), self._group.chunk_cost, least_tokens)
            self._ahead = deque(plan_ahead.microbatches)
        if not self._ahead:
            return None
        plan = plan_batch(self.view(), self.limits(), self._ahead.popleft())
        if plan.is_empty or plan.preemptions:
            self._ahead.clear()
        return None if plan.is_empty else plan

    # --- views ------------------------------------------------------------------------------------------------

    def limits(self) -> BatchLimits:
        """Bounds of one microbatch of this group."""
        group = self._group
        return BatchLimits(
            group.limits.max_num_batched_tokens,
            group.limits.max_num_seqs,
            group.watermark_blocks(),
            group.limits.block_size,
            len(group.stages),
        )

    def view(self) -> BatchView:
        """The group as ``policy.batching`` sees it."""
        group = self._group
        block_size = group.limits.block_size
        table_of = group.ledgers[0].table
        rows = []
        for request_id, state in group.running.items():
            scheduled = state.num_computed + state.num_pending
            ready = len(state.tokens) - scheduled
            if ready <= 0 or state.paused or state.recompute or state.ending is not None:
                continue
            room = len(table_of(request_id).ids) * block_size - scheduled
            rows.append(RunningRow(request_id, ready, room, state.num_pending > 0))
        num_free = min(ledger.num_free for ledger in group.ledgers)
        return BatchView(
            group.version, rows, len(group.running), self._waiting_rows(), self._victims, num_free,
            num_reserved_blocks=num_free - group.num_free_blocks,
        )

    def _waiting_rows(self) -> Iterator[WaitingRow]:
        for state in self._group.waiting:
            if self._group.is_oversized(state):
                total = self._group.blocks_for(len(state.tokens))
                yield WaitingRow(state.request_id, len(state.tokens), 0, total, True)
                continue
            num_cached, num_needed = self._group.cached_prefix(state)
            yield WaitingRow(state.request_id, len(state.tokens), num_cached, num_needed)

    def _victims(self) -> list[VictimRow]:
        if self._group.holds_preemption:
            return []
        ledgers = self._group.ledgers
        return [
            VictimRow(s.request_id, min(ledger.num_exclusive_blocks(s.request_id) for ledger in ledgers))
            for s in reversed(self._group.running.values())
            if s.num_pending == 0 and not (s.paused or s.recompute or s.ending or s.moves or s.remote)
        ]

    def _lookahead_view(self) -> LookaheadView:
        group = self._group
        decodes: list[QueuedChunk] = []
        decodes_in_flight: list[QueuedChunk] = []
        prompts: list[QueuedChunk] = []
        for request_id, state in group.running.items():
            scheduled = state.num_computed + state.num_pending
            ready = len(state.tokens) - scheduled
            if state.ending is not None or state.paused or state.recompute:
                continue
            if ready <= 0:
                # All its tokens are in flight: it decodes next.
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
        num_free = group.num_free_blocks
        for row in self._waiting_rows():
            if row.is_oversized:
                continue
            num_running = len(group.running) + len(chunks)
            watermark = limits.watermark_blocks if num_running else 0
            num_free -= row.num_blocks_needed
            if horizon <= 0 or num_running >= limits.max_num_seqs or num_free < watermark:
                break
            left = row.num_tokens - row.num_cached_tokens
            chunks.append(QueuedChunk(row.request_id, left, row.num_cached_tokens))
            horizon -= left
        return chunks

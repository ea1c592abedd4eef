"""Plans of a group's next microbatch: its queues as the policies see them, and the microbatches planned ahead.

It reads a group, and changes nothing in it; ``Group`` applies the plans. ``policy.lookahead`` (pipelines),
``policy.filling`` (offline requests beside online ones) and ``policy.batching`` (everything else, and memory) decide
which tokens go where.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from jettison.core.requests import UNSCHEDULED, Phase, RequestState
from jettison.core.serving.groupview import GroupView
from jettison.core.serving.planviews import EachTime, decode_chunks, running_rows, victim_rows, waiting_row
from jettison.core.serving.sharedsteps import Planned, plan_shared, planned_within
from jettison.policy.batching import (
    BatchLimits,
    BatchPlan,
    BatchView,
    RunningRow,
    VictimRow,
    WaitingRow,
    plan_batch,
    plan_beside,
    plan_prefill_first,
)
from jettison.policy.filling import plan_alone
from jettison.policy.lookahead import (
    HORIZON_MICROBATCHES,
    LEAST_TOKENS,
    LookaheadView,
    QueuedChunk,
    plan_microbatches,
)
from jettison.policy.order import in_service_order
from jettison.policy.slo import Pace, saturating_tokens, step_budget
from jettison.types import RequestId


class StepPlanner:
    """Plans the microbatches of one group, one after the other."""

    def __init__(self, group: GroupView) -> None:
        self._group = group
        self._ahead: deque[dict[RequestId, int]] = deque()
        """Microbatches planned ahead, as tokens a request; valid for ``_ahead_version`` of the group only."""
        self._ahead_version = -1
        self._was_alone = False
        """The last step was a suspect's own."""
        self._limits: BatchLimits | None = None
        """Valid for ``_limits_capacity``: no other input of them ever changes."""
        self._limits_capacity = -1

    def next_plan(self, now_ns: int) -> BatchPlan:
        """The plan of the next microbatch, for the group as it is now. A suspect is tried alone. Where objectives bound
        steps, offline tokens fill what online requests leave, online requests alone keep to TPOT if a flag names it,
        and offline requests alone keep to the bound on their steps. Else all requests are planned together, by
        lookahead in pipelines."""
        group = self._group
        queues = group.queues
        if queues.suspects:
            return self._trial_plan()
        pace = group.pace()
        if pace is not None:
            if pace.offline.slo_aware and queues.has_both_classes:
                return plan_shared(group, pace, self.limits(), self._planned(online_only=True), now_ns)
            if pace.bounds_online and not queues.has_offline:
                return planned_within(group, pace, self._planned(), self.view(), self.limits())
            if pace.offline.slo_aware and queues.has_offline:
                budget = step_budget(pace.predictor, group.longest_alone_s, len(group.stages))
                return plan_alone(self.view(), self._planned(), self._saturating_limits(pace), budget)
        return self._decodes() or self._planned()(self.view(), self.limits())

    def _decodes(self) -> BatchPlan | None:
        """What ``plan_batch`` plans where each running request decodes and memory has room for all, as in most steps of
        an instance by itself: without a row for each of them. None elsewhere."""
        group, queues, limits = self._group, self._group.queues, self.limits()
        num_running = len(queues.running)
        if len(group.stages) > 1 or queues.prefilling or num_running > min(limits.max_rows, limits.max_num_tokens) \
                or group.absent or (group.limits.prefill_first and queues.has_waiting):
            return None
        chunks = decode_chunks(group)
        if chunks is None:
            return None
        view = self._view(())
        free_blocks = view.num_free_blocks - sum([chunk[2] for chunk in chunks])
        if free_blocks < 0:
            return None
        return plan_beside(
            view, limits, chunks, free_blocks=free_blocks, budget=limits.max_num_tokens - num_running)

    def plan_ahead(self, now_ns: int) -> BatchPlan | None:
        """The microbatch behind the one in flight, of online requests; None where it would be empty, or where a running
        request lacks blocks: what is to give way is chosen when the one in flight has ended."""
        group = self._group
        view, pace, planned = self.view(is_ahead=True), group.pace(), self._planned()
        if pace is not None and pace.bounds_online:
            plan = planned_within(group, pace, planned, view, self.limits())
        else:
            plan = planned(view, self.limits())
        return None if plan.is_empty or plan.preemptions or plan.lacks_blocks else plan

    def _saturating_limits(self, pace: Pace) -> BatchLimits:
        """Limits of a microbatch of offline requests alone: a token for each running request, and as many prompt tokens
        as saturate the device, never more than the plain limit."""
        limits = self.limits()
        num_tokens = saturating_tokens(pace.predictor, limits.max_num_tokens, len(self._group.stages))
        return limits._replace(
            max_num_tokens=min(limits.max_num_tokens, len(self._group.queues.running) + num_tokens))

    def note_applied(self) -> None:
        """Note that the group has applied the plan: microbatches planned ahead stay valid until it changes in another
        way."""
        self._ahead_version = self._group.version

    def _planned(self, *, online_only: bool = False) -> Planned:
        """The function that plans the next microbatch: within the next shares planned ahead, in a pipeline with
        lookahead, or by plain budgets where there is little to balance."""
        limits = self._group.limits
        if len(self._group.stages) > 1 and limits.lookahead.enabled:
            shares = self._next_shares(online_only)
            if shares is not None:
                return partial(self._plan_balanced, shares)
        return plan_prefill_first if limits.prefill_first else plan_batch

    def _next_shares(self, online_only: bool) -> dict[RequestId, int] | None:
        """Take the next of the microbatches planned ahead, as tokens a request; None: plain budgets apply. They are
        planned anew where none is left, or the group has changed."""
        if not self._ahead or self._ahead_version != self._group.version:
            least_tokens = self._group.limits.lookahead.min_tokens or LEAST_TOKENS
            view = self._lookahead_view(online_only)
            self._ahead = deque(plan_microbatches(view, self._group.prices(), least_tokens))
        return self._ahead.popleft() if self._ahead else None

    def _plan_balanced(self, shares: dict[RequestId, int], view: BatchView, limits: BatchLimits) -> BatchPlan:
        """Plan within shares; by plain budgets where memory allows none of the shares. If it does not, or a request is
        preempted, the microbatches planned ahead are dropped."""
        plan = plan_batch(view, limits, shares)
        if plan.is_empty or plan.preemptions:
            self._ahead.clear()
        if not plan.is_empty:
            return plan
        return plan_prefill_first(view, limits) if self._group.limits.prefill_first else plan_batch(view, limits)

    def _trial_plan(self) -> BatchPlan:
        """The plan while some request may be what kills workers (a suspect): it runs alone, in turn with steps of all
        others. Where one side has nothing to run, the other goes on. Of several suspects a running one is tried, else
        the first in the order of service; the rest wait, offline ones for as long as no offline work is admitted.

        The plan is empty while a step is in flight, so the requests under way at a worker's death are known. No request
        passes a suspect that waits for memory or a place, or the suspect would never be tried; an offline suspect is
        passed by online ones.
        """
        group = self._group
        if group.in_flight:
            return BatchPlan(group.version, (), (), (), group.head_blocked_by)
        limits = self.limits()._replace(num_microbatches=1)
        alone, passing = self._suspects_plan(limits)
        if alone is not None and not alone.is_empty and not self._was_alone:
            self._was_alone = True
            return alone
        others = self.view()
        others = others._replace(
            running=[row for row in others.running if row.request_id not in group.queues.suspects],
            waiting=[waiting_row(group, s) for s in passing],
        )
        together = plan_batch(others, limits)
        self._was_alone = False
        if alone is None:
            return together
        if together.is_empty:
            return alone
        return together._replace(head_blocked_by=together.head_blocked_by or alone.head_blocked_by)

    def _suspects_plan(self, limits: BatchLimits) -> tuple[BatchPlan | None, list[RequestState]]:
        """The plan of a suspect alone (None: none may be tried, or only online requests count for what keeps the queue
        out), and the waiting requests that may pass it."""
        group = self._group
        others = [s for s in self._waiting() if not s.on_trial]
        suspects = [s for s in group.queues.suspects.values() if s.phase is Phase.RUNNING] or [
            s for s in group.queues.suspects.values() if group.queues.admits_offline or not s.is_offline]
        if not suspects:
            return None, others
        suspect = in_service_order(suspects, group.limits.scheduling_policy)[0]
        own_row = [waiting_row(group, suspect)] if suspect.phase is Phase.WAITING else []
        alone = plan_batch(
            self.view()._replace(waiting=own_row), limits, {suspect.request_id: limits.max_num_tokens}
        )
        if not own_row or not alone.is_empty or own_row[0].is_oversized:
            return alone, others
        if not suspect.is_offline:
            return alone, []
        return None, [s for s in others if not s.is_offline]

    # --- views ------------------------------------------------------------------------------------------------

    def limits(self) -> BatchLimits:
        """Bounds of one microbatch of this group; they change with its capacity alone."""
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

    def view(self, *, is_ahead: bool = False) -> BatchView:
        """The group as ``policy.batching`` sees it, all its requests together; it has no victims while preemption is
        held. ``is_ahead``: with the tokens that the step in flight will sample, and without victims."""
        rows = running_rows(self._group, self._group.queues.running.values(), is_ahead=is_ahead)
        return self._view(rows, list if is_ahead else self._victims)

    def _view(
        self, rows: Sequence[RunningRow], victims: Callable[[], Sequence[VictimRow]] = list
    ) -> BatchView:
        group, blocks = self._group, self._group.blocks
        num_allocatable = blocks.num_allocatable
        return BatchView(
            group.version, rows, len(group.queues.running),
            EachTime(self._waiting_rows) if group.queues.has_waiting else (), victims,
            num_allocatable, num_allocatable - blocks.num_free,
        )  # fmt: skip

    def _waiting_rows(self) -> Iterator[WaitingRow]:
        return map(partial(waiting_row, self._group), self._waiting())

    def _waiting(self) -> Iterator[RequestState]:
        """Waiting online requests, then offline ones that may be admitted, unless running ones sit out; each class in
        the order of service."""
        queues = self._group.queues
        return iter(queues.waiting) if self._group.sitting_out else queues.newcomers()

    def _victims(self) -> list[VictimRow]:
        group = self._group
        return [] if group.holds_preemption else victim_rows(group, reversed(group.queues.running.values()))

    def _lookahead_view(self, online_only: bool) -> LookaheadView:
        group = self._group
        decodes: list[QueuedChunk] = []
        decodes_in_flight: list[QueuedChunk] = []
        prompts: list[QueuedChunk] = []
        absent = group.absent
        for request_id, state in group.queues.running.items():
            if online_only and state.is_offline:
                break
            scheduled = state.num_computed + state.num_pending
            ready = state.num_tokens - scheduled
            if (state.holds and state.holds & UNSCHEDULED) or request_id in absent:
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
        prompts += self._admissible(horizon - sum(c.num_tokens for c in prompts), limits, online_only)
        return LookaheadView(len(group.stages), limits.max_num_tokens, decodes, decodes_in_flight, prompts)

    def _admissible(self, horizon: int, limits: BatchLimits, online_only: bool) -> list[QueuedChunk]:
        """Chunks of waiting requests that memory and places would admit now, in the order of service, until they have
        ``horizon`` tokens; oversized ones are passed over. ``online_only``: as if the places and blocks of offline
        requests were free, where online requests wait."""
        group = self._group
        queues, num_free, rows = group.queues, group.blocks.num_free, self._waiting_rows()
        num_running = len(queues.running)
        if online_only:
            rows = map(partial(waiting_row, group), queues.waiting)
            num_running -= queues.num_running_offline
            if queues.waiting:
                num_free += sum(v.num_reclaimable_blocks for v in victim_rows(group, queues.running_offline()))
        chunks: list[QueuedChunk] = []
        for row in rows:
            if row.is_oversized:
                continue
            watermark = limits.watermark_blocks if num_running else 0
            num_free -= row.num_blocks_needed
            if horizon <= 0 or num_running >= limits.max_num_seqs or num_free < watermark:
                break
            left = row.num_tokens - row.num_cached_tokens
            chunks.append(QueuedChunk(row.request_id, left, row.num_cached_tokens))
            horizon -= left
            num_running += 1
        return chunks

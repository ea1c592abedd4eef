"""Online and offline requests in one microbatch (ConServe Algorithm 1): online ones as if they were alone, offline ones
in the tokens, blocks and time that are left.

Pure. Online requests are planned by ``policy.batching``, as if offline ones held no tokens, no places and no blocks
that can be taken from them. Offline requests that are in the way of that plan are evicted: first those with KV in host
pools, for they lose least, then the newest. Offline requests fill what is left of the step's tokens, rows, blocks and
*time* (``policy.slo``): running ones before waiting ones, decodes before prompts. They give way to each other as online
ones do. No offline request gives itself up while an online one runs: its end gives room.

A step that evicts is not filled (the authors' code does the same; their Algorithm 1 reads otherwise): a request that
has just lost its KV would be let in again. Nor is a microbatch filled while an online request is kept out for which
offline requests in flight could make room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from jettison.cost.stepwork import StepWork
from jettison.policy.batching import (
    Admission,
    BatchLimits,
    BatchPlan,
    BatchView,
    BlockedBy,
    Chunk,
    RunningRow,
    VictimRow,
    WaitingRow,
    in_order,
    plan_admissions,
    plan_running,
)
from jettison.policy.slo import NO_LIMIT, StepBudget, within_tokens
from jettison.types import RequestId

LEAST_PROMPT_TOKENS = 16
"""Tokens of a step that may take no time at all: whatever the objectives, work goes on."""

Planned = Callable[[BatchView], BatchPlan]


class OfflineView(NamedTuple):
    """The offline requests of a group."""

    running: Sequence[RunningRow]
    """Running requests that have tokens to schedule, oldest first."""
    num_running: int
    waiting: Iterable[WaitingRow]
    """In queue order; each iteration begins with the first."""
    victims: Callable[[], Sequence[VictimRow]]
    """Running requests that may be preempted, youngest first."""
    in_flight: bool
    """Some are in unfinished steps."""


class OnlinePart(NamedTuple):
    """The plan of online requests, and the blocks that are left beside it."""

    plan: BatchPlan
    """Without evictions."""
    evicted: tuple[RequestId, ...]
    """Offline requests that give way to the plan, in this order."""
    num_free_blocks: int
    """Free blocks of the tightest stage once the plan is applied."""


def plan_beside(
    online: BatchView, offline: OfflineView, limits: BatchLimits, plan_online: Planned,
    budget_of: Callable[[StepWork], StepBudget], *, fills_after_eviction: bool = False, is_busy: bool = False,
) -> BatchPlan:
    """The next microbatch of a group that has requests of both classes.

    ``online.waiting`` is iterated over anew for each attempt. ``budget_of``: the time that a step with so much online
    work may take; ``is_busy``: other microbatches are in flight, and the end of each asks for a plan again. Where none
    is in flight and no online request can run, one offline request runs, whatever the budget: nothing else would ask
    for a plan again.
    """
    part = plan_online_part(online, offline, limits, plan_online)
    plan = part.plan
    if plan.preemptions or (part.evicted and not fills_after_eviction) or (offline.in_flight and _is_kept_out(plan)):
        return plan._replace(preemptions=(*part.evicted, *plan.preemptions))
    filling = _Filling(part, online, offline, limits)
    filled = filling.fill(budget_of(filling.work), limits.max_num_tokens, limits.max_rows)
    if filled.is_empty and not is_busy:
        filled = filling.fill(NO_LIMIT, min(LEAST_PROMPT_TOKENS, limits.max_num_tokens), 1)
    return filled


def _is_kept_out(plan: BatchPlan) -> bool:
    return plan.lacks_blocks or plan.head_blocked_by in (BlockedBy.MEMORY, BlockedBy.SEQUENCES)


# --- online


def plan_online_part(
    online: BatchView, offline: OfflineView, limits: BatchLimits, plan_online: Planned
) -> OnlinePart:
    """What online requests get, and which offline ones are evicted for that: as few as the plan needs."""
    needs: dict[RequestId, int] = {}
    plan = plan_online(online._replace(waiting=_Noted(online.waiting, needs, at_risk=False)))
    num_over = _places_lacking(plan, online, offline, limits)
    lacks_memory = plan.preemptions or plan.lacks_blocks or plan.head_blocked_by is BlockedBy.MEMORY
    victims: list[VictimRow] = []
    if offline.num_running and (num_over > 0 or lacks_memory):
        victims = sorted(offline.victims(), key=lambda v: -v.num_hosted_tokens)  # stable: the newest of equals first
    if victims and lacks_memory:
        gain = sum(v.num_reclaimable_blocks for v in victims)
        plan = plan_online(online._replace(
            num_free_blocks=online.num_free_blocks + gain, waiting=_Noted(online.waiting, needs, at_risk=True),
        ))  # fmt: skip
    places = limits.max_num_seqs - online.num_running - (offline.num_running - len(victims))
    if len(plan.admissions) > max(0, places):
        plan = plan._replace(admissions=plan.admissions[: max(0, places)], head_blocked_by=BlockedBy.SEQUENCES)
    num_free = online.num_free_blocks - _blocks_taken(plan, online, needs)
    reserved = _blocks_kept(plan, online, limits)
    num_over = _places_lacking(plan, online, offline, limits)
    evicted: list[RequestId] = []
    for victim in victims:
        if num_free >= reserved and len(evicted) >= num_over:
            break
        evicted.append(victim.request_id)
        num_free += victim.num_reclaimable_blocks
    return OnlinePart(plan, tuple(evicted), num_free)


def _places_lacking(plan: BatchPlan, online: BatchView, offline: OfflineView, limits: BatchLimits) -> int:
    """Places that admissions need from offline requests. After a split a group may have too many requests already."""
    num_more = len(plan.admissions)
    return min(num_more, online.num_running + offline.num_running + num_more - limits.max_num_seqs)


def _blocks_taken(plan: BatchPlan, online: BatchView, needs: dict[RequestId, int]) -> int:
    """Blocks that the plan's chunks and admissions take, less the blocks of the requests that it preempts."""
    taken = sum(c.num_new_blocks for c in plan.chunks) + sum(needs[a.request_id] for a in plan.admissions)
    if plan.preemptions:
        given = {v.request_id: v.num_reclaimable_blocks for v in online.victims()}
        taken -= sum(given[request_id] for request_id in plan.preemptions)
    return taken


def _blocks_kept(plan: BatchPlan, online: BatchView, limits: BatchLimits) -> int:
    """Blocks that admissions leave free."""
    if not plan.admissions:
        return 0
    is_first = online.num_running + len(plan.admissions) == 1
    return online.num_reserved_blocks + (0 if is_first else limits.watermark_blocks)


class _Noted:
    """Waiting rows; notes the block need of each row that is looked at."""

    def __init__(self, rows: Iterable[WaitingRow], needs: dict[RequestId, int], *, at_risk: bool) -> None:
        """``at_risk``: count as needed also cached blocks that an eviction may free."""
        self._rows = rows
        self._needs = needs
        self._at_risk = at_risk

    def __iter__(self) -> Iterator[WaitingRow]:
        for row in self._rows:
            if self._at_risk and row.num_blocks_at_risk:
                row = row._replace(num_blocks_needed=row.num_blocks_needed + row.num_blocks_at_risk)
            self._needs[row.request_id] = row.num_blocks_needed
            yield row


def plan_within(view: BatchView, planned: Callable[[BatchView, BatchLimits], BatchPlan], limits: BatchLimits,
                budget: StepBudget) -> BatchPlan:  # fmt: skip
    """``planned``'s plan; with decodes in it, no more prompt tokens beside them than the budget has room for.

    All decodes run, and a few prompt tokens, whatever the budget. ``view.waiting`` is iterated over anew for each
    attempt.
    """
    plan = planned(view, limits)
    rows = {row.request_id: row for row in view.running}
    chunks = chunks_of(plan, rows)
    num_tokens = sum(num for num, _ in chunks)
    num_decodes = sum(is_decode(rows[c.request_id]) for c in plan.chunks)
    if not num_decodes or num_tokens == num_decodes or budget.keeps(StepWork.of(chunks)) is not False:
        return plan
    most = budget.largest(num_tokens, lambda size: StepWork.of(within_tokens(chunks, size)))
    most = min(limits.max_num_tokens, max(most, num_decodes + LEAST_PROMPT_TOKENS))
    return planned(view, limits._replace(max_num_tokens=most))


def plan_alone(
    view: BatchView, planned: Callable[[BatchView, BatchLimits], BatchPlan], limits: BatchLimits, budget: StepBudget
) -> BatchPlan:
    """``planned``'s plan of offline requests alone, with no more tokens, decodes among them, than the budget has room
    for, but a few tokens whatever the budget."""
    plan = planned(view, limits)
    if budget.seconds is None:
        return plan
    chunks = chunks_of(plan, {row.request_id: row for row in view.running})
    most = budget.largest(limits.max_num_tokens, lambda size: StepWork.of(within_tokens(chunks, size)))
    if most >= sum(num for num, _ in chunks):
        return plan
    return planned(view, limits._replace(max_num_tokens=max(most, min(limits.max_num_tokens, LEAST_PROMPT_TOKENS))))


def is_decode(row: RunningRow) -> bool:
    """Its next token is not its first."""
    return row.num_ready_tokens == 1 and not row.awaits_first


def chunks_of(plan: BatchPlan, rows: dict[RequestId, RunningRow]) -> list[tuple[int, int]]:
    """(tokens, tokens before them) of a plan's rows, in their order."""
    chunks = [(c.num_tokens, rows[c.request_id].num_context) for c in plan.chunks]
    return chunks + [(a.num_tokens, a.num_cached_tokens) for a in plan.admissions]


# --- offline


class _Filling:
    """Offline tokens for a step whose online part is planned."""

    def __init__(self, part: OnlinePart, online: BatchView, offline: OfflineView, limits: BatchLimits) -> None:
        self._part = part
        self._offline = offline
        self._limits = limits
        gone = set(part.evicted)
        self._rows = [r for r in offline.running if r.request_id not in gone] if gone else offline.running
        self._num_running = online.num_running + len(part.plan.admissions) + offline.num_running - len(gone)
        self._view = online._replace(
            running=self._rows, num_running=self._num_running, waiting=(), num_free_blocks=part.num_free_blocks,
            victims=lambda: [v for v in offline.victims() if v.request_id not in gone],
        )
        self.work = StepWork.of(chunks_of(part.plan, {r.request_id: r for r in online.running}))

    def fill(self, budget: StepBudget, most_tokens: int, most_rows: int) -> BatchPlan:
        """The whole plan, with as many offline tokens as the budget and these bounds allow the step."""
        plan, limits = self._part.plan, self._limits
        num_tokens = most_tokens - sum(c.num_tokens for c in plan.chunks) - sum(a.num_tokens for a in plan.admissions)
        num_rows = places = most_rows - len(plan.chunks) - len(plan.admissions)
        if limits.num_microbatches > 1:
            num_rows = min(num_rows, max(1, -(-self._offline.num_running // limits.num_microbatches)))
        if num_tokens <= 0 or places <= 0:
            return self._with((), (), ())
        is_bounded = budget.seconds is not None
        shares = shares_within(budget, self.work, self._rows, num_tokens, num_rows) if is_bounded else None
        chunks, preempted, num_free, num_tokens, _ = plan_running(
            self._view, in_order(self._rows, shares), limits._replace(max_num_tokens=num_tokens), num_rows
        )
        admissions: list[Admission] = []
        if not preempted and not self._part.evicted and not plan.preemptions:
            admissions, _ = plan_admissions(
                self._view._replace(waiting=self._offline.waiting), limits,
                _Admitting(budget, lambda: self._work_with(chunks)) if is_bounded else None,
                free_blocks=num_free - self._view.num_reserved_blocks, budget=num_tokens, places=places - len(chunks),
            )
        return self._with(preempted, chunks, admissions)

    def _work_with(self, chunks: Sequence[Chunk]) -> StepWork:
        contexts = {row.request_id: row.num_context for row in self._rows}
        return added(self.work, StepWork.of((c.num_tokens, contexts[c.request_id]) for c in chunks))

    def _with(
        self, preempted: Sequence[RequestId], chunks: Sequence[Chunk], admissions: Sequence[Admission]
    ) -> BatchPlan:
        plan = self._part.plan
        return plan._replace(
            preemptions=(*self._part.evicted, *plan.preemptions, *preempted), chunks=(*plan.chunks, *chunks),
            admissions=(*plan.admissions, *admissions),
        )


class _Admitting:
    """How many tokens each waiting request may get, one after the other."""

    def __init__(self, budget: StepBudget, work: Callable[[], StepWork]) -> None:
        """``work``: what is in the step already; a callable, as in most steps no request gets so far that it is
        needed."""
        self._budget = budget
        self._first_work = work
        self._work: StepWork | None = None

    def __call__(self, row: WaitingRow, most: int) -> int:
        work = self._first_work() if self._work is None else self._work
        most, context = min(most, row.num_tokens - row.num_cached_tokens), row.num_cached_tokens
        num_tokens = self._budget.largest(most, partial(work.with_prompt, num_context=context))
        self._work = work.with_prompt(num_tokens, context)
        return num_tokens


def added(work: StepWork, more: StepWork) -> StepWork:
    """Both in one step."""
    return StepWork(*(a + b for a, b in zip(work, more, strict=True)))


def shares_within(
    budget: StepBudget, work: StepWork, rows: Sequence[RunningRow], num_tokens: int, num_rows: int
) -> dict[RequestId, int]:
    """How many tokens each of these may have beside ``work``: as many decodes as the budget has room for, the first
    ones, then prompts, the last of them cut."""
    decodes = [row for row in rows if row.num_ready_tokens == 1][: min(num_tokens, num_rows)]
    contexts = [0, *accumulate(row.num_context for row in decodes)]

    def with_decodes(size: int) -> StepWork:
        return added(work, StepWork.decodes(size, contexts[size]))

    num = budget.largest(len(decodes), with_decodes)
    shares = {row.request_id: 1 for row in decodes[:num]}
    if num < len(decodes):
        return shares
    work, num_tokens = with_decodes(num), num_tokens - num
    for row in rows:
        if num_tokens <= 0 or len(shares) >= num_rows:
            break
        if row.num_ready_tokens == 1:
            continue
        most, context = min(row.num_ready_tokens, num_tokens), row.num_context
        size = budget.largest(most, partial(work.with_prompt, num_context=context))
        if size == 0:
            break
        shares[row.request_id] = size
        work, num_tokens = work.with_prompt(size, context), num_tokens - size
    return shares

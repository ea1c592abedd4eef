"""Which tokens of which requests go into the next microbatch.

Pure: a view of one group in, a plan out. A plan is ``{request: number of tokens}`` plus what has to happen to
memory first (preemptions, admissions); prefill, chunked prefill and decode are only different numbers.

Order of service: running requests first (oldest first), then the waiting queue, strictly in order; only a request that
needs more than the whole group has steps aside, and it is first again as soon as the group can hold it. A request that
cannot get a block preempts the youngest running request that is not in flight, if that one is younger than itself. If
there is none it waits for the steps in flight; only where no step is in flight does it give itself up. So the oldest of
several is never preempted, and the batch always progresses.

Where prompts come first (``plan_prefill_first``) the same rules hold for what a step of them leaves to decodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from jettison.types import RequestId


class BlockedBy(StrEnum):
    """Why the head of the waiting queue was not admitted."""

    MEMORY = "memory"
    TOKEN_BUDGET = "token_budget"
    SEQUENCES = "sequences"


class RunningRow(NamedTuple):
    """A running request that has tokens to schedule, oldest first in the view."""

    request_id: RequestId
    num_ready_tokens: int
    """Tokens known but neither computed nor in flight; 1 for a decode."""
    num_free_slots: int
    """Tokens that fit into blocks already held."""
    in_flight: bool
    """Tokens of it are in an unfinished step: it may be given more prefill, but not be preempted."""
    awaits_first: bool = False
    """It has not produced a token yet."""
    num_context: int = 0
    """Tokens before the ready ones."""


running_row = partial(tuple.__new__, RunningRow)
"""Makes a ``RunningRow`` of one tuple of all its fields, in half the time: every row of every step is one."""


class WaitingRow(NamedTuple):
    """A waiting request, in queue order."""

    request_id: RequestId
    num_tokens: int
    """Prompt plus what it had produced before a preemption."""
    num_cached_tokens: int
    """Of these, found in the prefix cache of every stage."""
    num_blocks_needed: int
    """Allocatable blocks that admission takes from the tightest stage."""
    is_oversized: bool = False
    """It needs more blocks than the tightest stage has, whatever runs: waiting for others to end does not help."""
    num_blocks_at_risk: int = 0
    """Blocks of its cached prefix with one holder: they are needed as well, should that one give way."""


class VictimRow(NamedTuple):
    """A running request that may be preempted."""

    request_id: RequestId
    num_reclaimable_blocks: int
    """Blocks that each stage gets back at least (shared ones do not count)."""
    num_hosted_tokens: int = 0
    """Leading tokens whose KV is in host pools, too."""


class BatchLimits(NamedTuple):
    """Bounds of one microbatch."""

    max_num_tokens: int
    max_num_seqs: int
    """Running requests of a group, all microbatches together: as many for each stage."""
    watermark_blocks: int
    """Blocks that stay free at admission so that running requests can grow."""
    block_size: int
    num_microbatches: int = 1
    """Microbatches that the running requests are divided among (= pipeline stages)."""

    @property
    def max_rows(self) -> int:
        """Rows of one microbatch: what an instance may run by itself."""
        return max(1, self.max_num_seqs // self.num_microbatches)


class BatchView(NamedTuple):
    """One group as the batching policy sees it."""

    version: int
    running: Sequence[RunningRow]
    num_running: int
    """All running requests, also those with nothing to schedule now."""
    waiting: Iterable[WaitingRow]
    """Lazily evaluated: usually only the head is looked at."""
    victims: Callable[[], Sequence[VictimRow]]
    """Preemptible requests, youngest first; evaluated only under pressure."""
    num_free_blocks: int
    """Allocatable blocks of the tightest stage."""
    num_reserved_blocks: int = 0
    """Free blocks reserved for KV that is on its way here: running requests may grow into them, newcomers may not."""


class Chunk(NamedTuple):
    """Tokens of one running request in the microbatch."""

    request_id: RequestId
    num_tokens: int
    num_new_blocks: int
    """Blocks to add to its table in every stage first."""


make_chunk = partial(tuple.__new__, Chunk)
"""Makes a ``Chunk`` of one tuple of all its fields, in half the time."""


class Admission(NamedTuple):
    """A waiting request that starts: its blocks for all known tokens are taken at once."""

    request_id: RequestId
    num_tokens: int
    """Tokens of its first chunk."""
    num_cached_tokens: int


class BatchPlan(NamedTuple):
    """What the next microbatch holds. Apply preemptions, then chunks, then admissions."""

    version: int
    preemptions: tuple[RequestId, ...]
    chunks: tuple[Chunk, ...]
    admissions: tuple[Admission, ...]
    head_blocked_by: BlockedBy | None
    lacks_blocks: bool = False
    """A running request got no tokens, for want of blocks."""

    @property
    def is_empty(self) -> bool:
        """Nothing to run (preemptions alone are not a batch)."""
        return not self.chunks and not self.admissions


def plan_batch(view: BatchView, limits: BatchLimits, shares: Mapping[RequestId, int] | None = None) -> BatchPlan:
    """Choose the next microbatch.

    Running requests get tokens within the budget, decodes before prefill remainders so that a long prompt cannot starve
    them; then waiting requests are admitted on their whole prompt with a watermark. A microbatch that preempts admits
    no request: newcomers would take the blocks that were just freed.

    With ``shares`` (``policy.lookahead``) no request gets more tokens than its share, and a request without a share is
    left out; all other rules hold unchanged.
    """
    rows = in_order(view.running, shares)
    max_rows = limits.max_rows
    if shares is None and limits.num_microbatches > 1:
        max_rows = min(max_rows, max(1, -(-view.num_running // limits.num_microbatches)))
    chunks, preempted, free_blocks, budget, lacks = plan_running(view, rows, limits, max_rows)
    if preempted:
        return BatchPlan(view.version, tuple(preempted), tuple(chunks), (), BlockedBy.MEMORY, lacks)
    share_of = None if shares is None else lambda row, most: min(most, shares.get(row.request_id, 0))
    plan = plan_beside(view, limits, chunks, free_blocks=free_blocks, budget=budget, share_of=share_of)
    return plan._replace(lacks_blocks=True) if lacks else plan


def plan_beside(
    view: BatchView, limits: BatchLimits, chunks: Sequence[Chunk], *, free_blocks: int, budget: int,
    share_of: Callable[[WaitingRow, int], int] | None = None,
) -> BatchPlan:
    """The microbatch that has these chunks of running requests, and the waiting requests that start beside them in the
    blocks and tokens that are left. ``share_of``: see ``plan_admissions``. Running rows of the view are not read."""
    admissions, blocked = plan_admissions(
        view, limits, share_of, free_blocks=free_blocks - view.num_reserved_blocks, budget=budget,
        places=limits.max_rows - len(chunks),
    )  # fmt: skip
    return BatchPlan(view.version, (), tuple(chunks), tuple(admissions), blocked)


def in_order(running: Sequence[RunningRow], shares: Mapping[RequestId, int] | None) -> Sequence[RunningRow]:
    """Decodes before prefill remainders, no request with more ready tokens than its share."""
    decodes = [row for row in running if row[1] == 1]
    rows = decodes if len(decodes) == len(running) else decodes + [r for r in running if r[1] > 1]
    if shares is None:
        return rows
    return [
        r if r[1] <= shares[r[0]] else r._replace(num_ready_tokens=shares[r[0]]) for r in rows if shares.get(r[0])
    ]


def plan_running(
    view: BatchView, rows: Sequence[RunningRow], limits: BatchLimits, max_rows: int
) -> tuple[list[Chunk], list[RequestId], int, int, bool]:
    """Chunks of running requests, the requests preempted for them, the blocks and tokens that are left, and whether
    some running request lacked blocks."""
    free_blocks = view.num_free_blocks
    budget = limits.max_num_tokens
    block_size = limits.block_size
    chunks: list[Chunk] = []
    preempted: list[RequestId] = []
    victims: _Victims | None = None
    lacks_blocks = False
    for row in rows:
        if budget <= 0 or len(chunks) >= max_rows:
            break
        request_id, num_ready, num_free_slots, _, _, _ = row
        if preempted and request_id in preempted:
            continue
        num_tokens = num_ready if num_ready <= budget else budget
        grow = 0 if num_tokens <= num_free_slots else -((num_free_slots - num_tokens) // block_size)
        while grow > free_blocks:
            if victims is None:
                victims = _Victims(view)
            victim = victims.take_for(request_id, chunks)
            if victim is None:
                break
            preempted.append(victim.request_id)
            free_blocks += victim.num_reclaimable_blocks
            if victim.request_id == request_id:
                break
        if grow > free_blocks or request_id in preempted:
            lacks_blocks = True
            continue
        free_blocks -= grow
        budget -= num_tokens
        chunks.append(make_chunk((request_id, num_tokens, grow)))
    return chunks, preempted, free_blocks, budget, lacks_blocks


def plan_admissions(
    view: BatchView,
    limits: BatchLimits,
    share_of: Callable[[WaitingRow, int], int] | None,
    *,
    free_blocks: int,
    budget: int,
    places: int,
) -> tuple[list[Admission], BlockedBy | None]:
    """Waiting requests that start, in queue order, and what the first request that does not start lacks.

    ``share_of``: how many of the tokens left in the budget a request that memory admits may get; None: all of them.
    """
    admissions: list[Admission] = []
    num_running = view.num_running
    blocked: BlockedBy | None = None
    for waiting in view.waiting:
        if waiting.is_oversized:
            blocked = blocked or BlockedBy.MEMORY
            continue
        reason = _reason_to_wait(waiting, free_blocks, num_running, limits)
        share = budget if reason is not None or share_of is None else share_of(waiting, budget)
        if reason is None and (share <= 0 or len(admissions) >= places):
            reason = BlockedBy.TOKEN_BUDGET
        if reason is not None:
            blocked = blocked or reason  # an oversized head that stepped aside keeps its own reason
            break
        num_tokens = min(waiting.num_tokens - waiting.num_cached_tokens, share)
        admissions.append(Admission(waiting.request_id, num_tokens, waiting.num_cached_tokens))
        free_blocks -= waiting.num_blocks_needed
        budget -= num_tokens
        num_running += 1
    return admissions, blocked


def plan_prefill_first(view: BatchView, limits: BatchLimits) -> BatchPlan:
    """``plan_batch`` with prompts before decodes, as in schedulers that favour the time to the first token (TTFT).

    Running prompts and newly admitted ones take the token budget first. Decodes get the rest: none, as long as prompts
    fill it. The blocks that decodes grow by in this step are reserved for them, so that no admission costs a
    preemption. Where there is no prompt to compute, the step is ``plan_batch``'s.
    """
    prompts = [row for row in view.running if row.awaits_first or row.num_ready_tokens > 1]
    decodes = [row for row in view.running if not row.awaits_first and row.num_ready_tokens == 1]
    growth = sum(row.num_free_slots < 1 for row in decodes)
    first = plan_batch(
        view._replace(
            running=prompts, num_reserved_blocks=view.num_reserved_blocks + growth, victims=_no_victims
        ), limits,
    )  # fmt: skip
    if first.is_empty:
        plan = plan_batch(view._replace(waiting=()), limits)
        plan = plan._replace(lacks_blocks=plan.lacks_blocks or first.lacks_blocks)
        return plan if plan.preemptions else plan._replace(head_blocked_by=first.head_blocked_by)
    budget = limits.max_num_tokens - sum(c.num_tokens for c in first.chunks)
    budget -= sum(a.num_tokens for a in first.admissions)
    max_rows = limits.max_rows
    if limits.num_microbatches > 1:
        max_rows = min(max_rows, -(-view.num_running // limits.num_microbatches))
    places = max_rows - len(first.chunks) - len(first.admissions)
    if budget <= 0 or places <= 0 or not decodes:
        return first
    free_blocks = growth if first.admissions else view.num_free_blocks - sum(c.num_new_blocks for c in first.chunks)
    rest = plan_batch(
        view._replace(
            running=decodes, waiting=(), victims=_no_victims, num_free_blocks=free_blocks, num_reserved_blocks=0
        ), limits._replace(max_num_tokens=budget, max_num_seqs=places, num_microbatches=1),
    )  # fmt: skip
    return first._replace(chunks=first.chunks + rest.chunks, lacks_blocks=first.lacks_blocks or rest.lacks_blocks)


def _no_victims() -> Sequence[VictimRow]:
    return ()


def _reason_to_wait(row: WaitingRow, free_blocks: int, num_running: int, limits: BatchLimits) -> BlockedBy | None:
    if num_running >= limits.max_num_seqs:
        return BlockedBy.SEQUENCES
    watermark = limits.watermark_blocks if num_running > 0 else 0
    return BlockedBy.MEMORY if row.num_blocks_needed + watermark > free_blocks else None


class _Victims:
    """Which request may be preempted for which other; built only under pressure."""

    def __init__(self, view: BatchView) -> None:
        self._rows = deque(view.victims())
        self._age = {row.request_id: age for age, row in enumerate(view.running)}
        self._others_pending = view.num_running > len(view.running) or any(row.in_flight for row in view.running)

    def take_for(self, request_id: RequestId, chunks: Sequence[Chunk]) -> VictimRow | None:
        """The youngest victim that is younger than the request and not in this batch, or the request itself, or
        None."""
        scheduled = {chunk.request_id for chunk in chunks}
        while self._rows and self._rows[0].request_id in scheduled:
            self._rows.popleft()
        if not self._rows or self._age.get(self._rows[0].request_id, -1) < self._age[request_id]:
            return None
        if self._rows[0].request_id == request_id and self._others_pending:
            return None
        return self._rows.popleft()

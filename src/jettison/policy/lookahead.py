"""Balanced microbatches for a pipeline, by a look ahead at all queued tokens (KunServe v3 section 4.3, Figs. 10 and
11).

Pure. A pipeline stands still wherever one microbatch takes longer than the next. Token counts do not show that: a chunk
behind a long prefix costs more than the same tokens at a prompt's start. So all tokens that could run now form one
batch. It is divided recursively at equal predicted cost, inside a request where need be (``split``; the second chunk
then has the larger prefix).

Differences from the paper, and their reasons:

- Fig. 11 halves until a batch has at most MIN tokens, so its floor is a ceiling. Here a microbatch never falls below
  the floor, and their number follows from costs: ``wished_microbatches``.
- A batch is divided in the proportion of the numbers of microbatches on both sides (1 : 1 where that is even). Halving
  alone would double their size whenever the queue shrinks past a power of two: a bubble.
- A decode waits for its sample, so it is in one microbatch out of every ``num_stages``. Decodes are dealt to that many
  microbatches by cost; the prompts' tokens are divided on top.
- Microbatches with decodes run whether prompts wait or not. A single prompt is spread over them, too: as a whole in one
  of them it would stop every stage but one while it passes.

Memory is no business of this module: its view has only those waiting requests that memory would admit, and
``policy.batching`` turns the shares of a microbatch into a plan under its own rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jettison.types import RequestId

HORIZON_MICROBATCHES = 4
"""Microbatches a stage that are looked at: more queued tokens change nothing about the next few."""

LEAST_TOKENS = 16
"""Fewest prompt tokens of a microbatch where no flag says otherwise."""


class ChunkCost(Protocol):
    """Predicted cost of chunks, in any unit; a profile or a fit made while serving."""

    @property
    def fixed_cost(self) -> float:
        """Cost of a microbatch whatever is in it; 0 while it is not known."""
        ...

    def chunk_cost(self, num_tokens: int, num_context: int) -> float:
        """Cost that a chunk behind ``num_context`` tokens adds to a microbatch; above 0, and growing with
        ``num_tokens``."""
        ...


class QueuedChunk(NamedTuple):
    """Tokens of one request that run together."""

    request_id: RequestId
    num_tokens: int
    num_context: int
    """Tokens before them: computed, in flight, or in earlier chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadParams:
    """How microbatches are formed."""

    enabled: bool = True
    min_tokens: int | None = None
    """Fewest prompt tokens of a microbatch (KunServe: about 256 on its GPUs); None = ``LEAST_TOKENS``, and costs."""


@dataclass(frozen=True, slots=True)
class LookaheadView:
    """Tokens that could run in a group now."""

    num_stages: int
    max_num_tokens: int
    """Token budget of one microbatch, decodes included."""
    decodes: Sequence[QueuedChunk]
    """Ready decodes, oldest first."""
    decodes_in_flight: Sequence[QueuedChunk]
    """They come back while these microbatches run."""
    prompts: Sequence[QueuedChunk]
    """What is left of running requests' prompts, then the waiting requests that memory would admit, in order."""


def plan_microbatches(
    view: LookaheadView, cost: ChunkCost, least_tokens: int = LEAST_TOKENS
) -> list[dict[RequestId, int]]:
    """Divide everything that could run into microbatches of equal predicted cost: tokens a request, in the order in
    which they are to run.

    Plain token budgets apply (no microbatch) where nothing can be balanced: prompts too short to be divided, and too
    few decodes for every stage to have one.
    """
    num_stages = view.num_stages
    decodes = [*view.decodes, *view.decodes_in_flight]
    hands = deal_decodes(view.decodes, view.decodes_in_flight, num_stages, cost)
    room = max(1, view.max_num_tokens - max((len(h) for h in hands), default=0))
    prompts = _up_to(view.prompts, HORIZON_MICROBATCHES * num_stages * room)
    wished = wished_microbatches(
        sum(cost.chunk_cost(c.num_tokens, c.num_context) for c in prompts),
        cost.fixed_cost + sum(cost.chunk_cost(1, c.num_context) for c in decodes) / num_stages,
        num_stages,
    )
    count = max(1, min(wished, sum(c.num_tokens for c in prompts) // least_tokens))
    if count == 1 and len(decodes) < num_stages:
        return []
    pieces = balance(prompts, count, room, cost)
    microbatches: list[dict[RequestId, int]] = []
    for index in range(max(len(hands), len(pieces))):
        shares = {c.request_id: 1 for c in hands[index]} if index < len(hands) else {}
        if index < len(pieces):
            shares |= {c.request_id: c.num_tokens for c in pieces[index]}
        if shares:
            microbatches.append(shares)
    return microbatches


def wished_microbatches(prompt_cost: float, other_cost: float, num_stages: int) -> int:
    """Over how many microbatches prompts that cost a stage ``prompt_cost`` in all are spread; at least 1.

    With ``other_cost`` for all else that is in each (fixed costs, decodes), k of them have passed N stages after (k + N
    - 1) (prompt_cost / k + other_cost). With r = (N - 1) prompt_cost / other_cost that is least at k = sqrt(r), and at
    k = r it is what a single one would take. The larger k, the less a microbatch differs from its neighbours, and such
    differences make bubbles. So: twice the fastest, which takes an eighth longer at most, and never more than r.
    ``HORIZON_MICROBATCHES`` a stage bound it: prompts get more of a step's time the longer their queue is.
    """
    most = HORIZON_MICROBATCHES * num_stages
    ratio = (num_stages - 1) * prompt_cost / max(other_cost, 1e-30)
    return max(1, int(min(ratio, 2.0 * math.sqrt(ratio), most)))


def deal_decodes(
    ready: Sequence[QueuedChunk], in_flight: Sequence[QueuedChunk], num_stages: int, cost: ChunkCost
) -> list[tuple[QueuedChunk, ...]]:
    """Ready decodes for the coming microbatches, at most ``num_stages``: consecutive ones, dealt at equal cost.

    A microbatch gets its share of *all* decodes, those in flight included, so that numbers even out as they return.
    """
    if not ready:
        return []
    costs = [cost.chunk_cost(1, c.num_context) for c in ready]
    share = (sum(costs) + sum(cost.chunk_cost(1, c.num_context) for c in in_flight)) / num_stages
    hands: list[list[QueuedChunk]] = [[] for _ in range(num_stages)]
    before = 0.0
    for chunk, its_cost in zip(ready, costs, strict=True):
        # A decode belongs where its middle falls, so the first microbatch never has one decode too many.
        hands[min(num_stages - 1, int((before + its_cost / 2) / share))].append(chunk)
        before += its_cost
    return [tuple(hand) for hand in hands if hand]


def balance(
    chunks: Sequence[QueuedChunk], count: int, max_num_tokens: int, cost: ChunkCost
) -> list[tuple[QueuedChunk, ...]]:
    """Prompt tokens, in order, in microbatches of equal cost and at most ``max_num_tokens``.

    ``count`` microbatches, or as many more as the budget asks for (fewer where tokens do not suffice). O(chunks *
    log(microbatches) + cuts * log(tokens)).
    """
    total = sum(c.num_tokens for c in chunks)
    if total == 0:
        return []
    count = min(total, max(1, -(-total // max_num_tokens), count))
    while count <= total:
        pieces = _divide(tuple(chunks), count, cost)
        largest = max(sum(c.num_tokens for c in piece) for piece in pieces)
        if largest <= max_num_tokens:
            return pieces
        # Equal cost is not equal tokens: those at the start of prompts are cheap, and more of them make a share.
        count = max(count + 1, count * 9 // 8, count * largest // max_num_tokens)
    # A few tokens cost more than all others together: divide by token count instead.
    return _divide(tuple(chunks), min(total, -(-2 * total // max_num_tokens)), _TokenCount())


class _TokenCount:
    """Every token costs 1."""

    fixed_cost = 0.0

    def chunk_cost(self, num_tokens: int, num_context: int) -> float:
        return float(num_tokens)


def _divide(chunks: tuple[QueuedChunk, ...], count: int, cost: ChunkCost) -> list[tuple[QueuedChunk, ...]]:
    """The divide-and-conquer of Fig. 11: ``count`` batches of equal cost (fewer where tokens do not suffice)."""
    if count <= 1 or sum(c.num_tokens for c in chunks) <= 1:
        return [chunks]
    left_count = count // 2
    total = sum(cost.chunk_cost(c.num_tokens, c.num_context) for c in chunks)
    left, right = split(chunks, total * left_count / count, cost)
    if not left or not right:
        return [chunks]
    return _divide(left, left_count, cost) + _divide(right, count - left_count, cost)


def split(
    chunks: Sequence[QueuedChunk], target: float, cost: ChunkCost
) -> tuple[tuple[QueuedChunk, ...], tuple[QueuedChunk, ...]]:
    """Cut a batch where the cost before the cut is nearest to ``target``: between requests, or inside one."""
    before = 0.0
    for index, chunk in enumerate(chunks):
        its_cost = cost.chunk_cost(chunk.num_tokens, chunk.num_context)
        if before + its_cost < target:
            before += its_cost
            continue
        num_left = _tokens_for(chunk, target - before, cost)
        left, right = list(chunks[:index]), list(chunks[index + 1 :])
        if num_left > 0:
            left.append(chunk._replace(num_tokens=num_left))
        if num_left < chunk.num_tokens:
            rest = QueuedChunk(chunk.request_id, chunk.num_tokens - num_left, chunk.num_context + num_left)
            right.insert(0, rest)
        return tuple(left), tuple(right)
    return tuple(chunks), ()


def _tokens_for(chunk: QueuedChunk, target: float, cost: ChunkCost) -> int:
    """Tokens of the chunk whose cost is nearest to ``target``; by bisection, since cost grows with tokens."""
    low, high = 0, chunk.num_tokens
    while high - low > 1:
        middle = (low + high) // 2
        if cost.chunk_cost(middle, chunk.num_context) < target:
            low = middle
        else:
            high = middle
    too_little = target - cost.chunk_cost(low, chunk.num_context)
    too_much = cost.chunk_cost(high, chunk.num_context) - target
    return low if too_little < too_much else high


def _up_to(chunks: Sequence[QueuedChunk], num_tokens: int) -> list[QueuedChunk]:
    """The first ``num_tokens`` of a batch."""
    taken: list[QueuedChunk] = []
    for chunk in chunks:
        if num_tokens <= 0:
            break
        taken.append(chunk._replace(num_tokens=min(chunk.num_tokens, num_tokens)))
        num_tokens -= chunk.num_tokens
    return taken

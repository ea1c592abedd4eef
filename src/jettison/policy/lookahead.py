"""Balanced microbatches for a pipeline: look ahead at all queued tokens (KunServe v3 section 4.3, Figs. 10 and 11).

Pure. A pipeline stands still wherever one microbatch takes longer than the next, and token counts do not tell: a
chunk behind a long prefix costs more than the same tokens at a prompt's start. So all tokens that could run now form
one batch, which is divided recursively at equal predicted cost, inside a request where need be (``split``; the second
chunk then has the larger prefix).

What is not as printed, and why:

- Fig. 11 halves until a batch has at most MIN tokens, so its floor is a ceiling. Here a microbatch never falls below
  the floor, and division goes on only while there are fewer microbatches than stages or one exceeds the step's
  budget: smaller ones balance no better and read the weights more often.
- A batch is divided in the proportion of the numbers of microbatches on both sides (1 : 1 where that is even). Halving
  alone would double their size whenever the queue shrinks past a power of two: a bubble.
- A decode waits for its sample, so it is in one microbatch out of every ``num_stages``. Decodes are dealt to that many
  microbatches by cost; the prompts' tokens are divided on top.

Memory is none of this module's business but for the blocks that newcomers take: ``policy.batching`` turns the shares of
a microbatch into a plan under its own rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jettison.types import RequestId

HORIZON_MICROBATCHES = 4
"""How many full microbatches a stage are looked at: more queued tokens change nothing about the next few."""

FIXED_COST_SHARE = 0.2
"""A microbatch at the automatic floor spends this part of its time on costs that do not depend on what is in it."""

LEAST_FLOOR = 16
"""The automatic floor is not below this many tokens."""


class ChunkCost(Protocol):
    """Predicted cost of chunks, in any unit; a profile or a fit made while serving."""

    def chunk_cost(self, num_tokens: int, num_context: int) -> float:
        """What a chunk behind ``num_context`` tokens adds to a microbatch; above 0, and growing with ``num_tokens``."""
        ...


class QueuedChunk(NamedTuple):
    """Tokens of one request that run together."""

    request_id: RequestId
    num_tokens: int
    num_context: int
    """Tokens before them: computed, in flight, or in earlier chunks."""


@dataclass(frozen=True, slots=True)
class LookaheadParams:
    """How microbatches are formed."""

    enabled: bool = True
    min_tokens: int | None = None
    """Fewest prompt tokens of a microbatch (KunServe: about 256 on its GPUs); None = from the costs, ``auto_floor``."""


@dataclass(frozen=True, slots=True)
class LookaheadView:
    """What could run in a group now."""

    version: int
    num_stages: int
    max_num_tokens: int
    """Token budget of one microbatch, decodes included."""
    decodes: Sequence[QueuedChunk]
    """Ready ones, oldest first."""
    decodes_in_flight: Sequence[QueuedChunk]
    """They come back while these microbatches run."""
    prompts: Sequence[QueuedChunk]
    """What is left of running requests' prompts, then those waiting requests that memory would admit, in order."""


@dataclass(frozen=True, slots=True)
class LookaheadPlan:
    """Microbatches in the order in which they are to run; each as tokens a request. Empty: use plain token budgets."""

    version: int
    microbatches: tuple[dict[RequestId, int], ...]


def plan_microbatches(view: LookaheadView, floor: int, cost: ChunkCost) -> LookaheadPlan:
    """Divide everything that could run into microbatches of equal predicted cost.

    Plain token budgets apply (an empty plan) where nothing can be balanced: fewer prompt tokens than two floors, and
    too few decodes for every stage to have one.
    """
    num_stages = view.num_stages
    num_decodes = len(view.decodes) + len(view.decodes_in_flight)
    if sum(c.num_tokens for c in view.prompts) < 2 * floor and num_decodes < num_stages:
        return LookaheadPlan(view.version, ())
    hands = deal_decodes(view.decodes, view.decodes_in_flight, num_stages, cost)
    room = max(1, view.max_num_tokens - max((len(h) for h in hands), default=0))
    prompts = _up_to(view.prompts, HORIZON_MICROBATCHES * num_stages * room)
    pieces = balance(prompts, num_stages, room, floor, cost)
    microbatches: list[dict[RequestId, int]] = []
    for index in range(max(len(hands), len(pieces))):
        shares = {c.request_id: 1 for c in hands[index]} if index < len(hands) else {}
        if index < len(pieces):
            shares |= {c.request_id: c.num_tokens for c in pieces[index]}
        if shares:
            microbatches.append(shares)
    return LookaheadPlan(view.version, tuple(microbatches))


def auto_floor(fixed_cost: float, token_cost: float, max_num_tokens: int) -> int:
    """The floor at which fixed costs are ``FIXED_COST_SHARE`` of a microbatch, at most half the token budget."""
    needed = fixed_cost / max(token_cost, 1e-30) * (1.0 - FIXED_COST_SHARE) / FIXED_COST_SHARE
    return max(1, min(max(LEAST_FLOOR, round(min(needed, 1e9))), max_num_tokens // 2))


def deal_decodes(
    ready: Sequence[QueuedChunk], in_flight: Sequence[QueuedChunk], num_stages: int, cost: ChunkCost
) -> list[tuple[QueuedChunk, ...]]:
    """Ready decodes for the coming microbatches, at most ``num_stages``: consecutive ones of equal cost each.

    A microbatch gets its share of *all* decodes, those in flight included, so that numbers even out as they return.
    """
    if not ready:
        return []
    costs = [cost.chunk_cost(1, c.num_context) for c in ready]
    share = (sum(costs) + sum(cost.chunk_cost(1, c.num_context) for c in in_flight)) / num_stages
    hands: list[list[QueuedChunk]] = [[] for _ in range(num_stages)]
    before = 0.0
    for chunk, its_cost in zip(ready, costs, strict=True):
        # Where its middle falls: never one decode more than needed in the first microbatch.
        hands[min(num_stages - 1, int((before + its_cost / 2) / share))].append(chunk)
        before += its_cost
    return [tuple(hand) for hand in hands if hand]


def balance(
    chunks: Sequence[QueuedChunk], num_stages: int, max_num_tokens: int, floor: int, cost: ChunkCost
) -> list[tuple[QueuedChunk, ...]]:
    """Prompt tokens, in order, in microbatches of equal cost and at most ``max_num_tokens``, none below the floor.

    The floor gives way to the budget, never the other way round. O(chunks * log(microbatches) + cuts * log(tokens)).
    """
    total = sum(c.num_tokens for c in chunks)
    if total == 0:
        return []
    count = max(1, -(-total // max_num_tokens), min(num_stages, total // max(1, floor)))
    most = max(count, total // max(1, floor))
    while count <= most:
        pieces = _divide(tuple(chunks), count, cost)
        largest = max(sum(c.num_tokens for c in piece) for piece in pieces)
        if largest <= max_num_tokens:
            return pieces
        # Equal cost is not equal tokens: those at the start of prompts are cheap, and more of them make a share.
        count = max(count + 1, count * 9 // 8, count * largest // max_num_tokens)
    # Balance would take microbatches below the floor, for a few tokens weigh more than all others: equal tokens then.
    return _divide(tuple(chunks), min(total, -(-2 * total // max_num_tokens)), _TokenCount())


class _TokenCount:
    """Every token costs 1."""

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

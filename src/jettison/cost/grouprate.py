"""The throughput of a pipeline by its number of stages: ``Thpt_g`` of KunServe v1's cost.

Pure. The rates of some numbers of stages are measured, or computed from measurements; those of the others are
interpolated. A stage's share of a step has a part that is divided by the number of stages (its layers) and a part that
is not (calls, the head, waiting). So the seconds that all members together spend on one of the group's tokens, ``stages
/ rate``, are linear in the number of stages: between two measured numbers on the line through both, beyond the last on
the line of the last two.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from jettison.cost.model import ChunkShape, CostModel


class TokenMix(NamedTuple):
    """The work that comes with one token of an answer."""

    prompt_tokens: float = 0.0
    """Prompt tokens to prefill for each token of an answer; 0: decodes only."""
    chunk_tokens: int = 2048
    """Most tokens of a prompt in one microbatch."""


def rate_between(rates: Mapping[int, float], num_stages: int) -> float | None:
    """Tokens a second of a group of ``num_stages``, from the rates of a few numbers of stages (all > 0).

    The curve passes through every given point, and rises or falls between two of them as they do. Beyond the largest,
    each further stage costs a member as much as the last ones did, and never gains it anything. None below the
    smallest.
    """
    sizes = sorted(rates)
    at = bisect_left(sizes, num_stages)
    if not sizes or num_stages < sizes[0]:
        return None
    if at < len(sizes) and sizes[at] == num_stages:
        return rates[num_stages]
    if len(sizes) == 1:
        return rates[sizes[0]] * num_stages / sizes[0]
    low, high = (sizes[at - 1], sizes[at]) if at < len(sizes) else (sizes[-2], sizes[-1])
    low_s, high_s = low / rates[low], high / rates[high]
    slope_s = (high_s - low_s) / (high - low)
    if num_stages > high:
        return num_stages / (high_s + max(0.0, slope_s) * (num_stages - high))
    return num_stages / (low_s + slope_s * (num_stages - low))


def with_bubbles_s(
    cost: CostModel, num_stages: int, batch_size: int, num_context: int, stage_s: float, hop_s: float
) -> float:
    """Seconds from one microbatch of decodes to the next on a stage, of which the slowest takes ``stage_s``.

    As many microbatches are in flight as there are stages, and a request's next token waits for its last one. A round
    goes through all stages, with ``hop_s`` to each next one. Where it takes longer than the slowest stage needs for all
    microbatches, every stage idles for the rest.
    """
    if num_stages == 1:
        return stage_s
    decodes = (ChunkShape(num_context, 1),) * batch_size
    layers = math.ceil(cost.num_layers / num_stages)
    other_s = cost.batch_cost_s(decodes, layers, is_first=False, is_last=False)
    round_s = stage_s + (num_stages - 1) * min(other_s, stage_s) + num_stages * hop_s
    return max(stage_s, round_s / num_stages)


def prefill_token_s(cost: CostModel, num_stages: int, chunk_tokens: int) -> float:
    """Seconds of the slowest stage for one token of a prompt, in chunks that follow one another without waiting."""
    chunk = (ChunkShape(0, chunk_tokens),)
    layers = math.ceil(cost.num_layers / num_stages)
    is_alone = num_stages == 1
    first_s = cost.batch_cost_s(chunk, layers, is_first=True, is_last=is_alone)
    last_s = cost.batch_cost_s(chunk, layers, is_first=is_alone, is_last=True)
    return max(first_s, last_s) / chunk_tokens

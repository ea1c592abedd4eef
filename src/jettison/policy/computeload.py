"""How much of its compute would a deployment need to keep up with the traffic that arrives?

Pure. A drop buys memory with pipeline bubbles. Where instances are close to their compute limit the price is a queue
that never empties: more requests run at once, each step takes longer, and the merged group cannot catch up. So overload
and restore ask here first. The answer is a load: 1.0 means that requests arrive as fast as they can be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

PredictStep = Callable[[int, int], float | None]
"""(tokens, KV tokens read) of a step -> seconds at full depth on one instance; None = not known yet."""


class Traffic(NamedTuple):
    """What arrives, as means over some seconds."""

    requests_per_s: float
    prompt_tokens: float
    """Computed ones: prefix hits are taken off."""
    output_tokens: float


class Arrangement(NamedTuple):
    """Instances that serve as separate groups or as one pipeline."""

    num_instances: int
    kv_tokens_per_instance: float
    """KV tokens (of all layers) that one instance's share of the memory holds."""
    max_rows_per_instance: float
    efficiency: float
    """Throughput against as many separate instances with as much memory: 1.0 for separate ones, less for a pipeline."""


def pipeline_loss(merged: float, separate: float) -> float:
    """Share of the throughput of separate instances that a pipeline lacks, by the compute loads of both; ``merged`` is
    above 0."""
    return 1.0 - separate / merged


def compute_load(traffic: Traffic, arrangement: Arrangement, predict_s: PredictStep) -> float | None:
    """Arriving requests over the requests that could be served, both a second; None while step times are unknown.

    In a steady state where memory is full, each step of an instance holds ``rows`` requests that decode and, because a
    request stays for ``output_tokens`` steps, the prompts of ``rows / output_tokens`` new ones.
    """
    output = max(1.0, traffic.output_tokens)
    mean_tokens = traffic.prompt_tokens + output / 2
    rows = max(1.0, min(arrangement.kv_tokens_per_instance / max(1.0, mean_tokens), arrangement.max_rows_per_instance))
    entering = rows / output
    step_s = predict_s(round(rows + entering * traffic.prompt_tokens), round(rows * mean_tokens))
    if step_s is None or step_s <= 0.0:
        return None
    served_per_s = arrangement.num_instances * arrangement.efficiency * entering / step_s
    return traffic.requests_per_s / served_per_s

"""Which share of its compute a deployment needs to keep up with the traffic that arrives.

Pure. A drop buys memory with pipeline bubbles. Where instances are close to their compute limit the price is a queue
that never empties: more requests run at once, each step takes longer, and the merged group cannot catch up. So overload
and restore ask here first. The answer is a load: 1.0 means that requests arrive as fast as they can be served.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jettison.cost.stepwork import StepWork


class StepTimes(Protocol):
    """Step times, as ``cost.predictor`` knows them."""

    def predict_s(self, work: StepWork) -> float | None:
        """Seconds of a step at full depth on one instance; None = not known yet."""
        ...

    def pipeline_efficiency(self, work: StepWork, num_stages: int) -> float:
        """Throughput of a pipeline with such microbatches over that of as many instances with as much memory."""
        ...


class Traffic(NamedTuple):
    """Arriving requests, as means over some seconds."""

    requests_per_s: float
    prompt_tokens: float
    """Tokens to be computed: prefix hits are taken off."""
    output_tokens: float


class Arrangement(NamedTuple):
    """Instances that serve as separate groups or as one pipeline."""

    num_instances: int
    kv_tokens_per_instance: float
    """KV tokens (of all layers) that one instance's share of the memory holds."""
    max_rows_per_instance: float
    num_stages: int
    """Instances of a group; 1 for separate ones."""


def _rows(traffic: Traffic, arrangement: Arrangement) -> float:
    """Requests that decode in a step of an instance whose memory is full."""
    by_memory = arrangement.kv_tokens_per_instance / max(1.0, _mean_tokens(traffic))
    return max(1.0, min(by_memory, arrangement.max_rows_per_instance))


def _mean_tokens(traffic: Traffic) -> float:
    """Tokens of a request half-way through its answer."""
    return traffic.prompt_tokens + max(1.0, traffic.output_tokens) / 2


def steady_step(traffic: Traffic, arrangement: Arrangement) -> StepWork:
    """A step of an instance in a steady state where memory is full: ``rows`` requests decode and, because a request
    stays for ``output_tokens`` steps, the prompts of ``rows / output_tokens`` new ones are computed."""
    rows = _rows(traffic, arrangement)
    prompts = rows / max(1.0, traffic.output_tokens) * traffic.prompt_tokens
    decodes = StepWork.decodes(round(rows), round(rows * _mean_tokens(traffic)))
    return decodes.with_prompts(round(prompts), max(1, round(traffic.prompt_tokens)))


def compute_load(traffic: Traffic, arrangement: Arrangement, times: StepTimes) -> float | None:
    """Arriving requests over the requests that could be served, both a second; None while step times are unknown."""
    work, num_stages = steady_step(traffic, arrangement), arrangement.num_stages
    step_s = times.predict_s(work)
    if step_s is None or step_s <= 0.0:
        return None
    efficiency = 1.0 if num_stages == 1 else times.pipeline_efficiency(work, num_stages)
    entering = _rows(traffic, arrangement) / max(1.0, traffic.output_tokens)
    served_per_s = arrangement.num_instances * efficiency * entering / step_s
    return traffic.requests_per_s / served_per_s

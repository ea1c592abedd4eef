"""KunServe v1, Fig. 16, on paper: each greedy planner's plan against every grouping of eight equal instances.

Cost is v1's: the profiled throughput of eight instances over that of the groups (the preset's steps: decodes with their
prompts; pipelines of 1, 2 and 4 stages, with the bubbles of a round that takes longer than its stages; longer ones lose
as much by stage).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from matplotlib.figure import Figure as Picture

from jettison.cost.grouprate import TokenMix, rate_between
from jettison.report.grouping import best_cost, strategy_cost
from jettison.workload.lengths import published_lengths
from papers.figure import Claim, Found, Part
from papers.pictures import bars
from papers.specs import read_spec

NUM_INSTANCES = 8
COPIES = range(1, NUM_INSTANCES)
"""That a plan has to free."""

Strategy = Literal["throughput", "memory"]


def lost(strategy: Strategy) -> Claim:
    """Of throughput, at the worst number of copies."""
    return Claim(
        "throughput lost, over the best of all groupings that free enough", f"{strategy}-greedy",
        lambda _: [_plan_cost(strategy, copies) / _best_cost(copies) for copies in COPIES],
        "exhaustive search", "x", max,
    )  # fmt: skip


PLANS = Part(
    f"{NUM_INSTANCES} instances, 1 to {NUM_INSTANCES - 1} copies wanted",
    claims=(
        lost("throughput").stated(1.0, (1.0, 1.05), "equal to the optimum, within 5 %"),
        lost("memory").stated((1.0, None)),
    ),
)


def draw_costs(_: Mapping[str, Found]) -> Picture:
    """By what has to be freed."""
    groups = {
        f"{copies} copies": {
            "exhaustive": _best_cost(copies),
            "throughput-greedy": _plan_cost("throughput", copies),
            "memory-greedy": _plan_cost("memory", copies),
        }
        for copies in COPIES
    }
    title = "eight instances: what a plan costs, by what it has to free"
    return bars(groups, "instances' throughput over the groups'", title)


def _best_cost(copies: int) -> float:
    return best_cost(NUM_INSTANCES, copies, _group_rate)


def _plan_cost(strategy: Strategy, copies: int) -> float:
    machine = read_spec("v1-burst").machine
    shape = machine.shape
    kv_bytes = NUM_INSTANCES * machine.kv_tokens * shape.num_layers * shape.kv_bytes_per_token_layer
    return strategy_cost(strategy, NUM_INSTANCES, copies, shape, kv_bytes, _group_rate)


def _group_rate(num_stages: int) -> float | None:
    """Of the spec's model at the spec's lengths, before a pipeline has served."""
    spec = read_spec("v1-burst")
    lengths = spec.parsed.workload.lengths
    assert lengths is not None and lengths.name is not None
    published = published_lengths(lengths.name)
    mix = TokenMix(published.inputs.mean / published.outputs.mean, spec.token_budget)
    return rate_between(spec.machine.profile.serving_rates(mix), num_stages)

"""The cost of drop plans relative to the best of all groupings: greedy strategies against exhaustive search (KunServe
v1).

Instances are equal, so a grouping is a partition of their number. Cost is v1's: the profiled throughput of all
instances unmerged over that of the groups. Pure; used by reports only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from jettison.policy.merge import MergeCandidate, MergeStrategy, PlannerParams, plan_drop, throughput_cost
from jettison.types import LayerRange, ModelShape

Throughput = Callable[[int], float | None]
"""Number of instances -> the profiled rate of a group of as many; None where it was not profiled."""


def partitions(total: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """All partitions of a number into a sum, largest parts first."""
    if total == 0:
        yield ()
    for first in range(min(total, most or total), 0, -1):
        for rest in partitions(total - first, first):
            yield (first, *rest)


def best_cost(num_instances: int, num_copies: int, throughput: Throughput) -> float:
    """The least cost of all groupings that free at least so many copies of the parameters."""
    return min(
        _cost(sizes, throughput) for sizes in partitions(num_instances) if num_instances - len(sizes) >= num_copies
    )


def strategy_cost(
    strategy: MergeStrategy, num_instances: int, num_copies: int, shape: ModelShape, kv_region_bytes: int,
    throughput: Throughput,
) -> float:
    """The cost of a strategy's plan to free so many copies. ``kv_region_bytes``: the KV region with no parameters
    dropped."""
    everything = LayerRange(0, shape.num_layers)
    groups = [MergeCandidate(i, (i,), (everything,), 1.0, 0) for i in range(num_instances)]
    params = PlannerParams(strategy=strategy, kv_region_bytes=kv_region_bytes)
    plan = plan_drop(groups, num_copies * shape.parameter_bytes, shape, params)
    merged = [len(merge.stages) for merge in plan.merges]
    return _cost([*merged, *[1] * (num_instances - sum(merged))], throughput)


def _cost(sizes: Sequence[int], throughput: Throughput) -> float:
    found = throughput_cost(sizes, throughput)
    if found is None:
        raise ValueError(f"no throughput is known of one of the sizes {tuple(sizes)}")
    return found

"""When a merged group should become instances again, and where its requests then live (KunServe v3 section 4.4).

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jettison.policy.overload import CLEARLY
from jettison.types import RequestId, WorkerId


class MergedLoad(NamedTuple):
    """A merged group as the restore policy sees it, in blocks of one full-depth instance."""

    used_blocks: int
    """Blocks of running requests, each request counted once (one stage's table)."""
    undropped_capacity_blocks: int
    """What the members hold together with all layers resident."""
    num_waiting: int
    usage_trend_blocks_per_s: float
    settled_s: float
    """Time since the exchange ended."""
    merged_compute_load: float | None = None
    """Compute that the present traffic needs of the group; None = not known."""
    separate_compute_load: float | None = None
    """What it would need of its members as instances."""


@dataclass(frozen=True, slots=True)
class RestoreParams:
    """Threshold and hysteresis."""

    usage_threshold: float = 0.5
    min_settled_s: float = 2.0
    max_compute_load: float = 1.0
    """Above, requests arrive faster than the pipeline can serve them."""
    yield_usage: float = 0.8
    """Share of the undropped capacity down to which a group that yields has to empty before it is restored."""


def should_restore(load: MergedLoad, params: RestoreParams) -> bool:
    """Usage below the threshold of the undropped capacity, nothing waits, trend not upwards, dwell time over."""
    return (
        load.num_waiting == 0
        and load.settled_s >= params.min_settled_s
        and load.usage_trend_blocks_per_s <= 0.0
        and load.used_blocks < params.usage_threshold * load.undropped_capacity_blocks
    )


def should_yield(load: MergedLoad, params: RestoreParams) -> bool:
    """Compute binds the pipeline, and its members would do better apart: stop filling the memory, restore when it fits.

    The opposite test to ``policy.overload``: requests wait, and more memory does not help them.
    """
    merged, separate = load.merged_compute_load, load.separate_compute_load
    return (
        load.num_waiting > 0
        and load.settled_s >= params.min_settled_s
        and merged is not None
        and separate is not None
        and merged > params.max_compute_load
        and separate < CLEARLY * merged
    )


class PlacedRequest(NamedTuple):
    """A request that needs a home."""

    request_id: RequestId
    num_blocks: int


def place_requests(
    requests: Sequence[PlacedRequest], capacity_blocks: Mapping[WorkerId, int], headroom_blocks: int = 0
) -> dict[RequestId, WorkerId] | None:
    """One home for each request, largest first onto the emptiest member; None if they do not fit.

    ``headroom_blocks`` stay free on each member so that running requests can grow.
    """
    free = {worker: blocks - headroom_blocks for worker, blocks in capacity_blocks.items()}
    homes: dict[RequestId, WorkerId] = {}
    for request in sorted(requests, key=lambda r: (-r.num_blocks, r.request_id)):
        worker = max(free, key=lambda w: (free[w], -w))
        if free[worker] < request.num_blocks:
            return None
        free[worker] -= request.num_blocks
        homes[request.request_id] = worker
    return homes

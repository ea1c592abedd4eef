"""When a merged group should become instances again, and where its requests then live (KunServe v3 section 4.4).

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(frozen=True, slots=True)
class RestoreParams:
    """Threshold and hysteresis."""

    usage_threshold: float = 0.5
    min_settled_s: float = 2.0


def should_restore(load: MergedLoad, params: RestoreParams) -> bool:
    """Usage below the threshold of the undropped capacity, nothing waits, trend not upwards, dwell time over."""
    return (
        load.num_waiting == 0
        and load.settled_s >= params.min_settled_s
        and load.usage_trend_blocks_per_s <= 0.0
        and load.used_blocks < params.usage_threshold * load.undropped_capacity_blocks
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

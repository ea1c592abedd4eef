"""When a merged group should become instances again, and where its requests then live (KunServe v3 section 4.4).

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from jettison.memory.stages import SplitPlan, StagePlan
from jettison.types import LayerRange, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreParams:
    """When a merged group may be taken apart."""

    min_settled_s: float = 2.0
    """Least time since its exchange ended: a move that is undone at once was for nothing."""
    usage_threshold: float = 0.5
    """With ``Trigger.PRESSURE``: part of the members' undropped capacity below which usage has to be."""


def plan_splits(stages: Sequence[StagePlan], num_layers: int) -> tuple[SplitPlan, ...]:
    """Ways to split a pipeline, the furthest split first: into instances; with four members or more, into two groups of
    every second member; with three, into a group of the outer two, and the middle one left over.

    While requests return, each member holds blocks of all of them in all layers of its *next* layout. Members that take
    every layer back have room for one instance's worth, 1/N of what all N hold undropped; members of a group of n have
    room for about n/N. In the second way neighbours go to different groups, so that every member keeps the layers that
    it runs and takes layers of its neighbours. With an odd number one group has a member more. Of three, one would be
    alone and have to take every layer back while it holds blocks of all requests, so it is left over instead: the
    middle one, whose neighbours then widen towards each other.
    """
    everything = LayerRange(0, num_layers)
    ways = [SplitPlan(tuple((StagePlan(s.worker_id, everything),) for s in stages))]
    if len(stages) >= 4:
        ways.append(SplitPlan((_widened(stages[::2], num_layers), _widened(stages[1::2], num_layers))))
    elif len(stages) == 3:
        ways.append(SplitPlan((_widened(stages[::2], num_layers),)))
    return tuple(ways)


def _widened(members: Sequence[StagePlan], num_layers: int) -> tuple[StagePlan, ...]:
    """The members as one pipeline over all layers, as even as possible while each keeps the layers that it has."""
    cuts = [0]
    for index, (left, right) in enumerate(pairwise(members), start=1):
        even = (index * num_layers + len(members) // 2) // len(members)
        cuts.append(min(max(even, left.layers.hi), right.layers.lo))
    cuts.append(num_layers)
    ranges = [LayerRange(lo, hi) for lo, hi in pairwise(cuts)]
    return tuple(StagePlan(m.worker_id, r) for m, r in zip(members, ranges, strict=True))


class PlacedRequest(NamedTuple):
    """A request that needs a home."""

    request_id: RequestId
    num_blocks: int


def place_requests(
    requests: Sequence[PlacedRequest], capacity_blocks: Mapping[int, int], headroom_blocks: int = 0
) -> dict[RequestId, int] | None:
    """One home for each request, largest first onto the emptiest; None if they do not fit.

    ``headroom_blocks`` stay free in each home so that running requests can grow.
    """
    free = {home: blocks - headroom_blocks for home, blocks in capacity_blocks.items()}
    homes: dict[RequestId, int] = {}
    for request in sorted(requests, key=lambda r: (-r.num_blocks, r.request_id)):
        home = max(free, key=lambda h: (free[h], -h))
        if free[home] < request.num_blocks:
            return None
        free[home] -= request.num_blocks
        homes[request.request_id] = home
    return homes

"""When a merged group should become instances again, and where its requests then live (KunServe v3 section 4.4).

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from jettison.memory.stages import SplitPlan, StagePlan
from jettison.policy.computeload import pipeline_loss
from jettison.types import LayerRange, RequestId

BETTER = 1.05
"""Factor between the compute loads of two arrangements from which one counts as better."""


class MergedLoad(NamedTuple):
    """A merged group as the restore policy sees it, in blocks of one full-depth instance."""

    used_blocks: int
    """Blocks of running requests, each request counted once (one stage's table)."""
    undropped_capacity_blocks: int
    """Blocks that the members hold together with all layers resident."""
    num_waiting: int
    usage_trend_blocks_per_s: float
    settled_s: float
    """Time since the exchange ended."""
    merged_compute_load: float | None = None
    """Share of the group's compute that the present traffic needs; None = not known."""
    separate_compute_load: float | None = None
    """Share of its members' compute that the traffic would need if they were instances."""
    behind_s: float = 0.0
    """How long ``falls_behind`` has held without a break."""
    separate_pace: float | None = None
    """Time of a token on the members as instances, over its time in the group; None = not known."""
    recompute_block_s: float | None = None
    """Seconds to prefill the tokens of one block, all members working; None = not known."""
    mean_stay_s: float = 0.0
    """How long requests stay; 0 = not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreParams:
    """Threshold and hysteresis."""

    usage_threshold: float = 0.5
    min_settled_s: float = 2.0
    horizon_s: float = 2.0
    """How far ahead the present growth must stay below the threshold."""
    max_compute_load: float = 1.0
    """Above, requests arrive faster than the pipeline can serve them."""
    yield_after_s: float = 10.0
    """How long the group must have fallen behind before it yields: a burst also brings more than can be served, but it
    ends."""
    early_usage: float = 0.6
    """For an early restore: largest share of the undropped capacity that present requests may be foreseen to hold on
    the members as instances."""
    least_pace_gain: float = 1.1
    """How many times as fast tokens have to come from the members."""
    max_recompute_s: float = 0.2
    """Seconds of prefill that an early restore may cost."""


def should_restore(load: MergedLoad, params: RestoreParams) -> bool:
    """Usage below the threshold of the undropped capacity, now and soon; nothing waits, dwell time over."""
    growth = max(0.0, load.usage_trend_blocks_per_s) * params.horizon_s
    return (
        load.num_waiting == 0
        and load.settled_s >= params.min_settled_s
        and load.used_blocks + growth < params.usage_threshold * load.undropped_capacity_blocks
    )


def early_overflow_blocks(load: MergedLoad, params: RestoreParams) -> int | None:
    """How many blocks an early restore may give up and compute again; None where there is to be none.

    A pipeline takes longer for a token, so its requests stay longer and hold more: at a mean load near the threshold a
    merged group would never fall below it, although its members could hold the arriving requests. So where the members
    are clearly faster, and are foreseen to hold no more than ``early_usage``, requests that do not fit during the
    return are computed again, if that takes no more than ``max_recompute_s``.
    """
    pace, block_s = load.separate_pace, load.recompute_block_s
    if pace is None or not block_s or params.usage_threshold <= 0.0 or pace * params.least_pace_gain > 1.0:
        return None
    growth = max(0.0, load.usage_trend_blocks_per_s) * params.horizon_s
    foreseen = (load.used_blocks + growth) * pace
    is_calm = load.num_waiting == 0 and load.settled_s >= params.min_settled_s
    fits = load.used_blocks < load.undropped_capacity_blocks
    if not (is_calm and fits and foreseen < params.early_usage * load.undropped_capacity_blocks):
        return None
    return int(params.max_recompute_s / block_s)


def falls_behind(load: MergedLoad, params: RestoreParams) -> bool:
    """Requests wait, compute binds the pipeline, and its members would do better apart."""
    merged, separate = load.merged_compute_load, load.separate_compute_load
    return (
        load.num_waiting > 0
        and merged is not None
        and separate is not None
        and merged > params.max_compute_load
        and BETTER * separate < merged
    )


def should_yield(load: MergedLoad, params: RestoreParams) -> bool:
    """Stop filling the memory, and restore when it fits: the opposite test to ``policy.overload``.

    Emptying the memory costs the requests that wait, so it has to be worth it: not for a burst, and not for a tie. It
    takes about one mean stay, in which hardly a request is admitted. So it begins when the group has fallen behind its
    members by as much as that (as in the ski-rental problem).
    """
    if load.settled_s < params.min_settled_s or not falls_behind(load, params):
        return False
    assert load.merged_compute_load is not None and load.separate_compute_load is not None
    lost_s = load.behind_s * pipeline_loss(load.merged_compute_load, load.separate_compute_load)
    return load.behind_s >= params.yield_after_s and lost_s >= load.mean_stay_s


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

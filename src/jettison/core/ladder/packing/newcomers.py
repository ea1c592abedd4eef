"""Whether a group takes a newcomer now: two tests, of its memory and of the prompts ahead there."""

from __future__ import annotations

from jettison.core.ladder.prompts import prompt_rate_of
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.policy.packing.params import breaks_ttft
from jettison.policy.slo import objectives


def has_room(cluster: ClusterState, group: Group, state: RequestState) -> bool:
    """Whether the group has a place for a newcomer, and its blocks above the watermark, behind all online requests that
    wait there. Cached blocks of its prompt that a request there holds are not counted as needed. Where offline work is
    harvested, its places count as free, and so do blocks that a single offline request holds alone."""
    blocks, queues = group.blocks, group.queues
    num_free, num_served = blocks.num_free, queues.num_served
    if cluster.params.offline.slo_aware and num_served != queues.num_served_online:
        num_free += blocks.num_used - blocks.num_used_without(s.request_id for s in queues.holding_offline())
        num_served = queues.num_served_online
    _, needed = blocks.cached_prefix(state)
    if num_free - blocks.watermark - queues.queued_blocks() < needed:
        return False
    return num_served + len(queues.waiting) < group.max_running


def fits_compute(cluster: ClusterState, group: Group, state: RequestState) -> bool:
    """Whether the group's steps have the time for a newcomer: beside the requests that decode there, the prompts ahead
    and its own leave it its objective for the first token. True where too little is known. A rung that wakes sleepers
    for long prompts can ask this of every group that is awake."""
    ahead = group.queues.queued_tokens() + group.queues.unfinished_tokens()
    ttft_s = objectives(cluster.params.offline.slo, cluster.predictor).ttft_s
    return not breaks_ttft(ahead, state.num_tokens, prompt_rate_of(cluster, group), ttft_s)

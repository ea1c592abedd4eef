"""Whether a group takes a newcomer now: its memory has room, and the prompts ahead there leave it its objective."""

from __future__ import annotations

from jettison.core.ladder.prompts import prompt_rate_of
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.policy.packing.params import breaks_ttft
from jettison.policy.slo import objectives


def has_room(cluster: ClusterState, group: Group, state: RequestState) -> bool:
    """Memory and a place are free behind all that wait there; offline work makes way where it is harvested."""
    blocks, queues = group.blocks, group.queues
    num_free, num_served = blocks.num_free, queues.num_served
    if cluster.params.offline.slo_aware and num_served != queues.num_served_online:
        num_free += blocks.num_used - blocks.num_used_without(s.request_id for s in queues.holding_offline())
        num_served = queues.num_served_online
    _, needed = blocks.cached_prefix(state)
    if num_free - blocks.watermark - queues.queued_blocks() < needed:
        return False
    return num_served + len(queues.waiting) < group.max_running


def comes_in_time(cluster: ClusterState, group: Group, state: RequestState) -> bool:
    """The prompts ahead of it and its own take no more than its objective for first tokens allows."""
    ahead = group.queues.queued_tokens() + group.queues.unfinished_tokens()
    if not ahead:
        return True
    ttft_s = objectives(cluster.params.offline.slo, cluster.predictor).ttft_s
    return not breaks_ttft(ahead, state.num_tokens, prompt_rate_of(cluster, group), ttft_s)

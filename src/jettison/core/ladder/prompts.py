"""How many tokens of prompts groups compute beside requests that decode, and how many groups the arriving prompts
need."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jettison.core.load.views import Loads
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.cost.stepwork import StepWork, step_of
from jettison.policy.dozing import num_for_prompts
from jettison.policy.slo import AHEAD_SHARE, Pace, objectives, prompt_step_tokens, prompt_tokens_per_s


def decoding_of(group: Group) -> tuple[int, int]:
    """(rows, KV tokens) of one step of a group, if all its running requests decoded; a merged group's requests are
    spread over as many steps as it has stages. (0, 0) where none runs."""
    num_running, num_stages = len(group.queues.running), len(group.stages)
    if not num_running:
        return 0, 0
    num_kv_tokens = group.blocks.num_used * group.limits.block_size
    if num_stages == 1:
        return num_running, num_kv_tokens
    return max(1, num_running // num_stages), num_kv_tokens // num_stages


def decodes_of(group: Group) -> StepWork:
    """The work of one step of a group in which all its running requests decode, and nothing is prefilled. Work without
    rows where no request runs."""
    return StepWork.decodes(*decoding_of(group))


def prompt_rate_of(cluster: ClusterState, group: Group) -> float | None:
    """Tokens of prompts a second that a group's steps compute beside its running requests, if all of them decoded. 0:
    decodes leave prompts no time. None: too little is known of steps. The steps keep to the objective for decodes,
    except where prefills come first."""
    most, decodes, num_stages = group.limits.max_num_batched_tokens, decodes_of(group), len(group.stages)
    if group.limits.prefill_first:  # its steps keep to no objective
        return cluster.predictor.prefill_tokens_per_s(most, decodes, num_stages)
    return prompt_tokens_per_s(Pace(cluster.params.offline, cluster.predictor), most, decodes, num_stages)


class PromptWork:
    """What is left to compute of prompts, in tokens that have none before them: tokens attend to those before them, and
    so a long prompt takes a multiple of what its number of tokens says."""

    def __init__(self, cluster: ClusterState) -> None:
        rate_of, most = cluster.predictor.prefill_tokens_per_s, cluster.limits.max_num_batched_tokens
        plain, deep = rate_of(most), rate_of(most, num_context=most)
        self.tokens_per_s = plain or math.inf
        """At which a group without decodes computes such tokens; infinite while that is not known."""
        self._attention = max(0.0, plain / deep - 1.0) / most if plain and deep else 0.0
        """What a token's attention to one before it adds to it, by a full step behind another."""

    def of(self, state: RequestState) -> float:
        """What is left of a request's prompt: attention is that of full steps, half of it before each."""
        num = state.num_tokens - state.num_computed
        return num * (1.0 + self._attention * (state.num_computed + num / 2.0))

    def begun(self, group: Group) -> float:
        """What is left of the online prompts that a group computes; those that decode have none."""
        found = (s for s in group.queues.prefilling.values() if not s.is_offline and s.num_tokens - s.num_computed > 1)
        return sum(map(self.of, found))

    def ahead(self, group: Group) -> float:
        """What is left of all online prompts of a group: a newcomer's turn comes after them."""
        queues = group.queues
        return self.begun(group) + queues.queued_tokens() + self._attention * queues.queued_squares / 2.0


def slowed_share(cluster: ClusterState, group: Group, rate: float) -> float:
    """The share of a step's time that prompts add to a group's decodes while they are computed at this ``rate`` (of
    ``prompt_rate_of``); 0 where nothing decodes, or no prompt is computed."""
    most, decodes, num_stages = group.limits.max_num_batched_tokens, decodes_of(group), len(group.stages)
    without_s = cluster.predictor.predict_s(decodes, step_of(num_stages)) if decodes.num_rows else None
    if not without_s or not rate:
        return 0.0
    pace = Pace(cluster.params.offline, cluster.predictor)
    first = group.limits.prefill_first
    tokens = max(1, most - decodes.num_tokens) if first else prompt_step_tokens(pace, most, decodes, num_stages)
    return max(0.0, 1.0 - without_s * rate / (num_stages * tokens)) if tokens else 0.0


def num_for_arrivals(
    cluster: ClusterState, loads: Loads, groups: Iterable[Group], share: float = AHEAD_SHARE
) -> int:
    """How many groups like these it takes so that arriving online prompts fill ``share`` of the time that steps have
    for prompts. 0 while too little is known of steps or arrivals, and where first tokens have no objective."""
    traffic = loads.traffic.traffic()
    if traffic is None or objectives(cluster.params.offline.slo, cluster.predictor).ttft_s is None:
        return 0
    rates: list[float] = []
    for group in groups:
        cluster.catch_up(group.group_id)
        if (rate := prompt_rate_of(cluster, group)) is not None:
            rates.append(rate)
    return num_for_prompts(traffic.requests_per_s * traffic.prompt_tokens, rates, share)

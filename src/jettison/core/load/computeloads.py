"""What instances serve a second under the present traffic, for the costs of drop plans (KunServe v1)."""

from __future__ import annotations

import math
from collections.abc import Callable

from jettison.core.load.monitor import TrafficMonitor
from jettison.core.state import ClusterState
from jettison.cost.grouprate import TokenMix
from jettison.cost.stepwork import NOTHING, Measure, Part, StepWork
from jettison.policy.ranges import StageTerms
from jettison.policy.steadystate import Room, mean_tokens, steady_step

SHORTEST_PIPELINE = 2
"""Stages of the pipeline that a merge makes first."""


class ComputeLoads:
    """Rates at which groups serve, by their number of stages."""

    def __init__(self, state: ClusterState, traffic: TrafficMonitor) -> None:
        self._state = state
        self._traffic = traffic

    def steady_step(self) -> StepWork | None:
        """The work of an instance's step in a steady state under the present online traffic. None while the traffic is
        not known, or no worker can serve."""
        traffic, room = self._traffic.traffic(), self._room()
        return None if traffic is None or room is None else steady_step(traffic, room)

    def stage_terms(self) -> Callable[[float], StageTerms] | None:
        """What a stage takes, as predicted, for a microbatch of requests that hold so many KV bytes, with as many
        prompt tokens beside them as the present online traffic has. None without a profile, which alone tells the head
        apart, and while the traffic is not known."""
        traffic, max_rows = self._traffic.traffic(), self._state.limits.max_num_seqs
        if self._state.params.profile is None or traffic is None:
            return None
        token_bytes, predict_s = self._token_bytes, self._state.predictor.predict_s

        def terms(kv_bytes: float) -> StageTerms:
            work = steady_step(traffic, Room(kv_bytes / token_bytes, max_rows))

            def seconds(num_layers: int, *, is_first: bool = False, is_last: bool = False) -> float:
                part = Part(Measure.STAGE, SHORTEST_PIPELINE, num_layers, is_first=is_first, is_last=is_last)
                return predict_s(work, part) or 0.0

            one_s, layer_s = seconds(1), seconds(2) - seconds(1)
            entry_s, head_s = seconds(1, is_first=True) - one_s, seconds(1, is_last=True) - one_s
            return StageTerms(layer_s, entry_s, head_s, max(0.0, one_s - layer_s))

        return terms

    def seated_bytes(self) -> float:
        """KV bytes, all layers, that as many requests hold as an instance has seats for; infinite while the traffic is
        not known."""
        traffic = self._traffic.traffic()
        if traffic is None:
            return math.inf
        return self._state.limits.max_num_seqs * mean_tokens(traffic) * self._token_bytes

    @property
    def _token_bytes(self) -> float:
        """KV bytes of a token, all layers."""
        shape, size = self._state.shape, self._state.limits.block_size
        return shape.num_layers * shape.block_bytes_per_layer(size) / size

    def group_rates(self) -> dict[int, float]:
        """Output tokens a second that a group serves, by its number of stages, as profiled, with as many prompt tokens
        beside them as the present traffic has; empty without a profile.

        For a number of stages that pipelines have served with, the rate is that of as many profiled instances, times
        the predicted efficiency of such a pipeline: it has the bubbles and uneven microbatches in it.
        """
        profile, traffic = self._state.params.profile, self._traffic.traffic()
        if profile is None:
            return {}
        prompts = 0.0 if traffic is None else traffic.prompt_tokens / max(1.0, traffic.output_tokens)
        rates = profile.serving_rates(TokenMix(prompts, self._state.limits.max_num_batched_tokens))
        if (alone := rates.get(1)) is not None:
            predictor, work = self._state.predictor, self.steady_step() or NOTHING
            rates |= {n: n * alone * predictor.pipeline_efficiency(work, n) for n in predictor.measured_pipelines}
        return rates

    def _room(self) -> Room | None:
        """What each of the workers that can serve has: the least capacity that one of them has undropped. None while
        no worker can serve."""
        limits, (num_alive, least_full_blocks) = self._state.limits, self._state.alive_workers()
        return Room(least_full_blocks * limits.block_size, limits.max_num_seqs) if num_alive else None

"""What instances serve a second under the present traffic, for the costs of drop plans (KunServe v1)."""

from __future__ import annotations

from jettison.core.load.monitor import TrafficMonitor
from jettison.core.state import ClusterState
from jettison.cost.grouprate import TokenMix
from jettison.cost.stepwork import NOTHING, StepWork
from jettison.policy.steadystate import Room, steady_step


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

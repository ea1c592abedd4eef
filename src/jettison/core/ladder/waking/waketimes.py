"""How long waking each sleeper takes, by the state of the cluster now: predictions for ``policy.waketimes``."""

from __future__ import annotations

from collections.abc import Sequence

from jettison.core.ladder.rung import Means
from jettison.core.load.pullrates import PullRates
from jettison.core.serving.group import Group
from jettison.cost.stepwork import step_of
from jettison.policy.waketimes import BUSY_SHARE, WakeForecast, WakeSource, WakesTaken
from jettison.types import WorkerId


class WakeTimes:
    """Predicts how long a wake takes. It keeps nothing but how long wakes have taken, and begins nothing."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._state = means.state
        self.taken = WakesTaken()

    def wake(self, worker_id: WorkerId) -> WakeForecast:
        """What waking a worker takes, from the source of parameters that is predicted to end first; no bytes where it
        has not given them up yet. One without a process takes as much longer as starts have taken."""
        state, profile = self._state, self._state.params.profile
        if worker_id in self._means.sleepers.leaving:
            return WakeForecast(0, None, 0.0)
        budget_bytes = state.member_budget_bytes(state.workers[worker_id])
        map_s = 0.0 if profile is None else profile.remap_cost_s(budget_bytes)
        num_bytes, is_busy = state.shape.parameter_bytes, any(g.in_flight for g in state.groups.values())
        wait_s = max((self._step_in_flight_s(g) for g in state.groups.values()), default=0.0)
        start_s = 0.0 if state.workers[worker_id].is_provisioned else self._means.sleepers.provisioning.start_s
        return self.taken.soonest([
            WakeForecast(
                num_bytes, rate, map_s, source, is_busy, wait_s if source is WakeSource.PEERS else 0.0, start_s
            )
            for source, rate in self._fill_rates(worker_id).items()
        ])  # fmt: skip

    def _step_in_flight_s(self, group: Group) -> float:
        """Predicted seconds of the group's newest step in flight, all of it, as it is not known when a worker began; 0
        without one, or while nothing is known of steps."""
        last = next(reversed(group.in_flight.values()), None)
        step_s = None if last is None else self._state.predictor.predict_s(last.work, step_of(len(group.stages)))
        return step_s or 0.0

    def _fill_rates(self, worker_id: WorkerId) -> dict[WakeSource, float | None]:
        """Bytes a second at which a worker gets all shards from each source that it has, in the order peers, then its
        machine's copy or the model folder; None: not known."""
        state, params = self._state, self._state.params
        profile, everything = params.profile, state.shape.all_shards
        awake = [w for w in state.workers.values() if w.can_serve and w.worker_id not in self._means.sleepers.leaving]
        rates: dict[WakeSource, float | None] = {}
        if everything <= {shard for w in awake for shard in w.layout.shards - w.unfilled}:
            holders = [w.worker_id for w in awake if w.layout.shards - w.unfilled]
            rates[WakeSource.PEERS] = self._peers_rate(worker_id, holders)
        if self._means.sleepers.host_copy(worker_id) >= everything:
            rates[WakeSource.HOST] = (
                params.loading_bytes_per_s if profile is None else profile.host_copy_bytes_per_s
            )
        else:  # a load takes the copy where there is one
            profiled = None if profile is None else profile.disk_bytes_per_s
            rates[WakeSource.DISK] = params.loading_bytes_per_s or profiled
        return rates

    def _peers_rate(self, worker_id: WorkerId, holders: Sequence[WorkerId]) -> float | None:
        """Bytes a second of the best link from a holder of shards to a worker; None: none is known. A rate that was
        measured, was so beside steps; of a profiled one, a holder that serves gives only a part."""
        state, known = self._state, PullRates(self._state)
        rates: list[float] = []
        for holder in holders:
            link = holder, worker_id
            if (rate := known.of(link)) is None:
                continue
            measured = state.link_rates.get(link)
            is_busy = any(g.in_flight for g in state.groups_of[holder])
            if is_busy and (measured is None or measured.bytes_per_s is None):
                rate *= min(1.0, BUSY_SHARE * len(holders))
            rates.append(rate)
        return max(rates, default=None)

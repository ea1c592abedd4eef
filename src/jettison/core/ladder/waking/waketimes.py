"""How long waking each sleeper takes, by the state of the cluster now: predictions for ``policy.waketimes``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jettison.core.ladder.rung import Means
from jettison.core.load.pullrates import PullRates
from jettison.core.serving.group import Group
from jettison.cost.stepwork import step_of
from jettison.policy.waketimes import BUSY_SHARE, WakeForecast, WakeSource, WakesTaken
from jettison.types import ShardId, WorkerId


class WakeTimes:
    """Predicts how long a wake takes. It keeps nothing but how long wakes have taken, and begins nothing."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._state = means.state
        self.taken = WakesTaken()

    def wake(self, worker_id: WorkerId) -> WakeForecast:
        """``wakes`` of one."""
        return self.wakes([worker_id])[0]

    def wakes(self, worker_ids: Iterable[WorkerId]) -> list[WakeForecast]:
        """What waking each of these workers would take, from the source of parameters that is predicted to end first;
        no bytes where it has not given them up yet. One without a process takes as much longer as starts have taken."""
        state, profile = self._state, self._state.params.profile
        is_busy = any(g.in_flight for g in state.groups.values())
        wait_s = max((self._step_in_flight_s(g) for g in state.groups.values()), default=0.0)
        holders, found = self._holders(), list[WakeForecast]()
        for worker_id in worker_ids:
            if worker_id in self._means.sleepers.leaving:
                found.append(WakeForecast(0, None, 0.0))
                continue
            worker = state.workers[worker_id]
            map_s = 0.0 if profile is None else profile.remap_cost_s(state.member_budget_bytes(worker))
            start_s = 0.0 if worker.is_provisioned else self._means.sleepers.provisioning.start_s
            found.append(self.taken.soonest([
                WakeForecast(
                    state.shape.parameter_bytes, rate, map_s, source, is_busy,
                    wait_s if source is WakeSource.PEERS else 0.0, start_s,
                )
                for source, rate in self._fill_rates(worker_id, holders).items()
            ]))  # fmt: skip
        return found

    def _holders(self) -> Mapping[WorkerId, bool]:
        """The workers that serve with parameters, and whether each computes now; none where they do not have all
        parameters together."""
        state, leaving = self._state, self._means.sleepers.leaving
        held, holders = set[ShardId](), dict[WorkerId, bool]()
        for worker in state.workers.values():
            if worker.can_serve and worker.worker_id not in leaving and (own := worker.layout.shards - worker.unfilled):
                held |= own
                holders[worker.worker_id] = any(g.in_flight for g in state.groups_of[worker.worker_id])
        return holders if state.shape.all_shards <= held else {}

    def _step_in_flight_s(self, group: Group) -> float:
        """Predicted seconds of the group's newest step in flight, all of it, as it is not known when a worker began; 0
        without one, or while nothing is known of steps."""
        last = next(reversed(group.in_flight.values()), None)
        step_s = None if last is None else self._state.predictor.predict_s(last.work, step_of(len(group.stages)))
        return step_s or 0.0

    def _fill_rates(
        self, worker_id: WorkerId, holders: Mapping[WorkerId, bool]
    ) -> dict[WakeSource, float | None]:
        """Bytes a second at which a worker gets all shards from each source that it has, in the order peers, then its
        machine's copy or the model folder; None: not known. ``holders``: of ``_holders``."""
        params, profile, everything = self._state.params, self._state.params.profile, self._state.shape.all_shards
        rates: dict[WakeSource, float | None] = {}
        if holders:
            rates[WakeSource.PEERS] = self._peers_rate(worker_id, holders)
        if self._means.sleepers.host_copy(worker_id) >= everything:
            rates[WakeSource.HOST] = (
                params.loading_bytes_per_s if profile is None else profile.host_copy_bytes_per_s
            )
        else:  # a load takes the copy where there is one
            profiled = None if profile is None else profile.disk_bytes_per_s
            rates[WakeSource.DISK] = params.loading_bytes_per_s or profiled
        return rates

    def _peers_rate(self, worker_id: WorkerId, holders: Mapping[WorkerId, bool]) -> float | None:
        """Bytes a second of the best link from a holder of shards to a worker; None: none is known. A rate that was
        measured, was so beside steps; of a profiled one, a holder that serves gives only a part."""
        state, known = self._state, PullRates(self._state)
        rates: list[float] = []
        for holder, is_busy in holders.items():
            link = holder, worker_id
            if (rate := known.of(link)) is None:
                continue
            measured = state.link_rates.get(link)
            if is_busy and (measured is None or measured.bytes_per_s is None):
                rate *= min(1.0, BUSY_SHARE * len(holders))
            rates.append(rate)
        return max(rates, default=None)

"""An administrator's orders to sleep and to wake, for the front end: which workers are meant, and what is answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jettison.core.cluster import ClusterCore
from jettison.core.moving.sleeping import SleepState
from jettison.errors import NotReadyError, RequestError, SleepRefusedError
from jettison.live.engine.engine import Engine
from jettison.types import WorkerId


class SleepOrders:
    """Over a running engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def _core(self) -> ClusterCore:
        if self._engine.state != "ready":
            raise NotReadyError(f"the engine is {self._engine.state}")
        return self._engine.core

    def _meant(self, instance: int | None, states: tuple[SleepState, ...]) -> list[WorkerId]:
        """The one, or all in one of these states."""
        core = self._core
        if instance is None:
            return [w for w in core.state.workers if core.sleepers.state_of(w) in states]
        if instance not in core.state.workers:
            raise RequestError(f"there is no instance {instance}", param="instance", code="unknown_instance")
        return [instance]

    def sleep(self, instance: int | None, level: int) -> Mapping[str, Any]:
        """See ``SleepControl.sleep``."""
        meant = self._meant(instance, (SleepState.AWAKE, SleepState.WAKING))
        try:
            self._engine.orders.order(lambda core, now_ns: core.request_sleep(meant, level, now_ns))
        except ValueError as error:
            raise SleepRefusedError(str(error), code="sleep_refused") from None
        answer = {**self.states(instance), "level": level}
        num_awake, least = self._core.sleepers.num_awake(), self._core.params.awake.min_awake
        if num_awake < least:
            answer["note"] = f"{num_awake} awake, below --min-awake {least}: by hand that is as you say"
        return answer

    def wake(self, instance: int | None) -> Mapping[str, Any]:
        """See ``SleepControl.wake``."""
        asleep = (SleepState.LEAVING, SleepState.EMPTYING, SleepState.ASLEEP)
        for worker_id in self._meant(instance, asleep):
            try:
                self._engine.orders.order(lambda core, now_ns, one=worker_id: core.request_wake(one, now_ns))  # type: ignore[misc]
            except ValueError as error:
                raise SleepRefusedError(str(error), code="wake_refused") from None
        return self.states(instance)

    def states(self, instance: int | None = None) -> Mapping[str, Any]:
        """See ``SleepControl.states``: ``is_sleeping`` holds when all that were asked for do."""
        sleepers = self._core.sleepers
        states = {w: sleepers.state_of(w) for w in self._meant(instance, tuple(SleepState))}
        return {
            "is_sleeping": all(state in (SleepState.ASLEEP, SleepState.UNPROVISIONED) for state in states.values()),
            "instances": [{"instance": w, "state": str(state)} for w, state in states.items()],
        }

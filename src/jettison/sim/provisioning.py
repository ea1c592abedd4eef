"""Processes of workers in virtual time: one that is asked for comes after a stated time, one that is given back ends at
once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from jettison.core import ports
from jettison.sim.breaking import Breaking
from jettison.sim.loop import FAULT, EventLoop, Scheduled
from jettison.sim.worker import SimWorker
from jettison.types import WorkerId


class Startable(Protocol):
    """The cluster, as starts use it (``sim.cluster.SimulatedCluster``)."""

    loop: EventLoop
    breaking: Breaking

    @property
    def workers(self) -> Mapping[WorkerId, SimWorker]:
        """All workers, those without a process included."""
        ...

    def handle(self, event: ports.Event) -> None:
        """The core handles an event now."""
        ...

    def stop_fast_forwards(self, *, including_now: bool = True) -> None:
        """Settle all groups, and go on step by step: something is about to change."""
        ...


class Starts:
    """Processes of one cluster that are being started."""

    def __init__(self, cluster: Startable, start_ns: int) -> None:
        """``start_ns``: from asking for a process until it joins."""
        self._cluster = cluster
        self._start_ns = start_ns
        self._coming: dict[WorkerId, Scheduled] = {}

    @property
    def is_idle(self) -> bool:
        """Whether none is being started."""
        return not self._coming

    def carry_out(self, action: ports.AskInstance | ports.ReleaseInstance) -> None:
        """Begin a start, or give one up or a process back."""
        worker_id = action.worker_id
        if isinstance(action, ports.AskInstance):
            self._coming[worker_id] = self._cluster.loop.after(self._start_ns, lambda: self._come(worker_id), FAULT)
        elif (coming := self._coming.pop(worker_id, None)) is not None:
            coming.cancel()
        else:
            self._cluster.breaking.retire(worker_id)

    def _come(self, worker_id: WorkerId) -> None:
        del self._coming[worker_id]
        self._cluster.stop_fast_forwards(including_now=False)
        worker = self._cluster.workers[worker_id]
        worker.rise()
        self._cluster.handle(ports.WorkerJoined(worker_id, worker.memory.capacity_blocks, worker.life))

"""Starts processes of instances and gives them back, as the core asks; tells it on which machine each has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.live.engine.crew import Crew
from jettison.live.engine.restart import Restarter
from jettison.live.engine.spawner import HostName, Spawner
from jettison.types import WorkerId


class Provisioner:
    """Over one crew and its restarter. All calls on their loop."""

    def __init__(
        self, crew: Crew, restarter: Restarter, spawner: Spawner, on_change: Callable[[], None], *,
        names_machines: bool,
    ) -> None:
        """``on_change``: called when there are fewer instances than before. ``names_machines``: a worker's machine is
        the host that it comes up on; else the configuration has named all."""
        self._crew = crew
        self._restarter = restarter
        self._spawner = spawner
        self._on_change = on_change
        self._names_machines = names_machines
        self._hosts: list[HostName] = list(spawner.hosts())
        """In the order of their machines' numbers; those of ``machines_of`` first."""

    def carry_out(self, action: ports.AskInstance | ports.ReleaseInstance) -> None:
        """Begin a start, or give one up or a process back. Never blocks."""
        if isinstance(action, ports.AskInstance):
            self._restarter.start_new(action.worker_id)
            return
        self._restarter.call_off(action.worker_id)
        self._crew.retire(action.worker_id)
        self._on_change()

    def joined(self, worker_id: WorkerId, core: ClusterCore) -> None:
        """A new life of a worker is ready: the core is told of its machine where that is news."""
        if not self._names_machines:
            return
        host = self._spawner.host_of(worker_id)
        if host not in self._hosts:
            self._hosts.append(host)
        machine = self._hosts.index(host)
        known = core.params.machine_of
        if known.get(worker_id) != machine:
            now = {**known, worker_id: machine}
            core.reconfigure(replace(core.params, machine_of=now, card_of=now))

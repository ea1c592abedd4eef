"""Starts processes of instances and gives them back, as the core asks; tells it on which machine each has come, and
what is known of the networks to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.core.params import ClusterParams
from jettison.live.engine.crew import Crew
from jettison.live.engine.known_networks import KnownNetworks
from jettison.live.engine.restart import Restarter
from jettison.live.engine.spawner import HostName, Spawner
from jettison.live.host.heritage import Heritage
from jettison.policy.links import MachineId
from jettison.types import WorkerId


class Provisioner:
    """Over one crew and its restarter. All calls on their loop."""

    def __init__(
        self, crew: Crew, restarter: Restarter, spawner: Spawner, on_change: Callable[[], None], *,
        names_machines: bool, heritage: Heritage | None = None,
    ) -> None:
        """``on_change``: called when there are fewer instances than before. ``names_machines``: a worker's machine is
        the host that it comes up on; else the configuration has named all. ``heritage``: where a controller leaves what
        it has measured for the next one."""
        self._crew = crew
        self._restarter = restarter
        self._spawner = spawner
        self._on_change = on_change
        self._names_machines = names_machines
        self._networks = KnownNetworks(None if heritage is None else heritage.networks_fd)
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

    def begin(self, core: ClusterCore) -> None:
        """Before the first request: keep what has just been measured of networks, or tell the core what was measured by
        an earlier controller, whose workers these may be. Places that its other workers had are given back."""
        for worker_id, worker in core.state.workers.items():
            if not worker.is_provisioned:
                self._spawner.release(worker_id)
        self._networks.recall()
        if core.params.networks:
            self._networks.note(core.params.networks, self._names(core))
        self._tell(core, core.params)

    def joined(self, worker_id: WorkerId, core: ClusterCore) -> None:
        """A new life of a worker is ready: the core is told of its machine where that is news."""
        params = core.params
        if self._names_machines:
            host = self._spawner.host_of(worker_id)
            if host not in self._hosts:
                self._hosts.append(host)
            now = {**params.machine_of, worker_id: self._hosts.index(host)}
            # Shared memory was profiled. With a second machine, not all links are shared memory any more.
            params = replace(
                params, machine_of=now, card_of=now,
                has_profiled_links=params.has_profiled_links and len(set(now.values())) == 1,
            )
        self._tell(core, params)

    def _names(self, core: ClusterCore) -> dict[HostName, MachineId]:
        """Machines by names that a later controller has for them, too: their hosts', or what the configuration says."""
        if self._names_machines:
            return {host: machine for machine, host in enumerate(self._hosts)}
        return {str(machine): machine for machine in set(core.params.machine_of.values())}

    def _tell(self, core: ClusterCore, params: ClusterParams) -> None:
        """Have the core take these parameters, and the rates between the machines that there are, where that is news.
        ``networks`` stays the same mapping where it has the same rates."""
        networks = {**params.networks, **self._networks.between(self._names(core))}
        if networks != params.networks:
            params = replace(params, networks=networks)
        if params != core.params:
            core.reconfigure(params)

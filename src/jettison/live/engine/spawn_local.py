"""Workers as processes of this machine: all on one host, or in network namespaces, each of which stands for a host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from jettison.live.engine.spawner import HostName
from jettison.live.host.forkserver import FORK_SERVERS
from jettison.live.host.heritage import Heritage, control_path
from jettison.live.host.keeper import WORKER_COMMAND, Adopted, Child, Keeper
from jettison.live.machine.netns import Placement
from jettison.live.machine.run_folder import RunFolder
from jettison.live.wire.worker_config import WorkerStart
from jettison.types import WorkerId

if TYPE_CHECKING:
    from jettison.transport.authority import Authority


class LocalSpawner:
    """A ``Spawner`` over keepers in this process.

    ``placements`` put workers into network namespaces of this machine (experiments on a real, slow network).
    ``worker_command`` replaces the program that is run (tests).
    """

    def __init__(
        self, placements: Mapping[WorkerId, Placement] | None = None, worker_command: Sequence[str] = WORKER_COMMAND,
        heritage: Heritage | None = None,
    ) -> None:
        """``heritage``: what outlives this process; without placements."""
        self._placements = dict(placements or {})
        self._worker_command = worker_command
        self._heritage = heritage
        self._keepers: dict[HostName, Keeper] = {}
        self.folder: RunFolder | None = None
        """Of sockets, while it is open; with a heritage it is the parent's."""

    @property
    def spans_hosts(self) -> bool:
        """See ``Spawner.spans_hosts``."""
        return len(self.hosts()) > 1

    async def open(self, authority: Authority | None) -> str:
        """See ``Spawner.open``. Control stays on this machine whatever its links do."""
        del authority
        if self._heritage is not None:
            FORK_SERVERS.inherit(self._heritage)
            path = self._heritage.folder
        else:
            self.folder = RunFolder()
            path = self.folder.path
        self._keepers = {host: Keeper(path, self._worker_command) for host in self.hosts()}
        return f"unix:{control_path(path)}"

    async def adopt(self, num_threads: int) -> Sequence[Adopted[Child]]:
        """See ``Spawner.adopt``."""
        if not FORK_SERVERS.has_found:
            return ()
        return await self._keepers[Placement().machine].adopt(num_threads)

    async def close(self) -> None:
        """See ``Spawner.close``."""
        for keeper in self._keepers.values():
            keeper.close()
        if self.folder is not None:
            self.folder.remove()

    def spawn(self, start: WorkerStart) -> Child:
        """See ``Spawner.spawn``."""
        worker = start.spec.worker_id
        keeper = self._keepers[self.host_of(worker)]
        return keeper.spawn(start, self._placements.get(worker, Placement()), has_far_peers=len(self.hosts()) > 1)

    def release(self, worker: WorkerId) -> None:
        """See ``Spawner.release``: a process of this machine leaves nothing behind."""

    def hosts(self) -> Sequence[HostName]:
        """See ``Spawner.hosts``: this machine's own is first, and the only one without placements."""
        return sorted({Placement().machine, *(placement.machine for placement in self._placements.values())})

    def host_of(self, worker: WorkerId) -> HostName:
        """See ``Spawner.host_of``."""
        return self._placements.get(worker, Placement()).machine

    def troubles(self) -> Sequence[str]:
        """See ``Spawner.troubles``."""
        return ()

    def tell_waits(self, on_waits: Callable[[WorkerId, str], None]) -> None:
        """See ``Spawner.tell_waits``: this machine has a place at once."""

    async def able(self, worker: WorkerId) -> None:
        """See ``Spawner.able``."""

    def empty_shared_copies(self) -> None:
        """See ``Spawner.empty_shared_copies``."""
        for keeper in self._keepers.values():
            keeper.empty_shared_copy()

"""Where workers run and how their processes come to be: the seam between the crew and any kind of machine.

A spawner only starts, watches and ends processes. Which lives there are and what a death means is the crew's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from jettison.live.host.keeper import Addresses, Adopted
from jettison.live.wire.heartbeat import Patience
from jettison.live.wire.worker_config import WorkerStart
from jettison.policy.links import MachineId
from jettison.types import WorkerId

if TYPE_CHECKING:
    from jettison.transport.authority import Authority

HostName = str


class Handle(Protocol):
    """One life of a worker, wherever its process is. All calls on the crew's loop; none blocks."""

    pid: int
    """The process, where this host can see it; 0 elsewhere."""
    addresses: Addresses
    """Where peers reach this life. Valid once ``located`` has returned."""
    ended: asyncio.Future[int]
    """Its exit code, once the process has ended."""
    why_lost: str | None
    """Set before ``ended`` where the host or its keeper is gone, and the process with it: no last word comes."""

    async def located(self) -> None:
        """Returns once peers can be told where it is, or once it has ended."""

    def kill(self) -> None:
        """End the process at once. Idempotent; nothing where it has ended."""

    def abandon(self, step_id: int) -> None:
        """Have the worker give a step up at its next safepoint. It need not read any message for it."""

    def begin_beats(self, now_s: float) -> None:
        """The worker is loaded: from now on its silence counts. Loading is not hanging."""

    def why_hung(self, now_s: float, away_s: float, patience: Patience) -> str | None:
        """Why the worker counts as hung; None while it does not, and once it has ended. For ``away_s`` since the last
        call the caller was absent itself, which is no worker's fault."""


class Spawner(Protocol):
    """Starts workers on one host or on several. Opened and closed once, by its crew; all calls on the crew's loop."""

    @property
    def spans_hosts(self) -> bool:
        """Whether workers may be on several hosts: links between them are encrypted then. Known before ``open``."""

    async def open(self, authority: Authority | None) -> str:
        """Acquire what the hosts need; returns the address at which the controller is to listen, which workers on every
        host reach: port 0 is any. ``authority``: of a cluster that spans hosts, which signs for them, too. Raises
        OSError, UserError."""

    async def close(self) -> None:
        """Give back what ``open`` has acquired; all processes have ended. Idempotent."""

    async def adopt(self, num_threads: int) -> Sequence[Adopted[Handle]]:
        """Workers of ``num_threads`` threads that have outlived an earlier controller, to be this one's; none where
        they end with theirs. Once, behind ``open``. Raises OSError."""

    def spawn(self, start: WorkerStart) -> Handle:
        """Begin one life of a worker, on its host. A start that fails later is an end of the life.

        Raises OSError where the host has no process, descriptor or address for it; then nothing of it is left.
        """

    def release(self, worker: WorkerId) -> None:
        """Give back the place of a worker whose life has ended; its next life finds another. Never blocks."""

    def hosts(self) -> Sequence[HostName]:
        """All hosts that workers run on, always in one order. Valid once all have been ready."""

    def host_of(self, worker: WorkerId) -> HostName:
        """The host that the present life of a worker runs on. Valid once it is ready."""

    def troubles(self) -> Sequence[str]:
        """What keeps it from starting workers now, a line each; those that run are as they were. Empty: nothing that is
        known."""

    def tell_waits(self, on_waits: Callable[[WorkerId, str], None]) -> None:
        """Have this called where a life that has begun waits for a place on a host, with why."""

    async def able(self, worker: WorkerId) -> None:
        """Returns once another life of a worker can begin, as far as is known."""

    def empty_shared_copies(self) -> None:
        """As after a restart of the hosts: nothing is left in their copies of the parameters (tests)."""


def machines_of(workers: Iterable[WorkerId], spawner: Spawner) -> dict[WorkerId, MachineId]:
    """Each worker's machine, by number, as far as its links go: a host is one."""
    hosts = list(spawner.hosts())
    return {worker: hosts.index(spawner.host_of(worker)) for worker in workers}

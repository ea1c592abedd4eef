"""Worker processes of one host: how one starts, what it inherits, how it ends, and what is known of it while it runs.

A worker is forked by a fork server, which has imported what a worker imports and has run nothing (``host.forkserver``,
``worker.forked``): never from this process, whose threads and devices a fork would copy in the middle of what they do.
It never outlives its keeper, but where it is told to: another keeper adopts it then. All calls on one asyncio loop.

Not here: which workers there are, which life is the present one, and when a silent one is given up (``engine.crew``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from jettison.device.beside import bound_onednn_caches, open_shared_copy
from jettison.live.host.forkserver import FORK_SERVERS, ForkServer, fork_servers_kept
from jettison.live.machine.environment import child_environment
from jettison.live.machine.netns import Placement, entered
from jettison.live.wire.fork_orders import (
    MAX_MESSAGE_BYTES,
    NUM_ADOPTED_FDS,
    AdoptionOver,
    AdoptWorkers,
    ForkEvent,
    ForkWorker,
    WorkerAdopted,
    WorkerEnded,
    WorkerForked,
)
from jettison.live.wire.heartbeat import Listener, Patience, why_hung
from jettison.live.wire.stepflag import NO_STEP, StepFlag
from jettison.live.wire.worker_config import WorkerStart
from jettison.transport.sockets import listening_socket
from jettison.types import WorkerId

log = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-P", "-m", "jettison.live.worker.main")
"""The fork server's program. ``-P``: the current folder must not lend modules to a worker."""


@contextmanager
def fork_server_begun(num_threads: int, worker_command: Sequence[str] = WORKER_COMMAND) -> Iterator[None]:
    """While inside, there is a fork server for workers with so many threads: it imports while the caller, before its
    first worker, does what it has to do. Where this host has no process for it, the keeper will say so."""
    with fork_servers_kept():
        with suppress(OSError):
            _, line = FORK_SERVERS.connect(tuple(worker_command), worker_environment(num_threads))
            line.close()
        yield


class Addresses(NamedTuple):
    """Where peers reach one life of a worker: over shared memory from its own host, else over a network."""

    near: str
    far: str | None


Handle = TypeVar("Handle", covariant=True)


class Adopted(NamedTuple, Generic[Handle]):
    """A worker that has outlived the keeper, or the controller, that started it."""

    worker: WorkerId
    life: int
    spec_digest: str
    """``worker_config.digest_of`` its device."""
    handle: Handle


class Child:
    """One worker's process. Made by ``Keeper``; see ``engine.spawner.Handle``, which it is."""

    def __init__(self, listener: Listener, flag: StepFlag, addresses: Addresses) -> None:
        self.pid = 0
        self.addresses = addresses
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.why_lost: str | None = None
        self.on_pid: Callable[[int], None] | None = None
        """Called once the process is there."""
        self._pidfd: int | None = None
        self._is_to_be_killed = False
        self._listener: Listener | None = listener
        self._flag: StepFlag | None = flag

    async def located(self) -> None:
        """See ``Handle``: from the beginning."""

    def kill(self) -> None:
        """See ``Handle``."""
        self._is_to_be_killed = True
        if self._pidfd is not None:
            with suppress(ProcessLookupError):  # it has ended, and that will be told
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def abandon(self, step_id: int) -> None:
        """See ``Handle``."""
        if self._flag is not None:
            self._flag.name(step_id)

    def begin_beats(self, now_s: float) -> None:
        """See ``Handle``."""
        if self._listener is not None:
            self._listener.begin(now_s)

    def why_hung(self, now_s: float, away_s: float, patience: Patience) -> str | None:
        """See ``Handle``."""
        ages_s = self.heart_ages_s(now_s, away_s)
        return None if ages_s is None else why_hung(*ages_s, patience)

    def heart_ages_s(self, now_s: float, away_s: float) -> tuple[float, float] | None:
        """See ``Listener.ages_s``; None once the process has ended. ``away_s``: see ``why_hung``."""
        if self._listener is None:
            return None
        self._listener.read(now_s)
        self._listener.excuse(away_s, now_s)
        return self._listener.ages_s(now_s)

    def lease_until(self, ends_s: float) -> None:
        """The process must not live longer than this (``lease.boot_clock_s``), whatever becomes of this keeper."""
        if self._flag is not None:
            self._flag.lease_until(ends_s)

    def on_forked(self, pid: int, pidfd: int) -> None:
        """The process is there."""
        self.pid, self._pidfd = pid, pidfd
        if self.on_pid is not None:
            self.on_pid(pid)
        if self._is_to_be_killed:
            self.kill()

    def lose_fork_server(self) -> None:
        """No message comes any more. The process ends, killed with the fork server or here, and has ended when its
        pidfd says so: until then it may hold a card's memory, and its next life must not begin."""
        self.kill()
        if self._pidfd is None:
            self.on_end(1)
            return
        loop, pidfd = self.ended.get_loop(), self._pidfd

        def on_readable() -> None:
            loop.remove_reader(pidfd)
            self.on_end(-signal.SIGKILL)

        loop.add_reader(pidfd, on_readable)

    def on_end(self, returncode: int) -> None:
        """The process has ended, or there will be none. Idempotent."""
        if self.ended.done():
            return
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._flag is not None:
            self._flag.close()
            self._flag = None
        self.ended.set_result(returncode)


class _Line:
    """A keeper's line to one fork server, on the keeper's loop."""

    def __init__(self, server: ForkServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._children: dict[int, Child] = {}
        """Those that have not ended, by order."""
        self._num_orders = 0
        self._adopting: tuple[list[Adopted[Child]], asyncio.Future[list[Adopted[Child]]]] | None = None
        self._make_adopted: Callable[[WorkerAdopted, list[int]], Adopted[Child]]
        self._loop.add_reader(sock, self._on_readable)

    @property
    def is_open(self) -> bool:
        """The fork server has not ended, as far as this keeper has heard."""
        return self._sock.fileno() >= 0

    def order(self, start: WorkerStart, link_bytes_per_s: float | None, fds: Sequence[int], child: Child) -> None:
        """Have a worker forked. ``fds``: see ``fork_orders.NUM_FIXED_FDS``. Raises OSError; it is a ConnectionError
        where the fork server has ended, and the line is closed then."""
        self._num_orders += 1
        order = ForkWorker(order=self._num_orders, start=start, link_bytes_per_s=link_bytes_per_s)
        try:
            socket.send_fds(self._sock, [msgspec.json.encode(order)], fds)
        except ConnectionError:
            self._on_server_end()
            raise
        self._children[order.order] = child

    def adopt(self, make: Callable[[WorkerAdopted, list[int]], Adopted[Child]]) -> asyncio.Future[list[Adopted[Child]]]:
        """Take over the workers that an earlier keeper has left. ``make``: of what comes with each. Raises OSError."""
        self._make_adopted = make
        self._adopting = [], self._loop.create_future()
        socket.send_fds(self._sock, [msgspec.json.encode(AdoptWorkers())], ())
        return self._adopting[1]

    def close(self) -> None:
        """Hear no more; what was forked and lives is ended by the fork server. Idempotent."""
        if self.is_open:
            self._loop.remove_reader(self._sock)
            self._sock.close()
        if self._adopting is not None and not self._adopting[1].done():
            self._adopting[1].set_result(self._adopting[0])
        for child in self._children.values():
            child.lose_fork_server()
        self._children.clear()

    def _on_readable(self) -> None:
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(self._sock, MAX_MESSAGE_BYTES, NUM_ADOPTED_FDS)
            except BlockingIOError:
                return
            except ConnectionError:
                message, fds = b"", []
            if not message:
                self._on_server_end()
                return
            event = msgspec.json.decode(message, type=ForkEvent)
            if isinstance(event, WorkerForked):
                self._children[event.order].on_forked(event.pid, fds[0])
            elif isinstance(event, WorkerEnded):
                self._children.pop(event.order).on_end(event.returncode)
            elif isinstance(event, WorkerAdopted):
                self._on_adopted(event, list(fds))
            elif isinstance(event, AdoptionOver):
                if self._adopting is not None:
                    self._adopting[1].set_result(self._adopting[0])
            else:
                log.error("a worker was not started: %s", event.why)
                self._children.pop(event.order).on_end(1)

    def _on_adopted(self, event: WorkerAdopted, fds: list[int]) -> None:
        assert self._adopting is not None, "it was asked for none"
        pidfd, *others = fds
        adopted = self._make_adopted(event, others)
        self._children[event.order] = adopted.handle
        adopted.handle.on_forked(event.pid, pidfd)
        self._adopting[0].append(adopted)

    def _on_server_end(self) -> None:
        """Its workers have ended with it."""
        self.close()
        FORK_SERVERS.forget(self._server)


class Keeper:
    """Starts workers on one host, and keeps what they share there."""

    def __init__(self, folder: Path, worker_command: Sequence[str] = WORKER_COMMAND) -> None:
        """``folder``: private, for sockets; ``worker_command``: the program that forks workers."""
        self._folder = folder
        self._worker_command = tuple(worker_command)
        self._lines: dict[object, _Line] = {}
        """By program and environment."""
        self._use = ExitStack()
        self._use.enter_context(fork_servers_kept())
        self._shared_copy_fd: int | None = None
        """Memory for a copy of the parameters; empty until a worker sleeps."""

    def spawn(self, start: WorkerStart, placement: Placement, *, has_far_peers: bool) -> Child:
        """Start one life of a worker. Raises OSError; then nothing of it is left."""
        if self._shared_copy_fd is None:
            self._shared_copy_fd = open_shared_copy()
        with ExitStack() as inherited:  # the process has its own; these go at the end, and with any failure
            socks, addresses = self._listen(start, placement, has_far_peers)
            for sock in socks:
                inherited.enter_context(sock)
            flag, flag_fd = StepFlag.open()
            inherited.callback(os.close, flag_fd)
            hear_fd, beat_fd = os.pipe()
            inherited.callback(os.close, beat_fd)
            start = msgspec.structs.replace(start, spec=msgspec.structs.replace(start.spec, shared_copy_fd=None))
            folder_fd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            inherited.callback(os.close, folder_fd)
            fds = (
                folder_fd, *standard_fds(inherited), self._shared_copy_fd, beat_fd, flag_fd, hear_fd,
                *(sock.fileno() for sock in socks),
            )
            try:
                child = Child(Listener(hear_fd, time.monotonic()), flag, addresses)
                num_threads = start.spec.num_threads
                try:
                    self._line_for(num_threads, placement).order(start, placement.bytes_per_s, fds, child)
                except ConnectionError:  # the fork server has just ended: another is started
                    self._line_for(num_threads, placement).order(start, placement.bytes_per_s, fds, child)
            except BaseException:
                os.close(hear_fd)
                flag.close()
                raise
        return child

    async def adopt(self, num_threads: int) -> list[Adopted[Child]]:
        """Take over the workers that an earlier keeper of this folder has left. Raises OSError."""
        return await self._line_for(num_threads, Placement()).adopt(self._adopted)

    def _adopted(self, event: WorkerAdopted, fds: list[int]) -> Adopted[Child]:
        shared_copy, flag_fd, hear_fd = fds
        if self._shared_copy_fd is None:
            self._shared_copy_fd = shared_copy
        else:  # the host has one
            os.close(shared_copy)
        flag = StepFlag.attach(flag_fd)
        flag.name(NO_STEP)  # the numbers of steps begin again
        address = Addresses(self._near(event.worker, event.life), None)
        child = Child(Listener(hear_fd, time.monotonic()), flag, address)
        return Adopted(event.worker, event.life, event.spec_digest, child)

    def _near(self, worker: WorkerId, life: int) -> str:
        return f"unix:{self._folder}/link-{worker}.{life}"

    def _line_for(self, num_threads: int, placement: Placement) -> _Line:
        """The line to the fork server of this worker's program, namespace and environment. Raises OSError."""
        netns = placement.netns
        command = (*(("ip", "netns", "exec", netns) if netns else ()), *self._worker_command)
        env = worker_environment(num_threads)
        key = (command, tuple(sorted(env.items())))
        line = self._lines.get(key)
        if line is None or not line.is_open:
            line = self._lines[key] = _Line(*FORK_SERVERS.connect(command, env))
        return line

    def _listen(
        self, start: WorkerStart, placement: Placement, has_far_peers: bool
    ) -> tuple[list[socket.socket], Addresses]:
        """The sockets at which peers reach this life."""
        # Lives before this one have left their names behind, and so has an attempt at it that never became a process.
        for name in self._folder.glob(f"link-{start.spec.worker_id}.*"):
            name.unlink(missing_ok=True)
        near = self._near(start.spec.worker_id, start.epoch)
        socks = [listening_socket(near, seqpacket=True)]
        if not has_far_peers:
            return socks, Addresses(near, None)
        try:
            with entered(placement.netns):
                socks.append(listening_socket(f"tcp:{placement.host}:0"))
        except BaseException:
            socks[0].close()
            raise
        return socks, Addresses(near, f"tcp:{placement.host}:{socks[1].getsockname()[1]}")

    def empty_shared_copy(self) -> None:
        """As after a restart of the host: nothing is left in its copy of the parameters."""
        if self._shared_copy_fd is not None:
            os.ftruncate(self._shared_copy_fd, 0)

    def close(self) -> None:
        """Give back what workers share; they have ended. Idempotent."""
        for line in self._lines.values():
            line.close()
        self._use.close()
        if self._shared_copy_fd is not None:
            os.close(self._shared_copy_fd)
            self._shared_copy_fd = None


def standard_fds(until: ExitStack) -> tuple[int, int]:
    """This process's standard output and error; a descriptor of nothing for one that is closed, ``until`` then."""
    found = []
    for fd in (1, 2):
        try:
            os.fstat(fd)
        except OSError:
            fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            until.callback(os.close, fd)
        found.append(fd)
    return found[0], found[1]


def worker_environment(num_threads: int) -> dict[str, str]:
    """A process of ours: this package importable, thread counts and bounds of caches in force before any
    import, no secret."""
    env = child_environment()
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        env[variable] = str(num_threads)
    bound_onednn_caches(env)
    return env

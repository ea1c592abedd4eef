"""Worker processes of one host: how one starts, what it inherits, how it ends, and what is known of it while it runs.

A worker never outlives its keeper and never comes from ``fork``: it is a fresh interpreter that gets its configuration
on standard input. All calls on one asyncio loop, whose thread must outlive the workers (the kernel's parent-death
signal goes with the thread that started them).

Not here: which workers there are, which life is the present one, and when a silent one is given up (``engine.crew``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

import jettison
from jettison.config import API_KEY_VARIABLE
from jettison.device.kernels.onednn import bound_onednn_caches
from jettison.device.sharedcopy import open_shared_copy
from jettison.live.machine.netns import Placement, entered
from jettison.live.wire.heartbeat import Listener, Patience
from jettison.live.wire.stepflag import StepFlag
from jettison.live.wire.worker_config import WorkerConfig, WorkerStart
from jettison.transport.sockets import listening_socket

log = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-P", "-m", "jettison.live.worker.main")
"""``-P``: the current folder must not lend modules to a worker."""


class Addresses(NamedTuple):
    """Where peers reach one life of a worker: over shared memory from its own host, else over a network."""

    near: str
    far: str | None


class Child:
    """One worker's process. Made by ``Keeper.spawn``; see ``engine.spawner.Handle``, which it is."""

    def __init__(
        self, popen: subprocess.Popen[bytes], pidfd: int, listener: Listener, flag: StepFlag, addresses: Addresses
    ) -> None:
        self.pid = popen.pid
        self.addresses = addresses
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._popen = popen
        self._pidfd = pidfd
        self._listener: Listener | None = listener
        self._flag: StepFlag | None = flag
        asyncio.get_running_loop().add_reader(pidfd, self._on_end)

    def kill(self) -> None:
        """See ``Handle``."""
        if not self.ended.done():
            self._popen.kill()

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
        if self._listener is None:
            return None
        self._listener.read(now_s)
        self._listener.excuse(away_s)
        return self._listener.why_hung(now_s, patience)

    def configure(self, config: WorkerConfig) -> None:
        """Tell the process what it is; nothing where it has ended before."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(msgspec.json.encode(config))
            self._popen.stdin.close()
        except BrokenPipeError:
            log.error("worker %d ended before it was configured", config.spec.worker_id)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        returncode = self._popen.wait()  # it has ended: this only collects the code
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._flag is not None:
            self._flag.close()
            self._flag = None
        self.ended.set_result(returncode)


class Keeper:
    """Starts workers on one host, and keeps what they share there."""

    def __init__(self, folder: Path, worker_command: Sequence[str] = WORKER_COMMAND) -> None:
        """``folder``: private, for sockets; ``worker_command``: the program that is run."""
        self._folder = folder
        self._worker_command = tuple(worker_command)
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
            config = WorkerConfig(
                **msgspec.structs.asdict(start) | {
                    "spec": msgspec.structs.replace(start.spec, shared_copy_fd=self._shared_copy_fd)
                },
                parent_pid=os.getpid(), listen_fds=[sock.fileno() for sock in socks],
                beat_fd=beat_fd, flag_fd=flag_fd,
                link_bytes_per_s=placement.bytes_per_s,
            )  # fmt: skip
            netns = placement.netns
            try:
                popen = subprocess.Popen(
                    (*(("ip", "netns", "exec", netns) if netns else ()), *self._worker_command),
                    stdin=subprocess.PIPE,
                    pass_fds=(*config.listen_fds, beat_fd, flag_fd, self._shared_copy_fd),
                    env=worker_environment(start.spec.num_threads),
                )
                child = Child(popen, _watchable(popen), Listener(hear_fd, time.monotonic()), flag, addresses)
            except BaseException:
                os.close(hear_fd)
                raise
        child.configure(config)
        return child

    def _listen(
        self, start: WorkerStart, placement: Placement, has_far_peers: bool
    ) -> tuple[list[socket.socket], Addresses]:
        """The sockets at which peers reach this life."""
        # Lives before this one have left their names behind, and so has an attempt at it that never became a process.
        for name in self._folder.glob(f"link-{start.spec.worker_id}.*"):
            name.unlink(missing_ok=True)
        near = f"unix:{self._folder}/link-{start.spec.worker_id}.{start.epoch}"
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
        if self._shared_copy_fd is not None:
            os.close(self._shared_copy_fd)
            self._shared_copy_fd = None


def _watchable(popen: subprocess.Popen[bytes]) -> int:
    """A pidfd of a new process. Raises OSError; then the process, which could not be watched, has ended."""
    try:
        return os.pidfd_open(popen.pid)
    except BaseException:
        popen.kill()
        popen.wait()
        raise


def worker_environment(num_threads: int) -> dict[str, str]:
    """A process of ours: this package importable, thread counts and bounds of caches in force before any
    import, no API key."""
    env = dict(os.environ)
    env.pop(API_KEY_VARIABLE, None)
    package_root = str(Path(jettison.__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        env[variable] = str(num_threads)
    bound_onednn_caches(env)
    return env

"""Starts the worker processes of one machine, links them, watches them, starts them again, ends them.

A worker never outlives its controller and never comes from ``fork``: it is a fresh interpreter that gets its
configuration on standard input. All calls on one asyncio loop, whose thread must outlive the workers (the
kernel's parent-death signal goes with the thread that started them).

A worker that is silent or stuck for too long (``live.wire.heartbeat``) is declared lost: it is hung up on, killed, and
told of like one that has ended. Should it wake up all the same (``kill_hung=False``, or a process that cannot be
killed yet), no one end hears it: its control connection is closed, its links are fenced, its life is over; it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import jettison
from jettison import errors
from jettison.config import API_KEY_VARIABLE
from jettison.device.kernels.onednn import bound_onednn_caches
from jettison.device.sharedcopy import open_shared_copy
from jettison.errors import JettisonError, UserError, WorkerLostError
from jettison.live.machine.address_space import shortage_hint
from jettison.live.machine.netns import Placement, entered
from jettison.live.machine.run_folder import RunFolder
from jettison.live.wire import messages as m
from jettison.live.wire.channel import ControlServer
from jettison.live.wire.heartbeat import Listener
from jettison.live.wire.stepflag import StepFlag
from jettison.live.wire.worker_config import LinkKind, WorkerConfig, WorkerSpec
from jettison.transport.sockets import listening_socket
from jettison.types import WorkerId

__all__ = ["LocalLauncher", "WorkerSpec"]

log = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-P", "-m", "jettison.live.worker.main")
"""``-P``: the current folder must not lend modules to a worker."""

RESTART_TIMEOUT_S = 300.0
"""How long a restarted worker may take to load; it holds up the restart of others."""

_LONELY_S = 1.0
"""How long a worker may take to end once its control connection has."""

OnEvent = Callable[[WorkerId, m.Event], None]
OnExit = Callable[[WorkerId, int], None]


@dataclass(slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    pidfd: int
    ended: asyncio.Future[int]
    life: int
    """Which life of its worker id it is."""
    returncode: int | None = None
    reported: bool = False
    """Its end has been told, or needs not be: it does not count any more."""
    listener: Listener | None = None
    flag: StepFlag | None = None
    """Names the step that it is to give up; gone when it has ended."""

    @property
    def is_up(self) -> bool:
        """It counts as a live worker, or as one that starts."""
        return self.returncode is None and not self.reported


class LocalLauncher:
    """Worker processes on this machine, all pairs linked through shared memory (or TCP on loopback).

    ``on_event`` gets every event but the start's; ``on_exit`` is called once for a worker that ends before
    ``close``, after its last event. ``worker_command`` replaces the program that is run (tests). ``placements`` put
    workers into network namespaces of this machine, with TCP between them (experiments on a real, slow network).
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        on_event: OnEvent,
        on_exit: OnExit,
        *,
        link_kind: LinkKind = "shm",
        placements: Mapping[WorkerId, Placement] | None = None,
        worker_command: Sequence[str] = WORKER_COMMAND,
        start_timeout_s: float = 600.0,
        heartbeat_timeout_s: float = 1.5,
        step_timeout_s: float = 300.0,
        kill_hung: bool = True,
    ) -> None:
        self._specs = {spec.worker_id: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise ValueError("two workers of one id")
        self._on_event = on_event
        self._on_exit = on_exit
        self._placements = dict(placements or {})
        self._link_kind: LinkKind = "tcp" if placements else link_kind
        self._worker_command = tuple(worker_command)
        self._start_timeout_s = start_timeout_s
        self._secret = secrets.token_bytes(32)
        self._server = ControlServer(self._secret, self._on_worker_event, self._on_worker_lost)
        self._processes: dict[WorkerId, _Process] = {}
        self._starting: dict[WorkerId, asyncio.Future[m.WorkerReady]] = {}
        self._addresses: dict[WorkerId, str] = {}
        """Where the present life of each worker listens for peers."""
        self._folder: RunFolder | None = None
        self._shared_copies: dict[str | None, int] = {}
        """Memory of each machine (network namespace) for a copy of the parameters; empty until a worker sleeps."""
        self._closing = False
        self._hung_after_s = (heartbeat_timeout_s, step_timeout_s)
        self.kill_hung = kill_hung
        """Whether a worker that is given up is killed. Tests leave it alive, to see what it does when it wakes up."""
        self._listening: asyncio.Task[None] | None = None
        self._old: list[_Process] = []
        """Lives that were replaced and may not have ended yet."""

    @property
    def pids(self) -> dict[WorkerId, int]:
        """Process ids of the workers that live."""
        return {worker: process.popen.pid for worker, process in self._processes.items() if process.is_up}

    async def start(self) -> list[m.WorkerReady]:
        """Start all workers and wait until each is loaded and linked.

        Raises the worker's own UserError (ModelError, BudgetError, ...), else WorkerLostError; then nothing is
        left running. A launcher starts once.
        """
        if self._folder is not None:
            raise JettisonError("this launcher was started before")
        self._folder = RunFolder()
        loop = asyncio.get_running_loop()
        try:
            await self._server.start(self._unix_address("control"))
            self._starting = {worker: loop.create_future() for worker in self._specs}
            self._spawn_all(loop)
            async with asyncio.timeout(self._start_timeout_s):
                ready = list(await asyncio.gather(*self._starting.values()))
            self._listening = asyncio.create_task(self._listen_to_hearts(), name="jettison-hearts")
            return ready
        except TimeoutError:
            await self.close(0.0)
            waiting = [worker for worker, future in self._starting.items() if future.cancelled() or not future.done()]
            raise WorkerLostError(f"workers {waiting} were not ready in {self._start_timeout_s:.0f} s") from None
        except JettisonError as error:
            await self.close(0.0)
            raise self._root_cause(error) from None
        except BaseException:
            await self.close(0.0)
            raise

    def life(self, worker_id: WorkerId) -> int:
        """Which life of a worker is the present one."""
        return self._processes[worker_id].life

    async def restart(self, worker: WorkerId) -> m.WorkerReady:
        """Start a lost worker again, empty and linked to all that live. Raises as ``start`` does; then nothing of it is
        left.

        Raises OSError where the machine has no process, descriptor or address for it; it may be tried again.
        One at a time. When this returns, the new life has not ended, and ``on_exit`` will tell if it does.
        """
        before = self._processes[worker]
        assert before.reported and self._folder is not None, "only a lost worker is started again"
        loop = asyncio.get_running_loop()
        life = before.life + 1
        self._server.lives[worker] = life
        self._starting[worker] = loop.create_future()
        sock, address = self._listen(worker, life)
        peers = {peer: self._addresses[peer] for peer, p in self._processes.items() if p is not before and p.is_up}
        self._addresses[worker] = address
        try:
            process = self._spawn(worker, self._config(worker, life, sock, peers, []), loop)
        finally:
            sock.close()
        self._old.append(before)
        try:
            async with asyncio.timeout(RESTART_TIMEOUT_S):
                ready = await self._starting[worker]
            if process.reported or not process.is_up:
                raise WorkerLostError(f"worker {worker} ended as soon as it was ready")
            return ready
        except TimeoutError:
            raise WorkerLostError(f"worker {worker} was not ready in {RESTART_TIMEOUT_S:.0f} s") from None
        finally:
            if not self._starting[worker].done() or self._starting[worker].exception() is not None:
                process.reported = True
                self._server.hang_up(worker)
                _kill(process)

    def declare_lost(self, worker: WorkerId, why: str) -> None:
        """Give a worker up: hear nothing of it any more, kill it, and tell ``on_exit``. Idempotent.

        Of one that is still starting, the caller that waits for its start is told instead.
        """
        process = self._processes[worker]
        if process.reported or self._closing:
            return
        log.error("worker %d is given up: %s", worker, why)
        process.reported = True
        self._server.hang_up(worker)
        if self.kill_hung:
            _kill(process)
        starting = self._starting[worker]
        if starting.done():
            self._on_exit(worker, -signal.SIGKILL)
        else:
            starting.set_exception(WorkerLostError(f"worker {worker} was given up while it was starting: {why}"))

    def send(self, worker_id: WorkerId, command: m.Command) -> None:
        """Queue a command; never blocks. To a worker that is gone it is dropped: ``on_exit`` tells."""
        self._server.send(worker_id, command)

    def abandon(self, worker_id: WorkerId, step_id: int) -> None:
        """Have a worker give a step up at its next safepoint. It need not read any message for it; never blocks."""
        flag = self._processes[worker_id].flag
        if flag is not None:
            flag.name(step_id)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Stop all workers, kill those that need longer than ``timeout_s``, remove every trace. Idempotent."""
        self._closing = True
        if self._listening is not None:
            self._listening.cancel()
        for worker in self._processes:
            self._server.send(worker, m.Stop())
        for process in (*self._old, *self._processes.values()):
            if process.reported:
                _kill(process)
        ends = [process.ended for process in (*self._old, *self._processes.values())]
        if ends:
            await asyncio.wait(ends, timeout=timeout_s)
            for worker, process in self._processes.items():
                if not process.ended.done():
                    if timeout_s > 0:  # else it was given none: a failed start is no fault of this worker
                        log.warning("worker %d did not stop in time and is killed", worker)
                    process.popen.kill()
            await asyncio.wait(ends)
        self._server.close()
        for future in self._starting.values():
            if not future.cancel() and not future.cancelled():
                future.exception()  # seen: it was raised by start, or another one was
        while self._shared_copies:
            os.close(self._shared_copies.popitem()[1])
        if self._folder is not None:
            self._folder.remove()

    def empty_shared_copies(self) -> None:
        """As after a restart of the machine: nothing is left in its copies of the parameters (tests)."""
        for fd in self._shared_copies.values():
            os.ftruncate(fd, 0)

    # --- starting

    def _spawn_all(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind every worker's listening socket first, so that peers find it whichever worker is up earlier."""
        listeners = {worker: self._listen(worker, 0) for worker in self._specs}
        self._addresses = {worker: address for worker, (_, address) in listeners.items()}
        try:
            for worker in self._specs:
                lower = {peer: address for peer, address in self._addresses.items() if peer < worker}
                higher = [peer for peer in self._addresses if peer > worker]
                self._spawn(worker, self._config(worker, 0, listeners[worker][0], lower, higher), loop)
        finally:
            for sock, _ in listeners.values():
                sock.close()

    def _config(
        self, worker: WorkerId, life: int, sock: socket.socket, connect_to: dict[WorkerId, str],
        accept_from: list[WorkerId],
    ) -> WorkerConfig:
        return WorkerConfig(
            spec=msgspec.structs.replace(self._specs[worker], starts_empty=life > 0),
            secret_hex=self._secret.hex(),
            epoch=life,
            parent_pid=os.getpid(),
            control_address=self._unix_address("control"),
            link_kind=self._link_kind,
            link_bytes_per_s=self._placements.get(worker, Placement()).bytes_per_s,
            listen_fd=sock.fileno(),
            connect_to=connect_to,
            accept_from=accept_from,
            start_timeout_s=self._start_timeout_s if life == 0 else RESTART_TIMEOUT_S,
            beat_fd=-1,
            flag_fd=-1,
            beat_interval_s=beat_interval_s(*self._hung_after_s),
            log_level=logging.getLevelName(log.getEffectiveLevel()),
        )

    def _unix_address(self, name: str) -> str:
        assert self._folder is not None, "not started"
        return f"unix:{self._folder.path}/{name}"

    def _listen(self, worker: WorkerId, life: int) -> tuple[socket.socket, str]:
        if self._link_kind == "tcp":
            placement = self._placements.get(worker, Placement())
            with entered(placement.netns):
                sock = listening_socket(f"tcp:{placement.host}:0")
            return sock, f"tcp:{placement.host}:{sock.getsockname()[1]}"
        address = self._unix_address(f"link-{worker}.{life}")
        assert self._folder is not None
        # Lives before this one have left their names behind, and so has an attempt at it that never became a process.
        for name in self._folder.path.glob(f"link-{worker}.*"):
            name.unlink(missing_ok=True)
        return listening_socket(address, seqpacket=True), address

    def _spawn(self, worker: WorkerId, config: WorkerConfig, loop: asyncio.AbstractEventLoop) -> _Process:
        netns = self._placements.get(worker, Placement()).netns
        if netns not in self._shared_copies:
            self._shared_copies[netns] = open_shared_copy()
        spec = msgspec.structs.replace(config.spec, shared_copy_fd=self._shared_copies[netns])
        flag, flag_fd = StepFlag.open()
        try:
            listen_fd, beat_fd = os.pipe()
        except BaseException:
            os.close(flag_fd)
            raise
        config = msgspec.structs.replace(config, spec=spec, beat_fd=beat_fd, flag_fd=flag_fd)
        try:
            popen = subprocess.Popen(
                (*(("ip", "netns", "exec", netns) if netns else ()), *self._worker_command),
                stdin=subprocess.PIPE,
                pass_fds=(config.listen_fd, beat_fd, flag_fd, self._shared_copies[netns]),
                env=worker_environment(config.spec.num_threads),
            )
            process = _Process(popen, _watchable(popen), loop.create_future(), config.epoch)
        except BaseException:
            os.close(listen_fd)
            raise
        finally:
            os.close(beat_fd)
            os.close(flag_fd)
        process.listener, process.flag = Listener(listen_fd, time.monotonic()), flag
        self._processes[worker] = process
        loop.add_reader(process.pidfd, self._on_process_end, worker, process, loop)
        assert popen.stdin is not None
        try:
            popen.stdin.write(msgspec.json.encode(config))
            popen.stdin.close()
        except BrokenPipeError:
            log.error("worker %d ended before it was configured", worker)
        return process

    def _root_cause(self, error: JettisonError) -> JettisonError:
        """What a person can mend goes before the links that broke because of it."""
        failed = [future.exception() for future in self._starting.values() if future.done() and not future.cancelled()]
        return next((other for other in failed if isinstance(other, UserError)), error)

    # --- watching

    def _on_worker_event(self, worker: WorkerId, event: m.Event) -> None:
        future = self._starting.get(worker)
        if isinstance(event, m.WorkerReady | m.WorkerStartFailed):
            if future is None or future.done():
                log.error("worker %d reports its start again", worker)
            elif isinstance(event, m.WorkerReady):
                listener = self._processes[worker].listener
                if listener is not None:  # loading is not hanging: from here on it counts
                    listener.begin(time.monotonic())
                future.set_result(event)
            else:
                future.set_exception(_start_error(event))
        elif not self._closing:
            self._on_event(worker, event)

    def _on_worker_lost(self, worker: WorkerId) -> None:
        """The control connection ended. A worker that lives on without it is of no use."""
        process = self._processes.get(worker)
        if process is not None and process.returncode is None and not self._closing:
            asyncio.get_running_loop().call_later(_LONELY_S, _kill, process)
        if process is not None:
            self._report_exit(worker, process)

    def _on_process_end(self, worker: WorkerId, process: _Process, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        process.returncode = process.popen.wait()  # it has ended: this only collects the code
        if process.listener is not None:
            process.listener.close()
            process.listener = None
        if process.flag is not None:
            process.flag.close()
            process.flag = None
        process.ended.set_result(process.returncode)
        self._report_exit(worker, process)

    def _report_exit(self, worker: WorkerId, process: _Process) -> None:
        """Tell of an exit once both the process and its connection are over: its last events come first."""
        if process.returncode is None or process.reported or self._server.is_connected(worker):
            return
        process.reported = True
        future = self._starting[worker]
        if not future.done():
            future.set_exception(
                WorkerLostError(
                    f"worker {worker} ended with code {process.returncode} while it was starting{shortage_hint()}"
                )
            )
        elif not self._closing:
            self._on_exit(worker, process.returncode)

    async def _listen_to_hearts(self) -> None:
        """Declare lost who is silent or stuck. The listener's own absences are no worker's fault."""
        silence_s, stuck_s = self._hung_after_s
        pause_s = beat_interval_s(silence_s, stuck_s)
        looked_s = time.monotonic()
        while silence_s or stuck_s:
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()
            away_s = now_s - looked_s - pause_s
            looked_s = now_s
            for worker, process in list(self._processes.items()):
                starting = self._starting[worker]
                if process.listener is None or process.reported or not starting.done():
                    continue
                process.listener.read(now_s)
                if away_s > pause_s:
                    process.listener.excuse(away_s)
                why = process.listener.verdict(now_s, silence_s, stuck_s)
                if why is not None:
                    self.declare_lost(worker, why)


def beat_interval_s(silence_s: float, stuck_s: float) -> float:
    """Several beats before silence means something; and little is added to the time that finding it takes.

    A beat may be read one interval after it was sent, and silence seen one interval after it is too long.
    """
    return max(0.02, min(1.0, (silence_s or stuck_s or 1.0) / 10))


def _watchable(popen: subprocess.Popen[bytes]) -> int:
    """A pidfd of a new process. Raises OSError; then the process, which could not be watched, has ended."""
    try:
        return os.pidfd_open(popen.pid)
    except BaseException:
        popen.kill()
        popen.wait()
        raise


def _kill(process: _Process) -> None:
    if process.returncode is None:
        process.popen.kill()


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


def _start_error(event: m.WorkerStartFailed) -> JettisonError:
    """The error that the worker met, as its own class where that is one of ours."""
    kind = getattr(errors, event.error_type, None)
    if not (isinstance(kind, type) and issubclass(kind, JettisonError)):
        kind = UserError if event.user_error else JettisonError
    return kind(event.message)

"""Starts the worker processes of one machine, links them, watches them, ends them.

A worker never outlives its controller and never comes from ``fork``: it is a fresh interpreter that gets its
configuration on standard input. All calls on one asyncio loop, whose thread must outlive the workers (the
kernel's parent-death signal goes with the thread that started them).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import jettison
from jettison import errors
from jettison.config import API_KEY_VARIABLE
from jettison.errors import JettisonError, UserError, WorkerLostError
from jettison.live import messages as m
from jettison.live.channel import ControlServer
from jettison.live.worker_config import LinkKind, WorkerConfig, WorkerSpec
from jettison.transport.sockets import listening_socket
from jettison.types import WorkerId

__all__ = ["LocalLauncher", "WorkerSpec"]

log = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-P", "-m", "jettison.live.worker_main")
"""``-P``: the current folder must not lend modules to a worker."""

_LONELY_S = 1.0
"""How long a worker may take to end once its control connection has."""

OnEvent = Callable[[WorkerId, m.Event], None]
OnExit = Callable[[WorkerId, int], None]


@dataclass(slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    pidfd: int
    ended: asyncio.Future[int]
    returncode: int | None = None
    reported: bool = False


class LocalLauncher:
    """Worker processes on this machine, all pairs linked through shared memory (or TCP on loopback).

    ``on_event`` gets every event but the start's; ``on_exit`` is called once for a worker that ends before
    ``close``, after its last event. ``worker_command`` replaces the program that is run (tests).
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        on_event: OnEvent,
        on_exit: OnExit,
        *,
        link_kind: LinkKind = "shm",
        worker_command: Sequence[str] = WORKER_COMMAND,
        start_timeout_s: float = 600.0,
    ) -> None:
        self._specs = {spec.worker_id: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise ValueError("two workers of one id")
        self._on_event = on_event
        self._on_exit = on_exit
        self._link_kind = link_kind
        self._worker_command = tuple(worker_command)
        self._start_timeout_s = start_timeout_s
        self._secret = secrets.token_bytes(32)
        self._server = ControlServer(self._secret, self._on_worker_event, self._on_worker_lost)
        self._processes: dict[WorkerId, _Process] = {}
        self._starting: dict[WorkerId, asyncio.Future[m.WorkerReady]] = {}
        self._folder: Path | None = None
        self._closing = False

    @property
    def pids(self) -> dict[WorkerId, int]:
        """Process ids of the workers that live."""
        return {worker: process.popen.pid for worker, process in self._processes.items() if process.returncode is None}

    async def start(self) -> list[m.WorkerReady]:
        """Start all workers and wait until each is loaded and linked.

        Raises the worker's own UserError (ModelError, BudgetError, ...), else WorkerLostError; then nothing is
        left running. A launcher starts once.
        """
        if self._folder is not None:
            raise JettisonError("this launcher was started before")
        self._folder = Path(tempfile.mkdtemp(prefix="jettison-"))  # mode 0700
        control_address = f"unix:{self._folder}/control"
        loop = asyncio.get_running_loop()
        try:
            await self._server.start(control_address)
            self._starting = {worker: loop.create_future() for worker in self._specs}
            self._spawn_all(control_address, loop)
            async with asyncio.timeout(self._start_timeout_s):
                return list(await asyncio.gather(*self._starting.values()))
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

    def send(self, worker_id: WorkerId, command: m.Command) -> None:
        """Queue a command; never blocks. To a worker that is gone it is dropped: ``on_exit`` tells."""
        self._server.send(worker_id, command)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Stop all workers, kill those that need longer than ``timeout_s``, remove every trace. Idempotent."""
        self._closing = True
        for worker in self._processes:
            self._server.send(worker, m.Stop())
        ends = [process.ended for process in self._processes.values()]
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
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- starting

    def _spawn_all(self, control_address: str, loop: asyncio.AbstractEventLoop) -> None:
        """Bind every worker's listening socket first, so that peers find it whoever is up earlier."""
        listeners = {worker: self._listen(worker) for worker in self._specs}
        addresses = {worker: address for worker, (_, address) in listeners.items()}
        try:
            for worker, spec in self._specs.items():
                sock = listeners[worker][0]
                config = WorkerConfig(
                    spec=spec,
                    secret_hex=self._secret.hex(),
                    epoch=0,
                    parent_pid=os.getpid(),
                    control_address=control_address,
                    link_kind=self._link_kind,
                    listen_fd=sock.fileno(),
                    connect_to={peer: address for peer, address in addresses.items() if peer < worker},
                    accept_from=[peer for peer in addresses if peer > worker],
                    start_timeout_s=self._start_timeout_s,
                    log_level=logging.getLevelName(log.getEffectiveLevel()),
                )
                self._spawn(worker, config, loop)
        finally:
            for sock, _ in listeners.values():
                sock.close()

    def _listen(self, worker: WorkerId) -> tuple[socket.socket, str]:
        if self._link_kind == "tcp":
            sock = listening_socket("tcp:127.0.0.1:0")
            return sock, f"tcp:127.0.0.1:{sock.getsockname()[1]}"
        address = f"unix:{self._folder}/link-{worker}"
        return listening_socket(address, seqpacket=True), address

    def _spawn(self, worker: WorkerId, config: WorkerConfig, loop: asyncio.AbstractEventLoop) -> None:
        popen = subprocess.Popen(
            self._worker_command,
            stdin=subprocess.PIPE,
            pass_fds=(config.listen_fd,),
            env=worker_environment(config.spec.num_threads),
        )
        process = _Process(popen, os.pidfd_open(popen.pid), loop.create_future())
        self._processes[worker] = process
        loop.add_reader(process.pidfd, self._on_process_end, worker, process, loop)
        assert popen.stdin is not None
        try:
            popen.stdin.write(msgspec.json.encode(config))
            popen.stdin.close()
        except BrokenPipeError:
            log.error("worker %d ended before it was configured", worker)

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
        self._report_exit(worker)

    def _on_process_end(self, worker: WorkerId, process: _Process, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        process.returncode = process.popen.wait()  # it has ended: this only collects the code
        process.ended.set_result(process.returncode)
        self._report_exit(worker)

    def _report_exit(self, worker: WorkerId) -> None:
        """Tell of an exit once both the process and its connection are over: its last events come first."""
        process = self._processes.get(worker)
        if process is None or process.returncode is None or process.reported or self._server.is_connected(worker):
            return
        process.reported = True
        future = self._starting[worker]
        if not future.done():
            future.set_exception(
                WorkerLostError(f"worker {worker} ended with code {process.returncode} while it was starting")
            )
        elif not self._closing:
            self._on_exit(worker, process.returncode)


def _kill(process: _Process) -> None:
    if process.returncode is None:
        process.popen.kill()


def worker_environment(num_threads: int) -> dict[str, str]:
    """A process of ours: this package importable, thread counts in force before any import, no API key."""
    env = dict(os.environ)
    env.pop(API_KEY_VARIABLE, None)
    package_root = str(Path(jettison.__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        env[variable] = str(num_threads)
    return env


def _start_error(event: m.WorkerStartFailed) -> JettisonError:
    """The error that the worker met, as its own class where that is one of ours."""
    kind = getattr(errors, event.error_type, None)
    if not (isinstance(kind, type) and issubclass(kind, JettisonError)):
        kind = UserError if event.user_error else JettisonError
    return kind(event.message)

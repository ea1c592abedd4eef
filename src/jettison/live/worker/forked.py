"""The fork server: a process that has imported all that a worker imports, and forks one for each life.

An import of torch takes a second or more of a processor; a fork takes milliseconds, and its pages of code and modules
are shared. The process has one thread, computes nothing, and opens no device, so what it forks starts as a fresh
interpreter would. A worker dies with it (the kernel's parent-death signal), and it ends with the process that it was
told, or when all processes that have its socket have closed it. A keeper that goes takes its workers along, at once or
where they are told to outlive it (``WorkerStart.orphan_timeout_s``) after that time, unless another one adopts them.

    standard input: a socket; each packet brings one end of a keeper's line, on which ``wire.fork_orders`` travel

Not here: what a worker does (``worker.main``), and when a fork server is started (``host.forkserver``).
"""

from __future__ import annotations

import gc
import logging
import math
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import msgspec

from jettison.live.machine.endings import die_with
from jettison.live.machine.process_name import FORK_SERVER, name_process
from jettison.live.wire.fork_orders import (
    MAX_FDS,
    MAX_MESSAGE_BYTES,
    NUM_FIXED_FDS,
    AdoptionOver,
    AdoptWorkers,
    ForkEvent,
    ForkFailed,
    ForkWorker,
    KeeperOrder,
    WorkerAdopted,
    WorkerEnded,
    WorkerForked,
)
from jettison.live.wire.worker_config import WorkerConfig, WorkerStart, digest_of

RunWorker = Callable[[WorkerConfig], int]
"""Serves as one worker, to its end; returns the exit code."""


class _Worker:
    """A forked process that has not been reaped."""

    def __init__(
        self, pid: int, pidfd: int, line: socket.socket, order: int, start: WorkerStart, kept: tuple[int, ...]
    ) -> None:
        """``kept``: what another keeper of it needs beside the pidfd, in ``NUM_ADOPTED_FDS``'s order."""
        self.pid = pid
        self.pidfd = pidfd
        self.line: socket.socket | None = line
        """None: it is an orphan."""
        self.ends_s = 0.0
        """When an orphan is killed."""
        self.order = order
        self.start = start
        self.kept = kept


class ForkServer:
    """Lines of keepers, and workers forked for them. One thread, which waits in ``serve``."""

    def __init__(self, door: socket.socket, parent_pid: int, run_worker: RunWorker) -> None:
        """Raises ProcessLookupError where the parent has ended."""
        self._door = door
        self._parent_fd = os.pidfd_open(parent_pid)
        self._run_worker = run_worker
        self._lines: dict[int, socket.socket] = {}
        self._workers: dict[int, _Worker] = {}
        """By pidfd."""
        self._epoll = select.epoll()
        for fd in (self._parent_fd, door.fileno()):
            self._epoll.register(fd, select.EPOLLIN)

    def serve(self) -> None:
        """Fork what is ordered and tell of each end, until the parent has ended or closed the door."""
        while True:
            for fd, _ in self._epoll.poll(self._until_next_end()):
                if fd == self._parent_fd:
                    return
                if fd == self._door.fileno():
                    if not self._open_line():
                        return
                elif fd in self._workers:
                    self._reap(self._workers[fd])
                elif fd in self._lines:
                    self._take_order(self._lines[fd])

    def _until_next_end(self) -> float | None:
        """Kill orphans whose time is over; how long the next one has in seconds, None where there is none."""
        now_s, nexts_s = time.monotonic(), list[float]()
        for worker in self._workers.values():
            if worker.line is None and worker.ends_s <= now_s:
                os.kill(worker.pid, signal.SIGKILL)
                worker.ends_s = math.inf
            elif worker.line is None and worker.ends_s < math.inf:
                nexts_s.append(worker.ends_s - now_s)
        return min(nexts_s, default=None)

    def _open_line(self) -> bool:
        """Accept a keeper's line; False where the parent has closed the door. Where no descriptor is free, the kernel
        closes the line, and its keeper sees that."""
        word, fds, _, _ = socket.recv_fds(self._door, 16, 1)
        if not word:
            return False
        if not fds:
            return True
        line = socket.socket(fileno=fds[0])
        line.setblocking(False)
        self._lines[fds[0]] = line
        self._epoll.register(line, select.EPOLLIN)
        return True

    def _take_order(self, line: socket.socket) -> None:
        """Fork one worker; or, where the keeper has closed its line, end those that it has left."""
        try:
            message, fds, _, _ = socket.recv_fds(line, MAX_MESSAGE_BYTES, MAX_FDS)
        except BlockingIOError:  # it was closed and opened anew meanwhile
            return
        except ConnectionError:
            message, fds = b"", []
        if not message:
            self._drop_line(line)
            return
        order = msgspec.json.decode(message, type=KeeperOrder)
        if isinstance(order, AdoptWorkers):
            self._adopt(line)
            return
        server_pid, pid = os.getpid(), -1
        kept: tuple[int, ...] = ()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(order, fds, server_pid)
            pidfd = os.pidfd_open(pid)  # it is a child that was not reaped, so it is this one
        except OSError as error:
            if pid > 0:  # no process goes unwatched
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            self._tell(line, ForkFailed(order.order, f"fork: {error.strerror}"))
        else:
            if order.start.orphan_timeout_s:
                _, _, _, shared_copy, _, flag, hear = fds[:NUM_FIXED_FDS]
                kept = shared_copy, flag, hear
            self._workers[pidfd] = _Worker(pid, pidfd, line, order.order, order.start, kept)
            self._epoll.register(pidfd, select.EPOLLIN)
            self._tell(line, WorkerForked(order.order, pid), pidfd)
        finally:
            for fd in fds:
                if fd not in kept:
                    os.close(fd)

    def _adopt(self, line: socket.socket) -> None:
        """Give a keeper all orphans that live. Once it has gone, they stay what they are."""
        for worker in self._workers.values():
            if worker.line is None and worker.ends_s < math.inf and line.fileno() >= 0:
                worker.line, worker.order, start = line, -worker.pid, worker.start
                told = WorkerAdopted(
                    worker.order, worker.pid, start.spec.worker_id, start.epoch, digest_of(start.spec))
                self._tell(line, told, worker.pidfd, *worker.kept)
        self._tell(line, AdoptionOver())

    def _drop_line(self, line: socket.socket) -> None:
        """Its workers end, or become orphans."""
        for worker in self._workers.values():
            if worker.line is line:
                worker.line = None
                worker.ends_s = time.monotonic() + worker.start.orphan_timeout_s
        self._epoll.unregister(line)
        del self._lines[line.fileno()]
        line.close()

    def _reap(self, worker: _Worker) -> None:
        """Collect the exit code and tell the keeper; nothing where the event was of a descriptor that had this number
        before."""
        pid, status = os.waitpid(worker.pid, os.WNOHANG)
        if not pid:
            return
        del self._workers[worker.pidfd]
        self._epoll.unregister(worker.pidfd)  # closing it is not enough: the keeper has it, too, and it stays ready
        for fd in (worker.pidfd, *worker.kept):
            os.close(fd)
        if worker.line is not None:
            self._tell(worker.line, WorkerEnded(worker.order, os.waitstatus_to_exitcode(status)))

    def _tell(self, line: socket.socket, event: ForkEvent, *fds: int) -> None:
        """To a keeper that has gone, nothing. One that takes no message any more has gone for this server: its line is
        closed, so that other keepers are served."""
        if line.fileno() >= 0:
            try:
                socket.send_fds(line, [msgspec.json.encode(event)], fds)
            except OSError:
                self._drop_line(line)

    def _become_worker(self, order: ForkWorker, fds: list[int], server_pid: int) -> NoReturn:
        """In the forked process: give back what is the server's, be a worker, and end."""
        exit_code = 1
        try:
            die_with(server_pid)  # also while it loads and reads no socket
            self._epoll.close()
            for worker in self._workers.values():
                for fd in (worker.pidfd, *worker.kept):
                    os.close(fd)
            os.close(self._parent_fd)
            for sock in (self._door, *self._lines.values()):
                sock.close()
            folder, stdout, stderr, shared_copy, beat, flag, hear = fds[:NUM_FIXED_FDS]
            os.close(hear)
            for fd, standard in ((stdout, 1), (stderr, 2)):
                os.dup2(fd, standard)
                os.close(fd)
            os.fchdir(folder)
            os.close(folder)
            name_process(f"jettison-w{order.start.spec.worker_id}")
            spec = msgspec.structs.replace(order.start.spec, shared_copy_fd=shared_copy)
            exit_code = self._run_worker(WorkerConfig(
                **msgspec.structs.asdict(order.start) | {"spec": spec},
                listen_fds=fds[NUM_FIXED_FDS:], beat_fd=beat, flag_fd=flag, link_bytes_per_s=order.link_bytes_per_s,
            ))  # fmt: skip
        except SystemExit as ended:
            exit_code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:  # noqa: BLE001 - whatever it is, this process must not go on as a second fork server
            with suppress(OSError):
                traceback.print_exc()
        finally:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # a disk that is full
                    stream.flush()
            # Everything is closed; unloading torch piece by piece would keep the controller waiting for seconds.
            os._exit(exit_code)


def serve_forks(run_worker: RunWorker, import_all: Callable[[], None]) -> None:
    """The process: ``python -P -m jettison.live.worker.main PARENT_PID``, with its socket as standard input.

    SIGINT, SIGTERM and SIGHUP are ignored on purpose, here and in the workers: a terminal or a service manager sends
    them to the whole process group, and the controller needs its workers to drain, or to go on.
    """
    name_process(FORK_SERVER)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    door = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        server = ForkServer(door, int(sys.argv[1]), run_worker)
    except ProcessLookupError:
        return
    import_all()
    gc.collect()
    gc.freeze()  # a collection in a worker would write to all of these pages, which then were shared no more
    server.serve()

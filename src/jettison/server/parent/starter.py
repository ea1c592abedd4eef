"""The process that controllers are forked from: it has imported what a controller imports, and has run nothing. So one
that is killed is followed in the time of a fork; the imports alone take seconds.

The parent forks it, has no library of a controller itself, and tells it to begin one (``Begin``). Each controller is
its child, one after another. It ends with the parent, or where the parent hangs up; the kernel ends a controller with
it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from jettison.live.machine.endings import die_with
from jettison.live.machine.process_name import CONTROLLER, STARTER, name_process

_MOST_BYTES = 1 << 12
_MOST_FDS = 4
_END_S = 10.0
"""A process that was killed gives its memory back in less."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Fork a controller. Beside are descriptors: its end of the line, then one for each of ``has``."""

    epoch: int
    signature: bytes
    weights: str | None
    has: list[str]


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """Its process is there; beside is its pidfd."""


class NotBegun(msgspec.Struct, frozen=True, tag="not-begun"):
    """There is no process for it."""

    why: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """It has ended (-N: by signal N)."""

    returncode: int


FromStarter = Begun | NotBegun | Ended


class Beginning(NamedTuple):
    """What a controller has from its parent, in its own process."""

    order: Begin
    line: socket.socket
    others: dict[str, socket.socket]
    """By the names in ``Begin.has``."""


class Starter:
    """The parent's end."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock
        self._pidfd: int | None = None
        """Of the controller that has begun and not ended."""

    def begin(self, order: Begin, line: socket.socket, others: dict[str, socket.socket]) -> None:
        """Raises OSError."""
        fds = [line.fileno(), *(others[name].fileno() for name in order.has)]
        socket.send_fds(self.sock, [msgspec.msgpack.encode(order)], fds)

    def receive(self) -> FromStarter | None:
        """What it says; None: it has hung up. Raises BlockingIOError."""
        try:
            message, fds, _, _ = socket.recv_fds(self.sock, _MOST_BYTES, 1)
        except ConnectionError:
            return None
        if not message:
            return None
        said = msgspec.msgpack.decode(message, type=FromStarter)
        self._forget()
        if fds:
            os.set_inheritable(fds[0], False)
            self._pidfd = fds[0]
        return said

    def kill_controller(self) -> None:
        """What hangs; one that is not there yet with its starter."""
        with suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """The process has ended. Returns once its controller has, which the kernel ends with it."""
        if self._pidfd is not None:
            select.select([self._pidfd], [], [], _END_S)
        self._forget()
        self.sock.close()

    def _forget(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def serve(sock: socket.socket, parent_pid: int, prepare: Callable[[], object]) -> Beginning | None:
    """In the forked process: begin one controller after another. Returns in each of them, and None where the parent has
    hung up."""
    die_with(parent_pid)
    name_process(STARTER)
    prepare()
    gc.collect()
    gc.freeze()  # else a collection in a controller would write to every page that they share
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    child: tuple[int, int] | None = None  # process id, pidfd
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if child is not None and child[1] in ready:
            pid, pidfd = child
            _, status = os.waitpid(pid, 0)
            poll.unregister(pidfd)
            os.close(pidfd)
            child = None
            _tell(sock, Ended(os.waitstatus_to_exitcode(status)))
        if sock.fileno() in ready:
            beginning = _received(sock)
            if beginning is None:
                return None
            pid = _forked(sock)
            if pid == 0:
                return beginning
            if pid > 0:
                child = pid, os.pidfd_open(pid)
                poll.register(child[1], select.POLLIN)
                _tell(sock, Begun(), child[1])
            for each in (beginning.line, *beginning.others.values()):
                each.close()


def _received(sock: socket.socket) -> Beginning | None:
    message, fds, _, _ = socket.recv_fds(sock, _MOST_BYTES, _MOST_FDS)
    if not message:
        return None
    order = msgspec.msgpack.decode(message, type=Begin)
    for fd in fds:  # no program that a controller starts has them
        os.set_inheritable(fd, False)
    line, *others = (socket.socket(fileno=fd) for fd in fds)
    return Beginning(order, line, dict(zip(order.has, others, strict=True)))


def _forked(sock: socket.socket) -> int:
    """The controller's process id, 0 in that process; -1 where there is none, which is told."""
    own_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        _tell(sock, NotBegun(error.strerror or str(error)))
        return -1
    if pid == 0:
        sock.close()
        die_with(own_pid)
        name_process(CONTROLLER)
    return pid


def _tell(sock: socket.socket, said: FromStarter, *fds: int) -> None:
    with suppress(OSError):  # the parent is gone
        socket.send_fds(sock, [msgspec.msgpack.encode(said)], fds)

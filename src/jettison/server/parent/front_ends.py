"""Processes of front ends: their sockets, their start, and their start again.

Each has a listening socket of its own on the one address (SO_REUSEPORT), bound here and inherited. The kernel deals
connections out by their addresses: a burst is spread, where one socket for all would give it to the process that wakes
first, and streams stay where they began. A front end's socket listens once it serves. While it is down the socket is
closed, so the others get all new connections; the only one's is kept open, and clients wait in it.

Nothing here waits: the parent's loop calls when something is due, readable or over.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from jettison.live.machine.environment import child_environment
from jettison.server.sockets import open_socket

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "jettison.server.fronts.process")

FIRST_DELAY_S = 0.1
"""Before a front end is started again; twice as long after each life that was short."""
MOST_DELAY_S = 10.0
LONG_LIFE_S = 30.0
MOST_STARTS = 5
"""Of each front end while none has ever served; then the server is given up. A lack of memory or descriptors that
passes does so in their delays, some 3 s; what is wrong with the installation does not."""


@dataclass(slots=True, eq=False)
class _Life:
    """One process of a front end."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    """It says once that it serves, and sees in its end the parent's."""
    began_s: float

    def kill(self) -> None:
        """Not by ``Popen.kill``, which takes the end of a process that has just died from ``waitpid``: ``on_end`` would
        never hear of it. Until that does, the kernel gives the id to no other process."""
        os.kill(self.process.pid, signal.SIGKILL)


class FrontEnds:
    """``listen``, then ``begin``; ``kill`` ends them all."""

    def __init__(self, number: int, now: Callable[[], float]) -> None:
        self.number = number
        self._now = now
        self._listeners: dict[int, socket.socket] = {}
        self._address = ("", 0)
        self._told_fd: int | None = None
        """A file of what each process is told."""
        self._lives: dict[int, _Life] = {}
        self._num_lives = dict.fromkeys(range(number), 0)
        self._delays_s = dict.fromkeys(range(number), FIRST_DELAY_S)
        self._due_s: dict[int, float] = {}
        """When those that are down are started."""
        self._serving: set[int] = set()
        self._has_served = False
        self.has_failed = False
        """None has ever served, and none ever will."""
        self.is_closing = False

    def listen(self, host: str, port: int) -> int:
        """Bind; returns the port. Raises ConfigError, also where another server of such sockets has the address."""
        # Sockets that share an address say nothing of each other. This one must not listen: a connection that came
        # meanwhile would be reset.
        with open_socket(host, port, listens=False) as alone:
            self._address = (host, alone.getsockname()[1])
        for front in range(self.number):
            self._listener(front)
        return self._address[1]

    def _listener(self, front: int) -> socket.socket:
        if front not in self._listeners:
            self._listeners[front] = open_socket(*self._address, is_shared=True, listens=False)
        return self._listeners[front]

    def begin(self, told_fd: int) -> None:
        """Tell processes this from now on, and start those that have never been started."""
        if self._told_fd is not None:
            os.close(self._told_fd)
        self._told_fd = told_fd
        for front in range(self.number):
            if front not in self._lives:
                self._due_s.setdefault(front, self._now())

    @property
    def lines(self) -> list[socket.socket]:
        """Those of processes that live: to be watched."""
        return [life.line for life in self._lives.values()]

    @property
    def next_due_s(self) -> float | None:
        """When ``start_due`` has something to do."""
        return None if self.is_closing else min(self._due_s.values(), default=None)

    @property
    def are_over(self) -> bool:
        """No process lives."""
        return not self._lives

    def start_due(self) -> None:
        """Start those whose time has come."""
        now_s = self._now()
        for front in [front for front, due_s in self._due_s.items() if due_s <= now_s and not self.is_closing]:
            del self._due_s[front]
            try:
                self._lives[front] = self._start(front, now_s)
            except Exception:
                logger.exception("front end %d does not start", front)
                self._after(front, now_s)

    def _start(self, front: int, began_s: float) -> _Life:
        assert self._told_fd is not None
        listener = self._listener(front)
        ours, theirs = socket.socketpair()
        try:
            with theirs, open(f"/proc/self/fd/{self._told_fd}", "rb") as told:
                life = str(self._num_lives[front])
                process = subprocess.Popen(
                    (*COMMAND, str(listener.fileno()), str(theirs.fileno()), str(front), life), stdin=told,
                    pass_fds=(listener.fileno(), theirs.fileno()), env=child_environment())
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        return _Life(process, ours, began_s)

    def on_readable(self, line: socket.socket) -> None:
        """One says that it serves, or is about to end."""
        for front, life in self._lives.items():
            if life.line is line:
                with suppress(OSError):
                    if line.recv(16):
                        self._serving.add(front)
                        self._has_served = True

    def on_end(self, pid: int, returncode: int) -> None:
        """A process has ended; nothing where it was none of these."""
        for front, life in list(self._lives.items()):
            if life.process.pid == pid:
                life.process.returncode = returncode
                del self._lives[front]
                life.line.close()
                if not self.is_closing:
                    logger.error("front end %d has ended (%s): its requests are cancelled", front, returncode)
                self._serving.discard(front)
                if self._serving and not self.is_closing:
                    self._listeners.pop(front).close()
                self._after(front, life.began_s)

    def _after(self, front: int, began_s: float) -> None:
        """One life is over: when is the next?"""
        self._num_lives[front] += 1
        if not self._has_served and min(self._num_lives.values()) >= MOST_STARTS:
            if not self.has_failed:
                logger.error("no front end has served in %d starts of each: the server ends", MOST_STARTS)
            self.has_failed = True
            return
        now_s = self._now()
        if now_s - began_s >= LONG_LIFE_S:
            self._delays_s[front] = FIRST_DELAY_S
        self._due_s[front] = now_s + self._delays_s[front]
        self._delays_s[front] = min(MOST_DELAY_S, 2 * self._delays_s[front])

    def end(self, front: int, life: int) -> None:
        """Kill one that is of no use, if it is that life."""
        if front in self._lives and self._num_lives[front] == life:
            self._lives[front].kill()

    def kill(self) -> None:
        """End all that live; none is started any more."""
        self.is_closing = True
        for life in self._lives.values():
            life.kill()

    def close_inherited(self) -> None:
        """In a forked process: give back what is the parent's."""
        for each in (*self.lines, *self._listeners.values()):
            each.close()
        if self._told_fd is not None:
            os.close(self._told_fd)

"""The parent's process: binds, starts the controller and the front ends, watches them, ends with the last.

It imports neither torch nor a loop, has one thread, and computes nothing, so that it outlives what it starts. A
controller is forked from it, with the configuration as it was read; front ends are programs of their own. The kernel
kills a controller whose parent has ended, and a front end sees its end in a socket.

Not here: what becomes of the server when its controller ends (``rules``).
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from jettison.live.machine.run_folder import RunFolder
from jettison.server.notify import notify
from jettison.server.parent import orders as o
from jettison.server.parent.front_ends import FrontEnds
from jettison.server.parent.kept import Kept
from jettison.server.parent.rules import Exit, Rules, ServerPhase, StartAgain
from jettison.transport.succession import Signer

if TYPE_CHECKING:
    from jettison.server.parent.line import ParentLine
    from jettison.server.parent.signing import SigningDesk

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

PING_S = 1.0
MOST_UNANSWERED = 30
"""Questions, one each ``PING_S``, after which a controller that has said nothing is killed: its loop stands still. They
are counted, not timed, so that a stop of this process is not held against it. As long as a controller leaves a front
end."""
MOST_UNANSWERED_IMPORTING = 60
"""The same for one on its way back: before its loop runs it imports for ten seconds, on a busy machine for more."""
END_S = 3.0
"""Time for front ends to write their last bytes and end, before they are killed."""

Controller = Callable[["ParentLine"], int]
"""Serves to its end, in a process of its own; returns the exit code."""


class _Line(NamedTuple):
    """To a controller that lives."""

    pid: int
    sock: socket.socket


class Parent:
    """One server's. ``run`` returns the exit code; in a forked controller it returns that one's."""

    def __init__(
        self, controller: Controller, number: int, host: str, port: int, orphan_timeout_s: float, *,
        spans_hosts: bool = False,
    ) -> None:
        """``number``: of front ends. ``spans_hosts``: workers may be on other hosts, and this process signs for them."""
        self._controller = controller
        self._address = host, port
        self._orphan_timeout_s = orphan_timeout_s
        self._rules = Rules(orphan_timeout_s)
        self._fronts = FrontEnds(number, time.monotonic)
        self._epoch = 0
        """Of the last controller."""
        self._kept: Kept
        self._desk: SigningDesk | None = None
        if spans_hosts:
            from jettison.server.parent.signing import SigningDesk  # brings certificates

            self._desk = SigningDesk()
        self._pid = os.getpid()
        self._poll = select.poll()
        self._woken: tuple[socket.socket, socket.socket] | None = None
        self._signals: list[int] = []
        self._line: _Line | None = None
        self._start_s: float | None = None
        """When the next controller begins."""
        self._ping_s: float | None = None
        self._num_unanswered = 0
        self._weights: str | None = None
        self._code: int | None = None
        """Of the server, once it is known; front ends may have last words then."""
        self._ends_s = 0.0

    def run(self) -> int:
        """Raises ConfigError where the address cannot be bound, and in the forked process what the controller
        raises."""
        port = self._fronts.listen(*self._address)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a dead controller leaves comes here
        folder, signer = RunFolder(), Signer()
        try:
            self._kept = Kept.made(
                folder.path, port, self._orphan_timeout_s, signer.public,
                None if self._desk is None else self._desk.certificate)
            with self._signals_heard():
                self._start_s = time.monotonic()
                while self._code is None or not self._fronts.are_over:
                    if self._is_due(self._start_s):
                        self._epoch += 1
                        signature = signer.sign(self._kept.secret, self._epoch)
                        made = self._fork()
                        if made is not None:
                            self._desk = None
                            del signer  # no controller signs for another
                            return self._as_controller(*made, signature)
                    self._look_at_clock()
                    self._wait()
            return self._code
        finally:
            if os.getpid() == self._pid:
                folder.remove()

    # --- the controller

    def _fork(self) -> tuple[socket.socket, socket.socket | None] | None:
        """Begin another controller; the new process gets its ends of the lines, this one None."""
        self._start_s = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        signing = None if self._desk is None else self._desk.open()
        try:
            pid = os.fork()
        except OSError as error:
            if self._rules.state is ServerPhase.STARTING:
                raise
            logger.error("no controller could be started: %s", error.strerror)
            ours.close()
            theirs.close()
            if signing is not None:
                signing.close()
            self._after(self._rules.on_end(1, time.monotonic()))
            return None
        if pid == 0:
            ours.close()
            if self._desk is not None:
                self._desk.close()
            return theirs, signing
        theirs.close()
        if signing is not None:
            signing.close()
        ours.setblocking(False)
        self._line, self._num_unanswered = _Line(pid, ours), 0
        # The first one may take its time before it serves: its clients, and a service manager, wait for it or not.
        self._ping_s = time.monotonic() + PING_S if self._rules.state is ServerPhase.COMING_BACK else None
        self._poll.register(ours, select.POLLIN)
        if self._rules.state is ServerPhase.STOPPING:  # a signal that came meanwhile
            self._say(o.Stop())
        return None

    def _as_controller(self, sock: socket.socket, signing: socket.socket | None, signature: bytes) -> int:
        """In the forked process."""
        from jettison.server.parent.line import ParentLine  # brings a loop

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._pid:  # it ended before the request was made
            return 1
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in SIGNALS:  # the parent hears them, and tells; not ignored, as that would be inherited
            signal.signal(number, _heard)
        if self._woken is not None:
            for each in self._woken:
                each.close()
        self._fronts.close_inherited()
        return self._controller(ParentLine(sock, self._kept, self._weights, self._epoch, signature, signing))

    def _on_controller(self, line: _Line) -> None:
        """Take what it says."""
        while True:
            try:
                message, fds = o.receive_from_controller(line.sock)
            except (BlockingIOError, ConnectionError):
                return
            self._num_unanswered = 0
            match message:
                case None:
                    with suppress(KeyError):
                        self._poll.unregister(line.sock)  # its end is told by the kernel
                    return
                case o.Ready(weights):
                    self._weights = weights
                    self._rules.on_ready()
                    self._ping_s = time.monotonic() + PING_S
                case o.Fronts():
                    self._fronts.begin(fds[0])
                case o.Door():
                    self._kept = self._kept.with_door(fds[0])
                case o.FarControl():
                    self._kept = self._kept.with_far_control(fds[0])
                case o.EndFront(front, life):
                    self._fronts.end(front, life)
                case o.FrontsEnd():
                    self._fronts.is_closing = True
                case o.Notify(assignments):
                    notify(*assignments)
                case o.Pong():
                    pass

    def _on_controller_end(self, line: _Line, returncode: int) -> None:
        self._on_controller(line)  # its last words
        with suppress(KeyError):
            self._poll.unregister(line.sock)
        line.sock.close()
        self._line = self._ping_s = None
        if self._rules.state is not ServerPhase.STOPPING and returncode:
            logger.error("the controller has ended (%d)", returncode)
        self._after(self._rules.on_end(returncode, time.monotonic()))

    def _after(self, then: Exit | StartAgain) -> None:
        if isinstance(then, Exit):
            self._end(1 if self._fronts.has_failed else then.code)
        else:
            self._start_s = time.monotonic() + then.pause_s

    def _say(self, message: o.FromParent) -> None:
        if self._line is not None:
            with suppress(OSError):
                o.send(self._line.sock, message)

    # --- the loop

    def _end(self, code: int) -> None:
        """The server ends with this code."""
        self._code, self._start_s = code, None
        self._fronts.is_closing = True
        self._ends_s = time.monotonic() + END_S
        for line in self._fronts.lines:
            with suppress(OSError):  # those that no controller has told
                line.shutdown(socket.SHUT_WR)

    def _is_due(self, at_s: float | None) -> bool:
        return at_s is not None and at_s <= time.monotonic()

    def _look_at_clock(self) -> None:
        self._fronts.start_due()
        if self._fronts.has_failed and self._rules.on_signal():
            self._say(o.Stop())
        if self._code is not None and self._is_due(self._ends_s):
            self._fronts.kill()
        if self._line is not None and self._is_due(self._ping_s):
            self._ping_s = time.monotonic() + PING_S
            self._num_unanswered += 1
            is_back = self._rules.state is not ServerPhase.COMING_BACK
            most_unanswered = MOST_UNANSWERED if is_back else MOST_UNANSWERED_IMPORTING
            if self._num_unanswered > most_unanswered:
                logger.error("the controller has said nothing for %g s and is killed", most_unanswered * PING_S)
                self._ping_s = None
                os.kill(self._line.pid, signal.SIGKILL)
            else:
                self._say(o.Ping())

    def _wait(self) -> None:
        """Until something has happened or is due; act on it."""
        due = [self._start_s, self._fronts.next_due_s, self._ping_s, None if self._code is None else self._ends_s]
        times_s = [each for each in due if each is not None]
        timeout_s = max(0.0, min(times_s) - time.monotonic()) if times_s else None
        lines = {line.fileno(): line for line in self._fronts.lines}
        signing = [self._desk.line.fileno()] if self._desk is not None and self._desk.line is not None else []
        for fd in (*lines, *signing):
            self._poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in self._poll.poll(None if timeout_s is None else 1e3 * timeout_s + 1.0)}
        for fd in (*lines, *signing):
            self._poll.unregister(fd)
        for fd in ready & lines.keys():
            self._fronts.on_readable(lines[fd])
        if self._desk is not None and ready.intersection(signing):
            self._desk.answer()
        if self._line is not None and self._line.sock.fileno() in ready:
            self._on_controller(self._line)
        self._on_signals()

    def _on_signals(self) -> None:
        assert self._woken is not None
        with suppress(BlockingIOError):
            while self._woken[0].recv(4096):
                pass
        heard, self._signals = self._signals, []
        for number in heard:
            if number == signal.SIGHUP:
                self._say(o.Hangup())
            elif number != signal.SIGCHLD and self._code is None:
                self._say(o.Stop() if self._rules.on_signal() else o.Force())
                if self._line is None:  # between two controllers
                    self._end(0)
        if signal.SIGCHLD in heard:
            for pid, returncode in _ended():
                if self._line is not None and pid == self._line.pid:
                    self._on_controller_end(self._line, returncode)
                else:
                    self._fronts.on_end(pid, returncode)

    @contextmanager
    def _signals_heard(self) -> Iterator[None]:
        """Signals are noted, and wake the loop."""
        ours, theirs = self._woken = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)
        self._poll.register(ours, select.POLLIN)

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        before = {number: signal.signal(number, note) for number in (*SIGNALS, signal.SIGCHLD)}
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            if os.getpid() == self._pid:
                signal.set_wakeup_fd(-1)
                for number, handler in before.items():
                    signal.signal(number, handler)


def _heard(number: int, frame: FrameType | None) -> None:
    """A signal that the parent has heard, too."""


def _ended() -> Iterator[tuple[int, int]]:
    """Processes that have ended and their codes, -N for signal N; also those that others have left to this one."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, os.waitstatus_to_exitcode(status)

"""The parent's process: binds, starts the controller and the front ends, watches them, ends with the last.

It imports neither torch nor a loop, has one thread, and computes nothing, so that it outlives what it starts. A
controller is forked from a child of its that has imported all that (``starter``), with the configuration as it was
read; front ends are programs of their own. The kernel kills a controller whose parent has ended, and a front end sees
its end in a socket.

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
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from jettison.live.machine.run_folder import RunFolder
from jettison.server.notify import notify
from jettison.server.parent import orders as o
from jettison.server.parent.front_ends import FrontEnds
from jettison.server.parent.kept import Kept
from jettison.server.parent.rules import Exit, Rules, ServerPhase, StartAgain
from jettison.server.parent.starter import Begin, Begun, Ended, NotBegun, Starter, serve
from jettison.transport.succession import Signer

if TYPE_CHECKING:
    from jettison.server.parent.line import ParentLine
    from jettison.server.parent.signing import SigningDesk

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

PING_S = 1.0
MOST_UNANSWERED = 30
"""Questions, one each ``PING_S``, after which a controller that has said nothing is killed: its loop stands still. They
are counted, not timed, so that a stop of this process is not held against it. As long as a controller leaves a front
end."""
MOST_UNANSWERED_IMPORTING = 60
"""The same for one on its way back, whose loop does not run yet."""
MOST_UNTOLD = 5
"""After so many more the starter is killed as well: it stands still, too."""
END_S = 3.0
"""Time for front ends to write their last bytes and end, before they are killed."""

Controller = Callable[["ParentLine"], int]
"""Serves to its end, in a process of its own; returns the exit code."""


class Parent:
    """One server's. ``run`` returns the exit code; in a forked controller it returns that one's."""

    def __init__(
        self, controller: Controller, number: int, host: str, port: int, orphan_timeout_s: float, *,
        prepare: Callable[[], object] = lambda: None, spans_hosts: bool = False,
    ) -> None:
        """``number``: of front ends. ``prepare``: imports what a controller needs. ``spans_hosts``: workers may be on
        other hosts, and this process signs for them."""
        self._controller = controller
        self._prepare = prepare
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
        self._line: socket.socket | None = None
        """To a controller that has begun and not ended, as far as is known."""
        self._starter: Starter | None = None
        self._asked: socket.socket
        """A starter's own end of the line to it."""
        self._signer: Signer | None = None
        self._start_s: float | None = None
        """When the next controller begins."""
        self._ping_s: float | None = None
        self._num_unanswered = 0
        self._is_ready = False
        """The controller has served."""
        self._weights: str | None = None
        self._code: int | None = None
        """Of the server, once it is known; front ends may have last words then."""
        self._ends_s = 0.0

    def run(self) -> int:
        """Raises ConfigError where the address cannot be bound, and in the forked process what the controller
        raises."""
        port = self._fronts.listen(*self._address)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a dead controller leaves comes here
        folder, self._signer = RunFolder(), Signer()
        try:
            self._kept = Kept.made(
                folder.path, port, self._orphan_timeout_s, self._signer.public,
                None if self._desk is None else self._desk.certificate)
            with self._signals_heard():
                self._start_s = time.monotonic()
                while self._code is None or not self._fronts.are_over:
                    if self._is_due(self._start_s):
                        code = self._begin()
                        if code is not None:
                            return code
                    self._look_at_clock()
                    self._wait()
            return self._code
        finally:
            if os.getpid() == self._pid:
                if self._starter is not None:
                    os.kill(self._starter.pid, signal.SIGKILL)
                    os.waitpid(self._starter.pid, 0)
                folder.remove()

    # --- the controller

    def _begin(self) -> int | None:
        """Have another controller begun. In this process returns None, in forked ones the exit code."""
        assert self._signer is not None
        self._start_s = None
        self._epoch += 1
        ours: socket.socket | None = None
        try:
            if self._starter is None:
                self._starter = self._fork_starter()
            if self._starter is not None:
                ours = self._begin_by(self._starter, self._signer.sign(self._kept.secret, self._epoch))
        except OSError as error:
            if self._rules.state is ServerPhase.STARTING:
                raise
            logger.error("no controller could be started: %s", error.strerror)
            self._after(self._rules.on_end(1, time.monotonic()))
            return None
        if ours is None:  # the forked process, whose errors are its own
            return self._as_starter()
        self._line, self._num_unanswered, self._is_ready = ours, 0, False
        # The first one may take its time before it serves: its clients, and a service manager, wait for it or not.
        self._ping_s = None if self._rules.state is ServerPhase.STARTING else time.monotonic() + PING_S
        self._poll.register(ours, select.POLLIN)
        if self._rules.state is ServerPhase.STOPPING:  # a signal that came before it
            self._say(o.Stop())
        return None

    def _begin_by(self, starter: Starter, signature: bytes) -> socket.socket:
        """Returns the line to a controller that is on its way. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        has = {"door": self._kept.door, "far_control": self._kept.far_control,
               "signing": None if self._desk is None else self._desk.open()}  # fmt: skip
        others = {name: sock for name, sock in has.items() if sock is not None}
        try:
            starter.begin(Begin(self._epoch, signature, self._weights, list(others)), theirs, others)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            if "signing" in others:
                others["signing"].close()
        return ours

    def _fork_starter(self) -> Starter | None:
        """None in the forked process. Raises OSError."""
        ours, self._asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            return None
        self._asked.close()
        ours.setblocking(False)
        self._poll.register(ours, select.POLLIN)
        return Starter(pid, ours)

    def _as_starter(self) -> int:
        """In the forked process, and in each controller that is forked from it."""
        self._signer = self._desk = None  # no controller signs for another
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in SIGNALS:  # the parent hears them, and tells; not ignored, as that would be inherited
            signal.signal(number, _heard)
        for each in (*(self._woken or ()), self._kept.door, self._kept.far_control):
            if each is not None:  # the last two come again with each order to begin
                each.close()
        self._fronts.close_inherited()
        begun = serve(self._asked, self._pid, self._prepare)
        if begun is None:
            return 0
        from jettison.server.parent.line import ParentLine  # brings a loop

        order, others = begun.order, begun.others
        kept = replace(self._kept, door=others.get("door"), far_control=others.get("far_control"))
        return self._controller(
            ParentLine(begun.line, kept, order.weights, order.epoch, order.signature, others.get("signing")))

    def _on_starter(self, starter: Starter) -> None:
        """Take what it says."""
        while True:
            try:
                said = starter.receive()
            except BlockingIOError:
                return
            match said:
                case None:
                    with suppress(KeyError):
                        self._poll.unregister(starter.sock)  # its end is told by the kernel
                    return
                case NotBegun(why):
                    logger.error("no controller could be started: %s", why)
                    self._on_controller_end(1)
                case Ended(returncode):
                    self._on_controller_end(returncode)
                case Begun():
                    self._num_unanswered = 0  # what its starter took to import does not count

    def _on_starter_end(self, starter: Starter, returncode: int) -> None:
        """A controller that it had begun has ended with it."""
        self._on_starter(starter)  # its last words
        with suppress(KeyError):
            self._poll.unregister(starter.sock)
        starter.close()
        self._starter = None
        if self._line is not None:
            self._on_controller_end(returncode or 1)

    def _on_controller(self, line: socket.socket) -> None:
        """Take what it says."""
        while True:
            try:
                message, fds = o.receive_from_controller(line)
            except (BlockingIOError, ConnectionError):
                return
            self._num_unanswered = 0
            match message:
                case None:
                    with suppress(KeyError):
                        self._poll.unregister(line)  # its end is told by its starter
                    return
                case o.Ready(weights):
                    self._weights = weights
                    self._rules.on_ready()
                    self._is_ready = True
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

    def _on_controller_end(self, returncode: int) -> None:
        assert self._line is not None
        self._on_controller(self._line)  # its last words
        with suppress(KeyError):
            self._poll.unregister(self._line)
        self._line.close()
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
                o.send(self._line, message)

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
        if self._line is not None and self._starter is not None and self._is_due(self._ping_s):
            self._ping_s = time.monotonic() + PING_S
            self._num_unanswered += 1
            num_too_many = self._num_unanswered - (MOST_UNANSWERED if self._is_ready else MOST_UNANSWERED_IMPORTING)
            if num_too_many <= 0:
                self._say(o.Ping())
            elif num_too_many <= MOST_UNTOLD:
                logger.error("the controller has said nothing for %g s and is killed", self._num_unanswered * PING_S)
                self._starter.kill_controller()
            else:
                logger.error("the controller's starter does not tell of its end and is killed")
                os.kill(self._starter.pid, signal.SIGKILL)

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
        if self._line is not None and self._line.fileno() in ready:
            self._on_controller(self._line)
        if self._starter is not None and self._starter.sock.fileno() in ready:
            self._on_starter(self._starter)
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
                is_first = self._rules.on_signal()
                self._say(o.Stop() if is_first else o.Force())
                if self._line is None and is_first:  # streams that wait for the next controller end there in order
                    self._start_s = time.monotonic()
                elif self._line is None:
                    self._end(1)
        if signal.SIGCHLD in heard:
            for pid, returncode in _ended():
                if self._starter is not None and pid == self._starter.pid:
                    self._on_starter_end(self._starter, returncode)
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

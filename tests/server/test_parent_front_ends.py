"""Processes of front ends that are small programs: when their sockets listen, and what comes of those that fail."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from jettison.errors import ConfigError
from jettison.server.parent import front_ends
from jettison.server.parent.front_ends import FrontEnds
from jettison.server.sockets import open_socket
from waiting import PATIENCE_S

BEGIN = """
import socket, sys, time
listener, parent = (socket.socket(fileno=int(text)) for text in sys.argv[1:3])
assert sys.stdin.buffer.read() == b"told"
"""
SERVES = BEGIN + """
listener.listen()
parent.sendall(b"serves")
parent.recv(1)
"""
IMPORTS = BEGIN + """
parent.recv(1)
"""
FAILS = "raise SystemExit(7)"


class Supervised:
    def __init__(self, number, program_of, monkeypatch):
        self.fronts = FrontEnds(number, time.monotonic)
        self.port = self.fronts.listen("127.0.0.1", 0)
        self.lives = []
        begin = subprocess.Popen

        def popen(command, **options):
            program = program_of(len(self.lives))
            self.lives.append((program, command[-2:]))
            return begin((sys.executable, "-c", program, *command[len(front_ends.COMMAND):]), **options)

        monkeypatch.setattr(subprocess, "Popen", popen)
        told = os.memfd_create("told")
        os.write(told, b"told")
        self.fronts.begin(told)

    def until(self, condition):
        """What the parent's loop does."""
        ends_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < ends_s
            self.fronts.start_due()
            lines = {line.fileno(): line for line in self.fronts.lines}
            for fd in select.select(list(lines), [], [], 0.005)[0]:
                self.fronts.on_readable(lines[fd])
            for pid in self.pids():
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    _, status = os.waitpid(pid, 0)
                    self.fronts.on_end(pid, os.waitstatus_to_exitcode(status))

    def pids(self):
        return [life.process.pid for life in self.fronts._lives.values()]

    @property
    def is_refused(self):
        with closing(socket.socket()) as client:
            try:
                client.connect(("127.0.0.1", self.port))
            except ConnectionRefusedError:
                return True
        return False


@contextmanager
def supervised(number, program_of, monkeypatch, *, first_delay_s=0.01):
    monkeypatch.setattr(front_ends, "FIRST_DELAY_S", first_delay_s)
    made = Supervised(number, program_of, monkeypatch)
    try:
        yield made
    finally:
        made.fronts.kill()
        made.until(lambda: made.fronts.are_over)
        made.fronts.close_inherited()


def test_no_connection_goes_to_one_that_does_not_serve_yet(monkeypatch):
    with supervised(2, lambda life: IMPORTS, monkeypatch) as made:
        made.until(lambda: len(made.fronts.lines) == 2)
        assert made.is_refused
        with pytest.raises(ConfigError):  # though nothing listens yet
            FrontEnds(1, time.monotonic).listen("127.0.0.1", made.port)


def test_a_client_that_comes_while_the_address_is_bound_is_refused_and_not_reset(monkeypatch):
    binding, answers = front_ends.open_socket, []

    def bound(*address, **options):
        sock = binding(*address, **options)
        with closing(socket.socket()) as client:
            answers.append(client.connect_ex(sock.getsockname()))
        return sock

    monkeypatch.setattr(front_ends, "open_socket", bound)
    fronts = FrontEnds(2, time.monotonic)
    fronts.listen("127.0.0.1", 0)
    fronts.close_inherited()
    assert answers == [errno.ECONNREFUSED] * 3


def test_an_address_where_another_server_listens_is_taken(monkeypatch):
    with supervised(2, lambda life: SERVES, monkeypatch) as made:
        made.until(lambda: len(made.fronts._serving) == 2)
        with pytest.raises(ConfigError):
            FrontEnds(1, time.monotonic).listen("127.0.0.1", made.port)


def test_connections_go_to_the_one_that_serves(monkeypatch):
    with supervised(2, lambda life: IMPORTS if life else SERVES, monkeypatch) as made:
        made.until(lambda: made.fronts._serving)
        assert not any(made.is_refused for _ in range(50))
        listeners = made.fronts._listeners.values()
        assert sorted(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for each in listeners) == [0, 1]


def test_where_none_ever_serves_the_server_is_given_up(monkeypatch):
    with supervised(2, lambda life: FAILS, monkeypatch) as made:
        made.until(lambda: made.fronts.has_failed)
        assert len(made.lives) >= 2 * front_ends.MOST_STARTS


def test_where_one_serves_the_other_is_started_for_ever(monkeypatch):
    with supervised(2, lambda life: FAILS if life else SERVES, monkeypatch, first_delay_s=0) as made:
        made.until(lambda: len(made.lives) > 3 * front_ends.MOST_STARTS)
        assert made.fronts._serving and not made.fronts.has_failed
        assert [told for _, told in made.lives if told[0] == "1"] == [
            ("1", str(life)) for life in range(len(made.lives) - 1)]


def test_any_error_of_a_start_is_followed_by_another(monkeypatch):
    results = iter([ZeroDivisionError(), {"PATH": ""}])

    def environment():
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(front_ends, "child_environment", environment)
    with supervised(1, lambda life: SERVES, monkeypatch) as made:
        made.until(lambda: made.fronts._serving)


def test_no_secret_is_in_the_environment(monkeypatch):
    for name in ("JETTISON_API_KEY", "VLLM_API_KEY", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "a secret")
    with supervised(1, lambda life: SERVES, monkeypatch) as made:
        made.until(lambda: made.fronts._serving)
        environment = Path(f"/proc/{made.pids()[0]}/environ").read_bytes()
        assert b"PYTHONPATH=" in environment and b"a secret" not in environment


def test_only_the_life_that_is_of_no_use_is_ended(monkeypatch):
    with supervised(1, lambda life: SERVES, monkeypatch) as made:
        made.until(lambda: made.fronts._serving)
        made.fronts.end(0, 7)
        made.fronts.end(0, 0)
        made.until(lambda: len(made.lives) == 2)
        made.until(lambda: made.fronts._serving)
        made.fronts.end(0, 0)
        assert made.pids()


def test_what_is_told_later_is_told_to_later_lives(monkeypatch):
    other = BEGIN.replace("told", "new") + 'parent.sendall(b"serves")\nparent.recv(1)\n'
    with supervised(1, lambda life: other if life else SERVES, monkeypatch) as made:
        made.until(lambda: made.fronts._serving)
        told = os.memfd_create("told")
        os.write(told, b"new")
        made.fronts.begin(told)
        assert len(made.lives) == 1
        made.fronts.end(0, 0)
        made.until(lambda: len(made.lives) == 2)
        made.until(lambda: made.fronts._serving)


def test_ending_one_that_has_just_died_leaves_its_end_to_be_heard(monkeypatch):
    """The controller asks for it by the end of a channel, which may be seen before the end of the process."""
    with supervised(1, lambda index: SERVES, monkeypatch) as made:
        made.until(lambda: made.fronts._serving == {0})
        (pid,) = made.pids()
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        made.fronts.end(0, 0)
        made.until(lambda: len(made.lives) == 2 and made.fronts._serving == {0})
        assert made.pids() != [pid]


def test_an_address_is_free_while_connections_to_the_server_before_wait_for_their_end():
    """As after a restart: the side that has closed first keeps the address for a minute."""
    with open_socket("127.0.0.1", 0, is_shared=True) as before:
        port = before.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            select.select([before], [], [], PATIENCE_S)
            before.accept()[0].close()
            assert client.recv(1) == b""
    again = FrontEnds(2, time.monotonic)
    assert again.listen("127.0.0.1", port) == port
    with pytest.raises(ConfigError):
        FrontEnds(1, time.monotonic).listen("127.0.0.1", port)
    again.close_inherited()

"""Processes of front ends that are small programs: when their sockets listen, and what comes of those that fail."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import asynccontextmanager, closing

import msgspec
import pytest
from fake_engine import FakeEngine
from served import eventually

from jettison.errors import ConfigError
from jettison.live.frontend import wire as w
from jettison.live.frontend.hub import Hub
from jettison.server.fronts import supervisor
from jettison.server.fronts.supervisor import FrontEnds

BEGIN = """
import socket, sys, time
import msgspec
listener, channel = (socket.socket(fileno=int(text)) for text in sys.argv[1:3])
sys.stdin.buffer.read()
STOP = bytes([0x91, 40])
"""
SERVES = BEGIN + f"""
listener.listen()
channel.sendall(bytes({list(w.encode_frame([w.Serves()]))}))
while (data := channel.recv(1000)) and not data.endswith(STOP):
    pass
"""
IMPORTS = BEGIN + """
while (data := channel.recv(1000)) and not data.endswith(STOP):
    pass
"""
FAILS = "raise SystemExit(7)"
NOTES = BEGIN + f"""
channel.sendall(bytes({list(w.encode_frame([w.Note("last", w.packed(1))]))}))
"""


class OneDesk:
    def __init__(self, on_lost, on_serves):
        self.serves, self.notes, self.lives, self.num_wanted = on_serves, [], [], 0
        self.hub = Hub(FakeEngine(), self, on_lost)

    def state(self):
        return "ready"

    def key_digests(self):
        return ()

    def note(self, front, topic, body):
        self.notes.append(topic)

    def gone(self, front):
        self.lives.append(front)


@asynccontextmanager
async def supervised(number, program_of, monkeypatch, *, first_delay_s=0.01):
    monkeypatch.setattr(supervisor, "COMMAND", (sys.executable, "-c"))
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", first_delay_s)
    fronts = FrontEnds(number, OneDesk)
    port = fronts.listen("127.0.0.1", 0)
    execute = asyncio.create_subprocess_exec
    lives = []

    async def begin(*command, **options):
        program = program_of(len(lives))
        lives.append(program)
        return await execute(*command[:2], program, *command[2:], **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begin)
    fronts.start(lambda front, life: msgspec.Raw(b"1"))
    try:
        yield fronts, port, lives
    finally:
        await fronts.close()


def is_refused(port):
    with closing(socket.socket()) as client:
        try:
            client.connect(("127.0.0.1", port))
        except ConnectionRefusedError:
            return True
    return False


async def test_no_connection_goes_to_one_that_does_not_serve_yet(monkeypatch):
    async with supervised(2, lambda life: IMPORTS, monkeypatch) as (fronts, port, _):
        await eventually(lambda: len(fronts.desk.hub.fronts) == 2)
        assert is_refused(port) and not fronts.served.is_set()
        with pytest.raises(ConfigError):  # though nothing listens yet
            FrontEnds(1, OneDesk).listen("127.0.0.1", port)


async def test_connections_go_to_the_one_that_serves(monkeypatch):
    async with supervised(2, lambda life: IMPORTS if life else SERVES, monkeypatch) as (fronts, port, _):
        await eventually(fronts.served.is_set)
        assert not any(is_refused(port) for _ in range(50))
        listening = [each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for each in fronts._listeners.values()]
        assert sorted(listening) == [0, 1]


async def test_where_none_ever_serves_the_server_is_given_up(monkeypatch):
    async with supervised(2, lambda life: FAILS, monkeypatch) as (fronts, _, lives):
        await eventually(fronts.failed.is_set)
        assert len(lives) >= 2 * supervisor.MOST_STARTS and not fronts.served.is_set()


async def test_where_one_serves_the_other_is_started_for_ever(monkeypatch):
    async with supervised(2, lambda life: FAILS if life else SERVES, monkeypatch, first_delay_s=0) as made:
        fronts, _, lives = made
        await eventually(lambda: len(lives) > 3 * supervisor.MOST_STARTS)
        assert fronts.served.is_set() and not fronts.failed.is_set()


async def test_any_error_of_a_start_is_followed_by_another(monkeypatch):
    results = iter([ZeroDivisionError(), {"PATH": ""}])

    def environment():
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(supervisor, "_environment", environment)
    async with supervised(1, lambda life: SERVES, monkeypatch) as (fronts, _, _):
        await eventually(fronts.served.is_set)


async def test_a_life_ends_before_the_next_begins_and_its_last_words_count(monkeypatch):
    async with supervised(1, lambda life: IMPORTS if life == 2 else NOTES, monkeypatch) as (fronts, _, lives):
        await eventually(lambda: len(lives) == 3 and len(fronts.desk.hub.fronts) == 1)
        assert fronts.desk.lives == [0, 0] and fronts.desk.notes == ["last", "last"]


async def test_the_end_does_not_wait_for_the_next_start(monkeypatch):
    async with supervised(1, lambda life: FAILS, monkeypatch, first_delay_s=1000) as (fronts, _, _):
        await eventually(lambda: fronts._num_failed[0] == 1)
        (task,) = fronts._tasks
        await fronts.close()
        assert task.done() and not task.cancelled()

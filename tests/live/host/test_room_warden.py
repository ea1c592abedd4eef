"""When a cluster's room is given back: only once Ray's head answers, and until it has succeeded. Needs no Ray."""

from __future__ import annotations

import socket
import threading

import pytest

from jettison.live.host import room_warden
from jettison.live.host.room_warden import RoomWarden
from waiting import PATIENCE_S

GRACE_S = 0.05


class Head:
    """Ray's, as a warden meets it."""

    def __init__(self):
        self.is_away = False
        self.looks = threading.Semaphore(0)
        self.num_failures = 0
        self.tries: list[str] = []
        self.has_ended = threading.Event()

    def is_head_away(self):
        self.looks.release()
        return self.is_away

    def give_back(self, name):
        self.tries.append(name)
        if len(self.tries) <= self.num_failures:
            raise ConnectionError("the head is away")

    def looked_at(self, num):
        for _ in range(num):
            assert self.looks.acquire(timeout=PATIENCE_S)


@pytest.fixture
def head(monkeypatch):
    head = Head()
    monkeypatch.setattr(room_warden, "_is_head_away", head.is_head_away)
    monkeypatch.setattr(room_warden, "give_back", head.give_back)
    monkeypatch.setattr(room_warden, "_end", head.has_ended.set)
    monkeypatch.setattr(room_warden, "_LOOK_S", GRACE_S / 5)
    monkeypatch.setattr(room_warden, "_AGAIN_S", 0.001)
    yield head
    head.is_away = False
    assert head.has_ended.wait(PATIENCE_S), "no thread is left"


def test_a_head_that_is_away_for_longer_than_the_grace_finds_the_room_as_it_was(head):
    head.is_away = True
    warden = RoomWarden("room", GRACE_S)
    head.looked_at(20)
    assert not head.tries and warden.attend()
    head.is_away = False
    assert head.has_ended.wait(PATIENCE_S), "no driver has come since"
    assert head.tries == ["room"] and not warden.attend()


class Clock:
    """In the place of ``time``: each sleep passes at once. A driver attends after each of the first ``num_beats``."""

    def __init__(self, num_beats):
        self.now_s = 0.0
        self.num_sleeps = 0
        self.num_beats = num_beats
        self.warden = None
        self.has_warden = threading.Event()
        self.answers = []

    def monotonic(self):
        return self.now_s

    def sleep(self, duration_s):
        assert self.has_warden.wait(PATIENCE_S)
        self.now_s += duration_s
        self.num_sleeps += 1
        if self.num_sleeps <= self.num_beats:
            self.answers.append(self.warden.attend())


def test_a_driver_that_attends_keeps_the_room_for_one_grace_after_its_last_word(head, monkeypatch):
    monkeypatch.setattr(room_warden, "_LOOK_S", 2.0)
    clock = Clock(num_beats=100)
    monkeypatch.setattr(room_warden, "time", clock)
    clock.warden = RoomWarden("room", 60.0)
    clock.has_warden.set()
    assert head.has_ended.wait(PATIENCE_S)
    assert clock.answers == [True] * 100 and clock.now_s == 260.0 and head.tries == ["room"]


def test_room_that_is_not_given_back_at_once_is_given_back_again(head):
    head.num_failures = 3
    RoomWarden("room", GRACE_S)
    assert head.has_ended.wait(PATIENCE_S)
    assert head.tries == ["room"] * 4


def test_a_head_is_away_where_no_process_takes_connections():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert room_warden.why_away(address) is None
    assert room_warden.why_away(address) is not None
    assert room_warden.why_away("") is None

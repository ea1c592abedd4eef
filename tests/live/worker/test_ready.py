"""Ends that are watched: which are ready, and what a closed one's number does when it comes again."""

from __future__ import annotations

import socket

import pytest

from jettison.live.worker.ready import Readiness


class End:
    def __init__(self, wants_write=False):
        self.sock, self.other = socket.socketpair()
        self.wants_write = wants_write

    def fileno(self):
        return self.sock.fileno()

    def close(self):
        self.sock.close()
        self.other.close()


@pytest.fixture
def readiness():
    watched = Readiness()
    yield watched
    watched.close()


def test_an_end_is_ready_when_something_has_come_or_there_is_room_that_it_waits_for(readiness):
    quiet, told, full = End(), End(), End(wants_write=True)
    for key, end in {"quiet": quiet, "told": told, "full": full}.items():
        readiness.watch(key, end)
    told.other.send(b"x")
    assert readiness.look() == {"told", "full"}
    told.sock.recv(1)
    full.wants_write = False
    readiness.watch("full", full)
    assert readiness.look() == set() == readiness.look(0.001)
    for end in (quiet, told, full):
        end.close()


def test_a_number_that_comes_again_belongs_to_the_end_that_has_it_now(readiness):
    old = End()
    readiness.watch("old", old)
    number = old.fileno()
    old.close()
    new = End()
    assert number in (new.sock.fileno(), new.other.fileno())
    if new.other.fileno() == number:
        new.sock, new.other = new.other, new.sock
    readiness.watch("new", new)
    readiness.forget("old")
    readiness.forget("old")
    new.other.send(b"x")
    assert readiness.look() == {"new"}
    new.close()


def test_an_end_whose_descriptor_changes_is_watched_at_the_new_one(readiness):
    first, second = End(), End()
    readiness.watch("one", first)
    readiness.watch("one", second)
    first.other.send(b"x")
    assert readiness.look() == set()
    second.other.send(b"x")
    assert readiness.look() == {"one"}
    second.close()
    readiness.watch("one", second)
    assert readiness.look() == set(), "it has no descriptor any more"
    first.close()

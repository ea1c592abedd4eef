"""Links on their way: what a peer that refuses, lies or is not there makes of them. Opened ones: ``test_links``."""

from __future__ import annotations

import errno
import gc
import os
import select
import time

import pytest
from link_helpers import SECRET, make

from jettison.errors import LinkDownError
from jettison.transport.dialling import AWAIT_NS, PATIENCE_NS, PAUSE_NS, DialledLink
from jettison.transport.handshake import Identity, Purpose
from jettison.transport.link import FrameKind
from jettison.transport.sockets import Acceptor, listening_socket
from jettison.transport.tcp import Connection
from jettison.transport.tls import Credentials


@pytest.fixture(params=["unix", "tcp"])
def listener(request, tmp_path):
    """A listening socket and its address."""
    if request.param == "unix":
        os.chmod(tmp_path, 0o700)
        address = f"unix:{tmp_path}/s"
        sock = listening_socket(address, seqpacket=True)
    else:
        sock = listening_socket("tcp:127.0.0.1:0")
        address = f"tcp:127.0.0.1:{sock.getsockname()[1]}"
    yield sock, address
    sock.close()


class Clock:
    """In ns; it goes only when told to."""

    now_ns = 0

    def __call__(self):
        return self.now_ns


def dial(address, me=1, them=2, life=0, clock_ns=lambda: 0, purposes=(Purpose.LINK,), make=make):
    own, sizes = Credentials(SECRET, Identity(me, 0)), (4096, 8192)
    return DialledLink(address, own, Identity(them, life), purposes, make, sizes, clock_ns)


def poll_until(link, holds, acceptor=None, clock=None):
    for _ in range(100_000):
        if holds():
            return
        assert not list(link.poll_frames())
        if clock is not None:
            clock.now_ns += PAUSE_NS // 4
        if acceptor is not None:
            for sock, _ in acceptor.poll():
                sock.close()  # refused
    raise AssertionError("nothing happened")


def is_pausing(link):
    return link._resumes_ns is not None


def accept(link, acceptor, num_connections=1):
    """The other end's link, once this one has settled."""
    connections, theirs = [], None
    while link.settled is None:
        assert link.is_open and not list(link.poll_frames())
        connections += [Connection(*proven) for proven in acceptor.poll()]
        if theirs is None and len(connections) == num_connections:
            theirs = make(*sorted(connections, key=lambda c: c.handshake.purpose))
    return theirs


def test_a_link_that_is_opening_takes_nothing_and_says_what_it_will_take(listener):
    link = dial(listener[1])
    assert link.is_opening and link.is_open and link.settled is None and link.fileno() >= 0
    assert not link.send_frame(FrameKind.ACTIVATION, 1, b"", 0, lambda out: None)
    assert (link.max_payload(FrameKind.ACTIVATION), link.max_payload(FrameKind.KV_PIECE)) == (4096, 8192)
    assert link.queues_bulk == listener[1].startswith("tcp:")
    link.close()
    with pytest.raises(LinkDownError):
        link.send_frame(FrameKind.ACTIVATION, 1, b"", 0, lambda out: None)


@pytest.mark.parametrize("me", [1, 3])
@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_peer_that_refuses_is_dialled_again_after_a_pause_and_may_be_there_then(listener, me, hangs_up, caplog):
    caplog.set_level("INFO")
    (sock, address), clock = listener, Clock()
    acceptor = Acceptor(sock.dup(), SECRET, Identity(2, 0) if hangs_up else Identity(9, 0), Purpose.LINK)
    link = dial(address, me, clock_ns=clock)
    for refusal in range(1, 4):
        poll_until(link, lambda: is_pausing(link), acceptor)
        clock.now_ns += (AWAIT_NS if me == 3 else PAUSE_NS) - 1
        assert not list(link.poll_frames()) and is_pausing(link), "not before the pause is over"
        clock.now_ns += 1
        assert not list(link.poll_frames()) and not is_pausing(link), refusal
    acceptor.close()  # what has connected meanwhile waits at the socket
    acceptor = Acceptor(sock.dup(), SECRET, Identity(2, 0), Purpose.LINK)
    accept(link, acceptor).close()
    link.settled.close()
    link.close()
    acceptor.close()
    assert [record.levelname for record in caplog.records] == ["INFO"], "said once"


@pytest.mark.parametrize("me", [1, 3])
@pytest.mark.parametrize("how", ["nobody there", "refused", "another life", "another worker", "another secret"])
def test_a_link_that_is_refused_for_too_long_is_down(listener, me, how):
    (sock, address), clock = listener, Clock()
    them = {"another life": Identity(2, 7), "another worker": Identity(9, 0)}.get(how, Identity(2, 0))
    acceptor = Acceptor(sock.dup(), b"x" * 32 if how == "another secret" else SECRET, them, Purpose.LINK)
    if how == "nobody there":
        acceptor.close()
        sock.close()
    link = dial(address, me, clock_ns=clock)
    poll_until(link, lambda: not link.is_open, None if how == "nobody there" else acceptor, clock)
    assert link.failure is not None and link.fileno() == -1
    acceptor.close()


def test_a_peer_that_is_slow_to_answer_is_waited_for(listener):
    clock = Clock()
    link = dial(listener[1], clock_ns=clock)
    for _ in range(3):
        clock.now_ns += 10 * PATIENCE_NS
        assert not list(link.poll_frames())
    acceptor = Acceptor(listener[0].dup(), SECRET, Identity(2, 0), Purpose.LINK)
    accept(link, acceptor).close()
    link.settled.close()
    link.close()
    acceptor.close()


def test_the_end_of_a_pause_wakes_those_that_wait_for_the_link(listener):
    listener[0].close()
    link = dial(listener[1], clock_ns=time.monotonic_ns)
    poll_until(link, lambda: is_pausing(link))
    assert select.select([link.fileno()], [], [], 60)[0]
    assert not list(link.poll_frames()) and link.is_open
    link.close()


def test_a_worker_that_computed_while_it_was_refused_dials_again_all_the_same(listener):
    listener[0].close()
    clock = Clock()
    link = dial(listener[1], clock_ns=clock)
    for _ in range(3):
        clock.now_ns += 10 * PATIENCE_NS
        poll_until(link, lambda: is_pausing(link))
    assert link.is_open
    link.close()


def test_a_host_that_does_not_answer_at_all_is_tried_twice(listener):
    clock, tries = Clock(), []

    def fail(*connections):
        tries.append(connections)
        raise OSError(errno.ETIMEDOUT, "connection timed out")

    acceptor = Acceptor(listener[0].dup(), SECRET, Identity(2, 0), Purpose.LINK)
    link = dial(listener[1], clock_ns=clock, make=fail)
    poll_until(link, lambda: not link.is_open, acceptor, clock)
    assert len(tries) == 2
    acceptor.close()


def test_a_link_that_cannot_be_made_is_tried_again(listener):
    clock, failures = Clock(), [OSError("too many open files")]

    def make_or_fail(*connections):
        if failures:
            raise failures.pop()
        return make(*connections)

    acceptor = Acceptor(listener[0].dup(), SECRET, Identity(2, 0), Purpose.LINK)
    link = dial(listener[1], clock_ns=clock, make=make_or_fail)
    poll_until(link, lambda: is_pausing(link), acceptor)
    acceptor.poll()
    clock.now_ns += PAUSE_NS
    accept(link, acceptor).close()
    link.settled.close()
    link.close()
    acceptor.close()


def test_the_connections_of_a_link_are_dialled_at_once():
    sock = listening_socket("tcp:127.0.0.1:0")
    acceptor = Acceptor(sock, SECRET, Identity(2, 0), Purpose.LINK, frozenset({Purpose.URGENT}))
    link = dial(f"tcp:127.0.0.1:{sock.getsockname()[1]}", purposes=(Purpose.LINK, Purpose.URGENT))
    assert not acceptor.poll() and not list(link.poll_frames())
    poll_until(link, lambda: not any(dial.is_connecting for dial in link._dials))
    assert len(link._dials) == 2 and not acceptor.poll()
    accept(link, acceptor, num_connections=2).close()
    link.settled.close()
    link.close()
    acceptor.close()


def test_a_link_that_never_opened_leaves_no_descriptor(listener):
    gc.collect()
    num_files = len(os.listdir("/proc/self/fd"))
    acceptor = Acceptor(listener[0].dup(), SECRET, Identity(2, 0), Purpose.LINK)
    for me in (1, 3):
        link = dial(listener[1], me)
        poll_until(link, lambda link=link: is_pausing(link), acceptor)
        link.close()
    dial(listener[1]).close()
    acceptor.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == num_files

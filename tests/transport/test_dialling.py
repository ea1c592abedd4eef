"""Links on their way: what a peer that refuses, lies or is not there makes of them. Opened ones: ``test_links``."""

from __future__ import annotations

import gc
import os

import pytest
from link_helpers import SECRET, make

from jettison.errors import LinkDownError
from jettison.transport.dialling import DialledLink
from jettison.transport.handshake import Identity, Purpose
from jettison.transport.link import FrameKind
from jettison.transport.sockets import Acceptor, listening_socket


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


def dial(address, me=1, them=2, life=0):
    return DialledLink(address, SECRET, Identity(me, 0), Identity(them, life), [Purpose.LINK], make, (4096, 8192))


def poll_until(link, holds, acceptor=None):
    for _ in range(100_000):
        if holds():
            return
        assert not list(link.poll_frames())
        if acceptor is not None:
            for sock, _ in acceptor.poll():
                sock.close()  # refused
    raise AssertionError("nothing happened")


def test_a_link_that_is_opening_takes_nothing_and_says_what_it_will_take(listener):
    link = dial(listener[1])
    assert link.is_opening and link.is_open and link.settled is None and link.fileno() >= 0
    assert not link.send_frame(FrameKind.ACTIVATION, 1, b"", 0, lambda out: None)
    assert (link.max_payload(FrameKind.ACTIVATION), link.max_payload(FrameKind.KV_PIECE)) == (4096, 8192)
    assert link.queues_bulk == listener[1].startswith("tcp:")
    link.close()
    with pytest.raises(LinkDownError):
        link.send_frame(FrameKind.ACTIVATION, 1, b"", 0, lambda out: None)


@pytest.mark.parametrize(("me", "is_down"), [(1, True), (3, False)])
def test_a_refusal_by_a_lower_id_only_says_that_its_own_connection_comes(listener, me, is_down):
    acceptor = Acceptor(listener[0], SECRET, Identity(2, 0), Purpose.LINK)
    link = dial(listener[1], me)
    poll_until(link, lambda: link.fileno() < 0, acceptor)
    assert link.is_open != is_down and (link.failure is not None) == is_down
    assert not list(link.poll_frames()), "and it is not tried again"
    link.close()
    acceptor.close()


def test_nobody_there_is_a_link_that_is_down(listener):
    sock, address = listener
    sock.close()
    link = dial(address)
    poll_until(link, lambda: not link.is_open)
    assert link.failure is not None and link.fileno() == -1


@pytest.mark.parametrize("what", ["another life", "another worker", "another secret"])
def test_the_wrong_peer_is_a_link_that_is_down(listener, what):
    them = {"another life": Identity(2, 7), "another worker": Identity(9, 0)}.get(what, Identity(2, 0))
    acceptor = Acceptor(listener[0], b"x" * 32 if what == "another secret" else SECRET, them, Purpose.LINK)
    link = dial(listener[1])
    poll_until(link, lambda: not link.is_open, acceptor)
    acceptor.close()


def test_a_link_that_never_opened_leaves_no_descriptor(listener):
    gc.collect()
    num_files = len(os.listdir("/proc/self/fd"))
    acceptor = Acceptor(listener[0].dup(), SECRET, Identity(2, 0), Purpose.LINK)
    for me in (1, 3):
        link = dial(listener[1], me)
        poll_until(link, lambda link=link: link.fileno() < 0, acceptor)
        link.close()
    dial(listener[1]).close()
    acceptor.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == num_files

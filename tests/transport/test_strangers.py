"""Connections to a worker's port that have shown no certificate: few are taken, they leave soon, and peers come in all
the same, as quickly as if there were none."""

from __future__ import annotations

import contextlib
import socket
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from link_helpers import AUTHORITY, SECRET, contexts

from descriptors import no_descriptor_left
from jettison.transport import sockets
from jettison.transport.dialling import Dialling
from jettison.transport.handshake import Identity, Purpose
from jettison.transport.sockets import Acceptor, listening_socket
from jettison.transport.tls import Credentials, TlsContexts

US, THEM, NO_MEMBER = contexts(2), contexts(1), TlsContexts.without_certificate(AUTHORITY.certificate)


def repeat(turn, holds):
    for _ in range(20_000):
        if holds():
            return
        turn()
    raise AssertionError("nothing happened")


class Listening:
    """A listening socket that counts what is taken from it."""

    def __init__(self, sock):
        self.sock, self.num_taken = sock, 0
        self.fileno, self.close, self.family = sock.fileno, sock.close, sock.family

    def accept(self):
        taken = self.sock.accept()
        self.num_taken += 1
        return taken


class Port:
    """Worker 2, which lets a peer be silent for 300 s, by a clock that goes only when told to."""

    def __init__(self):
        self.now_s = 0.0
        self.listening = Listening(listening_socket("tcp:127.0.0.1:0"))
        self.where = self.listening.sock.getsockname()
        self.acceptor = Acceptor(
            self.listening, SECRET, Identity(2, 0), Purpose.LINK, timeout_s=300.0, clock_s=lambda: self.now_s, tls=US)
        self.ends = []
        self.let_in = []

    def stranger(self, speaks=False):
        sock = socket.socket()
        sock.setblocking(False)
        self.ends.append(sock)
        sock.connect_ex(self.where)
        if speaks:
            with contextlib.suppress(OSError):  # it finds no room to connect
                NO_MEMBER.wrap(sock, accepts=False).send(b"?")
        return sock

    def dial(self, tls=THEM, me=1):
        dial = Dialling(f"tcp:127.0.0.1:{self.where[1]}", Credentials(SECRET, Identity(me, 0), tls), Purpose.LINK)
        self.ends.append(dial)
        return dial

    def show(self, dial):
        """Up to where this end knows its certificate; then the peer is silent."""
        def turn():
            dial.advance()
            self.poll()

        repeat(turn, lambda: self.acceptor._pending and not any(each.is_stranger for each in self.acceptor._pending))

    def poll(self, after_s=0.0):
        self.now_s += after_s
        self.let_in += self.acceptor.poll()
        return [handshake.peer for _, handshake in self.let_in]

    @property
    def num_open(self):
        return len(self.acceptor.filenos()) - 1

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.acceptor.close()
        for end in (*self.ends, *(wire for wire, _ in self.let_in)):
            (end.sock if isinstance(end, Dialling) else end).close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 400)), min_size=1, max_size=6), st.booleans())
def test_strangers_that_come_without_a_pause_are_few_and_paced(turns, speaks):
    with Port() as port:
        seen = [(0.0, 0)]
        for num_strangers, after_ms in turns:
            for _ in range(num_strangers):
                port.stranger(speaks)
            assert port.poll(after_ms / 1e3) == []
            seen.append((port.now_s, port.listening.num_taken))
            assert port.num_open <= sockets._MAX_STRANGERS
        for (from_s, before), (to_s, after) in combinations(seen, 2):
            assert after - before <= sockets._BURST + (to_s - from_s) / sockets._PAUSE_S + 1e-6


def test_a_peer_that_has_shown_its_certificate_waits_as_long_as_before_whatever_comes_meanwhile():
    with Port() as port:
        peer = port.dial()
        port.show(peer)
        for _ in range(12):
            for _ in range(50):
                port.stranger()
            assert port.poll(20.0) == []
        repeat(lambda: None, peer.advance)
        repeat(port.poll, lambda: port.let_in)
        assert port.poll() == [Identity(1, 0)] and port.listening.num_taken > 2 * sockets._MAX_STRANGERS


def test_a_peer_comes_in_behind_strangers_that_never_pause():
    with Port() as port:
        for _ in range(150):
            port.stranger(speaks=True)
        peer = port.dial()
        for _ in range(300):
            for _ in range(2):
                port.stranger(speaks=True)
            peer.advance()
            if port.poll(sockets._PAUSE_S):
                return
        raise AssertionError("the peer is kept out")


def test_many_peers_that_come_at_once_are_all_let_in_at_once():
    """The time stands still: none of them waits for another."""
    with Port() as port:
        peers = [port.dial() for _ in range(3 * sockets._BURST)]
        for _ in range(1000):
            for peer in peers:
                peer.advance()
            if len(port.poll()) == len(peers):
                return
        raise AssertionError(f"{len(port.let_in)} of {len(peers)} are let in")


@pytest.mark.parametrize("speaks", [True, False])
def test_a_stranger_leaves_after_a_few_seconds(speaks):
    with Port() as port:
        port.stranger(speaks)
        repeat(port.poll, lambda: port.num_open)
        for _ in range(3):
            port.poll(0.9 * sockets._SHOW_S)
        assert not port.num_open and not port.acceptor.has_pending


def test_a_peer_is_heard_before_it_is_given_up_by_a_worker_that_has_computed_meanwhile():
    with Port() as port:
        peer = port.dial()
        peer.advance()
        repeat(port.poll, lambda: port.num_open)
        repeat(peer.advance, lambda: not peer.is_connecting)
        port.poll(60.0)  # its first word
        assert port.num_open == 1
        repeat(peer.advance, lambda: peer.sock.peer_name is not None)
        port.poll(60.0)  # its certificate
        assert port.num_open == 1
        port.poll(200.0)
        repeat(lambda: None, peer.advance)
        repeat(port.poll, lambda: port.let_in)


def test_links_get_turns_between_layers_for_a_peer_and_not_for_many_strangers():
    with Port() as port:
        for _ in range(20):
            port.stranger(speaks=True)
        repeat(port.poll, lambda: port.num_open == 20)
        assert not port.acceptor.has_pending
        peer = port.dial()
        repeat(lambda: (peer.advance(), port.poll()), lambda: port.acceptor.has_pending)
        assert port.num_open == 21


def test_without_a_descriptor_a_stranger_gives_way_and_a_peer_does_not():
    with Port() as port:
        peer = port.dial()
        port.show(peer)
        stranger = port.stranger()
        repeat(port.poll, lambda: port.num_open == 2)
        port.stranger()
        with no_descriptor_left():
            repeat(port.poll, lambda: port.listening.num_taken == 3)
        stranger.setblocking(True)
        assert stranger.recv(1) == b"" and port.num_open == 2
        port.acceptor._pending[1].sock.close()
        del port.acceptor._pending[1]
        port.stranger()
        with no_descriptor_left():
            repeat(port.poll, lambda: port.acceptor.lacks_descriptor)
        assert port.num_open == 1
        repeat(lambda: None, peer.advance)
        repeat(port.poll, lambda: port.let_in)

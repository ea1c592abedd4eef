"""Connecting: only who knows the secret, from the right life, for the right purpose."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_helpers import SECRET, proven

from descriptors import no_descriptor_left
from jettison.errors import LinkDownError
from jettison.transport.handshake import Handshake, HandshakeError, Identity, Purpose
from jettison.transport.sockets import Acceptor, connect, listening_socket, parse_address


def test_both_ends_know_each_other_and_share_a_fresh_key():
    ours, theirs = proven(3, 4)
    assert (ours.peer, theirs.peer) == (Identity(4, 0), Identity(3, 0))
    assert ours.session_key == theirs.session_key != proven(3, 4)[0].session_key


def exchange(secret_a=SECRET, secret_b=SECRET, purpose_a=Purpose.LINK, purpose_b=Purpose.LINK):
    a = Handshake(secret_a, Identity(1, 0), purpose_a, initiator=True)
    b = Handshake(secret_b, Identity(2, 0), purpose_b, initiator=False)
    return a, b, b.feed(a.first())


def test_another_secret_is_refused_by_the_initiator_first():
    a, b, reply = exchange(secret_b=b"f" * 32)
    with pytest.raises(HandshakeError, match="secret"):
        a.feed(reply)
    with pytest.raises(HandshakeError):
        _ = b.peer


def test_another_purpose_is_refused():
    with pytest.raises(HandshakeError, match="purpose"):
        exchange(purpose_b=Purpose.CONTROL)


def test_a_reflected_proof_is_refused():
    _, b, reply = exchange()
    with pytest.raises(HandshakeError, match="secret"):
        b.feed(reply[-32:])


@given(st.integers(1, 200), st.binary(max_size=300))
def test_bytes_prove_the_same_in_whatever_pieces_they_come(size, behind):
    a = Handshake(SECRET, Identity(1, 0), Purpose.LINK, initiator=True)
    b = Handshake(SECRET, Identity(2, 0), Purpose.LINK, initiator=False)

    def taken(data):
        return b"".join(b.take(data[at : at + size]) for at in range(0, len(data), size))

    reply = taken(a.first())
    assert not b.done
    assert taken(a.feed(reply) + behind) == b""
    assert b.done and b.peer == Identity(1, 0) and b.session_key == a.session_key
    assert b.rest == behind


def test_short_secrets_are_refused():
    with pytest.raises(ValueError):
        Handshake(b"short", Identity(1, 0), Purpose.LINK, initiator=True)


@given(st.binary(max_size=200))
def test_garbage_never_proves_anything(message):
    b = Handshake(SECRET, Identity(2, 0), Purpose.LINK, initiator=False)
    try:
        b.feed(message)
        b.feed(message[:32])
    except HandshakeError:
        pass
    assert not b.done


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def accept_one(acceptor, tries=20_000):
    for _ in range(tries):
        if proven_now := acceptor.poll():
            return proven_now[0]
    raise AssertionError("no peer came")


@pytest.mark.parametrize("seqpacket", [False, True])
def test_connect_and_accept(folder, seqpacket):
    address = f"unix:{folder}/s"
    acceptor = Acceptor(listening_socket(address, seqpacket=seqpacket), SECRET, Identity(2, 0), Purpose.LINK)
    result = []
    thread = threading.Thread(target=lambda: result.append(
        connect(address, SECRET, Identity(1, 5), Purpose.LINK, seqpacket=seqpacket)))
    thread.start()
    sock, handshake = accept_one(acceptor)
    thread.join()
    assert handshake.peer == Identity(1, 5) and result[0][1].peer == Identity(2, 0)
    sock.close()
    result[0][0].close()
    acceptor.close()


def hung_up(sock):
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_a_silent_or_rude_client_does_not_hold_up_another(folder):
    address = f"unix:{folder}/s"
    acceptor = Acceptor(listening_socket(address), SECRET, Identity(2, 0), Purpose.LINK)
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(f"{folder}/s")
    rude = socket.socket(socket.AF_UNIX)
    rude.connect(f"{folder}/s")
    rude.send(b"GET / HTTP/1.1\r\n" * 8)
    result = []
    thread = threading.Thread(target=lambda: result.append(connect(address, SECRET, Identity(1, 0), Purpose.LINK)))
    thread.start()
    _, handshake = accept_one(acceptor)
    thread.join()
    assert handshake.peer.worker_id == 1
    rude.settimeout(1.0)
    assert hung_up(rude)
    for sock in (silent, rude, result[0][0]):
        sock.close()
    acceptor.close()


def test_without_a_descriptor_connections_wait_or_take_the_place_of_one_that_is_not_proven(folder):
    acceptor = Acceptor(listening_socket(f"unix:{folder}/s"), SECRET, Identity(2, 0), Purpose.LINK)
    first, second = (socket.socket(socket.AF_UNIX) for _ in range(2))
    for sock in (first, second):
        sock.settimeout(1.0)
    first.connect(f"{folder}/s")
    with no_descriptor_left():
        assert acceptor.poll() == [] and not acceptor.has_pending
    assert acceptor.poll() == [] and acceptor.has_pending
    second.connect(f"{folder}/s")
    with no_descriptor_left():
        assert acceptor.poll() == [] and acceptor.has_pending
    assert hung_up(first)
    second.send(Handshake(SECRET, Identity(1, 0), Purpose.LINK, initiator=True).first())
    assert acceptor.poll() == [] and second.recv(1), "it is heard"
    for sock in (first, second):
        sock.close()
    acceptor.close()


def test_a_slow_client_is_kept_while_it_makes_progress_and_a_silent_one_is_not(folder):
    now = [0.0]
    sock = listening_socket(f"unix:{folder}/s")
    acceptor = Acceptor(sock, SECRET, Identity(2, 0), Purpose.LINK, timeout_s=300.0, clock_s=lambda: now[0])
    clients = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    handshake = Handshake(SECRET, Identity(1, 0), Purpose.LINK, initiator=True)
    for client in clients:
        client.connect(f"{folder}/s")
    assert acceptor.poll() == [] and acceptor.has_pending
    first = handshake.first()
    for part in (first[:10], first[10:]):
        now[0] += 200.0
        clients[0].send(part)
        assert acceptor.poll() == []
    assert hung_up(clients[1])
    proof = handshake.feed(clients[0].recv(handshake.needed))
    now[0] += 299.0
    clients[0].send(proof)
    [(accepted, proven_now)] = acceptor.poll()
    assert proven_now.peer == Identity(1, 0) and not acceptor.has_pending
    for each in (accepted, *clients):
        each.close()
    acceptor.close()


def test_a_worker_that_was_replaced_is_refused(folder):
    address = f"unix:{folder}/s"
    acceptor = Acceptor(listening_socket(address), SECRET, Identity(2, 0), Purpose.LINK)
    for epoch, welcome in ((1, True), (0, False), (1, True), (2, True)):
        thread = threading.Thread(target=lambda epoch=epoch: connect(address, SECRET, Identity(1, epoch), Purpose.LINK))
        thread.start()
        proven_now = []
        while thread.is_alive():  # the initiator is done when it has sent its proof
            proven_now += acceptor.poll()
        thread.join()
        proven_now += acceptor.poll()
        assert bool(proven_now) == welcome, epoch
    acceptor.close()


def test_nobody_there_is_an_error_in_time(folder):
    with pytest.raises(LinkDownError, match="no peer listens"):
        connect(f"unix:{folder}/none", SECRET, Identity(1, 0), Purpose.LINK, timeout_s=0.02)


def test_a_shared_folder_and_all_interfaces_are_refused(folder):
    folder.chmod(0o755)
    with pytest.raises(ValueError, match="0700"):
        listening_socket(f"unix:{folder}/s")
    for address in ("tcp:0.0.0.0:0", "tcp:[::]:0", "nonsense", "tcp:host", "unix:"):
        with pytest.raises(ValueError):
            listening_socket(address)


def test_addresses():
    assert parse_address("unix:/a:b") == ("unix", "/a:b", 0)
    assert parse_address("tcp:127.0.0.1:80") == ("tcp", "127.0.0.1", 80)
    assert parse_address("tcp:[::1]:80") == ("tcp", "::1", 80)
    assert os.path.isabs(parse_address("unix:/a")[1])

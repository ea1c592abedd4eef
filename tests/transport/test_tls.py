"""TLS between hosts: which worker gets in, what a capture of the wire shows, sockets that take and give a little at a
time.

What every link promises is told of these, too, in ``test_links``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import ssl

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509 import CertificateSigningRequestBuilder, Name, load_pem_x509_certificate
from hypothesis import given, settings
from hypothesis import strategies as st
from link_helpers import SECRET, connected, contexts, dialled_pair, make, proven

from jettison.errors import LinkDownError
from jettison.transport.authority import MAX_REQUEST_BYTES, Applicant, Authority
from jettison.transport.dialling import DialledLink, Dialling
from jettison.transport.handshake import Identity, Purpose
from jettison.transport.link import FrameKind
from jettison.transport.sockets import Acceptor, listening_socket
from jettison.transport.tcp import Connection, TcpLink
from jettison.transport.tls import Credentials, TlsContexts, name_of

OTHERS = Authority()
"""Of another cluster."""
WORKER = Identity(1, 0)
WORDS = b"what the tenant has asked, in plain words"


class Door:
    """Worker 2, life 3, which takes connections."""

    def __init__(self, tls):
        self.sock = listening_socket("tcp:127.0.0.1:0")
        self.address = f"tcp:127.0.0.1:{self.sock.getsockname()[1]}"
        self.acceptor = Acceptor(self.sock, SECRET, Identity(2, 3), Purpose.LINK, tls=tls)

    def meet(self, tls, me=WORKER):
        """Dial it: what the dialling end raised, None where it got in; and whether the door has let it in."""
        dial, let_in = Dialling(self.address, Credentials(SECRET, me, tls), Purpose.LINK), []
        try:
            for _ in range(20_000):
                let_in += self.acceptor.poll()
                connection = dial.advance()
                if connection is not None:
                    for _ in range(200):
                        let_in += self.acceptor.poll()
                    return None, bool(let_in)
            raise AssertionError("nothing happened")
        except (LinkDownError, OSError) as error:
            return error, bool(let_in)
        finally:
            dial.sock.close()
            for wire, _ in let_in:
                wire.close()


@pytest.fixture
def door():
    door = Door(contexts(2, 3))
    yield door
    door.acceptor.close()


def test_a_worker_with_its_own_certificate_gets_in(door):
    assert door.meet(contexts(1)) == (None, True)


@pytest.mark.parametrize("theirs", [
    pytest.param(lambda: contexts(1, authority=OTHERS), id="of another authority"),
    pytest.param(lambda: contexts(1, named=Identity(4, 0)), id="of another worker"),
    pytest.param(lambda: contexts(1, named=Identity(1, 1)), id="of another life"),
    pytest.param(lambda: None, id="none at all"),
])  # fmt: skip
def test_whose_certificate_is_not_its_own_does_not(door, theirs):
    assert not door.meet(theirs())[1]
    assert door.meet(contexts(1)) == (None, True), "the door is open to the others"


@pytest.mark.parametrize("ours", [
    pytest.param(lambda: contexts(2, 3, authority=OTHERS), id="of another authority"),
    pytest.param(lambda: contexts(2, 3, named=Identity(2, 2)), id="of an older life"),
    pytest.param(lambda: None, id="none at all"),
])  # fmt: skip
def test_a_worker_does_not_stay_at_a_door_with_a_wrong_one(ours):
    door = Door(ours())
    error, let_in = door.meet(contexts(1))
    assert error is not None and not let_in
    door.acceptor.close()


def test_an_older_life_is_refused_whatever_it_shows(door):
    assert door.meet(contexts(1, 5), Identity(1, 5))[1]
    assert not door.meet(contexts(1, 4), Identity(1, 4))[1]


def test_the_secret_is_asked_for_inside(door):
    dial = Dialling(door.address, Credentials(b"x" * 32, WORKER, contexts(1)), Purpose.LINK)

    def turns():
        for _ in range(20_000):
            assert not door.acceptor.poll()
            assert dial.advance() is None

    with pytest.raises((LinkDownError, OSError)):
        turns()
    dial.sock.close()


class Tapped:
    """A connection through a tap that keeps all bytes of either direction."""

    def __init__(self):
        self.near, a = connected()
        b, self.far = connected()
        self.ends = [(a, b), (b, a)]
        self.taken = [b"", b""]
        for sock in (self.near, self.far, a, b):
            sock.setblocking(False)

    def pass_on(self, num_bytes=1 << 16):
        for i, (source, target) in enumerate(self.ends):
            try:
                data = source.recv(num_bytes)
            except BlockingIOError:
                continue
            self.taken[i] += data
            target.setblocking(True)
            target.sendall(data)
            target.setblocking(False)

    def close(self):
        for sock in (self.near, self.far, *self.ends[0]):
            sock.close()


def open_through(tap, tls=True):
    """Both ends' sockets, after a greeting each."""
    near = contexts(1).wrap(tap.near, accepts=False) if tls else tap.near
    far = contexts(2).wrap(tap.far, accepts=True) if tls else tap.far
    near.send(b"hello")
    far.send(b"hello")
    got = {near: b"", far: b""}
    for _ in range(1000):
        tap.pass_on()
        for wire in got:
            try:
                got[wire] += wire.recv(5 - len(got[wire])) if len(got[wire]) < 5 else b""
            except BlockingIOError:
                continue
    assert list(got.values()) == [b"hello", b"hello"]
    return near, far


@pytest.mark.parametrize("tls", [True, False])
def test_a_capture_shows_nothing_of_what_is_said(tls):
    tap = Tapped()
    near, far = open_through(tap, tls)
    near.send(WORDS)
    far.send(WORDS)
    for _ in range(100):
        tap.pass_on()
    assert near.recv(100) == far.recv(100) == WORDS
    seen = [WORDS in taken for taken in tap.taken]
    assert seen == [not tls, not tls]
    if tls:
        assert name_of(Identity(1, 0)).encode() not in tap.taken[0], "TLS 1.3 encrypts certificates, too"
    tap.close()


def test_what_was_captured_opens_nothing(door):
    """A whole conversation of a worker that got in, said again by another."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    dial = Dialling(address, Credentials(SECRET, WORKER, contexts(1)), Purpose.LINK)
    inside = socket.create_connection(door.sock.getsockname())
    while dial.advance() is None and dial.is_connecting:
        pass
    outside, _ = listener.accept()
    said, let_in = [], []
    for sock in (inside, outside):
        sock.setblocking(False)
    for _ in range(20_000):
        let_in += door.acceptor.poll()
        for source, target in ((outside, inside), (inside, outside)):
            try:
                data = source.recv(1 << 16)
            except BlockingIOError:
                continue
            if source is outside:
                said.append(data)
            target.sendall(data)
        if dial.advance() is not None and let_in:
            break
    assert let_in and said
    with socket.create_connection(door.sock.getsockname()) as again:
        again.setblocking(False)
        for data in said:
            try:
                again.send(data)
            except OSError:
                break
            for _ in range(200):
                assert not door.acceptor.poll()
    for sock in (inside, outside, listener, dial.sock, let_in[0][0]):
        sock.close()


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_changed_byte_ends_the_connection(place):
    tap = Tapped()
    near, far = open_through(tap)
    near.send(WORDS * 100)
    (source, target), _ = tap.ends
    data = bytearray()
    for _ in range(100):
        try:
            data += source.recv(1 << 16)
        except BlockingIOError:
            continue
    data[int(place * len(data))] ^= 1
    target.sendall(data)

    def read():
        for _ in range(100):
            with contextlib.suppress(BlockingIOError):
                far.recv(1 << 16)

    with pytest.raises(ssl.SSLError):
        read()
    tap.close()


def _told(most, least, turn):
    """What is said, in bytes, and how much each call takes of it."""
    return st.tuples(st.lists(st.integers(1, most), min_size=1, max_size=4),
                     st.lists(st.integers(least, turn), min_size=1, max_size=9))  # fmt: skip


@settings(max_examples=30)
@given(_told(300, 1, 50) | _told(400_000, 10_000, 70_000))
def test_bytes_come_whole_however_little_the_network_takes(told):
    sizes, turns = told
    tap = Tapped()
    near, far = open_through(tap)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sent = b"".join(bytes([i % 251]) * size for i, size in enumerate(sizes))
    at, got, turn = 0, bytearray(), itertools.cycle(turns)
    for _ in range(1_000_000):
        if at < len(sent):
            with contextlib.suppress(BlockingIOError):
                at += near.sendmsg([memoryview(sent)[at : at + next(turn)], memoryview(sent)[at + 10**9 :]])
        else:
            near.flush()
        tap.pass_on(next(turn))
        try:
            got += far.recv(next(turn))
        except BlockingIOError:
            assert not far.has_unread
        if len(got) == len(sent):
            break
    assert bytes(got) == sent and not near.has_unsent
    tap.close()


@pytest.mark.parametrize("waits", [True, False])
def test_frames_that_were_read_and_not_given_back_are_told_of(waits):
    """The socket has nothing left to say then: what is decrypted here would wait for ever."""
    a, b = dialled_pair("tcp", 2, tls=True, waits=waits)
    poll = select.poll()
    poll.register(b.fileno(), select.POLLIN)
    num_sent, held, num_got = 0, [], 0
    while num_got < 60:
        while num_sent < 60 and a.send_frame(FrameKind.KV_PIECE, num_sent, b"", 500, lambda to: to.fill(7)):
            num_sent += 1
        list(a.poll_frames())
        if not poll.poll(1000):
            raise AssertionError(f"{num_got} of {num_sent} frames, and nothing is told of the others")
        for frame in b.poll_frames():
            held.append(frame)
            break  # the caller has had enough for now
        if len(held) == 8 or num_got + len(held) == 60:
            num_got += len(held)
            for frame in held:
                frame.release()
            held.clear()
    for link in (a, b):
        link.close()


def test_half_a_link_that_waits_for_its_other_half_lets_its_worker_sleep():
    halves = []
    for purpose in (Purpose.LINK, Purpose.URGENT):
        (near, far), (ours, theirs) = connected(), proven(purpose=purpose)
        near.setblocking(False)
        far.setblocking(False)
        halves.append((Connection(contexts(1).wrap(near, accepts=False), ours),
                       Connection(contexts(2).wrap(far, accepts=True), theirs)))  # fmt: skip
    link, speaks = TcpLink(*halves[0][0], halves[1][0]), TcpLink(*halves[0][1])
    num_wakes = 0
    for _ in range(300):
        assert not link.attached()
        speaks.attached()
        num_wakes += bool(select.select([link.fileno()], [], [], 0.001)[0])
    assert link._bulk.attached and num_wakes < 30
    for end in (link, speaks, halves[1][1].sock):
        end.close()


def test_a_peer_that_hangs_up_is_noticed():
    a, b = dialled_pair("tcp", 2, tls=True)
    a.close()
    for _ in range(1000):
        list(b.poll_frames())
        if not b.is_open:
            break
    assert not b.is_open and b.failure


def test_a_link_is_dialled_with_the_certificate_of_the_life_that_is_meant(door):
    link = DialledLink(door.address, Credentials(SECRET, WORKER, contexts(1)), Identity(2, 3), [Purpose.LINK], make,
                       (4096, 8192))  # fmt: skip
    accepted = []
    for _ in range(20_000):
        list(link.poll_frames())
        accepted += door.acceptor.poll()
        if accepted:
            break
    assert accepted[0][1].peer == Identity(1, 0)
    link.close()
    accepted[0][0].close()


# --- the authority


def test_a_certificate_says_what_the_authority_says_and_not_what_was_asked():
    applicant = Applicant(Identity(7, 7))
    pem = Authority().sign(applicant.request, Identity(1, 2))
    assert load_pem_x509_certificate(pem).subject.rfc4514_string() == f"CN={name_of(Identity(1, 2))}"


def _request(key):
    return CertificateSigningRequestBuilder().subject_name(Name([])).sign(key, hashes.SHA256()).public_bytes(
        serialization.Encoding.DER)


def _changed(object_id):
    """A request in which the last number of this object identifier is another one."""
    request = Applicant(Identity(1, 0)).request
    assert object_id in request
    return request.replace(object_id, object_id[:-1] + b"\x7f")


@pytest.mark.parametrize("request_of", [
    pytest.param(lambda: b"", id="nothing"),
    pytest.param(lambda: b"0" * (MAX_REQUEST_BYTES + 1), id="too long"),
    pytest.param(lambda: _request(rsa.generate_private_key(65537, 2048)), id="a key of another kind"),
    pytest.param(lambda: _request(ec.generate_private_key(ec.SECP384R1())), id="another curve"),
    pytest.param(lambda: Applicant(Identity(1, 0)).request[:-1] + b"\0", id="not signed by its key"),
    pytest.param(lambda: _changed(b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01"), id="an unknown kind of key"),
    pytest.param(lambda: _changed(b"\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07"), id="an unknown curve"),
])  # fmt: skip
def test_what_is_no_request_is_not_signed(request_of):
    with pytest.raises(LinkDownError, match="no signing request"):
        Authority().sign(request_of(), Identity(1, 0))


@given(st.binary(max_size=300))
def test_no_bytes_break_the_authority(data):
    with pytest.raises(LinkDownError):
        OTHERS.sign(data, Identity(1, 0))


def test_a_certificate_of_another_key_is_not_taken():
    authority = Authority()
    other = authority.sign(Applicant(Identity(1, 0)).request, Identity(1, 0))
    with pytest.raises(LinkDownError, match="another key"):
        Applicant(Identity(1, 0)).papers(other, authority.certificate)


def test_the_key_is_in_no_file_and_no_descriptor_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    applicant = Applicant(Identity(1, 0))
    papers = applicant.papers(OTHERS.sign(applicant.request, Identity(1, 0)), OTHERS.certificate)
    TlsContexts(papers)
    assert len(os.listdir("/proc/self/fd")) == before and not list(tmp_path.iterdir())

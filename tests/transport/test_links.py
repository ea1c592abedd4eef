"""What every link promises, over each kind; then what only shared memory and TCP can get wrong."""

from __future__ import annotations

import os
import random
import select
import socket
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from link_helpers import PAIRS, SMALL, connected, proven, shm_pair, tcp_pair, tcp_pair_of_two

from jettison.errors import LinkDownError
from jettison.transport import shm
from jettison.transport.link import FrameKind
from jettison.transport.shm import ShmLink, SlotGeometry
from jettison.transport.tcp import Connection, TcpLink

KINDS = list(FrameKind)


def filled(data):
    array = np.frombuffer(data, dtype=np.uint8)

    def fill(out):
        out[:] = array

    return fill


def send(link, kind, tag, data=b"", aux=b""):
    return link.send_frame(kind, tag, aux, len(data), filled(data))


def poll_until(link, count, other=None):
    """Frames, once ``count`` have come (TCP delivers in its own time)."""
    frames = []
    for _ in range(10_000):
        if other is not None:
            list(other.poll_frames())  # lets the sender push what it has queued
        frames += link.poll_frames()
        if len(frames) >= count:
            return frames
    raise AssertionError(f"{len(frames)} of {count} frames came; {link.failure}")


def wait_down(link):
    for _ in range(10_000):
        list(link.poll_frames())
        if not link.is_open:
            return
    raise AssertionError("the link did not notice")


@pytest.fixture(params=PAIRS)
def pair(request):
    a, b = PAIRS[request.param]()
    yield a, b
    a.close()
    b.close()


def test_frames_arrive_as_they_were_sent(pair):
    a, b = pair
    assert (a.peer, b.peer) == (2, 1)
    sent = [(FrameKind.TRANSFER_BEGIN, -7, b"", b"x" * 128), (FrameKind.KV_PIECE, 1 << 62, os.urandom(8192), b"\0\1"),
            (FrameKind.ACTIVATION, 0, os.urandom(4096), b""), (FrameKind.TRANSFER_END, -(1 << 63), b"", b"")]
    for kind, tag, data, aux in sent:
        assert send(a, kind, tag, data, aux)
    frames = poll_until(b, 4, other=a)
    got = [(frame.kind, frame.tag, frame.payload.tobytes(), frame.aux) for frame in frames]
    bulk = [frame for frame in got if frame[0].is_bulk]
    assert sorted(got) == sorted(sent) and bulk == [frame for frame in sent if frame[0].is_bulk]
    assert not frames[0].payload.flags.writeable or frames[0].payload.size == 0


def test_both_directions_are_independent(pair):
    a, b = pair
    assert send(a, FrameKind.ACTIVATION, 1, b"forth") and send(b, FrameKind.ACTIVATION, 2, b"back")
    assert [frame.payload.tobytes() for frame in poll_until(b, 1)] == [b"forth"]
    assert [frame.payload.tobytes() for frame in poll_until(a, 1)] == [b"back"]


def test_bulk_back_pressure_leaves_activations_alone(pair):
    a, b = pair
    data = os.urandom(8192)
    num_sent = 0
    while send(a, FrameKind.SHARD_PIECE, num_sent, data):
        num_sent += 1
        assert num_sent < 5000, "no back-pressure"
    assert send(a, FrameKind.ACTIVATION, -1, b"urgent")
    tags = []
    for _ in range(20_000):
        list(a.poll_frames())
        for frame in b.poll_frames():
            with frame:
                tags.append(frame.tag)
                assert frame.payload.tobytes() == (b"urgent" if frame.tag == -1 else data)
        if len(tags) > num_sent:
            break
    assert sorted(tags) == [-1, *range(num_sent)]
    list(a.poll_frames())
    assert send(a, FrameKind.SHARD_PIECE, 0, data), "released frames did not give their room back"


def test_arguments_that_can_never_fit_are_refused(pair):
    a, _ = pair
    for arguments in [(FrameKind.ACTIVATION, 0, b"", 4097), (FrameKind.KV_PIECE, 0, b"", 8193),
                      (FrameKind.KV_PIECE, 0, b"a" * 129, 1), (FrameKind.KV_PIECE, 1 << 63, b"", 1)]:
        with pytest.raises(ValueError):
            a.send_frame(*arguments, lambda out: None)


def test_a_fill_that_raises_sends_nothing(pair):
    a, b = pair

    def broken(out):
        raise RuntimeError("no bytes today")

    for _ in range(10):
        with pytest.raises(RuntimeError):
            a.send_frame(FrameKind.KV_PIECE, 1, b"", 100, broken)
    assert send(a, FrameKind.KV_PIECE, 2, b"later")
    assert [frame.tag for frame in poll_until(b, 1)] == [2]


def test_a_closed_peer_is_noticed_after_what_it_sent(pair):
    a, b = pair
    assert send(a, FrameKind.KV_PIECE, 1, b"last words")
    frames = poll_until(b, 1)
    a.close()
    wait_down(b)
    assert b.failure and frames[0].payload.tobytes() == b"last words"
    frames[0].release()
    with pytest.raises(LinkDownError):
        send(b, FrameKind.KV_PIECE, 1, b"hello?")
    b.close()
    b.close()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(PAIRS)), st.integers(0, 2**32 - 1))
def test_any_interleaving_keeps_order_and_bytes(name, seed):
    """Random sizes, releases out of order, both classes: slots wrap round many times."""
    rng = random.Random(seed)
    a, b = PAIRS[name]()
    sent = {False: [], True: []}
    got = {False: [], True: []}
    held = []
    for i in range(120):
        action = rng.random()
        if action < 0.6:
            kind = rng.choice(KINDS)
            data = rng.randbytes(rng.randint(0, a.max_payload(kind)))
            if send(a, kind, i, data):
                sent[kind.is_bulk].append((i, data))
        elif action < 0.8:
            for frame in b.poll_frames():
                got[frame.kind.is_bulk].append((frame.tag, frame.payload.tobytes()))
                held.append(frame)
        elif held:
            held.pop(rng.randrange(len(held))).release()
        if rng.random() < 0.3:
            list(a.poll_frames())
    for _ in range(10_000):
        list(a.poll_frames())
        while held:
            held.pop().release()
        for frame in b.poll_frames():
            got[frame.kind.is_bulk].append((frame.tag, frame.payload.tobytes()))
            held.append(frame)
        if got == sent:
            break
    assert got == sent and a.is_open and b.is_open
    a.close()
    b.close()


# --- shared memory


def test_slots_are_reused_and_a_held_payload_is_not_overwritten():
    a, b = shm_pair()
    assert send(a, FrameKind.ACTIVATION, 0, b"keep me")
    (kept,) = b.poll_frames()
    for i in range(1, 50):
        assert send(a, FrameKind.ACTIVATION, i, b"%d" % i)
        for frame in b.poll_frames():
            frame.release()
        list(a.poll_frames())
    assert kept.payload.tobytes() == b"keep me"
    a.close()
    b.close()
    assert kept.payload.tobytes() == b"keep me", "a held frame outlives both ends"


HEADER = shm._HEADER


def raw_header(**fields):
    values = {"magic": shm._MAGIC, "kind": 0, "aux_len": 0, "slot": 0, "tag": 0, "nbytes": 10, "credit": 0,
              **fields}
    return HEADER.pack(*values.values())


@pytest.mark.parametrize(
    "message",
    [
        b"\0",
        raw_header(magic=1),
        raw_header(kind=99),
        raw_header(slot=3),
        raw_header(slot=0xFFFFFFFE),
        raw_header(slot=0xFFFFFFFF),
        raw_header(nbytes=4097),
        raw_header(nbytes=2**64 - 1),
        raw_header(nbytes=0),
        raw_header(aux_len=5),
        raw_header(aux_len=129) + b"a" * 129,
        raw_header() + b"a",
        raw_header(kind=1, slot=2),
        raw_header(kind=1, nbytes=8193),
        raw_header(kind=255, credit=1),
        raw_header(kind=255, credit=1 << 3),
        raw_header(kind=255, credit=1 << 63),
        raw_header(credit=2),
        raw_header(kind=254),
    ],
    ids=lambda message: message[:8].hex() + f"-{len(message)}",
)
def test_a_corrupt_header_costs_the_link_and_reads_nothing(message):
    a, b = shm_pair()
    a._sock.send(message)
    assert list(b.poll_frames()) == []
    assert not b.is_open and b.failure
    a.close()


def test_a_slot_that_the_receiver_still_holds_cannot_be_sent_again():
    a, b = shm_pair()
    a._sock.send(raw_header())
    (frame,) = b.poll_frames()
    a._sock.send(raw_header())
    assert list(b.poll_frames()) == [] and not b.is_open
    frame.release()
    a.close()


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_random_bytes_never_raise(message):
    a, b = shm_pair()
    a._sock.send(message)
    assert all(len(frame.payload) <= 8192 for frame in b.poll_frames())
    a.close()
    b.close()


@pytest.mark.parametrize(
    ("size", "sealed"),
    [(SMALL.total_bytes, False), (SMALL.total_bytes - 1, True), (SMALL.total_bytes + 1, True)],
)
def test_memory_that_could_shrink_or_has_another_size_is_refused(size, sealed):
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _, theirs = proven()
    link = ShmLink(right, theirs, SMALL)
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        shm.fcntl.fcntl(fd, shm.fcntl.F_ADD_SEALS, shm._SEALS)
    body = shm._GEOMETRY.pack(*SMALL)
    socket.send_fds(left, [raw_header(kind=254, aux_len=len(body), slot=0, nbytes=0) + body], [fd])
    os.close(fd)
    assert list(link.poll_frames()) == []
    assert not link.is_open and "memory" in link.failure
    left.close()


@pytest.mark.parametrize("geometry", [SlotGeometry(0), SlotGeometry(33), SlotGeometry(activation_bytes=0),
                                      SlotGeometry(bulk_bytes=1 << 31)])
def test_impossible_geometry_is_refused(geometry):
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pytest.raises(ValueError):
        ShmLink(left, proven()[0], geometry)
    left.close()
    right.close()


def test_no_descriptor_is_leaked():
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        a, b = shm_pair()
        send(a, FrameKind.ACTIVATION, 1, b"x")
        list(b.poll_frames())
        a.close()
        b.close()
    assert len(set(os.listdir("/proc/self/fd")) - before) == 0


# --- TCP


def captured_frame(kind, tag, data, **change):
    """The raw bytes of one frame as the sender would put them on the wire, with the header tampered with."""
    a, b = tcp_pair()
    raw = a._urgent.sign(kind, tag, b"aux", len(data)) + data
    tampered = bytearray(raw)
    if "at" in change:
        offset, code, value = change["at"]
        is_so = struct.unpack_from(code, tampered, offset) == (value,)  # a byte of the MAC may be it by chance
        struct.pack_into(code, tampered, offset, value + is_so)
    return a, b, bytes(tampered)


@pytest.mark.parametrize(
    "at",
    [(0, "<I", 7), (4, "<B", 1), (4, "<B", 77), (6, "<H", 200), (8, "<I", 5), (12, "<q", 9),
     (20, "<Q", 3), (20, "<Q", 1 << 40), (36, "<B", 0), (44, "<B", 0)],
)
def test_a_changed_header_is_refused(at):
    a, b, raw = captured_frame(FrameKind.ACTIVATION, 5, b"payload", at=at)
    a._urgent.sock.sendall(raw)
    a._urgent.sock.shutdown(socket.SHUT_WR)
    wait_down(b)
    assert "closed" not in b.failure
    a.close()


def test_a_frame_cannot_be_replayed():
    a, b, raw = captured_frame(FrameKind.ACTIVATION, 5, b"payload")
    a._urgent.sock.sendall(raw)
    (frame,) = poll_until(b, 1)
    assert (frame.tag, frame.aux, frame.payload.tobytes()) == (5, b"aux", b"payload")
    a._urgent.sock.sendall(raw)
    wait_down(b)
    assert "due" in b.failure
    a.close()


def test_two_connections_must_lead_to_one_peer():
    (a, b), (c, d) = connected(), connected()
    with pytest.raises(ValueError, match="two peers"):
        TcpLink(a, proven(1, 2)[0], Connection(c, proven(1, 3)[0]))
    for sock in (a, b, c, d):
        sock.close()


@pytest.mark.parametrize("which", ["_urgent", "_bulk"])
def test_one_lost_connection_of_two_is_a_lost_link(which):
    a, b = tcp_pair_of_two()
    getattr(a, which).sock.close()
    wait_down(b)
    assert b.failure and b.fileno() == -1
    a.close()


def test_an_urgent_frame_overtakes_bulk_that_the_sockets_have_taken():
    a, b = tcp_pair_of_two()
    num_sent = 0
    while send(a, FrameKind.KV_PIECE, num_sent, bytes(8192)):
        num_sent += 1
    assert send(a, FrameKind.ACTIVATION, -1, b"urgent")
    select.select([b._urgent.sock], [], [], 5.0)
    first, *_ = b.poll_frames()
    assert num_sent > 8 and first.tag == -1
    a.close()
    b.close()


def test_a_receiver_that_holds_all_it_may_is_not_woken_for_more():
    a, b = tcp_pair_of_two()
    held = []
    tag = 0
    while len(held) < 8:
        tag += send(a, FrameKind.KV_PIECE, tag, bytes(8192))
        held += b.poll_frames()
    while send(a, FrameKind.KV_PIECE, tag, bytes(8192)):
        tag += 1
    assert list(b.poll_frames()) == []
    assert select.select([b], [], [], 0.02)[0] == []
    assert send(a, FrameKind.ACTIVATION, -1, b"urgent")
    assert select.select([b], [], [], 5.0)[0] == [b]
    assert [frame.tag for frame in b.poll_frames()] == [-1]
    held.pop().release()
    assert select.select([b], [], [], 5.0)[0] == [b]
    a.close()
    b.close()


def test_slots_of_both_directions_are_pinned_while_the_link_is_open():
    pinned: dict[int, int] = {}

    def pin(memory):
        memory[0] = memory[0]  # a driver needs memory that can be written
        address = memory.ctypes.data
        pinned[address] = memory.nbytes
        return lambda: pinned.pop(address)

    a, b = shm_pair(pin=pin)
    assert list(pinned.values()) == [SMALL.total_bytes] * 4
    a.close()
    assert len(pinned) == 2
    assert list(b.poll_frames()) == [] and not b.is_open  # the peer has closed it
    assert not pinned
    b.close()

"""Buffers of links between hosts: as much as the wire holds and little more."""

from __future__ import annotations

import socket

import pytest
from link_helpers import connected, proven, tcp_pair, tcp_pair_of_two

from jettison.transport.handshake import Purpose
from jettison.transport.tcp import Connection, TcpLink, WireContent

MS = 1_000_000
DELAYS_US = [100, 1_000, 10_000, 100_000]


def receive_buffer(sock):
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


def test_the_kernel_chooses_what_a_link_of_two_connections_may_receive():
    """A buffer that was set once grows no more, and a rate is at most the buffer a round trip."""
    plain = receive_buffer(connected()[0])
    a, b = tcp_pair_of_two()
    assert {receive_buffer(stream.sock) for link in (a, b) for stream in link._streams} == {plain}
    shared, _ = tcp_pair()
    assert receive_buffer(shared._bulk.sock) == 2 * 128 << 10, "urgent frames stand behind it"


def carried(wire_bytes_per_ns, rtt_us, piece_bytes, num_rounds, fits=2.0):
    """A connection whose send buffer is what is asked for, ``fits`` times that in bytes of frames: rates of all round
    trips, as shares of what the wire carries; and the last buffer."""
    wire, acked, now_ns, shares, buffer = WireContent(), 0, 0, [], piece_bytes
    for _ in range(num_rounds):
        on_way = fits * buffer
        passed_ns = max(rtt_us * 1000, on_way / wire_bytes_per_ns)  # beyond what the wire holds, it waits
        num_calls = 10
        for _ in range(num_calls):
            now_ns += passed_ns / num_calls
            acked += on_way / num_calls
            wire.note(int(acked), rtt_us, int(now_ns))
            buffer = piece_bytes + 0.75 * wire.num_bytes
        shares.append(on_way / passed_ns / wire_bytes_per_ns)
    return shares, buffer


@pytest.mark.parametrize("rtt_us", DELAYS_US)
@pytest.mark.parametrize("bytes_per_s", [2.5e6, 125e6, 1.25e9])
@pytest.mark.parametrize("fits", [1.4, 2.0])
def test_a_buffer_grows_until_the_wire_is_full_and_no_further(rtt_us, bytes_per_s, fits):
    """A piece is what the wire carries in two milliseconds; ``fits`` is 2 where the kernel needs nothing for itself."""
    piece = max(8192, 0.002 * bytes_per_s)
    shares, buffer = carried(bytes_per_s / 1e9, rtt_us, piece, 300, fits)
    assert min(shares[-10:]) > 0.99
    assert fits * buffer <= fits * (piece + 0.76 * bytes_per_s * rtt_us / 1e6), "a piece, and half a wire's content"


def test_what_the_wire_holds_is_not_believed_of_a_burst_or_of_a_pause():
    wire = WireContent()
    acked = 0
    for at in range(1, 200):  # 10 bytes a microsecond, round trips of 10 ms, acknowledged in bursts
        acked += 100_000 if at % 10 == 0 else 0
        wire.note(acked, 10_000, at * MS)
    held = wire.num_bytes
    assert 80_000 <= held <= 160_000
    wire.note(acked + 50, 10_000, 5000 * MS)
    assert wire.num_bytes == held, "nothing was sent meanwhile"
    for at in range(5001, 6000):
        acked += 1_000
        wire.note(acked, 10_000, at * MS)
    assert wire.num_bytes == pytest.approx(10_000, rel=0.2), "a slower wire is believed soon"


def test_without_a_round_trip_nothing_is_held():
    wire = WireContent()
    wire.note(1_000_000, 0xFFFFFFFF, 100 * MS)
    assert wire.num_bytes == 0


def test_the_send_buffer_is_what_the_wire_holds_and_a_piece():
    ends = [[], []]
    for purpose in (Purpose.LINK, Purpose.URGENT):
        for end, *connection in zip(ends, connected(), proven(purpose=purpose), strict=True):
            end.append(Connection(*connection))
    a, b = (TcpLink(*end[0], end[1]) for end in ends)

    def sent():
        return a._bulk.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    a.limit_unsent(64 << 10)
    assert 2 * (64 << 10) <= sent() <= 2.5 * (64 << 10), "a loopback holds next to nothing"
    a._wire.num_bytes = 400_000.0
    a.limit_unsent(64 << 10)
    assert sent() == 2 * ((64 << 10) + 300_000)
    a.limit_unsent(66 << 10)
    assert sent() == 2 * ((64 << 10) + 300_000), "the same, but for a little"
    a._wire.num_bytes = 0.0
    a.limit_unsent(1)
    assert sent() == 2 * (16 << 10)
    for link in (a, b):
        link.close()
        link.limit_unsent(1 << 20)

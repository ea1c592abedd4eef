"""A link that sends no faster than it is told, in virtual time."""

from __future__ import annotations

import select

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_helpers import connected, proven

from jettison.transport.link import FrameKind
from jettison.transport.pacing import Alarm, Pacer
from jettison.transport.tcp import Connection, TcpLink


class Clock:
    """Stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@given(
    rate=st.floats(1e3, 1e10),
    turns=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 1 << 22)), max_size=30),
)
def test_never_more_than_the_rate_and_one_bucket(rate: float, turns: list[tuple[int, int]]) -> None:
    clock = Clock()
    pacer = Pacer(rate, clock)
    num_sent = 0
    for wait_ns, wanted in turns:
        clock.now_ns += wait_ns
        now = min(wanted, pacer.left())
        pacer.spend(now)
        num_sent += now
        assert num_sent <= pacer.burst_bytes + rate * clock.now_ns / 1e9 + 1


@given(rate=st.floats(1e3, 1e10), idle_ns=st.integers(0, 10**10))
def test_who_waits_as_told_may_send_half_a_bucket(rate: float, idle_ns: int) -> None:
    clock = Clock()
    pacer = Pacer(rate, clock)
    clock.now_ns = idle_ns
    pacer.spend(pacer.left())
    assert pacer.left() == 0
    clock.now_ns += pacer.wait_ns() + 1
    assert pacer.left() >= pacer.burst_bytes // 2 - 1


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="carries more"):
        Pacer(rate)


def test_an_alarm_that_was_put_off_does_not_ring() -> None:
    alarm = Alarm()
    try:
        alarm.set(1)
        assert select.select([alarm.fd], [], [], 10.0)[0]
        alarm.set(0)
        assert not select.select([alarm.fd], [], [], 0.0)[0]
    finally:
        alarm.close()


@pytest.mark.parametrize("num_connections", [1, 2])
def test_a_paced_end_sends_a_bucket_at_a_time_and_says_when_to_look_again(num_connections: int) -> None:
    """Each time that its descriptor is readable there is something to send; with the clock standing still it is not."""
    clock = Clock()
    pacer = Pacer(1e6, clock)
    ends: list[list[Connection]] = [[], []]
    for _ in range(num_connections):
        for end, sock, handshake in zip(ends, connected(), proven(), strict=True):
            end.append(Connection(sock, handshake))
    a = TcpLink(*ends[0][0], *ends[0][1:], pacer=pacer)
    b = TcpLink(*ends[1][0], *ends[1][1:])
    a.wait_attached(1.0)
    b.wait_attached(1.0)
    payload = np.arange(200_000, dtype=np.uint8)
    try:
        assert a.send_frame(FrameKind.KV_PIECE, 7, b"", len(payload), lambda out: np.copyto(out, payload))
        least_ns = (len(payload) - pacer.burst_bytes) / 1e6 * 1e9
        frames = []
        for _ in range(10_000):
            assert clock.now_ns < 2 * least_ns, "it was let wait for longer than the rate asks for"
            list(a.poll_frames())
            frames += b.poll_frames()
            if frames:
                break
            clock.now_ns += pacer.wait_ns()
            assert select.select([a.fileno()], [], [], 10.0)[0], "nobody wakes who has to send"
        assert clock.now_ns >= least_ns
        assert np.array_equal(frames[0].payload, payload)
        assert a.send_frame(FrameKind.ACTIVATION, 1, b"", 0, lambda out: None)
        list(a.poll_frames())
    finally:
        a.close()
        b.close()

"""Leases: whatever a network does, a keeper's fence falls before its host is declared lost."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.live.wire.lease import DRIFT, Grantor, LeaseTimes, Tenant

LEASES = st.floats(0.2, 30.0)
RATES = st.floats(1 - DRIFT, 1 + DRIFT)
LATE = st.one_of(st.floats(0.0, 0.02), st.floats(0.0, 2.0))
"""In parts of a lease."""
DELAYS = st.one_of(st.none(), LATE)
"""Of a message; None: it is lost."""


@given(LEASES)
def test_times_leave_room_for_several_beats_and_for_the_fence(lease_s):
    times = LeaseTimes.of(lease_s)
    assert 0 < 4 * times.beat_s < times.fence_s < times.together_s < times.lost_s < lease_s
    assert times.spare_s >= times.beat_s


class World:
    """A keeper and a controller with clocks of their own rates, under one true time."""

    def __init__(self, lease_s, rates, origins):
        self.times = LeaseTimes.of(lease_s)
        self.rates, self.origins = rates, origins
        self.fenced = self.lost = None
        self.together = None
        """When it would be lost with another keeper of its host."""

    def clock(self, end, now):
        return self.origins[end] + now * self.rates[end]

    def run(self, delays, pauses):
        """``delays``: of each beat and each grant in turn; ``pauses``: of the keeper beyond each beat's time."""
        delays, pauses, lease_s = iter(delays), iter(pauses), self.times.lost_s
        tenant, grantor = Tenant(self.times, self.clock(0, 0.0)), None
        events = [(next(delays, None) or 0.0, 0, "joined", 0), (0.0, 1, "beat", 0)]
        num = 1
        while events:
            now, _, what, number = heapq.heappop(events)
            if grantor is not None and self.together is None:
                self._look(grantor, now)
            if what == "beat" and self.fenced is None:
                if tenant.is_over(self.clock(0, now)):
                    self.fenced = now
                    continue
                sent, delay = tenant.beat(self.clock(0, now)), next(delays, None)
                if delay is not None:
                    heapq.heappush(events, (now + delay * lease_s, num, "heard", sent))
                left_s = (tenant.ends_s - self.clock(0, now)) / self.rates[0]
                wait_s = min(self.times.beat_s, max(0.0, left_s)) + next(pauses, 0.0) * lease_s
                heapq.heappush(events, (now + wait_s, num + 1, "beat", 0))
            elif what == "joined":
                grantor = Grantor(self.times, self.clock(1, now))
            elif what == "heard" and grantor is not None and self.lost is None and self.together is None:
                grantor.hear(self.clock(1, now))
                delay = next(delays, None)
                if delay is not None:
                    heapq.heappush(events, (now + delay * lease_s, num, "granted", number))
            elif what == "granted":
                tenant.granted(number)
            num += 2
            if now > 100 * lease_s:
                break
        if grantor is not None and self.together is None:
            self._look(grantor, float("inf"))

    def _look(self, grantor, now):
        """The earliest moment, up to now, at which the controller could give it up."""
        due = (grantor._heard_s + self.times.together_s - self.origins[1]) / self.rates[1]
        if due <= now:
            self.together = due


@settings(max_examples=300)
@given(LEASES, st.tuples(RATES, RATES), st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)),
       st.lists(DELAYS, max_size=80), st.just([]) | st.lists(st.floats(0.0, 0.05), max_size=40))
def test_the_fence_falls_before_any_declaration(lease_s, rates, origins, delays, pauses):
    """Messages are late or lost as they like, clocks differ in origin and rate; the keeper itself may be late for its
    look at the clock, by less than what is spared for that."""
    world = World(lease_s, rates, origins)
    world.run(delays, pauses)
    assert world.fenced is not None and world.together is not None
    late_s = max(pauses, default=0.0) * world.times.lost_s
    assert world.fenced - late_s + world.times.spare_s * (1 - DRIFT) <= world.together + 1e-6 * lease_s


@given(LEASES, st.tuples(RATES, RATES), st.lists(st.floats(0.0, 0.2), min_size=60, max_size=60))
def test_a_slow_network_alone_loses_no_host(lease_s, rates, delays):
    """A fifth of a lease, each way."""
    world = World(lease_s, rates, (0.0, 7.0))
    world.run(delays, [])
    assert world.fenced > 30 * world.times.beat_s / rates[0] * 0.5, "it has lived on what it was granted"


def test_a_beat_is_granted_once_it_was_sent_and_with_all_before_it():
    times = LeaseTimes.of(2.0)
    tenant = Tenant(times, 100.0)
    first, second, third = (tenant.beat(at) for at in (100.1, 100.2, 100.3))
    tenant.granted(third + 1)
    assert tenant.ends_s == pytest.approx(100.0 + times.fence_s), "none of that number was sent"
    tenant.granted(second)
    tenant.granted(first)
    assert tenant.ends_s == pytest.approx(100.2 + times.fence_s)
    assert not tenant.is_over(101.5) and tenant.is_over(101.7)


@given(LEASES, st.lists(st.tuples(st.sampled_from(["hear", "away"]), st.floats(0.0, 100.0)), max_size=20))
def test_no_absence_of_the_controller_makes_a_silent_host_s_time_longer(lease_s, turns):
    """It was away or heard of the keeper; from its last turn on, silence lasts one lease and no longer."""
    times, now_s = LeaseTimes.of(lease_s), 50.0
    grantor = Grantor(times, now_s)
    for what, after_s in turns:
        now_s += after_s
        if what == "hear":
            grantor.hear(now_s)
        else:
            grantor.hear(now_s - after_s / 2)  # it was read before the excuse
            grantor.excuse(after_s, now_s)
        assert grantor.silence_s(now_s) >= 0.0
    assert grantor.is_lost(now_s + times.lost_s * (1 + 1e-6))


def test_the_controller_s_own_absence_is_no_keeper_s_fault():
    times = LeaseTimes.of(2.0)
    grantor = Grantor(times, 10.0)
    assert grantor.is_lost(12.0) and grantor.is_lost_with_another(11.75) and not grantor.is_lost(11.75)
    grantor.excuse(5.0, 16.0)
    assert not grantor.is_lost(16.0) and grantor.is_lost(16.91)
    grantor.hear(17.0)
    grantor.hear(16.0)
    assert grantor.silence_s(17.5) == 0.5

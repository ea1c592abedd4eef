"""The event loop: order, clock, cancellation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.sim.loop import FAULT, LATE, NORMAL, EventLoop, Scheduled


def test_the_clock_moves_before_the_handler_runs() -> None:
    loop = EventLoop()
    seen: list[int] = []
    loop.at(7, lambda: seen.append(loop.now_ns))
    loop.run()
    assert seen == [7]


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from([FAULT, NORMAL, LATE])), max_size=40))
def test_events_run_by_time_then_priority_then_order_of_scheduling(entries: list[tuple[int, int]]) -> None:
    loop = EventLoop()
    seen: list[int] = []
    for number, (time_ns, priority) in enumerate(entries):
        loop.at(time_ns, lambda number=number: seen.append(number), priority)  # type: ignore[misc]
    loop.run()
    assert seen == sorted(range(len(entries)), key=lambda i: (*entries[i], i))
    assert loop.num_run == len(entries)


def test_a_cancelled_event_never_runs_not_even_when_cancelled_at_its_own_time() -> None:
    loop = EventLoop()
    seen: list[str] = []
    late: list[Scheduled] = []
    loop.at(5, lambda: late[0].cancel())
    late.append(loop.at(5, lambda: seen.append("late")))
    early = loop.at(3, lambda: seen.append("early"))
    early.cancel()
    early.cancel()
    assert not early.is_pending
    loop.run()
    assert seen == []


def test_the_past_cannot_be_scheduled() -> None:
    loop = EventLoop()
    loop.at(5, lambda: None)
    loop.run()
    with pytest.raises(ValueError):
        loop.at(4, lambda: None)
    loop.at(5, lambda: None)


def test_run_stops_before_what_is_too_late_and_when_it_is_over() -> None:
    loop = EventLoop()
    seen: list[int] = []
    for time_ns in (1, 2, 3, 4):
        loop.at(time_ns, lambda time_ns=time_ns: seen.append(time_ns))  # type: ignore[misc]
    loop.run(until_ns=2)
    assert seen == [1, 2] and loop.next_ns == 3
    loop.run(is_over=lambda: len(seen) == 3)
    assert seen == [1, 2, 3]


def test_two_loops_do_not_see_each_other() -> None:
    one, other = EventLoop(), EventLoop()
    one.at(5, lambda: None)
    assert other.next_ns is None
    one.run()
    assert (one.now_ns, other.now_ns) == (5, 0)

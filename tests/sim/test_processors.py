"""Cores that several processes share."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.sim.loop import EventLoop
from jettison.sim.processors import Processors, Thread


def ends_of(cores: int, speeds: list[float], jobs: list[tuple[int, int, int, bool]]) -> list[int]:
    """``(start, work, threads, goes first)`` each; when each ended."""
    loop = EventLoop()
    processors = Processors(loop, cores, speeds)
    ends = [0] * len(jobs)

    def begin(index: int) -> None:
        _, work, threads, first = jobs[index]

        def done() -> None:
            ends[index] = loop.now_ns

        processors.start(work, done, num_threads=threads, goes_first=first)

    for index, (start, *_) in enumerate(jobs):
        loop.at(start, lambda index=index: begin(index))  # type: ignore[misc]
    loop.run()
    return ends


def test_alone_work_takes_its_time() -> None:
    assert ends_of(2, [1.0, 0.8], [(5, 100, 1, False)]) == [105]
    assert ends_of(2, [1.0, 0.8], [(0, 100, 2, False)]) == [125]  # it keeps both cores busy itself


def test_two_on_two_cores_are_slowed_by_each_other_only_while_both_run() -> None:
    # Both at 0.8 until the first ends at 125; then 100 are done of the second, and the rest runs alone.
    assert ends_of(2, [1.0, 0.8], [(0, 100, 1, False), (0, 200, 1, False)]) == [125, 225]


def test_more_threads_than_cores_share_them_equally() -> None:
    assert ends_of(2, [1.0, 1.0], [(0, 100, 1, False)] * 4) == [200] * 4
    assert ends_of(1, [1.0], [(0, 100, 1, False), (50, 100, 1, False)]) == [150, 200]


def test_what_wakes_up_goes_first() -> None:
    ends = ends_of(2, [1.0, 1.0], [(0, 100, 1, False), (0, 100, 1, False), (20, 10, 1, True)])
    assert ends == [105, 105, 30]  # for 10, two workers share one core


def test_workers_are_not_starved() -> None:
    ends = ends_of(1, [1.0], [(0, 100, 1, False), (0, 500, 1, True)])
    assert ends[1] == 500 and ends[0] == pytest.approx(550, abs=2)


@given(jobs=st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 300), st.just(1), st.just(False)), min_size=1, max_size=12))
def test_one_core_does_all_the_work_there_is_and_no_more(jobs: list[tuple[int, int, int, bool]]) -> None:
    ends = ends_of(1, [1.0], jobs)
    # Without gaps a core that is never idle while there is work ends with the last busy period.
    busy_until = Fraction(0)
    for start, work, *_ in sorted(jobs):
        busy_until = max(busy_until, Fraction(start)) + work
    assert abs(max(ends) - busy_until) <= len(jobs) + 1
    assert all(end >= start + work for end, (start, work, *_) in zip(ends, jobs, strict=True))


def test_a_job_that_is_stopped_ends_never_and_gives_its_share_back() -> None:
    loop = EventLoop()
    processors = Processors(loop, 1, [1.0])
    ends: list[str] = []
    first = processors.start(100, lambda: ends.append("first"))
    processors.start(100, lambda: ends.append("second"))
    loop.at(50, first.cancel)
    loop.run()
    assert ends == ["second"] and loop.now_ns == 125
    first.cancel()


def test_a_thread_does_one_thing_after_the_other() -> None:
    loop = EventLoop()
    thread = Thread(Processors(loop, 2, [1.0, 1.0]))
    ends: list[tuple[str, int]] = []
    thread.do(10, lambda: ends.append(("a", loop.now_ns)))
    thread.do(5, lambda: thread.do(7, lambda: ends.append(("c", loop.now_ns))))
    thread.do(0, lambda: ends.append(("b", loop.now_ns)))
    loop.run()
    assert ends == [("a", 10), ("b", 15), ("c", 22)] and thread.busy_ns == 22


def test_a_speed_for_each_number_of_busy_cores() -> None:
    with pytest.raises(ValueError):
        Processors(EventLoop(), 2, [1.0])


def drifting(drift: list[tuple[float, float]], works: list[int], speeds: list[float]) -> list[int]:
    loop = EventLoop()
    processors = Processors(loop, len(speeds), speeds, drift)
    ends: list[int] = []
    for work in works:
        processors.start(work, lambda: ends.append(loop.now_ns))
    loop.run()
    return ends


def test_a_machine_that_slows_down_slows_what_is_under_way() -> None:
    # 1 s at full speed, 2 s at half, the rest at twice the speed.
    assert drifting([(1.0, 0.5), (3.0, 2.0)], [4 * 10**9], [1.0]) == [4 * 10**9]
    assert drifting([(0.0, 0.5)], [10**9, 10**9], [1.0, 0.8]) == [25 * 10**8] * 2
    assert drifting([(7.0, 0.5)], [10**9], [1.0]) == [10**9]  # it was done before


@given(drift=st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.2, 3.0)), max_size=5).map(sorted))
def test_work_takes_what_the_speeds_on_the_way_add_up_to(drift: list[tuple[float, float]]) -> None:
    [end] = drifting(drift, [3 * 10**9], [1.0])
    points = [(0.0, 1.0), *drift, (end / 1e9, 0.0)]
    done = sum(
        speed * max(0.0, min(until, end / 1e9) - since) for (since, speed), (until, _) in pairwise(points)
    )
    assert done == pytest.approx(3.0, rel=1e-6)

"""Cores that several processes share: who runs where, and what that takes."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.sim.loop import EventLoop
from jettison.sim.processors import BALANCE_NS, BASE_SLICE_NS, HOT_NS, TICK_NS, Job, Processors, Runner, TeamJob, Thread

MS = 1_000_000


def ends_of(speeds: list[float], jobs: list[tuple[int, int]]) -> list[int]:
    """``(start, work)`` of a thread each; when each ended."""
    loop = EventLoop()
    processors = Processors(loop, len(speeds), speeds)
    ends = [0] * len(jobs)

    def begin(index: int) -> None:
        def done() -> None:
            ends[index] = loop.now_ns

        processors.start(runners[index], jobs[index][1], done)

    runners = [processors.runner() for _ in jobs]
    for index, (start, _) in enumerate(jobs):
        loop.at(start, lambda index=index: begin(index))  # type: ignore[misc]
    loop.run()
    return ends


def test_alone_work_takes_its_time() -> None:
    assert ends_of([1.0, 0.8], [(5, 100)]) == [105]


def test_two_on_two_cores_are_slowed_by_each_other_only_while_both_run() -> None:
    # Both at 0.8 until the first ends at 125; then 100 are done of the second, and the rest runs alone.
    assert ends_of([1.0, 0.8], [(0, 100), (0, 200)]) == [125, 225]


@pytest.mark.parametrize(("num_cores", "slower"), [(2, 1.25), (3, 1.25**0.5)])
def test_some_work_loses_more_to_others(num_cores: int, slower: float) -> None:
    loop = EventLoop()
    processors = Processors(loop, num_cores, [1.0, 0.8, 0.8][:num_cores])
    ends = [0, 0]
    for index, factor in enumerate((1.0, 1.25)):
        done = lambda index=index: ends.__setitem__(index, loop.now_ns)  # noqa: E731
        processors.start(processors.runner(), 1000, done, crowded_factor=factor)
    loop.run()
    # The first ends after 1250; then 1000 / slower are done of the second, and the rest runs alone.
    assert ends == [1250, pytest.approx(1250 + 1000 * (1 - 1 / slower), abs=2)]


def test_threads_of_one_core_take_turns_at_its_ticks() -> None:
    first, second = ends_of([1.0], [(0, 6 * MS), (0, 6 * MS)])
    # The second waits for the first tick, the first for the next one; what is left of each is done in turn.
    assert (first, second) == (TICK_NS + TICK_NS + 2 * MS, 12 * MS)


def test_who_wakes_up_waits_until_the_running_thread_has_had_its_slice() -> None:
    short = BASE_SLICE_NS // 2
    assert ends_of([1.0], [(0, 100 * short), (short, 10)])[1] == TICK_NS + 10, "too early: it waits for a tick"
    late = ends_of([1.0], [(0, 10 * BASE_SLICE_NS), (2 * BASE_SLICE_NS, 10)])
    assert late == [10 * BASE_SLICE_NS + 10, 2 * BASE_SLICE_NS + 10], "at once"


def test_an_idle_core_is_taken_first() -> None:
    assert ends_of([1.0, 1.0], [(0, 10 * MS), (0, MS), (2 * MS, MS)]) == [10 * MS, MS, 3 * MS]


def queue(loop: EventLoop, processors: Processors, works: list[int], ends: dict[int, int]) -> list[Runner]:
    """Threads of the first core with so much work each, all begun at once."""
    runners = []
    for index, work in enumerate(works):
        runner = processors.runner()
        runner.core = 0
        runners.append(runner)
        loop.at(0, lambda i=index, w=work: processors.start(  # type: ignore[misc]
            runners[i], w, lambda: ends.__setitem__(i, loop.now_ns)))  # fmt: skip
    return runners


def test_a_core_that_becomes_idle_takes_a_cold_thread_from_another_at_once() -> None:
    loop, ends = EventLoop(), {}
    processors = Processors(loop, 2, [1.0, 1.0])
    queue(loop, processors, [20 * MS, HOT_NS // 2, MS], ends)  # the second finds the other core idle, the third waits
    loop.run()
    assert ends == {0: 20 * MS, 1: HOT_NS // 2, 2: HOT_NS // 2 + MS}


def test_and_one_that_ran_just_now_at_its_next_tick() -> None:
    loop, ends = EventLoop(), {}
    processors = Processors(loop, 2, [1.0, 1.0])
    first, _, third = queue(loop, processors, [20 * MS, TICK_NS + HOT_NS // 4, 20 * MS], ends)
    loop.run(until_ns=TICK_NS + HOT_NS // 2)
    # At its first tick the first gave way to the third, which had waited; when the other core ran dry it was still hot.
    assert list(ends) == [1] and (first.core, third.core) == (0, 0)
    loop.run()
    own_tick = TICK_NS // 2 + TICK_NS  # of the other core
    assert ends[0] == own_tick + 20 * MS - TICK_NS and ends[2] == TICK_NS + 20 * MS


def test_queues_are_evened_out_now_and_then() -> None:
    loop, ends = EventLoop(), {}
    processors = Processors(loop, 2, [1.0, 1.0])
    others = [processors.runner() for _ in range(2)]
    for other in others:  # both cores are busy, so that all others queue on the first
        loop.at(0, lambda other=other: processors.start(other, 300 * MS, lambda: None))  # type: ignore[misc]
    runners = queue(loop, processors, [30 * MS] * 4, ends)
    loop.run(until_ns=2 * BALANCE_NS - 1)
    assert [runner.core for runner in runners] == [0] * 4
    loop.run(until_ns=4 * BALANCE_NS + TICK_NS)
    assert sorted(runner.core for runner in [*others, *runners]) == [0, 0, 0, 1, 1, 1]


# --- who stops whom


def started(processors: Processors, loop: EventLoop, ends: dict[str, int], name: str, at: int, work: int,
            runner: Runner, waker: Runner | None = None) -> None:  # fmt: skip
    loop.at(at, lambda: processors.start(runner, work, lambda: ends.__setitem__(name, loop.now_ns), waker))


def test_a_job_knows_when_it_first_had_a_core() -> None:
    loop = EventLoop()
    processors = Processors(loop, 1, [1.0])
    first, second = (processors.start(processors.runner(), MS, lambda: None) for _ in range(2))
    assert (first.began_ns, second.began_ns) == (0, None)
    loop.run()
    assert (first.began_ns, second.began_ns) == (0, MS)
    team = TeamJob(processors, [processors.runner(), processors.runner()], MS, lambda: None)
    assert team.began_ns == 2 * MS, "the other of them waits"


def test_a_short_burst_stops_a_long_one_which_goes_on_after_it() -> None:
    loop, ends = EventLoop(), {}
    processors = Processors(loop, 1, [1.0])
    started(processors, loop, ends, "first", 0, MS, processors.runner(2))
    started(processors, loop, ends, "second", 0, MS, processors.runner(2))
    started(processors, loop, ends, "burst", MS // 5, MS // 10, processors.runner(0))
    loop.run()
    assert ends == {"burst": MS // 5 + MS // 10, "first": MS + MS // 10, "second": 2 * MS + MS // 10}


def test_who_was_stopped_by_who_was_stopped_goes_on_too() -> None:
    loop, ends = EventLoop(), {}
    processors = Processors(loop, 1, [1.0])
    for name in ("first", "second"):
        started(processors, loop, ends, name, 0, MS, processors.runner(2))
    started(processors, loop, ends, "middle", MS // 5, MS // 10, processors.runner(1))
    started(processors, loop, ends, "short", MS // 4, MS // 10, processors.runner(0))
    loop.run()
    assert list(ends) == ["short", "middle", "first", "second"]


def test_who_has_run_for_a_slice_goes_last() -> None:
    loop, ends = EventLoop(), {}
    processors = Processors(loop, 1, [1.0])
    started(processors, loop, ends, "burst", 0, 10 * MS, processors.runner(0))
    started(processors, loop, ends, "long", MS // 10, MS, processors.runner(2))
    loop.run()
    assert ends == {"long": TICK_NS + MS, "burst": 11 * MS}, "at the first tick it is no short burst any more"


@pytest.mark.parametrize("packs", [False, True])
def test_a_kernel_that_packs_leaves_a_core_idle(packs: bool) -> None:
    loop, ends = EventLoop(), {}
    processors = Processors(loop, 2, [1.0, 1.0], packs=packs)
    long, _, burst = processors.runner(2), processors.runner(2), processors.runner(1)
    assert long.core == burst.core
    started(processors, loop, ends, "long", 0, 10 * MS, long)
    started(processors, loop, ends, "burst", MS, MS // 10, burst)
    loop.run()
    assert ends == {"burst": MS + MS // 10, "long": 10 * MS + (MS // 10 if packs else 0)}


def test_who_has_one_waker_only_comes_to_its_core() -> None:
    loop, ends = EventLoop(), {}
    processors = Processors(loop, 2, [1.0, 1.0], packs=True)
    waker, long, woken = processors.runner(1), processors.runner(2), processors.runner(0)
    woken.core = long.core
    started(processors, loop, ends, "long", 0, 10 * MS, long)
    started(processors, loop, ends, "waker", MS, MS, waker)
    started(processors, loop, ends, "woken", MS + MS // 2, MS // 10, woken, waker)
    loop.run()
    assert ends == {"woken": MS + 6 * MS // 10, "waker": 2 * MS + MS // 10, "long": 10 * MS}


@given(jobs=st.lists(st.tuples(st.integers(0, 50 * MS), st.integers(0, 30 * MS)), min_size=1, max_size=10))
def test_one_core_does_all_the_work_there_is_and_no_more(jobs: list[tuple[int, int]]) -> None:
    ends = ends_of([1.0], jobs)
    # A core that is never idle while there is work ends with the last busy period.
    busy_until = Fraction(0)
    for start, work in sorted(jobs):
        busy_until = max(busy_until, Fraction(start)) + work
    assert abs(max(ends) - busy_until) <= len(jobs) + 1
    assert all(end >= start + work for end, (start, work) in zip(ends, jobs, strict=True))


@given(
    jobs=st.lists(st.tuples(st.integers(0, 20 * MS), st.integers(0, 30 * MS)), min_size=1, max_size=12),
    cores=st.integers(1, 4),
)
def test_nobody_is_forgotten_and_nobody_waits_beside_an_idle_core_for_longer_than_a_tick(
    jobs: list[tuple[int, int]], cores: int
) -> None:
    ends = ends_of([1.0] * cores, jobs)
    assert all(end >= start + work for end, (start, work) in zip(ends, jobs, strict=True))
    # Greedy scheduling ends before start + all work / cores + the longest; a tick is lost whenever a core runs dry.
    work = [work for _, work in jobs]
    latest = max(start for start, _ in jobs) + sum(work) // cores + max(work)
    assert max(ends) <= latest + (len(jobs) + 1) * TICK_NS


def test_a_job_that_is_stopped_ends_never_and_gives_its_core_back() -> None:
    loop = EventLoop()
    processors = Processors(loop, 1, [1.0])
    ends: list[str] = []
    first = processors.start(processors.runner(), 100, lambda: ends.append("first"))
    second = processors.start(processors.runner(), 100, lambda: ends.append("second"))
    third = processors.start(processors.runner(), 100, lambda: ends.append("third"))
    loop.at(50, first.cancel)
    loop.at(60, third.cancel)
    loop.run()
    assert ends == ["second"] and loop.now_ns == 150
    for job in (first, second, third):
        job.cancel()


def test_a_thread_does_one_thing_after_the_other() -> None:
    loop = EventLoop()
    thread = Thread(Processors(loop, 2, [1.0, 1.0]))
    ends: list[tuple[str, int]] = []
    thread.do(10, lambda: ends.append(("a", loop.now_ns)))
    thread.do(5, lambda: thread.do(7, lambda: ends.append(("c", loop.now_ns))))
    thread.do(0, lambda: ends.append(("b", loop.now_ns)))
    loop.run()
    assert ends == [("a", 10), ("b", 15), ("c", 22)] and thread.busy_ns == 22


def test_a_thread_that_goes_on_does_not_queue_again() -> None:
    loop = EventLoop()
    processors = Processors(loop, 1, [1.0])
    thread, ends = Thread(processors), []
    for _ in range(3):
        thread.do(MS // 10, lambda: ends.append(loop.now_ns))
    processors.start(processors.runner(), MS, lambda: None)
    loop.run()
    assert ends == [MS // 10, 2 * MS // 10, 3 * MS // 10] and loop.now_ns == MS + 3 * MS // 10


def test_who_goes_on_keeps_the_core_from_whom_it_wakes() -> None:
    loop, ends = EventLoop(), {}
    processors = Processors(loop, 1, [1.0])
    thread, other = Thread(processors), processors.runner()
    thread.do(10, lambda: processors.start(other, 5, lambda: ends.__setitem__("other", loop.now_ns)))
    thread.do(10, lambda: ends.__setitem__("thread", loop.now_ns))
    loop.run()
    assert ends == {"thread": 20, "other": 25}


def test_who_has_had_a_slice_gives_way_to_who_waited_longest() -> None:
    loop, ends = EventLoop(), {}
    processors = Processors(loop, 1, [1.0])
    queue(loop, processors, [100 * MS, 10], ends)  # the second waits for the first tick
    late = processors.runner()
    at_ns = 2 * BASE_SLICE_NS
    loop.at(at_ns, lambda: processors.start(late, 10, lambda: ends.__setitem__(2, loop.now_ns)))
    loop.run()
    assert ends[1] == at_ns + 10 and ends[2] == at_ns + 20


def test_of_two_that_end_together_the_first_may_cancel_the_second() -> None:
    loop, ends = EventLoop(), []
    processors = Processors(loop, 2, [1.0, 1.0])
    jobs: list[Job] = []
    for name in ("a", "b"):
        def done(name: str = name) -> None:
            ends.append(name)
            jobs[1].cancel()
        jobs.append(processors.start(processors.runner(), 100, done))
    loop.run()
    assert ends == ["a"]


def test_a_team_is_done_when_its_last_thread_is() -> None:
    loop = EventLoop()
    processors = Processors(loop, 2, [1.0, 0.8])
    ends: list[int] = []
    team = [processors.runner(), processors.runner()]
    TeamJob(processors, team, 100, lambda: ends.append(loop.now_ns))
    loop.run()
    assert ends == [125], "it keeps both cores busy itself"
    TeamJob(processors, team, 100, lambda: ends.append(loop.now_ns)).cancel()
    loop.run()
    assert ends == [125]


def test_a_speed_for_each_number_of_busy_cores() -> None:
    with pytest.raises(ValueError):
        Processors(EventLoop(), 2, [1.0])


def drifting(drift: list[tuple[float, float]], works: list[int], speeds: list[float]) -> list[int]:
    loop = EventLoop()
    processors = Processors(loop, len(speeds), speeds, drift)
    ends: list[int] = []
    for work in works:
        processors.start(processors.runner(), work, lambda: ends.append(loop.now_ns))
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

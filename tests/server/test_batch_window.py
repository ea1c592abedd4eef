"""Completion windows, forecasts from what was seen, and fair places in the core."""

from __future__ import annotations

import asyncio
import sqlite3
import time

import hypothesis.strategies as st
import pytest
from fake_engine import FakeEngine
from hypothesis import given

from jettison.live.engine.api import EngineSnapshot, WorkerSnapshot
from jettison.server.app import batch_service
from jettison.server.batches import feeding
from jettison.server.batches.feeding import ResultWriter, Window
from jettison.server.batches.records import Batch, Result, Status
from jettison.server.batches.window import MOST_S, ONE, Capacity, Forecast, Rates, capacity_of, shown_s, window_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("24h", 86400), ("1h", 3600), ("30m", 1800), ("90s", 90), ("7d", 604800), ("1h30m", 5400), ("30d", MOST_S)],
)
def test_a_window(text, seconds):
    assert window_s(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "24", "-1h", "1.5h", "24 h", "0s", "31d", "1w", "9" * 30 + "h", "24H"])
def test_no_window(text):
    with pytest.raises(ValueError, match="completion_window must be a time such as"):
        window_s(text)


@given(st.integers(1, MOST_S))
def test_a_shown_time_is_read_back(seconds):
    assert window_s(shown_s(seconds)) == seconds


def batch(seq=1, *, runnable=100, prompt=1000, most=10_000, done=0, created_at=0, expires_at=3600, bad=0,
          status=Status.IN_PROGRESS, owner="") -> Batch:  # fmt: skip
    return Batch(
        id=f"b{seq}", owner=owner, endpoint="/v1/completions", input_file_id="f", completion_window="1h",
        created_at=created_at, expires_at=expires_at, num_lines=runnable + bad, num_runnable=runnable,
        num_prompt_tokens=prompt, max_output_tokens=most, seq=seq, num_completed=done, num_failed=bad, status=status)


def seen(rate=10.0, answers=10) -> Forecast:
    forecast = Forecast()
    forecast.note_work(int(rate * 10), 10.0)
    for _ in range(20):
        forecast.note_answer(answers)
    return forecast


def test_nothing_known_refuses_nothing():
    forecast = Forecast()
    assert forecast.why_infeasible(batch(most=1 << 60, expires_at=1), [], 0.0) is None
    forecast.note_answer(5)
    assert forecast.seconds_to_end(batch(), []) is None  # no rate yet


def test_lengths_are_those_of_answers_and_not_what_was_allowed():
    assert seen().seconds_to_end(batch(), []) == pytest.approx((1000 + 100 * 10) / 10)
    assert seen().seconds_to_end(batch(most=300), []) == pytest.approx((1000 + 300) / 10)


def test_what_is_done_and_what_was_bad_counts_no_more():
    assert seen().seconds_to_end(batch(done=75, bad=5), []) == pytest.approx(50)
    assert seen().seconds_to_end(batch(done=100), []) == 0.0


def test_only_what_is_due_before_is_ahead():
    others = [batch(2, expires_at=60), batch(3, expires_at=9999)]
    assert seen().seconds_to_end(batch(), others) == pytest.approx(400)
    others += [batch(n, expires_at=60, status=s) for n, s in enumerate(Status, 4) if s is not Status.IN_PROGRESS]
    others.append(batch())  # itself
    assert seen().seconds_to_end(batch(), others) == pytest.approx(400)


def test_other_owners_get_as_much_whatever_is_due_when():
    large, small = batch(2, owner="b", runnable=10_000, expires_at=9999), batch(3, owner="c", done=75)
    assert seen().seconds_to_end(batch(), [large]) == pytest.approx(200 + 200)
    assert seen().seconds_to_end(batch(), [large, small]) == pytest.approx(200 + 200 + 50)
    own = batch(4, expires_at=60)
    assert seen().seconds_to_end(batch(), [large, small, own]) == pytest.approx(400 + 400 + 50)


def test_infeasible_says_when_it_would_be():
    why = seen().why_infeasible(batch(expires_at=120), [], 60.0)
    assert "1970-01-01T00:04:20+00:00" in why
    assert "completion_window of 4m20s" in why
    assert seen().why_infeasible(batch(expires_at=261), [], 60.0) is None


def test_a_profile_counts_until_something_is_measured():
    forecast = Forecast(lambda: Rates(100.0, 10.0))
    forecast.note_answer(10)
    assert forecast.seconds_to_end(batch(), []) == pytest.approx(10 + 100)
    forecast.note_work(1000, 10.0)
    assert forecast.seconds_to_end(batch(), []) == pytest.approx(20)


def with_sleepers(*wakes_s: float, num_awake: int = 1) -> Forecast:
    """Ten tokens a second for each instance."""
    forecast = Forecast(capacity=lambda: Capacity(num_awake, wakes_s))
    forecast.note_work(100, 10.0)
    for _ in range(20):
        forecast.note_answer(10)
    return forecast


def test_a_window_is_judged_by_all_that_can_be_woken():
    assert with_sleepers().seconds_to_end(batch(), []) == pytest.approx(200)
    assert with_sleepers(20.0).seconds_to_end(batch(), []) == pytest.approx(20 + 180 / 2)
    assert with_sleepers(20.0, num_awake=0).seconds_to_end(batch(), []) == pytest.approx(20 + 200)
    assert with_sleepers(20.0).why_infeasible(batch(expires_at=120), [], 0.0) is None
    assert "completion_window of 1m50s" in with_sleepers(20.0).why_infeasible(batch(expires_at=100), [], 0.0)
    assert with_sleepers().why_infeasible(batch(expires_at=120), [], 0.0) is not None


@pytest.mark.parametrize(("expires_at", "seconds"), [(300, 200), (150, 150), (100, 110)])
def test_it_will_be_done_by_those_awake_or_at_its_deadline_or_by_all_that_there_are(expires_at, seconds):
    assert with_sleepers(20.0).seconds_expected(batch(expires_at=expires_at), [], 0.0) == pytest.approx(seconds)
    assert Forecast().seconds_expected(batch(), [], 0.0) is None


def test_what_is_online_is_taken_off_what_a_profile_promises_and_not_off_what_was_measured():
    forecast = Forecast(lambda: Rates(100.0, 10.0))
    forecast.note_answer(10)
    forecast.note_online(200, 30, 10.0, 1)  # 2 s of prompts and 3 s of answers in 10 s
    assert forecast.seconds_to_end(batch(), []) == pytest.approx(2 * (10 + 100))
    forecast.note_online(1e9, 0, 10.0, 1)
    assert forecast.seconds_to_end(batch(), []) == pytest.approx(10 * (10 + 100)), "a burst is not for ever"
    forecast.note_work(1000, 10.0, 2)
    assert forecast.seconds_to_end(batch(), []) == pytest.approx(40), "50 a second for each of two"


def test_those_asleep_count_as_the_engine_says_and_the_dead_come_back():
    def worker(number, sleep, alive=True):
        return WorkerSnapshot(number, 1, alive, 1, 1, 0, 1, 0, 0, sleep=sleep)

    asleep = [worker(0, "awake"), worker(1, "awake", alive=False), worker(2, "asleep"), worker(3, "waking")]
    assert capacity_of(EngineSnapshot("ready", 16, workers=asleep, wakes_s=(2.0,))) == Capacity(3, (2.0,))
    assert capacity_of(EngineSnapshot("loading", 16)) == ONE


def test_what_was_known_is_remembered():
    forecast = Forecast()
    forecast.remember(seen().notes())
    assert forecast.seconds_to_end(batch(), []) == seen().seconds_to_end(batch(), [])
    forecast = Forecast()
    forecast.remember(Forecast().notes())
    assert forecast.seconds_to_end(batch(), []) is None


def test_old_measurements_fade():
    forecast = seen(rate=10.0)
    for _ in range(600):
        forecast.note_work(100, 1.0)
    assert forecast.rates.output == pytest.approx(100, rel=0.01)


def test_a_standstill_lasts_no_more_for_ever_than_a_burst():
    forecast, now_s = seen(rate=10.0), time.time()
    fits, hopeless = (batch(expires_at=now_s + seconds, created_at=now_s) for seconds in (3600, 199))
    for _ in range(15 * 60 * 2):
        forecast.note_work(0, 0.5)
    assert forecast.why_infeasible(fits, [], now_s) is None
    for _ in range(100 * 60 * 2):
        forecast.note_work(0, 0.5)
    assert forecast.why_infeasible(fits, [], now_s) is None
    assert forecast.rates == pytest.approx((1.0, 1.0))
    assert "completion_window of 33m20s" in forecast.why_infeasible(hopeless, [], now_s)
    restarted = Forecast()
    restarted.remember(forecast.notes())
    assert restarted.rates == forecast.rates
    restarted.note_work(5, 0.5)
    assert restarted.rates == pytest.approx((1.0, 1.0), rel=0.01), "one tick of work does not make it slower"


def test_a_slow_rate_is_believed_while_tokens_come():
    forecast = seen(rate=1000.0)
    for _ in range(3 * 3600):
        forecast.note_work(1, 1.0)
    assert forecast.rates.output == pytest.approx(1, rel=0.01)


def test_time_before_the_first_token_is_no_measurement():
    forecast = Forecast()
    for _ in range(600):
        forecast.note_work(0, 1.0)
    forecast.note_work(40, 4.0)
    assert forecast.rates.output == pytest.approx(10)


@pytest.mark.parametrize("slow_down", [1e5, 1e9, 1e300])
def test_a_batch_that_no_window_is_enough_for_is_told_so(slow_down):
    forecast = seen()
    huge = batch(prompt=int(1000 * slow_down), expires_at=3600)
    assert "nor within 30d, the longest" in forecast.why_infeasible(huge, [], 0.0)
    assert "completion_window of 30d is enough" in forecast.why_infeasible(batch(prompt=MOST_S * 10 - 1000), [], 0.0)


async def test_an_outage_is_no_rate(serve, batch_settings):
    engine = FakeEngine()
    async with serve(engine, batches=batch_settings()) as served:
        service = batch_service(served.app)
        service._forecast.note_work(100, 10.0)
        before = service._forecast.notes()
        engine.dead_workers = {0, 1}
        service._note_what_was_done(0.5, is_full=True)
        assert service._forecast.notes() == before
        service._note_tokens(5)
        service._note_what_was_done(0.5, is_full=True)
        assert service._forecast.notes() != before, "these tokens were computed before"


# --- places


async def test_who_holds_least_is_next_and_of_hers_what_is_due_first():
    window, order = Window(2), []

    async def take(owner, deadline, seq):
        await window.take(owner, deadline, seq, 1)
        order.append((owner, seq))

    await window.take("a", 9, 0, 1)
    await window.take("a", 9, 0, 1)
    waiting = [asyncio.create_task(take(*asked)) for asked in (("a", 9, 1), ("a", 5, 2), ("b", 99, 3), ("b", 99, 4))]
    await asyncio.sleep(0)
    assert order == []
    for _ in range(4):
        window.give_back(*next(((owner, 1) for owner in ("a", "b") if window._held[owner]), ("a", 1)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert order[0] == ("b", 3)
    assert [seq for owner, seq in order if owner == "a"] == [2, 1]


async def test_a_line_larger_than_the_window_runs_alone():
    window = Window(2)
    await window.take("a", 1, 1, 1)
    large = asyncio.create_task(window.take("a", 1, 2, 9))
    await asyncio.sleep(0)
    assert not large.done()
    window.give_back("a", 1)
    await large
    assert window.num_held == 9


async def test_a_place_of_somebody_who_left_is_free():
    window = Window(1)
    await window.take("a", 1, 1, 1)
    waits = asyncio.create_task(window.take("a", 1, 2, 1))
    granted = asyncio.create_task(window.take("a", 1, 1, 1))
    await asyncio.sleep(0)
    waits.cancel()
    window.give_back("a", 1)
    granted.cancel()  # in the moment in which it was its turn
    await asyncio.gather(waits, granted, return_exceptions=True)
    assert window.num_held == 0


@pytest.mark.parametrize("cancels_first", [True, False])
async def test_a_line_that_ends_and_one_that_is_cancelled_in_the_same_turn(cancels_first):
    window, ends = Window(1), asyncio.Event()

    async def line(owner, deadline):
        await window.take(owner, deadline, 1, 1)
        try:
            await ends.wait()
        finally:
            window.give_back(owner, 1)

    running = asyncio.create_task(line("x", 9))
    await asyncio.sleep(0)
    first = asyncio.create_task(line("y", 0))
    await asyncio.sleep(0)
    for act in (first.cancel, ends.set) if cancels_first else (ends.set, first.cancel):
        act()
    await running
    with pytest.raises(asyncio.CancelledError):
        await first
    assert window.num_held == 0 and not window.is_wanted
    await asyncio.wait_for(window.take("z", 0, 1, 1), 5)


async def test_who_stood_behind_a_large_line_that_left_gets_what_is_free():
    window = Window(2)
    await window.take("a", 9, 1, 1)
    large = asyncio.create_task(window.take("b", 0, 2, 2))
    small = asyncio.create_task(window.take("c", 9, 3, 1))
    await asyncio.sleep(0)
    assert window.num_held == 1
    large.cancel()
    await asyncio.wait_for(small, 5)
    assert window.num_held == 2


@given(st.lists(st.tuples(st.sampled_from(["end", "cancel", "turn"]), st.integers(0, 7)), max_size=40))
def test_all_places_come_back_whatever_ends_and_is_cancelled_when(acts):
    asyncio.run(feed_eight_lines(acts))


async def feed_eight_lines(acts) -> None:
    window, ends = Window(3), [asyncio.Event() for _ in range(8)]

    async def line(number):
        owner, num_places = "abc"[number % 3], 1 + number % 4
        await window.take(owner, -number, number, num_places)
        try:
            await ends[number].wait()
        finally:
            window.give_back(owner, num_places)

    lines = [asyncio.create_task(line(number)) for number in range(8)]
    await asyncio.sleep(0)
    for act, number in acts:
        if act == "turn":
            await asyncio.sleep(0)
        else:
            (ends[number].set if act == "end" else lines[number].cancel)()
    for event in ends:
        event.set()
    outcomes = await asyncio.wait_for(asyncio.gather(*lines, return_exceptions=True), 5)
    assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert window.num_held == 0 and not window.is_wanted


# --- results on their way to disk


async def test_results_are_written_in_order_and_in_batches(monkeypatch):
    monkeypatch.setattr(feeding, "FLUSH_EVERY_S", 0.01)
    written = []

    async def write(results):
        written.append([result.line for _, result in results])

    writer = ResultWriter(write)
    writer.start()
    for number in range(50):
        await writer.put(1, Result(number, False, b""))
    await writer.flushed()
    assert [n for some in written for n in some] == list(range(50))
    assert len(written) < 10
    await writer.put(1, Result(50, False, b""))
    await writer.close()
    assert written[-1] == [50]


async def test_a_full_disk_holds_results_and_feeding_until_there_is_room(monkeypatch):
    monkeypatch.setattr(feeding, "FLUSH_EVERY_S", 0.001)
    monkeypatch.setattr(feeding, "RETRY_S", 0.001)
    monkeypatch.setattr(feeding, "MAX_UNWRITTEN", 3)
    written, is_full = [], True

    async def write(results):
        if is_full:
            raise sqlite3.OperationalError("database or disk is full")
        written.extend(result.line for _, result in results)

    writer = ResultWriter(write)
    writer.start()
    for number in range(3):
        await writer.put(1, Result(number, False, b""))
    further = asyncio.create_task(writer.put(1, Result(3, False, b"")))
    await asyncio.sleep(0.05)
    assert not further.done()
    is_full = False
    await further
    await writer.flushed()
    assert written == [0, 1, 2, 3]
    is_full = True
    await writer.put(1, Result(4, False, b""))
    await writer.close()  # ends all the same

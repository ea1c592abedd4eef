"""Restart budgets, heartbeats and failpoints, each alone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from jettison.config import FaultsConfig
from jettison.errors import WorkerLostError
from jettison.live.engine.restart import MAX_PAUSE_S, RestartBudget, Restarter
from jettison.live.wire import messages as m
from jettison.live.wire.heartbeat import Heart, Listener, Patience
from jettison.live.wire.stepflag import StepFlag
from jettison.live.worker.failpoints import NAMES, Rule, arm, from_environment, nowhere, parse
from waiting import PATIENCE_S


def test_pauses_grow_and_the_window_forgets() -> None:
    budget = RestartBudget(max_restarts=5, window_s=300.0)
    pauses = [budget.next_pause_s(float(t)) for t in range(5)]
    assert pauses == sorted(pauses) and pauses[0] > 0 and pauses[-1] == pytest.approx(MAX_PAUSE_S)  # type: ignore[type-var]
    assert budget.next_pause_s(10.0) is None
    assert budget.next_pause_s(300.5) is not None, "the first one is forgotten"
    assert RestartBudget(0, 300.0).next_pause_s(0.0) is None


async def test_workers_come_back_one_at_a_time_and_failed_starts_are_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jettison.live.engine.restart.MAX_PAUSE_S", 0.2)
    running = most = 0
    attempts: list[int] = []
    joined: list[int] = []
    gone: list[int] = []

    async def start(worker_id: int) -> m.WorkerReady:
        nonlocal running, most
        attempts.append(worker_id)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        if worker_id == 2 or (worker_id == 0 and attempts.count(0) == 1):
            raise WorkerLostError("injected")
        return m.WorkerReady(worker_id, 1, 1, 0, "", {})

    restarter = Restarter(start, lambda r: joined.append(r.worker_id), gone.append, max_restarts=2, window_s=60.0)
    for worker_id in (0, 1, 2, 0):
        restarter.worker_lost(worker_id, "killed")
    assert restarter.why_down == dict.fromkeys((0, 1, 2), "killed")
    restarter.note_waits(1, "no host has room yet")
    restarter.note_waits(7, "no host has room yet")
    assert restarter.why_down == {0: "killed", 1: "no host has room yet", 2: "killed"}
    async with asyncio.timeout(PATIENCE_S):
        while len(joined) + len(gone) < 3:
            await asyncio.sleep(0.01)
    assert sorted(joined) == [0, 1] and gone == [2] and most == 1
    assert attempts.count(0) == 2 and attempts.count(2) == 2
    assert restarter.why_down == {2: "it could not be started: injected"}
    await restarter.close()


async def test_whatever_a_start_raises_is_a_failed_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jettison.live.engine.restart.MAX_PAUSE_S", 0.1)
    joined: list[int] = []
    gone: list[int] = []
    errors: list[Exception] = [OSError(12, "Cannot allocate memory"), AssertionError("a bug"), OSError(24, "files")]

    async def start(worker_id: int) -> m.WorkerReady:
        if errors:
            raise errors.pop(0)
        return m.WorkerReady(worker_id, 1, 1, 0, "", {})

    async def until_told(num: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(joined) + len(gone) < num:
                await asyncio.sleep(0.01)

    restarter = Restarter(start, lambda r: joined.append(r.worker_id), gone.append, max_restarts=3, window_s=60.0)
    restarter.worker_lost(0, "killed")
    await until_told(1)
    assert (joined, gone, errors) == ([], [0], []), "three attempts failed: it stays down, and that is told"
    restarter.worker_lost(1, "killed")
    await until_told(2)
    restarter.worker_lost(1, "killed")
    await until_told(3)
    assert joined == [1, 1], "a later death of a worker that came back is a death again"
    await restarter.close()


async def test_a_new_worker_is_tried_until_it_is_there_and_no_dead_one_waits_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jettison.live.engine.restart.MAX_PAUSE_S", 0.1)
    joined: list[int] = []
    waits: list[tuple[int, str]] = []
    has_room, tried = asyncio.Event(), asyncio.Event()

    async def start(worker_id: int) -> m.WorkerReady:
        if worker_id == 9 and len(waits) < 3:
            raise WorkerLostError("no room")
        if worker_id == 9:
            tried.set()
            await has_room.wait()
        return m.WorkerReady(worker_id, 1, 1, 0, "", {})

    def told(worker_id: int, reason: str) -> None:
        waits.append((worker_id, reason))

    restarter = Restarter(
        start, lambda r: joined.append(r.worker_id), lambda _: None, told, max_restarts=2, window_s=0.2
    )
    restarter.start_new(9)
    async with asyncio.timeout(PATIENCE_S):
        await tried.wait()
        assert waits == [(9, "no room")] * 3, "more often than a dead one may be started again"
        restarter.worker_lost(0, "killed")
        while joined != [0]:
            await asyncio.sleep(0.01)
        restarter.call_off(9)
        restarter.start_new(9)
        has_room.set()
        while joined != [0, 9]:
            await asyncio.sleep(0.01)
    restarter.call_off(9)  # it is there: nothing is left to call off
    await restarter.close()


def test_by_default_a_hung_worker_is_found_within_two_seconds() -> None:
    """Its last beat may be read one interval late, and its silence be noticed one more interval late."""
    faults = FaultsConfig()
    silence_s, stuck_s = faults.worker_heartbeat_timeout_s, faults.worker_step_timeout_s
    interval_s = Patience(silence_s, stuck_s).beat_interval_s
    assert silence_s + 2 * interval_s <= 1.9
    assert silence_s >= 5 * interval_s, "a few late beats are no silence"


def test_silence_and_one_endless_unit_are_told_from_long_work() -> None:
    read_fd, write_fd = os.pipe()
    heart = Heart(write_fd, 0.005)
    listener = Listener(read_fd, 0.0)
    assert listener.why_hung(4.9, Patience(5.0, 0.0)) is None
    assert "silent" in str(listener.why_hung(5.1, Patience(5.0, 0.0)))
    heart.unit = 7
    heart.start()

    def beat_at(now_s: float) -> None:
        while listener._beat_s != now_s:
            listener.read(now_s)

    beat_at(10.0)
    beat_at(60.0)
    assert listener.why_hung(61.0, Patience(5.0, 100.0)) is None, "a long step beats on"
    assert "unit" in str(listener.why_hung(111.0, Patience(500.0, 100.0)))
    listener.excuse(50.0, 111.0)
    assert listener.why_hung(111.0, Patience(60.0, 100.0)) is None, "the listener was away"
    listener.excuse(50.0, 111.0)
    assert min(listener.ages_s(111.0)) == 0.0, "no more than it was silent"
    heart.stop()
    os.close(write_fd)
    listener.close()


def test_a_worker_whose_keeper_is_dead_still_looks_at_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()
    monkeypatch.setattr(os, "kill", lambda pid, how: killed.set())
    read_fd, write_fd = os.pipe()
    flag = StepFlag()
    heart = Heart(write_fd, 0.001, flag)
    os.close(read_fd)
    heart.start()
    assert not killed.wait(0.05)
    flag.lease_until(1.0)
    assert killed.wait(PATIENCE_S)
    heart.stop()
    os.close(write_fd)


def test_failpoints_fire_in_the_life_they_are_meant_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, environ = Rule(1, 2, "before_sample", 3, signal.SIGSTOP), {"JETTISON_TEST_KILL_AT": f"{tmp_path / 'rules'}"}
    assert parse(f"{rule},0.0:after_flush:1") == [rule, Rule(0, 0, "after_flush", 1, signal.SIGKILL)]
    with pytest.raises(ValueError, match="no failpoint"):
        parse("0.0:somewhere:1")
    assert all(from_environment(1, 2, unset) is nowhere for unset in ({}, {"JETTISON_TEST_KILL_AT": ""}))
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, how: sent.append(how))
    arm(tmp_path / "rules", [rule])
    reach, reach_later = from_environment(1, 2, environ), from_environment(1, 3, environ)
    for name in (*NAMES, "before_sample", "after_sample"):
        reach(name)
    for _ in range(4):
        reach_later("before_sample")
    assert not sent
    for _ in range(4):
        reach("before_sample")
    assert sent == [signal.SIGSTOP]


def test_a_worker_that_serves_is_armed_and_counts_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, how: sent.append(how))
    file = tmp_path / "rules"
    arm(file, [])
    reach = from_environment(0, 1, {"JETTISON_TEST_KILL_AT": str(file)})
    for _ in range(9):
        reach("before_shard_written")
    rules = [Rule(0, 1, "before_shard_written", 2, signal.SIGKILL), Rule(0, 1, "after_flush", 1, signal.SIGSTOP)]
    arm(file, rules)
    reach("before_shard_written")
    reach("after_shard_written")
    assert not sent
    arm(file, rules)
    reach("before_shard_written")
    assert not sent, "counted anew"
    reach("before_shard_written")
    arm(file, [])
    reach("after_flush")
    assert sent == [signal.SIGKILL], "disarmed"
    arm(file, rules)
    reach("after_flush")
    assert sent == [signal.SIGKILL, signal.SIGSTOP]

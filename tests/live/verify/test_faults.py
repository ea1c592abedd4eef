"""kill -9 and SIGSTOP of real worker processes at named places: no token lost, repeated or wrong; nothing leaks.

``JETTISON_FAULT_SCHEDULES=200`` looks further than the default, ``JETTISON_LONG=1`` at every place of sleep;
``python -m benchmarks moves deaths`` prints what it saw.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from drawn_schedules import drawn_schedule

from jettison.device.model.create import create_model
from jettison.live.verify import fault_rounds
from jettison.live.verify.deaths import death_plan, kills, schedule_of
from jettison.live.verify.fault_rounds import FaultRounds
from jettison.live.verify.fault_schedules import MOVES, Schedule, Source, Wake
from jettison.live.verify.scenarios import Outcome, Setting
from jettison.live.worker.failpoints import (
    ALONE,
    FILL_NAMES,
    LIVE_ONLY,
    NAMES,
    OFFLINE_NAMES,
    PULL_NAMES,
    SLEEP_NAMES,
)
from jettison.memory.kvtransfers import ExchangeMode
from longrun import part_of

pytestmark = pytest.mark.live

MOST_TRIES = 6
"""Until a place is met that only some rounds come by."""
IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")
"""Of tests that share an engine. They come last: it would not be looked after while another loop runs."""

N_SCHEDULES = int(os.environ.get("JETTISON_FAULT_SCHEDULES", "5"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "model"
    create_model(
        folder, arch="qwen2", layers=4, hidden=32, heads=4, kv_heads=2, seed=5, max_position_embeddings=512, std=0.2
    )
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rounds(model_dir: Path) -> AsyncIterator[FaultRounds]:
    """One engine for all rounds that want nothing of their own."""
    async with FaultRounds.running(model_dir) as rounds:
        yield rounds


@pytest.mark.parametrize(
    ("mode", "instances", "where"),
    part_of(
        [("live", 2, "after_attention"), ("transfer", 3, "before_piece_written")], [("live", 2, "after_attention")]
    ),
)
def test_deaths_for_the_table_reach_their_place(mode: str, instances: int, where: str, model_dir: Path) -> None:
    setting = Setting(model_dir, "float64", 96, seed=0)
    rows: list[tuple[str, Outcome]] = []
    kills(setting, [where], lambda *row: rows.append(row), exchange=mode, instances=instances)
    ((name, outcome),) = rows
    assert name == where
    assert outcome.happened, outcome.evidence
    assert sum(len(r.output) for r in outcome.requests) > 1000


def test_an_instance_of_one_layer_dies_without_a_pipeline(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    create_model(
        folder, arch="qwen2", layers=1, hidden=32, heads=4, kv_heads=2, seed=5, max_position_embeddings=160, std=0.2
    )
    rows: list[tuple[str, Outcome]] = []
    kills(Setting(folder, "float64", 96, seed=0), ALONE[1:3], lambda *row: rows.append(row), exchange="live")
    assert [name for name, _ in rows] == list(ALONE[1:3])
    assert all(outcome.happened for _, outcome in rows), rows
    # A context of 160 has room for 120 tokens after the longest prompts.
    assert max(len(request.output) for _, outcome in rows for request in outcome.requests) == 120


def test_the_full_table_has_every_death_in_every_mode() -> None:
    planned = [
        (mode, num, where) for index in range(5) for mode, num, places in death_plan(index, 5) for where in places
    ]
    assert len(planned) == len(set(planned))
    for mode in ExchangeMode:
        missing = {n for n in NAMES if (mode, 2, n) not in planned}
        assert missing == (set() if mode is ExchangeMode.LIVE else set(LIVE_ONLY))
    for instances in (3, 4):
        assert {n for _, num, n in planned if num == instances} == set(NAMES)
    once = [n for _, _, n in planned if n not in NAMES]
    assert sorted(once) == sorted((*MOVES, *OFFLINE_NAMES)), "migrations, sleep, waking and offline work"


def test_every_place_of_a_move_is_drawn_with_what_it_takes_to_meet_it() -> None:
    drawn = [drawn_schedule(seed, names=MOVES) for seed in range(4 * len(MOVES))]
    assert {s.name for s in drawn} == set(MOVES)
    points = {s.point for s in drawn if not s.is_phase}
    assert points == {*PULL_NAMES, *SLEEP_NAMES, *FILL_NAMES}, "each of these is met by some role"
    for schedule in drawn:
        if schedule.point in ("before_load", "after_load"):
            assert schedule.source is not Source.PEERS, "peers are asked first"
        if schedule.point.startswith(("before_shard", "after_shard")):
            assert schedule.source is Source.PEERS


def seeds_of(num_schedules: int) -> range:
    """Spread over all places, by an odd step: those before and after. From 1 on a few have what the others lack."""
    step = len(NAMES) // num_schedules | 1
    return range(1, 1 + num_schedules * step, step)


def test_the_rounds_of_a_plain_run_are_of_many_kinds() -> None:
    """A stop that lasts until the worker is killed for it is in no other test here; neither is a split."""
    drawn = [drawn_schedule(seed) for seed in seeds_of(5)]
    assert [s.name for s in drawn] == [
        "after_drop", "before_split", "after_piece_written", "before_sample", "after_sleep"
    ]  # fmt: skip
    assert {(s.signal, s.wake) for s in drawn} == {
        (signal.SIGKILL, Wake.NEVER), (signal.SIGSTOP, Wake.NEVER), (signal.SIGSTOP, Wake.LATE)
    }  # fmt: skip
    assert len({s.mode for s in drawn}) == 3


@IN_ONE_LOOP
async def test_seeded_deaths_lose_nothing(rounds: FaultRounds) -> None:
    num_token_migrations = 0
    for seed in seeds_of(N_SCHEDULES):
        report = await rounds.run(drawn_schedule(seed))
        assert not report.problems, report
        assert report.num_tokens > 0
        num_token_migrations += report.num_token_migrations
    if len(NAMES) <= N_SCHEDULES:  # in a few rounds it is chance; one that dies in such a move is below
        assert num_token_migrations > 0, "deaths are to meet requests that go as tokens"


@IN_ONE_LOOP
@pytest.mark.parametrize("name", part_of(SLEEP_NAMES, ("after_sleep", "before_wake")))
async def test_deaths_on_the_way_to_sleep_and_back(name: str, rounds: FaultRounds) -> None:
    report = await rounds.run(Schedule(3, 1, name, 1, signal.SIGKILL))
    assert not report.problems, report
    assert report.reached


@IN_ONE_LOOP
@pytest.mark.parametrize("names", [("source:kv_last", "destination:tokens_stop", "waker:before_load"), OFFLINE_NAMES],
                         ids=["migrations and waking", "copies and steps that are given up"])  # fmt: skip
async def test_deaths_in_what_is_done_for_requests_lose_nothing(names: tuple[str, ...], rounds: FaultRounds) -> None:
    for seed, name in enumerate(names):
        for more in range(MOST_TRIES):  # a step is given up where an online request comes as offline ones run alone
            report = await rounds.run(schedule_of(name, (seed + more) % 2, seed + 100 * more))
            assert not report.problems, report
            if report.reached:
                break
        assert report.reached, name


@IN_ONE_LOOP
async def test_a_stopped_worker_that_wakes_up_reaches_nobody(rounds: FaultRounds) -> None:
    """Stopped before its tokens go out, replaced, and woken; and a stop that is too short to mean anything."""
    for seed, name, wake in ((0, "before_flush", Wake.LATE), (1, "before_sample", Wake.SOON)):
        report = await rounds.run(Schedule(seed, 0, name, 20, signal.SIGSTOP, wake))
        assert not report.problems, report
        assert report.reached


@IN_ONE_LOOP
async def test_a_worker_that_ends_elsewhere_is_no_proof(rounds: FaultRounds) -> None:
    async def strike() -> None:
        await asyncio.sleep(0.2)
        os.kill(rounds._pid(0), signal.SIGKILL)

    struck = asyncio.create_task(strike())
    report = await rounds.run(Schedule(0, 0, "before_load", 1, signal.SIGKILL))
    await struck
    assert not report.reached and report.problems == ["worker 0 ended by itself, and not at before_load"]


@IN_ONE_LOOP
async def test_a_round_that_does_not_end_says_what_it_waited_for(
    rounds: FaultRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one: the engine is not looked after until it is at rest."""
    monkeypatch.setattr(fault_rounds, "ROUND_TIMEOUT_S", 0.0)
    report = await rounds.run(Schedule(0, 0, "before_flush", 1, signal.SIGKILL))
    assert not report.reached
    assert report.problems[0].startswith("waited for worker 0 at before_flush: not there after 0 s: ready {0:")

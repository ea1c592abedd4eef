"""Event logs that were written down once: work on the core's structure changes none of them.

Each schedule runs in virtual time; its log's hash (``sim.eventlog``: arrivals, ends, moves, layouts, deaths, decisions
with all that they tell) and how often each kind of record was in it are compared with ``frozen_logs.json``. Together
the schedules hold every kind of record that the core can write, but for those that ``ELSEWHERE`` names. A change that
is meant to decide otherwise records anew what it changes, and says why in its commit: ``python
tests/sim/test_frozen_logs.py`` writes the file.
"""

from __future__ import annotations

import ast
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_faults
import test_packing
import test_safepoints
import test_scaling
import test_sim_slices
import test_sleeping
import test_standing
import test_waking
from scenarios import Watched, make_setup
from schedules import run_to_its_end
from test_waking import sleepy

import jettison.core
from jettison.config.offline import HARVEST_PARTS
from jettison.core.ladder.lists import with_offline, with_packing
from jettison.core.params import AwakeParams
from jettison.policy.offline import OfflineParams
from jettison.policy.packing.params import PackParams
from jettison.sim.faults import draw_faults
from jettison.types import ServiceClass

FILE = Path(__file__).parent / "frozen_logs.json"

ELSEWHERE = {
    "drop_failed": "tests/core/test_golden_schedules.py: no device refuses a layout in virtual time",
    "offline_spread": "tests/core/test_due_work.py: it takes a batch with a window, which is told from outside",
    "offline_yields": "tests/core/test_due_work.py: the same",
    "sleep_put_off": "tests/core/test_priced_work.py: no frozen schedule has a price",
    "instance_waits": "tests/core/test_scaling.py: no start fails in virtual time",
    "instance_given_up": "tests/core/test_scaling.py: no start takes so long there",
    "recovery_stuck": "tests/live/engine/test_weights.py: the simulator's model folder never changes",
}
"""Kinds of records that no schedule here has, and the tests that have them."""


def whole_ladder(seed: int) -> Watched:
    """Bursts of unlike requests on a few devices, with as many rungs as the lot gives: drop, wake, pack, harvest."""
    rng = random.Random(f"whole {seed}")
    num_workers = rng.randint(2, 6)
    setup = make_setup(
        "drop", num_workers=num_workers, num_blocks=rng.choice([24, 40, 60]), eager=rng.random() < 0.5
    )
    link_bytes_per_s = rng.choice([1e7, 3e7, 1e8, 2e8])
    if rng.random() < 0.8:
        setup = sleepy(setup, AwakeParams(rng.randint(1, 2), None, True, 0.2), link_bytes_per_s)
    if rng.random() < 0.4:
        packing = PackParams(packer="mell", epoch_s=0.1, head_room=0.1, retry_s=0.05)
        setup = replace(setup, params=replace(setup.params, rungs=with_packing(setup.params.rungs), packing=packing))
    has_batch = rng.random() < 0.5
    if has_batch:
        rungs = with_offline(setup.params.rungs, HARVEST_PARTS)
        offline = OfflineParams(slo_aware=True, checkpoints=True, prefetches=True)
        setup = replace(setup, params=replace(setup.params, rungs=rungs, offline=offline))
    watched = Watched(setup, check_every=20)
    begin_s = 0.0
    for burst in range(3):
        num = rng.randint(10, 25) * num_workers
        span_s, prompt, output = rng.choice([0.05, 0.2, 0.6]), rng.choice([20, 60, 150]), rng.choice([8, 40, 100])
        for i in range(num):
            tokens = rng.randint(prompt // 2, prompt * 3 // 2), rng.randint(output // 2, output * 3 // 2)
            watched.submit(f"b{burst}-{i}", *tokens, begin_s + span_s * rng.random())
        begin_s += rng.choice([0.5, 1.5, 3.0])
    if has_batch:
        for i in range(8 * num_workers):
            tokens = rng.randint(50, 250), rng.randint(5, 60)
            watched.submit(f"o{i}", *tokens, begin_s * rng.random(), ServiceClass.OFFLINE)
    watched.cluster.start_ticks()
    if rng.random() < 0.4:
        watched.cluster.inject(draw_faults(seed, range(num_workers), begin_s, 1 + seed % 3))
    run_to_its_end(watched)
    watched.expect_one_end_each()
    return watched


def steps_given_up(seed: int) -> Watched:
    """Online requests whose deadlines steps of a batch would miss, on one device."""
    return test_safepoints.batch_beside_chat(test_safepoints.harvesting(ttft_s=0.004), seed, 40)


def rows_that_stop(seed: int) -> Watched:
    """Online requests that come in steps of a batch, on two devices with little memory."""
    setup = test_sim_slices.shedding("drop", num_workers=2, num_blocks=36)
    watched = test_sim_slices.batch_beside_chat(setup, seed, num_chats=60)
    watched.cluster.run()
    watched.expect_all_served()
    return watched


def without_args(run: Callable[[], Watched]) -> Callable[[int], Watched]:
    """A schedule that has no seed."""
    return lambda _: run()


FAMILIES: dict[str, tuple[Callable[[int], Watched], tuple[int, ...]]] = {
    "faults": (partial(test_faults.run_schedule, replays=False), tuple(range(16))),
    "sleeping": (test_sleeping.run_schedule, tuple(range(8))),
    "waking": (test_waking.run_schedule, tuple(range(8))),
    "packing": (test_packing.run_schedule, tuple(range(6))),
    "burst after quiet, fast link": (without_args(lambda: test_waking.burst_after_quiet(test_waking.FAST)), (0,)),
    "burst after quiet, slow link": (without_args(lambda: test_waking.burst_after_quiet(test_waking.SLOW)), (0,)),
    "a dear host link": (without_args(test_standing.beside_a_dear_host_link), (0,)),
    "steps given up": (steps_given_up, (3, 4)),
    "rows that stop": (rows_that_stop, (0, 1)),
    "whole ladder": (whole_ladder, (0, 1, 5, 6, 7, 8, 10, 15, 16, 20, 23, 27, 54)),
    "scaling": (test_scaling.run_schedule, (2, 6, 7)),
}
"""Family -> what runs a seed of it, and the seeds that are frozen."""

SCHEDULES = [f"{family}/{seed}" for family, (_, seeds) in FAMILIES.items() for seed in seeds]


def summary(schedule: str) -> dict[str, Any]:
    """Hash and counts of a schedule that is run now."""
    family, _, seed = schedule.rpartition("/")
    watched = FAMILIES[family][0](int(seed))
    log = watched.cluster.log
    records = dict(sorted(Counter(watched.kinds()).items()))
    return {"hash": log.hexdigest[:16], "entries": log.num_entries, "records": records}


def frozen() -> dict[str, dict[str, Any]]:
    """What was written down."""
    document: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return document


def kinds_of_core() -> set[str]:
    """Kinds of records that the core's sources name."""
    kinds: set[str] = set()
    for file in Path(jettison.core.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Record" and node.args:
                kind = node.args[0]
                if isinstance(kind, ast.Constant):
                    kinds.add(kind.value)
    return kinds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_gives_the_log_that_was_written_down(schedule: str) -> None:
    assert summary(schedule) == frozen()[schedule], "python tests/sim/test_frozen_logs.py, if it is meant"


def test_all_kinds_of_records_are_frozen() -> None:
    held = {kind for entry in frozen().values() for kind in entry["records"]}
    assert kinds_of_core() - held == set(ELSEWHERE)
    assert set(frozen()) == set(SCHEDULES)


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: summary(name) for name in SCHEDULES}, indent=1) + "\n", encoding="utf-8")

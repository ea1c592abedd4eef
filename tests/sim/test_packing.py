"""Modelled workers whose requests are packed: fewer are in use, whatever dies or is dropped meanwhile.

``JETTISON_PACKING_SCHEDULES=20000`` is the long run.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from scenarios import Watched, make_setup
from schedules import END_NS, batches, beside_offline, expect_met, expect_same_again, run_to_its_end

from jettison.core.ladder.lists import with_packing, with_wake
from jettison.core.ladder.packing.newcomers import Newcomers
from jettison.core.params import AwakeParams
from jettison.policy.packing.params import PackParams
from jettison.sim.faults import draw_faults
from jettison.sim.setup import ClusterSetup

DRAWN_PACKERS = ("mell", "mell", "best-fit", "worst-fit", "load-balance", "mell", "mell")
"""By lot; in this order, for the frozen logs of what was drawn."""
NUM_SCHEDULES = int(os.environ.get("JETTISON_PACKING_SCHEDULES", "30"))
BATCH = 30
SPAN_S = 0.6
TO_BE_MET = {"pack", "packed", "migrated", "worker_lost", "drop", "asleep"}


def packed_setup(packer: str, policy: str = "drop", **more: object) -> ClusterSetup:
    setup = make_setup(policy, **more)  # type: ignore[arg-type]
    packing = PackParams(packer=packer, epoch_s=0.05, head_room=0.1, retry_s=0.05, saves_idle=True)
    return replace(setup, params=replace(setup.params, rungs=with_packing(setup.params.rungs), packing=packing))


def run_schedule(seed: int) -> Watched:
    """Arrivals over a while, drops, restores and faults by lot."""
    rng = random.Random(seed)
    num_workers = rng.randint(2, 5)
    packer, policy = rng.choice(DRAWN_PACKERS), rng.choice(["drop", "drop", "recompute", "swap"])
    setup = packed_setup(packer, policy, num_workers=num_workers, num_blocks=rng.choice([36, 60, 120]))
    if rng.random() < 0.5:  # who is not needed falls asleep, and is woken
        awake = AwakeParams(min_awake=rng.randint(1, 2), falls_asleep=True, after_s=0.1)
        setup = replace(setup, params=replace(setup.params, rungs=with_wake(setup.params.rungs, False), awake=awake))
    setup, offline_share = beside_offline(setup, seed)
    watched = Watched(setup, check_every=5)
    watched.load(
        seed, num_requests=8 * num_workers, span_s=SPAN_S, mean_output=60, offline_share=offline_share,
    )  # fmt: skip
    cluster = watched.cluster
    for _ in range(rng.randint(0, 2)):
        cluster.loop.at(rng.randrange(int(SPAN_S * 1e9)), rng.choice([cluster.request_drop, cluster.request_restore]))
    cluster.inject(draw_faults(seed, range(num_workers), SPAN_S, seed % 4))
    run_to_its_end(watched)
    watched.expect_one_end_each()
    return watched


@pytest.mark.parametrize("seeds", batches(NUM_SCHEDULES, BATCH, 60))
def test_any_schedule_leaves_every_request_with_one_end(seeds: Sequence[int]) -> None:
    expect_met(run_schedule, seeds, TO_BE_MET)


def test_a_schedule_replays() -> None:
    expect_same_again(run_schedule, 7)


@pytest.mark.parametrize("packer", ["mell", "worst-fit"])
def test_steps_told_of_together_change_nothing(packer: str) -> None:
    """Virtual time may skip steps between which nothing is decided: epochs are not among these."""
    found = []
    for compress in (True, False):
        watched = Watched(packed_setup(packer, num_workers=4, num_blocks=80, compress=compress))
        watched.load(3, num_requests=30, span_s=1.0, mean_output=120)
        watched.cluster.run(until_ns=END_NS)
        watched.expect_all_served()
        found.append((watched.times, [(r.kind, r.time_ns, dict(r.fields)) for r in watched.records]))
    assert found[0] == found[1]


def device_seconds(packer: str) -> float:
    """Of groups in use, by the records of epochs: two bursts, of which some requests stay for long."""
    watched = Watched(packed_setup(packer, "recompute", num_workers=8, num_blocks=100), checks=False)
    rng = random.Random(1)
    for i in range(80):
        at_s = rng.uniform(0.0, 0.2) + (i % 2) * 1.5
        watched.submit(f"r{i}", rng.randint(50, 200), rng.choice([40, 40, 40, 600]), at_s)
    watched.cluster.run(until_ns=END_NS)
    watched.expect_all_served()
    told = [(r.time_ns, float(str(r.fields["used"]))) for r in watched.records if r.kind == "packed"]
    return sum(used * (end - start) for (start, used), (end, _) in itertools.pairwise(told)) / 1e9


def test_packing_takes_fewer_device_seconds_than_spreading() -> None:
    assert device_seconds("mell") < 0.95 * min(map(device_seconds, ("best-fit", "worst-fit")))


def long_prompts_beside_decodes() -> Watched:
    """Two devices hold all of it, and one holds all decodes; long prompts come one after the other."""
    watched = Watched(packed_setup("mell", "recompute", num_workers=2, num_blocks=1200, eager=False))
    for i in range(24):
        watched.submit(f"r{i}", 20, 900, 0.01 * i)
    for i in range(3):
        watched.submit(f"long{i}", 3000, 2, 0.4 + i)
    watched.cluster.run(until_ns=END_NS)
    watched.expect_all_served()
    return watched


def test_long_prompts_come_sooner_and_slow_others_less_than_where_memory_alone_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weighed = long_prompts_beside_decodes()
    monkeypatch.setattr(Newcomers, "choose", lambda self, wanted, *rest: wanted)
    by_memory = long_prompts_beside_decodes()

    def waits_s(watched: Watched) -> float:
        return sum(watched.times[f"long{i}"][0] - watched.requests[f"long{i}"].arrival_ns for i in range(3)) / 1e9

    def decodes_end_s(watched: Watched) -> float:
        return sum(watched.times[f"r{i}"][-1] for i in range(24)) / 24e9

    assert waits_s(weighed) < 0.95 * waits_s(by_memory)
    assert decodes_end_s(weighed) < 0.95 * decodes_end_s(by_memory)

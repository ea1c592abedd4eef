"""Offline requests beside online ones, in virtual time: what each class gets, by mode."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from scenarios import Watched, make_setup

from jettison.config.offline import HARVEST_PARTS
from jettison.core.ladder.lists import with_offline
from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.restore import RestoreParams
from jettison.types import ServiceClass
from longrun import part_of

HARVEST = OfflineParams()
PRIORITY = OfflineParams(slo_aware=False)
NONE = OfflineParams(serves=False, slo_aware=False)
NAMED = SloParams(tpot_s=0.008)


def run(offline: OfflineParams, *, num_offline: int, num_blocks: int = 120) -> Watched:
    """Online requests for two seconds, beside more offline work than there is time for."""
    setup = make_setup("recompute", num_workers=1, num_blocks=num_blocks)
    watched = Watched(replace(setup, params=replace(setup.params, offline=offline)))
    rng = random.Random(5)
    at_s = 0.05
    while at_s < 2.0:
        watched.submit(f"chat-{at_s}", rng.randint(20, 120), rng.randint(2, 40), at_s)
        at_s += rng.expovariate(25.0)
    for i in range(num_offline):
        watched.submit(f"batch-{i}", rng.randint(100, 300), rng.randint(5, 40), 0.0, ServiceClass.OFFLINE)
    watched.cluster.run(until_ns=2 * 10**9)
    return watched


def first_tokens(watched: Watched) -> list[float]:
    times = watched.times
    return sorted(times[n][0] - r.arrival_ns for n, r in watched.requests.items() if n in times and n[0] == "c")


def gaps(watched: Watched) -> list[int]:
    return sorted(b - a for n, t in watched.times.items() if n[0] == "c" for a, b in pairwise(t))


def num_offline_tokens(watched: Watched) -> int:
    return sum(len(t) for n, t in watched.times.items() if n[0] == "b")


def at(times: list[float] | list[int], quantile: float) -> float:
    return times[int(quantile * (len(times) - 1))] / 1e6


def test_offline_work_is_done_and_online_requests_hardly_notice() -> None:
    for slo in (SloParams(), NAMED):
        alone = run(replace(NONE, slo=slo), num_offline=0)
        shared, priority = (run(replace(mode, slo=slo), num_offline=300) for mode in (HARVEST, PRIORITY))
        assert num_offline_tokens(shared) > 300
        goals = shared.cluster.core.groups[0].pace()
        assert goals is not None
        tpot_s = goals.objectives().tpot_s
        assert tpot_s is not None
        # Without safepoints a newcomer waits for the step under way: at most the largest batch, about 11 ms.
        assert at(first_tokens(shared), 0.99) <= at(first_tokens(alone), 0.99) + 1.5 * max(11.0, 1e3 * tpot_s)
        assert at(gaps(shared), 0.99) <= max(at(gaps(alone), 0.99), 1e3 * tpot_s) * 1.2
        assert len(first_tokens(shared)) >= 0.95 * len(first_tokens(alone))
        if slo is NAMED:
            assert at(gaps(priority), 0.99) > 1.2 * at(gaps(shared), 0.99)


def test_memory_full_of_offline_kv_keeps_no_online_request_waiting() -> None:
    alone = run(NONE, num_offline=0, num_blocks=60)
    shared = run(replace(HARVEST, slo=NAMED), num_offline=300, num_blocks=60)
    priority = run(PRIORITY, num_offline=300, num_blocks=60)
    assert shared.cluster.core.groups[0].counters.num_preemptions > 0
    assert at(first_tokens(shared), 0.99) <= at(first_tokens(alone), 0.99) + 20.0
    assert at(first_tokens(priority), 0.99) > at(first_tokens(shared), 0.99)


def test_refused_requests_change_nothing() -> None:
    alone, refusing = (run(NONE, num_offline=num) for num in (0, 50))
    assert first_tokens(alone) == first_tokens(refusing) and gaps(alone) == gaps(refusing)
    assert num_offline_tokens(refusing) == 0 and len(refusing.errors) == 50


def burst(seed: int, num_offline: int) -> Watched:
    """Two instances, and a burst that makes them drop; the batch is there before it."""
    setup = make_setup("drop", num_workers=2, num_blocks=60)
    rungs = with_offline(setup.params.rungs, HARVEST_PARTS)
    watched = Watched(replace(setup, params=replace(setup.params, rungs=rungs, offline=HARVEST)))
    rng = random.Random(seed)
    for i in range(60):
        at_s = 0.4 + 0.2 * rng.random()
        watched.submit(f"chat-{i}", rng.randint(20, 100), rng.randint(20, 100), at_s)
    for i in range(num_offline):
        watched.submit(f"batch-{i}", rng.randint(100, 300), rng.randint(5, 40), 0.0, ServiceClass.OFFLINE)
    watched.cluster.run()
    watched.expect_all_served()
    return watched


def test_a_burst_drops_beside_a_batch_as_it_does_alone_and_the_batch_ends() -> None:
    """Of ten seeds, in the median."""
    ratios = []
    for seed in range(10):
        alone, beside = burst(seed, 0), burst(seed, 40)
        assert "drop_decided" in alone.kinds() and "drop_decided" in beside.kinds()
        counted = beside.cluster.core.state.counters
        assert counted.checkpoint_frees > 0 and counted.offline_pauses > 0
        assert beside.kinds().count("offline_paused") == beside.kinds().count("offline_resumed")
        ratios.append(at(first_tokens(beside), 0.99) / at(first_tokens(alone), 0.99))
    assert sorted(ratios)[5] <= 1.25


def restored_s(seed: int, num_offline: int) -> float:
    """When two instances that a burst has merged are on their own again, with a chat and the batch still going on."""
    setup = make_setup("drop", num_workers=2, num_blocks=60)
    rungs = with_offline(setup.params.rungs, HARVEST_PARTS)
    params = replace(setup.params, rungs=rungs, offline=HARVEST, restore=RestoreParams())
    watched = Watched(replace(setup, params=params))
    rng = random.Random(seed)
    for i in range(60):
        watched.submit(f"chat-{i}", rng.randint(20, 100), rng.randint(20, 100), 0.4 + 0.2 * rng.random())
    for i in range(60):
        watched.submit(f"later-{i}", rng.randint(20, 100), rng.randint(20, 40), 0.6 + 0.1 * i)
    for i in range(num_offline):
        watched.submit(f"batch-{i}", rng.randint(100, 300), rng.randint(5, 40), 0.0, ServiceClass.OFFLINE)
    watched.cluster.run(until_ns=6 * 10**9)
    assert "drop_decided" in watched.kinds() and watched.kinds().count("restore_done") == 1
    assert len([name for name in watched.ends if name[0] == "b"]) < max(1, num_offline)
    return next(record.time_ns for record in watched.records if record.kind == "restore_done") / 1e9


def test_beside_an_endless_batch_instances_come_back_as_soon_after_a_burst_as_without() -> None:
    for seed in part_of(range(3), (0,)):
        assert restored_s(seed, 800) <= restored_s(seed, 0) + 1.0

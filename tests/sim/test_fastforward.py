"""Compressed stepping equals naive stepping: request by request, to the nanosecond, and in every book of the core.

The long run draws 10,000 scenarios: ``JETTISON_FAST_FORWARD_SCENARIOS=10000``.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from scenarios import COST, Watched, make_setup

from jettison.core import ports
from jettison.cost.stepwork import StepWork, step_of
from jettison.sim.cluster import SimulatedCluster
from jettison.sim.executor import ModelledExecutor, StageShape, StepLoad
from jettison.sim.faults import draw_faults
from jettison.sim.setup import ClusterSetup, Hops
from jettison.types import LayerRange, Request, SamplingParams

NUM_SCENARIOS = int(os.environ.get("JETTISON_FAST_FORWARD_SCENARIOS", "100"))
BATCH = 20
"""Scenarios a test: a test's own overhead is larger than a scenario."""


def scenario(seed: int) -> tuple[ClusterSetup, dict[str, int | float | None]]:
    """Any policy, size, load, hop, noise; from idle to hopeless."""
    rng = random.Random(seed)
    policy = rng.choice(["drop", "drop", "recompute", "swap", "migrate"])
    setup = make_setup(
        policy, num_workers=rng.randint(1, 4), num_blocks=rng.choice([20, 36, 80, 300]), eager=rng.random() < 0.7,
        executor=ModelledExecutor(COST, noise=rng.choice([0.0, 0.0, 0.05]), seed=seed),
        hops=Hops(rng.choice([0.0, 5e-5, 1e-3]), rng.choice([0.0, 5e-5])),
        tick_s=rng.choice([0.1, 0.1, 0.03]),
    )
    load = {
        "num_requests": rng.choice([1, 5, 20, 50]), "span_s": rng.choice([0.0, 0.2, 1.0, 4.0]),
        "mean_prompt": rng.choice([5, 40, 120]), "mean_output": rng.choice([5, 40, 120]),
        "offline_share": 1.0 if seed % 5 == 4 else 0.4 if seed % 3 == 1 else 0.0,
        "num_tenants": (1, 2, 1, 3)[seed % 4],
    }
    return replace(setup, limits=replace(setup.limits, prefill_first=rng.random() < 0.3)), load


def run(setup: ClusterSetup, load: dict[str, int | float | None], seed: int, *, compress: bool) -> Watched:
    rng = random.Random(seed)
    watched = Watched(replace(setup, compress=compress), checks=False)
    watched.load(seed, **load)  # type: ignore[arg-type]
    for name in watched.requests:
        if rng.random() < 0.1:
            watched.cluster.cancel(name, rng.randrange(0, 1_500_000_000))
    if rng.random() < 0.2:
        watched.cluster.inject(draw_faults(seed, range(setup.num_workers), 1.0, 2))
    if rng.random() < 0.3:  # in the middle of things
        watched.cluster.run(until_ns=rng.randrange(0, 1_000_000_000))
        watched.books = [books(watched)]  # type: ignore[attr-defined]
        watched.cluster.core.check()
        if rng.random() < 0.5:
            watched.cluster.request_drop()
    watched.cluster.run(until_ns=900 * 10**9)
    return watched


def books(watched: Watched) -> object:
    """What the core knows, but for ids of steps, which are kept nowhere."""
    cluster = watched.cluster
    state, loads, now_ns = cluster.core.state, cluster.core.loads, cluster.loop.now_ns
    monitored = [  # rates over the last ticks, too
        (loads.pressure(g, now_ns), loads.monitor(g).rates())
        for g in cluster.core.groups.values()
    ]
    return (
        monitored,
        [
            (g.group_id, g.stages, list(g.queues.running), [s.request_id for s in g.queues.waiting], repr(g.counters),
             g.version)
            for g in cluster.core.groups.values()
        ],
        [(r, s.num_computed, s.num_pending, s.num_tokens, s.phase) for r, s in state.requests.items()],
        [
            (w.worker_id, w.ledger.capacity, w.ledger.version,
             [(r, list(w.ledger.table(r).ids)) for r in w.ledger.requests()])
            for w in state.workers.values()
        ],
        repr(state.counters),
        [cluster.core.state.predictor.predict_s(StepWork.decodes(64, 1000), step_of(n)) for n in (1, 2, 3)],
        [(w.num_steps, w.busy_ns) for w in cluster.workers.values()],
        sorted((r, tuple(times)) for r, times in watched.times.items()),
        watched.cluster.log.hexdigest,
    )  # fmt: skip


@pytest.mark.parametrize("first", [
    pytest.param(first, marks=[pytest.mark.slow] if first >= 100 else []) for first in range(0, NUM_SCENARIOS, BATCH)
])  # fmt: skip
def test_fast_forwards_change_nothing(first: int) -> None:
    assert sum(expect_no_change(seed) for seed in range(first, first + BATCH)) > 0


@pytest.mark.parametrize("seed", [134, 272])
def test_a_swap_begins_while_other_groups_have_steps_to_tell_of(seed: int) -> None:
    """The case that these seeds are for is one of online requests alone."""
    assert expect_no_change(seed, offline_share=0.0, num_tenants=1) > 0


def expect_no_change(seed: int, **changes: float) -> int:
    """How many steps were no events."""
    setup, load = scenario(seed)
    load |= changes
    naive, compressed = (run(setup, load, seed, compress=compress) for compress in (False, True))
    assert books(compressed) == books(naive), f"scenario {seed}"
    assert getattr(compressed, "books", None) == getattr(naive, "books", None), f"scenario {seed}"
    assert compressed.ends == naive.ends and compressed.records == naive.records, f"scenario {seed}"
    assert naive.cluster.fast_forwards.num_steps == 0
    return compressed.cluster.fast_forwards.num_steps


def test_a_lone_decode_is_two_events_and_its_ticks() -> None:
    watched = Watched(make_setup("recompute", num_workers=1, num_blocks=200, tick_s=1.0))
    watched.submit("r", 50, 250, 0.0)
    watched.cluster.run()
    watched.expect_all_served()
    assert watched.cluster.loop.num_run < 12
    assert watched.cluster.fast_forwards.num_steps > 240


def test_who_takes_tokens_one_by_one_gets_them_one_by_one() -> None:
    seen: list[int] = []
    setup = make_setup("recompute", num_workers=1, num_blocks=200)
    cluster = SimulatedCluster(setup, on_emit=lambda emit, now_ns: seen.extend(now_ns for _ in emit.tokens))
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    cluster.submit(Request("r", (0,) * 10, params, 0), 0)
    cluster.run()
    assert len(seen) == 100 and seen == sorted(seen)
    assert cluster.fast_forwards.num_steps == 0


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("count", [1, 5, 12, 300])
def test_steps_at_once_take_what_they_take_one_by_one(noise: float, count: int) -> None:
    executor = ModelledExecutor(COST, overhead_s=1e-4, noise=noise, seed=1)
    load, stage = StepLoad(7, 1234, 1241, 7), StageShape(4, True, True)
    singly = [executor.stage_ns(2, 30 + i, load.after(i), stage) for i in range(count)]
    assert executor.decode_ns(2, 30, load, stage, count).tolist() == singly


def test_a_copy_beside_steps_slows_the_steps_that_it_would_slow_one_by_one() -> None:
    """It is issued in the middle of steps that are told of together."""

    def times(*, compress: bool, num_copies: int) -> list[int]:
        setup = make_setup("recompute", num_workers=1, num_blocks=300)
        profile = replace(setup.profile, beside_bytes_per_s=1e6, beside_byte_s=2e-7)
        watched = Watched(replace(setup, profile=profile, compress=compress), checks=False)
        watched.submit("long", 20, 200, 0.0)
        for number in range(num_copies):
            blocks = tuple(range(10))
            copy = ports.SendKV(number, 0, 0, LayerRange(0, 4), blocks, blocks, to_host=True, beside_steps=True)
            at_ns = 100_000_000 + number * 30_000_000
            watched.cluster.loop.at(at_ns, lambda copy=copy: watched.cluster._carry_out([copy]))  # type: ignore[misc]
        watched.cluster.run(until_ns=10**10)
        watched.expect_all_served()
        assert bool(watched.cluster.fast_forwards.num_steps) == compress
        return watched.times["long"]

    for num_copies in (1, 3):
        copied = times(compress=True, num_copies=num_copies)
        assert copied == times(compress=False, num_copies=num_copies)
        assert copied[-1] > times(compress=True, num_copies=0)[-1]

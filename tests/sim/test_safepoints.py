"""Simulated workers give steps up by the rules of live ones: at the next safepoint after the word has come."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from offlinesteps import COMMAND_NS, REPORT_NS, expect_fast_forwards_change_nothing, harvesting
from scenarios import COST, Watched, make_shape

from jettison.core import ports
from jettison.core.totals import counters
from jettison.sim.cluster import SimulatedCluster
from jettison.sim.executor import ModelledExecutor, StageShape, StepLoad
from jettison.sim.faults import draw_faults
from jettison.sim.setup import ClusterSetup, Hops
from jettison.types import Request, SamplingParams, ServiceClass


def lone_step(every: int, num_layers: int, slowness: float, asks_ns: int) -> tuple[ports.Event, int, int]:
    """A step of an offline prompt of 20 tokens whose flag is raised after a time: its end, when that is told, and how
    long the worker has computed by then."""
    ends: list[tuple[ports.Event, int, int]] = []
    shape = make_shape(num_layers)
    executor = ModelledExecutor(replace(COST, num_layers=num_layers), overhead_s=1e-3)
    setup = harvesting(every=every, shape=shape, executor=executor, hops=Hops(COMMAND_NS / 1e9, REPORT_NS / 1e9))
    cluster = SimulatedCluster(setup, on_event=lambda e, now_ns: ends.append((e, now_ns, cluster.workers[0].busy_ns)))
    cluster.workers[0].slowness = slowness
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    cluster.submit(Request("batch", (0,) * 20, params, 0, service_class=ServiceClass.OFFLINE), 0)
    cluster.loop.at(asks_ns, lambda: cluster.workers[0].abandon(1))
    is_end = (ports.StepAbandoned, ports.StepCompleted)
    cluster.run(is_over=lambda: any(isinstance(end[0], is_end) for end in ends))
    return next(end for end in ends if isinstance(end[0], is_end))


@pytest.mark.parametrize("slowness", [1.0, 1.7])
@pytest.mark.parametrize(("every", "num_layers"), [(1, 4), (2, 8), (3, 8), (9, 8)])
def test_a_step_ends_at_its_next_safepoint(every: int, num_layers: int, slowness: float) -> None:
    executor = ModelledExecutor(replace(COST, num_layers=num_layers), overhead_s=1e-3)
    load = StepLoad(20, 210, 20, 1)
    whole_ns = round(executor.stage_ns(0, 0, load, StageShape(num_layers, True, True)) * slowness)
    looks_ns = [0] + [
        round(executor.stage_ns(0, 0, load, StageShape(layer, True, False)) * slowness)
        for layer in range(every, num_layers, every)
    ]
    for share in (0.0, 0.2, 0.5, 0.8, 0.99):
        asks_ns = round(share * whole_ns)
        event, now_ns, busy_ns = lone_step(every, num_layers, slowness, COMMAND_NS + asks_ns)
        later = [look for look in looks_ns if look >= asks_ns]
        expected_ns = later[0] if later else whole_ns
        assert isinstance(event, ports.StepAbandoned) == bool(later), (every, share)
        assert now_ns == COMMAND_NS + expected_ns + REPORT_NS
        assert busy_ns == expected_ns, "what it no longer computes is no work"


def test_a_flag_that_names_another_step_stops_none() -> None:
    ends: list[ports.Event] = []
    cluster = SimulatedCluster(harvesting(every=1), on_event=lambda event, _: ends.append(event))
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    cluster.submit(Request("batch", (0,) * 20, params, 0, service_class=ServiceClass.OFFLINE), 0)
    for at_ns in range(0, 20_000_000, 100_000):
        cluster.loop.at(at_ns, lambda: cluster.workers[0].abandon(99))
    cluster.run()
    assert not any(isinstance(event, ports.StepAbandoned) for event in ends)


def batch_beside_chat(setup: ClusterSetup, seed: int, num_chats: int = 12) -> Watched:
    """Long offline prompts, and short online requests that come now and then."""
    rng = random.Random(seed)
    watched = Watched(setup)
    for i in range(10):
        watched.submit(f"batch-{i}", rng.randint(100, 400), rng.randint(1, 60), 0.0, ServiceClass.OFFLINE)
    for i in range(num_chats):
        watched.submit(f"chat-{i}", rng.randint(5, 30), rng.randint(1, 5), rng.uniform(0.01, 0.8))
    watched.cluster.run()
    watched.expect_all_served()
    return watched


def first_token_s(watched: Watched, name: str) -> float:
    return (watched.times[name][0] - watched.requests[name].arrival_ns) / 1e9


def first_tokens_s(watched: Watched) -> list[float]:
    return sorted(first_token_s(watched, name) for name in watched.requests if name.startswith("chat"))


def test_arrivals_whose_deadline_would_be_missed_wait_less() -> None:
    """Whoever comes in a step beside online requests waits for that, as long as the TPOT objective allows."""
    patient, urgent = (batch_beside_chat(harvesting(ttft_s=ttft_s), 3, 40) for ttft_s in (10.0, 0.004))
    assert counters(patient.cluster.core)["steps_abandoned"] == 0
    totals = counters(urgent.cluster.core)
    assert totals["steps_abandoned"] == urgent.kinds().count("step_abandoned") > 3
    assert totals["tokens_abandoned"] > totals["steps_abandoned"]
    asked = {record.fields["request"] for record in urgent.records if record.kind == "step_abandon_asked"}
    waited, would_have = (sum(first_token_s(run, name) for name in asked) for run in (urgent, patient))
    assert waited < 0.5 * would_have
    assert sum(first_tokens_s(urgent)) < sum(first_tokens_s(patient)), "nor do the others pay for it"


@pytest.mark.parametrize("seed", range(4))
def test_a_pipelines_first_stage_gives_up_and_its_last_one_tells(seed: int) -> None:
    changes = {"num_workers": 2, "ttft_s": 0.001, "every": 1, "shape": make_shape(8)}
    watched = batch_beside_chat(harvesting("pipeline", **changes), seed, 60)
    assert counters(watched.cluster.core)["steps_abandoned"] > 0
    assert "chunk_overtaken" not in watched.kinds()


@pytest.mark.parametrize("seed", range(12))
def test_fast_forwards_change_nothing_beside_steps_that_may_be_given_up(seed: int) -> None:
    rng = random.Random(seed)
    changes = {
        "num_workers": rng.randint(1, 3), "num_blocks": rng.choice([36, 80, 300]), "ttft_s": rng.choice([0.003, 0.02]),
        "hops": Hops(rng.choice([0.0, 5e-5]), rng.choice([0.0, 5e-5])),
        "executor": ModelledExecutor(COST, noise=rng.choice([0.0, 0.05]), seed=seed),
    }
    policy = rng.choice(["drop", "recompute", "swap", "migrate"])
    expect_fast_forwards_change_nothing(harvesting(policy, **changes), seed)


@pytest.mark.parametrize("seed", range(24))
def test_whatever_dies_or_is_late_every_request_has_one_end(seed: int) -> None:
    rng = random.Random(f"safepoints {seed}")
    policy, num_workers = rng.choice(["drop", "drop", "swap", "migrate", "pipeline"]), rng.choice([2, 4])
    setup = harvesting(policy, num_workers=num_workers, num_blocks=36, ttft_s=0.004, every=rng.choice([None, 1]))
    watched = Watched(setup, check_every=5)
    watched.load(seed, num_requests=10 * num_workers, span_s=0.3, mean_output=25, offline_share=0.7)
    watched.cluster.inject(draw_faults(seed, range(num_workers), 0.3, 1 + seed % 4))
    if policy == "drop":
        for order in (watched.cluster.request_drop, watched.cluster.request_restore):
            watched.cluster.loop.at(rng.randrange(300_000_000), order)
    watched.cluster.run()
    watched.expect_one_end_each()

"""Drop, exchange, restore, split, turn round: with pretend KV that every step checks."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster, Faults

from jettison.core.ladder import restore as restore_rung
from jettison.core.ladder.forecasts import TakingApart
from jettison.cost.predictor import USUAL_STAGE_S
from jettison.cost.stepwork import StepWork
from jettison.policy.forecast import Forecast
from jettison.policy.overload import Trigger


def burst(
    cluster: FakeCluster, num: int, *, at_ms: float = 0.0, prompt: int = 12, output: int = 40, tag: str = "r"
) -> None:
    rng = random.Random(num)
    for i in range(num):
        tokens = [rng.randrange(1, 60) for _ in range(prompt + i % 5)]
        cluster.submit(f"{tag}{i}", tokens, output + i % 7, at_ms + i)


def kinds(cluster: FakeCluster) -> list[str]:
    return [r.kind for r in cluster.records]


def test_burst_drops_exchanges_and_restores() -> None:
    cluster = FakeCluster()
    burst(cluster, 30)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert {"drop_decided", "drop", "exchange_done", "restore_begin", "split", "restore_done"} <= set(kinds(cluster))
    assert all(len(g.stages) == 1 for g in cluster.core.groups.values())
    assert all(w.ledger.capacity == w.full_blocks for w in cluster.core.state.workers.values())


def test_recompute_policy_never_drops() -> None:
    cluster = FakeCluster(policy="recompute")
    burst(cluster, 30)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert "drop" not in kinds(cluster)


def test_running_requests_keep_their_kv_through_a_drop() -> None:
    cluster = FakeCluster(full_blocks=60, auto_restore=False, exchange="transfer")
    burst(cluster, 6, prompt=20, output=60)
    cluster.run(until_ms=60)
    cluster.carry_out(cluster.core.request_drop(cluster.now))
    cluster.run()
    cluster.expect_outputs()
    assert cluster.core.state.counters.exchanged_bytes > 0
    assert sum(g.counters.num_preemptions for g in cluster.core.groups.values()) == 0
    cluster.carry_out(cluster.core.request_restore(cluster.now))
    burst(cluster, 3, at_ms=cluster.now / MS, tag="s")
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("drop_again_ms", [0.05, 1.0, 3.0, 8.0, 20.0, 40.0, 60.0, 90.0])
def test_drop_again_during_restore(drop_again_ms: float) -> None:
    cluster = FakeCluster(full_blocks=60, auto_restore=False)
    burst(cluster, 8, prompt=20, output=120)
    cluster.run(until_ms=50)
    cluster.carry_out(cluster.core.request_drop(cluster.now))
    cluster.run(until_ms=150)
    cluster.carry_out(cluster.core.request_restore(cluster.now))
    cluster.run(until_ms=150 + drop_again_ms)
    cluster.carry_out(cluster.core.request_drop(cluster.now))
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("cancel_ms", [50.5, 52, 54, 58, 65])
def test_cancel_in_mid_exchange(cancel_ms: float) -> None:
    cluster = FakeCluster(full_blocks=60, auto_restore=False)
    burst(cluster, 8, prompt=20, output=80)
    for i in range(0, 8, 2):
        cluster.cancel(f"r{i}", cancel_ms)
    cluster.run(until_ms=50)
    cluster.carry_out(cluster.core.request_drop(cluster.now))
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_failed_remap_leaves_everything_as_it_was(who: tuple[int, ...]) -> None:
    cluster = FakeCluster(full_blocks=40, auto_restore=False)
    burst(cluster, 8, prompt=12, output=40)
    cluster.run(until_ms=30)
    for worker_id in who:
        cluster.workers[worker_id].fail_applies = 1
    cluster.carry_out(cluster.core.request_drop(cluster.now))
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert "drop_failed" in kinds(cluster)
    assert all(len(g.stages) == 1 for g in cluster.core.groups.values())


@pytest.mark.parametrize("fail_at", [1, 2])
def test_failed_restore_serves_on(fail_at: int) -> None:
    cluster = FakeCluster(full_blocks=60, auto_restore=False)
    burst(cluster, 6, prompt=20, output=90)
    cluster.run(until_ms=40)
    cluster.carry_out(cluster.core.request_drop(cluster.now))
    cluster.run(until_ms=120)
    cluster.workers[fail_at - 1].fail_applies = 1
    cluster.carry_out(cluster.core.request_restore(cluster.now))
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_shared_prefixes_move_once_and_stay_right() -> None:
    cluster = FakeCluster(full_blocks=80, auto_restore=False)
    prefix = [5, 9, 2, 7] * 4
    for i in range(8):
        cluster.submit(f"p{i}", [*prefix, i + 1, i + 2], 60, at_ms=10.0 * i)
    cluster.run(until_ms=110)
    cluster.carry_out(cluster.core.request_drop(cluster.now))
    cluster.run(until_ms=130)
    cluster.cancel("p0", cluster.now / MS)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_same_events_same_actions() -> None:
    def play() -> tuple[list[tuple[int, str]], dict[str, list[int]]]:
        cluster = FakeCluster(seed=3)
        burst(cluster, 25)
        cluster.run()
        return cluster.log, cluster.outputs

    assert play() == play()


def merge_all(cluster: FakeCluster, num_workers: int) -> None:
    while len(cluster.core.groups) > 1:
        cluster.carry_out(cluster.core.request_drop(cluster.now))
        cluster.run(until_ms=cluster.now / MS + 40)
    (group,) = cluster.core.groups.values()
    assert len(group.stages) == num_workers


@pytest.mark.parametrize("num_workers", [3, 4, 5, 8])
def test_many_members_merge_and_split_again(num_workers: int) -> None:
    cluster = FakeCluster(num_workers=num_workers, num_layers=8, full_blocks=40)
    burst(cluster, 5 * num_workers, prompt=10, output=60)
    cluster.run(until_ms=30)
    merge_all(cluster, num_workers)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert all(len(g.stages) == 1 for g in cluster.core.groups.values())
    assert all(w.ledger.capacity == w.full_blocks for w in cluster.core.state.workers.values())


@pytest.mark.parametrize(("num_workers", "num_layers", "sizes"), [(4, 8, [2, 2]), (5, 10, [2, 3])])
def test_many_members_split_into_two_where_one_could_not_hold_everything(
    num_workers: int, num_layers: int, sizes: list[int]
) -> None:
    cluster = FakeCluster(
        num_workers=num_workers, num_layers=num_layers, full_blocks=60, auto_restore=False, exchange="transfer"
    )
    burst(cluster, 5, prompt=20, output=150)  # about 17 blocks each when the pipeline is split
    cluster.run(until_ms=30)
    merge_all(cluster, num_workers)
    cluster.run(until_ms=cluster.now / MS + 60)
    (pipeline,) = cluster.core.groups.values()
    assert 60 < pipeline.blocks.num_used < 120
    cluster.carry_out(cluster.core.request_restore(cluster.now))
    cluster.run(until_ms=cluster.now / MS + 60)
    split = next(r for r in cluster.records if r.kind == "split")
    homes = split.fields["homes"]
    assert isinstance(homes, dict) and sorted(map(len, homes.values())) == sizes
    assert sum(g.counters.num_preemptions for g in cluster.core.groups.values()) == 0
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert sorted(len(g.stages) for g in cluster.core.groups.values()) == sizes


def test_the_efficiency_of_a_pipeline_is_what_it_shows_once_there_is_one() -> None:
    """A step takes a worker as long with half of the layers here: a pipeline of two is about as fast as one alone."""
    cluster = FakeCluster(full_blocks=400, auto_restore=False)
    burst(cluster, 20, prompt=20, output=30)
    cluster.run()
    predictor, work = cluster.core.state.predictor, StepWork.decodes(8, 300)
    alone_s = predictor.predict_s(work)
    assert alone_s is not None
    expected = alone_s / (alone_s + 2 * USUAL_STAGE_S)
    assert predictor.pipeline_efficiency(work, 2) == pytest.approx(expected), "a hop is all that is expected"
    cluster.carry_out(cluster.core.request_drop(cluster.now))
    for i in range(5):
        burst(cluster, 40, at_ms=cluster.now / MS + 200 * i, prompt=20, output=30, tag=f"merged{i}-")
    cluster.run()
    cluster.expect_outputs()
    assert 0.4 < predictor.pipeline_efficiency(work, 2) < 0.8


def overload(cluster: FakeCluster, num: int, at_ms: float, every_ms: float = 15.0) -> None:
    for i in range(num):
        cluster.submit(f"s{i}", [1 + i % 7] * 8, 30, at_ms + i * every_ms)


def foresees(
    monkeypatch: pytest.MonkeyPatch, cluster: FakeCluster, *, now_request_s: float, emptied_request_s: float,
    min_settled_s: float, block_s: float | None = 0.001,
) -> None:
    """All forecasts for merged groups with requests say from now on what a restore at once, or after emptying them,
    comes to; a later one to 100 request-seconds. Idle groups are better off apart."""
    costs = (100.0, now_request_s, emptied_request_s)
    found, idle = (TakingApart(*(Forecast(c, 0.0, 0.0) for c in each)) for each in (costs, (100.0, 50.0, 100.0)))
    monkeypatch.setattr(restore_rung, "taking_apart", lambda _, group, __: found if group.queues.running else idle)
    monkeypatch.setattr(cluster.core.loads, "recompute_block_s", lambda group: block_s)
    params = cluster.core.params
    cluster.core.reconfigure(replace(
        params, restore=replace(params.restore, min_settled_s=min_settled_s),
        overload=replace(params.overload, trigger=Trigger.FORECAST),
    ))  # fmt: skip


def compute_binds_pipelines(monkeypatch: pytest.MonkeyPatch, cluster: FakeCluster) -> None:
    foresees(monkeypatch, cluster, now_request_s=120.0, emptied_request_s=40.0, min_settled_s=0.3)


def test_a_pipeline_that_compute_binds_yields_and_takes_its_queue_along(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(max_seqs=2, max_tokens=64)
    compute_binds_pipelines(monkeypatch, cluster)
    cluster.order_at("drop", 1)
    overload(cluster, 150, at_ms=5)
    waiting_at_split: list[int] = []
    cluster.run(stop=lambda: "split" in kinds(cluster))
    waiting_at_split.append(cluster.core.num_waiting)
    assert "yield" in kinds(cluster) and waiting_at_split[0] > 0
    told = next(r.fields for r in cluster.records if r.kind == "yield")
    assert (told["stay_request_s"], told["taken_request_s"]) == (100.0, 40.0) and told["cap_blocks"]
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert all(g.blocks.admission_cap is None for g in cluster.core.groups.values())


def test_a_merged_group_runs_as_many_requests_as_its_members_did() -> None:
    cluster = FakeCluster(full_blocks=200, max_seqs=4, max_tokens=64, auto_restore=False, policy="recompute")
    cluster.order_at("drop", 1)
    burst(cluster, 60, at_ms=2, prompt=4, output=40)
    most_running = 0

    def look() -> bool:
        nonlocal most_running
        most_running = max(most_running, *(len(g.queues.running) for g in cluster.core.groups.values()))
        return False

    cluster.run(stop=look)
    cluster.expect_outputs()
    assert [len(g.stages) for g in cluster.core.groups.values()] == [2] and most_running == 8


def test_a_request_that_needs_all_members_ends_a_yield(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(max_seqs=2, max_tokens=64)
    compute_binds_pipelines(monkeypatch, cluster)
    cluster.order_at("drop", 1)
    overload(cluster, 150, at_ms=5)
    cluster.run(stop=lambda: "yield" in kinds(cluster))
    cluster.submit("big", [3] * 160, 8, cluster.now / MS + 1)
    cluster.submit("after", [3] * 4, 2, cluster.now / MS + 50)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def bound_with_one_that_needs_two(monkeypatch: pytest.MonkeyPatch, num_workers: int) -> FakeCluster:
    """All workers as one group that compute binds, and at its door "long", which will outgrow an instance."""
    cluster = FakeCluster(num_workers=num_workers, num_layers=2 * num_workers, max_seqs=2, max_tokens=64)
    for number in range(1, num_workers):
        cluster.order_at("drop", 60 * number)
    cluster.run(stop=lambda: len(cluster.core.groups) == 1 and not cluster.core.moves.merges)
    compute_binds_pipelines(monkeypatch, cluster)
    one = cluster.workers[0].full_blocks * 4
    cluster.submit("long", [3] * (one - 40), 100, cluster.now / MS, ignore_eos=True)
    overload(cluster, 150, at_ms=cluster.now / MS + 1)
    return cluster


def test_four_that_compute_binds_become_two_pairs_where_a_request_needs_two(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = bound_with_one_that_needs_two(monkeypatch, 4)
    cluster.run(stop=lambda: "split" in kinds(cluster))
    assert "yield" in kinds(cluster)
    (split, *_) = [r.fields["homes"] for r in cluster.records if r.kind == "split"]
    assert sorted(map(len, split.values())) == [2, 2]  # type: ignore[attr-defined]
    cluster.run()
    cluster.expect_outputs()


def test_three_are_not_emptied_where_a_request_needs_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast weighs three instances; a pair and one that is left over would be another thing."""
    cluster = bound_with_one_that_needs_two(monkeypatch, 3)
    cluster.run(stop=lambda: len(cluster.outputs.get("long", ())) > 90)
    assert len(cluster.outputs["long"]) > 90 and "yield" not in kinds(cluster)
    cluster.run()
    cluster.expect_outputs()


def test_a_restore_that_a_compute_bound_flood_overtakes_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(max_seqs=2, max_tokens=64)
    cluster.order_at("drop", 1)
    for name in ("long", "long2"):
        cluster.submit(name, [2] * 4, 160, 3)
    cluster.run(stop=lambda: "restore_begin" in kinds(cluster))
    compute_binds_pipelines(monkeypatch, cluster)
    overload(cluster, 250, at_ms=cluster.now / MS, every_ms=8.0)
    began = cluster.now
    cluster.run(stop=lambda: "split" in kinds(cluster))
    assert "split" in kinds(cluster) and cluster.now - began < 3_000 * MS
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_drops_that_fail_are_tried_ever_more_rarely() -> None:
    cluster = FakeCluster(faults=Faults(apply=1.0), eager=True)
    burst(cluster, 100, output=60)
    cluster.run(until_ms=4_000)
    failed = [r.time_ns for r in cluster.records if r.kind == "drop_failed"]
    gaps = [b - a for a, b in itertools.pairwise(failed)]
    assert len(failed) >= 4 and gaps[-1] > 4 * gaps[0]


@pytest.mark.parametrize(("saved_request_s", "block_s", "is_early"), [
    (50.0, 0.001, True), (10.0, 0.003, True), (-1.0, 0.001, False), (0.01, 0.001, False), (10.0, None, False),
])
def test_members_that_are_faster_apart_split_early_and_compute_again_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, saved_request_s: float, block_s: float | None, is_early: bool
) -> None:
    cluster = FakeCluster(full_blocks=60)
    foresees(
        monkeypatch, cluster, now_request_s=100.0 - saved_request_s, emptied_request_s=100.0, min_settled_s=0.02,
        block_s=block_s,
    )
    cluster.order_at("drop", 1)
    for i in range(6):  # from the first token on 66 of the 120 blocks of both, of which one can hold 57
        cluster.submit(f"r{i}", [5 + i] * 40, 60 + 20 * i, 2 + i, ignore_eos=True)
    cluster.run(stop=lambda: "split" in kinds(cluster) or bool(cluster.ends))
    assert ("split" in kinds(cluster)) == is_early
    if is_early:
        split = next(r for r in cluster.records if r.kind == "split")
        assert 0 < split.fields["recomputed"] < 6  # type: ignore[operator]
        decided = next(r.fields for r in cluster.records if r.kind == "restore_decided")
        assert (decided["stay_request_s"], decided["taken_request_s"]) == (100.0, 100.0 - saved_request_s)
        assert cluster.core.num_waiting == split.fields["recomputed"]
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def ends_by_itself(cluster: FakeCluster, name: str, prompt: list[int], at_ms: float, *, asked: bool) -> None:
    """A request that may become as long as all memory allows, and stops long before."""
    most = cluster.core.max_request_blocks() * BLOCK_SIZE - len(prompt)
    cluster.submit(name, prompt, most, at_ms, has_default_length=not asked, stop_token_ids=(5, 6, 7, 8))


@pytest.mark.parametrize("asked", [False, True])
def test_a_bound_on_its_length_does_not_turn_a_restore_round(asked: bool) -> None:
    cluster = FakeCluster(max_seqs=2)
    rng = random.Random(1)
    prompts = [[rng.randrange(1, 60) for _ in range(8)] for _ in range(13)]
    ends_by_itself(cluster, "first", prompts[0], 0.0, asked=asked)
    cluster.order_at("drop", 20)
    for i in range(6):
        ends_by_itself(cluster, f"a{i}", prompts[1 + i], 960 + i, asked=asked)
    cluster.order_at("restore", 990)
    for i in range(6):
        ends_by_itself(cluster, f"b{i}", prompts[7 + i], 990.5, asked=asked)
    cluster.run(until_ms=2_500)
    turned = [r.fields["reason"] for r in cluster.records if r.kind == "restore_turned"]
    assert turned == [], "a bound is no forecast, whether it was asked for or not"
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_length_that_nobody_asked_for_may_become_what_only_all_members_hold() -> None:
    cluster = FakeCluster(full_blocks=20, eager=True)
    most = cluster.core.max_request_blocks() * BLOCK_SIZE
    cluster.submit("long", [3] * 10, most - 10, 0.0, has_default_length=True, ignore_eos=True)
    for i in range(20):
        cluster.submit(f"short{i}", [4 + i] * 6, 12, 60.0 + 30 * i, has_default_length=True)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert "drop" in kinds(cluster) and len(cluster.outputs["long"]) == most - 10

"""One running request's KV on its way to another group: between strangers of any shape, and home to workers that both
groups use; with pretend KV that every step checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes import MS, FakeCluster, Faults, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.core.moving.passage import RelocationPhase
from jettison.core.moving.relocate import MAX_FINAL_BLOCKS, Relocation
from jettison.core.moving.restoring import Restoring
from jettison.core.pending import TransferPurpose
from jettison.core.requests import Phase
from jettison.core.serving.group import Group


def strangers(*, to_pipeline: bool, prompt: int = 90, seed: int = 0) -> tuple[FakeCluster, Relocation]:
    """A request goes from an instance to a pipeline of two that shares no worker with it, or back."""
    cluster = FakeCluster(
        policy="recompute", num_workers=3, full_blocks=120, max_tokens=64, shard_bytes=256, seed=seed
    )
    cluster.order("drop")
    cluster.run(until_ms=20)
    for i in range(6):
        cluster.submit(f"r{i}", tokens(i, prompt), 80, 21 + i)
    cluster.run(until_ms=60)
    alone = next(g for g in cluster.core.groups.values() if len(g.stages) == 1)
    pipeline = next(g for g in cluster.core.groups.values() if len(g.stages) == 2)
    source, destination = (alone, pipeline) if to_pipeline else (pipeline, alone)
    state = next(s for s in source.queues.running.values() if s.num_output)
    cluster.carry_out(cluster.core.migrations.start(state, source, destination, cluster.now))
    (relocation,) = cluster.core.migrations.under_way
    return cluster, relocation


def going_home(*, num_workers: int = 2, prompt: int = 100, seed: int = 0) -> tuple[FakeCluster, Restoring]:
    """A pipeline has split, and its requests are on their way to groups on the same workers."""
    cluster = FakeCluster(
        policy="recompute", num_workers=num_workers, full_blocks=300, max_tokens=64, num_layers=6, seed=seed
    )
    for _ in range(num_workers - 1):
        cluster.order("drop")
        cluster.run(until_ms=cluster.now / MS + 30)
    assert [len(g.stages) for g in cluster.core.groups.values()] == [num_workers]
    for i in range(4):
        cluster.submit(f"r{i}", tokens(i, prompt), 100, cluster.now / MS + i, ignore_eos=True)
    cluster.run(until_ms=cluster.now / MS + 120)
    cluster.carry_out(cluster.core.request_restore(cluster.now))
    (restore,) = cluster.core.restores
    cluster.run(stop=lambda: restore.returning is not None and bool(restore.returning.on_their_way))
    assert restore.returning is not None
    return cluster, restore


def first_on_its_way(restore: Restoring) -> Relocation:
    assert restore.returning is not None
    return next(iter(restore.returning.on_their_way.values()))


def expect_all_well(cluster: FakeCluster) -> None:
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def holders(cluster: FakeCluster, request_id: str) -> set[int]:
    return {w.worker_id for w in cluster.core.state.workers.values() if w.ledger.has(request_id)}


def expect_one_owner(cluster: FakeCluster, relocation: Relocation) -> None:
    """The source has the request until it is over, then the destination, alone."""
    state = relocation.state
    if state.is_finished:
        return
    owner: Group = relocation.destination if relocation.phase is RelocationPhase.DONE else relocation.source
    assert state.group_id == owner.group_id and state.request_id in owner.queues.running
    if relocation.is_over:
        assert holders(cluster, state.request_id) == set(owner.worker_ids)
    else:
        assert holders(cluster, state.request_id) >= set(owner.worker_ids)


@pytest.mark.parametrize("to_pipeline", [True, False])
def test_between_strangers_of_different_shape(to_pipeline: bool) -> None:
    cluster, relocation = strangers(to_pipeline=to_pipeline)
    assert relocation.phase is RelocationPhase.COPY and not relocation.state.paused
    seen: set[RelocationPhase] = set()

    def watch() -> bool:
        seen.add(relocation.phase)
        expect_one_owner(cluster, relocation)
        return relocation.is_over

    cluster.run(stop=watch)
    assert {RelocationPhase.FINAL, RelocationPhase.DONE} <= seen and relocation.num_rounds >= 2
    assert {m.dst for m in cluster.sent} == set(relocation.destination.worker_ids)
    assert {m.src for m in cluster.sent} == set(relocation.source.worker_ids)
    assert len(cluster.sent[-1].src_blocks) <= MAX_FINAL_BLOCKS
    expect_all_well(cluster)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_home_to_workers_that_both_groups_use(num_workers: int) -> None:
    cluster, restore = going_home(num_workers=num_workers)
    relocation = first_on_its_way(restore)
    state, home = relocation.state, relocation.destination
    assert set(home.worker_ids) < set(relocation.source.worker_ids)
    (worker,) = home.worker_ids
    before = cluster.core.state.workers[worker].ledger.table(state.request_id).ids[:8]
    sent: list[tuple[int, int, int]] = []

    def watch() -> bool:
        for pending in cluster.core.state.book.transfers.values():
            if pending.request is state and pending.purpose is TransferPurpose.RETURN:
                assert pending.ends[1] == worker != pending.ends[0]
                sent.append((pending.ends[0], *pending.transfer.layers))  # type: ignore[union-attr]
        expect_one_owner(cluster, relocation)
        return relocation.is_over

    cluster.run(stop=watch)
    assert relocation.phase is RelocationPhase.DONE and relocation.num_rounds >= 2
    stages = {s.worker_id: s.layers for s in relocation.source.stages}
    assert set(sent) == {(w, *layers) for w, layers in stages.items() if w != worker}, "only layers that it lacked"
    assert cluster.core.state.workers[worker].ledger.table(state.request_id).ids[:8] == before, "in its own blocks"
    expect_all_well(cluster)


@pytest.mark.parametrize("phase", [RelocationPhase.COPY, RelocationPhase.FINAL])
@pytest.mark.parametrize("make", [
    lambda: strangers(to_pipeline=True), lambda: strangers(to_pipeline=False),
], ids=["to_pipeline", "to_instance"])
def test_cancelled_it_has_never_left_its_source(
    phase: RelocationPhase, make: Callable[[], tuple[FakeCluster, Relocation]]
) -> None:
    cluster, relocation = make()
    cluster.run(stop=lambda: relocation.phase is phase and bool(relocation.state.transfers))
    cluster.carry_out(relocation.cancel())
    assert relocation.phase is RelocationPhase.FALLING_BACK and not relocation.state.paused, "it runs on at once"
    assert relocation.cancel() == []
    cluster.run(stop=lambda: relocation.is_over)
    assert relocation.phase is RelocationPhase.FAILED and not relocation.lost_transfer
    expect_one_owner(cluster, relocation)
    assert relocation.state.num_preemptions == 0
    expect_all_well(cluster)


def test_a_lost_transfer_calls_the_others_of_its_round_off() -> None:
    cluster, relocation = strangers(to_pipeline=True)
    round_1 = set(relocation.state.transfers)
    assert len(round_1) > 1
    cluster.fails_move = lambda move: move.transfer_id in round_1
    cluster.run(stop=lambda: relocation.is_over)
    assert relocation.lost_transfer and relocation.phase is RelocationPhase.FAILED
    assert relocation.state.phase is Phase.RUNNING
    assert len(round_1 & cluster.cancelled_transfers) == len(round_1) - 1, "all but the first that ended"
    expect_all_well(cluster)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 10**6), st.sampled_from(["to_pipeline", "to_instance", "home", "home_of_three"]),
    st.floats(0.0, 1.0), st.floats(0.0, 80.0), st.integers(20, 110),
)
def test_lost_transfers_and_cancels_at_any_time(
    seed: int, shape: str, loss: float, after_ms: float, prompt: int
) -> None:
    if shape.startswith("home"):
        cluster, _ = going_home(num_workers=3 if shape.endswith("three") else 2, prompt=prompt, seed=seed)
    else:
        cluster, _ = strangers(to_pipeline=shape == "to_pipeline", prompt=prompt, seed=seed)
    cluster.faults = Faults(move=loss, budget=4)
    cluster.cancel("r0", cluster.now / MS + after_ms)
    expect_all_well(cluster)

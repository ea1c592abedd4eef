"""How moves go: by what links and destinations take, together, and by what is under way already."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fakes import FakeCluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_migrating_tokens import N_EXAMPLES, expect_all_well, tokens

from jettison.core.ladder.movekinds import Going, Wanted, choose_kinds, decodes_of
from jettison.core.moving.passage import RelocationPhase
from jettison.core.ports import SendKV
from jettison.cost.hardware import HardwareProfile, PrefillPoint
from jettison.cost.model import CostModel
from jettison.cost.stepwork import NOTHING
from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.movekinds import MAX_FINAL_BLOCKS, MoveParams

KV, TOKENS = MigrationKind.KV, MigrationKind.TOKENS
COST = CostModel(4, 1e-9, 1e-9, 1e-6, 1e-4, 1e-4, 1e-5, 1e-7, 1e-5, 1e-6)
POINTS = tuple(PrefillPoint(16, n, 1e-3 + 1e-4 * n) for n in (0, 5, 40))
"""Five tokens beside any batch make a step half as long again."""


def profile(link_bytes_per_s: float, points: tuple[PrefillPoint, ...] = POINTS) -> HardwareProfile:
    return HardwareProfile(COST, link_bytes_per_s, 1e-4, 1e-3, 1e-11, 5e9, 1e9, prefill_points=points)


def serving(link_bytes_per_s: float, *, num: int = 8, prompt: int = 60, **flags: object) -> FakeCluster:
    """So many requests decode at each of two instances."""
    cluster = FakeCluster(
        policy="recompute", full_blocks=300, max_tokens=128, profile=profile(link_bytes_per_s), **flags  # type: ignore[arg-type]
    )
    for i in range(2 * num):
        cluster.submit(f"r{i}", tokens(i, prompt), 100, 0.5 * i, ignore_eos=True)
    cluster.run(until_ms=60)
    return cluster


def wanted(cluster: FakeCluster, num: int = 8) -> list[Wanted]:
    source, destination = cluster.core.groups[0], cluster.core.groups[1]
    return [Wanted(state, destination) for state in [*source.queues.running.values()][:num]]


def kv_bytes(cluster: FakeCluster, found: Wanted) -> int:
    state, core = found.state, cluster.core.state
    blocks = core.limits.block_size
    return -(-state.num_tokens // blocks) * core.shape.num_layers * core.shape.block_bytes_per_layer(blocks)


def order(cluster: FakeCluster, destinations: dict[str, int]) -> None:
    cluster.carry_out(cluster.core.request_migrations(destinations, cluster.now))


def test_a_fast_link_takes_kv_and_a_slow_one_leaves_tokens() -> None:
    fast = choose_kinds((cluster := serving(1e9)).core.state, wanted(cluster, 1))
    assert [going.kind for going in fast.values()] == [KV]
    slow = choose_kinds((cluster := serving(1.0)).core.state, wanted(cluster, 1))
    assert list(slow.values()) == [Going(TOKENS, 5)], "five a step, as measured, and a block is too much for the link"


def test_destinations_are_known_by_the_predictor_where_nothing_was_measured() -> None:
    cluster = serving(1.0)
    cluster.core.state.params = replace(cluster.core.state.params, profile=profile(1.0, ()))
    (going,) = choose_kinds(cluster.core.state, wanted(cluster, 1)).values()
    work, predictor = decodes_of(cluster.core.groups[1]), cluster.core.state.predictor
    assert going.max_step_tokens is not None
    assert predictor.predict_s(work.with_prompt(going.max_step_tokens)) <= 1.5 * predictor.predict_s(work)


def test_all_moves_of_an_epoch_share_links_and_what_is_under_way_counts() -> None:
    cluster = serving(1e9)
    one = kv_bytes(cluster, wanted(cluster)[0])
    moves = MoveParams(epoch_s=0.01)  # in which a request grows by a few tokens
    link = profile(6 * one / moves.epoch_s)
    cluster.core.state.params = replace(cluster.core.state.params, profile=link, moves=moves)
    chosen = choose_kinds(cluster.core.state, wanted(cluster))
    num_kv = [going.kind for going in chosen.values()].count(KV)
    assert 2 <= num_kv <= 6
    first, *others = wanted(cluster)
    order(cluster, {first.state.request_id: 1})
    assert cluster.core.migrations.under_way[0].kind is KV
    left = choose_kinds(cluster.core.state, others)
    assert [going.kind for going in left.values()].count(KV) == num_kv - 1, "one is on the link already"
    cluster.run()
    expect_all_well(cluster)


def test_a_group_that_decodes_nothing_has_room_for_all() -> None:
    cluster = serving(1.0)
    for request_id in [*cluster.core.groups[1].queues.running]:
        cluster.cancel(request_id, 60)
    cluster.run(until_ms=61)
    assert decodes_of(cluster.core.groups[1]) == NOTHING
    (going,) = choose_kinds(cluster.core.state, wanted(cluster, 1)).values()
    assert going == Going(TOKENS, 128)


@pytest.mark.parametrize(("blocks_in_stop", "most"), [(2.5, 2), (1e3, MAX_FINAL_BLOCKS)])
def test_the_last_round_is_as_short_as_the_link_is_slow(blocks_in_stop: float, most: int) -> None:
    cluster = serving(1e9)
    found = wanted(cluster)[0]
    num_blocks = -(-found.state.num_tokens // cluster.core.state.limits.block_size)
    block = kv_bytes(cluster, found) / num_blocks
    moves = MoveParams(stop_s=1e-3)  # about a step here
    link = profile(blocks_in_stop * block / moves.stop_s)
    cluster.core.state.params = replace(cluster.core.state.params, profile=link, moves=moves)
    (going,) = choose_kinds(cluster.core.state, [found]).values()
    assert going == Going(KV, going.max_step_tokens, most)
    order(cluster, {found.state.request_id: 1})
    (migration,) = cluster.core.migrations.under_way
    book = cluster.core.state.book
    cluster.run(stop=lambda: migration.phase is RelocationPhase.FINAL and bool(book.transfers_of(migration)))
    sent = [pending.transfer for pending in book.transfers_of(migration)]
    assert sent and all(isinstance(t, SendKV) and len(t.src_blocks) <= most for t in sent)
    cluster.run()
    expect_all_well(cluster)


def test_who_stands_still_waits_for_no_round_of_others() -> None:
    cluster = serving(1e9, prompt=100)
    order(cluster, {found.state.request_id: 1 for found in wanted(cluster)})
    book = cluster.core.state.book
    seen: list[bool] = []

    def look() -> bool:
        for migration in cluster.core.migrations.under_way:
            if migration.phase is RelocationPhase.FINAL:
                mine = book.transfers_of(migration)
                others = [p for p in book.transfers.values() if p not in mine]
                if mine and others and min(p.transfer.transfer_id for p in mine) > min(
                    p.transfer.transfer_id for p in others
                ):
                    seen.extend(p.transfer.urgent for p in mine if isinstance(p.transfer, SendKV))
        return False

    cluster.run(stop=look)
    assert seen and all(seen)
    assert cluster.core.state.counters.num_migrations > 0
    expect_all_well(cluster)


def test_the_rung_asks_how_each_goes() -> None:
    for rate, as_tokens in ((1e9, False), (1.0, True)):
        cluster = FakeCluster(
            policy="migrate", full_blocks=60, max_seqs=32, migrate_threshold=6.0, migration_kind="adaptive",
            profile=profile(rate),
        )
        for i in range(16):
            cluster.submit(f"r{i}", tokens(i, 14), 90, 2.0 * i)
        cluster.run(until_ms=60)
        for request_id in [*cluster.core.groups[1].queues.running]:
            cluster.cancel(request_id, 60)
        cluster.run()
        counters = cluster.core.state.counters
        assert counters.num_migrations > 0
        assert counters.num_token_migrations == (counters.num_migrations if as_tokens else 0)
        expect_all_well(cluster)


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6), rate=st.sampled_from([1.0, 1e5, 1e6, 1e9]),
    times_ms=st.lists(st.floats(60, 200), max_size=4), policy=st.sampled_from(["migrate", "migrate+drop"]),
    victim=st.none() | st.tuples(st.integers(0, 1), st.floats(60.0, 200.0)),
)
def test_anything_beside_many_moves(
    seed: int, rate: float, times_ms: list[float], victim: tuple[int, float] | None, policy: str
) -> None:
    cluster = FakeCluster(
        policy=policy, full_blocks=80, max_seqs=16, max_tokens=64, migrate_threshold=8.0, migration_kind="adaptive",
        profile=profile(rate), seed=seed, eager=True, shard_bytes=1024,
    )
    rng = random.Random(seed)
    for i in range(16):
        cluster.submit(f"r{i}", tokens(i % 5, rng.randint(1, 60)), rng.randint(2, 80), rng.uniform(0, 60))

    def send_some() -> None:
        groups = [*cluster.core.groups]
        ids = sorted(cluster.core.state.requests)
        order(cluster, {request_id: rng.choice(groups) for request_id in ids if rng.random() < 0.5})

    for at_ms in times_ms:
        cluster.at(int(at_ms * 1e6), send_some)
    if victim is not None:
        cluster.kill_at(*victim)
        cluster.restart_at(victim[0], victim[1] + 120)
    expect_all_well(cluster)

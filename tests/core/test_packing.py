"""The rung that packs online requests onto few groups; with pretend KV that every step checks."""

from __future__ import annotations

import random

import pytest
from fakes import MS, FakeCluster

from jettison.core.ladder.pack import PackRung
from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.packing.params import PackParams


def tokens(seed: int, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 60) for _ in range(num)]


def packed(packer: str = "mell", *, workers: int = 3, full_blocks: int = 160, **more: object) -> FakeCluster:
    packing = PackParams(packer=packer, epoch_s=0.05, head_room=0.05, **more)  # type: ignore[arg-type]
    return FakeCluster(
        policy="recompute", num_workers=workers, full_blocks=full_blocks, max_tokens=64, prefix_caching=False,
        packing=packing,
    )


def rung_of(cluster: FakeCluster) -> PackRung:
    rung = cluster.core.ladder.rung("pack")
    assert isinstance(rung, PackRung)
    return rung


def homes(cluster: FakeCluster) -> set[int]:
    return {g.group_id for g in cluster.core.groups.values() if g.queues.all_requests()}


def expect_all_well(cluster: FakeCluster) -> None:
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_newcomers_share_an_instance_while_it_holds_them() -> None:
    cluster = packed(full_blocks=400)
    for i in range(6):
        cluster.submit(f"r{i}", tokens(i, 20), 60, 20.0 * i)
    cluster.run(until_ms=150)
    assert len(homes(cluster)) == 1
    assert len(rung_of(cluster).closed) == 2
    expect_all_well(cluster)


def spread_out(packer: str = "mell", **more: object) -> FakeCluster:
    """Requests fill three instances; most of them leave, and those that stay are on three instances."""
    cluster = packed(packer, **more)
    for i in range(18):
        cluster.submit(f"r{i}", tokens(i, 50), 200, 0.5 * i)
    cluster.run(until_ms=100)
    kept: set[int] = set()
    for request_id, state in list(cluster.core.state.requests.items()):
        if state.group_id in kept:
            cluster.cancel(request_id, cluster.now / MS)
        kept.add(state.group_id)
    assert len(kept) == 3
    return cluster


@pytest.mark.parametrize("kinds", [frozenset({MigrationKind.KV}), frozenset({MigrationKind.TOKENS}),
                                   frozenset(MigrationKind)])
def test_requests_spread_over_three_end_up_on_fewer(kinds: frozenset[MigrationKind]) -> None:
    cluster = spread_out(kinds=kinds)
    counters = cluster.core.state.counters
    before = counters.packing_migrations
    cluster.run(until_ms=cluster.now / MS + 200)
    assert cluster.core.state.requests, "they are not just over"
    assert counters.packing_migrations > before
    assert bool(counters.num_token_migrations) <= (MigrationKind.TOKENS in kinds)
    assert len(homes(cluster)) < 3
    expect_all_well(cluster)


@pytest.mark.parametrize("packer", ["printed", "best-fit", "worst-fit", "load-balance"])
def test_the_others_pack_by_the_same_interface(packer: str) -> None:
    cluster = spread_out(packer)
    cluster.run(until_ms=cluster.now / MS + 300)
    migrated = cluster.core.state.counters.packing_migrations
    assert not migrated if packer.endswith("-fit") else True
    expect_all_well(cluster)

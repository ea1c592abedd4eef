"""The rung that packs online requests onto few groups; with pretend KV that every step checks."""

from __future__ import annotations

import random

import pytest
from fakes import MS, FakeCluster

from jettison.core.ladder.lists import parse_overload, with_packing
from jettison.core.ladder.pack import PackRung, StopOffer
from jettison.core.ladder.rung import Moment
from jettison.core.ports import Record
from jettison.errors import ConfigError
from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.moveprices import PriceParams
from jettison.policy.packing.params import PackParams
from jettison.types import ServiceClass


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


def test_beside_a_rung_that_spreads_requests_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="--overload migrate spreads"):
        with_packing(parse_overload("migrate+drop").rungs)


def test_under_pressure_nothing_moves_and_newcomers_go_where_they_would_without_it() -> None:
    cluster = spread_out()
    cluster.core.loads.kept_out.add(0)
    rung, state = rung_of(cluster), next(iter(cluster.core.state.requests.values()))
    assert rung.pressure() and rung.place(state) is None
    offers = [o for o in rung.look(Moment.BEFORE_STEPS, cluster.now + 10**9) if not isinstance(o, Record)]
    assert not offers


def test_a_move_into_a_group_that_lacks_memory_is_called_off() -> None:
    cluster = spread_out(kinds=frozenset({MigrationKind.KV}))
    migrations = cluster.core.migrations
    cluster.run(stop=lambda: not migrations.is_idle)
    assert not migrations.is_idle, "the next epoch begins some"
    cluster.core.loads.kept_out |= {m.destination.group_id for m in migrations.under_way}
    under_way = list(migrations.under_way)
    stops = [o for o in rung_of(cluster).look(Moment.BEFORE_STEPS, cluster.now) if isinstance(o, StopOffer)]
    named = {r for stop in stops for r in stop.request_ids}
    assert named == {m.state.request_id for m in under_way if m.stopped_ns is None}
    expect_all_well(cluster)


def test_offline_requests_are_not_packed() -> None:
    cluster = packed()
    cluster.submit("batch", tokens(1, 20), 100, service_class=ServiceClass.OFFLINE)
    cluster.run(until_ms=120)
    rung = rung_of(cluster)
    assert rung.gauges["devices_used"] == rung.gauges["devices_needed"] == 0
    assert rung.closed == frozenset(cluster.core.groups)
    expect_all_well(cluster)


def test_a_dear_move_is_refused_and_told() -> None:
    cluster = spread_out(some_end=True, prices=PriceParams(harm=1e9, link_device_s=1e9))
    counters = cluster.core.state.counters
    cluster.run(until_ms=cluster.now / MS + 20)
    before = counters.packing_migrations  # who is about to run out of memory gives requests away at any price
    cluster.run(until_ms=cluster.now / MS + 100)
    assert counters.packing_refused and counters.packing_migrations == before
    refused = [r.fields["refused"] for r in cluster.records if r.kind == "packed" and "refused" in r.fields]
    assert refused and all(row["cost_device_s"] > row["saved_device_s"] for row in refused[0])  # type: ignore[index]
    expect_all_well(cluster)


def spread_out(packer: str = "mell", *, some_end: bool = False, **more: object) -> FakeCluster:
    """Requests fill three instances; most of them leave, and those that stay are on three instances."""
    cluster = packed(packer, **more)
    if some_end:  # what has ended tells how long the others stay
        cluster.submit("short", tokens(99, 8), 2)
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

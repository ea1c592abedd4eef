"""How moves go: by what links and destinations take, together, and by what is under way already."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fakes import FakeCluster, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_migrating_tokens import N_EXAMPLES, expect_all_well

from jettison.core.advice import Going, WantedMove
from jettison.core.ladder.movekinds import choose_kinds, decodes_of
from jettison.core.moving.astokens import TokenRelocation
from jettison.core.moving.migrations import may_go
from jettison.core.moving.passage import RelocationPhase
from jettison.core.pending import TransferPurpose
from jettison.core.ports import SendKV
from jettison.cost.hardware import HardwareProfile, PrefillPoint
from jettison.cost.model import CostModel
from jettison.cost.stepwork import NOTHING
from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.movekinds import MAX_FINAL_BLOCKS, Fit, MoveParams

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


def wanted(cluster: FakeCluster, num: int = 8) -> list[WantedMove]:
    source, destination = cluster.core.groups[0], cluster.core.groups[1]
    return [WantedMove(state, destination) for state in [*source.queues.running.values()][:num]]


def kv_bytes(cluster: FakeCluster, found: WantedMove) -> int:
    state, core = found.state, cluster.core.state
    blocks = core.limits.block_size
    return -(-state.num_tokens // blocks) * core.shape.num_layers * core.shape.block_bytes_per_layer(blocks)


def order(cluster: FakeCluster, destinations: dict[str, int]) -> None:
    cluster.carry_out(cluster.core.request_migrations(destinations, cluster.now))


def test_a_fast_link_takes_kv_and_a_slow_one_leaves_tokens() -> None:
    fast = choose_kinds((cluster := serving(1e9)).core.state, wanted(cluster, 1))
    assert [going.kind for going in fast.values()] == [KV]
    slow = choose_kinds((cluster := serving(1.0)).core.state, wanted(cluster, 1))
    five = Going(TOKENS, 5, may_change=(KV, TOKENS))
    assert list(slow.values()) == [five], "as measured, and a block is too much for the link"


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
    assert 2 <= num_kv <= 7, "six, and one that reaches into the next epoch"
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
    assert going == Going(TOKENS, 128, may_change=(KV, TOKENS))


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
    assert going == Going(KV, going.max_step_tokens, most, (KV, TOKENS))
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


def test_later_rounds_wait_for_no_first_round_of_others() -> None:
    """Else a request would grow meanwhile by more than its round had left."""
    cluster = serving(1e9, prompt=100)
    core = cluster.core
    seen: set[bool] = set()

    def look() -> bool:
        for migration in core.migrations.under_way:
            mine = core.state.book.transfers_of(migration)
            before = [p for p in core.state.book.transfers.values() if p not in mine]
            if mine and any(p.transfer.transfer_id < mine[0].transfer.transfer_id for p in before):
                is_first = migration.num_rounds == 1
                seen.add(is_first)
                assert all(isinstance(p.transfer, SendKV) and p.transfer.urgent is not is_first for p in mine)
        return False

    for found in wanted(cluster, 6):
        source = core.groups[found.state.group_id]
        actions = core.migrations.start(found.state, source, found.destination, cluster.now, going=Going(KV, None, 1))
        cluster.carry_out(actions)
    cluster.run(stop=look)
    assert seen == {True, False} and core.state.counters.num_migrations > 0
    expect_all_well(cluster)


def start_as_tokens(
    cluster: FakeCluster, found: WantedMove, may_change: tuple[MigrationKind, ...] = (KV, TOKENS)
) -> TokenRelocation | None:
    """None: there is no room for it."""
    core = cluster.core
    source = core.groups[found.state.group_id]
    actions = core.migrations.start(
        found.state, source, found.destination, cluster.now,
        going=Going(TOKENS, 4, may_change=may_change),
    )
    cluster.carry_out(actions + core.stepping.plan(cluster.now) + core.migrations.after_steps(cluster.now))
    return next(
        (m for m in core.migrations.under_way if m.state is found.state and isinstance(m, TokenRelocation)), None
    )


def begin_as_tokens(cluster: FakeCluster, found: WantedMove, may_change: tuple[MigrationKind, ...]) -> TokenRelocation:
    migration = start_as_tokens(cluster, found, may_change)
    assert migration is not None
    return migration


@pytest.mark.parametrize("may_change", [(), (TOKENS,), (KV, TOKENS)])
def test_the_rest_of_a_move_as_tokens_goes_as_kv_where_that_is_sooner(may_change: tuple[MigrationKind, ...]) -> None:
    cluster = serving(1e9, num=4, prompt=120)
    found = wanted(cluster, 1)[0]
    migration = begin_as_tokens(cluster, found, may_change)
    cluster.run(stop=lambda: cluster.core.state.counters.num_migrations == 1)
    (record,) = [r for r in cluster.records if r.kind == "migrated"]
    block_size, num_tokens = cluster.core.state.limits.block_size, record.fields["tokens"]
    assert isinstance(num_tokens, int) and num_tokens == migration.num_tokens > 0
    if KV in may_change:
        assert record.fields["went_as"] == "tokens, then kv"
        assert record.fields["blocks"] == -(-found.state.num_computed // block_size) - num_tokens // block_size > 0
        assert record.fields["ms"] > record.fields["stop_ms"]  # type: ignore[operator]
    else:
        assert record.fields["went_as"] == "tokens" and record.fields["bytes"] == 0
    cluster.run()
    expect_all_well(cluster)


def test_a_move_as_tokens_keeps_pace_with_its_destination() -> None:
    cluster = serving(1.0, num=4, prompt=120)
    first, second = wanted(cluster, 2)
    fixed, paced = begin_as_tokens(cluster, first, ()), begin_as_tokens(cluster, second, (TOKENS,))
    for request_id in [*cluster.core.groups[1].queues.running]:
        cluster.cancel(request_id, 60)
    cluster.run(stop=lambda: paced._guest.max_step_tokens != 4)
    assert paced._guest.max_step_tokens == 128, "all that a step has room for"
    assert fixed._guest.max_step_tokens == 4
    cluster.run()
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
        state = cluster.core.state.requests.get(rng.choice(ids)) if ids else None
        destination = cluster.core.groups[rng.choice(groups)]
        if state is not None and may_go(state) and not cluster.core.migrations.is_moving(state):
            source = cluster.core.groups[state.group_id]
            ends = [*source.worker_ids, *destination.worker_ids]
            if source is not destination and not {*cluster.core.moves.moving_workers()} & {*ends} and not (
                source.paused or destination.paused
            ):
                start_as_tokens(cluster, WantedMove(state, destination))

    for at_ms in times_ms:
        cluster.at(int(at_ms * 1e6), send_some)
    if victim is not None:
        cluster.kill_at(*victim)
        cluster.restart_at(victim[0], victim[1] + 120)
    expect_all_well(cluster)


MACHINES = {0: 0, 1: 0, 2: 1, 3: 1}
"""A pretended map: two machines of two workers."""


def behind_one_card(card_of: dict[int, int], fit: Fit = Fit.SOONEST) -> tuple[FakeCluster, list[WantedMove]]:
    """Requests decode on four instances; those of the first machine are wanted on the other, each on an instance."""
    cluster = FakeCluster(
        policy="recompute", num_workers=4, full_blocks=300, max_tokens=128, profile=profile(1e9)
    )  # fmt: skip
    for i in range(24):
        cluster.submit(f"r{i}", tokens(i, 60), 100, 0.5 * i, ignore_eos=True)
    cluster.run(until_ms=60)
    state = cluster.core.state
    found = [
        WantedMove(s, state.groups[home]) for source, home in ((0, 2), (1, 3))
        for s in state.groups[source].queues.running.values() if may_go(s)
    ]
    moves = MoveParams(fit=fit, epoch_s=0.01)
    link = profile(3 * kv_bytes(cluster, found[0]) / moves.epoch_s)
    state.params = replace(state.params, profile=link, moves=moves, machine_of=MACHINES, card_of=card_of)
    return cluster, found


def num_kv(cluster: FakeCluster, found: list[WantedMove]) -> int:
    return [going.kind for going in choose_kinds(cluster.core.state, found).values()].count(KV)


def test_two_sources_behind_one_card_have_its_room_together() -> None:
    cluster, found = behind_one_card(MACHINES)
    apart, same = behind_one_card({})
    kv_only = [w._replace(kinds=frozenset({KV})) for w in found], [w._replace(kinds=frozenset({KV})) for w in same]
    shared, each = num_kv(cluster, kv_only[0]), num_kv(apart, kv_only[1])
    assert 3 <= shared <= 4 and 6 <= each <= 8, "three, and one that reaches into the next epoch: of a card, or of each"
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("card_of", [MACHINES, {}])
def test_what_is_on_its_way_from_one_worker_is_in_the_way_of_another_behind_its_card(card_of: dict[int, int]) -> None:
    cluster, found = behind_one_card(card_of, Fit.FIRST)
    mine, others = ([w._replace(kinds=frozenset({KV})) for w in found if w.state.group_id == g] for g in (0, 1))
    before = num_kv(cluster, others)
    order(cluster, {w.state.request_id: 2 for w in mine[:2]})
    book, (out, into) = cluster.core.state.book, cluster.core.state.params.ports.of(0, 2)
    assert book.bytes_at(out) == book.bytes_at(into) == book.bytes_between(0, 2) > 0
    assert book.is_shared(1, 3, TransferPurpose.MIGRATION) == bool(card_of)
    assert not book.is_shared(0, 1, TransferPurpose.MIGRATION)
    assert (num_kv(cluster, others) < before) == bool(card_of)
    assert (book.bytes_ahead(1, 3) > 0) == bool(card_of) and book.bytes_ahead(0, 2) == book.bytes_between(0, 2)
    cluster.run()
    expect_all_well(cluster)


def test_the_rate_of_a_card_may_be_told() -> None:
    cluster, found = behind_one_card(MACHINES)
    kv_only = [w._replace(kinds=frozenset({KV})) for w in found]
    before, state = num_kv(cluster, kv_only), cluster.core.state
    state.params = replace(state.params, card_bytes_per_s=2 * state.params.profile.link_bytes_per_s)
    assert num_kv(cluster, kv_only) > before


@pytest.mark.parametrize("fit", Fit)
def test_each_division_keeps_to_what_a_card_carries(fit: Fit) -> None:
    cluster, found = behind_one_card(MACHINES, fit)
    assert num_kv(cluster, found) <= 3 + (fit is Fit.SOONEST)

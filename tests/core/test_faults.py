"""What goes wrong in the middle of a move: lost transfers, refused layouts, no room to land, clients that leave."""

from __future__ import annotations

import itertools
import random

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster, Faults, expect_all_well

from jettison.core.moving import exchanging
from jettison.core.moving.merging import MergePhase
from jettison.core.moving.restoring import RestorePhase
from jettison.core.ports import LayoutOffered, SendKV
from jettison.types import ServiceClass


def tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(1, 60) for _ in range(num)]


def fill(cluster: FakeCluster, num: int, *, prompt: int, output: int, at_ms: float = 0.0, tag: str = "r") -> None:
    rng = random.Random(num)
    for i in range(num):
        cluster.submit(f"{tag}{i}", tokens(rng, prompt), output, at_ms + 0.1 * i)


def run_until_phase(cluster: FakeCluster, phase: MergePhase | RestorePhase) -> None:
    def is_reached() -> bool:
        return any(move.phase is phase for move in (*cluster.core.merges, *cluster.core.restores))

    cluster.run(stop=is_reached)
    assert is_reached(), f"{phase} was not reached"


@pytest.mark.parametrize("waits", [False, True])
def test_requests_cancelled_while_a_failed_merge_maps_back_are_freed(waits: bool) -> None:
    cluster = FakeCluster(full_blocks=40, auto_restore=False, max_seqs=2)
    fill(cluster, 8, prompt=12, output=40)
    cluster.run(until_ms=30)
    cluster.workers[1].fail_applies = 1
    cluster.order("drop")
    run_until_phase(cluster, MergePhase.REVERTING)
    group = cluster.core.groups[0]
    carrier = group.queues.waiting.head if waits else next(iter(group.queues.running.values()))
    cluster.cancel(carrier.request_id, cluster.now / MS)
    cluster.run()
    expect_all_well(cluster)


def test_a_request_with_one_of_two_transfers_lost_is_recomputed() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=60, auto_restore=False, prefix_caching=False)
    fill(cluster, 12, prompt=16, output=60)
    cluster.run(until_ms=40)
    cluster.order("drop")
    cluster.run(until_ms=100)
    # Requests of the third instance go to both members of the pipeline; half of what they send is lost.
    cluster.fails_move = lambda move: move.dst == 0
    cluster.order("drop")
    cluster.run()
    assert {m.dst for m in cluster.sent if m.src == 2} == {0, 1}
    assert cluster.core.groups[4].counters.num_preemptions > 0
    expect_all_well(cluster)


def test_requests_that_counted_on_a_lost_prefix_are_recomputed_too() -> None:
    cluster = FakeCluster(full_blocks=60, auto_restore=False, exchange="transfer")
    prefix = tokens(random.Random(1), 16)
    for i in range(6):
        cluster.submit(f"p{i}", [*prefix, i + 1, i + 2], 60, at_ms=20.0 * i)
    cluster.run(until_ms=140)
    carriers: dict[tuple[int, int], SendKV] = {}

    def carries_the_prefix(move: SendKV) -> bool:
        first = next(m for m in cluster.sent if (m.src, m.dst) == (move.src, move.dst))
        return carriers.setdefault((move.src, move.dst), first) is move

    cluster.fails_move = carries_the_prefix
    cluster.order("drop")
    cluster.run()
    lost, others = list(carriers.values()), [m for m in cluster.sent if m not in carriers.values()]
    assert lost and any(len(m.src_blocks) < len(lost[0].src_blocks) for m in others), "somebody shares the prefix"
    assert cluster.core.groups[2].counters.num_preemptions >= 2
    expect_all_well(cluster)


@pytest.mark.parametrize("seed", range(4))
def test_a_shared_block_whose_owner_has_gone_is_not_counted_on(seed: int) -> None:
    """Landing has to wait for room; meanwhile the request that carried the prefix ends, and its blocks are reused."""
    cluster = FakeCluster(full_blocks=30, auto_restore=False, shard_bytes=512, seed=seed)
    prefix = tokens(random.Random(seed), 24)
    for i in range(14):
        cluster.submit(f"p{i}", [*prefix, i + 1, i + 2], 12 if i < 4 else 40, at_ms=3.0 * i)
    cluster.run(until_ms=60)
    cluster.order("drop")
    fill(cluster, 12, prompt=8, output=12, at_ms=61, tag="new")
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize(("shard_bytes", "output"), [(256, 30), (512, 30), (2048, 30), (256, 80)])
def test_too_little_room_to_land_all_at_once(shard_bytes: int, output: int) -> None:
    """Both members are full and a drop frees next to nothing: land bit by bit, recompute the youngest, lose nobody."""
    cluster = FakeCluster(full_blocks=40, auto_restore=False, shard_bytes=shard_bytes, max_seqs=32)
    fill(cluster, 20, prompt=12, output=output)
    cluster.run(until_ms=40)
    before = [w.ledger.num_held for w in cluster.core.state.workers.values()]
    cluster.order("drop")
    run_until_phase(cluster, MergePhase.EXCHANGE)
    merge = cluster.core.merges[0]
    assert merge.group is not None
    room = merge.group.blocks.capacity - max(before)
    assert room < min(before), "the point of this test"
    cluster.run()
    assert len(cluster.sent) > 0
    if shard_bytes == 256:
        assert merge.group.counters.num_preemptions > 0
    expect_all_well(cluster)


def test_hundreds_of_requests_give_way_for_one_that_needs_much_room() -> None:
    cluster = FakeCluster(
        full_blocks=1010, auto_restore=False, shard_bytes=256, max_seqs=2000, max_tokens=4500, prefix_caching=False
    )
    cluster.check_every_event = False
    cluster.submit("big", tokens(random.Random(0), 3990), 3)
    for i in range(1000):
        cluster.submit(f"r{i}", [i % 60 + 1, i % 59 + 1], 3, at_ms=1)
    cluster.run(until_ms=130)
    assert "big" in cluster.core.groups[0].queues.running and len(cluster.core.groups[1].queues.running) > 950
    cluster.order("drop")
    cluster.run()
    assert sum(g.counters.num_preemptions for g in cluster.core.groups.values()) > 400
    expect_all_well(cluster)


def test_running_requests_are_not_preempted_for_kv_that_is_to_land() -> None:
    """Landing space is kept from newcomers, not from requests that run already."""
    cluster = FakeCluster(num_workers=2, full_blocks=48, auto_restore=False, shard_bytes=256, seed=5)
    fill(cluster, 8, prompt=16, output=60)
    cluster.run(until_ms=60)
    cluster.order("drop")
    run_until_phase(cluster, MergePhase.EXCHANGE)
    group = cluster.core.merges[0].group
    assert group is not None
    view = group.planner.view()
    assert view.num_free_blocks - view.num_reserved_blocks == group.blocks.num_free
    assert view.num_free_blocks == min(ledger.num_free for ledger in group.blocks.ledgers)
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("num_failures", [1, 5])
def test_pages_that_could_not_be_given_back_are_tried_again_after_a_while(num_failures: int) -> None:
    cluster = FakeCluster(full_blocks=40, auto_restore=False)
    fill(cluster, 6, prompt=16, output=70)
    cluster.run(until_ms=40)
    cluster.order("drop")
    run_until_phase(cluster, MergePhase.EXCHANGE)
    cluster.workers[0].fail_applies = num_failures
    cluster.run()
    failures = [t for t, kind in cluster.log if kind == "CallFailed"]
    assert len(failures) == num_failures
    assert all(later - earlier >= 100 * MS for earlier, later in itertools.pairwise(failures)), "not at once"
    assert all(not w.layout.retained for w in cluster.core.state.workers.values())
    expect_all_well(cluster)


@pytest.mark.parametrize("num_waited_for", [exchanging.WAITED_FOR_ATTEMPTS, 0])
def test_who_waits_for_pages_that_a_member_could_not_give_back_waits_for_the_next_attempt(
    num_waited_for: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanging, "WAITED_FOR_ATTEMPTS", num_waited_for)
    cluster = FakeCluster(full_blocks=40, auto_restore=False, shard_bytes=256, exchange="transfer")
    fill(cluster, 8, prompt=36, output=40)
    cluster.run(until_ms=50)
    cluster.order("drop")
    run_until_phase(cluster, MergePhase.EXCHANGE)
    cluster.workers[0].fail_applies = cluster.workers[1].fail_applies = 1
    cluster.run()
    (done,) = (r.fields for r in cluster.records if r.kind == "exchange_done")
    assert ("recompute" in done["requests"]) == (num_waited_for == 0)  # type: ignore[operator]
    expect_all_well(cluster)


def test_loads_that_fail_while_mapping_back_are_tried_again_after_a_while() -> None:
    cluster = FakeCluster(full_blocks=40, auto_restore=False, faults=Faults(load=1.0, budget=6))
    fill(cluster, 8, prompt=12, output=60)
    cluster.run(until_ms=30)
    cluster.workers[1].fail_applies = 1
    cluster.fails_shard = lambda _: True  # nobody's copy arrives
    cluster.order("drop")
    cluster.run()
    assert cluster.num_faults == 6
    loaded = [t for t, kind in cluster.log if kind == "CallFailed"]
    assert max(loaded) - min(loaded) >= 100 * MS, "not at once"
    expect_all_well(cluster)


def test_a_member_that_maps_back_gets_its_shards_from_the_one_that_refused() -> None:
    cluster = FakeCluster(full_blocks=40, auto_restore=False, faults=Faults(load=1.0, budget=100))
    fill(cluster, 8, prompt=12, output=60)
    cluster.run(until_ms=30)
    cluster.workers[1].fail_applies = 1
    cluster.order("drop")
    cluster.run()
    assert [r.kind for r in cluster.records if r.kind.startswith("drop")] == ["drop_failed"]
    assert cluster.num_faults == 0 and {type(f).__name__ for f in cluster.fetched} == {"SendShard"}
    assert not any(w.unfilled for w in cluster.core.state.workers.values())
    expect_all_well(cluster)


@pytest.mark.parametrize("num_failures", [1, 4])
def test_members_that_could_not_drop_again_try_until_they_can(num_failures: int) -> None:
    """A restore is turned round while shards are on their way, and then a member cannot drop them again."""
    cluster = FakeCluster(full_blocks=120, auto_restore=False)
    fill(cluster, 5, prompt=16, output=80)
    cluster.run(until_ms=40)
    cluster.order("drop")
    cluster.run(until_ms=120)
    cluster.order("restore")
    run_until_phase(cluster, RestorePhase.PULL)
    state = cluster.core.state
    assert any(w.unfilled for w in state.workers.values())
    assert all(w.resident(state.shape) == w.layout.kv_layers for w in state.workers.values()), "shards on their way"
    cluster.workers[0].fail_applies = cluster.workers[1].fail_applies = num_failures
    num_steps = cluster.num_steps
    cluster.order("drop")
    cluster.run(stop=lambda: not cluster.core.in_transition)
    assert cluster.num_steps > num_steps, "the group served on meanwhile"
    assert all(w.layout.shards == state.shape.shards_for(w.layout.kv_layers) for w in state.workers.values())
    assert not any(w.unfilled for w in state.workers.values())
    cluster.order("restore")
    fill(cluster, 6, prompt=16, output=20, at_ms=cluster.now / MS + 50, tag="s")
    cluster.run()
    assert [r.kind for r in cluster.records].count("restore_done") == 1
    expect_all_well(cluster)


@pytest.mark.parametrize("who", [0, 1])
def test_a_split_pipeline_that_cannot_be_merged_again_goes_on_returning(who: int) -> None:
    cluster = FakeCluster(full_blocks=120, auto_restore=False)
    fill(cluster, 5, prompt=20, output=80)
    cluster.run(until_ms=50)
    cluster.order("drop")
    cluster.run(until_ms=150)
    cluster.order("restore")
    run_until_phase(cluster, RestorePhase.RETURN)
    cluster.workers[who].fail_applies = 1
    cluster.order("drop")
    cluster.run(stop=lambda: cluster.records[-1].kind == "drop_failed")
    pipeline = next(g for g in cluster.core.groups.values() if len(g.stages) > 1)
    assert pipeline.queues.running and cluster.core.in_transition
    cluster.order("restore")
    cluster.run()
    assert [r.kind for r in cluster.records][-1] == "restore_done"
    assert pipeline.group_id not in cluster.core.groups
    expect_all_well(cluster)


def test_a_layout_made_from_an_older_page_map_is_refused_and_nothing_is_lost() -> None:
    cluster = FakeCluster(full_blocks=40, auto_restore=False)
    fill(cluster, 8, prompt=12, output=40)
    cluster.run(until_ms=30)
    cluster.order("drop")
    run_until_phase(cluster, MergePhase.REMAP)
    cluster.run(stop=lambda: LayoutOffered.__name__ in {kind for _, kind in cluster.log})
    cluster.workers[0].version += 1
    cluster.run()
    assert cluster.num_stale_layouts == 1
    assert [r.kind for r in cluster.records if r.kind.startswith("drop")] == ["drop_failed"]
    expect_all_well(cluster)


@pytest.mark.parametrize("at_ms", [51, 52, 55, 60, 70])
def test_steps_that_fail_end_their_requests_with_an_error_and_nothing_else(at_ms: int) -> None:
    cluster = FakeCluster(full_blocks=60, auto_restore=False)
    fill(cluster, 10, prompt=20, output=60)
    cluster.run(until_ms=50)
    cluster.order("drop")
    cluster.run(until_ms=at_ms)
    cluster.faults = Faults(step=1.0, budget=1)
    cluster.run()
    errors = [r for r, ends in cluster.ends.items() if ends == ["error"]]
    assert 0 < len(errors) < 10
    assert [r.kind for r in cluster.records].count("step_failed") == 1
    expect_all_well(cluster)


def test_a_request_larger_than_an_instance_is_served_by_a_drop() -> None:
    cluster = FakeCluster(full_blocks=20, shard_bytes=4096)
    most = cluster.core.max_request_blocks() * BLOCK_SIZE
    assert most > 20 * BLOCK_SIZE
    cluster.submit("big", tokens(random.Random(0), 60), most - 60)
    fill(cluster, 4, prompt=12, output=20, at_ms=20)
    cluster.run()
    assert any(r.kind == "drop" for r in cluster.records)
    expect_all_well(cluster)


def test_nothing_merges_for_an_offline_request_so_one_larger_than_an_instance_is_refused() -> None:
    cluster = FakeCluster(full_blocks=20, shard_bytes=4096)
    most = cluster.core.max_request_blocks(is_offline=True) * BLOCK_SIZE
    assert most == 20 * BLOCK_SIZE < cluster.core.max_request_blocks() * BLOCK_SIZE
    cluster.submit("fits", tokens(random.Random(0), 60), most - 60, service_class=ServiceClass.OFFLINE)
    cluster.submit("large", tokens(random.Random(0), 60), most - 59, service_class=ServiceClass.OFFLINE)
    cluster.submit(
        "cut", tokens(random.Random(0), 60), 1000, has_default_length=True, service_class=ServiceClass.OFFLINE)
    cluster.run()
    assert cluster.ends == {"fits": ["length"], "large": ["error"], "cut": ["length"]}
    assert f"length is {most} tokens. However, you requested {most + 1} tokens" in cluster.errors["large"]
    assert not any(r.kind == "drop" for r in cluster.records)


def test_one_too_large_for_its_group_lets_others_pass_until_there_is_a_partner() -> None:
    cluster = FakeCluster(full_blocks=20, shard_bytes=4096, max_tokens=128)
    cluster.kill(1)
    cluster.run(stop=lambda: any(r.kind == "worker_lost" for r in cluster.records))
    start = cluster.now / MS
    cluster.submit("giant", tokens(random.Random(0), 100), 5, at_ms=start + 1)
    fill(cluster, 30, prompt=12, output=10, at_ms=start + 2)
    cluster.run(until_ms=start + 2_000)
    ends = [name for name in cluster.ends if cluster.ends[name]]
    assert len(ends) == 30 and "giant" not in ends
    # With a partner it is the first to be served, however many arrive behind it.
    cluster.restart_at(1, start + 2_001)
    for i in range(200):
        cluster.submit(f"l{i}", tokens(random.Random(i), 12), 10, at_ms=start + 2_000 + 5 * i)
    served_before: list[int] = []
    cluster.run(stop=lambda: bool(cluster.ends.get("giant")))
    served_before.append(len(cluster.ends) - 31)
    assert any(r.kind == "drop" for r in cluster.records) and served_before[0] < 150
    cluster.run()
    expect_all_well(cluster)


def test_no_request_may_be_larger_than_an_instance_where_nothing_is_dropped() -> None:
    assert FakeCluster(full_blocks=20, policy="recompute").core.max_request_blocks() == 20
    assert FakeCluster(full_blocks=20, num_workers=1).core.max_request_blocks() == 20

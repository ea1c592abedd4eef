"""KV of offline requests in a second place: copied beside steps, freed at once, brought back.

With pretend KV that every step checks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from fakes import BLOCK_SIZE, MS, SHARD_BYTES, FakeCluster, Faults, tokens

from jettison.core.ladder.free import is_preemptible
from jettison.core.ladder.rung import Moment
from jettison.core.moving.hostedkv import HostedPhase
from jettison.core.ports import Action, SendKV
from jettison.core.preemption import Preemption
from jettison.core.requests import Phase, RequestState
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import CostModel
from jettison.policy.batching import BlockedBy
from jettison.policy.checkpointing import USUAL_BLOCKS
from jettison.policy.slo import SloParams
from jettison.policy.standing import Standstill
from jettison.types import ServiceClass
from longrun import part_of


def batch(cluster: FakeCluster, num: int, *, prompt: int = 24, output: int = 80, prefix: int = 0) -> None:
    for i in range(num):
        prompt_tokens = tokens("shared", prefix) + tokens(f"batch-{i}", prompt + i % 5)
        cluster.submit(
            f"batch-{i}", prompt_tokens, output + i % 7, 0.3 * i, service_class=ServiceClass.OFFLINE, ignore_eos=True
        )


def chats(cluster: FakeCluster, num: int, at_ms: float, *, prompt: int = 30, output: int = 30) -> None:
    for i in range(num):
        name = f"chat-{at_ms}-{i}"
        cluster.submit(name, tokens(name, prompt), output, at_ms + 0.5 * i)


def harvesting(**options: object) -> FakeCluster:
    defaults: dict[str, object] = {
        "policy": "recompute", "num_workers": 1, "full_blocks": 80, "host_slots": 500, "offline": "harvest",
        "checkpoint_free": 0.9,
    }
    return FakeCluster(**(defaults | options))  # type: ignore[arg-type]


def checkpointed(cluster: FakeCluster) -> dict[str, int]:
    """Tokens at the host of requests that run."""
    return {e.state.request_id: e.pools.num_tokens or 0 for e in cluster.core.hosted.store.checkpoints()}


def stored(cluster: FakeCluster) -> dict[str, RequestState]:
    return {r: s for group in cluster.core.groups.values() for r, s in group.queues.stored.items()}


def expect_all_well(cluster: FakeCluster) -> None:
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert cluster.core.hosted.is_idle
    for pool in cluster.core.hosted.store.pools.values():
        assert pool.num_free == pool.num_slots


# --- copying


def test_nothing_is_copied_without_the_parts_that_do_or_while_memory_is_free() -> None:
    for options in ({"offline": "priority"}, {"offline": "scheduler"}, {"checkpoint_free": 0.0}, {"full_blocks": 4000}):
        cluster = harvesting(**options)
        batch(cluster, 8)
        cluster.run()
        assert not cluster.swapped, options
        expect_all_well(cluster)


def test_online_work_alone_is_not_copied() -> None:
    cluster = harvesting()
    chats(cluster, 30, 0.0)
    cluster.run()
    assert not cluster.swapped
    expect_all_well(cluster)


def test_sealed_blocks_are_copied_beside_steps_while_their_requests_run() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 5)
    cluster.run(stop=lambda: sum(checkpointed(cluster).values()) > 100)
    assert all(s.beside_steps and s.to_host for s in cluster.swapped)
    running = cluster.core.groups[0].queues.running
    for request_id, num_tokens in checkpointed(cluster).items():
        state = running[request_id]
        assert num_tokens % BLOCK_SIZE == 0 and num_tokens <= state.num_computed and not state.transfers
    cluster.run()
    expect_all_well(cluster)
    totals = cluster.core.state.counters
    assert totals.checkpointed_blocks == sum(len(s.src_blocks) for s in cluster.swapped if s.to_host)


def test_blocks_with_the_same_content_are_copied_once() -> None:
    def copied(prefix_caching: bool) -> int:
        cluster = harvesting(full_blocks=120, prefix_caching=prefix_caching)
        batch(cluster, 6, prompt=8, prefix=40)
        cluster.run()
        expect_all_well(cluster)
        return cluster.core.state.counters.checkpointed_blocks

    assert copied(prefix_caching=True) <= copied(prefix_caching=False) - 3 * 10


# --- freeing


@dataclass(frozen=True)
class Evicted:
    """A request that a step's plan would have preempted."""

    state: RequestState
    num_kept: int
    num_computed: int
    num_freed_blocks: int
    num_sent: int


def evict(
    cluster: FakeCluster, picks: Callable[[RequestState], bool] = lambda s: True, least_tokens: int = 20
) -> Evicted:
    """Run until such a request with so much at the host is in no step, and preempt it before the next is planned."""
    done: list[Evicted] = []
    ladder = cluster.core.ladder
    climb = ladder.climb

    def climb_and_preempt(moment: Moment, now_ns: int) -> list[Action]:
        actions = climb(moment, now_ns)
        if moment is not Moment.BEFORE_STEPS or done:
            return actions
        kept = checkpointed(cluster)
        for group in cluster.core.groups.values():
            for state in reversed(group.queues.running.values()):
                num_kept = kept.get(state.request_id, 0)
                if not done and is_preemptible(state) and num_kept >= least_tokens and picks(state):
                    before, num_used = state.num_computed, group.blocks.num_used
                    group.preempt(state, Preemption.STEP)
                    done.append(Evicted(
                        state, num_kept, before, num_used - group.blocks.num_used, len(cluster.swapped)
                    ))
                    return actions
        return actions

    ladder.climb = climb_and_preempt  # type: ignore[method-assign]
    cluster.run(stop=lambda: bool(done))
    del ladder.climb
    assert done, "nothing to evict"
    return done[0]


def test_a_freed_request_gives_its_blocks_up_without_copying_and_loses_only_what_is_beyond() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 5)
    evicted = evict(cluster)
    state = evicted.state
    assert state.phase is Phase.STORED and state.num_computed == evicted.num_kept
    assert evicted.num_freed_blocks >= evicted.num_kept // BLOCK_SIZE - 8, "all but what a piece still reads"
    assert not any(s.from_host for s in cluster.swapped) and evicted.num_sent <= len(cluster.swapped)
    totals = cluster.core.state.counters
    assert totals.checkpoint_frees == 1
    assert totals.freed_recomputed_tokens == evicted.num_computed - evicted.num_kept
    cluster.run()
    expect_all_well(cluster)
    assert totals.prefetched_blocks >= evicted.num_kept // BLOCK_SIZE


def test_what_a_piece_reads_stays_reserved_until_it_has_ended_though_its_request_is_gone() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 5)
    worker = cluster.core.state.workers[0]

    def is_copied(state: RequestState) -> bool:
        return any(name.startswith(state.request_id + "\0") for name in worker.copying)

    state = evict(cluster, is_copied).state
    name = next(name for name in worker.copying if name.startswith(state.request_id + "\0"))
    blocks = list(worker.ledger.table(name).ids)
    assert blocks and all(worker.ledger.is_held(block) for block in blocks)
    cluster.run(stop=lambda: name not in worker.copying)
    cluster.run()
    expect_all_well(cluster)


def test_without_a_checkpoint_a_victim_is_queued_as_ever() -> None:
    cluster = harvesting(checkpoint_free=0.0)
    batch(cluster, 4)
    evicted = evict(cluster, lambda s: s.num_computed > 0, least_tokens=0)
    assert evicted.state.phase is not Phase.STORED and not cluster.core.state.counters.checkpoint_frees
    assert cluster.core.state.counters.offline_discards == 1
    cluster.run()
    expect_all_well(cluster)


def test_online_requests_get_the_blocks_of_checkpointed_ones_at_once() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 8, output=200)
    cluster.run(stop=lambda: len(checkpointed(cluster)) >= 2 and cluster.core.groups[0].blocks.num_free < 6)
    chats(cluster, 1, cluster.now / MS, prompt=60)
    cluster.run(stop=lambda: "chat" in str(list(cluster.core.groups[0].queues.running)))
    assert cluster.core.state.counters.checkpoint_frees > 0
    assert any(r.startswith("batch") for r in stored(cluster))
    cluster.run()
    expect_all_well(cluster)


def test_newcomers_of_the_batch_wait_for_those_that_were_freed() -> None:
    cluster = harvesting(prefix_caching=False, max_seqs=4)
    batch(cluster, 12)
    evict(cluster)
    queues = cluster.core.groups[0].queues
    assert not list(queues.newcomers()) and queues.waiting_offline
    cluster.run()
    expect_all_well(cluster)


# --- coming back


def test_it_comes_back_beside_steps_and_is_checkpointed_still() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 5)
    evicted = evict(cluster)
    cluster.run(stop=lambda: evicted.state.phase is Phase.RUNNING)
    back = [s for s in cluster.swapped if s.from_host]
    assert back and all(s.beside_steps for s in back)
    assert sum(len(s.src_blocks) for s in back) == evicted.num_kept // BLOCK_SIZE
    again = checkpointed(cluster)[evicted.state.request_id]
    assert again == evicted.num_kept, "freed again without copying anything again"
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("is_offline", [False, True])
def test_it_comes_back_beside_decodes_that_take_longer_than_their_objective(is_offline: bool) -> None:
    cluster = harvesting(prefix_caching=False, profile=with_link(1e9))
    batch(cluster, 3, output=200)
    chats(cluster, 3, 2.0, output=200)
    victim = evict(cluster, lambda s: s.is_offline == is_offline).state
    state = cluster.core.state
    state.params = replace(
        state.params, offline=replace(state.params.offline, slo=SloParams(ttft_s=1.0, tpot_s=1e-6)))
    cluster.core.ladder.rung("harvest")._is_cheaper_recomputed = lambda *_: False  # type: ignore[attr-defined]
    cluster.run(stop=lambda: victim.phase is Phase.RUNNING or not any(
        not s.is_offline and s is not victim for s in state.requests.values()))
    assert victim.phase is Phase.RUNNING and any(s.from_host for s in cluster.swapped)
    cluster.run()
    expect_all_well(cluster)


def test_without_prefetching_steps_wait_for_what_comes_back() -> None:
    cluster = harvesting(prefix_caching=False, offline="scheduler+checkpoint")
    batch(cluster, 5)
    victim = evict(cluster).state
    cluster.run(stop=lambda: victim.phase is Phase.RUNNING)
    back = [s for s in cluster.swapped if s.from_host]
    assert back and not any(s.beside_steps for s in back)
    cluster.run()
    expect_all_well(cluster)


def test_what_a_step_carries_is_within_the_budget() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 6)
    rung = cluster.core.ladder.rung("harvest")
    rung._budget_blocks = lambda group: 3  # type: ignore[attr-defined]
    group, carried = cluster.core.groups[0], dict[int, int]()
    original, lags = cluster.core.handle, list[int]()

    def handle(event: object, now_ns: int) -> list[object]:
        actions = original(event, now_ns)  # type: ignore[arg-type]
        lags.append(cluster.core.ladder.lag_blocks)
        num = sum(len(a.src_blocks) for a in actions if isinstance(a, SendKV))
        carried[group.counters.num_steps] = carried.get(group.counters.num_steps, 0) + num
        return actions  # type: ignore[return-value]

    cluster.core.handle = handle  # type: ignore[method-assign,assignment]
    evict(cluster, least_tokens=8)
    cluster.run()
    expect_all_well(cluster)
    assert max(carried.values()) == 3
    assert max(lags) > 3 and lags[-1] == 0, "the rest is deferred"


def test_a_step_is_known_to_run_beside_what_is_copied_meanwhile() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 5)
    book, group = cluster.core.state.book, cluster.core.groups[0]
    carry_out, issued, told = cluster.carry_out, dict[int, int](), dict[int, int]()

    def watch(actions: list[Action]) -> None:
        for piece in (a for a in actions if isinstance(a, SendKV)):
            issued[piece.transfer_id] = book.transfers[piece.transfer_id].num_bytes
        told.update((i, flight.work.num_beside_bytes) for i, flight in group.in_flight.items())
        assert all(not flight.work.num_copied_bytes for flight in group.in_flight.values())
        carry_out(actions)

    cluster.carry_out = watch  # type: ignore[method-assign]
    evict(cluster)
    cluster.run()
    expect_all_well(cluster)
    assert sum(told.values()) + sum(group.pending_copies) == sum(issued.values()) > 0, "each byte counts once"


COST = CostModel(
    num_layers=4, pair_layer_s=0.0, kv_token_layer_s=0.0, token_layer_s=1.25e-5, layer_s=3.5e-4, step_s=1e-4,
    entry_s=0.0, entry_token_s=0.0, head_s=0.0, sample_s=0.0,
)  # fmt: skip


def with_link(rate: float) -> HardwareProfile:
    """A profile with so many bytes a second between arenas and host pools."""
    return HardwareProfile(COST, 2e8, 2e-5, 1e-3, 1e-10, 1e9, 1e9, beside_bytes_per_s=rate, beside_byte_s=0.0)


def test_no_more_is_copied_beside_a_step_than_the_link_carries_meanwhile() -> None:
    def most(rate: float) -> int:
        cluster = harvesting(profile=with_link(rate))
        batch(cluster, 3)
        cluster.run(stop=lambda: cluster.num_steps == 3)
        group, loads = cluster.core.groups[0], cluster.core.loads
        found = loads.blocks_within(group, lambda step_s: 0.1, beside_steps=True)
        assert found is not None
        return found

    block_bytes = 4 * harvesting().shape.block_bytes_per_layer(BLOCK_SIZE)
    assert most(5 * block_bytes / 0.1 + 1.0) == 5
    assert most(1e12) == 500, "all that the pool has"


def test_a_link_that_cannot_keep_up_means_computing_again() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 5)
    victim = evict(cluster, least_tokens=40).state
    cluster.core.ladder.rung("harvest")._budget_blocks = lambda group: 1  # type: ignore[attr-defined]
    cluster.core.loads.copies_stall_s = lambda *_, **__: 1.0  # type: ignore[method-assign]
    cluster.run(stop=lambda: victim.phase is not Phase.STORED)
    assert victim.num_computed == 0 and not any(s.from_host for s in cluster.swapped)
    assert cluster.core.state.counters.checkpoints_dropped == 1
    cluster.run()
    expect_all_well(cluster)


def test_a_few_blocks_are_computed_again_too_where_the_link_carries_one_beside_a_step() -> None:
    """Between two steps of a group that is at work a step is what copies are to go beside. (It was copied when the link
    was faster.)"""
    cluster = harvesting(prefix_caching=False, profile=with_link(1e12))
    batch(cluster, 2)
    evicted = evict(cluster, least_tokens=3 * BLOCK_SIZE)
    cluster.core.state.params = replace(cluster.core.state.params, profile=with_link(1.0))
    assert evicted.num_kept <= USUAL_BLOCKS * BLOCK_SIZE
    cluster.run(stop=lambda: evicted.state.phase is not Phase.STORED)
    assert evicted.state.num_computed == 0 and not any(s.from_host for s in cluster.swapped)
    cluster.run()
    expect_all_well(cluster)


def test_nothing_is_copied_that_the_link_could_not_bring_back_before_it_is_computed_again() -> None:
    def served(rate: float) -> FakeCluster:
        cluster = harvesting(prefix_caching=False, profile=with_link(rate))
        batch(cluster, 8)
        cluster.run()
        expect_all_well(cluster)
        assert cluster.core.state.counters.checkpoint_frees + cluster.core.state.counters.offline_discards
        return cluster

    assert any(s.to_host for s in served(1e12).swapped)
    assert not served(1.0).swapped


def test_a_step_that_has_no_room_for_copies_lets_nobody_come_back_and_discards_nobody() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 5)
    victim, rung = evict(cluster).state, cluster.core.ladder.rung("harvest")
    rung._budget_blocks = lambda group: 0  # type: ignore[attr-defined]
    cluster.run(until_ms=cluster.now / MS + 60)
    assert victim.phase is Phase.STORED
    del rung._budget_blocks  # type: ignore[attr-defined]
    cluster.core.groups[0].touch()
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("host_slots", [0, 6, 20])
def test_a_full_pool_keeps_the_checkpoints_of_the_first_victims(host_slots: int) -> None:
    cluster = harvesting(prefix_caching=False, host_slots=host_slots)
    batch(cluster, 6, output=120)
    cluster.run(until_ms=250)
    found = checkpointed(cluster)
    if host_slots == 20:
        (pool,) = cluster.core.hosted.store.pools.values()
        assert pool.num_free < 8
        newest = list(cluster.core.groups[0].queues.running)[::-1]
        assert newest[0] in found, "the first victim"
        assert cluster.core.state.counters.checkpoints_dropped > 0
    cluster.run()
    expect_all_well(cluster)


# --- pausing


def paused(offline: str, num_chats: int, *, prompt: int, output: int) -> FakeCluster:
    cluster = harvesting(policy="drop", num_workers=2, full_blocks=60, offline=offline, eager=True)
    batch(cluster, 16, output=150)
    chats(cluster, num_chats, 60.0, prompt=prompt, output=output)
    cluster.run()
    expect_all_well(cluster)
    return cluster


def kinds(offline: str, num_chats: int, *, prompt: int, output: int) -> list[str]:
    return [record.kind for record in paused(offline, num_chats, prompt=prompt, output=output).records]


def test_nothing_is_dropped_for_what_fits_once_offline_work_has_given_way() -> None:
    assert "drop" in kinds("priority", 4, prompt=40, output=40)
    told = kinds("scheduler", 4, prompt=40, output=40)
    assert not {"drop", "offline_paused"} & set(told), "steps evict by themselves"


def test_offline_work_stops_before_anything_is_dropped_and_begins_again() -> None:
    """Online requests have no room even where nothing else is."""
    cluster = paused("scheduler", 8, prompt=60, output=60)
    told = [record.kind for record in cluster.records]
    assert cluster.core.state.counters.offline_pauses == told.count("offline_paused")
    assert 0 <= told.index("offline_paused") < told.index("drop_decided")
    assert told.count("offline_paused") == told.count("offline_resumed")


def test_a_paused_group_lets_no_offline_request_in() -> None:
    cluster = harvesting(full_blocks=60, offline="scheduler")
    batch(cluster, 10, output=150)
    chats(cluster, 4, 50.0, prompt=40, output=80)
    group = cluster.core.groups[0]
    cluster.run(stop=lambda: group.queues.offline_holders)
    assert group.queues.offline_holders
    while group.queues.offline_holders and cluster.heap:
        cluster.run(max_events=10**6, stop=lambda n=cluster.num_steps: cluster.num_steps > n)
        if group.queues.offline_holders:
            assert not any(s.num_pending for s in group.queues.running_offline())
    cluster.run()
    expect_all_well(cluster)
    stands = [r.fields for r in cluster.records if r.kind == "offline_stands"]
    told = next(fields for fields in stands if fields["reason"] == Standstill.PAUSED)
    assert told["waiting"] and not told["running"]
    (pause,) = [r for r in cluster.records if r.kind == "offline_resumed"]
    assert pause.fields["ms"] >= 1000


def test_offline_work_that_steps_have_evicted_stops_as_well() -> None:
    """Else it would be let in again whenever nobody waits for a moment, and memory would be full once more."""
    cluster = harvesting(full_blocks=60, offline="scheduler")
    batch(cluster, 10, output=150)
    chats(cluster, 10, 50.0, prompt=40, output=80)
    group = cluster.core.groups[0]
    queues = group.queues

    def is_kept_out() -> bool:
        has_none = not queues.num_running_offline and bool(queues.waiting_offline)
        return has_none and bool(queues.waiting) and group.head_blocked_by is BlockedBy.MEMORY

    cluster.run(stop=is_kept_out)
    assert is_kept_out()
    cluster.run(stop=lambda: queues.offline_holders or not is_kept_out())
    assert queues.offline_holders
    cluster.run()
    expect_all_well(cluster)


def test_a_pause_ends_although_somebody_always_waits_for_a_step_to_end() -> None:
    """What waits will be let in with the next step: it needs no memory of offline requests."""
    cluster = harvesting(full_blocks=60, offline="scheduler")
    batch(cluster, 10, output=150)
    chats(cluster, 4, 50.0, prompt=40, output=80)
    queues = cluster.core.groups[0].queues
    cluster.run(stop=lambda: queues.offline_holders)
    begun_ms = cluster.now / MS
    for i in range(3000):
        name = f"short-{i}"
        cluster.submit(name, tokens(name, 4), 1, begun_ms + i)
    cluster.run(stop=lambda: not queues.offline_holders)
    assert 1000 <= cluster.now / MS - begun_ms < 2000
    cluster.run()
    expect_all_well(cluster)


def test_a_pause_outlives_a_drop_until_half_of_the_memory_is_free() -> None:
    cluster = harvesting(
        policy="drop", num_workers=2, full_blocks=60, offline="scheduler", eager=True, auto_restore=False
    )
    batch(cluster, 16, output=150)
    chats(cluster, 8, 60.0, prompt=60, output=60)
    state = cluster.core.state
    cluster.run(stop=lambda: bool(state.pipelines))
    (group,) = state.pipelines.values()
    cluster.run(stop=lambda: group.queues.offline_holders)
    assert group.queues.offline_holders
    cluster.run(stop=lambda: not group.queues.offline_holders)
    assert group.group_id in state.groups and group.queues.has_offline
    assert group.blocks.num_free >= group.blocks.capacity / 2
    cluster.run()
    expect_all_well(cluster)


# --- beside everything else


@pytest.mark.parametrize("seed", part_of(range(4), range(2)))
def test_a_copy_that_fails_costs_a_checkpoint_and_nothing_else(seed: int) -> None:
    cluster = harvesting(seed=seed, faults=Faults(swap=0.3, budget=8))
    batch(cluster, 8, prefix=16)
    chats(cluster, 8, 60.0)
    cluster.run()
    assert cluster.num_faults > 0
    expect_all_well(cluster)


@pytest.mark.parametrize("seed", part_of(range(6), range(2)))
def test_cancels_at_any_moment_give_everything_back(seed: int) -> None:
    cluster = harvesting(num_workers=2, full_blocks=50, seed=seed)
    batch(cluster, 14, prefix=8 * (seed % 2))
    chats(cluster, 10, 40.0)
    rng = random.Random(seed)
    for i in range(0, 14, 2):
        cluster.cancel(f"batch-{i}", rng.uniform(10, 300))
    cluster.run()
    expect_all_well(cluster)


def test_a_drop_begins_as_soon_with_a_hundred_checkpoints_as_with_none() -> None:
    def events_of_a_drop(offline: str, least: int) -> list[str]:
        cluster = harvesting(
            policy="drop", num_workers=2, full_blocks=1200, host_slots=3000, max_seqs=64, max_tokens=128,
            checkpoint_free=1.0, auto_restore=False, offline=offline,
        )
        cluster.check_every_event = False
        batch(cluster, 124, output=400)
        cluster.run(until_ms=300)
        cluster.run(stop=lambda: len(checkpointed(cluster)) >= least)
        num_events = len(cluster.log)
        cluster.order("drop")
        assert len(cluster.core.merges) == 1
        cluster.run(stop=lambda: bool(cluster.core.state.pipelines))
        cluster.core.check()
        assert len(checkpointed(cluster)) >= least, "they go along"
        return sorted(kind for _, kind in cluster.log[num_events:] if kind not in ("Tick", "TransferEnded"))

    assert events_of_a_drop("harvest", 100) == events_of_a_drop("scheduler", 0)


@pytest.mark.parametrize("seed", part_of(range(5), (0, 4)))
def test_checkpoints_go_along_through_a_drop_and_a_restore(seed: int) -> None:
    cluster = harvesting(policy="drop", num_workers=2, full_blocks=60, seed=seed)
    batch(cluster, 12)
    chats(cluster, 12, 40.0)
    cluster.order_at("drop", 60.0 + 7 * seed)
    cluster.order_at("restore", 160.0 + 9 * seed)
    cluster.run()
    expect_all_well(cluster)


def test_a_checkpoint_made_alone_is_brought_back_into_a_pipeline() -> None:
    cluster = harvesting(policy="drop", num_workers=2, full_blocks=60, prefix_caching=False, auto_restore=False)
    batch(cluster, 10, output=120)
    cluster.run(stop=lambda: len(checkpointed(cluster)) >= 4)
    cluster.order("drop")

    cluster.run(stop=lambda: bool(cluster.core.state.pipelines) and not cluster.core.in_transition)
    hosted = cluster.core.hosted.store

    def was_copied_alone(state: RequestState) -> bool:
        entry = hosted.entry(state)
        return entry is not None and len(entry.pools.places) == 1

    cluster.core.ladder.rung("harvest")._budget_blocks = lambda group: 50  # type: ignore[attr-defined]
    victim = evict(cluster, was_copied_alone).state
    cluster.sent.clear()
    cluster.run(stop=lambda: victim.phase is Phase.RUNNING)
    assert any(s.from_host and s.src != s.dst for s in cluster.sent), "a stage's part comes from another's pool"
    cluster.run()
    expect_all_well(cluster)


def test_a_freed_request_that_no_home_can_hold_waits_for_the_next_pipeline() -> None:
    """Whether or not there is room for copies beside steps, and whoever waits before it."""
    cluster = harvesting(
        policy="drop", num_workers=2, full_blocks=20, shard_bytes=SHARD_BYTES // 16, max_tokens=64, max_seqs=4,
        prefix_caching=False, auto_restore=False, checkpoint_free=1.0,
    )
    cluster.order("drop")
    cluster.run(stop=lambda: bool(cluster.core.state.pipelines) and not cluster.core.in_transition)
    cluster.submit("long", tokens("long", 100), 80, cluster.now / MS, ignore_eos=True)
    batch(cluster, 1, output=40)
    cluster.run(stop=lambda: "long" in checkpointed(cluster))
    victim = evict(cluster, lambda s: s.request_id == "long").state
    harvest = cluster.core.ladder.rung("harvest")
    harvest._budget_blocks = lambda group: 0  # type: ignore[attr-defined]
    cluster.order("restore")
    cluster.run(stop=lambda: not cluster.core.state.pipelines and not cluster.core.in_transition)
    for i in range(16):
        cluster.submit(f"chat-{i}", tokens(f"chat-{i}", 12), 30, cluster.now / MS + 0.1, ignore_eos=True)
    cluster.run(stop=lambda: len(cluster.ends) >= 8)
    assert victim.phase is Phase.WAITING and not victim.residences
    assert not any(g.blocks.landing for g in cluster.core.groups.values())
    cluster.run(stop=lambda: all(f"chat-{i}" in cluster.ends for i in range(16)))
    del harvest._budget_blocks  # type: ignore[attr-defined]
    cluster.order("drop")
    cluster.run()
    expect_all_well(cluster)


def test_pipelines_are_harvested_and_each_stage_copies_its_own_layers() -> None:
    cluster = harvesting(policy="pipeline", num_workers=2, full_blocks=60, prefix_caching=False)
    batch(cluster, 8, output=120)
    cluster.run(stop=lambda: len(checkpointed(cluster)) >= 3)
    layers = {(s.src, s.layers) for s in cluster.swapped if s.to_host}
    assert len(layers) == 2 and len({src for src, _ in layers}) == 2
    cluster.run()
    expect_all_well(cluster)


def test_a_block_under_way_in_every_stage_counts_once_for_a_pipeline() -> None:
    cluster = harvesting(policy="pipeline", num_workers=2, full_blocks=60, prefix_caching=False)
    batch(cluster, 8, output=120)
    cluster.core.ladder.rung("harvest")._budget_blocks = lambda group: 4  # type: ignore[attr-defined]
    original, beside = cluster.core.handle, list[tuple[int, int]]()

    def under_way() -> list[int]:
        workers = cluster.core.state.workers.values()
        return [sum(len(w.ledger.table(name).ids) for name in w.copying) for w in workers]

    def handle(event: object, now_ns: int) -> list[object]:
        before = under_way()
        actions = original(event, now_ns)  # type: ignore[arg-type]
        if 0 < before[0] == before[1] and any(isinstance(a, SendKV) for a in actions):
            beside.append((before[0], max(under_way())))
        return actions  # type: ignore[return-value]

    cluster.core.handle = handle  # type: ignore[method-assign,assignment]
    cluster.run()
    expect_all_well(cluster)
    assert beside and max(after for _, after in beside) == 4, "as much as a group of one stage has under way"


def test_nothing_is_remembered_of_groups_that_are_gone() -> None:
    cluster = harvesting(policy="drop", num_workers=2, full_blocks=60, auto_restore=False)
    batch(cluster, 10, output=120)
    state, rung = cluster.core.state, cluster.core.ladder.rung("harvest")
    cluster.run(stop=lambda: len(checkpointed(cluster)) >= 4)
    before = set(rung._policies)  # type: ignore[attr-defined]
    cluster.order("drop")
    cluster.run(stop=lambda: bool(state.pipelines) and not cluster.core.in_transition)
    assert before and before.isdisjoint(state.groups)
    num_steps = cluster.num_steps
    cluster.run(stop=lambda: cluster.num_steps > num_steps + 10)
    remembered = rung._policies.keys() | rung._stalled  # type: ignore[attr-defined]
    assert remembered <= state.groups.keys()
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("phase", [HostedPhase.CHECKPOINT, HostedPhase.STORED, HostedPhase.IN])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_death_loses_what_its_pool_had_and_no_request(phase: HostedPhase, num_workers: int) -> None:
    cluster = harvesting(policy="drop", num_workers=num_workers, full_blocks=50)
    batch(cluster, 14, output=120)
    chats(cluster, 14, 40.0)

    def there() -> bool:
        return any(e.phase is phase for e in cluster.core.hosted.store.entries.values())

    cluster.run(stop=there)
    assert there()
    entry = next(e for e in cluster.core.hosted.store.entries.values() if e.phase is phase)
    dead = entry.pools.worker_ids[0]
    cluster.kill(dead)
    cluster.restart_at(dead, cluster.now / MS + 150)
    cluster.run()
    expect_all_well(cluster)


def test_online_requests_are_copied_behind_the_offline_ones_and_come_back_first() -> None:
    cluster = harvesting(prefix_caching=False, checkpoint_free=1.0, full_blocks=60)
    batch(cluster, 1, output=150)
    chats(cluster, 6, 20.0, prompt=30, output=120)
    cluster.run(stop=lambda: any(r.startswith("chat") for r in checkpointed(cluster)))
    victim = evict(cluster, lambda s: not s.is_offline).state
    assert victim.phase is Phase.STORED
    group = cluster.core.groups[0]
    cluster.run(stop=lambda: bool(group.blocks.landing) or victim.phase is not Phase.STORED)
    assert group.blocks.landing or victim.phase is Phase.MOVING, "newcomers leave room for it"
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("is_offline", [False, True])
def test_an_online_request_comes_back_where_a_newcomer_of_its_size_would_be_let_in(is_offline: bool) -> None:
    """Room for what others will grow by is left beside offline ones alone: newcomers leave an online request's blocks
    free, so until it is back no request would have them."""
    cluster = harvesting(prefix_caching=False, checkpoint_free=1.0, full_blocks=60)
    batch(cluster, 2, output=150)
    chats(cluster, 6, 20.0, prompt=30, output=120)
    kind = "b" if is_offline else "chat"
    cluster.run(stop=lambda: any(r.startswith(kind) for r in checkpointed(cluster)))
    victim = evict(cluster, lambda s: s.is_offline is is_offline).state
    group, hosted = cluster.core.groups[0], cluster.core.hosted.store
    rung = cluster.core.ladder.rung("harvest")
    entry = hosted.entry(victim)
    assert entry is not None and entry.phase is HostedPhase.STORED
    needed = hosted.blocks_to_return(entry) + group.blocks.watermark + 1
    (ledger,) = group.blocks.ledgers
    ledger.allocate("other", group.blocks.num_allocatable - needed)
    assert rung._growth(group) > 0  # type: ignore[attr-defined]
    entries = {victim.request_id: entry}
    chosen = rung._chosen_to_return(group, entries)  # type: ignore[attr-defined]
    assert chosen == (() if is_offline else (victim.request_id,))
    ledger.allocate("one more", 1)
    assert rung._chosen_to_return(group, entries) == ()  # type: ignore[attr-defined]


def test_other_rungs_can_be_put_in_their_place() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 8, output=120)
    victim = evict(cluster).state
    cluster.core.reconfigure(replace(cluster.core.params, rungs=("scale", "shed")))
    assert cluster.core.hosted.is_idle and victim.phase is Phase.WAITING
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("policy", ["swap", "swap+drop", "migrate+drop"])
@pytest.mark.parametrize("seed", part_of(range(3), (0,)))
def test_beside_other_rungs(policy: str, seed: int) -> None:
    cluster = harvesting(policy=policy, num_workers=2, full_blocks=44, seed=seed)
    batch(cluster, 14, output=100)
    chats(cluster, 20, 40.0, output=60)
    cluster.run()
    assert cluster.core.state.counters.checkpointed_blocks > 0
    expect_all_well(cluster)

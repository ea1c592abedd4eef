"""KV of offline requests in a second place: copied beside steps, freed at once, brought back; with pretend KV that every
step checks."""

from __future__ import annotations

import random

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster, Faults

from jettison.core.moving.hosted import HostedPhase
from jettison.core.ports import RunStep, SendKV
from jettison.core.requests import Phase, RequestState
from jettison.types import ServiceClass


def tokens(seed: str, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 60) for _ in range(num)]


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
    return {e.state.request_id: e.pools.num_tokens or 0 for e in cluster.core.hosted.checkpoints()}


def stored(cluster: FakeCluster) -> dict[str, RequestState]:
    return {r: s for group in cluster.core.groups.values() for r, s in group.queues.stored.items()}


def expect_all_well(cluster: FakeCluster) -> None:
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert cluster.core.hosted.is_idle
    for pool in cluster.core.hosted.pools.values():
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


def preempt(cluster: FakeCluster, state: RequestState) -> None:
    """As a step's plan does."""
    cluster.core.groups[state.group_id].preempt(state)


def until_victim(cluster: FakeCluster, least_tokens: int = 20) -> RequestState:
    """A checkpointed request with nothing in flight."""
    running = cluster.core.groups[0].queues.running

    def victims() -> list[RequestState]:
        found = checkpointed(cluster)
        return [s for r, s in running.items() if found.get(r, 0) >= least_tokens and not s.num_pending]

    cluster.run(stop=lambda: bool(victims()))
    return victims()[0]


def test_a_freed_request_gives_its_blocks_up_without_copying_and_loses_only_what_is_beyond() -> None:
    cluster = harvesting(prefix_caching=False, max_seqs=3)
    batch(cluster, 5)
    cluster.core.groups[0].limits  # noqa: B018
    victim = until_victim(cluster)
    group, num_sent = cluster.core.groups[0], len(cluster.swapped)
    kept, held = checkpointed(cluster)[victim.request_id], group.blocks.num_used
    before = victim.num_computed
    preempt(cluster, victim)
    assert victim.phase is Phase.STORED and victim.num_computed == kept
    assert len(cluster.swapped) == num_sent, "not a byte is copied"
    assert group.blocks.num_used < held
    totals = cluster.core.state.counters
    assert totals.checkpoint_frees == 1 and totals.freed_recomputed_tokens == before - kept
    cluster.core.check()
    group.touch()
    cluster.run()
    expect_all_well(cluster)
    assert totals.prefetched_blocks >= kept // BLOCK_SIZE


def test_what_a_piece_reads_stays_reserved_until_it_has_ended_though_its_request_is_gone() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 5)
    worker = cluster.core.state.workers[0]
    running = cluster.core.groups[0].queues.running
    cluster.run(stop=lambda: any(not s.num_pending for s in running.values()) and bool(worker.copying))
    name = next(iter(worker.copying))
    state = cluster.core.state.requests[name.partition("\0")[0]]
    blocks = set(worker.ledger.table(name).ids)
    if not state.num_pending:
        preempt(cluster, state)
    else:
        cluster.cancel(state.request_id, cluster.now / MS)
    cluster.run(until_ms=cluster.now / MS)
    assert blocks == set(worker.ledger.table(name).ids) and all(worker.ledger.is_held(b) for b in blocks)
    for group in cluster.core.groups.values():
        group.touch()
    cluster.run()
    expect_all_well(cluster)


def test_without_a_checkpoint_a_victim_is_queued_as_ever() -> None:
    cluster = harvesting(checkpoint_free=0.0)
    batch(cluster, 4)
    running = cluster.core.groups[0].queues.running
    cluster.run(stop=lambda: any(not s.num_pending and s.num_computed for s in running.values()))
    victim = next(s for s in running.values() if not s.num_pending and s.num_computed)
    preempt(cluster, victim)
    assert victim.phase is Phase.WAITING and victim.num_computed == 0
    assert cluster.core.state.counters.offline_discards == 1
    cluster.core.groups[0].touch()
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
    victim = until_victim(cluster)
    preempt(cluster, victim)
    group = cluster.core.groups[0]
    assert not list(group.queues.newcomers()) and group.queues.waiting_offline
    group.touch()
    cluster.run()
    expect_all_well(cluster)


# --- coming back


def test_it_comes_back_beside_steps_and_is_checkpointed_still() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 5)
    victim = until_victim(cluster, 24)
    kept = checkpointed(cluster)[victim.request_id]
    preempt(cluster, victim)
    cluster.core.groups[0].touch()
    num_sent = len(cluster.swapped)
    cluster.run(stop=lambda: victim.phase is Phase.RUNNING)
    back = [s for s in cluster.swapped[num_sent:] if s.from_host]
    assert back and all(s.beside_steps for s in back) and sum(len(s.src_blocks) for s in back) == kept // BLOCK_SIZE
    assert checkpointed(cluster)[victim.request_id] == kept, "freed again without copying anything again"
    cluster.run()
    expect_all_well(cluster)


def test_without_prefetching_steps_wait_for_what_comes_back() -> None:
    cluster = harvesting(prefix_caching=False, offline="scheduler+checkpoint")
    batch(cluster, 5)
    victim = until_victim(cluster)
    preempt(cluster, victim)
    cluster.core.groups[0].touch()
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
    original = cluster.core.handle

    def handle(event: object, now_ns: int) -> list[object]:
        actions = original(event, now_ns)  # type: ignore[arg-type]
        num = sum(len(a.src_blocks) for a in actions if isinstance(a, SendKV))
        carried[group.counters.num_steps] = carried.get(group.counters.num_steps, 0) + num
        return actions  # type: ignore[return-value]

    cluster.core.handle = handle  # type: ignore[method-assign,assignment]
    victim = until_victim(cluster)
    preempt(cluster, victim)
    group.touch()
    cluster.run()
    expect_all_well(cluster)
    assert max(carried.values()) == 3


def test_a_link_that_cannot_keep_up_means_computing_again() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 5)
    victim = until_victim(cluster)
    preempt(cluster, victim)
    cluster.core.ladder.rung("harvest")._budget_blocks = lambda group: 0  # type: ignore[attr-defined]
    cluster.core.groups[0].touch()
    cluster.run(stop=lambda: victim.phase in (Phase.WAITING, Phase.RUNNING))
    assert victim.num_computed == 0 or victim.phase is Phase.RUNNING
    assert cluster.core.state.counters.checkpoints_dropped == 1
    assert cluster.core.state.counters.prefetched_blocks == 0
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("host_slots", [0, 6, 20])
def test_a_full_pool_keeps_the_checkpoints_of_the_first_victims(host_slots: int) -> None:
    cluster = harvesting(prefix_caching=False, host_slots=host_slots)
    batch(cluster, 6, output=120)
    cluster.run(until_ms=250)
    found = checkpointed(cluster)
    if host_slots == 20:
        (pool,) = cluster.core.hosted.pools.values()
        assert pool.num_free < 8
        newest = list(cluster.core.groups[0].queues.running)[::-1]
        assert newest[0] in found, "the first victim"
        assert cluster.core.state.counters.checkpoints_dropped > 0
    cluster.run()
    expect_all_well(cluster)


# --- pausing


def test_offline_work_stops_before_anything_is_dropped_and_begins_again() -> None:
    def run(offline: str) -> FakeCluster:
        cluster = harvesting(policy="drop", num_workers=2, full_blocks=60, offline=offline, eager=True)
        batch(cluster, 16, output=150)
        chats(cluster, 6, 60.0, prompt=40, output=60)
        cluster.run()
        expect_all_well(cluster)
        return cluster

    def num(cluster: FakeCluster, kind: str) -> int:
        return sum(record.kind == kind for record in cluster.records)

    harvested, by_priority = run("scheduler"), run("priority")
    assert num(harvested, "offline_paused") == num(harvested, "offline_resumed") > 0
    assert num(harvested, "drop") == 0 < num(by_priority, "drop")


def test_a_paused_group_lets_no_offline_request_in() -> None:
    cluster = harvesting(full_blocks=60, offline="scheduler")
    batch(cluster, 10, output=150)
    chats(cluster, 4, 50.0, prompt=40, output=80)
    group = cluster.core.groups[0]
    cluster.run(stop=lambda: group.queues.pauses_offline)
    assert group.queues.pauses_offline
    while group.queues.pauses_offline and cluster.heap:
        cluster.run(max_events=10**6, stop=lambda n=cluster.num_steps: cluster.num_steps > n)
        if group.queues.pauses_offline:
            assert not any(s.num_pending for s in group.queues.running_offline())
    cluster.run()
    expect_all_well(cluster)


# --- beside everything else


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_that_fails_costs_a_checkpoint_and_nothing_else(seed: int) -> None:
    cluster = harvesting(seed=seed, faults=Faults(swap=0.3, budget=8))
    batch(cluster, 8, prefix=16)
    chats(cluster, 8, 60.0)
    cluster.run()
    assert cluster.num_faults > 0
    expect_all_well(cluster)


@pytest.mark.parametrize("seed", range(6))
def test_cancels_at_any_moment_give_everything_back(seed: int) -> None:
    cluster = harvesting(num_workers=2, full_blocks=50, seed=seed)
    batch(cluster, 14, prefix=8 * (seed % 2))
    chats(cluster, 10, 40.0)
    rng = random.Random(seed)
    for i in range(0, 14, 2):
        cluster.cancel(f"batch-{i}", rng.uniform(10, 300))
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("num_requests", [0, 100])
def test_a_drop_begins_as_soon_with_a_hundred_checkpoints_as_with_none(num_requests: int) -> None:
    cluster = harvesting(
        policy="drop", num_workers=2, full_blocks=1200, host_slots=3000, max_seqs=64, max_tokens=128,
        checkpoint_free=1.0, auto_restore=False,
    )
    cluster.check_every_event = False
    batch(cluster, 100, output=400)
    if not num_requests:
        cluster.core.reconfigure(cluster.core.params)  # alike but for the rungs
        for worker in cluster.core.state.workers.values():
            worker.pool._free.clear() if not num_requests else None
            worker.pool.num_slots = 0
    cluster.run(stop=lambda: len(checkpointed(cluster)) >= 90 if num_requests else cluster.now > 400 * MS)
    assert len(checkpointed(cluster)) >= (90 if num_requests else 0)
    num_events = len(cluster.log)
    cluster.order("drop")
    assert len(cluster.core.merges) == 1 and not any(s.num_pending < 0 for s in cluster.core.state.requests.values())
    cluster.run(stop=lambda: bool(cluster.core.state.pipelines))
    kinds = [kind for _, kind in cluster.log[num_events:]]
    assert kinds.count("TransferEnded") <= 2 + len(cluster.core.state.workers) * 2
    assert len([k for k in kinds if k not in ("TransferEnded", "Tick")]) <= 8
    kept = checkpointed(cluster)
    if num_requests:
        assert len(kept) >= 90, "they have gone along"


@pytest.mark.parametrize("seed", range(5))
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

    def victims() -> list[RequestState]:
        found = checkpointed(cluster)
        groups = cluster.core.state.pipelines.values()
        return [
            s for g in groups for r, s in g.queues.running.items()
            if found.get(r) and not (s.num_pending or s.transfers or s.remote or s.paused)
        ]

    cluster.run(stop=lambda: bool(victims()) and not cluster.core.in_transition)
    victim = victims()[0]
    preempt(cluster, victim)
    assert victim.phase is Phase.STORED
    cluster.sent.clear()
    cluster.core.groups[victim.group_id].touch()
    cluster.run(stop=lambda: victim.phase is Phase.RUNNING)
    assert any(s.from_host and s.src != s.dst for s in cluster.sent), "a stage's part comes from another's pool"
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


@pytest.mark.parametrize("phase", [HostedPhase.CHECKPOINT, HostedPhase.STORED, HostedPhase.IN])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_death_loses_what_its_pool_had_and_no_request(phase: HostedPhase, num_workers: int) -> None:
    cluster = harvesting(policy="drop", num_workers=num_workers, full_blocks=50)
    batch(cluster, 14, output=120)
    chats(cluster, 14, 40.0)

    def there() -> bool:
        return any(e.phase is phase for e in cluster.core.hosted._entries.values())

    cluster.run(stop=there)
    assert there()
    entry = next(e for e in cluster.core.hosted._entries.values() if e.phase is phase)
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
    assert any(r.startswith("chat") for r in checkpointed(cluster))
    running = cluster.core.groups[0].queues.running
    cluster.run(stop=lambda: any(
        r.startswith("chat") and n and not running[r].num_pending for r, n in checkpointed(cluster).items()
    ))
    victim = next(running[r] for r, n in checkpointed(cluster).items() if r.startswith("chat") and n)
    if not victim.num_pending:
        preempt(cluster, victim)
        assert victim.phase is Phase.STORED
        cluster.core.groups[0].touch()
        cluster.run(stop=lambda: cluster.core.groups[0].blocks.landing != {} or victim.phase is not Phase.STORED)
    cluster.run()
    expect_all_well(cluster)


def test_other_rungs_can_be_put_in_their_place() -> None:
    cluster = harvesting(prefix_caching=False)
    batch(cluster, 8, output=120)
    victim = until_victim(cluster)
    preempt(cluster, victim)
    params = cluster.core.params
    from dataclasses import replace

    cluster.core.reconfigure(replace(params, rungs=("scale", "shed")))
    assert cluster.core.hosted.is_idle and victim.phase is Phase.WAITING
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("policy", ["swap", "swap+drop", "migrate+drop"])
@pytest.mark.parametrize("seed", range(3))
def test_beside_other_rungs(policy: str, seed: int) -> None:
    cluster = harvesting(policy=policy, num_workers=2, full_blocks=44, seed=seed)
    batch(cluster, 14, output=100)
    chats(cluster, 20, 40.0, output=60)
    cluster.run()
    assert any(isinstance(s, SendKV) and s.to_host for s in cluster.swapped) and RunStep
    expect_all_well(cluster)

"""Queues change groups only where that helps: after a merge and on ticks, under all policies but one."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from fakes import BLOCK_SIZE, SHARD_BYTES, FakeCluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.cost.hardware import BatchPoint, HardwareProfile
from jettison.cost.model import COEFFICIENTS, CostModel
from jettison.memory.stages import StagePlan
from jettison.policy.batching import BlockedBy
from jettison.types import LayerRange, ServiceClass

N_EXAMPLES = int(os.environ.get("JETTISON_EXAMPLES", "18"))

BATCH_LIMIT = 8
POINTS = tuple(BatchPoint(1, size, 64, rate) for size, rate in ((1, 200.0), (BATCH_LIMIT, 950.0), (16, 1000.0)))
STAGES = (StagePlan(0, LayerRange(0, 2)), StagePlan(1, LayerRange(2, 4)))
PROFILE = HardwareProfile(CostModel(4, *[1e-5] * len(COEFFICIENTS)), 1e9, 1e-4, 1e-3, 1e-11, 5e9, 1e9, POINTS)


def crowd(
    cluster: FakeCluster, outputs: dict[int, list[int]], service_class: ServiceClass = ServiceClass.ONLINE
) -> None:
    """For each group requests of 60 tokens that want so many more; all of them at once, each to its group."""
    rng = random.Random(0)
    dispatcher = cluster.core.dispatcher
    dispatched, places = dispatcher.place, {}

    def place(state: RequestState) -> bool:
        if state.request_id not in places:
            return dispatched(state)
        cluster.core.groups[places.pop(state.request_id)].queues.enqueue(state)
        return True

    dispatcher.place = place  # type: ignore[method-assign]
    for group_id, wanted in outputs.items():
        for i, output in enumerate(wanted):
            places[f"g{group_id}-{i}"] = group_id
            tokens = [rng.randrange(1, 60) for _ in range(60)]
            cluster.submit(f"g{group_id}-{i}", tokens, output, ignore_eos=True, service_class=service_class)


def merged_with_a_third(*, rebalance: bool = True, num_at_third: int = 0) -> FakeCluster:
    """Instances 0 and 1 run 8 requests each and have queues of 10; the third has places left. Then the first two merge,
    before any tick: the cluster as it is after the event in which the merged group has been formed."""
    cluster = FakeCluster(
        num_workers=3, full_blocks=134, max_seqs=64, max_tokens=2048, auto_restore=False, shard_bytes=4 * SHARD_BYTES,
        profile=PROFILE,
    )
    cluster.core.reconfigure(replace(cluster.core.params, rebalance=rebalance))
    crowd(cluster, {0: [60] * 18, 1: [60] * 18, 2: [60] * num_at_third})
    cluster.run(until_ms=30)
    groups = cluster.core.groups
    assert [len(g.queues.running) for g in groups.values()] == [BATCH_LIMIT, BATCH_LIMIT, num_at_third]
    assert [len(g.queues.waiting) for g in groups.values()] == [10, 10, 0]
    cluster.carry_out(cluster.core.moves.merge([groups[0], groups[1]], STAGES, cluster.now))
    cluster.run(stop=lambda: bool(cluster.core.state.pipelines))
    assert not any(name == "Tick" for _, name in cluster.log)
    return cluster


def kinds(cluster: FakeCluster) -> list[tuple[int, str]]:
    return [(r.time_ns, r.kind) for r in cluster.records if r.kind in ("drop", "rebalanced")]


def test_what_overflows_a_merged_group_goes_to_a_spare_instance_before_it_is_admitted() -> None:
    cluster = merged_with_a_third()
    (merged,), spare = cluster.core.state.pipelines.values(), cluster.core.groups[2]
    assert kinds(cluster) == [(cluster.now, "drop"), (cluster.now, "rebalanced")]
    # A pair's limit is 16, and 16 run: all 20 overflow. The spare instance takes what fills its batch, the oldest
    # first; whom nobody has a place for is admitted where it is, as without a limit.
    assert list(spare.queues.running) == [f"g0-{i}" for i in range(8, 16)] and not spare.queues.waiting
    cluster.run(stop=lambda: not merged.queues.waiting)
    assert len(merged.queues.running) + len(merged.queues.moving) == 16 + 20 - BATCH_LIMIT
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize(("rebalance", "num_at_third"), [(True, BATCH_LIMIT), (False, 0)])
def test_without_a_better_place_a_merged_group_admits_everybody(rebalance: bool, num_at_third: int) -> None:
    cluster = merged_with_a_third(rebalance=rebalance, num_at_third=num_at_third)
    (merged,) = cluster.core.state.pipelines.values()
    cluster.run(stop=lambda: not merged.queues.waiting)
    assert [kind for _, kind in kinds(cluster)] == ["drop"]
    assert len(merged.queues.running) + len(merged.queues.moving) == 16 + 20
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("restores", [True, False])
def test_newcomers_go_to_instances_while_a_pipeline_that_will_be_restored_is_as_loaded(restores: bool) -> None:
    """The pair holds as much as the third member for each of its members, and has room for 20 times more."""
    cluster = FakeCluster(num_workers=3, full_blocks=134, max_seqs=64, max_tokens=2048)
    params = cluster.core.params
    cluster.core.reconfigure(
        replace(params, auto_restore=restores, restore=replace(params.restore, min_settled_s=1e9))
    )
    cluster.carry_out(cluster.core.moves.merge([cluster.core.groups[0], cluster.core.groups[1]], STAGES, cluster.now))
    cluster.run(stop=lambda: not cluster.core.in_transition)
    (merged,), spare = cluster.core.state.pipelines.values(), cluster.core.groups[2]
    for i in range(15):
        cluster.submit(f"r{i}", [i] * 20, 60, cluster.now / 1e6 + 3 * i, ignore_eos=True)
    cluster.run(stop=lambda: merged.queues.num_served + spare.queues.num_served == 15)
    assert (merged.queues.num_served, spare.queues.num_served) == ((10, 5) if restores else (13, 2))
    cluster.core.reconfigure(params)
    cluster.run()
    cluster.expect_outputs()


@pytest.mark.parametrize("policy", ["recompute", "swap", "migrate"])
def test_what_memory_keeps_out_of_one_instance_goes_to_another_with_room(policy: str) -> None:
    cluster = FakeCluster(policy=policy, full_blocks=134, max_seqs=64, max_tokens=2048, migrate_threshold=-1e9)
    crowd(cluster, {0: [60] * 18, 1: [3, 3]})
    cluster.run(until_ms=99)
    full, spare = cluster.core.groups.values()
    assert full.head_blocked_by is BlockedBy.MEMORY and not spare.queues.running and not spare.queues.waiting
    num_waiting = len(full.queues.waiting)
    cluster.run(until_ms=100)
    moved = cluster.core.state.counters.num_rebalanced
    assert moved == len(spare.queues.running) and moved + len(full.queues.waiting) == num_waiting
    assert moved > 0
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


class Witness:
    """Holds every rebalancing of a cluster against the rule as it is said."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.num_moved = 0
        self.asked_in_time: set[int] = set()
        """Pipelines for which it was called before they had planned a step."""
        dispatcher = cluster.core.dispatcher
        self._rebalance = dispatcher.rebalance
        dispatcher.rebalance = self.rebalance  # type: ignore[method-assign]

    def rebalance(self, now_ns: int) -> list[object]:
        core = self.cluster.core
        groups = core.groups
        self.asked_in_time |= {i for i, g in core.state.pipelines.items() if not g.counters.num_steps}
        queues = {i: list(g.queues.waiting) for i, g in groups.items()}
        places = {i: self.num_places(g) for i, g in groups.items()}
        blocks = {i: g.blocks.num_free - g.blocks.watermark for i, g in groups.items()}
        busy = core.ladder.worker_ids() | core.moves.moving_workers()
        takers = [
            i for i, g in groups.items()
            if g.blocks.admission_cap is None and busy.isdisjoint(g.worker_ids) and places[i] > len(queues[i])
        ]
        too_large = {s.request_id for g in groups.values() for s in g.oversized()}
        actions = self._rebalance(now_ns)
        before = {s.request_id: i for i, queue in queues.items() for s in queue}
        after = {s.request_id: i for i, g in groups.items() for s in g.queues.waiting}
        assert before.keys() == after.keys(), "a request is lost"
        assert len(after) == sum(len(g.queues.waiting) for g in groups.values()), "a request is there twice"
        if too_large:
            return actions  # they may go anywhere, and change what is free there
        arrived: dict[int, list[RequestState]] = {}
        for i, queue in queues.items():
            kept_out = max(0, places[i]) if groups[i].head_blocked_by is not BlockedBy.MEMORY else 0
            for position, state in enumerate(queue):
                to = after[state.request_id]
                if to != i:
                    assert position >= kept_out, "it had a place, and room"
                    arrived.setdefault(to, []).append(state)
        assert not arrived or core.params.rebalance
        for to, states in arrived.items():
            need = sum(groups[to].limits.blocks_for(s.num_tokens) for s in (*queues[to], *states))
            assert to in takers and len(queues[to]) + len(states) <= places[to] and need <= blocks[to], "no better"
        self.num_moved += sum(map(len, arrived.values()))
        self.check_rest(takers, places, blocks)
        return actions

    def check_rest(self, takers: list[int], places: dict[int, int], blocks: dict[int, int]) -> None:
        """Who overflows a batch and stays has nowhere to go."""
        core = self.cluster.core
        if not core.params.rebalance:
            return
        for i, group in core.groups.items():
            for state in list(group.queues.waiting)[max(0, places[i]) :]:
                for to in takers:
                    there = core.groups[to]
                    need = sum(there.limits.blocks_for(s.num_tokens) for s in (*there.queues.waiting, state))
                    is_full = len(there.queues.waiting) >= places[to]
                    assert is_full or need > blocks[to], "it was left where it cannot run"

    def num_places(self, group: Group) -> int:
        core = self.cluster.core
        limit = min((core.params.batch_limit or 10**9) * len(group.stages), core.state.limits.max_num_seqs)
        return limit - len(group.queues.running) - len(group.queues.moving)


@pytest.mark.slow
@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    num_workers=st.integers(2, 5),
    policy=st.sampled_from(["drop", "drop", "drop", "recompute", "swap", "migrate"]),
    limit=st.sampled_from([1, 2, 4, 8, None]),
    full_blocks=st.integers(14, 50),
    rebalance=st.sampled_from([True, True, True, False]),
    drops_ms=st.lists(st.floats(0, 400), max_size=3),
)
def test_nobody_is_lost_and_nobody_moves_while_there_is_nowhere_better(
    seed: int, num_workers: int, policy: str, limit: int | None, full_blocks: int, rebalance: bool,
    drops_ms: list[float],
) -> None:
    rng = random.Random(seed)
    cluster = FakeCluster(num_workers=num_workers, full_blocks=full_blocks, seed=seed, policy=policy, eager=True)
    cluster.core.reconfigure(replace(cluster.core.params, batch_limit=limit, rebalance=rebalance))
    witness = Witness(cluster)
    for i in range(rng.randint(4, 12) * num_workers):
        prompt = [rng.randrange(1, 60) for _ in range(rng.randint(1, 24))]
        most = min(90, full_blocks * BLOCK_SIZE - len(prompt) - BLOCK_SIZE)
        cluster.submit(f"r{i}", prompt, rng.randint(1, most), rng.uniform(0, 60), priority=rng.choice([0, 0, 0, 1]))
    for at_ms in drops_ms if policy == "drop" else ():
        cluster.order_at("drop", at_ms)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert {r.fields["group"] for r in cluster.records if r.kind == "drop"} <= witness.asked_in_time
    assert rebalance or witness.num_moved == 0


def test_no_instance_stands_still_while_offline_requests_wait_at_another() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=200, max_seqs=4, policy="recompute")
    crowd(cluster, {0: [40] * 60, 1: [2]}, ServiceClass.OFFLINE)
    cluster.run(until_ms=99)
    assert [g.queues.num_served for g in cluster.core.groups.values()] == [4, 0, 0]
    looked = []

    def look() -> bool:
        if cluster.log and cluster.log[-1][1] == "Tick":
            groups = cluster.core.groups.values()
            waits = any(len(g.queues.waiting_offline) > 1 for g in groups)
            looked.append(waits)
            assert not waits or all(g.in_flight for g in groups), "an instance stands still"
        return False

    cluster.run(stop=look)
    assert sum(looked) >= 2 and cluster.core.state.counters.num_rebalanced >= 30
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_offline_requests_go_nowhere_where_something_waits() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=500, max_seqs=4, policy="recompute")
    crowd(cluster, {0: [400] * 20, 1: [400] * 6}, ServiceClass.OFFLINE)
    cluster.run(until_ms=350)
    assert sum(name == "Tick" for _, name in cluster.log) >= 3
    assert [len(g.queues.waiting_offline) for g in cluster.core.groups.values()] == [16, 2]


def groups_of_chat(offline: str, *, num_at_first: int, num_at_second: int) -> list[int]:
    """How many go to each instance of 8 online requests that come one after the other, beside
    so many long offline ones of each."""
    cluster = FakeCluster(full_blocks=134, max_seqs=64, max_tokens=256, offline=offline, prefix_caching=False)
    crowd(cluster, {0: [400] * num_at_first, 1: [400] * num_at_second}, ServiceClass.OFFLINE)
    cluster.run(until_ms=50)
    held = [g.blocks.num_used for g in cluster.core.groups.values()]
    assert [bool(num) for num in held] == [bool(num_at_first), bool(num_at_second)]
    for i in range(8):
        cluster.submit(f"chat-{i}", [i] * 20, 60, 50.0 + 3 * i, ignore_eos=True)
    cluster.run(until_ms=80)
    chat = [s.group_id for s in cluster.core.state.requests.values() if not s.is_offline]
    return [chat.count(0), chat.count(1)]


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 8), (8, 1), (8, 0), (6, 7)])
def test_online_requests_go_where_they_would_without_what_is_harvested(first: int, second: int) -> None:
    assert groups_of_chat("harvest", num_at_first=first, num_at_second=second) == [4, 4]


def test_by_priority_alone_memory_that_a_batch_holds_is_gone() -> None:
    assert groups_of_chat("priority", num_at_first=1, num_at_second=8) == [8, 0]


def test_online_requests_that_memory_keeps_out_go_to_where_a_batch_makes_way() -> None:
    """The second instance is full of offline requests, which give their blocks up when an online one needs them."""
    cluster = FakeCluster(full_blocks=134, max_seqs=64, max_tokens=2048, offline="harvest", policy="recompute")
    crowd(cluster, {1: [400] * 9}, ServiceClass.OFFLINE)
    cluster.run(until_ms=40)
    crowd(cluster, {0: [60] * 18})
    cluster.run(until_ms=99)
    full, batch = cluster.core.groups.values()
    assert full.head_blocked_by is BlockedBy.MEMORY and not batch.queues.waiting
    assert batch.blocks.num_free - batch.blocks.watermark < full.limits.blocks_for(60), "by itself it has no room"
    cluster.run(until_ms=100)
    assert cluster.core.state.counters.num_rebalanced
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()

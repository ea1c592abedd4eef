"""Groups with requests of both classes: online ones as if they were alone, offline ones in what is left."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fakes import FakeCluster
from test_group import Bench

from jettison.core.ports import RunStep
from jettison.core.requests import RequestState
from jettison.core.serving.sharedsteps import held_by_online
from jettison.cost.model import CostModel
from jettison.cost.predictor import StepTimePredictor
from jettison.policy.batching import BlockedBy
from jettison.policy.lookahead import LookaheadParams
from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.slo import Pace
from jettison.policy.standing import Foreseen
from jettison.types import FinishReason, Request, SamplingParams, ServiceClass

MS = 1_000_000
COST = CostModel(
    4, pair_layer_s=0.0, kv_token_layer_s=0.0, token_layer_s=0.25e-3, layer_s=0.25e-3, step_s=0.0, entry_s=0.0,
    entry_token_s=0.0, head_s=0.0, sample_s=0.0,
)  # fmt: skip
"""A step takes 1 ms and 1 ms a token."""
NO_SLO = SloParams()

Row = tuple[str, int, int]


class SharedBench(Bench):
    """A bench of a group that keeps objectives, with a clock of its own."""

    def __init__(
        self, num_blocks: int = 100, num_stages: int = 1, *, slo: SloParams = NO_SLO, cost: CostModel | None = COST,
        offline: OfflineParams | None = None, **limits: object,
    ) -> None:
        super().__init__(num_blocks, num_stages, **limits)
        pace = Pace(replace(offline or OfflineParams(fill="objective"), slo=slo), StepTimePredictor(4, cost))
        self.group.pace = lambda: pace
        self.now_ns = 0

    def ask_offline(self, name: str, prompt: int, arrival_ns: int = 0) -> RequestState:
        params = SamplingParams(max_tokens=50)
        request = Request(
            name, tuple(range(100, 100 + prompt)), params, arrival_ns, service_class=ServiceClass.OFFLINE
        )
        state = RequestState(request, self.steps)
        self.steps += 1
        self.group.queues.enqueue(state)
        return state

    def plan(self) -> RunStep | None:
        self.steps += 1
        step = self.group.next_step(self.steps, self.now_ns)
        self.group.check()
        return step


def rows(step: RunStep | None) -> list[Row]:
    return [] if step is None else [(r.state.request_id, r.context_len, r.num_tokens) for r in step.rows]


# --- what a step may take


def test_offline_tokens_fill_a_step_up_to_the_gap_between_two_tokens() -> None:
    bench = SharedBench(slo=SloParams(tpot_s=0.0105), enable_prefix_caching=False)
    bench.ask("chat", 4)
    bench.ask_offline("batch", 40)
    assert bench.step() == [("chat", 0, 4), ("batch", 0, 5)]
    assert bench.step() == [("chat", 4, 1), ("batch", 5, 8)]  # 1 + 9 ms of 10.5


def test_steps_are_filled_to_the_knee_and_not_while_prompts_saturate_them() -> None:
    """A decode takes 2 ms here and each further token 1: beside one decode the knee of 32 ms is at 8."""
    bench = SharedBench(slo=SloParams(tpot_s=0.032), offline=OfflineParams(), enable_prefix_caching=False)
    bench.ask("chat", 10)
    bench.ask_offline("batch", 80)
    assert bench.step() == [("chat", 0, 10)]
    assert bench.step() == [("chat", 10, 1), ("batch", 0, 6)]


def test_the_papers_rule_fills_to_ttft_where_no_request_decodes_whatever_they_have_waited() -> None:
    slo = SloParams(tpot_s=0.0105, ttft_s=0.0125)
    bench = SharedBench(slo=slo, offline=OfflineParams(fill="paper"), enable_prefix_caching=False)
    bench.ask("chat", 4)
    bench.ask_offline("batch", 60)
    bench.now_ns = 15 * MS
    assert bench.step() == [("chat", 0, 4), ("batch", 0, 7)]
    assert bench.step() == [("chat", 4, 1), ("batch", 7, 8)]


def test_steps_are_not_filled_while_online_requests_are_foreseen_to_lack_memory() -> None:
    bench = SharedBench(20, slo=SloParams(tpot_s=1.0), enable_prefix_caching=False)
    bench.ask("chat", 4, max_tokens=20)
    bench.ask_offline("batch", 16)
    assert [r for r, *_ in bench.step()] == ["chat", "batch"], "nothing was foreseen yet"
    for growth, rows in ((30, ["chat"]), (5, ["chat", "batch"]), (18, ["chat", "batch"]), (19, ["chat"])):
        bench.group.foreseen = held_by_online(bench.group, growth)
        assert [r for r, *_ in bench.step()] == rows, f"{bench.group.foreseen}"


def test_what_offline_requests_share_or_bring_back_is_not_held_by_online_ones() -> None:
    bench = SharedBench(20, slo=SloParams(tpot_s=1.0))
    for name in ("first", "second", "third"):
        bench.ask_offline(name, 24)  # the same prompt: six blocks that all of them hold
    for _ in range(8):
        bench.step()
    assert bench.group.blocks.num_used >= 7
    bench.ask("chat", 4)
    assert "first" in [r for r, *_ in bench.step()]
    assert held_by_online(bench.group, 0) == Foreseen(1, 0, 20, 1)


def test_blocks_that_online_requests_share_count_once_where_that_matters() -> None:
    bench = SharedBench(20, slo=SloParams(tpot_s=1.0))
    for name in ("first", "second", "third"):
        bench.ask(name, 24)
        bench.step()
    several = held_by_online(bench.group, 0)
    assert several.fits and several.held_blocks > bench.group.blocks.num_used
    assert held_by_online(bench.group, 15).held_blocks == bench.group.blocks.num_used
    everything = bench.group.queues.running
    distinct = {i for name in everything for i in bench.group.blocks.ledgers[0].table(name).ids}
    assert bench.group.blocks.num_distinct(everything) == len(distinct)


def test_what_a_first_token_has_waited_bounds_what_shares_its_step() -> None:
    bench = SharedBench(slo=SloParams(tpot_s=0.0165), enable_prefix_caching=False)
    bench.ask_offline("batch", 40)
    bench.ask("chat", 4)
    bench.now_ns = 19 * MS // 2
    assert bench.step() == [("chat", 0, 4), ("batch", 0, 2)]  # 7 of 16.5 ms are left
    assert bench.step() == [("chat", 4, 1), ("batch", 2, 14)]


def test_nothing_is_filled_into_a_prompt_that_is_late_nor_where_nothing_is_known() -> None:
    late = SharedBench(slo=SloParams(ttft_s=0.02, tpot_s=0.0105))
    unknown = SharedBench(cost=None)
    for bench in (late, unknown):
        bench.ask("chat", 4)
        bench.ask_offline("batch", 40)
        bench.now_ns = 30 * MS
        assert bench.step() == [("chat", 0, 4)]
    assert unknown.step() == [("chat", 4, 1)]


def test_offline_requests_alone_take_as_many_prompt_tokens_as_saturate_beside_their_decodes() -> None:
    bench = SharedBench(max_num_batched_tokens=100, enable_prefix_caching=False)
    for name in ("first", "second"):
        bench.ask_offline(name, 96)
    assert bench.step() == [("first", 0, 16)]  # 16 tokens in 17 ms are 0.95 of 100 in 101
    assert bench.step() == [("first", 16, 17)]


def test_offline_requests_alone_take_no_more_than_the_largest_batch() -> None:
    bench = SharedBench(slo=SloParams(ttft_s=0.002, tpot_s=0.002), max_num_batched_tokens=4)
    bench.ask_offline("batch", 40)
    assert [bench.step(), bench.step()] == [[("batch", 0, 4)], [("batch", 4, 4)]]
    alone = SharedBench(cost=None)
    alone.ask_offline("batch", 40)
    assert alone.step() == [("batch", 0, 16)]


def test_a_named_gap_bounds_online_prompts_too_and_a_worked_out_one_does_not() -> None:
    named = SharedBench(
        slo=SloParams(tpot_s=0.0105), offline=OfflineParams(serves=False, slo_aware=False),
        enable_prefix_caching=False, max_num_batched_tokens=64,
    )
    default = SharedBench(enable_prefix_caching=False, max_num_batched_tokens=64)
    for bench, expected in ((named, 16), (default, 40)):  # 16: the least, as 8 would fit
        bench.ask("chat", 4)
        bench.step()
        bench.ask("new", 40)
        assert bench.step() == [("chat", 4, 1), ("new", 0, expected)]


def test_by_priority_alone_nothing_is_bounded_and_nobody_evicted_for_a_newcomer() -> None:
    bench = SharedBench(
        6, slo=SloParams(tpot_s=0.003), offline=OfflineParams(slo_aware=False), enable_prefix_caching=False
    )
    bench.ask_offline("batch", 20)
    bench.step()
    bench.ask("chat", 8)
    assert bench.step() == [("batch", 16, 4)] and bench.group.head_blocked_by is BlockedBy.MEMORY


# --- who gives way


def test_a_newcomer_evicts_the_newest_offline_requests_and_sees_no_lack_of_memory() -> None:
    bench = SharedBench(20, slo=SloParams(tpot_s=1.0), enable_prefix_caching=False)
    old, new = bench.ask_offline("old", 12), bench.ask_offline("new", 12)
    bench.step()
    bench.step()
    bench.ask("chat", 60)
    assert bench.step() == [("chat", 0, 16)]
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    assert bench.group.head_blocked_by is None
    assert bench.step() == [("chat", 16, 16)]


def test_the_prefix_that_an_evicted_request_leaves_in_the_cache_is_found_and_counted() -> None:
    bench = SharedBench(8, slo=SloParams(tpot_s=1.0))
    bench.ask_offline("batch", 28)
    for _ in range(3):
        bench.step()
    bench.ask("chat", 30)  # begins with the same 28 tokens
    assert bench.step() == [("chat", 28, 2)]


def test_places_go_to_online_requests() -> None:
    bench = SharedBench(slo=SloParams(tpot_s=1.0))
    states = [bench.ask_offline(f"batch-{i}", 2) for i in range(4)]
    bench.step()
    bench.ask("chat", 4)
    assert [r for r, *_ in bench.step()] == ["chat"]
    assert [s.num_preemptions for s in states] == [0, 0, 0, 1]
    assert [r for r, *_ in bench.step()] == ["chat", "batch-0", "batch-1", "batch-2"]


@pytest.mark.parametrize("seed", range(12))
def test_online_requests_are_served_step_by_step_as_if_they_were_alone(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, prefill_first = rng.choice([14, 20, 60]), rng.random() < 0.3
    benches = [
        SharedBench(num_blocks, enable_prefix_caching=False, prefill_first=prefill_first, watermark=0.05)
        for _ in range(2)
    ]
    shared, alone = benches
    num_offline_tokens = 0
    for i in range(150):
        if rng.random() < 0.15:
            prompt, output = rng.randint(1, 30), rng.randint(1, 14)
            for bench in benches:
                bench.steps = i
                bench.ask(f"chat-{i}", prompt, max_tokens=output)
        if rng.random() < 0.4:
            shared.ask_offline(f"batch-{i}", rng.randint(1, 30), MS * i)
        shared.now_ns = alone.now_ns = MS * i
        steps = [bench.plan() for bench in benches]
        online = [[row for row in rows(step) if row[0].startswith("chat")] for step in steps]
        assert online[0] == online[1]
        num_offline_tokens += sum(num for name, _, num in rows(steps[0]) if name.startswith("batch"))
        if not shared.group.queues.has_offline or any(r[0].startswith("chat") for r in rows(steps[0])):
            assert shared.group.head_blocked_by == alone.group.head_blocked_by
        for bench, step in zip(benches, steps, strict=True):
            if step is not None:
                bench.commit(step)
    assert num_offline_tokens > 20
    assert alone.group.counters.num_preemptions <= shared.group.counters.num_preemptions


# --- pipelines


def test_microbatches_planned_ahead_are_filled() -> None:
    bench = SharedBench(
        num_stages=2, slo=SloParams(tpot_s=1.0), enable_prefix_caching=False,
        lookahead=LookaheadParams(enabled=True, min_tokens=8),
    )
    bench.ask("chat", 16)
    bench.ask_offline("batch", 40)
    assert rows(bench.plan()) == [("chat", 0, 8), ("batch", 0, 8)]
    assert rows(bench.plan()) == [("chat", 8, 8), ("batch", 8, 8)]


def test_a_newcomer_in_a_pipeline_waits_for_what_is_in_flight_and_no_longer() -> None:
    bench = SharedBench(8, num_stages=2, slo=SloParams(tpot_s=1.0), enable_prefix_caching=False)
    for i in range(2):
        bench.ask_offline(f"batch-{i}", 14)
    first, second = bench.plan(), bench.plan()
    assert first is not None and second is not None
    bench.ask("chat", 24)
    assert bench.plan() is None
    bench.commit(first)
    assert bench.plan() is None, "the rest of the room is in flight"
    bench.commit(second)
    assert [r for r, *_ in rows(bench.plan())] == ["chat"]


# --- clusters


def test_offline_requests_are_refused_where_they_are_not_served() -> None:
    cluster = FakeCluster(num_workers=1)
    cluster.core.reconfigure(replace(cluster.core.params, offline=OfflineParams(serves=False)))
    cluster.submit("chat", [5] * 10, 20)
    cluster.submit("batch", [5] * 10, 20, service_class=ServiceClass.OFFLINE)
    cluster.run()
    assert cluster.ends["batch"] == [FinishReason.ERROR]
    assert cluster.errors["batch"] == "No offline requests are taken here: --offline is none."
    assert cluster.ends["chat"] != [FinishReason.ERROR]
    cluster.expect_nothing_left()


@pytest.mark.parametrize("policy", ["drop", "recompute", "swap+migrate+drop"])
@pytest.mark.parametrize("seed", range(3))
def test_both_classes_come_through_pressure_and_moves(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    cluster = FakeCluster(
        num_workers=3, full_blocks=24, seed=seed, policy=policy, eager=True, prefix_caching=seed != 1,
        prefill_first=seed == 2, max_seqs=6,
    )
    offline = OfflineParams(fills_after_eviction=seed == 0, slo=SloParams(tpot_s=0.02 if seed else None))
    cluster.core.reconfigure(replace(cluster.core.params, offline=offline))
    for i in range(60):
        is_offline = rng.random() < 0.5
        cluster.submit(
            f"r{i}", [rng.randrange(1, 60) for _ in range(rng.randint(1, 50))], rng.randint(1, 50),
            rng.uniform(0, 400), service_class=ServiceClass.OFFLINE if is_offline else ServiceClass.ONLINE,
        )
    cluster.order_at("drop", 60)
    cluster.order_at("restore", 250)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


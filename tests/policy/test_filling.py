"""Both classes in one step: online requests as if they were alone, offline ones in what is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.cost.model import CostModel
from jettison.cost.predictor import StepTimePredictor
from jettison.cost.stepwork import StepWork
from jettison.policy.batching import (
    BatchLimits,
    BatchPlan,
    BatchView,
    BlockedBy,
    RunningRow,
    VictimRow,
    WaitingRow,
    plan_batch,
    plan_prefill_first,
)
from jettison.policy.filling import (
    LEAST_PROMPT_TOKENS,
    OfflineView,
    chunks_of,
    plan_alone,
    plan_beside,
    plan_online_part,
    plan_within,
)
from jettison.policy.slo import NO_LIMIT, StepBudget, step_budget

COST = CostModel(
    4, pair_layer_s=1e-8, kv_token_layer_s=1e-7, token_layer_s=1e-5, layer_s=1e-3, step_s=1e-4, entry_s=0.0,
    entry_token_s=0.0, head_s=1e-4, sample_s=1e-5,
)  # fmt: skip
LIMITS = BatchLimits(max_num_tokens=100, max_num_seqs=8, watermark_blocks=0, block_size=4)


def predictor() -> StepTimePredictor:
    return StepTimePredictor(4, COST)


def decode(name: str, room: int = 1, in_flight: bool = False, context: int = 10) -> RunningRow:
    return RunningRow(name, 1, room, in_flight, False, context)


def prompt(name: str, tokens: int, context: int = 0) -> RunningRow:
    return RunningRow(name, tokens, tokens, False, True, context)


def waiting(name: str, tokens: int, cached: int = 0, at_risk: int = 0) -> WaitingRow:
    return WaitingRow(name, tokens, cached, -(-tokens // 4), num_blocks_at_risk=at_risk)


def online(running: Sequence[RunningRow] = (), queue: Sequence[WaitingRow] = (), free: int = 1000) -> BatchView:
    victims = [VictimRow(r.request_id, 2) for r in reversed(running) if not r.in_flight]
    return BatchView(7, running, len(running), queue, lambda: victims, free)


def offline(
    running: Sequence[RunningRow] = (), queue: Sequence[WaitingRow] = (), hosted: dict[str, int] | None = None
) -> OfflineView:
    hosted = hosted or {}
    victims = [
        VictimRow(r.request_id, 2, hosted.get(r.request_id, 0)) for r in reversed(running) if not r.in_flight
    ]
    return OfflineView(running, len(running), queue, lambda: victims, any(r.in_flight for r in running))


def beside(
    on: BatchView, off: OfflineView, budget: StepBudget = NO_LIMIT, limits: BatchLimits = LIMITS, **knobs: bool
) -> BatchPlan:
    return plan_beside(on, off, limits, lambda view: plan_batch(view, limits), lambda _: budget, **knobs)


def names(plan: BatchPlan) -> list[str]:
    return [c.request_id for c in plan.chunks] + [a.request_id for a in plan.admissions]


def seconds(chunks: Sequence[tuple[int, int]]) -> float:
    took = predictor().predict_s(StepWork.of(chunks))
    assert took is not None
    return took


# --- filling


def test_offline_decodes_prompts_and_newcomers_fill_what_is_left() -> None:
    on = online([decode("a"), prompt("p", 20)])
    plan = beside(on, offline([prompt("y", 30), decode("x")], [waiting("w", 90), waiting("v", 4)]))
    assert names(plan) == ["a", "p", "x", "y", "w"]
    assert sum(c.num_tokens for c in plan.chunks) + plan.admissions[0].num_tokens == 100


def test_the_time_bounds_what_fills_a_step_and_not_what_is_online() -> None:
    on = online([decode("a", context=40), prompt("p", 20)])
    off = offline([decode("x"), decode("y"), prompt("z", 50, 8)], [waiting("w", 90)])
    exact = seconds([(1, 40), (20, 0), (1, 10), (1, 10), (30, 8)])
    plan = beside(on, off, step_budget(predictor(), exact, 1))
    assert [(c.request_id, c.num_tokens) for c in plan.chunks] == [("a", 1), ("p", 20), ("x", 1), ("y", 1), ("z", 30)]
    one = beside(on, off, step_budget(predictor(), seconds([(1, 40), (20, 0), (1, 10)]), 1))
    assert names(one) == ["a", "p", "x"]
    assert names(beside(on, off, step_budget(predictor(), 0.0, 1))) == ["a", "p"]
    assert names(beside(on, off, step_budget(StepTimePredictor(4), 9.0, 1))) == ["a", "p"], "nothing is known"


def test_newcomers_are_cut_to_the_time_too() -> None:
    on = online([decode("a", context=40)])
    budget = step_budget(predictor(), seconds([(1, 40), (9, 0), (21, 4)]), 1)
    plan = beside(on, offline((), [waiting("w", 9), waiting("v", 60, cached=4), waiting("u", 4)]), budget)
    assert [(a.request_id, a.num_tokens) for a in plan.admissions] == [("w", 9), ("v", 21)]


def test_bytes_that_a_step_waits_for_are_part_of_its_time() -> None:
    budget = step_budget(predictor(), seconds([(1, 10), (1, 10)]), 1, copies=(1 << 30, 0))
    assert names(beside(online([decode("a")]), offline([decode("x")]), budget)) == ["a"]


def test_where_nothing_online_runs_work_goes_on_whatever_the_budget() -> None:
    off = offline([prompt("z", 50, 8)], [waiting("w", 90)])
    blocked = online((), [waiting("head", 400)], free=20)
    plan = beside(blocked, off, step_budget(predictor(), 0.0, 1))
    assert [(c.request_id, c.num_tokens) for c in plan.chunks] == [("z", LEAST_PROMPT_TOKENS)]
    assert plan.head_blocked_by is BlockedBy.MEMORY
    assert beside(blocked, off, step_budget(predictor(), 0.0, 1), is_busy=True).is_empty


# --- evicting


def test_those_in_host_pools_are_evicted_first_then_the_newest_and_no_more_than_needed() -> None:
    on = online([decode("a", 0), decode("b", 0), decode("c", 0)], free=0)
    off = offline([decode("w"), decode("x"), decode("y"), decode("z")], hosted={"x": 16, "w": 8})
    plan = beside(on, off)
    assert plan.preemptions == ("x", "w") and names(plan) == ["a", "b", "c"]
    assert beside(on, offline([decode("w"), decode("x"), decode("y")])).preemptions == ("y", "x")
    assert beside(on._replace(num_free_blocks=3), off).preemptions == ()


def test_a_newcomer_evicts_and_sees_no_lack_of_memory_where_that_suffices() -> None:
    off = offline([decode("x"), decode("y"), decode("z")])
    plan = beside(online((), [waiting("new", 16)], free=1), off)
    assert plan.preemptions == ("z", "y") and names(plan) == ["new"] and plan.head_blocked_by is None
    plan = beside(online((), [waiting("new", 40)], free=1), off)
    assert not plan.preemptions and plan.head_blocked_by is BlockedBy.MEMORY, "nobody is evicted in vain"
    assert names(plan) == ["x", "y", "z"]


def test_a_cached_prefix_that_only_the_evicted_hold_counts_as_needed() -> None:
    off = offline([decode("x"), decode("y"), decode("z")])
    plan = beside(online((), [waiting("new", 16, cached=8, at_risk=2)], free=1), off)
    assert plan.preemptions == ("z", "y", "x")


def test_a_step_that_evicts_is_filled_only_where_that_is_asked_for() -> None:
    on, off = online([decode("a", 0)], free=0), offline([decode("x"), decode("y"), decode("z")], [waiting("w", 4)])
    assert names(beside(on, off)) == ["a"]
    assert names(beside(on, off, fills_after_eviction=True)) == ["a", "x", "y"]


def test_places_are_taken_from_offline_requests_only_where_one_is_needed() -> None:
    off = offline([decode(f"x{i}") for i in range(6)])
    plan = beside(online([decode("a")], [waiting("b", 4)]), off)
    assert not plan.preemptions and names(plan)[:2] == ["a", "x0"] and plan.admissions[0].request_id == "b"
    plan = beside(online([decode("a")], [waiting("b", 4), waiting("c", 4)]), off)
    assert plan.preemptions == ("x5",) and names(plan) == ["a", "b", "c"] and plan.head_blocked_by is None


def test_who_is_in_flight_keeps_its_place_and_a_kept_out_head_drains_the_pipeline() -> None:
    off = offline([decode("x", in_flight=True), decode("y", in_flight=True), decode("z")])
    newcomers = [waiting("b", 4), waiting("c", 4)]
    plan = beside(online([decode("a")], newcomers), off, limits=LIMITS._replace(max_num_seqs=4))
    assert plan.preemptions == ("z",) and plan.head_blocked_by is BlockedBy.SEQUENCES and names(plan) == ["a", "b"]
    plan = beside(online((), [waiting("b", 40)], free=3), off)
    assert plan.is_empty and plan.head_blocked_by is BlockedBy.MEMORY


def test_offline_requests_give_way_to_older_ones_and_never_an_online_one() -> None:
    on = online([decode("a", 1)], free=0)
    plan = beside(on, offline([decode("x", 0), decode("y"), decode("z")], [waiting("w", 4)]))
    assert plan.preemptions == ("z",) and names(plan) == ["a", "x", "y"]
    plan = beside(on, offline([decode("x", 0)]))
    assert not plan.preemptions and names(plan) == ["a"], "it waits for the online one's end"
    plan = beside(online((), [waiting("big", 400)], free=0), offline([decode("x", 0)]))
    assert plan.preemptions == ("x",), "nobody's end will help it"


def test_microbatches_share_the_offline_requests() -> None:
    off = offline([decode(f"x{i}") for i in range(6)])
    plan = beside(online([decode("a")]), off, limits=LIMITS._replace(num_microbatches=2, max_num_seqs=64))
    assert names(plan) == ["a", "x0", "x1", "x2"]


def test_a_group_that_runs_too_many_evicts_none_while_no_newcomer_needs_a_place() -> None:
    off = offline([decode(f"x{i}") for i in range(10)])
    assert not beside(online([decode("a")]), off).preemptions
    assert beside(online([decode("a")], [waiting("b", 4)]), off).preemptions == ("x9",)


# --- online steps within an objective


@pytest.mark.parametrize(("most_s", "expected"), [(seconds([(1, 40), (30, 8)]), 30), (0.0, LEAST_PROMPT_TOKENS)])
def test_prompts_beside_decodes_keep_to_a_named_objective(most_s: float, expected: int) -> None:
    view = online([prompt("p", 60, 8), decode("a", context=40)], [waiting("w", 30)])
    plan = plan_within(view, plan_batch, LIMITS, step_budget(predictor(), most_s, 1))
    assert [(c.request_id, c.num_tokens) for c in plan.chunks] == [("a", 1), ("p", expected)] and not plan.admissions


@given(st.one_of(st.none(), st.floats(0.0, 0.02)), st.integers(0, 40), st.integers(0, 200))
def test_a_step_of_offline_requests_alone_is_cut_to_a_time_decodes_too(
    most_s: float | None, num_decodes: int, num_prompt: int
) -> None:
    rows = [decode(f"d{i}") for i in range(num_decodes)] + ([prompt("p", num_prompt, 8)] if num_prompt else [])
    view = online(rows)
    whole, plan = plan_batch(view, LIMITS), plan_alone(view, plan_batch, LIMITS, step_budget(predictor(), most_s, 1))
    chunks = chunks_of(plan, {row.request_id: row for row in rows})
    num, of = sum(n for n, _ in chunks), sum(c.num_tokens for c in whole.chunks)
    assert min(LEAST_PROMPT_TOKENS, of) <= num <= of and names(plan) == names(whole)[: len(chunks)]
    assert most_s is None or num <= LEAST_PROMPT_TOKENS or seconds(chunks) <= most_s
    assert most_s is not None or plan == whole


def test_decodes_and_prompts_alone_are_not_cut() -> None:
    budget = step_budget(predictor(), 0.0, 1)
    for view in (online([decode("a"), decode("b")]), online([prompt("p", 60)], [waiting("w", 30)])):
        assert plan_within(view, plan_batch, LIMITS, budget) == plan_batch(view, LIMITS)
    mixed, unknown = online([decode("a"), prompt("p", 60)]), step_budget(StepTimePredictor(4), 1.0, 1)
    assert plan_within(mixed, plan_batch, LIMITS, unknown) == plan_batch(mixed, LIMITS)


# --- any view


class Drawn(NamedTuple):
    online: BatchView
    offline: OfflineView
    limits: BatchLimits
    reclaim: dict[str, int]
    queues: list[list[WaitingRow]]


@st.composite
def rows_of(draw: st.DrawFn, name: str, in_flight: bool) -> list[RunningRow]:
    ready = draw(st.lists(st.one_of(st.just(1), st.integers(1, 60)), max_size=7))
    return [
        RunningRow(
            f"{name}{i}", num, draw(st.integers(0, 8)), in_flight and draw(st.booleans()), draw(st.booleans()),
            draw(st.integers(0, 200)),
        ) for i, num in enumerate(ready)
    ]  # fmt: skip


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    stages = draw(st.integers(1, 3))
    rows = [draw(rows_of(name, stages > 1)) for name in ("on", "off")]
    queues = [
        [waiting(f"{name}{i}", tokens) for i, tokens in enumerate(draw(st.lists(st.integers(1, 90), max_size=4)))]
        for name in ("new", "late")
    ]
    reclaim = {r.request_id: draw(st.integers(0, 6)) for r in (*rows[0], *rows[1])}
    hosted = {r.request_id: draw(st.sampled_from([0, 0, 16])) for r in rows[1]}
    victims = [
        [
            VictimRow(r.request_id, reclaim[r.request_id], hosted.get(r.request_id, 0))
            for r in reversed(part) if not r.in_flight
        ] for part in rows
    ]  # fmt: skip
    on = BatchView(
        7, rows[0], len(rows[0]), queues[0], lambda: victims[0], draw(st.integers(0, 30)),
        draw(st.sampled_from([0, 0, 5])),
    )
    off = OfflineView(rows[1], len(rows[1]), queues[1], lambda: victims[1], any(r.in_flight for r in rows[1]))
    limits = BatchLimits(
        draw(st.integers(1, 120)), draw(st.integers(stages, 16)), draw(st.integers(0, 3)), 4, stages
    )
    return Drawn(on, off, limits, reclaim, queues)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    drawn(), st.sampled_from([plan_batch, plan_prefill_first]),
    st.one_of(st.none(), st.floats(0.0, 0.02)), st.booleans(),
)  # fmt: skip
def test_no_plan_of_both_classes_breaks_a_bound(case: Drawn, planned, most_s: float | None, fills: bool) -> None:  # type: ignore[no-untyped-def]
    on, off, limits, reclaim, queues = case
    budget = step_budget(predictor(), most_s, 1)
    plan = plan_beside(
        on, off, limits, lambda view: planned(view, limits), lambda _: budget, fills_after_eviction=fills
    )
    is_offline = {r.request_id for r in off.running} | {w.request_id for w in queues[1]}
    rows = {r.request_id: r for r in (*on.running, *off.running)}
    evicted = plan_online_part(on, off, limits, lambda view: planned(view, limits)).evicted
    assert plan.preemptions[: len(evicted)] == evicted

    # Online requests are planned as if they were alone.
    gain = sum(v.num_reclaimable_blocks for v in off.victims())
    alone = planned(on._replace(num_free_blocks=on.num_free_blocks + gain), limits)
    assert [c for c in plan.chunks if c.request_id not in is_offline] == list(alone.chunks)
    admitted = [a for a in plan.admissions if a.request_id not in is_offline]
    assert admitted == list(alone.admissions[: len(admitted)])
    keep_places = len(off.running) - len(off.victims())
    if len(admitted) < len(alone.admissions):
        assert keep_places and len(on.running) + keep_places + len(admitted) >= limits.max_num_seqs
    else:
        assert plan.head_blocked_by == alone.head_blocked_by
    assert [r for r in plan.preemptions if r not in is_offline] == list(alone.preemptions)

    # Nobody in flight is preempted, nobody twice, nobody who is in the step.
    assert not any(rows[r].in_flight for r in plan.preemptions)
    assert len(set(plan.preemptions)) == len(plan.preemptions)
    in_step = [c.request_id for c in plan.chunks]
    assert len(set(in_step)) == len(in_step) and not set(in_step) & set(plan.preemptions)

    # Blocks.
    needs = {w.request_id: w.num_blocks_needed for queue in queues for w in queue}
    grown = sum(c.num_new_blocks for c in plan.chunks)
    taken = grown + sum(needs[a.request_id] for a in plan.admissions) - sum(reclaim[r] for r in plan.preemptions)
    assert taken <= on.num_free_blocks
    assert all(c.num_tokens <= rows[c.request_id].num_free_slots + 4 * c.num_new_blocks for c in plan.chunks)
    if len(admitted) < len(plan.admissions):
        assert taken + on.num_reserved_blocks <= on.num_free_blocks
    if admitted:  # offline requests that run may grow into what is kept for landing KV, as online ones may
        taken = sum(c.num_new_blocks for c in alone.chunks) + sum(needs[a.request_id] for a in admitted)
        assert taken + on.num_reserved_blocks <= on.num_free_blocks + sum(reclaim[r] for r in evicted)

    # Tokens, rows, places.
    chunks = chunks_of(plan, rows)
    assert sum(num for num, _ in chunks) <= limits.max_num_tokens and len(chunks) <= limits.max_rows
    after = len(rows) - len(plan.preemptions) + len(plan.admissions)
    assert after <= max(limits.max_num_seqs, len(rows))

    # Time.
    assert fills or not evicted or not set(in_step) & is_offline
    assert not evicted or alone.chunks or admitted, "nobody is evicted for nothing"
    filler = [r for r in (*in_step, *(a.request_id for a in plan.admissions)) if r in is_offline]
    if filler and most_s is not None and not budget.keeps(StepWork.of(chunks)):
        assert len(chunks) == 1 and chunks[0][0] <= LEAST_PROMPT_TOKENS
    can_run = [r for r in off.running if r.num_free_slots >= r.num_ready_tokens]
    if can_run and not alone.preemptions and not off.in_flight:
        assert plan.preemptions or chunks, "some step follows"
    for queue in queues:
        order = [w.request_id for w in queue]
        started = [a.request_id for a in plan.admissions if a.request_id in set(order)]
        assert started == order[: len(started)]

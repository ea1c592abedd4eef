"""What a step may take beside online requests: objectives, deadlines, budgets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.model import CostModel
from jettison.cost.predictor import StepTimePredictor
from jettison.cost.stepwork import LONE_STEP, StepWork, period_of
from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.slo import (
    LONE_DECODE,
    SATURATED,
    Objectives,
    Own,
    Pace,
    filler_s,
    knee_s,
    objectives,
    papers_filler_s,
    prompt_tokens_per_s,
    saturating_tokens,
    step_budget,
    within_tokens,
)

COST = CostModel(
    4, pair_layer_s=1e-8, kv_token_layer_s=1e-7, token_layer_s=1e-5, layer_s=1e-3, step_s=1e-4, entry_s=0.0,
    entry_token_s=0.0, head_s=1e-4, sample_s=1e-5,
)  # fmt: skip


def predictor(cost: CostModel = COST) -> StepTimePredictor:
    return StepTimePredictor(4, cost)


def test_objectives_are_worked_out_from_the_lone_decode_step() -> None:
    lone_s = predictor().predict_s(LONE_DECODE)
    assert lone_s is not None
    assert objectives(SloParams(), predictor()) == pytest.approx((14 * 9 * lone_s, 9 * lone_s))
    assert objectives(SloParams(tpot_s=0.1), predictor()) == pytest.approx((1.4, 0.1))
    assert objectives(SloParams(ttft_s=2.0), predictor()) == pytest.approx((2.0, 9 * lone_s))


def test_nothing_fills_a_step_while_nothing_is_known() -> None:
    unknown = StepTimePredictor(4)
    assert objectives(SloParams(), unknown) == (None, None)
    assert filler_s(Objectives(None, None), lambda: None) == 0.0
    budget = step_budget(unknown, 10.0, 1)  # an objective alone does not tell what fits into it
    assert budget.largest(100, partial(StepWork.decodes, num_kv_tokens=0)) == 0
    assert step_budget(unknown, None, 1).largest(100, partial(StepWork.decodes, num_kv_tokens=0)) == 100


def test_the_knee_is_where_the_rate_is_farthest_above_its_chord() -> None:
    """Tokens a second of a step of t seconds are 1 - least / t, in units of the largest rate."""
    least_s, longest_s = 0.01, 0.11

    def above(t: float) -> float:
        chord = (1.0 - least_s / longest_s) * (t - least_s) / (longest_s - least_s)
        return 1.0 - least_s / t - chord

    knee = knee_s(least_s, longest_s)
    assert all(above(knee) >= above(least_s + i * 1e-4) for i in range(1000))
    assert knee_s(0.2, longest_s) == longest_s


def test_a_step_that_prompts_saturate_is_not_filled_and_one_of_decodes_always_is() -> None:
    goals, own = Objectives(1.4, 0.1), Own(0.004, 0.04)
    assert filler_s(goals, lambda: 0.0, own) == pytest.approx(0.02), "less than the online part takes by itself"
    assert filler_s(goals, lambda: None, own) == pytest.approx(0.0632, rel=1e-3)
    assert filler_s(goals, lambda: 0.095, own) == pytest.approx(0.005)


def test_the_papers_rule_asks_whether_requests_decode_and_nothing_else() -> None:
    goals = Objectives(1.4, 0.1)
    assert (papers_filler_s(goals, has_decodes=True), papers_filler_s(goals, has_decodes=False)) == (0.1, 1.4)


@pytest.mark.parametrize(("waited_s", "expected"), [(None, 0.1), (0.0, 0.1), (0.07, 0.03), (0.1, 0.0), (3.0, 0.0)])
def test_offline_work_costs_a_first_token_one_gap_in_all(waited_s: float | None, expected: float) -> None:
    assert filler_s(Objectives(1.4, 0.1), lambda: waited_s) == pytest.approx(expected)
    sooner_s = 0.1 if waited_s is None else max(0.0, expected - 0.05)
    assert filler_s(Objectives(0.05, 0.1), lambda: waited_s) == pytest.approx(sooner_s)


def test_a_step_is_planned_shorter_by_what_predictions_were_off() -> None:
    off = predictor()
    work = StepWork.decodes(1, 0)
    took_s = off.predict_s(work)
    assert took_s is not None and step_budget(off, 0.1, 1).seconds == 0.1
    for i in range(200):
        off.observe(work, (i * 10**9, i * 10**9 + round(took_s * (1.05 if i % 2 else 0.95) * 1e9)))
    assert off.error == pytest.approx(0.05, rel=0.3)
    assert step_budget(off, 0.1, 1).seconds == pytest.approx(0.1 / (1 + 3 * off.error))


@pytest.mark.parametrize("most", [1, 8, 64, 512, 4096])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_smallest_batch_that_saturates_has_nearly_the_rate_of_the_largest(most: int, num_stages: int) -> None:
    size = saturating_tokens(predictor(), most, num_stages)
    part = period_of(num_stages) if num_stages > 1 else LONE_STEP

    def rate(num_tokens: int) -> float:
        seconds = predictor().predict_s(StepWork(1, num_tokens, 0, 0), part)
        assert seconds is not None
        return num_tokens / seconds

    assert 1 <= size <= most and rate(size) >= SATURATED * rate(most) * (1 - 1e-9)
    assert size == 1 or rate(size - 1) < SATURATED * rate(most)
    assert saturating_tokens(StepTimePredictor(4), most, num_stages) == most, "nothing is known"


def test_online_steps_are_bounded_where_someone_has_named_a_tpot() -> None:
    named = SloParams(tpot_s=0.1)
    assert Pace(OfflineParams(slo=named), predictor()).bounds_online
    assert Pace(OfflineParams(serves=False, slo_aware=False, slo=named), predictor()).bounds_online
    assert not Pace(OfflineParams(slo_aware=False, slo=named), predictor()).bounds_online, "priority has no budget"
    assert not Pace(OfflineParams(), predictor()).bounds_online


def test_microbatches_of_a_pipeline_share_the_time_of_a_token() -> None:
    budget = step_budget(predictor(), 0.1, 2)
    assert budget.part == period_of(2) and budget.seconds == pytest.approx(0.05)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 100))), st.integers(0, 200))
def test_cut_chunks_have_as_many_tokens_as_there_are_or_may_be(chunks: list[tuple[int, int]], most: int) -> None:
    cut = within_tokens(chunks, most)
    assert sum(n for n, _ in cut) == min(most, sum(n for n, _ in chunks))
    assert [c for _, c in cut] == [c for _, c in chunks[: len(cut)]]


@given(st.floats(0.0, 0.2), st.integers(0, 300), st.integers(0, 500))
def test_the_largest_batch_keeps_to_its_budget(seconds: float, most: int, context: int) -> None:
    budget = step_budget(predictor(), seconds, 1)

    def work(size: int) -> StepWork:
        return StepWork.decodes(size, context * size)

    size = budget.largest(most, work)
    predict = predictor().predict_s
    assert 0 <= size <= most
    assert size == 0 or (predict(work(size)) or 0.0) <= seconds
    assert size == most or (predict(work(size + 1)) or 0.0) > seconds


def pace(tpot_s: float | None, *, slo_aware: bool = True, serves: bool = True, cost: CostModel = COST) -> Pace:
    offline = OfflineParams(serves=serves, slo_aware=slo_aware, slo=SloParams(tpot_s=tpot_s))
    return Pace(offline, predictor(cost))


@given(num=st.integers(1, 200), kv=st.integers(0, 100_000), tpot_s=st.floats(0.001, 2.0), stages=st.integers(1, 4))
def test_prompts_beside_decodes_are_as_fast_as_steps_within_the_objective(
    num: int, kv: int, tpot_s: float, stages: int
) -> None:
    cost = replace(COST, pair_layer_s=0.0)  # one prompt fills a step: a longer one attends to more per token
    decodes, most = StepWork.decodes(num, kv), 1024
    free = predictor(cost).prefill_tokens_per_s(most, decodes, stages)
    kept = prompt_tokens_per_s(pace(tpot_s, cost=cost), most, decodes, stages)
    assert free is not None and kept is not None and 0.0 <= kept <= free * (1 + 1e-9)
    wider = prompt_tokens_per_s(pace(2 * tpot_s, cost=cost), most, decodes, stages)
    assert wider is not None and wider >= kept * (1 - 1e-9), "a longer step computes prompts no slower"
    one_more = step_budget(predictor(), tpot_s, stages).keeps(decodes.with_prompts(1))
    assert (kept > 0.0) == one_more


def test_prompts_are_as_fast_as_steps_are_large_where_no_objective_is_kept() -> None:
    decodes = StepWork.decodes(8, 4_000)
    free = predictor().prefill_tokens_per_s(256, decodes)
    assert prompt_tokens_per_s(pace(None), 256, decodes) == free
    assert prompt_tokens_per_s(pace(0.01, slo_aware=False), 256, decodes) == free, "by priority alone"
    assert prompt_tokens_per_s(pace(0.001), 256) == predictor().prefill_tokens_per_s(256), "nobody decodes"
    assert prompt_tokens_per_s(Pace(OfflineParams(), StepTimePredictor(4)), 256, decodes) is None

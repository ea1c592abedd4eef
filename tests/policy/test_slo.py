"""What a step may take beside online requests: objectives, deadlines, budgets."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.model import CostModel
from jettison.cost.predictor import StepTimePredictor
from jettison.cost.stepwork import StepWork, period_of
from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.slo import (
    FILLED_BELOW,
    LONE_DECODE,
    Objectives,
    Pace,
    filler_s,
    next_batch_s,
    objectives,
    step_budget,
    within_tokens,
)

COST = CostModel(
    4, pair_layer_s=1e-8, kv_token_layer_s=1e-7, token_layer_s=1e-5, layer_s=1e-3, step_s=1e-4, entry_s=0.0,
    entry_token_s=0.0, head_s=1e-4, sample_s=1e-5,
)  # fmt: skip


def predictor() -> StepTimePredictor:
    return StepTimePredictor(4, COST)


def test_objectives_are_worked_out_from_the_lone_decode_step() -> None:
    lone_s = predictor().predict_s(LONE_DECODE)
    assert lone_s is not None
    assert objectives(SloParams(), predictor()) == pytest.approx((14 * 9 * lone_s, 9 * lone_s))
    assert objectives(SloParams(tpot_s=0.1), predictor()) == pytest.approx((1.4, 0.1))
    assert objectives(SloParams(ttft_s=2.0), predictor()) == pytest.approx((2.0, 9 * lone_s))


def test_nothing_fills_a_step_while_nothing_is_known() -> None:
    unknown = StepTimePredictor(4)
    assert objectives(SloParams(), unknown) == (None, None)
    assert filler_s(Objectives(None, None), online_share=0.0, decodes_online=True, least_left_s=lambda: None) == 0.0
    budget = step_budget(unknown, 10.0, 1)  # an objective alone does not tell what fits into it
    assert budget.largest(100, partial(StepWork.decodes, num_kv_tokens=0)) == 0
    assert step_budget(unknown, None, 1).largest(100, partial(StepWork.decodes, num_kv_tokens=0)) == 100


@pytest.mark.parametrize(
    ("decodes", "left_s", "expected"),
    [(True, 0.01, 0.1), (False, 0.01, 0.01), (False, 0.5, 0.1), (False, -3.0, 0.0), (False, None, 0.1)],
)
def test_what_a_filled_step_may_take(decodes: bool, left_s: float | None, expected: float) -> None:
    goals = Objectives(1.4, 0.1)
    for share, most_s in ((0.0, expected), (FILLED_BELOW, expected), (FILLED_BELOW + 0.01, 0.0)):
        assert filler_s(goals, online_share=share, decodes_online=decodes, least_left_s=lambda: left_s) == most_s


def test_what_is_left_counts_from_the_arrival() -> None:
    assert Objectives(1.5, 0.1).left_s(2_000_000_000, 3_000_000_000) == pytest.approx(0.5)
    assert Objectives(1.5, 0.1).left_s(0, 3_000_000_000) == pytest.approx(-1.5)
    assert Objectives(None, None).left_s(0, 1) is None


def test_online_steps_are_bounded_where_someone_has_named_a_tpot() -> None:
    named = SloParams(tpot_s=0.1)
    assert Pace(OfflineParams(slo=named), predictor()).bounds_online
    assert Pace(OfflineParams(serves=False, slo_aware=False, slo=named), predictor()).bounds_online
    assert not Pace(OfflineParams(slo_aware=False, slo=named), predictor()).bounds_online, "priority has no budget"
    assert not Pace(OfflineParams(), predictor()).bounds_online


def test_the_next_batch_is_cut_to_the_token_budget_online_ones_and_decodes_first() -> None:
    seconds = next_batch_s(predictor(), [(50, 0), (1, 30)], [(70, 10), (1, 5)], max_num_tokens=60)
    assert seconds == predictor().predict_s(StepWork.of([(1, 30), (50, 0), (1, 5), (8, 10)]))
    assert next_batch_s(StepTimePredictor(4), [(1, 1)], max_num_tokens=60) is None


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

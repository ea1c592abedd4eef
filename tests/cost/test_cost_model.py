"""The cost model: what it predicts, that a fit finds it again, and the simpler models beside it."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.cost.fit import (
    Sample,
    evaluate,
    fit_attention_free,
    fit_cost_model,
    fit_no_prefix,
    non_negative_least_squares,
    relative_errors,
)
from jettison.cost.model import COEFFICIENTS, ChunkShape, CostModel, StepShape, features
from jettison.cost.shapes import ShapeLimits, plan_shapes

LIMITS = ShapeLimits(num_layers=12, max_num_tokens=512, max_num_seqs=128, max_context=2048, max_kv_tokens=16384)

coefficients = st.floats(0.0, 1e-2) | st.just(0.0)
models = st.builds(
    CostModel,
    st.integers(1, 80),
    *[coefficients] * len(COEFFICIENTS),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 64),
)
chunk_lists = st.lists(st.builds(ChunkShape, st.integers(0, 4096), st.integers(1, 512)), min_size=1, max_size=8)


def a_model(**changes: float) -> CostModel:
    """About the demo's model on a CPU."""
    model = CostModel(12, 2e-8, 6e-8, 2e-5, 3e-4, 1e-4, 5e-5, 5e-7, 2e-4, 1e-5)
    return dataclasses.replace(model, **changes)


# --- what it predicts


def chunk_s(
    model: CostModel, num_tokens: int, num_context: int, layers: int | None = None, *, is_first: bool = True
) -> float:
    """One chunk alone, nothing sampled."""
    return model.batch_cost_s([ChunkShape(num_context, num_tokens)], layers, is_first=is_first, is_last=False)


def test_a_chunk_costs_what_equation_1_says() -> None:
    model = a_model(kv_token_layer_s=0.0, entry_token_s=0.0)
    alpha, beta, gamma = 12 * 2e-8, 12 * 2e-5, 12 * 3e-4 + 1e-4 + 5e-5
    p, c = 700, 300
    expected = alpha * (p * c + (c * c + c) / 2) + beta * c + gamma
    assert chunk_s(model, c, p) == pytest.approx(expected)


def test_a_part_of_the_layers_costs_its_part() -> None:
    model = a_model(step_s=0.0, entry_s=0.0, entry_token_s=0.0)
    assert chunk_s(model, 100, 50, 6) == pytest.approx(chunk_s(model, 100, 50) / 2)


@given(model=models, chunks=chunk_lists, layers=st.integers(1, 80), is_first=st.booleans())
def test_a_microbatch_is_the_sum_of_its_chunks_less_the_shared_part(model, chunks, layers, is_first):
    """Eq. 3, where no roofline or tile interferes."""
    model = dataclasses.replace(model, weight_tokens=1, row_tile=1)
    parts = sum(chunk_s(model, c.num_tokens, c.num_context, layers, is_first=is_first) for c in chunks)
    expected = parts - (len(chunks) - 1) * model.gamma_s(layers, is_first=is_first)
    actual = model.batch_cost_s(chunks, layers, is_first=is_first, is_last=False)
    assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(model=models, chunks=chunk_lists, index=st.integers(0, 7), more=st.integers(1, 500), samples=st.integers(0, 8))
def test_more_tokens_or_more_context_never_cost_less(model, chunks, index, more, samples):
    index %= len(chunks)
    cost = model.batch_cost_s(chunks, num_samples=samples)
    for change in ({"num_tokens": chunks[index].num_tokens + more}, {"num_context": chunks[index].num_context + more}):
        larger = [*chunks[:index], chunks[index]._replace(**change), *chunks[index + 1 :]]
        assert model.batch_cost_s(larger, num_samples=samples) >= cost * (1 - 1e-9)
    assert model.batch_cost_s([*chunks, ChunkShape(0, more)], num_samples=samples) >= cost * (1 - 1e-9)
    assert model.batch_cost_s(chunks, num_samples=samples + 1) >= cost * (1 - 1e-9)


@given(model=models, chunks=chunk_lists, layers=st.integers(1, 80), first=st.booleans(), samples=st.integers(0, 8))
def test_features_times_coefficients_are_the_prediction(model, chunks, layers, first, samples):
    shape = StepShape(tuple(chunks), layers, first, samples)
    row = features(shape, model.weight_tokens, model.head_tokens, model.row_tile)
    product = sum(x * getattr(model, name) for x, name in zip(row, COEFFICIENTS, strict=True))
    assert model.step_cost_s(shape) == pytest.approx(product, rel=1e-9, abs=1e-12)


def test_small_batches_take_whole_tiles_and_the_weights_time() -> None:
    model = a_model(row_tile=3, weight_tokens=8, kv_token_layer_s=0.0, pair_layer_s=0.0, entry_token_s=0.0)

    def batch(n: int) -> float:
        return model.batch_cost_s([ChunkShape(0, 1)] * n, num_samples=0)

    assert batch(1) == pytest.approx(batch(2))
    assert batch(1) == pytest.approx(batch(6))
    assert batch(7) == pytest.approx(batch(9))
    assert batch(9) > 1.01 * batch(6)
    assert batch(10) - batch(9) == pytest.approx(3 * 12 * 2e-5)


def test_an_empty_microbatch_costs_nothing() -> None:
    assert a_model().batch_cost_s([]) == 0.0


@pytest.mark.parametrize(
    "change", [{"layer_s": -1.0}, {"pair_layer_s": math.nan}, {"row_tile": 0}, {"head_s": math.inf}]
)
def test_nonsense_is_refused(change) -> None:
    with pytest.raises(ValueError):
        a_model(**change)


# --- fits


def samples_of(model: CostModel, noise: float = 0.0, seed: int = 0, held_out: bool = False) -> list[Sample]:
    rng = random.Random(seed)
    plan = plan_shapes(dataclasses.replace(LIMITS, num_layers=model.num_layers))
    items = plan.held_out if held_out else plan.fitted
    return [Sample(i.shape, model.step_cost_s(i.shape) * (1 + rng.uniform(-noise, noise))) for i in items]


positive = st.floats(0.2, 5.0)


@settings(max_examples=10)
@given(
    factors=st.lists(positive, min_size=len(COEFFICIENTS), max_size=len(COEFFICIENTS)),
    weight_tokens=st.sampled_from((1, 4, 16)),
    row_tile=st.sampled_from((1, 3)),
)
def test_a_fit_finds_known_coefficients_again(factors, weight_tokens, row_tile):
    known = a_model(weight_tokens=weight_tokens, row_tile=row_tile)
    known = dataclasses.replace(
        known, **{n: getattr(known, n) * f for n, f in zip(COEFFICIENTS, factors, strict=True)}
    )
    fitted = fit_cost_model(samples_of(known), known.num_layers)
    for name in ("pair_layer_s", "kv_token_layer_s", "token_layer_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(known, name), rel=0.03)
    assert evaluate(fitted, samples_of(known, held_out=True)).mean < 0.01


def test_noise_averages_out() -> None:
    known = a_model()
    fitted = fit_cost_model(samples_of(known, noise=0.1), known.num_layers)
    assert evaluate(fitted, samples_of(known, held_out=True)).mean < 0.03


def test_the_simpler_models_are_wrong_where_they_look_away() -> None:
    known = a_model()
    samples, judged = samples_of(known), samples_of(known, held_out=True)
    full, free, blind = (f(samples, 12) for f in (fit_cost_model, fit_attention_free, fit_no_prefix))
    assert evaluate(free, judged).mean > 5 * evaluate(full, judged).mean
    assert evaluate(blind, judged).mean > 5 * evaluate(full, judged).mean
    assert free.pair_layer_s == free.kv_token_layer_s == 0.0
    fresh = [s for s in judged if s.shape.num_kv_tokens == 0]
    assert evaluate(blind, fresh).mean < 0.01  # what it was made for
    cached = max(judged, key=lambda s: s.shape.num_kv_tokens)
    assert relative_errors(blind, [cached])[0] < -0.1


def test_a_fit_without_samples_or_time_is_refused() -> None:
    with pytest.raises(ValueError, match="samples"):
        fit_cost_model([], 4)
    with pytest.raises(ValueError, match="no time"):
        fit_cost_model([Sample(StepShape((ChunkShape(0, 1),), 4), 0.0)], 4)


@given(data=st.data(), rows=st.integers(1, 12), columns=st.integers(1, 6))
def test_least_squares_keeps_to_zero_and_up_and_meets_its_conditions(data, rows, columns):
    """Karush-Kuhn-Tucker: no gradient where x > 0, none that would lower the error where x = 0."""
    numbers = st.floats(-10, 10).map(lambda x: round(x, 3))
    matrix = np.array(data.draw(st.lists(st.lists(numbers, min_size=columns, max_size=columns), min_size=rows,
                                         max_size=rows)))
    target = np.array(data.draw(st.lists(numbers, min_size=rows, max_size=rows)))
    error, x = non_negative_least_squares(matrix, target)
    assert (x >= 0).all()
    assert error == pytest.approx(float(((matrix @ x - target) ** 2).sum()), rel=1e-6, abs=1e-9)
    gradient = matrix.T @ (matrix @ x - target)
    slack = 1e-6 * (1 + np.abs(matrix).sum() * (1 + np.abs(target).sum()))
    assert (gradient >= -slack).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) <= slack


# --- shapes


@given(
    layers=st.integers(1, 80), tokens=st.integers(1, 1024), seqs=st.integers(1, 256), context=st.integers(2, 4096),
    seed=st.integers(0, 5), quick=st.booleans(),
)
@settings(max_examples=40)
def test_planned_shapes_fit_the_limits_and_none_is_in_both_sets(layers, tokens, seqs, context, seed, quick):
    limits = ShapeLimits(layers, min(tokens, context), seqs, context, max(16384, context + 16))
    plan = plan_shapes(limits, seed=seed, quick=quick)
    fitted = [item.shape for item in plan.fitted]
    held_out = [item.shape for item in plan.held_out]
    assert all(limits.allow(shape) for shape in fitted + held_out)
    assert len(set(fitted)) == len(fitted)
    assert not set(fitted) & set(held_out)
    assert {batch.shape for batch in plan.batches} <= set(fitted)
    for shape in fitted + held_out:
        assert not (shape.is_first and shape.num_samples) or shape.num_layers == layers
    assert plan == plan_shapes(limits, seed=seed, quick=quick)


def test_a_usual_plan_has_shapes_of_every_kind() -> None:
    plan = plan_shapes(LIMITS)
    assert len({item.kind for item in plan.held_out}) == 5
    assert len(plan.held_out) >= 40

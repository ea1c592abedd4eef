"""A cost model bent to the steps of a live run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jettison.cost.model import COEFFICIENTS, CostModel
from jettison.cost.recorded import FIXED_TERMS, KV_TERMS, ROW_TERMS, RecordedStep, fitted_to

COST = CostModel(4, 2e-8, 5e-8, 2e-5, 1e-4, 2e-4, 1e-5, 1e-7, 1e-4, 1e-6, weight_tokens=4, row_tile=2)


def steps_of(truth: CostModel, *, num: int = 200, layers: int = 4, noise: float = 0.0) -> list[RecordedStep]:
    rng = random.Random(0)
    steps = []
    for index in range(num):
        rows, prompt, context = rng.randint(1, 24), rng.choice((0, 0, 64, 128)), rng.randint(0, 400)
        tokens = rows + prompt
        pairs = rows * context + prompt * (prompt + 1) // 2
        step = RecordedStep(
            index % 2, 0.0, 1.0, rows, tokens, pairs, rows * context + tokens, layers, True, rows
        )
        steps.append(step._replace(seconds=step.predicted_s(truth) * rng.lognormvariate(0.0, noise)))
    return steps


def test_every_term_belongs_to_one_factor() -> None:
    assert sorted((*KV_TERMS, *ROW_TERMS, *FIXED_TERMS)) == sorted(COEFFICIENTS)


def test_steps_as_the_model_has_them_leave_it_as_it_is() -> None:
    fitted = fitted_to(COST, steps_of(COST))
    for name in COEFFICIENTS:
        assert getattr(fitted, name) == pytest.approx(getattr(COST, name), rel=1e-6)


@pytest.mark.parametrize("group", [KV_TERMS, ROW_TERMS, FIXED_TERMS], ids=["KV", "rows", "fixed"])
def test_what_takes_longer_is_found_among_the_terms(group: tuple[str, ...]) -> None:
    truth = replace(COST, **{name: 1.8 * getattr(COST, name) for name in group})
    steps = steps_of(truth)
    fitted = fitted_to(COST, steps)
    for name in group:
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=0.05)
    assert max(abs(step.predicted_s(fitted) / step.seconds - 1.0) for step in steps) < 0.03


def test_the_steps_take_as_long_together_as_they_took() -> None:
    steps = steps_of(replace(COST, token_layer_s=3e-5), noise=0.5)
    fitted = fitted_to(COST, steps)
    assert sum(step.predicted_s(fitted) for step in steps) == pytest.approx(sum(step.seconds for step in steps))


def test_terms_that_steps_do_not_tell_apart_keep_their_proportions() -> None:
    lone = [step._replace(num_tokens=1, num_requests=1, num_samples=1, num_pairs=9, num_kv_tokens=9)
            for step in steps_of(COST, num=20)]
    slow = [step._replace(seconds=3.0 * step.predicted_s(COST)) for step in lone]
    fitted = fitted_to(COST, slow)
    for name in COEFFICIENTS:
        assert getattr(fitted, name) == pytest.approx(3.0 * getattr(COST, name), rel=0.01)


def test_without_steps_there_is_nothing_to_fit() -> None:
    assert fitted_to(COST, []) == COST
    nothing = CostModel(4, *[0.0] * len(COEFFICIENTS))
    assert fitted_to(nothing, steps_of(COST, num=3)) == nothing

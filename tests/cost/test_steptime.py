"""The online step-time fit."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jettison.cost.model import ChunkShape, CostModel
from jettison.cost.steptime import StepTimeModel, StepTimePrior

A, B, C = 2e-3, 4e-5, 3e-7
"""Seconds a step, a token, a token of KV."""


def seconds(num_tokens: int, num_kv_tokens: int) -> float:
    return A + B * num_tokens + C * num_kv_tokens


def fitted(num_steps: int, noise: float = 0.0, seed: int = 0) -> StepTimeModel:
    rng = random.Random(seed)
    model = StepTimeModel()
    for _ in range(num_steps):
        tokens, kv = rng.randint(1, 512), rng.randint(0, 40_000)
        model.observe(tokens, kv, seconds(tokens, kv) * (1 + rng.uniform(-noise, noise)))
    return model


@pytest.mark.parametrize(("tokens", "kv"), [(1, 0), (512, 0), (64, 30_000), (300, 300)])
def test_exact_steps_are_recovered(tokens: int, kv: int) -> None:
    predicted = fitted(40).predict_s(tokens, kv)
    assert predicted == pytest.approx(seconds(tokens, kv), rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_noise_averages_out(seed: int) -> None:
    predicted = fitted(400, noise=0.2, seed=seed).predict_s(256, 10_000)
    assert predicted == pytest.approx(seconds(256, 10_000), rel=0.05)


def test_nothing_is_predicted_before_enough_was_seen() -> None:
    assert fitted(7).predict_s(10, 10) is None
    assert fitted(7).prefill_tokens_per_s(512, 0, 0) is None
    assert fitted(8).predict_s(10, 10) is not None


def test_old_steps_are_forgotten() -> None:
    model = fitted(200)
    rng = random.Random(1)
    for _ in range(2000):
        tokens, kv = rng.randint(1, 512), rng.randint(0, 40_000)
        model.observe(tokens, kv, 3 * seconds(tokens, kv))
    assert model.predict_s(256, 10_000) == pytest.approx(3 * seconds(256, 10_000), rel=0.02)


def test_steps_that_are_all_alike_are_predicted_as_they_were() -> None:
    model = StepTimeModel()
    for _ in range(20):
        model.observe(64, 1000, 0.01)
    assert model.predict_s(64, 1000) == pytest.approx(0.01, rel=1e-3)


def test_no_part_of_a_step_takes_negative_time() -> None:
    model = StepTimeModel()
    for tokens in range(1, 40):
        model.observe(tokens, 100 * tokens, 0.1 - 0.001 * tokens)
    assert (model.predict_s(10_000, 0) or 0.0) >= 0.0


def test_the_prefill_rate_leaves_the_decodes_their_share() -> None:
    model = fitted(40)
    assert model.prefill_tokens_per_s(512, 112, 20_000) == pytest.approx(400 / seconds(512, 20_000), rel=1e-3)
    assert model.prefill_tokens_per_s(64, 100, 0) == pytest.approx(1 / seconds(64, 0), rel=1e-3)


def test_a_pipeline_has_as_many_steps_under_way_as_stages() -> None:
    """Each carries its share of the decodes and of what they read: Little's law over the stages."""
    model = fitted(40)
    rate = model.prefill_tokens_per_s(512, 224, 40_000, 2)
    assert rate == pytest.approx(2 * 400 / seconds(512, 20_000), rel=1e-3)


def test_observing_is_deterministic() -> None:
    assert fitted(100, 0.3).predict_s(7, 7) == fitted(100, 0.3).predict_s(7, 7)


def test_a_profile_answers_until_the_fit_has_data() -> None:
    cost = CostModel(4, 1e-8, 1e-8, 1e-5, 1e-4, 1e-4, 0.0, 0.0, 0.0, 0.0)
    model = StepTimeModel(prior=StepTimePrior(cost, 2))
    expected = cost.aggregate_cost_s(256, 1000, 2)
    assert model.predict_s(256, 1000) == expected
    assert expected == pytest.approx(cost.batch_cost_s([ChunkShape(0, 256)]) + 4 * 2e-8 * 1000 + 1e-4)
    assert model.prefill_tokens_per_s(256, 6, 1000) == pytest.approx(250 / expected)
    for _ in range(8):
        model.observe(256, 1000, 5.0)
    assert model.predict_s(256, 1000) == pytest.approx(5.0, rel=1e-3)


def reference(steps: list[tuple[int, int, float]], forgetting: float) -> list[float]:
    """Recursive least squares as it is written down."""
    normal, moment = np.zeros((3, 3)), np.zeros(3)
    for tokens, kv, took in steps:
        x = np.array([1.0, tokens / 1e2, kv / 1e4])
        normal, moment = forgetting * normal + np.outer(x, x), forgetting * moment + x * took
    solved: list[float] = np.linalg.solve(normal + 1e-9 * np.trace(normal) * np.eye(3), moment).tolist()
    return solved


@pytest.mark.parametrize(("num_steps", "asked_every"), [(50, 7), (3000, 100), (4000, 5000)])
def test_sums_formed_late_are_the_sums_formed_at_every_step(num_steps: int, asked_every: int) -> None:
    rng = random.Random(num_steps)
    steps = [(rng.randint(1, 512), rng.randint(0, 40_000)) for _ in range(num_steps)]
    timed = [(t, kv, seconds(t, kv) * rng.uniform(0.8, 1.2)) for t, kv in steps]
    model = StepTimeModel(forgetting=0.97)
    for number, step in enumerate(timed):
        model.observe(*step)
        if number % asked_every == asked_every - 1:
            model.predict_s(1, 1)
    a, b, c = reference(timed, 0.97)
    # Times are kept in whole nanoseconds.
    assert model.predict_s(300, 10_000) == pytest.approx(a + 3 * b + c, rel=1e-6)

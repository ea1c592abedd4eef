"""The fit of a microbatch's time made while serving."""

from __future__ import annotations

import itertools
import random

import pytest

from jettison.cost.model import CostModel
from jettison.cost.online import OnlineChunkCost

FIXED, TOKEN, PAIR, DECODE_KV, ROW = 2e-3, 1e-4, 2e-7, 4e-7, 5e-5


def seconds(chunks: list[tuple[int, int]]) -> float:
    total = FIXED
    for tokens, context in chunks:
        total += ROW + TOKEN * tokens
        total += DECODE_KV * context if tokens == 1 else PAIR * (context * tokens + (tokens**2 + tokens) / 2)
    return total


def observed(num: int, noise: float = 0.0) -> OnlineChunkCost:
    rng, cost = random.Random(0), OnlineChunkCost()
    for _ in range(num):
        chunks = [(1, rng.randrange(2000)) for _ in range(rng.randrange(30))]
        chunks += [(rng.randrange(2, 300), rng.randrange(2000)) for _ in range(rng.randrange(4))]
        if chunks:
            cost.observe(chunks, seconds(chunks) * rng.uniform(1 - noise, 1 + noise))
    return cost


def test_before_it_knows_anything_a_token_costs_one() -> None:
    cost = OnlineChunkCost()
    assert not cost.is_fitted and cost.fixed_cost == 0.0
    assert cost.chunk_cost(7, 100) == 7.0 and cost.chunk_cost(0, 100) == 0.0


@pytest.mark.parametrize(("tokens", "context"), [(256, 0), (100, 1500), (1, 800)])
def test_it_finds_the_coefficients(tokens: int, context: int) -> None:
    cost = observed(200)
    assert cost.is_fitted
    assert cost.fixed_cost == pytest.approx(FIXED, rel=0.02)
    without_row = ROW if tokens > 1 else 0.0
    expected = seconds([(tokens, context)]) - without_row
    assert cost.fixed_cost + cost.chunk_cost(tokens, context) == pytest.approx(expected, rel=0.02)


def test_noise_moves_it_little() -> None:
    cost = observed(400, noise=0.3)
    assert cost.fixed_cost + cost.chunk_cost(200, 1000) == pytest.approx(seconds([(200, 1000)]), rel=0.15)


def test_costs_grow_with_tokens_and_never_below_zero_whatever_is_observed() -> None:
    cost = OnlineChunkCost()
    for i in range(60):
        cost.observe([(1 + i % 5, 10 * i)], 0.0 if i % 2 else 1e-6)
    costs = [cost.chunk_cost(n, 50) for n in range(2, 40)]
    assert all(b > a > 0.0 for a, b in itertools.pairwise(costs))


def test_until_it_has_seen_enough_a_profile_answers_for_the_layers_of_a_stage() -> None:
    model = CostModel(8, 1e-8, 2e-8, 1e-5, 1e-4, 5e-4, 1e-4, 1e-6, 1e-3, 1e-5)
    cost = OnlineChunkCost(model, 4)
    assert not cost.is_fitted and cost.fixed_cost == pytest.approx(model.gamma_s(4))
    for tokens, context in ((256, 0), (100, 1000)):
        predicted = model.chunk_cost_s(tokens, context, 4) - model.gamma_s(4)
        assert cost.chunk_cost(tokens, context) == pytest.approx(predicted, rel=0.05)
    assert cost.chunk_cost(1, 1000) == pytest.approx(model.chunk_cost_s(1, 1000, 4) - model.gamma_s(4), rel=0.05)

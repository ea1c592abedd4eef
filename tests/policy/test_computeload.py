"""Compute load: units, directions, and the two situations that it has to tell apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.computeload import Arrangement, Traffic, compute_load

TRAFFIC = Traffic(requests_per_s=10.0, prompt_tokens=100.0, output_tokens=50.0)
APART = Arrangement(num_instances=2, kv_tokens_per_instance=1250.0, max_rows_per_instance=1000.0, efficiency=1.0)


def linear(num_tokens: int, num_kv_tokens: int) -> float:
    """2 ms a step and 0.1 ms a token."""
    return 2e-3 + 1e-4 * num_tokens


def test_by_hand() -> None:
    # 125 tokens a request on average: 10 rows. Each step 10 decodes and 10/50 prompts of 100 tokens: 30 tokens, 5 ms,
    # and a fifth of a request served. Two instances: 80 requests a second.
    assert compute_load(TRAFFIC, APART, linear) == pytest.approx(10 / 80)


def test_unknown_step_times_say_nothing() -> None:
    assert compute_load(TRAFFIC, APART, lambda tokens, kv: None) is None


@given(st.floats(0.1, 100), st.floats(1, 2000), st.floats(1, 500), st.floats(10, 1e5), st.floats(0.3, 1.0))
def test_directions(rate: float, prompt: float, output: float, kv_tokens: float, efficiency: float) -> None:
    traffic = Traffic(rate, prompt, output)
    arrangement = APART._replace(kv_tokens_per_instance=kv_tokens, efficiency=efficiency)
    load = compute_load(traffic, arrangement, linear)
    assert load is not None and load > 0
    double = compute_load(traffic._replace(requests_per_s=2 * rate), arrangement, linear)
    assert double == pytest.approx(2 * load)
    more = compute_load(traffic, arrangement._replace(num_instances=4), linear)
    assert more == pytest.approx(load / 2)
    roomy = compute_load(traffic, arrangement._replace(kv_tokens_per_instance=2 * kv_tokens), linear)
    assert roomy is not None and roomy <= load * 1.1  # a larger batch shares the fixed cost; rounding of tokens aside


def test_memory_pays_where_steps_have_a_high_fixed_cost_and_bubbles_cost_where_they_have_none() -> None:
    merged = APART._replace(kv_tokens_per_instance=4 * APART.kv_tokens_per_instance, efficiency=0.85)

    def fixed(num_tokens: int, num_kv_tokens: int) -> float:
        return 20e-3 + 1e-5 * num_tokens

    def proportional(num_tokens: int, num_kv_tokens: int) -> float:
        return 1e-4 * num_tokens

    apart, together = compute_load(TRAFFIC, APART, fixed), compute_load(TRAFFIC, merged, fixed)
    assert apart is not None and together is not None and together < 0.5 * apart
    apart, together = compute_load(TRAFFIC, APART, proportional), compute_load(TRAFFIC, merged, proportional)
    assert apart is not None and together == pytest.approx(apart / 0.85)

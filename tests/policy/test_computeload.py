"""Compute load: units, directions, and the two situations that it has to tell apart."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.stepwork import StepWork
from jettison.policy.computeload import Arrangement, Traffic, compute_load, steady_step

TRAFFIC = Traffic(requests_per_s=10.0, prompt_tokens=100.0, output_tokens=50.0)
APART = Arrangement(num_instances=2, kv_tokens_per_instance=1250.0, max_rows_per_instance=1000.0, num_stages=1)


@dataclass(frozen=True)
class Times:
    """Steps of ``fixed_s`` and so much a token."""

    fixed_s: float
    token_s: float
    efficiency: float = 1.0

    def predict_s(self, work: StepWork) -> float | None:
        return self.fixed_s + self.token_s * work.num_tokens

    def pipeline_efficiency(self, work: StepWork, num_stages: int) -> float:
        assert num_stages > 1
        return self.efficiency


class Unknown(Times):
    def predict_s(self, work: StepWork) -> float | None:
        return None


LINEAR = Times(2e-3, 1e-4)


def test_by_hand() -> None:
    # 125 tokens a request on average: 10 rows. Each step 10 decodes and 10/50 prompts of 100 tokens: 30 tokens, 5 ms,
    # and a fifth of a request served. Two instances: 80 requests a second.
    assert compute_load(TRAFFIC, APART, LINEAR) == pytest.approx(10 / 80)


def test_a_steady_step_by_hand() -> None:
    assert steady_step(TRAFFIC, APART) == StepWork.of([(1, 125)] * 10 + [(20, 0)])
    crowded = steady_step(TRAFFIC, APART._replace(kv_tokens_per_instance=12_500.0))
    assert crowded == StepWork.of([(1, 125)] * 100 + [(100, 0)] * 2), "prompts are requests of their own"


def test_unknown_step_times_say_nothing() -> None:
    assert compute_load(TRAFFIC, APART, Unknown(0.0, 0.0)) is None


@given(st.floats(0.1, 100), st.floats(1, 2000), st.floats(1, 500), st.floats(10, 1e5), st.integers(1, 4))
def test_directions(rate: float, prompt: float, output: float, kv_tokens: float, num_stages: int) -> None:
    traffic = Traffic(rate, prompt, output)
    arrangement = APART._replace(kv_tokens_per_instance=kv_tokens, num_stages=num_stages)
    load = compute_load(traffic, arrangement, LINEAR)
    assert load is not None and load > 0
    double = compute_load(traffic._replace(requests_per_s=2 * rate), arrangement, LINEAR)
    assert double == pytest.approx(2 * load)
    more = compute_load(traffic, arrangement._replace(num_instances=4), LINEAR)
    assert more == pytest.approx(load / 2)
    roomy = compute_load(traffic, arrangement._replace(kv_tokens_per_instance=2 * kv_tokens), LINEAR)
    assert roomy is not None and roomy <= load * 1.1  # a larger batch shares the fixed cost; rounding of tokens aside


def test_memory_pays_where_steps_have_a_high_fixed_cost_and_bubbles_cost_where_they_have_none() -> None:
    merged = APART._replace(kv_tokens_per_instance=4 * APART.kv_tokens_per_instance, num_stages=2)
    fixed, proportional = Times(20e-3, 1e-5, 0.85), Times(0.0, 1e-4, 0.85)
    apart, together = compute_load(TRAFFIC, APART, fixed), compute_load(TRAFFIC, merged, fixed)
    assert apart is not None and together is not None and together < 0.5 * apart
    apart, together = compute_load(TRAFFIC, APART, proportional), compute_load(TRAFFIC, merged, proportional)
    assert apart is not None and together == pytest.approx(apart / 0.85)

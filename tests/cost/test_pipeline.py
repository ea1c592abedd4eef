"""The efficiency of pipelines: the prior first, then what was seen, and the newest of that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.pipeline import BOUNDS, PipelineEfficiency


def seen(efficiency: PipelineEfficiency, ratio: float, seconds: float, step_s: float = 0.1) -> PipelineEfficiency:
    for _ in range(round(seconds / step_s)):
        efficiency.observe(ratio * step_s, step_s)
    return efficiency


def test_the_prior_holds_until_something_is_seen_and_fades() -> None:
    assert PipelineEfficiency(0.85).value == pytest.approx(0.85)
    assert seen(PipelineEfficiency(0.85), 0.65, 2.0).value == pytest.approx(0.75)
    assert seen(PipelineEfficiency(0.85), 0.65, 300.0).value == pytest.approx(0.65, abs=1e-4)


def test_what_has_changed_is_followed() -> None:
    assert seen(seen(PipelineEfficiency(0.85), 0.6, 100.0), 0.9, 120.0).value == pytest.approx(0.9, abs=0.01)


def test_long_microbatches_count_for_what_they_take() -> None:
    efficiency = PipelineEfficiency(0.8)
    efficiency.observe(0.001, 0.002)
    efficiency.observe(8.0, 10.0)
    assert efficiency.value == pytest.approx(0.8, abs=1e-3)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(1e-6, 5.0)), max_size=60))
def test_the_value_stays_within_what_a_pipeline_can_be(steps: list[tuple[float, float]]) -> None:
    efficiency = PipelineEfficiency(0.85)
    for separate_s, pipeline_s in steps:
        efficiency.observe(separate_s, pipeline_s)
        assert BOUNDS[0] <= efficiency.value <= BOUNDS[1]

"""What moves may take without disturbing those who decode: as measured, else as predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.boundaries import NO_PREFILL, link_boundary, measured_tokens, prefill_boundary
from jettison.cost.hardware import HardwareProfile, PrefillPoint
from jettison.cost.model import CostModel
from jettison.cost.predictor import StepTimePredictor
from jettison.cost.presets import BATCH_CONTEXT, instance_preset, network
from jettison.cost.stepwork import NOTHING, StepWork, step_of

COST = CostModel(4, 1e-9, 1e-9, 1e-6, 1e-4, 1e-4, 1e-5, 1e-7, 1e-5, 1e-6)
PROFILE = HardwareProfile(COST, 1e9, 1e-4, 1e-3, 1e-11, 5e9, 1e9)
POINTS = tuple(
    PrefillPoint(size, n, s)
    for size, times in ((4, (1.0, 1.5, 3.0)), (16, (2.0, 2.2, 8.0)))
    for n, s in zip((0, 10, 40), times, strict=True)
)
DECODES = StepWork.decodes(4, 400)


def test_a_link_carries_what_it_can_or_what_its_ends_put_up_with() -> None:
    assert link_boundary(1e8, None, 0.5) == link_boundary(1e8, PROFILE, 0.5) == 1e8
    priced = replace(PROFILE, link_beside_byte_s=1e-8)
    assert link_boundary(1e8, priced, 0.5) == 5e7
    assert link_boundary(1e8, replace(PROFILE, link_beside_byte_s=0.0), 0.5) == 1e8


@pytest.mark.parametrize(
    ("batch", "longer", "tokens"),
    [(4, 1.0, 0), (4, 1.25, 5), (4, 1.5, 10), (4, 2.25, 25), (4, 3.0, 40), (4, 99.0, 40), (1, 1.5, 10), (5, 1.1, 10),
     (17, 9.0, None)],
)  # fmt: skip
def test_measured_points_are_joined_by_straight_lines(batch: int, longer: float, tokens: int | None) -> None:
    assert measured_tokens(POINTS, batch, longer) == tokens


def test_without_decodes_alone_nothing_was_measured() -> None:
    assert measured_tokens(POINTS[1:3], 4, 2.0) is None and measured_tokens(POINTS[:1], 4, 2.0) is None


def boundary(decodes: StepWork, profile: HardwareProfile | None = None, slowdown: float = 0.5, **fields: object):
    predictor = StepTimePredictor(4, COST)
    return prefill_boundary(decodes, predictor, profile, slowdown, **({"most": 100} | fields))  # type: ignore[arg-type]


def test_the_profile_is_asked_first_and_the_predictor_where_it_has_nothing() -> None:
    assert boundary(DECODES, replace(PROFILE, prefill_points=POINTS)).step_tokens == 10
    predicted = boundary(DECODES, PROFILE).step_tokens
    predictor = StepTimePredictor(4, COST)
    bound = 1.5 * predictor.predict_s(DECODES, step_of(1))
    assert predictor.predict_s(DECODES.with_prompt(predicted), step_of(1)) <= bound
    assert predicted == 100 or predictor.predict_s(DECODES.with_prompt(predicted + 1), step_of(1)) > bound
    pipeline = boundary(DECODES, replace(PROFILE, prefill_points=POINTS), num_stages=2)
    assert pipeline.step_tokens != 10, "measured on one instance"


def test_nothing_is_disturbed_where_nobody_decodes_and_no_room_is_none() -> None:
    assert boundary(NOTHING).step_tokens == 100
    assert boundary(DECODES, most=0) == NO_PREFILL
    unknown = prefill_boundary(DECODES, StepTimePredictor(4), None, 0.5, most=100)
    assert unknown is None


def test_an_objective_bounds_it_further() -> None:
    alone_s = StepTimePredictor(4, COST).predict_s(DECODES)
    assert boundary(DECODES, slowdown=9.0, tpot_s=alone_s) == NO_PREFILL
    assert boundary(DECODES, slowdown=9.0, tpot_s=2 * alone_s) == boundary(DECODES, slowdown=1.0)


@given(slowdown=st.floats(0.0, 5.0), rows=st.integers(1, 64))
def test_steps_with_it_last_no_longer_than_allowed(slowdown: float, rows: int) -> None:
    decodes = StepWork.decodes(rows, 50 * rows)
    found = boundary(decodes, slowdown=slowdown)
    predictor = StepTimePredictor(4, COST)
    alone_s, with_s = predictor.predict_s(decodes), predictor.predict_s(decodes.with_prompt(found.step_tokens))
    assert with_s <= (1 + slowdown) * alone_s * (1 + 1e-9)
    if found.step_tokens:
        assert found.tokens_per_s == pytest.approx(found.step_tokens / with_s)


def test_presets_have_boundaries_from_the_roofline() -> None:
    """Decodes of a large model wait for its weights: a chunk beside them costs little until compute is full."""
    instance = instance_preset("llama-2-13b", "a100-40g", 1)
    profile = instance.profile(network("10 Gbps", 10, 2e-5))
    few, many = (measured_tokens(profile.prefill_points, size, 1.1) for size in (4, 64))
    assert few is not None and many is not None and min(few, many) > 16
    predictor = StepTimePredictor(profile.cost.num_layers, profile.cost)
    decodes = StepWork.decodes(4, 4 * BATCH_CONTEXT)
    measured = prefill_boundary(decodes, predictor, profile, 0.5, most=4096)
    predicted = prefill_boundary(decodes, predictor, replace(profile, prefill_points=()), 0.5, most=4096)
    assert measured is not None and predicted is not None
    assert measured.step_tokens == pytest.approx(predicted.step_tokens, rel=0.25)

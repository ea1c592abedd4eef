"""Layers that a host launches one by one take at least as long as that: in model, fit, predictions and documents."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.cost.fit import Sample, evaluate, fit_cost_model
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import ChunkShape, CostModel, StepShape
from jettison.cost.predictor import StepTimePredictor
from jettison.cost.profile_document import ProfileDocumentError, profile_from_plain, profile_to_plain
from jettison.cost.recorded import RecordedStep, fitted_to
from jettison.cost.shapes import ShapeLimits, plan_shapes
from jettison.cost.stepwork import Measure, Part, StepWork, period_of, step_of

LIMITS = ShapeLimits(num_layers=28, max_num_tokens=8192, max_num_seqs=256, max_context=4096, max_kv_tokens=60000)

FIGURES = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu" / "foreseen.json"


def a_card(**changes) -> CostModel:
    """About the 7B shape on an H200."""
    card = CostModel(28, 1.1e-11, 5e-10, 6.5e-7, 2e-5, 4e-4, 1e-5, 1e-8, 2e-4, 1e-6, 220, 64, 1)
    return dataclasses.replace(card, **{"launch_layer_s": 7.6e-4, **changes})


def measured(model: CostModel, shapes, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    return [Sample(item.shape, model.step_cost_s(item.shape) * rng.lognormvariate(0.0, noise)) for item in shapes]


def test_a_step_takes_as_long_as_its_launches_or_its_work() -> None:
    card = a_card(launch_layer_s=7e-4)
    plain = dataclasses.replace(card, launch_layer_s=0.0)
    rest = card.step_s + card.entry_s + card.head_s + card.sample_s * 64
    small, large = [ChunkShape(0, 16)], [ChunkShape(0, 4096)]
    expected = 28 * 7e-4 + rest + 16 * card.entry_token_s
    assert card.batch_cost_s(small) == pytest.approx(expected) and plain.batch_cost_s(small) < 0.5 * expected
    assert card.batch_cost_s(large) == plain.batch_cost_s(large)
    decodes = [ChunkShape(900, 1)] * 30
    assert card.batch_cost_s(decodes) == plain.batch_cost_s(decodes), "decodes are captured"
    by_graphs = dataclasses.replace(card, graph_tokens=512)
    assert by_graphs.batch_cost_s(small) == plain.batch_cost_s(small)
    assert by_graphs.batch_cost_s([*decodes, ChunkShape(0, 480)]) == plain.batch_cost_s([*decodes, ChunkShape(0, 480)])
    assert by_graphs.batch_cost_s([*decodes, ChunkShape(0, 483)]) > plain.batch_cost_s([*decodes, ChunkShape(0, 483)])


@pytest.mark.parametrize("change", [{"launch_layer_s": -1.0}, {"launch_layer_s": float("nan")}, {"graph_tokens": -1}])
def test_nonsense_is_refused(change) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        a_card(**change)


@settings(max_examples=6, deadline=None)
@given(
    launch_s=st.floats(1e-4, 1.5e-3), speed=st.floats(0.3, 3.0), graph_tokens=st.sampled_from([0, 256, 1024]),
    seed=st.integers(0, 5), noise=st.sampled_from([0.0, 0.02]),
)
def test_a_fit_finds_the_launches_of_a_machine(launch_s, speed, graph_tokens, seed, noise) -> None:
    """A card of any speed, with or without graphs: on shapes held out the error is below 5 %."""
    card = a_card(launch_layer_s=launch_s, graph_tokens=graph_tokens)
    slowed = {name: getattr(card, name) / speed for name in ("pair_layer_s", "token_layer_s", "kv_token_layer_s")}
    card = dataclasses.replace(card, **slowed)
    plan = plan_shapes(LIMITS, seed=seed)
    found = fit_cost_model(measured(card, plan.fitted, noise, seed), 28)
    assert evaluate(found, measured(card, plan.held_out)).mean < 0.05


def test_a_machine_without_launches_gets_none() -> None:
    card = a_card(launch_layer_s=0.0)
    plan = plan_shapes(LIMITS, seed=1)
    for noise in (0.0, 0.05):
        assert fit_cost_model(measured(card, plan.fitted, noise), 28).launch_layer_s == 0.0


def of_a_card() -> list[Sample]:
    """Steps of 7B that an H200 has measured, as the figures tell them; of several rows the tokens are spread evenly."""
    told = r"foreseen over measured, (\d+) x (\d+) behind (\d+) in (\d+) layers, ([\d.]+) ms"
    samples = []
    for name in json.loads(FIGURES.read_text()):
        if found := re.fullmatch(told, name):
            rows, tokens, context, layers = map(int, found.groups()[:4])
            chunks = tuple(
                ChunkShape(context // rows + (row < context % rows), tokens // rows + (row < tokens % rows))
                for row in range(rows)
            )
            samples.append(Sample(StepShape(chunks, layers, True, rows if layers == 28 else 0), float(found[5]) / 1e3))
    return samples


def test_launches_explain_what_a_card_has_measured() -> None:
    samples = of_a_card()
    assert len(samples) >= 20
    found = fit_cost_model(samples, 28)
    assert evaluate(found, samples).mean < 0.03
    assert 28 * found.launch_layer_s == pytest.approx(0.0213, rel=0.1)


@given(
    decodes=st.integers(0, 40), context=st.integers(0, 4000), chunk=st.integers(2, 3000), prefix=st.integers(0, 3000),
    num_stages=st.integers(1, 3), graph_tokens=st.sampled_from([0, 200, 1024]),
)
def test_the_predictor_says_what_the_model_says(decodes, context, chunk, prefix, num_stages, graph_tokens) -> None:
    card = a_card(graph_tokens=graph_tokens)
    predictor = StepTimePredictor(28, card)
    chunks = [(1, context)] * decodes + [(chunk, prefix)]
    shapes = [ChunkShape(p, c) for c, p in chunks]
    work = StepWork.of(chunks)
    hops_s = (num_stages - 1) * card.step_s
    assert predictor.predict_s(work, step_of(num_stages)) == pytest.approx(card.batch_cost_s(shapes) + hops_s)
    assert predictor.predict_s(work, period_of(num_stages)) == pytest.approx(card.batch_cost_s(shapes) / num_stages)
    stage = Part(Measure.STAGE, num_stages, 9, is_first=False, is_last=False)
    part_s = card.batch_cost_s(shapes, 9, is_first=False, is_last=False)
    assert predictor.predict_s(work, stage) == pytest.approx(part_s)
    lone = StepWork.of(chunks[:decodes])
    assert predictor.predict_s(lone) == pytest.approx(card.batch_cost_s(shapes[:decodes]))


def a_profile(cost: CostModel) -> HardwareProfile:
    return HardwareProfile(cost, 1e9, 1e-4, 1e-3, 1e-11, 5e9, 1e9)


def test_documents_of_earlier_versions_know_no_launches() -> None:
    new, old = (a_profile(a_card(launch_layer_s=seconds, graph_tokens=7 * (seconds > 0))) for seconds in (7e-4, 0.0))
    told = profile_to_plain(old)
    assert not {"launch_layer_s", "graph_tokens"} & told["cost"].keys() and profile_from_plain(told, "it") == old
    assert profile_from_plain(json.loads(json.dumps(profile_to_plain(new))), "it") == new
    with pytest.raises(ProfileDocumentError, match="launch_layer_s"):
        profile_from_plain(told | {"cost": told["cost"] | {"launch_layer_s": "much"}}, "it")


def test_recorded_steps_scale_launches_with_the_whole() -> None:
    card = a_card()
    steps = []
    for tokens, context in [(1, 500), (1, 3000), (16, 0), (300, 200), (900, 0), (2500, 0), (4000, 900)]:
        pairs = tokens * context + tokens * (tokens + 1) // 2
        steps.append(RecordedStep(0, 0.0, 0.0, 1, tokens, pairs, tokens + context, 28, True, 1))
    took = [step._replace(seconds=1.3 * step.predicted_s(card)) for step in steps]
    fitted = fitted_to(card, took)
    assert [step.predicted_s(fitted) for step in took] == pytest.approx([step.seconds for step in took], rel=0.02)
    assert fitted.launch_layer_s == pytest.approx(1.3 * card.launch_layer_s, rel=0.02)

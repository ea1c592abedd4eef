"""Layers that a host launches one by one take at least as long as that: in model, fit, predictions and documents."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.cost.fit import Sample, evaluate, fit_cost_model
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import GRAPH_ROWS, ChunkShape, CostModel, StepShape
from jettison.cost.predictor import UNEVEN, StepTimePredictor
from jettison.cost.profile_document import ProfileDocumentError, profile_from_plain, profile_to_plain
from jettison.cost.recorded import RecordedStep, fitted_to
from jettison.cost.shapes import ShapeLimits, plan_shapes
from jettison.cost.stepwork import LONE_STEP, Measure, Part, StepWork, last_stage_of, period_of, step_of
from jettison.sim.executor import ModelledExecutor, StageShape, StepLoad

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


LAUNCHED = [
    (3, 1875, 0, 28, 36.39), (1, 1, 1573, 28, 5.23), (11, 11, 6483, 28, 5.54), (14, 42, 1290, 28, 21.26),
    (1, 76, 231, 27, 20.77), (2, 12, 0, 28, 21.71), (1, 214, 2, 28, 21.91), (21, 23, 4034, 28, 22.44),
    (25, 25, 6526, 23, 4.47), (3, 18, 0, 28, 21.61), (1, 18, 786, 28, 21.42), (16, 16, 1862, 28, 5.45),
    (11, 186, 6050, 28, 20.95), (1, 94, 129, 21, 16.06), (1, 768, 0, 28, 22.06), (1, 5, 88, 28, 21.88),
    (1, 1, 3, 28, 4.77), (6, 8, 2560, 28, 21.86), (1, 16, 2, 10, 8.16), (3, 6, 0, 28, 21.51), (1, 37, 599, 28, 21.95),
    (1, 8, 60, 3, 3.03), (1, 125, 0, 28, 21.49), (1, 18, 1, 28, 22.42), (5, 83, 1108, 28, 21.02),
    (32, 32, 8260, 21, 4.40), (3, 480, 0, 28, 21.76),
]  # fmt: skip
"""Steps of 7B by launches from the host, which an H200 has measured: rows, tokens, context, layers, milliseconds."""


def sample_of(rows: int, tokens: int, context: int, layers: int, ms: float) -> Sample:
    """Tokens and context are spread evenly over the rows."""
    chunks = tuple(
        ChunkShape(context // rows + (row < context % rows), tokens // rows + (row < tokens % rows))
        for row in range(rows)
    )
    return Sample(StepShape(chunks, layers, True, rows if layers == 28 else 0), ms / 1e3)


def test_launches_explain_what_a_card_has_measured() -> None:
    samples = [sample_of(*step) for step in LAUNCHED]
    assert len(samples) >= 20
    found = fit_cost_model(samples, 28)
    assert evaluate(found, samples).mean < 0.03
    assert 28 * found.launch_layer_s == pytest.approx(0.0213, rel=0.1)


def test_steps_by_graphs_of_a_card_wait_for_no_launches() -> None:
    told = r"foreseen over measured, (\d+) x (\d+) behind (\d+) in (\d+) layers, ([\d.]+) ms"
    matches = [re.fullmatch(told, name) for name in json.loads(FIGURES.read_text())]
    samples = [sample_of(*map(int, found.groups()[:4]), float(found[5])) for found in matches if found]
    assert len(samples) >= 20
    found = fit_cost_model(samples, 28)
    assert found.launch_layer_s == 0.0 and evaluate(found, samples).mean < 0.06


@given(
    decodes=st.integers(0, 40), context=st.integers(0, 4000), chunk=st.integers(2, 3000), prefix=st.integers(0, 3000),
    num_stages=st.integers(1, 3), graph_tokens=st.sampled_from([0, 200, 1024]),
)
def test_the_predictor_says_what_the_model_says(decodes, context, chunk, prefix, num_stages, graph_tokens) -> None:
    card = a_card(graph_tokens=graph_tokens)
    predictor = StepTimePredictor(28, card, added_stage_s=lambda num_stages: 0.0)
    chunks = [(1, context)] * decodes + [(chunk, prefix)]
    shapes = [ChunkShape(p, c) for c, p in chunks]
    work = StepWork.of(chunks)
    hops_s = (num_stages - 1) * card.step_s
    assert predictor.predict_s(work, step_of(num_stages)) == pytest.approx(card.batch_cost_s(shapes) + hops_s)
    uneven = 1.0 if num_stages == 1 else UNEVEN
    period_s = uneven * card.batch_cost_s(shapes) / num_stages
    assert predictor.predict_s(work, period_of(num_stages)) == pytest.approx(period_s)
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


def test_graphs_have_as_many_rows_as_the_runner_has() -> None:
    from jettison.device.cuda.rows import MOST_ROWS

    assert GRAPH_ROWS == MOST_ROWS
    card = a_card(graph_tokens=1024)
    plain = dataclasses.replace(card, launch_layer_s=0.0)
    few, many = ([ChunkShape(9, 1)] * num_rows for num_rows in (256, 257))
    mixed = [ChunkShape(0, 2), *few]
    assert card.batch_cost_s(few) == plain.batch_cost_s(few)
    predictor = StepTimePredictor(28, card)
    for chunks in (many, mixed):
        expected = card.batch_cost_s(chunks)
        assert expected > 1.5 * plain.batch_cost_s(chunks)
        work = StepWork.of((chunk.num_tokens, chunk.num_context) for chunk in chunks)
        assert predictor.predict_s(work) == pytest.approx(expected)
        load = StepLoad.of(work, len(chunks))
        executor, stage = ModelledExecutor(card), StageShape(28, True, True)
        assert executor.stage_ns(0, 0, load, stage) == pytest.approx(1e9 * expected)
    assert predictor.decoding()(257, 9 * 257) == pytest.approx(card.batch_cost_s(many))
    load = StepLoad.of(StepWork.decodes(257, 9 * 257), 257)
    assert executor.decode_ns(0, 0, load, stage, 3).tolist() == [
        executor.stage_ns(0, i, load.after(i), stage) for i in range(3)
    ]


def took_s(card: CostModel, work: StepWork) -> float:
    return card.totals_cost_s(
        work.num_tokens, work.num_pairs, work.num_kv_tokens + work.num_tokens, num_samples=work.num_rows,
        has_chunks=work.num_tokens > work.num_rows, num_rows=work.num_rows,
    )


def taught_by(card: CostModel, steps: list[StepWork], graph_tokens: int = 0) -> StepTimePredictor:
    """A predictor with a profile of ``a_card``, after the steps of another one."""
    predictor, now = StepTimePredictor(28, a_card(graph_tokens=graph_tokens)), 0
    for work in steps:
        end = now + round(1e9 * took_s(card, work))
        predictor.observe(work, [now, end])
        now = end
    return predictor


STEPS = st.lists(
    st.builds(
        lambda rows, context, tokens: StepWork.decodes(rows, rows * context).with_prompt(tokens),
        st.integers(1, 64), st.integers(0, 4000), st.sampled_from([0, 0, 2, 128, 512, 1024, 2048, 3000]),
    ),
    min_size=10, max_size=60,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0.2, 4.0), st.floats(0.4, 2.5), st.sampled_from([0, 256]), STEPS, st.integers(0, 300),
    st.lists(st.integers(0, 6000), min_size=2, max_size=9, unique=True).map(sorted), st.integers(0, 3000),
)
def test_more_work_is_never_less_time_whatever_was_learned(
    launches, speed, graph_tokens, steps, rows, sizes, context
) -> None:
    """Of another host's launches, and another card's speed: in tokens, rows and KV."""
    card = a_card(launch_layer_s=7.6e-4 * launches, token_layer_s=6.5e-7 * speed, graph_tokens=graph_tokens)
    predictor = taught_by(card, steps * 3, graph_tokens)

    def grows(works: list[StepWork]) -> None:
        seconds = [predictor.predict_s(work) for work in works]
        assert all(more >= less * (1 - 1e-12) for less, more in itertools.pairwise(seconds)), seconds

    decodes = StepWork.decodes(rows, rows * context)
    grows([decodes.with_prompt(size, context) for size in sizes])
    grows([StepWork.decodes(size, context) for size in sizes])
    grows([StepWork.decodes(size, context).with_prompt(sizes[-1] + 2) for size in sizes])
    grows([StepWork.decodes(rows, size).with_prompt(sizes[0], size) for size in sizes])


@pytest.mark.parametrize("launches", [0.4, 1.0, 1.6, 2.5])
def test_launches_of_another_host_are_learned_and_nothing_else_is(launches) -> None:
    card = a_card(launch_layer_s=7.6e-4 * launches)
    decodes = StepWork.decodes(32, 32000)
    prompts = [decodes.with_prompt(size) for size in (128, 512, 1024, 2048, 3000)]
    predictor = taught_by(card, [work for prompt in prompts for work in (decodes, prompt)] * 20)
    for work in (decodes, *(decodes.with_prompt(size) for size in (2, 64, 256, 800, 1500, 4000))):
        assert predictor.predict_s(work) == pytest.approx(took_s(card, work), rel=0.03)
    bound_s = 0.5 * (took_s(card, decodes) + took_s(card, prompts[0]))
    assert predictor.prefill_tokens_beside(decodes, bound_s, 4096) == 0, "not one token a step"
    size = predictor.prefill_tokens_beside(decodes, took_s(card, prompts[-1]), 4096)
    assert size == pytest.approx(3000, rel=0.05)


def test_copies_beside_launches_are_learned_too() -> None:
    card, predictor, now = a_card(), StepTimePredictor(28, a_card(), copy_bytes_per_s=4e9), 0
    work = StepWork.decodes(32, 32000).with_prompt(256)._replace(num_copied_bytes=20_000_000)
    plain = work._replace(num_copied_bytes=0)
    for i in range(200):
        took = took_s(card, work) + (i % 2) * 0.01  # twice as long as foreseen
        end = now + round(1e9 * took)
        predictor.observe(work if i % 2 else plain, [now, end])
        now = end
    assert predictor.predict_s(plain) == pytest.approx(took_s(card, plain), rel=0.1)
    assert predictor.predict_s(work) == pytest.approx(took_s(card, work) + 0.01, rel=0.1)


FROZEN = [
    "0x1.7b710cba24efcp-4", "0x1.d4da434ad46e2p-4", "0x1.0ba8f1a8d811cp-4", "0x1.0897495196b32p-3",
    "0x1.7ca5a7be7ceabp-4", "0x1.d60ede4f2c692p-4", "0x1.0c433f2b040f4p-4", "0x1.09be749907ca1p-3",
    "0x1.e164074615c94p-4", "0x1.1d669eeb62a3dp-3", "0x1.3ea26eeed07e8p-4", "0x1.67a28ec8ff858p-3",
    "0x1.1c60e20e35475p-1", "0x1.278e08e04b372p-1", "0x1.2fdcfce126addp-2", "0x1.fc14cbfd9c028p-1",
    "0x1.8c2f25e8447b4p-2", "0x1.a289738c705aep-2", "0x1.b3275b8e27483p-3", "0x1.6294100e4acfdp-1",
]  # fmt: skip
"""Seconds without launches, on every kind of processor."""
FITTING = [1371, 0]


def test_a_host_that_computes_itself_is_predicted_as_ever() -> None:
    """To the bit, as decisions of recorded runs depend on it."""
    cost = CostModel(8, 2e-8, 6e-8, 2e-5, 3e-4, 1e-4, 5e-5, 5e-7, 2e-4, 1e-5, 64, 8, 4)
    predictor, rng, now = StepTimePredictor(8, cost), random.Random(3), 0
    parts = (LONE_STEP, step_of(2), period_of(2), last_stage_of(2))
    for _ in range(300):
        work = StepWork.decodes(rng.randrange(1, 40), rng.randrange(20000)).with_prompt(rng.choice([0, 0, 5, 300, 900]))
        work = work._replace(num_copied_bytes=rng.choice([0, 0, 10**6]))
        end = now + rng.randrange(4 * 10**6, 4 * 10**8)
        predictor.observe(work, [now, end], 0, rng.choice(parts))
        now = end
    decodes = StepWork.decodes(17, 9000)
    told = [predictor.predict_s(decodes.with_prompt(n, 70), part) for n in (0, 1, 200, 3000) for part in parts]
    told += [predictor.decoding(part)(300, 70000) for part in parts]
    assert [seconds.hex() for seconds in told] == FROZEN
    assert [predictor.prefill_tokens_beside(decodes, seconds, 4000) for seconds in (0.3, 0.05)] == FITTING

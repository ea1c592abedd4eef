"""The predictor of step times: what it learns, what it never does, and its inverse."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.model import ChunkShape, CostModel
from jettison.cost.predictor import PRICES_EVERY, UNEVEN, USUAL_COPY_BYTES_PER_S, StepTimePredictor
from jettison.cost.stepfit import MIN_OBSERVATIONS
from jettison.cost.stepnotes import MAX_NOTED, StepNotes
from jettison.cost.stepwork import (
    LONE_STEP,
    NOTHING,
    Measure,
    Part,
    StepWork,
    last_stage_of,
    period_of,
    step_of,
)

COST = CostModel(8, 2e-8, 6e-8, 2e-5, 3e-4, 1e-4, 5e-5, 5e-7, 2e-4, 1e-5)
KNEES = replace(COST, weight_tokens=64, head_tokens=8, row_tile=4)
GB = 1e9

Chunks = list[tuple[int, int]]


def whole_s(chunks: Chunks, cost: CostModel = COST) -> float:
    """What a lone instance takes by the cost model."""
    return cost.batch_cost_s([ChunkShape(context, tokens) for tokens, context in chunks])


def some_chunks(rng: random.Random) -> Chunks:
    chunks = [(1, rng.randrange(2000)) for _ in range(rng.randrange(30))]
    return chunks + [(rng.randrange(2, 300), rng.randrange(1000)) for _ in range(rng.randrange(0 if chunks else 1, 3))]


def serve(
    predictor: StepTimePredictor, num: int, factor: float = 1.0, *, noise: float = 0.0, seed: int = 0,
    part: Part = LONE_STEP, share: float = 1.0, begin_ns: int = 0,
) -> int:
    """Steps of a machine that takes ``factor`` times as long as the cost model has it; returns when the last ended."""
    rng = random.Random(seed)
    for _ in range(num):
        chunks = some_chunks(rng)
        seconds = factor * share * whole_s(chunks) * rng.lognormvariate(0.0, noise)
        end_ns = begin_ns + round(seconds * 1e9)
        predictor.observe(StepWork.of(chunks), (begin_ns, end_ns), 0, part)
        begin_ns = end_ns
    return begin_ns


def error(predictor: StepTimePredictor, chunks: Chunks, seconds: float, part: Part = LONE_STEP) -> float:
    predicted = predictor.predict_s(StepWork.of(chunks), part)
    assert predicted is not None
    return abs(predicted / seconds - 1)


ASKED: list[Chunks] = [[(1, 500)] * 20, [(256, 0)], [(100, 900), *[(1, 100)] * 5]]

# --- what is computed -------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000)), max_size=8))
def test_totals_are_the_sums_over_the_chunks(chunks: Chunks) -> None:
    work = StepWork.of(chunks)
    shapes = [ChunkShape(context, tokens) for tokens, context in chunks]
    assert work.num_pairs == sum(shape.num_pairs for shape in shapes)
    built = NOTHING
    for tokens, context in chunks:
        built = built.with_prompt(tokens, context)
    assert built == work


def test_decodes_are_rows_of_one_token() -> None:
    assert StepWork.decodes(3, 60) == StepWork.of([(1, 10), (1, 20), (1, 30)])


def test_prompts_are_cut_to_their_length() -> None:
    beside = StepWork.decodes(2, 50)
    assert beside.with_prompts(250, 100, 7) == beside.with_prompt(100, 7).with_prompt(100, 7).with_prompt(50, 7)
    assert beside.with_prompts(250) == beside.with_prompt(250)
    assert beside.with_prompts(0, 10) == beside


@pytest.mark.parametrize("cost", [COST, KNEES])
@pytest.mark.parametrize("chunks", ASKED)
def test_a_profile_answers_before_anything_was_seen(cost: CostModel, chunks: Chunks) -> None:
    predictor = StepTimePredictor(8, cost, added_stage_s=lambda num_stages: num_stages * 1e-3)
    work, alone_s = StepWork.of(chunks), whole_s(chunks, cost)
    shapes = [ChunkShape(context, tokens) for tokens, context in chunks]
    assert predictor.predict_s(work) == pytest.approx(alone_s)
    assert predictor.predict_s(work, step_of(3)) == pytest.approx(alone_s + 2 * cost.step_s)
    assert predictor.predict_s(work, period_of(2)) == pytest.approx(UNEVEN * alone_s / 2 + 2e-3)
    middle = Part(Measure.STAGE, 4, 3, is_first=False, is_last=False)
    stage_s = cost.batch_cost_s(shapes, 3, is_first=False, is_last=False)
    assert predictor.predict_s(work, middle) == pytest.approx(stage_s)
    last_s = cost.batch_cost_s(shapes, 4, is_first=False)
    assert predictor.predict_s(work, last_stage_of(2)) == pytest.approx(last_s)
    assert predictor.predict_s(work, last_stage_of(2, 4)) == pytest.approx(last_s)
    assert predictor.predict_s(NOTHING) == 0.0


def test_without_a_profile_nothing_is_predicted_before_enough_was_seen() -> None:
    predictor = StepTimePredictor(8)
    serve(predictor, MIN_OBSERVATIONS - 1)
    assert predictor.predict_s(StepWork.decodes(4, 100)) is None
    assert predictor.prefill_tokens_per_s(512) is None
    assert predictor.largest_batch(1.0, 10, lambda n: StepWork.decodes(n, 0)) is None
    assert predictor.chunk_prices(2).chunk_cost(7, 100) == 7.0
    serve(predictor, 1, begin_ns=10**12)
    assert predictor.predict_s(StepWork.decodes(4, 100)) is not None


# --- what is learned --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", ASKED)
@pytest.mark.parametrize("cost", [None, COST])
def test_exact_steps_are_recovered(cost: CostModel | None, chunks: Chunks) -> None:
    predictor = StepTimePredictor(8, cost)
    serve(predictor, 600, 2.0)
    assert error(predictor, chunks, 2.0 * whole_s(chunks)) < 0.02


@pytest.mark.parametrize("chunks", ASKED)
@pytest.mark.parametrize("seed", range(3))
def test_noise_averages_out(seed: int, chunks: Chunks) -> None:
    predictor = StepTimePredictor(8, COST)
    serve(predictor, 800, noise=0.2, seed=seed)
    assert error(predictor, chunks, whole_s(chunks)) < 0.2


@pytest.mark.parametrize("chunks", ASKED)
def test_a_machine_that_slows_down_is_followed_within_a_hundred_steps(chunks: Chunks) -> None:
    predictor = StepTimePredictor(8, COST)
    end_ns = serve(predictor, 500)
    serve(predictor, 100, 2.5, seed=1, begin_ns=end_ns)
    assert error(predictor, chunks, 2.5 * whole_s(chunks)) < 0.15


def test_one_step_that_was_disturbed_moves_little() -> None:
    predictor, chunks = StepTimePredictor(8, COST), ASKED[0]
    end_ns = serve(predictor, 200)
    predictor.observe(StepWork.of(chunks), (end_ns, end_ns + round(1e9 * 100 * whole_s(chunks))))
    assert error(predictor, chunks, whole_s(chunks)) < 0.1


@pytest.mark.parametrize("chunks", ASKED)
def test_first_steps_that_are_almost_alike_do_not_decide_for_long_what_others_cost(chunks: Chunks) -> None:
    """They happen to get longer with the context: taken at its word, KV would be dearer than all else."""
    predictor, end_ns = StepTimePredictor(8), 0
    for number in range(MIN_OBSERVATIONS):
        begin_ns, end_ns = end_ns, end_ns + round(1e9 * whole_s([(1, 20)]) * (0.5 + number / 4))
        predictor.observe(StepWork.of([(1, 20 + number)]), (begin_ns, end_ns))
    serve(predictor, 80, begin_ns=end_ns)
    assert error(predictor, chunks, whole_s(chunks)) < 0.25


def test_a_price_learned_from_lone_steps_is_known_of_pipelines() -> None:
    """What is shared comes from every group; a number of stages only bends it."""
    predictor, chunks = StepTimePredictor(8, COST), ASKED[1]
    serve(predictor, 300, 3.0)
    assert error(predictor, chunks, 3.0 * (whole_s(chunks) + COST.step_s), step_of(2)) < 0.3


def test_a_pipeline_that_reaches_less_is_no_news_of_lone_steps() -> None:
    predictor, chunks = StepTimePredictor(8, COST), ASKED[0]
    end_ns = serve(predictor, 300)
    for index in range(60):
        end_ns = serve(predictor, 1, 1.6, share=0.5, part=period_of(2), seed=index, begin_ns=end_ns)
        end_ns = serve(predictor, 1, seed=1000 + index, begin_ns=end_ns)
    assert error(predictor, chunks, whole_s(chunks)) < 0.1
    assert predictor.measured_pipelines == [2]
    assert predictor.pipeline_efficiency(StepWork.of(chunks), 2) == pytest.approx(1 / 1.6, rel=0.1)


@pytest.mark.parametrize("cost", [None, COST])
@pytest.mark.parametrize("part", [step_of(2), period_of(2)])
def test_small_steps_at_a_pipeline_s_end_say_nothing_wrong_of_large_ones(cost: CostModel | None, part: Part) -> None:
    """A pipeline adds hops to what lone instances do. Before a restore its steps are small, and hops most of them."""
    predictor, hop_s, end_ns = StepTimePredictor(8, cost), 2e-3, 0
    share = 0.5 if part.measure is Measure.PERIOD else 1.0

    def decode(num_rows: int, part: Part, extra_s: float, share: float) -> None:
        nonlocal end_ns
        chunks = [(1, 200)] * num_rows
        begin_ns, end_ns = end_ns, end_ns + round(1e9 * (share * whole_s(chunks) + extra_s))
        predictor.observe(StepWork.of(chunks), (begin_ns, end_ns), 0, part)

    for index in range(400):
        decode(1 + index % 16, LONE_STEP, 0.0, 1.0)
    for num_rows, times in ((16, 100), (8, 50), (2, 200)):
        for _ in range(times):
            decode(num_rows, part, hop_s, share)
    for num_rows in (2, 8, 16):
        chunks = [(1, 200)] * num_rows
        assert error(predictor, chunks, share * whole_s(chunks) + hop_s, part) < 0.05
    # The minute changes, for pipelines that come back as for lone instances.
    for index in range(200):
        decode(1 + index % 16, LONE_STEP, 0.0, 1.5)
    chunks = [(1, 200)] * 16
    assert error(predictor, chunks, share * 1.5 * whole_s(chunks) + hop_s, part) < 0.15


@pytest.mark.parametrize("part", [step_of(2), period_of(2)])
def test_a_hop_is_a_time_and_no_part_of_what_steps_cost_later(part: Part) -> None:
    """Between two drops the fixed cost of lone steps is found to be three times as high; a hop takes what it took."""
    predictor, hop_s, end_ns = StepTimePredictor(8), 1e-3, 0
    share = 0.5 if part.measure is Measure.PERIOD else 1.0
    rng = random.Random(0)

    def serve_rows(
        num_steps: int, fixed_s: float, part: Part = LONE_STEP, share: float = 1.0, hop_s: float = 0.0
    ) -> None:
        nonlocal end_ns
        for _ in range(num_steps):
            num_rows = rng.randint(1, 16)
            seconds = (share * (fixed_s + 1e-3 * num_rows) + hop_s) * rng.lognormvariate(0.0, 0.1)
            begin_ns, end_ns = end_ns, end_ns + round(1e9 * seconds)
            predictor.observe(StepWork.decodes(num_rows, 200 * num_rows), (begin_ns, end_ns), 0, part)

    serve_rows(400, 2e-3)
    assert predictor.predict_s(StepWork.decodes(8, 1600)) is not None
    serve_rows(300, 2e-3, part, share, hop_s)
    assert predictor.measured_pipelines == ([2] if part.measure is Measure.PERIOD else [])
    serve_rows(800, 6e-3)
    for num_rows in (4, 12):
        work = StepWork.decodes(num_rows, 200 * num_rows)
        alone_s, together_s = predictor.predict_s(work), predictor.predict_s(work, part)
        assert alone_s is not None and together_s is not None
        assert together_s - share * alone_s == pytest.approx(hop_s, rel=0.5)


def test_a_pipeline_as_fast_as_lone_instances_were_says_that_the_minute_was_slow() -> None:
    predictor = StepTimePredictor(8, COST)
    end_ns = serve(predictor, 300, 2.0)
    serve(predictor, 300, part=step_of(2), begin_ns=end_ns)
    for chunks in ASKED[:1]:
        assert error(predictor, chunks, whole_s(chunks), step_of(2)) < 0.25
        assert error(predictor, chunks, whole_s(chunks)) < 0.25


def test_stages_are_known_by_a_profile_or_by_what_was_seen_of_them() -> None:
    assert StepTimePredictor(8, COST).knows_stages
    predictor = StepTimePredictor(8)
    serve(predictor, 300)
    assert not predictor.knows_stages
    serve(predictor, 2 * MIN_OBSERVATIONS, part=last_stage_of(2), share=0.5, begin_ns=10**13)
    assert predictor.knows_stages


def test_a_pipeline_that_was_not_seen_adds_a_hop_to_each_stage_however_large_the_step() -> None:
    """A small step loses a larger part of its throughput by it than a large one."""
    predictor = StepTimePredictor(8, COST, added_stage_s=lambda num_stages: 1e-3)
    for num_rows in (1, 8, 64):
        work = StepWork.decodes(num_rows, 100 * num_rows)
        alone_s, rows_s = predictor.predict_s(work), predictor.decoding(period_of(2))
        assert alone_s is not None and rows_s is not None
        assert rows_s(num_rows, 100 * num_rows) == pytest.approx(UNEVEN * alone_s / 2 + 1e-3)
        assert [predictor.pipeline_efficiency(work, n) for n in (1, 2, 4)] == pytest.approx(
            [1.0, *(max(0.3, alone_s / (UNEVEN * alone_s + n * 1e-3)) for n in (2, 4))]
        )
    assert predictor.predict_s(NOTHING, period_of(2)) == 0.0
    for _ in range(300):
        serve(predictor, 1, share=0.5, part=period_of(2), begin_ns=0)
    work = StepWork.of(ASKED[0])
    assert predictor.pipeline_efficiency(work, 2) > 0.95, "it has been seen to add nothing"


def test_what_copies_add_to_a_step_is_learned() -> None:
    predictor, work = StepTimePredictor(8, COST, copy_bytes_per_s=GB), StepWork.decodes(10, 1000)
    copying, step_s = work._replace(num_copied_bytes=10_000_000), whole_s([(1, 100)] * 10)
    assert predictor.predict_s(copying) == pytest.approx(step_s + 0.01)
    for index in range(300):
        work_now, seconds = (copying, step_s + 0.002) if index % 2 else (work, step_s)
        predictor.observe(work_now, (index * 10**9, index * 10**9 + round(seconds * 1e9)))
    assert predictor.predict_s(copying) == pytest.approx(step_s + 0.002, rel=0.1)
    assert predictor.predict_s(work) == pytest.approx(step_s, rel=0.1)


@given(st.floats(0.25, 4.0), st.integers(100_000, 20_000_000), st.booleans(), st.integers(0, 1000))
def test_a_stream_of_steps_with_copies_teaches_their_price(
    factor: float, most_bytes: int, is_profiled: bool, seed: int
) -> None:
    rng, work = random.Random(seed), StepWork.decodes(10, 1000)
    rate = GB if is_profiled else USUAL_COPY_BYTES_PER_S
    predictor = StepTimePredictor(8, COST, copy_bytes_per_s=rate if is_profiled else None)
    step_s, end_ns = whole_s([(1, 100)] * 10), 0
    for index in range(400):
        copied = most_bytes if index % 3 == 0 else rng.randrange(most_bytes) if index % 3 == 1 else 0
        begin_ns, end_ns = end_ns, end_ns + round((step_s + factor * copied / rate) * 1e9)
        predictor.observe(work._replace(num_copied_bytes=copied), (begin_ns, end_ns))
    true_s = step_s + factor * most_bytes / rate
    assert predictor.predict_s(work._replace(num_copied_bytes=most_bytes)) == pytest.approx(true_s, rel=0.15)
    assert predictor.predict_s(work) == pytest.approx(step_s, rel=0.15)


@pytest.mark.parametrize("factor", [1.0, 3.0, 10.0])
def test_a_price_is_learned_though_copies_are_a_small_part_of_noisy_steps(factor: float) -> None:
    rng, work, step_s, end_ns = random.Random(7), StepWork.decodes(10, 1000), whole_s([(1, 100)] * 10), 0
    predictor, num_bytes = StepTimePredictor(8, COST), round(0.03 * step_s * USUAL_COPY_BYTES_PER_S)
    for index in range(600):
        copied = num_bytes if index % 3 == 0 else 0
        took_s = step_s * rng.lognormvariate(0.0, 0.05) + factor * copied / USUAL_COPY_BYTES_PER_S
        begin_ns, end_ns = end_ns, end_ns + round(took_s * 1e9)
        predictor.observe(work._replace(num_copied_bytes=copied), (begin_ns, end_ns))
    seconds = [predictor.predict_s(work._replace(num_copied_bytes=n)) for n in (0, 100 * num_bytes)]
    assert seconds[0] is not None and seconds[1] is not None
    assert (seconds[1] - seconds[0]) / (3.0 * step_s) == pytest.approx(factor, rel=0.35)


@given(st.lists(st.tuples(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 4000)), min_size=1, max_size=6),
                          st.integers(0, 10**10)), max_size=40), st.sampled_from([None, 1e8, GB]))
def test_without_copies_their_rate_is_nothing_to_predictions(
    steps: list[tuple[Chunks, int]], rate: float | None
) -> None:
    asked = StepWork.of([(1, 100), (30, 5)])
    predicted = []
    for copy_bytes_per_s in (rate, 12 * GB):
        predictor = StepTimePredictor(8, COST, copy_bytes_per_s=copy_bytes_per_s)
        for index, (chunks, took_ns) in enumerate(steps):
            predictor.observe(StepWork.of(chunks), (index, index + took_ns))
        predicted.append(predictor.predict_s(asked))
    assert predicted[0] == predicted[1]


def test_of_steps_that_follow_each_other_the_first_alone_waits_for_copies() -> None:
    at_once, one_by_one = StepNotes(), StepNotes()
    work = StepWork.decodes(3, 300)._replace(num_copied_bytes=1000)
    at_once.add((0, 5, 8, 11), 0, LONE_STEP, work)
    for index, times_ns in enumerate([(0, 5), (5, 8), (8, 11)]):
        one_by_one.add(times_ns, 0, LONE_STEP, work if index == 0 else StepWork.decodes(3, 300 + 3 * index))
    assert at_once.take() == one_by_one.take()


def test_what_copies_beside_steps_add_is_learned_by_itself() -> None:
    """From steps with both kinds: a byte that a step waits for costs what it did, one beside it a fifth of what was
    thought."""
    predictor, work, rng = StepTimePredictor(8, COST, copy_bytes_per_s=GB), StepWork.decodes(10, 1000), random.Random(3)
    step_s, end_ns = whole_s([(1, 100)] * 10), 0
    for _ in range(200):
        before, beside = rng.choice((0, 4_000_000)), rng.choice((0, 0, 8_000_000))
        begin_ns, end_ns = end_ns, end_ns + round((step_s + before / GB + 0.1 * beside / GB) * 1e9)
        predictor.observe(work._replace(num_copied_bytes=before, num_beside_bytes=beside), (begin_ns, end_ns))
    for name, wanted_s in (("num_copied_bytes", 0.004), ("num_beside_bytes", 0.0004)):
        predicted_s = predictor.predict_s(work._replace(**{name: 4_000_000}))
        assert predicted_s == pytest.approx(step_s + wanted_s, rel=0.06), name


def test_copies_beside_steps_cost_what_the_profile_says_and_without_one_half_of_those_before() -> None:
    work, num_bytes = StepWork.decodes(10, 1000), 10_000_000
    for profiled_s, wanted_s in ((3e-10, 0.003), (0.0, 0.0), (None, 0.005)):
        predictor = StepTimePredictor(8, COST, copy_bytes_per_s=GB, beside_byte_s=profiled_s)
        for part, share in ((LONE_STEP, 1.0), (step_of(2), 1.0), (period_of(2), 0.5), (last_stage_of(2), 0.5)):
            seconds = [predictor.predict_s(work._replace(num_beside_bytes=n), part) for n in (0, num_bytes)]
            assert seconds[1] - seconds[0] == pytest.approx(share * wanted_s)


def test_stages_copy_at_the_same_time_and_do_not_compute_meanwhile() -> None:
    predictor, work = StepTimePredictor(8, COST, copy_bytes_per_s=GB), StepWork.decodes(10, 1000)

    def added_s(part: Part) -> float:
        seconds = [predictor.predict_s(work._replace(num_copied_bytes=n), part) for n in (0, 10_000_000)]
        assert seconds[0] is not None and seconds[1] is not None
        return seconds[1] - seconds[0]

    assert [added_s(part) for part in (step_of(2), period_of(2), last_stage_of(2))] == pytest.approx([0.01, 0.005, 0.0])


# --- in which order, and how often it is asked ------------------------------------------------------------------


def test_observing_is_deterministic_whatever_the_order_of_telling() -> None:
    rng = random.Random(5)
    steps = []
    for group in range(3):
        for end_ns in itertools.accumulate(rng.randrange(10**6, 10**7) for _ in range(50)):
            steps.append((StepWork.of(some_chunks(rng)), (end_ns - 900_000, end_ns), group))
    told = []
    for seed in range(3):
        random.Random(seed).shuffle(steps)
        predictor = StepTimePredictor(8, COST)
        for work, times_ns, group in steps:
            predictor.observe(work, times_ns, group)
        told.append(predictor.predict_s(StepWork.decodes(7, 70)))
    assert told[0] == told[1] == told[2]


def test_a_run_of_decodes_is_the_same_as_its_steps() -> None:
    at_once, singly = StepTimePredictor(8, COST), StepTimePredictor(8, COST)
    ends = list(itertools.accumulate([5_000_000 + 1000 * i for i in range(100)]))
    at_once.observe(StepWork.decodes(6, 600), ends, 3)
    for number, (begin_ns, end_ns) in enumerate(itertools.pairwise(ends)):
        singly.observe(StepWork.decodes(6, 600 + 6 * number), (begin_ns, end_ns), 3)
    asked = StepWork.decodes(9, 1234)
    assert at_once.predict_s(asked) == singly.predict_s(asked)


@pytest.mark.parametrize("ask", [
    lambda predictor: predictor.predict_s(StepWork.decodes(9, 1234)),
    lambda predictor: predictor.largest_batch(0.1, 500, lambda size: StepWork.decodes(size, 100 * size)),
    lambda predictor: predictor.prefill_tokens_per_s(512),
    lambda predictor: predictor.pipeline_efficiency(StepWork.decodes(9, 1234), 2),
    lambda predictor: predictor.measured_pipelines,
    lambda predictor: predictor.chunk_prices(2),
])  # fmt: skip
def test_before_a_question_is_answered_steps_are_told_of_that_have_not_been(
    ask: Callable[[StepTimePredictor], object]
) -> None:
    def tell() -> None:
        while untold:
            times_ns, part = untold.pop(0)
            late.observe(StepWork.decodes(6, 600), times_ns, 3, part)

    late, early = StepTimePredictor(8, COST, catch_up=tell), StepTimePredictor(8, COST)
    ends = list(itertools.accumulate([50_000_000] * 100))
    untold = [(ends, LONE_STEP), (ends, period_of(2)), (ends, last_stage_of(2))]
    for times_ns, part in untold:
        early.observe(StepWork.decodes(6, 600), times_ns, 3, part)
    assert ask(late) == ask(early) != ask(StepTimePredictor(8, COST))


def test_of_steps_without_a_question_the_last_are_kept() -> None:
    predictor, last = StepTimePredictor(8), StepTimePredictor(8)
    for index in range(MAX_NOTED + 100):
        times_ns = (1000 * index, 1000 * index + 500 + index % 7)
        predictor.observe(StepWork.decodes(1 + index % 5, index % 997), times_ns, 0)
        if index > MAX_NOTED // 2:
            last.observe(StepWork.decodes(1 + index % 5, index % 997), times_ns, 0)
    assert len(predictor._notes._runs) < MAX_NOTED // 2
    assert predictor.predict_s(StepWork.decodes(3, 30)) == last.predict_s(StepWork.decodes(3, 30))


# --- what holds whatever was seen -------------------------------------------------------------------------------

works = st.builds(
    lambda chunks, before, beside: StepWork.of(chunks)._replace(num_copied_bytes=before, num_beside_bytes=beside),
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 4000)), min_size=1, max_size=6), st.integers(0, 10**8),
    st.integers(0, 10**8),
)
parts = st.sampled_from([
    LONE_STEP, step_of(2), period_of(2), last_stage_of(2), Part(Measure.STAGE, 3, 2, is_first=True, is_last=False)
])
observations = st.lists(st.tuples(works, parts, st.integers(0, 10**10)), max_size=40)


def fed(steps: list[tuple[StepWork, Part, int]], *, is_profiled: bool = True) -> StepTimePredictor:
    predictor = StepTimePredictor(8, KNEES if is_profiled else None, copy_bytes_per_s=GB)
    for index, (work, part, took_ns) in enumerate(steps):
        predictor.observe(work, (index, index + took_ns), index % 3, part)
    return predictor


@given(observations, works, works, parts, st.booleans())
def test_more_work_never_takes_less(
    steps: list[tuple[StepWork, Part, int]], work: StepWork, more: StepWork, part: Part, is_profiled: bool
) -> None:
    predictor = fed(steps, is_profiled=is_profiled)
    less_s = predictor.predict_s(work, part)
    if less_s is None:
        return
    assert 0.0 <= less_s < float("inf")
    for field in StepWork._fields:
        grown = work._replace(**{field: getattr(work, field) + getattr(more, field)})
        assert (predictor.predict_s(grown, part) or 0.0) >= less_s


@given(observations, works, parts, st.floats(0.0, 10.0), st.integers(0, 3000), st.integers(0, 5000))
def test_the_largest_prompt_within_a_time_is_the_inverse_of_predicting(
    steps: list[tuple[StepWork, Part, int]], decodes: StepWork, part: Part, seconds: float, context: int, most: int
) -> None:
    predictor = fed(steps)
    largest = predictor.largest_batch(seconds, most, lambda n: decodes.with_prompt(n, context), part)
    assert largest is not None and 0 <= largest <= most

    def takes_s(num_tokens: int) -> float:
        predicted = predictor.predict_s(decodes.with_prompt(num_tokens, context), part)
        assert predicted is not None
        return predicted

    assert largest == 0 or takes_s(largest) <= seconds
    assert largest == most or takes_s(largest + 1) > seconds


def test_the_largest_batch_of_decodes_and_of_bytes() -> None:
    predictor = StepTimePredictor(8, COST, copy_bytes_per_s=GB)
    rows = predictor.largest_batch(0.01, 500, lambda n: StepWork.decodes(n, 300 * n))
    assert rows is not None and 0 < rows < 500
    assert whole_s([(1, 300)] * rows) <= 0.01 < whole_s([(1, 300)] * (rows + 1))
    work = StepWork.decodes(10, 3000)
    step_s = predictor.predict_s(work)
    assert step_s is not None
    num_bytes = predictor.largest_batch(step_s + 1e-3, 10**9, lambda n: work._replace(num_copied_bytes=n))
    assert num_bytes == pytest.approx(1_000_000, rel=1e-3)


@given(observations, st.integers(2, 300), st.integers(0, 2000))
def test_chunk_costs_grow_with_tokens_whatever_was_seen(
    steps: list[tuple[StepWork, Part, int]], num_tokens: int, num_context: int
) -> None:
    prices = fed(steps).chunk_prices(2)
    assert prices.fixed_cost >= 0.0
    assert 0.0 < prices.chunk_cost(num_tokens, num_context) < prices.chunk_cost(num_tokens + 1, num_context)


# --- for policies -----------------------------------------------------------------------------------------------


def test_chunk_prices_are_those_of_the_last_stage() -> None:
    prices = StepTimePredictor(8, COST).chunk_prices(2)
    assert prices.fixed_cost == pytest.approx(COST.gamma_s(4, is_first=False) + COST.head_s)
    for tokens, context in ((256, 0), (100, 1000)):
        chunk = [ChunkShape(context, tokens)]
        additive_s = COST.batch_cost_s(chunk, 4, is_first=False, is_last=False) - COST.gamma_s(4, is_first=False)
        assert prices.chunk_cost(tokens, context) == pytest.approx(additive_s, rel=0.05)
    assert prices.chunk_cost(0, 100) == 0.0


def test_the_prefill_rate_leaves_the_decodes_their_share() -> None:
    predictor, decodes = StepTimePredictor(8, COST), StepWork.decodes(112, 20_000)
    alone_s = predictor.predict_s(decodes.with_prompt(400))
    assert alone_s is not None
    assert predictor.prefill_tokens_per_s(512, decodes) == pytest.approx(400 / alone_s)
    assert predictor.prefill_tokens_per_s(100, decodes) == pytest.approx(1 / whole_s([(1, 0)] * 113), rel=0.5)
    merged_s = predictor.predict_s(decodes.with_prompt(400), step_of(2))
    assert merged_s is not None
    assert predictor.prefill_tokens_per_s(512, decodes, 2) == pytest.approx(2 * 400 / merged_s)


def test_what_a_stage_computes_is_fitted_apart_and_by_steps_until_it_is_seen() -> None:
    predictor, stage, work = StepTimePredictor(8), last_stage_of(2), StepWork.of(ASKED[1])
    serve(predictor, 200)
    by_steps = predictor.predict_s(work, stage)
    assert by_steps is not None and predictor.chunk_prices(2).token > 0.0
    end_ns = serve(predictor, 200, part=stage, share=0.5)
    assert error(predictor, ASKED[1], 0.5 * whole_s(ASKED[1]), stage) < 0.1
    waiting = serve(predictor, 400, 3.0, part=step_of(2), begin_ns=end_ns)  # waits are no stage's
    assert waiting > end_ns and error(predictor, ASKED[1], 0.5 * whole_s(ASKED[1]), stage) < 0.1


def test_prices_follow_what_stages_take() -> None:
    predictor, stage = StepTimePredictor(8, COST), last_stage_of(2)
    assumed = predictor.chunk_prices(2)
    end_ns = serve(predictor, PRICES_EVERY - 1, 4.0, part=stage, share=0.5)
    assert predictor.chunk_prices(2) == assumed, "a few steps old"
    serve(predictor, 100, 4.0, part=stage, share=0.5, begin_ns=end_ns)
    assert predictor.chunk_prices(2).token > 2.0 * assumed.token


def test_runs_of_many_groups_at_once_are_looked_through_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is old enough to be let go: looking at all of them each time would take quadratic time."""
    predictor, looks, forget = StepTimePredictor(8, COST), [], StepNotes._forget
    monkeypatch.setattr(StepNotes, "_forget", lambda notes: looks.append(len(notes)) or forget(notes))
    for group in range(2000):
        predictor.observe(StepWork.decodes(4, 40), [1000 * n + group for n in range(51)], group)
    assert len(looks) <= 4


@pytest.mark.parametrize("num_stages", [1, 2])
def test_decodes_that_are_asked_for_together_take_what_each_takes_alone(num_stages: int) -> None:
    predictor, part = StepTimePredictor(COST.num_layers, COST), step_of(num_stages)
    seconds_of = predictor.decoding(part)
    assert seconds_of is not None
    for num_rows, num_kv_tokens in [(0, 0), (1, 0), (7, 700), (7, 12_345), (100, 1_000_000)]:
        assert seconds_of(num_rows, num_kv_tokens) == predictor.predict_s(
            StepWork.decodes(num_rows, num_kv_tokens), part
        )
    assert StepTimePredictor(COST.num_layers).decoding(part) is None

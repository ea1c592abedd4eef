"""KunServe v3, Fig. 15: our form of the cost model against one that neglects attention, on steps that neither has seen.

The machine is the preset's roofline (Qwen2.5-14B on an A800), which was calibrated on operators that others have timed
and has another form than either model: rooflines of compute and of memory that meet in a curve, element by element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from matplotlib.figure import Figure as Picture

from jettison.cost.fit import Sample, fit_attention_free, fit_cost_model, relative_errors
from jettison.cost.model import ChunkShape, StepPredictor, StepShape
from jettison.cost.presets import cluster_preset
from jettison.cost.shapes import ShapeLimits, plan_shapes
from papers.claims import computed
from papers.figure import Claim, Figure, Found, Part, Plot
from papers.pictures import lines

LIMITS = ShapeLimits(
    num_layers=48, max_num_tokens=8192, max_num_seqs=256, max_context=32_768, max_kv_tokens=200_000, block_size=64
)
ALONE = [(0, length) for length in range(384, 8192, 384)]
"""(tokens before, tokens) of each step that is judged."""
BEHIND = [(prefix, length) for prefix in range(1024, 16_385, 1024) for length in (384, 768, 1536)]
OURS, THEIRS = "ours", "without attention"


@cache
def truth() -> StepPredictor:
    """The machine."""
    return cluster_preset("kunserve-a").instance.cost_model()


@cache
def grid() -> list[Sample]:
    """What both models are fitted on: a profile's grid."""
    return [Sample(item.shape, truth().step_cost_s(item.shape)) for item in plan_shapes(LIMITS).fitted]


@cache
def models() -> dict[str, StepPredictor]:
    """Both, fitted."""
    return {OURS: fit_cost_model(grid(), LIMITS.num_layers), THEIRS: fit_attention_free(grid(), LIMITS.num_layers)}


def samples(chunks: Sequence[tuple[int, int]]) -> list[Sample]:
    """Those that the grid has not."""
    seen = {sample.shape for sample in grid()}
    shapes = [StepShape((ChunkShape(prefix, length),), LIMITS.num_layers, True, 1) for prefix, length in chunks]
    return [Sample(shape, truth().step_cost_s(shape)) for shape in shapes if shape not in seen]


def deviation(where: str, system: str, chunks: Sequence[tuple[int, int]]) -> Claim:
    """The largest one, in percent."""

    def largest() -> float:
        return 100.0 * max(abs(error) for error in relative_errors(models()[system], samples(chunks)))

    return computed(f"largest deviation {where}", system, largest, unit="%")


def _draw(_: Mapping[str, Found]) -> Picture:
    shown = samples([(prefix, length) for prefix, length in BEHIND if length == 768])
    at = [sample.shape.chunks[0].num_context for sample in shown]
    series = {"measured (the roofline)": (at, [1e3 * sample.seconds for sample in shown])} | {
        name: (at, [1e3 * model.step_cost_s(sample.shape) for sample in shown]) for name, model in models().items()
    }
    return lines(series, "tokens before the chunk", "ms", "a chunk of 768 tokens behind a prefix")


LONG = [(prefix, length) for prefix, length in BEHIND if prefix >= 4096]
"""From there on reference.md asks for the worst error."""

FIG15 = Figure(
    "kunserve-fig15", "accuracy of the cost model", "v3 section 5.4",
    (
        Part(
            "Qwen2.5-14B on A800",
            (
                deviation("without prefix", OURS, ALONE).stated((None, 5), (None, 5)),
                deviation("without prefix", THEIRS, ALONE).stated((None, 48)),
                deviation("with prefix", OURS, BEHIND).stated((None, 5), (None, 5)),
                deviation("with prefix", THEIRS, BEHIND).stated((None, 74)),
                deviation("with a prefix of 4096 tokens or more", OURS, LONG).stated((None, 5), (None, 5)),
                deviation("with a prefix of 4096 tokens or more", THEIRS, LONG).stated((None, 74), (30, None)),
            ),
        ),
    ),
    (Plot("with-prefix", _draw),),
)  # fmt: skip

"""Coefficients from measured steps: least squares of the *relative* error, no coefficient below zero.

Pure: samples in, model out. The error is relative, because a step of 2 ms matters as much as one of 200 ms.
Coefficients are non-negative, because no part of a step takes negative time, and a fit with a negative one predicts
nonsense outside of its samples. The two rooflines (``CostModel.weight_tokens``, ``head_tokens``) and the tile are not
linear: they are tried on a grid. So are the steps whose layers wait for launches (``CostModel.launch_layer_s``): given
which do, the rest is linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jettison.cost.model import (
    COEFFICIENTS,
    GRAPH_ROWS,
    CostModel,
    NoPrefixModel,
    StepPredictor,
    StepShape,
    features,
    without_prefix,
)

Floats = npt.NDArray[np.float64]

KNEES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
"""Values tried for the rooflines: a CPU's lies below 10, a GPU's at a few hundred tokens at most."""

TILES = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128)
"""Values tried for the rows of a tile: 3 (AVX2) or 6 (AVX-512) in this package's kernels, 16 to 128 on GPUs."""

MIN_KNEE_GAIN = 0.01
"""A roofline or tile is accepted only where it lowers the squared error by at least this share: noise has no knee."""


LAUNCHES_SHOW = 0.03
"""Relative error (root of the mean square) from which on launches are looked for: a model without them explains a
device that the host does not hold up to noise."""

MIN_LAUNCH_GAIN = 0.3
"""Launches are accepted only where they lower the squared error by at least this share."""

GRAPHS = (0, 16, 64, 256, 512, 1024, 2048, 4096, 8192)
"""Values tried for ``graph_tokens``."""

WAITING = (64, 256, 512, 1024, 2048, 4096, 16384)
"""Tokens of the largest step that is first thought to wait for launches."""

MOST_POLISHED = 3
"""Values of ``graph_tokens`` for which knees are looked for again."""

MOST_TURNS = 8
"""In which the steps that wait are settled."""

Knees = tuple[int, int, int]
"""Tile, roofline of the layers, roofline of the head."""
_NO_KNEES: Knees = (1, 1, 1)
_NUM_LAYER_TERMS = 4
"""Of COEFFICIENTS: the first ones are a layer's."""
_TOKEN, _SAMPLE = COEFFICIENTS.index("token_layer_s"), COEFFICIENTS.index("sample_s")


class Sample(NamedTuple):
    """One measured step."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class FitErrors:
    """Relative errors, |predicted - measured| / measured, of a model on samples."""

    mean: float
    median: float
    p90: float
    max: float
    num_samples: int


def fit_cost_model(samples: Sequence[Sample], num_layers: int) -> CostModel:
    """The full model of ``num_layers`` layers. Raises ValueError without samples, or for one that took no time."""
    return _fit(samples, num_layers, lambda shape: shape, blind=())


def fit_attention_free(samples: Sequence[Sample], num_layers: int) -> CostModel:
    """The baseline of KunServe v3 Fig. 15: tokens and constants only, attention neglected."""
    return _fit(samples, num_layers, lambda shape: shape, blind=("pair_layer_s", "kv_token_layer_s"))


def fit_no_prefix(samples: Sequence[Sample], num_layers: int) -> NoPrefixModel:
    """Self-attention only: cached tokens cost nothing (DistServe, as KunServe v3 §4.3 describes it).

    The model is fitted to the steps with at most one cached token a chunk, where it can be right. Fitted to all steps,
    the cost of prefixes would distort the self-attention that it does model.
    """
    seen = [s for s in samples if s.shape.num_kv_tokens <= len(s.shape.chunks)]
    return NoPrefixModel(_fit(seen or samples, num_layers, without_prefix, blind=()))


def relative_errors(model: StepPredictor, samples: Sequence[Sample]) -> list[float]:
    """Signed, (predicted - measured) / measured, in the order of the samples."""
    return [model.step_cost_s(sample.shape) / sample.seconds - 1.0 for sample in samples]


def evaluate(model: StepPredictor, samples: Sequence[Sample]) -> FitErrors:
    """Errors over samples; there must be at least one."""
    errors = np.abs(np.array(relative_errors(model, samples)))
    mean, median, p90, most = errors.mean(), np.median(errors), np.quantile(errors, 0.9), errors.max()
    return FitErrors(float(mean), float(median), float(p90), float(most), len(errors))


def _fit(
    samples: Sequence[Sample], num_layers: int, seen: Callable[[StepShape], StepShape], blind: tuple[str, ...]
) -> CostModel:
    if not samples:
        raise ValueError("a fit needs samples")
    if min(sample.seconds for sample in samples) <= 0.0:
        raise ValueError("a step cannot take no time")
    steps = _Steps(samples, seen, blind)
    found = _with_knees(steps, _Found.of(steps, _NO_KNEES, _Waiting.none(steps)))
    if found.error > LAUNCHES_SHOW**2 * len(samples):
        found = _with_launches(steps, found)
    values = {name: float(value) for name, value in zip(COEFFICIENTS, found.solution, strict=False)}
    tile, weight, head = found.knees
    launch_s = float(found.solution[-1])
    return CostModel(
        num_layers, **values, weight_tokens=weight, head_tokens=head, row_tile=tile, launch_layer_s=launch_s,
        graph_tokens=found.waiting.graph_tokens if launch_s else 0,
    )


class _Steps:
    """What of the samples a fit reads, as arrays over them."""

    def __init__(
        self, samples: Sequence[Sample], seen: Callable[[StepShape], StepShape], blind: tuple[str, ...]
    ) -> None:
        shapes = [seen(sample.shape) for sample in samples]
        keep = np.array([name not in blind for name in COEFFICIENTS], dtype=np.float64)
        self.weights = 1.0 / np.array([sample.seconds for sample in samples])
        self.base = np.array([features(shape, 1, 1, 1) for shape in shapes], dtype=np.float64) * keep
        self.layers, self.num_tokens, self.num_samples = (
            np.array(column, dtype=np.float64)
            for column in zip(*((s.num_layers, s.num_tokens, s.num_samples) for s in shapes), strict=True)
        )
        self.has_chunks = np.array([any(chunk.num_tokens > 1 for chunk in shape.chunks) for shape in shapes])
        self.has_many_rows = np.array([len(shape.chunks) > GRAPH_ROWS for shape in shapes])

    def launched(self, graph_tokens: int) -> npt.NDArray[np.bool_]:
        """``CostModel.is_launched`` of each."""
        launched: npt.NDArray[np.bool_] = self.has_many_rows | (self.has_chunks & (self.num_tokens > graph_tokens))
        return launched

    def matrix(self, knees: Knees) -> Floats:
        """The factor of each coefficient in each step, before launches."""
        row_tile, weight_tokens, head_tokens = knees
        matrix = self.base.copy()
        tokens = np.maximum(np.ceil(self.num_tokens / row_tile) * row_tile, weight_tokens)
        matrix[:, _TOKEN] = self.layers * tokens
        head_rows = np.maximum(np.ceil(self.num_samples / row_tile) * row_tile, head_tokens)
        matrix[:, _SAMPLE] = np.where(self.num_samples > 0, head_rows, 0.0)
        return matrix


class _Waiting(NamedTuple):
    """Steps whose layers are thought to wait for launches."""

    graph_tokens: int
    is_bound: npt.NDArray[np.bool_]

    @classmethod
    def none(cls, steps: _Steps) -> _Waiting:
        return cls(0, np.zeros(len(steps.layers), dtype=np.bool_))


class _Found(NamedTuple):
    """Coefficients, the time of a layer's launches last."""

    knees: Knees
    waiting: _Waiting
    error: float
    solution: Floats

    @classmethod
    def of(cls, steps: _Steps, knees: Knees, waiting: _Waiting) -> _Found:
        """The best for these knees, if these steps wait."""
        matrix = steps.matrix(knees)
        if not waiting.is_bound.any():
            error, solution = non_negative_least_squares(matrix * steps.weights[:, None], np.ones(len(matrix)))
            return cls(knees, waiting, error, np.append(solution, 0.0))
        matrix[waiting.is_bound, :_NUM_LAYER_TERMS] = 0.0
        matrix = np.column_stack([matrix, steps.layers * waiting.is_bound])
        return cls(knees, waiting, *non_negative_least_squares(matrix * steps.weights[:, None], np.ones(len(matrix))))

    def settled(self, steps: _Steps) -> _Found:
        """With those steps waiting that these coefficients say, again and again; the error is the model's own."""
        found, matrix = self, steps.matrix(self.knees)
        may_wait = steps.launched(self.waiting.graph_tokens)
        for _ in range(MOST_TURNS):
            work_s = matrix[:, :_NUM_LAYER_TERMS] @ found.solution[:_NUM_LAYER_TERMS]
            is_bound = may_wait & (steps.layers * found.solution[-1] > work_s)
            if (is_bound == found.waiting.is_bound).all():
                break
            found = _Found.of(steps, self.knees, _Waiting(self.waiting.graph_tokens, is_bound))
        work_s = matrix[:, :_NUM_LAYER_TERMS] @ found.solution[:_NUM_LAYER_TERMS]
        floor_s = np.where(may_wait, steps.layers * found.solution[-1], 0.0)
        rest_s = matrix[:, _NUM_LAYER_TERMS:] @ found.solution[_NUM_LAYER_TERMS:-1]
        off = (np.maximum(work_s, floor_s) + rest_s) * steps.weights - 1.0
        return found._replace(error=float(off @ off))


def _with_knees(steps: _Steps, found: _Found) -> _Found:
    """With the knees that lower the error. The layers' tile and roofline are tried together, as either can explain the
    other's effect; then the head's; then both again."""
    for _ in range(2):
        for tried in [(tile, weight, None) for tile in TILES for weight in KNEES] + [(None, None, h) for h in KNEES]:
            tile, weight, head = found.knees
            knees = tried[0] or tile, tried[1] or weight, tried[2] or head
            candidate = _Found.of(steps, knees, found.waiting)
            if candidate.error < found.error * (1.0 - MIN_KNEE_GAIN) - 1e-18:
                found = candidate
    return found


def _with_launches(steps: _Steps, plain: _Found) -> _Found:
    """With layers that wait for launches, where that lowers the error much. Which steps wait is tried by their tokens,
    and settled; for the best few, knees are looked for again among the steps that do not wait."""
    tried = []
    for graph_tokens in GRAPHS:
        may_wait = steps.launched(graph_tokens)
        for most_tokens in WAITING:
            waiting = _Waiting(graph_tokens, may_wait & (steps.num_tokens <= most_tokens))
            if waiting.is_bound.any():
                tried.append(_Found.of(steps, plain.knees, waiting).settled(steps))
    tried.sort(key=lambda found: found.error)
    best = {found.waiting.graph_tokens: found for found in reversed(tried)}  # of each, the one with the least error
    for found in sorted(best.values(), key=lambda found: found.error)[:MOST_POLISHED]:
        for _ in range(2):
            again = _with_knees(steps, found._replace(error=math.inf)).settled(steps)
            found = again if again.error < found.error else found
        best[found.waiting.graph_tokens] = found
    least = min(best.values(), key=lambda found: found.error, default=plain)
    return least if least.error < plain.error * (1.0 - MIN_LAUNCH_GAIN) else plain


def non_negative_least_squares(matrix: Floats, target: Floats) -> tuple[float, Floats]:
    """Minimize ``|matrix @ x - target|^2`` over x >= 0; returns (the minimum, x).

    Active set (Lawson and Hanson 1974, ch. 23) on columns scaled to length one. A column of zeros gets 0.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(lengths > 0.0, lengths, 1.0)
    num = matrix.shape[1]
    x = np.zeros(num)
    passive = np.zeros(num, dtype=bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(scaled.T @ target).max()))
    for _ in range(10 * num):
        gradient = scaled.T @ (target - scaled @ x)
        gradient[passive | (lengths == 0.0)] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        passive[best] = True
        while True:
            trial = np.zeros(num)
            trial[passive] = np.linalg.lstsq(scaled[:, passive], target, rcond=None)[0]
            below = passive & (trial <= 0.0)
            if not below.any():
                x = trial
                break
            # Go towards the solution until the first coefficient reaches zero, and take that one out.
            share = float(np.min(x[below] / np.maximum(x[below] - trial[below], 1e-300)))
            x = x + share * (trial - x)
            passive &= x > 1e-15
            x[~passive] = 0.0
            if not passive.any():
                break
    residual = scaled @ x - target
    return float(residual @ residual), x / np.where(lengths > 0.0, lengths, 1.0)

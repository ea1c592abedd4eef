"""Coefficients from measured steps: least squares of the *relative* error, no coefficient below zero.

Pure: samples in, model out. The error is relative, because a step of 2 ms matters as much as one of 200 ms.
Coefficients are non-negative, because no part of a step takes negative time, and a fit with a negative one predicts
nonsense outside of its samples. The two rooflines (``CostModel.weight_tokens``, ``head_tokens``) and the tile are not
linear: they are tried on a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jettison.cost.model import (
    COEFFICIENTS,
    CostModel,
    NoPrefixModel,
    StepPredictor,
    StepShape,
    features,
    without_prefix,
)

Floats = npt.NDArray[np.float64]

KNEES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Values tried for the rooflines: a CPU's lies below 10, a GPU's at a few hundred tokens at most."""

TILES = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128)
"""Values tried for the rows of a tile: 3 (AVX2) or 6 (AVX-512) in this package's kernels, 16 to 128 on GPUs."""

MIN_KNEE_GAIN = 0.01
"""A roofline or tile is accepted only where it lowers the squared error by at least this share: noise has no knee."""


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
    shapes = [seen(sample.shape) for sample in samples]
    weights = 1.0 / np.array([sample.seconds for sample in samples])
    keep = np.array([name not in blind for name in COEFFICIENTS], dtype=np.float64)

    base = np.array([features(shape, 1, 1, 1) for shape in shapes], dtype=np.float64) * keep
    layers, num_tokens, num_samples = (
        np.array(column, dtype=np.float64)
        for column in zip(*((s.num_layers, s.num_tokens, s.num_samples) for s in shapes), strict=True)
    )

    def solve(row_tile: int, weight_tokens: int, head_tokens: int) -> tuple[float, Floats]:
        matrix = base.copy()
        matrix[:, _TOKEN] = layers * np.maximum(np.ceil(num_tokens / row_tile) * row_tile, weight_tokens)
        head_rows = np.maximum(np.ceil(num_samples / row_tile) * row_tile, head_tokens)
        matrix[:, _SAMPLE] = np.where(num_samples > 0, head_rows, 0.0)
        return non_negative_least_squares(matrix * weights[:, None], np.ones(len(shapes)))

    # The layers' tile and roofline are tried together, as either can explain the other's effect; then the head's; then
    # both again.
    knees = (1, 1, 1)
    error, solution = solve(*knees)
    for _ in range(2):
        for tried in [(tile, weight, None) for tile in TILES for weight in KNEES] + [(None, None, h) for h in KNEES]:
            candidate = (tried[0] or knees[0], tried[1] or knees[1], tried[2] or knees[2])
            candidate_error, candidate_solution = solve(*candidate)
            if candidate_error < error * (1.0 - MIN_KNEE_GAIN) - 1e-18:
                knees, error, solution = candidate, candidate_error, candidate_solution
    values = {name: float(value) for name, value in zip(COEFFICIENTS, solution, strict=True)}
    return CostModel(num_layers, **values, weight_tokens=knees[1], head_tokens=knees[2], row_tile=knees[0])


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

"""Steps that a live run recorded, and the cost model scaled to their measured times. Pure.

A profile times steps while nothing else runs. In a live run, other instances, the controller and clients share the
cores, and steps take longer. A simulation that is compared with a run takes its times from that run's steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jettison.cost.fit import non_negative_least_squares
from jettison.cost.model import COEFFICIENTS, CostModel

KV_TERMS = ("pair_layer_s", "kv_token_layer_s")
ROW_TERMS = ("token_layer_s", "entry_token_s", "sample_s")
FIXED_TERMS = tuple(name for name in COEFFICIENTS if name not in KV_TERMS + ROW_TERMS)
LAUNCHES = "launch_layer_s"
ALL = (*COEFFICIENTS, LAUNCHES)

TRUST = 0.01
"""Weight of the profile's proportions relative to the steps: they decide only where the steps cannot separate two
terms."""


class RecordedStep(NamedTuple):
    """One stage's part of one step. Totals are over its rows."""

    worker_id: int
    began_s: float
    """Begin of the step, on the worker's clock."""
    seconds: float
    num_requests: int
    num_tokens: int
    num_pairs: int
    """Query-key pairs under the causal mask."""
    num_kv_tokens: int
    """Tokens of KV: contexts and own tokens."""
    num_layers: int
    is_first: bool
    num_samples: int
    """Sampled rows; 0 on all but the last stage."""

    def predicted_s(self, cost: CostModel) -> float:
        """Seconds that a cost model predicts for the step."""
        return cost.totals_cost_s(
            self.num_tokens, self.num_pairs, self.num_kv_tokens, self.num_layers,
            is_first=self.is_first, num_samples=self.num_samples,
        )


def fitted_to(cost: CostModel, steps: Sequence[RecordedStep]) -> CostModel:
    """``cost`` with one factor for the terms of KV, one for those of rows, and one for the rest. Least squares of the
    relative error give the factors; one more factor then makes the predicted times add up to the measured total. What a
    step waits for launches is taken off before, and scaled with the whole.

    Unchanged without steps, or where the model predicts no time for them.
    """
    took = np.array([step.seconds for step in steps])
    predicted_s = sum(step.predicted_s(cost) for step in steps)
    if not len(took) or took.min() <= 0.0 or predicted_s <= 0.0:
        return cost
    cost = _scaled(cost, dict.fromkeys(ALL, float(took.sum()) / predicted_s))
    groups = (KV_TERMS, ROW_TERMS, FIXED_TERMS)
    parts = [_scaled(cost, {name: float(name in group) for name in ALL}) for group in groups]
    excess_s = [step.predicted_s(cost) - step.predicted_s(replace(cost, launch_layer_s=0.0)) for step in steps]
    left = np.maximum(1.0 - np.array(excess_s) / took, 0.0)
    matrix = np.array([[step.predicted_s(part) for part in parts] for step in steps]) / took[:, None]
    trust = TRUST**0.5 * np.linalg.norm(matrix, axis=0)
    _, factors = non_negative_least_squares(np.vstack([matrix, np.diag(trust)]), np.append(left, trust))
    told = {name: float(factor) for group, factor in zip(groups, factors, strict=True) for name in group}
    told[LAUNCHES] = 1.0
    fitted = _scaled(cost, told)
    over = float(took.sum()) / sum(step.predicted_s(fitted) for step in steps)
    return _scaled(fitted, dict.fromkeys(ALL, over))


def _scaled(cost: CostModel, factors: dict[str, float]) -> CostModel:
    return replace(cost, **{name: factors[name] * getattr(cost, name) for name in ALL})

"""What moves may take of links and of steps without disturbing those who decode there (MELL section V: boundary
profiling). Pure.

*Disturbing* is a step that lasts more than ``slowdown`` of its time longer than without, or longer than its requests'
objective. What was measured is in the profile; where it says nothing, the one predictor answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jettison.cost.hardware import HardwareProfile, PrefillPoint
from jettison.cost.predictor import StepTimePredictor
from jettison.cost.stepwork import StepWork, step_of


class PrefillBoundary(NamedTuple):
    """Of an instance with a batch."""

    step_tokens: int
    """That each step may take beside its decodes; 0: none."""
    tokens_per_s: float
    """What that comes to."""


NO_PREFILL = PrefillBoundary(0, 0.0)


def link_boundary(bytes_per_s: float, profile: HardwareProfile | None, slowdown: float) -> float:
    """Bytes a second over a link that carries so many: as many as it can, or as slow the steps at its ends down by
    ``slowdown``, where a profile says what a byte costs them."""
    byte_s = None if profile is None else profile.link_beside_byte_s
    return bytes_per_s if not byte_s else min(bytes_per_s, slowdown / byte_s)


def prefill_boundary(
    decodes: StepWork, predictor: StepTimePredictor, profile: HardwareProfile | None, slowdown: float, *,
    most: int, num_stages: int = 1, tpot_s: float | None = None,
) -> PrefillBoundary | None:
    """Of a group whose steps are these decodes. ``most``: tokens that a step has room for; ``tpot_s``: the objective of
    its decodes. None while too little is known.

    Nothing is disturbed where nobody decodes.
    """
    if most <= 0:
        return NO_PREFILL
    part = step_of(num_stages)
    step_tokens: int | None = most
    if decodes.num_rows:
        alone_s = predictor.predict_s(decodes, part)
        if alone_s is None:
            return None
        bound_s = (1.0 + slowdown) * alone_s if tpot_s is None else min((1.0 + slowdown) * alone_s, tpot_s)
        points = () if profile is None or num_stages > 1 else profile.prefill_points
        longer = bound_s / alone_s if alone_s else math.inf
        step_tokens = measured_tokens(points, decodes.num_rows, longer)
        if step_tokens is None:
            step_tokens = predictor.prefill_tokens_beside(decodes, bound_s, most, part)
    if step_tokens is None:
        return None
    step_tokens = min(step_tokens, most)
    seconds = predictor.predict_s(decodes.with_prompt(step_tokens), part)
    if not step_tokens:
        return NO_PREFILL
    return None if not seconds else PrefillBoundary(step_tokens, num_stages * step_tokens / seconds)


def measured_tokens(points: Sequence[PrefillPoint], batch_size: int, longer: float) -> int | None:
    """Prefill tokens with which a step of such a batch lasts ``longer`` times as long as without, by what was measured
    with the next larger batch; between sizes on a straight line. None beyond what was measured."""
    larger = [point.batch_size for point in points if point.batch_size >= batch_size]
    if not larger:
        return None
    curve = sorted((p.num_tokens, p.seconds) for p in points if p.batch_size == min(larger))
    (first, alone_s), *rest = curve
    if first or not rest:
        return None
    bound_s = longer * alone_s
    found, found_s = 0, alone_s
    for num_tokens, seconds in rest:
        if seconds > bound_s:
            share = max(0.0, bound_s - found_s) / (seconds - found_s) if seconds > found_s else 0.0
            return found + int(share * (num_tokens - found))
        found, found_s = num_tokens, seconds
    return found

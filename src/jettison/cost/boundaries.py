"""How much of links and steps moves may take without disturbing the requests that decode there (MELL section V:
boundary profiling). Pure.

A move *disturbs* a step that then lasts longer than (1 + ``slowdown``) times its time without the move, or longer than
the objective of its requests. The profile holds the measured points; where it has none, the step time predictor
answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jettison.cost.hardware import HardwareProfile, PrefillPoint
from jettison.cost.predictor import StepTimePredictor
from jettison.cost.stepwork import StepWork, step_of


class PrefillBoundary(NamedTuple):
    """The prefill that an instance can take beside its batch of decodes."""

    step_tokens: int
    """Prompt tokens that each step may take beside its decodes; 0: none."""
    tokens_per_s: float
    """Prompt tokens a second at ``step_tokens`` a step."""


NO_PREFILL = PrefillBoundary(0, 0.0)


def link_boundary(bytes_per_s: float, profile: HardwareProfile | None, slowdown: float) -> float:
    """Bytes a second that moves may send over a link of ``bytes_per_s``. Where a profile says by how much a byte delays
    a step, the bound is at most the rate that slows the steps at the link's ends by ``slowdown``."""
    byte_s = None if profile is None else profile.link_beside_byte_s
    return bytes_per_s if not byte_s else min(bytes_per_s, slowdown / byte_s)


def prefill_boundary(
    decodes: StepWork, predictor: StepTimePredictor, profile: HardwareProfile | None, slowdown: float, *,
    most: int, num_stages: int = 1, tpot_s: float | None = None,
) -> PrefillBoundary | None:
    """The boundary of a group that runs ``decodes`` in each step. ``most``: prompt tokens that a step has room for;
    ``tpot_s``: the decodes' objective for the time between tokens. None while too little is known.

    Without decodes there is nothing to disturb, and a step may take ``most`` tokens.
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
    """Prefill tokens beside which a step of ``batch_size`` decodes lasts ``longer`` times as long as without them. The
    measured points of the next larger batch decide, with a straight line between two sizes of chunk; at most the
    largest measured chunk. None where no batch as large was measured, or its points lack the decodes alone."""
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

"""Host costs from what was measured while a server served known loads: sums over phases, gaps between steps. Pure.

Measuring is ``live.host_costs``'s; what each constant means is said in ``cost.hostcosts``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jettison.cost.fit import non_negative_least_squares
from jettison.cost.hostcosts import LEAST_BENT, MOST_BENT, HostCosts, Shape, shape_at

_SLOWEST, _FASTEST = 0.3, 1.5
"""Of a core that others compute beside, over one alone."""
LEAST_STEPS = 6
"""Of one size, or the median is a matter of luck."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One load, and what it took. Of one instance, or of one pipeline."""

    wall_s: float
    num_steps: int
    num_rows: int
    """Requests in steps, summed over the steps and their stages."""
    num_tokens: int
    """Sent to clients."""
    num_requests: int
    num_prompt_tokens: int
    controller_s: float
    """Processor time of the server."""
    worker_s: float
    """Of the worker."""
    steps_s: float
    """Of the worker's steps alone, as it times them itself."""
    client_s: float
    """Of the load generator."""
    num_later_stages: int = 0
    """Summed over the steps of a pipeline: how many stages came after the first."""
    computes_in_turn: bool = True
    """No two processes ever wanted the same core: also of several threads a step's time is its processor time."""

    @property
    def num_stages(self) -> int:
        """Of steps in pipelines."""
        return self.num_steps + self.num_later_stages if self.num_later_stages else 0


@dataclass(frozen=True, slots=True)
class Scrapes:
    """Reading the metrics, and nothing else going on."""

    number: int
    controller_s: float
    client_s: float


def fit_host_costs(
    phases: Sequence[Phase], idle: Phase, scrapes: Scrapes, gaps_s: Mapping[int, Sequence[float]], *,
    tick_interval_s: float, core_speeds: Sequence[float], threads_per_worker: int, step_factors: Mapping[int, float],
) -> HostCosts:
    """Least squares over the phases. ``gaps_s``: by the number of requests in a step, the times between the end of a
    decode step and the beginning of the next, with nothing else to do; ``step_factors``: by the number of tokens in a
    step, what it takes over its prediction.

    The gap is what a step waits for: the worker's own work, the way to the controller and back, and the controller's
    critical part. What the controller does besides, for each token that a step has made, runs beside the next step.
    """
    tick_s = idle.controller_s / max(1.0, idle.wall_s / tick_interval_s)
    ticks = [phase.wall_s / tick_interval_s * tick_s for phase in phases]
    busy = [max(0.0, phase.controller_s - idle_s) for phase, idle_s in zip(phases, ticks, strict=True)]
    step_s, token_s, request_s, prompt_s, stage_s = _fit(
        [[p.num_steps, p.num_tokens, p.num_requests, p.num_prompt_tokens, p.num_later_stages] for p in phases], busy
    )
    alone = [p for p in phases if p.computes_in_turn]
    worker_step_s, worker_row_s, worker_stage_s = _fit(
        [[p.num_steps + p.num_later_stages, p.num_rows, p.num_stages] for p in alone],
        [max(0.0, p.worker_s - threads_per_worker * p.steps_s) for p in alone],
    )
    # Steps of one instance are further apart than a client sleeps.
    client_token_s, client_request_s, wake_s = _fit(
        [[p.num_tokens, p.num_requests, p.num_steps] for p in phases], [p.client_s for p in phases]
    )
    factor = math.exp(statistics.fmean(math.log(factor) for factor in step_factors.values()))
    gap_s, gap_row_s = _fit_gaps(gaps_s)
    row_s = min(max(0.0, gap_row_s - worker_row_s), token_s)
    return HostCosts(
        num_cores=len(core_speeds),
        core_speeds=tuple(core_speeds),
        threads_per_worker=threads_per_worker,
        step_factor=factor,
        step_shape=tuple((tokens, step_factors[tokens] / factor) for tokens in sorted(step_factors)),
        worker_step_s=worker_step_s,
        worker_row_s=worker_row_s,
        worker_stage_s=worker_stage_s,
        controller_step_s=step_s,
        controller_row_s=row_s,
        controller_stage_s=stage_s,
        controller_request_s=request_s,
        controller_prompt_token_s=prompt_s,
        controller_token_s=token_s - row_s,
        controller_tick_s=tick_s,
        controller_scrape_s=scrapes.controller_s / scrapes.number,
        client_request_s=client_request_s,
        client_token_s=client_token_s,
        client_wake_s=wake_s,
        client_scrape_s=scrapes.client_s / scrapes.number,
        hop_s=max(0.0, (gap_s - worker_step_s - step_s) / 2),
    )


class TimedStep(NamedTuple):
    """One step of a load."""

    num_tokens: int
    predicted_s: float
    took_s: float


def bent_shape(shape: Shape, steps: Iterable[TimedStep]) -> Shape:
    """What steps of so many tokens took, over what all of them took; ``steps`` were predicted with ``shape``.

    One point for each doubling of the number of tokens of which there are some steps: their median. Points of ``shape``
    beyond all of them change as the nearest does. It says nothing of how long steps are altogether: those steps'
    predictions come to as much as before. Too few steps: ``shape``.
    """
    of_size: dict[int, list[TimedStep]] = {}
    for step in steps:
        of_size.setdefault(round(math.log2(step.num_tokens)), []).append(step)
    bins = [some for _, some in sorted(of_size.items()) if len(some) >= LEAST_STEPS]
    if len(bins) < 2:
        return shape
    ratios = [statistics.median(step.took_s / step.predicted_s for step in some) for some in bins]
    predicted = [sum(step.predicted_s for step in some) for some in bins]
    usual = sum(ratio * own for ratio, own in zip(ratios, predicted, strict=True)) / sum(predicted)
    tokens = [round(statistics.geometric_mean(step.num_tokens for step in some)) for some in bins]
    found = {size: shape_at(shape, size) * ratio / usual for size, ratio in zip(tokens, ratios, strict=True)}
    found |= {size: factor * ratios[0] / usual for size, factor in shape if size < tokens[0]}
    found |= {size: factor * ratios[-1] / usual for size, factor in shape if size > tokens[-1]}
    return tuple((size, min(MOST_BENT, max(LEAST_BENT, factor))) for size, factor in sorted(found.items()))


def mean_shape(shapes: Sequence[Shape]) -> Shape:
    """At each number of tokens that one of them has a point for, the mean of all."""
    sizes = sorted({tokens for shape in shapes for tokens, _ in shape})
    return tuple((tokens, statistics.fmean(shape_at(shape, tokens) for shape in shapes)) for tokens in sizes)


def serving_speed(workers_s: float, predicted_s: float, threads_per_worker: int) -> float:
    """Of a core while a load is served, over that of one alone: what its steps should have taken over what they took
    of all workers' processor time. Between 0.3 and 1.5: beyond, it is no measurement."""
    return min(_FASTEST, max(_SLOWEST, threads_per_worker * predicted_s / max(workers_s, 1e-9)))


def alone_speed(mixed: float, crowded: float, beside: float, num_busy: int = 2) -> float:
    """Of a core while nobody else computes: ``mixed`` was seen of a worker that had one other computing ``beside`` it
    for that part (0 to 1) of its time. With ``num_busy`` busy cores a core goes at the speed ``crowded``; with two, at
    one that is as much nearer."""
    crowded = mixed * (crowded / mixed) ** (1.0 / max(1, num_busy - 1))
    if beside >= 0.9:  # next to nothing was seen of being alone
        return mixed
    alone_part = 1.0 / mixed - beside / crowded
    return min(_FASTEST, max(_SLOWEST, (1.0 - beside) / alone_part)) if alone_part > 0.0 else _FASTEST


def crowded_speeds(speeds: Sequence[float], speed: float, num_busy: int) -> tuple[float, ...]:
    """``speeds`` of 1, 2, ... busy cores, bent so that that of ``num_busy`` is ``speed`` and the first is what it was;
    those of more are changed as that one is."""
    last = min(num_busy, len(speeds)) - 1
    if last < 1:
        return tuple(speeds)
    change = speed / speeds[last]
    return tuple(min(_FASTEST, own * change ** min(1.0, index / last)) for index, own in enumerate(speeds))


def _fit(counts: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[float]:
    """Seconds of one of each, weighted so that every phase counts alike, whatever it took."""
    matrix = np.array(counts, dtype=np.float64)
    target = np.array(seconds, dtype=np.float64)
    weights = 1.0 / np.maximum(target, 1e-3)
    _, found = non_negative_least_squares(matrix * weights[:, None], target * weights)
    return [float(value) for value in found]


def _fit_gaps(gaps_s: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """A line through the medians: the gap of no request, and of each more."""
    points = [(rows, statistics.median(gaps)) for rows, gaps in sorted(gaps_s.items()) if gaps]
    matrix = np.array([[1.0, float(rows)] for rows, _ in points])
    _, (gap_s, row_s) = non_negative_least_squares(matrix, np.array([gap for _, gap in points]))
    return float(gap_s), float(row_s)

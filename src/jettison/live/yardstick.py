"""How fast cores are while one instance serves and while all do: known loads, before and after what is to be compared.

Steps side by side (``live.core_speeds``) say what caches and memory give to several cores. Serving, workers share their
cores with controller and clients as well, and come back to cold caches: their steps take more processor time than
side by side. And a virtual machine is slower now than it was a minute ago, by more for some numbers of busy cores than
for others. All of that is in what a known load takes of the workers' processor time, over what the profile says that
it takes: of a server of one instance, and of one with all of them, in turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from jettison.config import EngineConfig
from jettison.cost.hardware import HardwareProfile
from jettison.cost.hostcosts import HostCosts, Shape, num_busy_cores
from jettison.cost.hostfit import TimedStep, alone_speed, bent_shape, serving_speed
from jettison.cost.model import ChunkShape, StepShape
from jettison.errors import JettisonError
from jettison.live.assembly import assemble
from jettison.live.host_watch import (
    Load,
    Step,
    WatchedServer,
    Window,
    steps_of,
)
from jettison.workload.traces import TraceRow

PROMPTS, OUTPUTS = (16, 160), (24, 120)
"""Tokens of a request, least and most."""
LONG_PROMPT, LONG_EVERY = 240, 3
"""Every so many requests' prompt is so long instead, that there are enough steps full of prompts to tell how long such
steps are."""
NUM_REQUESTS, SPREAD_S = 18, 1.5
"""Of each instance, and over what time they come: anyhow, as in serving, where each step meets caches that others have
used. Batches that begin together take a twentieth less."""
ROUNDS = 2
LEAST_FACTOR, MOST_FACTOR = 0.3, 3.0
"""Of the controller: beyond, it is no measurement."""

Span = tuple[float, float]
"""Begin and end, in seconds of the monotonic clock."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one laying came to. Speeds are those of a core, over one alone when steps were profiled."""

    alone: float
    """While nobody else computes."""
    crowded: float
    """While all instances serve; of a single instance the same as ``alone``."""
    controller_factor: float
    """Work of the controller, as a core alone when steps were profiled would do it, over what the constants say."""
    alone_spans: tuple[Span, ...]
    """When one instance served."""
    crowded_spans: tuple[Span, ...]
    """When all did."""
    step_shape: Shape
    """How a step's time hangs on its tokens (``HostCosts.step_shape``)."""
    crowded_shape: Shape
    """The same of what it loses to others (``HostCosts.crowded_shape``)."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What one server did in one laying."""

    speed: float
    beside: float
    """For what part of its workers' time somebody else computed as well, at least."""
    controller_s: float
    """Processor time."""
    controller_predicted_s: float
    spans: tuple[Span, ...]


def yardstick_load(num_instances: int, longest: int) -> Load:
    """The same each time. ``longest``: tokens that a request may have, of which a prompt takes half at most."""
    rng = random.Random(0)

    def between(least: int, most: int, limit: int) -> int:
        return max(1, min(round(least * (most / least) ** rng.random()), limit))

    rows = (
        TraceRow(
            rng.uniform(0.0, SPREAD_S),
            between(*(PROMPTS if number % LONG_EVERY else (LONG_PROMPT, LONG_PROMPT)), longest // 2),
            between(*OUTPUTS, longest // 2),
        )
        for number in range(NUM_REQUESTS * num_instances)
    )
    return Load("yardstick", tuple(sorted(rows, key=lambda row: row.arrival_s)))


class Yardstick:
    """``with Yardstick(...) as yardstick: yardstick.lay(); ...; yardstick.lay()``; then ``readings()``.

    Between layings its servers wait, which takes a thousandth of a core each.
    """

    def __init__(self, config: EngineConfig, num_instances: int, costs: HostCosts, profile: HardwareProfile) -> None:
        """``config``: as the cluster is to be served; ``costs``: what workers take beside steps; ``profile``: by which
        steps are predicted."""
        self._costs = costs
        self._crews = [_Crew(config, number, costs, profile) for number in sorted({1, num_instances})]
        self._num_busy = num_busy_cores(costs, num_instances)
        # It is of all cores busy; and of several threads' steps only the whole time is known, with waiting in it.
        self._tells_crowded_shape = config.num_threads == 1 and self._num_busy == costs.num_cores
        self._exits = ExitStack()

    def __enter__(self) -> Yardstick:
        """Raises JettisonError: a server does not come up."""
        with ExitStack() as exits:
            for crew in self._crews:
                exits.enter_context(crew.server).replay(crew.load)  # once to warm up
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)

    def lay(self) -> None:
        """Serve the load, by one instance and by all in turn; some seconds. Raises JettisonError where a request
        fails."""
        for crew in self._crews:
            crew.layings.append([])
        for _ in range(ROUNDS):
            for crew in self._crews:
                crew.serve()

    def readings(self) -> list[Reading]:
        """One of each laying, when the servers have ended: steps are in their time lines. Raises JettisonError if one
        knows of none."""
        return [self._reading(index) for index in range(len(self._crews[0].layings))]

    def _reading(self, index: int) -> Reading:
        one, *all_ = self._crews
        costs = replace(self._costs, step_shape=one.shape(index, self._costs.step_shape, self._costs.step_factor_of))
        alone = one.tally(index, costs, is_crowded=False)
        if not all_:
            return reading_of(alone, None, costs, self._num_busy)
        if self._tells_crowded_shape:
            costs = replace(costs, crowded_shape=all_[0].shape(index, costs.crowded_shape, _factor_among_all(costs)))
        return reading_of(alone, all_[0].tally(index, costs, is_crowded=True), costs, self._num_busy)


def reading_of(one: Tally, all_: Tally | None, shapes: HostCosts, num_busy: int) -> Reading:
    """Of what a server of one instance did, and one of all of them, if those are more: then ``num_busy`` cores were
    busy. ``shapes``: by which steps were predicted."""
    crowded = one if all_ is None else all_
    alone = one.speed if all_ is None else alone_speed(one.speed, crowded.speed, one.beside, num_busy)
    tallies = (one,) if all_ is None else (one, all_)
    factor = sum(t.controller_s * t.speed for t in tallies) / sum(t.controller_predicted_s for t in tallies)
    return Reading(
        alone, alone if all_ is None else all_.speed, min(MOST_FACTOR, max(LEAST_FACTOR, factor)),
        one.spans, crowded.spans, shapes.step_shape, shapes.crowded_shape,
    )  # fmt: skip


def _factor_among_all(costs: HostCosts) -> Callable[[int], float]:
    return lambda num_tokens: costs.step_factor_of(num_tokens) * costs.crowded_factor_of(num_tokens)


class _Crew:
    """A server of so many instances, and what it did in each laying."""

    def __init__(self, config: EngineConfig, num_instances: int, costs: HostCosts, profile: HardwareProfile) -> None:
        self.layings: list[list[Window]] = []
        self._config = config
        self._costs = costs
        self._profile = profile
        longest = assemble(config).limits.max_model_len
        self.load = yardstick_load(num_instances, longest)
        kv_tokens = NUM_REQUESTS * (LONG_PROMPT + OUTPUTS[1])
        self.server = WatchedServer(config, num_instances, kv_tokens)
        # Of a decode, on average: longer answers count for more of them.
        rows = self.load.rows
        self._decode_context = round(
            sum(row.output_tokens * (row.input_tokens + row.output_tokens / 2) for row in rows)
            / sum(row.output_tokens for row in rows)
        )

    def serve(self) -> None:
        """The load once."""
        self.layings[-1].append(self.server.watch(self.load))

    def shape(self, index: int, usual: Shape, factor_of: Callable[[int], float]) -> Shape:
        """How the time of its steps hung on their tokens in one laying: ``usual``, a part of ``factor_of``, by which
        they are predicted, as it was then."""
        return bent_shape(usual, (
            TimedStep(
                step.num_tokens, factor_of(step.num_tokens) * self._predicted_s(step), step.processor_ns / 1e9
            )
            for step in self._steps(index)
        ))  # fmt: skip

    def tally(self, index: int, costs: HostCosts, *, is_crowded: bool) -> Tally:
        """Of one laying. ``costs``: by which its steps are predicted, ``is_crowded`` as they are among all."""
        windows, steps = self.layings[index], self._steps(index)
        threads = self._config.num_threads
        predicted_s = sum(
            (costs.crowded_factor_of(step.num_tokens) if is_crowded else 1.0) * (
                costs.step_factor_of(step.num_tokens) * self._predicted_s(step)
                + (costs.worker_step_s + step.num_requests * costs.worker_row_s) / threads
            )
            for step in steps
        )  # fmt: skip
        workers_s = sum(window.worker_s for window in windows)
        others_s = sum(window.server_s + window.client_s for window in windows)
        wall_s = sum(window.end_ns - window.begin_ns for window in windows) / 1e9
        # All that was computed, less the time there was to compute one thing at a time.
        beside = (workers_s / threads + others_s - wall_s) / workers_s * threads if workers_s else 0.0
        return Tally(
            serving_speed(workers_s, predicted_s, threads), min(1.0, max(0.0, beside)),
            sum(window.server_s for window in windows), self._controller_predicted_s(windows, steps, wall_s),
            tuple((window.begin_ns / 1e9, window.end_ns / 1e9) for window in windows),
        )  # fmt: skip

    def _steps(self, index: int) -> list[Step]:
        steps = [step for window in self.layings[index] for step in steps_of(window, self.server.steps)]
        if not steps:
            raise JettisonError("the time line of a load for calibration has no steps")
        return steps

    def _controller_predicted_s(self, windows: Sequence[Window], steps: Sequence[Step], wall_s: float) -> float:
        costs, interval_s = self._costs, self._config.overload.check_interval_ms / 1e3
        rows = [row for window in windows for row in window.load.rows]
        return max(1e-9, (
            len(steps) * costs.controller_step_s
            + sum(step.num_requests for step in steps) * costs.controller_row_s
            + sum(row.output_tokens for row in rows) * costs.controller_token_s
            + sum(row.input_tokens for row in rows) * costs.controller_prompt_token_s
            + len(rows) * (costs.controller_request_s + costs.controller_end_s)
            + wall_s / interval_s * costs.controller_tick_s
        ))  # fmt: skip

    def _predicted_s(self, step: Step) -> float:
        """Decodes are taken for half grown, prompts for parts of equal size."""
        decodes = step.num_tokens - step.num_prompt_tokens
        prompts = min(step.num_prompt_tokens, max(1, step.num_requests - decodes)) if step.num_prompt_tokens else 0
        chunks = tuple(
            ChunkShape(0, step.num_prompt_tokens * (i + 1) // prompts - step.num_prompt_tokens * i // prompts)
            for i in range(prompts)
        ) + (ChunkShape(self._decode_context, 1),) * decodes
        return self._profile.cost.step_cost_s(
            StepShape(chunks, self._profile.cost.num_layers, True, step.num_requests)
        )

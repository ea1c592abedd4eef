"""``jettison profile``: measure steps, links, remaps and copies; fit the cost model; judge it on shapes it never saw.

Fitted and held-out shapes run interleaved, in an order drawn anew each round, and every shape counts with its median:
a machine that drifts moves both alike. Not here: the table and the files (``live.profile.command``).
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from jettison.config import EngineConfig
from jettison.cost.fit import FitErrors, Sample, evaluate, fit_attention_free, fit_cost_model, fit_no_prefix
from jettison.cost.hardware import BatchPoint, HardwareProfile, PrefillPoint
from jettison.cost.model import StepPredictor, StepShape
from jettison.cost.profile_document import ModelSizes, StoredProfile
from jettison.cost.shapes import BatchShape, BesideShape, ProfileShape, ShapeKind, ShapeLimits, ShapePlan, plan_shapes
from jettison.device.spec import HOST
from jettison.device.worker import DeviceWorker, make_device
from jettison.live.engine.assembly import Assembly, assemble
from jettison.live.profile.beside_probe import measure_beside, pool_bytes, shapes_beside
from jettison.live.profile.link_probe import measure_link, measure_link_beside
from jettison.live.profile.serving_probe import measure_serving
from jettison.live.profile.speeds import measure_disk, measure_host_copy, measure_remap
from jettison.live.profile.step_timer import StepTimer
from jettison.live.worker.device_port import device_spec

MAX_CONTEXT = 2048
"""Longest context that is profiled; the model extrapolates linearly beyond."""
MAX_KV_TOKENS = 16384
"""KV that all requests of one profiled step hold together."""
MIN_ROUNDS, MAX_ROUNDS = 3, 25
SERVING_ROUNDS, QUICK_SERVING_ROUNDS = 5, 2
BESIDE_S, QUICK_BESIDE_S = 4.0, 0.5
"""Steps beside copies are measured for so long, and for a few pairs whatever they take."""
SHORT_S, MAX_REPEATS = 0.1, 5
"""Steps shorter than this run up to so many times a round."""

FULL_MODEL, ATTENTION_FREE, NO_PREFIX = "jettison", "attention-free", "no prefix"

PREPARING = "preparing"
"""What progress tells first: the model is loaded."""

Progress = Callable[[float, str], None]
"""Told the share that is done and what comes next."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One shape that was run."""

    kind: ShapeKind
    shape: StepShape
    seconds: tuple[float, ...]
    """One a run."""
    is_held_out: bool

    @property
    def sample(self) -> Sample:
        """The median."""
        return Sample(self.shape, statistics.median(self.seconds))

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median: what no model can predict."""
        if len(self.seconds) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / middle


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """A profile, and how well it predicts."""

    stored: StoredProfile
    measured: tuple[Measured, ...]
    models: dict[str, StepPredictor]
    """The model of the profile and the two simpler ones, fitted to the same samples."""
    num_rounds: int
    elapsed_s: float

    def held_out(self, kind: ShapeKind | None = None) -> list[Sample]:
        """Samples that no model was fitted to, of one kind or of all."""
        return [m.sample for m in self.measured if m.is_held_out and kind in (None, m.kind)]

    def errors(self, name: str, kind: ShapeKind | None = None) -> FitErrors | None:
        """Errors of one model on held-out shapes; None where there are none of the kind."""
        samples = self.held_out(kind)
        return evaluate(self.models[name], samples) if samples else None


def run_profile(
    config: EngineConfig, *, quick: bool = False, seed: int = 0, budget_s: float | None = None,
    progress: Progress = lambda share, text: None,
) -> ProfileResult:
    """Profile the model on this machine, as a worker of this configuration would run it.

    ``budget_s``: about how long steps are measured (None = 45 s, or 6 s with ``quick``); at least ``MIN_ROUNDS``
    rounds run whatever they take. Runs an event loop of its own at the end, so it needs a thread without one. Raises
    ModelError, ConfigError, BudgetError, WorkerLostError, JettisonError (as ``measure_serving`` does).
    """
    started = time.monotonic()
    assembly = assemble(config)
    limits = shape_limits(assembly)
    plan = plan_shapes(limits, seed=seed, quick=quick)
    spec = assembly.worker_specs[0]
    device = make_profile_device(assembly, limits)
    device.start()
    try:
        timer = StepTimer(device, limits, seed)
        progress(0.0, PREPARING)
        timer.prepare()
        measured = measure_shapes(timer, plan, budget_s or (6.0 if quick else 45.0), seed, progress)
        fitted = [m.sample for m in measured if not m.is_held_out]
        cost = fit_cost_model(fitted, limits.num_layers)
        progress(0.9, "remapping, copying, loading")
        beside = measure_beside(device, timer, limits, budget_s=QUICK_BESIDE_S if quick else BESIDE_S)
        decodes = shapes_beside(limits)[0]
        link_byte_s = measure_link_beside(lambda: timer.time_s(decodes), spec.piece_bytes, rounds=3 if quick else 15)
        remap, disk = measure_remap(device, is_touched=spec.back_end == HOST), measure_disk(device)
        mark = replace(assembly.fingerprint, kernels=device.kernels_name)
    finally:
        device.close()
    progress(0.95, "the link between two processes")
    link = measure_link(spec.piece_bytes)
    host_copy = measure_host_copy()
    progress(0.97, "one instance serving, and all of them")
    serving = measure_serving(config, cost, rounds=QUICK_SERVING_ROUNDS if quick else SERVING_ROUNDS)
    profile = HardwareProfile(
        cost, link.bytes_per_s, link.latency_s, remap.fixed_s, remap.s_per_byte, host_copy, disk,
        _batch_points(plan.batches, measured), hop_s=serving.hop_s, contention=serving.contention,
        contention_instances=serving.num_instances, beside_bytes_per_s=beside and beside.bytes_per_s,
        beside_byte_s=beside and beside.byte_s, link_beside_byte_s=link_byte_s,
        prefill_points=_prefill_points(plan.besides, measured),
    )  # fmt: skip
    models: dict[str, StepPredictor] = {
        FULL_MODEL: cost,
        ATTENTION_FREE: fit_attention_free(fitted, limits.num_layers),
        NO_PREFIX: fit_no_prefix(fitted, limits.num_layers),
    }
    rounds = min(len(m.seconds) for m in measured)
    stored = StoredProfile(mark, profile, ModelSizes.of(assembly.shape))
    return ProfileResult(stored, measured, models, rounds, time.monotonic() - started)


def shape_limits(assembly: Assembly) -> ShapeLimits:
    """The largest steps that are profiled: the configuration's, bounded so that a profile takes a minute."""
    limits = assembly.limits
    context = min(limits.max_model_len, MAX_CONTEXT)
    return ShapeLimits(
        num_layers=assembly.shape.num_layers,
        max_num_tokens=min(limits.max_num_batched_tokens, context),
        max_num_seqs=limits.max_num_seqs,
        max_context=context,
        max_kv_tokens=max(MAX_KV_TOKENS, context),
        block_size=limits.block_size,
    )


def make_profile_device(assembly: Assembly, limits: ShapeLimits) -> DeviceWorker:
    """A device like a worker's, with room for the largest shape whatever the configured budget is."""
    sized = assembly.sized_for(-(-limits.max_kv_tokens // limits.block_size))
    spec = sized.worker_specs[0]
    host_bytes = pool_bytes(assembly.shape, spec.block_size)
    return make_device(replace(device_spec(spec), layers=None, host_bytes=host_bytes))


def measure_shapes(
    timer: StepTimer, plan: ShapePlan, budget_s: float, seed: int, progress: Progress
) -> tuple[Measured, ...]:
    """Every shape of the plan in every round, after one that warms up; as many rounds as the budget allows.

    Short steps run several times a round, not in a row: their times scatter most and cost least.
    """
    items: list[tuple[ProfileShape, bool]] = [(item, False) for item in plan.fitted]
    items += [(item, True) for item in plan.held_out]
    rng = random.Random(seed)
    seconds: list[list[float]] = [[] for _ in items]
    order = list(range(len(items)))
    first_s = [0.0] * len(items)
    num_rounds, round_index = MIN_ROUNDS, 0  # round 0 warms up, and tells how long a round takes
    while round_index <= num_rounds:
        rng.shuffle(order)
        for done, index in enumerate(order):
            took = timer.time_s(items[index][0].shape)
            if round_index > 0:
                seconds[index].append(took)
            else:
                first_s[index] = took
            share = (round_index + done / len(order)) / (num_rounds + 1)
            progress(0.9 * share, f"steps, round {round_index} of {num_rounds}")
        if round_index == 0:
            again = [min(MAX_REPEATS, max(1, math.ceil(SHORT_S / max(took, 1e-6)))) for took in first_s]
            order = [index for index, times in enumerate(again) for _ in range(times)]
            round_s = sum(first_s[index] for index in order) + 1e-6
            num_rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(budget_s / round_s)))
        round_index += 1
    return tuple(
        Measured(item.kind, item.shape, tuple(times), is_held_out)
        for (item, is_held_out), times in zip(items, seconds, strict=True)
    )


def _batch_points(batches: tuple[BatchShape, ...], measured: tuple[Measured, ...]) -> tuple[BatchPoint, ...]:
    times = {m.shape: m.sample.seconds for m in measured}
    return tuple(
        BatchPoint(b.num_stages, b.batch_size, b.num_context, b.batch_size / times[b.shape]) for b in batches
    )


def _prefill_points(besides: tuple[BesideShape, ...], measured: tuple[Measured, ...]) -> tuple[PrefillPoint, ...]:
    times = {m.shape: m.sample.seconds for m in measured}
    return tuple(PrefillPoint(b.batch_size, b.num_tokens, times[b.shape]) for b in besides)

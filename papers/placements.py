"""MELL's workloads and systems for its figures, by the fluid model of ``report.placement``. Each is placed once.

The lives of requests follow from their arrivals, their lengths and the preset's steps alone: a prompt is computed when
it comes, and decodes take what they take on a device whose KV memory is 80 % full. So service is equal
under every packer.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import NamedTuple

import numpy as np

from jettison.cost.model import ChunkShape, StepShape
from jettison.cost.presets import ClusterPreset, cluster_preset
from jettison.errors import JettisonError
from jettison.policy.packing.closing import CLOSES_EVERY
from jettison.policy.packing.named import PACKERS
from jettison.report import placement
from jettison.report.placement import Demand, Floats, Life, Placed, demand_of, packer_for, place
from jettison.simulate.spec import parse_spec
from jettison.simulate.workloads import build_workload
from jettison.workload.arrivals import Steady, draw_arrivals
from jettison.workload.lengths import published_lengths
from jettison.workload.rows import Counts
from papers.printed import Printed

BLOCK_SIZE = 16
DURATION_S = 900.0
SEEDS = (0, 1, 2)
LENGTHS = ("lmsys-x10", "wildchat-x10")
"""Half of the requests each."""
FULL = 0.8
"""Part of a device's KV memory at which decodes are timed."""
AZURE = "AzureLLMInferenceTrace_conv.csv.gz"
AZURE_S = 300.0
"""Of the trace: it has five times the rate of the fastest Poisson."""
PRESETS = {"13B on A100-40G": "mell-a100", "7B on RTX 4090": "mell-4090"}
LOADS: dict[str, float | None] = {"Poisson 0.5/s": 0.5, "Poisson 0.8/s": 0.8, "Poisson 1.1/s": 1.1, "Azure": None}
"""Arrivals a second; None: the trace's."""
LOCK = threading.RLock()
"""Several figures' threads ask for the same placements."""


class Load(NamedTuple):
    """One workload."""

    model: str
    """Of ``PRESETS``."""
    arrivals: str
    """Of ``LOADS``."""

    @property
    def preset(self) -> ClusterPreset:
        """Its devices."""
        return cluster_preset(PRESETS[self.model])

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.model}, {self.arrivals}"


class System(NamedTuple):
    """A packing as it is run."""

    packing: str
    """Of ``MAKERS``."""
    epoch_s: float = 1.0
    """A new reserve is for four of them, as what is served has it (``PackParams.reserve``)."""
    closes_every: int | None = None
    """Moves only where a device overflows, and to close one after so many epochs; None: to be on the fewest."""
    fill: float = 0.75
    """Of ``PackingParams``."""


MAKERS = PACKERS | {"printed": Printed}
"""The product's packings, and MELL's Fig. 10 as it is printed."""
SYSTEMS = {
    "mell": System("mell"),
    "mell, most moves": System("mell", fill=1.0),
    "mell, few moves": System("mell", closes_every=CLOSES_EVERY),
    "mell, epochs of 0.1 s": System("mell", epoch_s=0.1),
    "printed": System("printed"),
    "load-balance": System("load-balance"),
    "best-fit": System("best-fit"),
    "worst-fit": System("worst-fit"),
}
"""By name."""
CURVES = {
    "mell": tuple(System("mell", fill=fill) for fill in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)),
    "mell, longer epochs": tuple(System("mell", epoch_s=s) for s in (1.0, 2.0, 5.0, 10.0)),
    "mell, moves only on overflow and to close":
        tuple(System("mell", closes_every=num) for num in (1, 2, 5, 10, 20)),
}  # fmt: skip
"""From many moves to few."""


def arrivals_of(load: Load, seed: int) -> Floats | None:
    """Seconds; None where the trace is not to be had."""
    rate = LOADS[load.arrivals]
    if rate is not None:
        return draw_arrivals(Steady(rate), DURATION_S, np.random.default_rng(seed))
    spec = parse_spec({"cluster": PRESETS[load.model], "workload": {"trace": AZURE, "window_s": [0, AZURE_S]}})
    try:
        return build_workload(spec.workload, seed).columns.arrival_s
    except JettisonError:
        return None


def lengths_of(num: int, seed: int) -> tuple[Counts, Counts]:
    """Input and output tokens of so many requests."""
    rngs = np.random.default_rng([seed, 1]).spawn(5)
    one, other = (published_lengths(n).draw(rngs[i], rngs[i + 1], num) for n, i in zip(LENGTHS, (0, 2), strict=True))
    is_one = rngs[4].random(num) < 0.5
    return np.where(is_one, one[0], other[0]), np.where(is_one, one[1], other[1])


@cache
def lives_of(load: Load, seed: int) -> tuple[tuple[Life, ...], int] | None:
    """The requests, and how many of them were larger than a device and are cut to it; None without arrivals."""
    arrivals = arrivals_of(load, seed)
    if arrivals is None:
        return None
    capacity = load.preset.instance.kv_tokens // BLOCK_SIZE * BLOCK_SIZE
    inputs, outputs = lengths_of(len(arrivals), seed)
    num_cut = int(np.count_nonzero(inputs + outputs > capacity))
    outputs = np.minimum(outputs, capacity - 1)
    inputs = np.minimum(inputs, capacity - outputs)
    step_s = _decode_s(load, capacity, float(np.mean(inputs + outputs / 2.0)))
    lives = []
    for at_s, prompt, answer in zip(arrivals.tolist(), inputs.tolist(), outputs.tolist(), strict=True):
        first_s = at_s + _step_s(load, ((0, prompt),))
        lives.append(Life(at_s, first_s, first_s + answer * step_s, prompt, answer))
    return tuple(lives), num_cut


def _decode_s(load: Load, capacity: int, mean_tokens: float) -> float:
    num = max(1, round(FULL * capacity / mean_tokens))
    return _step_s(load, ((round(FULL * capacity / num), 1),) * num)


def _step_s(load: Load, chunks: tuple[tuple[int, int], ...]) -> float:
    cost = load.preset.instance.cost_model()
    shapes = tuple(ChunkShape(context, tokens) for context, tokens in chunks)
    return cost.step_cost_s(StepShape(shapes, load.preset.instance.shape.num_layers, True, len(chunks)))


def prefill_tokens(load: Load, within_s: float) -> int:
    """That an empty device computes in the time, by steps of 2,048."""
    return int(within_s / _step_s(load, ((0, 2048),)) * 2048)


@cache
def demand(load: Load, seed: int, epoch_s: float = 1.0) -> Demand | None:
    """Its operations, until the last arrival."""
    found = lives_of(load, seed)
    if found is None:
        return None
    lives = found[0]
    return demand_of(
        lives, load.preset.instance.kv_tokens, block_size=BLOCK_SIZE, epoch_s=epoch_s, until_s=lives[-1].arrival_s
    )


@cache
def bound(load: Load, seed: int) -> Floats:
    """L2 of each epoch of a second; the load is to be had."""
    found = demand(load, seed)
    assert found is not None
    return found.l2().astype(np.float64)


@cache
def _placed(load: Load, seed: int, system: System) -> Placed | None:
    found = demand(load, seed, system.epoch_s)
    if found is None:
        return None
    return place(
        found, packer_for(found, system.packing, fill=system.fill, makers=MAKERS),
        holds=system.closes_every is not None, closes_every=system.closes_every,
    )


def placed(load: Load, seed: int, system: System) -> Placed | None:
    """What the system comes to; None where the load is not to be had."""
    with LOCK:
        return _placed(load, seed, system)


@cache
def num_kept(load: Load, seed: int, system: System, num_devices: int) -> int | None:
    """Of ``report.placement``, on so many devices (MELL, section III, finding 3); None without arrivals."""
    found = demand(load, seed, system.epoch_s)
    if found is None:
        return None
    packer = packer_for(found, system.packing, fill=system.fill, num_devices=num_devices, makers=MAKERS)
    return placement.num_kept(found, packer)

"""Clusters and loads of ``benchmarks packing live``: four instances under a trace, twelve tiny ones under sizes that a
packing has to fit together. Nothing here runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from jettison.demo.burst import DemoModel
from jettison.workload.rows import TraceRow, Workload


@dataclass(frozen=True)
class Shape:
    """A cluster, and what a pilot of its load has to come to."""

    instances: int
    model: DemoModel
    most_busy: float | None
    """Part of the cores that ``none`` may keep busy; None: any, as there are more instances than cores."""
    memory: tuple[float, float] | None
    """Part of all KV memory that requests should hold under ``none``, from and to; None: any. Where its mean is no
    more, the waves' peaks leave some free: above that every arm evicts most requests, and first tokens tell of nothing
    else."""


SHAPES = {
    "four": Shape(
        4, DemoModel(layers=8, hidden=256, heads=4, kv_heads=1, context=1024, kv_tokens_per_instance=1536), 0.6, None
    ),
    "twelve": Shape(
        12, DemoModel(layers=2, hidden=64, heads=4, kv_heads=1, context=1024, kv_tokens_per_instance=1024), None,
        (0.15, 0.3),
    ),
}
WAVE_S, WAVE = 40.0, 0.7
"""Arrivals of the twelve come in waves of so many seconds, by so much of their mean rate: instances are needed and not
needed in turn."""
PROMPT = 0.3
"""Part of a request that is its prompt: the rest grows."""

EQUAL = {
    "load-balance": ("load-balance", "load-balance-roomy"), "best-fit": ("best-fit", "best-fit-roomy"),
    "worst-fit": ("worst-fit", "worst-fit-roomy"),
}  # fmt: skip
"""The arms of each baseline: with more memory left free it evicts less, on more instances."""
FEWER = {"load-balance": 0.95, "best-fit": 0.90, "worst-fit": 0.90}
"""Part of a baseline's instances in use that ``mell`` may have at equal evictions."""
MOST_TTFT_RATIO = 1.25
"""P99 TTFT of ``mell`` over that of all awake."""


def sized_load(num: int, rate_per_s: float, capacity: int, seed: int) -> Workload:
    """So many requests, each between an eighth of an instance and all of it (as many in each octave), which arrive in
    waves around a mean rate."""
    rng = np.random.default_rng(seed)
    at_s, rows = 0.0, list[TraceRow]()
    while len(rows) < num:
        at_s += float(rng.exponential(1.0 / (rate_per_s * (1 + WAVE))))
        now = 1.0 + WAVE * math.sin(2 * math.pi * at_s / WAVE_S)
        if rng.random() * (1 + WAVE) >= now:
            continue
        size = capacity * 2.0 ** -float(rng.uniform(0.05, 3.0))
        prompt = max(8, round(PROMPT * size))
        rows.append(TraceRow(at_s, prompt, max(8, round(size) - prompt)))
    return Workload(tuple(rows), "sizes from C/8 to C", f"drawn with seed {seed}")


def _medians(rows: Sequence[Mapping[str, Any]], arm: str) -> dict[str, float] | None:
    """Medians over the rounds of an arm; None where no round of it was served."""
    found = [row for row in rows if row["arm"] == arm and "used_mean" in row]
    names = ("used_mean", "evictions", "ttft_p99_ms")
    return {name: float(median(row[name] for row in found)) for name in names} if found else None


def judge_devices(rows: Sequence[Mapping[str, Any]]) -> list[tuple[bool, str]]:
    """Whether ``mell`` takes fewer instances than each baseline at equal evictions (of its arms the one with the fewest
    instances that evicts no more than ``mell`` does; where each evicts more, the one that evicts least), and what that
    does to first tokens. Empty without ``mell``."""
    ours, verdicts = _medians(rows, "mell"), list[tuple[bool, str]]()
    if ours is None:
        return verdicts
    for baseline, arms in EQUAL.items():
        found = {arm: each for arm in arms if (each := _medians(rows, arm)) is not None}
        if not found:
            continue
        equal = {arm: each for arm, each in found.items() if each["evictions"] <= ours["evictions"]}
        arm = min(equal, key=lambda a: equal[a]["used_mean"]) if equal else min(
            found, key=lambda a: found[a]["evictions"]
        )
        ratio = ours["used_mean"] / found[arm]["used_mean"]
        verdicts.append((ratio <= FEWER[baseline], (
            f"mell: {ours['used_mean']:.2f} instances in use ({ours['evictions']:.0f} evictions), {ratio:.2f} of "
            f"{arm}'s ({found[arm]['evictions']:.0f}), at most {FEWER[baseline]}"
        )))  # fmt: skip
    if (base := _medians(rows, "none")) is not None:
        ratio = ours["ttft_p99_ms"] / base["ttft_p99_ms"]
        verdicts.append((ratio <= MOST_TTFT_RATIO, f"mell: P99 TTFT {ratio:.2f} of none's, at most {MOST_TTFT_RATIO}"))
    return verdicts

"""Faults and their times: values, and a generator of schedules from a seed.

A schedule is plain data, so a failing one is a test case. ``sim.breaking`` carries it out. Faults of one worker may
overlap: each begins and ends by itself, slowness multiplies, delays add up, and each ``Duplicate`` makes a copy.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from jettison.types import WorkerId


@dataclass(frozen=True, slots=True)
class Crash:
    """A worker dies; its process is seen to be gone ``detect_s`` later."""

    at_s: float
    worker_id: WorkerId
    restart_after_s: float | None = 1.0
    """Seconds from the detection until the new life joins; None: it stays down, and is given up for good."""
    detect_s: float = 0.01


@dataclass(frozen=True, slots=True)
class Cut:
    """The link between two workers breaks, and stays broken until one of them starts a new life."""

    at_s: float
    a: WorkerId
    b: WorkerId


@dataclass(frozen=True, slots=True)
class Slow:
    """A worker's steps take ``factor`` times as long."""

    at_s: float
    worker_id: WorkerId
    for_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class Delay:
    """A worker's reports to the controller come later, in order."""

    at_s: float
    worker_id: WorkerId
    for_s: float
    delay_s: float


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A worker's reports to the controller come twice, the second time ``delay_s`` later."""

    at_s: float
    worker_id: WorkerId
    for_s: float
    delay_s: float


Fault = Crash | Cut | Slow | Delay | Duplicate


def draw_faults(seed: int, workers: Sequence[WorkerId], span_s: float, num_faults: int) -> tuple[Fault, ...]:
    """A schedule of ``num_faults`` faults of all kinds within ``span_s``, in order of time. It depends on the seed
    alone."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    for _ in range(num_faults):
        at_s, worker = rng.uniform(0.0, span_s), rng.choice(list(workers))
        kind = rng.choice(["crash", "crash", "cut", "slow", "delay", "duplicate"])
        for_s = rng.uniform(0.05, 0.5) * span_s
        if kind == "cut" and len(workers) > 1:
            other = rng.choice([w for w in workers if w != worker])
            faults.append(Cut(at_s, min(worker, other), max(worker, other)))
        elif kind == "slow":
            faults.append(Slow(at_s, worker, for_s, rng.uniform(1.5, 10.0)))
        elif kind == "delay":
            faults.append(Delay(at_s, worker, for_s, rng.uniform(0.001, 0.3)))
        elif kind == "duplicate":
            faults.append(Duplicate(at_s, worker, for_s, rng.uniform(0.0, 0.3)))
        else:
            restart = None if rng.random() < 0.1 and len(workers) > 1 else rng.uniform(0.05, 3.0)
            faults.append(Crash(at_s, worker, restart, rng.uniform(0.0, 0.2)))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))

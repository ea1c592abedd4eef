"""Deaths drawn from a seed, for the tests and for ``python -m benchmarks moves deaths``."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence

from jettison.live.verify.fault_places import MOVE_PHASES
from jettison.live.verify.fault_schedules import Schedule, Source, Wake, source_for
from jettison.live.worker.failpoints import FILL_NAMES, LIVE_ONLY, NAMES, OFFLINE_NAMES, PULL_NAMES, SLEEP_NAMES
from jettison.memory.kvtransfers import ExchangeMode

FREQUENT = ("stage", "sample", "flush", "piece_sent", "piece_written", "attention")
"""Passed many times before a move begins."""


def drawn_schedule(seed: int, num_workers: int = 2, names: Sequence[str] = ()) -> Schedule:
    """Every failpoint, or each of ``names``, in turn; victim, count, signal and the kind of moves by lot."""
    rng = random.Random(seed)
    names = names or ((*NAMES, *SLEEP_NAMES, *PULL_NAMES) if num_workers > 2 else (*NAMES, *SLEEP_NAMES))
    name = names[seed % len(names)]
    what = name.rpartition(":")[2].partition("_")[2]
    count = _draw_count(rng, name)
    how = signal.SIGSTOP if rng.random() < 0.25 else signal.SIGKILL
    wake = rng.choice(list(Wake)) if how is signal.SIGSTOP else Wake.NEVER
    # A worker that is first in every pipeline of whole instances; one in the first, which receives when it is turned.
    victim = 0 if what == "stage" else rng.randrange(2 if what == "shard_written" else num_workers)
    with_pieces = [m for m in ExchangeMode if m is not ExchangeMode.RECOMPUTE]
    modes = [ExchangeMode.LIVE] if name in LIVE_ONLY else with_pieces
    pulls = num_workers > 2 and (name in PULL_NAMES or rng.random() < 0.5)
    mode = rng.choice(modes)
    return Schedule(seed, victim, name, count, how, wake, mode, pulls, source_for(name, rng.choice(list(Source))))


def _draw_count(rng: random.Random, name: str) -> int:
    """For the how many-th time the place is reached when the victim dies there."""
    _, colon, point = name.rpartition(":")
    if not colon:
        if point.partition("_")[2] in FREQUENT:
            return rng.randrange(1, 60)
        return rng.randrange(1, 8) if point in (*PULL_NAMES, *OFFLINE_NAMES) else 1
    if point in MOVE_PHASES:
        return rng.randrange(1, 3 if point.endswith("_round") else 8)
    return rng.randrange(1, 6) if point in (*PULL_NAMES, *FILL_NAMES) else rng.randrange(1, 3)

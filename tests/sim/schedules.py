"""What tests of schedules in virtual time share: batches of seeds, a run to its end, what a batch must meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from scenarios import Watched

from jettison.config.offline import HARVEST_PARTS
from jettison.core.ladder.lists import with_offline
from jettison.policy.offline import OfflineParams, SloParams
from jettison.sim.setup import ClusterSetup

END_NS = 900 * 10**9
MOST_EVENTS = 300_000
"""Of one schedule, which has some thousands; beyond, something is tried again and again, and would be until the end."""


def beside_offline(setup: ClusterSetup, seed: int) -> tuple[ClusterSetup, float]:
    """The setup with what is done with offline work, and the part of the requests that is offline; none of either in
    every third schedule. From a stream of its own: the rest of a schedule is what it would be without."""
    rng = random.Random(f"offline {seed}")
    if seed % 3 == 0:
        return setup, 0.0
    parts = rng.choice([(), HARVEST_PARTS, HARVEST_PARTS, HARVEST_PARTS[:2], HARVEST_PARTS[:1]])
    offline = OfflineParams(
        slo_aware=bool(parts), checkpoints="checkpoint" in parts, prefetches="prefetch" in parts,
        slo=SloParams(ttft_s=rng.choice([None, 0.001, 0.01])), checkpoint_below_free=rng.choice([0.5, 1.0]),
    )
    params = replace(setup.params, rungs=with_offline(setup.params.rungs, parts), offline=offline)
    return replace(setup, params=params), rng.choice([0.2, 0.5])


def batches(num: int, size: int, num_quick: int) -> list[Any]:
    """Seeds from 0 on, so many a test; those from ``num_quick`` on are of the long run."""
    return [
        pytest.param(range(first, first + size), marks=[pytest.mark.slow] if first >= num_quick else [], id=str(first))
        for first in range(0, num, size)
    ]


def run_to_its_end(watched: Watched) -> Watched:
    """All events of what it has been given to do."""
    loop = watched.cluster.loop
    first = loop.num_run
    watched.cluster.run(until_ns=END_NS, is_over=lambda: loop.num_run - first > MOST_EVENTS)
    assert loop.num_run - first <= MOST_EVENTS, f"no end at {loop.now_ns / 1e9:.1f} s"
    return watched


def expect_met(run: Callable[[int], Watched], seeds: Sequence[int], to_be_met: Collection[str]) -> None:
    """Each seed's run ends well, and together they have records of these kinds: what meets nothing proves nothing."""
    seen: set[str] = set()
    for seed in seeds:
        try:
            seen |= set(run(seed).kinds())
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error!r}") from error
    assert seen >= set(to_be_met), f"none of {seeds} has met {set(to_be_met) - seen}"


def expect_same_again(run: Callable[[int], Watched], seed: int) -> None:
    """The same seed gives the same log and the same times."""
    first, again = run(seed), run(seed)
    assert first.cluster.log.hexdigest == again.cluster.log.hexdigest and first.times == again.times

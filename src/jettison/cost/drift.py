"""How fast a machine was over a stretch of time, from probes: speeds for a simulation of that stretch. Pure.

A virtual machine's cores are somebody else's as well: the same step takes 7 ms now and 9 ms ten seconds later, and a
queue makes more of that. What a simulation is to be compared with has to be simulated on the machine as it was then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jettison.cost.hostcosts import HostCosts, Shape

BIN_S = 3.0
"""Probes of so long a time are one speed."""
SLOWEST, FASTEST = 0.2, 3.0
"""Beyond these a bin is no measurement."""

LEAST_APART = 0.2
"""Busy cores: what is seen at two numbers that are nearer tells of no difference between them."""

Probe = tuple[float, float, float]
"""When, what it took, and how many cores were busy meanwhile."""
Taken = tuple[float, float, float, float]
"""From when to when, what cores did meanwhile, and what a hypervisor withheld of them from somebody who wanted it; the
latter two in seconds of one core."""
SpeedLine = tuple[tuple[float, float], ...]
"""From when on, in seconds of the run, and how fast a core is over what it was when it was measured. Sorted."""


@dataclass(frozen=True, slots=True)
class MachineThen:
    """What a machine was during a live run, over what its constants say."""

    speed: SpeedLine = ()
    """Of one core, alone."""
    core_speeds: tuple[float, ...] = ()
    """Of 1, 2, ... busy cores over that; none: as the constants have it."""
    controller_factor: float = 1.0
    """Work of the controller and the clients."""
    step_shape: Shape = ()
    """How a step's time hangs on its tokens (``HostCosts.step_shape``); none: as the constants have it."""
    crowded_shape: Shape = ()
    """The same of what it loses to others (``HostCosts.crowded_shape``)."""
    had_share: float = 1.0
    """What of the cores that were wanted was had, over all of the run: in ``speed``, and in nothing else here."""

    def costs(self, usual: HostCosts) -> HostCosts:
        """The constants as they were then; ``speed`` is not in them."""
        then = usual.with_controller(self.controller_factor)
        return replace(
            then, core_speeds=self.core_speeds or then.core_speeds, step_shape=self.step_shape or then.step_shape,
            crowded_shape=self.crowded_shape or then.crowded_shape,
        )  # fmt: skip


AS_MEASURED = MachineThen()


def probes_evened(
    probes: Sequence[Probe], alone: Sequence[Probe], crowded: Sequence[Probe]
) -> list[tuple[float, float]]:
    """When, and what a probe took over what is usual with as many busy cores.

    A probe takes longer while others compute, which a simulation knows already. What is usual is a straight line
    through the medians of probes while one instance served (``alone``) and of those while all did (``crowded``); where
    both were as busy, or one has no probes, it is the same for all."""
    if not alone or not crowded:
        beside = [*alone, *crowded]
        usual_s, per_core_s, busy = statistics.median(p[1] for p in beside) if beside else 1.0, 0.0, 0.0
    else:
        busy, busier = (statistics.median(p[2] for p in some) for some in (alone, crowded))
        usual_s, usual_crowded_s = (statistics.median(p[1] for p in some) for some in (alone, crowded))
        apart = busier - busy
        per_core_s = max(0.0, usual_crowded_s - usual_s) / apart if apart > LEAST_APART else 0.0
    return [(at_s, took_s / max(usual_s / 2, usual_s + (cores - busy) * per_core_s)) for at_s, took_s, cores in probes]


def speed_line(
    probes: Sequence[tuple[float, float]], reference_s: float, begin_s: float, *, speed: float = 1.0,
    taken: Sequence[Taken] = (),
) -> SpeedLine:
    """``probes``: when (any clock) and what they took; ``reference_s``: what they take when cores are ``speed`` times
    as fast as when the constants were measured; ``begin_s``: the run's beginning on that clock. What was before it
    does not count; bins without probes go on as the one before them, and what is before the first is as fast as that.
    Without a reference (0) nothing is known of the machine: an empty line.

    ``taken``: of the same times. Processor time, which probes are told in, goes on only while a core is had: what
    was withheld makes cores slower by its share of what was wanted."""
    if reference_s <= 0.0:
        return ()
    bins: dict[int, list[float]] = {}
    for at_s, took_s in probes:
        if at_s >= begin_s:
            bins.setdefault(math.floor((at_s - begin_s) / BIN_S), []).append(took_s)
    line: list[tuple[float, float]] = []
    own = reference_s / statistics.median(bins[min(bins)]) if bins else 0.0
    for number in range(max(bins, default=-1) + 1):
        if number in bins:
            own = reference_s / statistics.median(bins[number])
        from_s = begin_s + number * BIN_S
        now = min(FASTEST, max(SLOWEST, speed * own * had_share(taken, from_s, from_s + BIN_S)))
        if not line or now != line[-1][1]:
            line.append((number * BIN_S, now))
    return tuple(line)


def had_share(taken: Sequence[Taken], begin_s: float, end_s: float) -> float:
    """What was had of the cores that were wanted between two times; 1 where nobody wanted any. Of what lasted longer
    than that its part."""
    had_s = wanted_s = 0.0
    for from_s, until_s, busy_s, stolen_s in taken:
        part = max(0.0, min(end_s, until_s) - max(begin_s, from_s)) / max(until_s - from_s, 1e-9)
        had_s += part * busy_s
        wanted_s += part * (busy_s + stolen_s)
    return had_s / wanted_s if wanted_s > 0.0 else 1.0

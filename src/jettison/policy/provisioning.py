"""Which sleeping instances give their processes back, and when (beyond the papers). Pure.

A sleeper with a process serves sooner than one without by as long as a process takes to start, and keeps its device
meanwhile. Nothing says when it will be wanted again, so it is kept for as long as a start takes: the device-seconds of
an idle process are then never more than twice what the best choice in hindsight would have cost (the ski-rental
problem: Karlin, Manasse, Rudolph and Sleator, Competitive Snoopy Caching, 1988).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jettison.types import WorkerId

UNKNOWN_START_S = 10.0
"""Seconds that a start is taken to last while none has been measured: as long as an unknown wake."""


class IdleProcess(NamedTuple):
    """A worker that sleeps, with a process of its own."""

    worker_id: WorkerId
    asleep_s: float
    """Seconds since its memory was given back."""


def choose_released(
    idle: Sequence[IdleProcess], num_provisioned: int, min_instances: int, start_s: float | None
) -> list[WorkerId]:
    """The workers whose processes are to end now, those that have slept longest first: so many that ``min_instances``
    of ``num_provisioned`` processes are left. A process that is being started is not counted, as it may never be there.
    ``start_s``: what a start takes; None: not known."""
    keep_s = UNKNOWN_START_S if start_s is None else start_s
    may = sorted((each for each in idle if each.asleep_s >= keep_s), key=lambda each: (-each.asleep_s, -each.worker_id))
    return [each.worker_id for each in may[: max(0, num_provisioned - min_instances)]]


def is_given_up(waits_s: float, calm_s: float, predicted_s: float | None) -> bool:
    """Whether a start that has taken ``waits_s`` seconds is given up, as an instance that serves has had nothing to do
    for ``calm_s``: for as long as a start takes, and once this one takes twice as long as predicted. Before that it is
    about to be there, and a burst that has paused may come back."""
    expected_s = UNKNOWN_START_S if predicted_s is None else predicted_s
    return waits_s >= 2.0 * expected_s and calm_s >= expected_s

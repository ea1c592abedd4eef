"""Observed steps, kept until the predictor is asked a question, then handed out in order.

Pure. A group may report its steps late, and many at once: the steps handed out are the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from jettison.cost.stepwork import Part, StepWork
from jettison.types import GroupId

MEMORY_STEPS = 1024
"""Older observations weigh less than a hundredth of a new one (``stepfit.FORGETTING`` to this power)."""
MAX_NOTED = 8 * MEMORY_STEPS
"""Observations kept before the oldest are dropped."""

Totals = tuple[int, int, int, int, int, int]
"""The fields of ``StepWork`` in order, as a plain tuple; a ``StepWork`` is one."""


_Run = tuple[Sequence[int], GroupId, Part, StepWork]
"""Consecutive steps of a group with the same rows, usually one: the begin of the first and the end of each (the begin
of the next), their group, the part that the times measure, and the work of the first. Each step attends to more KV than
the one before, by that one's tokens; only the first has copies. Plain tuples, which are cheaper to make."""


class StepNotes:
    """The noted steps of one fit."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._num_steps = 0
        self._most_steps = MAX_NOTED

    def __len__(self) -> int:
        """Number of noted steps."""
        return self._num_steps

    def add(self, times_ns: Sequence[int], group_id: GroupId, part: Part, work: StepWork) -> None:
        """Note a run of consecutive steps (``_Run``)."""
        self._runs.append((times_ns, group_id, part, work))
        self._num_steps += len(times_ns) - 1
        if self._num_steps > self._most_steps:
            self._forget()

    def _forget(self) -> None:
        """Drop the runs that have at least ``MEMORY_STEPS`` later steps."""
        self._runs.sort(key=lambda run: -run[0][0])
        starts = [-times_ns[0] for times_ns, *_ in self._runs]
        later = [0, *accumulate(len(times_ns) - 1 for times_ns, *_ in self._runs)]
        self._runs = [run for run in self._runs if later[bisect_left(starts, -run[0][-1])] < MEMORY_STEPS]
        self._num_steps = sum(len(times_ns) - 1 for times_ns, *_ in self._runs)
        # Simultaneous runs of many groups may all stay: then the next check waits for as many steps again.
        self._most_steps = max(MAX_NOTED, 2 * self._num_steps)

    def take(self) -> list[tuple[Part, Totals, int]]:
        """(part, work, nanoseconds) of the newest steps, in order of end and group; where both are equal, in the order
        noted."""
        steps: list[tuple[int, GroupId, Part, Totals, int]] = []
        for times_ns, group_id, part, work in self._runs:
            rows, tokens, pairs, kv_tokens, copied, beside = work
            begin_ns = times_ns[0]
            for end_ns in times_ns[1:]:
                totals = rows, tokens, pairs, kv_tokens, copied, beside
                steps.append((end_ns, group_id, part, totals, end_ns - begin_ns))
                begin_ns, pairs, kv_tokens, copied, beside = end_ns, pairs + tokens, kv_tokens + tokens, 0, 0
        if len(steps) > 1:
            steps.sort(key=lambda step: step[:2])
            del steps[:-MEMORY_STEPS]
        self._runs.clear()
        self._num_steps = 0
        self._most_steps = MAX_NOTED
        return [step[2:] for step in steps]

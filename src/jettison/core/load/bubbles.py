"""Bubbles: how long pipeline stages stand still while their pipeline has work, measured at the stages.

Every stage reports when it began and ended its part of a step, on its own clock; only differences of one worker's times
are taken, so workers on other machines may have other clocks. Groups of one stage have no bubbles and are not counted.

A stage's bubble time is the sum of
- the gap before a step that was issued while another was in flight;
- when the pipeline was empty: the time the step spent in the stages before (fill), and, if no other follows, in the
  stages after (drain).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from jettison.core.ports import RunStep
from jettison.types import GroupId, WorkerId


@dataclass(slots=True)
class StageTimes:
    """Monotone totals of one worker as a stage of pipelines."""

    busy_ns: int = 0
    bubble_ns: int = 0


@dataclass(slots=True)
class _OpenStep:
    group_id: GroupId
    workers: tuple[WorkerId, ...]
    follows: bool
    """Another step was in flight when this one was issued."""
    busy_ns: dict[WorkerId, int] = field(default_factory=dict)


class BubbleMeter:
    """Measures in ``totals`` how long each worker is busy as a stage, and how long it stands still. The driver feeds
    it: steps as they are issued, stages as they report, steps as they end."""

    def __init__(self) -> None:
        self.totals: dict[WorkerId, StageTimes] = {}
        self._open: dict[int, _OpenStep] = {}
        self._num_open: dict[GroupId, int] = {}
        self._last_end_ns: dict[tuple[GroupId, WorkerId], int] = {}

    def issued(self, step: RunStep) -> None:
        """Note a step that goes to its stages, and whether another step of its group is in flight. Steps of one stage
        are not counted."""
        if len(step.stages) < 2:
            return
        num_open = self._num_open.get(step.group_id, 0)
        self._num_open[step.group_id] = num_open + 1
        self._open[step.step_id] = _OpenStep(step.group_id, tuple(s.worker_id for s in step.stages), num_open > 0)

    def stage_done(self, worker_id: WorkerId, step_id: int, started_ns: int, ended_ns: int) -> None:
        """Count a stage's part of a step, given in ns of its worker's clock, as busy time. Its bubble time grows by the
        gap since its last part, if another step was in flight when this one was issued, else by the time that the
        stages before it took. Nothing for a step that is not under way here."""
        step = self._open.get(step_id)
        if step is None:
            return
        step.busy_ns[worker_id] = ended_ns - started_ns
        total = self.totals.setdefault(worker_id, StageTimes())
        total.busy_ns += ended_ns - started_ns
        last_end_ns = self._last_end_ns.get((step.group_id, worker_id))
        self._last_end_ns[step.group_id, worker_id] = ended_ns
        if step.follows and last_end_ns is not None:
            total.bubble_ns += max(0, started_ns - last_end_ns)
        else:
            before = step.workers[: step.workers.index(worker_id)]
            total.bubble_ns += sum(step.busy_ns.get(w, 0) for w in before)

    def keep_groups(self, groups: Container[GroupId]) -> None:
        """Forget the steps under way of all groups but these. After a worker's death they will not end, or no longer
        matter. The totals stay."""
        self._open = {i: step for i, step in self._open.items() if step.group_id in groups}
        self._num_open = {g: num for g, num in self._num_open.items() if g in groups}
        self._last_end_ns = {key: end_ns for key, end_ns in self._last_end_ns.items() if key[0] in groups}

    def ended(self, step_id: int) -> None:
        """A step is over, or has failed; call after its last stage's ``stage_done``. Where its group has no other step
        in flight, each stage's bubble time grows by the time that the stages after it took, and the pipeline counts as
        empty. Nothing for a step that is not under way here."""
        step = self._open.pop(step_id, None)
        if step is None:
            return
        self._num_open[step.group_id] -= 1
        if self._num_open[step.group_id]:
            return
        del self._num_open[step.group_id]
        for index, worker_id in enumerate(step.workers):
            self._last_end_ns.pop((step.group_id, worker_id), None)
            after = sum(step.busy_ns.get(w, 0) for w in step.workers[index + 1 :])
            self.totals.setdefault(worker_id, StageTimes()).bubble_ns += after

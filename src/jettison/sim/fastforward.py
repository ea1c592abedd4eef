"""Compressed stepping: decode steps with nothing to decide in between are one event.

The core says which steps these are, and commits them (``core.driving.fastforward``); here are their times. The end of
the last step of a fast-forward is an ordinary event. Before that, the group is settled whenever the core is about to
handle an event that may read it. It is cut, so that the step under way ends as an ordinary one, when the group has
something to decide. Results equal those of naive stepping to the nanosecond.

    begin    the step just issued and as many more as the core allows; one event at the end of the one after them
    settle   steps that have ended by now are committed: of one group or of all
    cut      settled, and the step under way is told of by itself
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jettison.core import ports
from jettison.core.driving.fastforward import FastForward
from jettison.sim.executor import StageShape
from jettison.sim.loop import EventLoop, Scheduled
from jettison.sim.plant import Plant
from jettison.sim.tasks import TOKEN, StepRun
from jettison.sim.worker import SimWorker
from jettison.types import GroupId, RequestId, WorkerId

LEAST_STEPS = 3
"""Shorter fast-forwards cost more than they save."""

Times = npt.NDArray[np.int64]
"""Nanoseconds, ascending."""

Tell = Callable[[Sequence[RequestId], Times], None]
"""These requests have got a token each at each of these times."""


@dataclass(slots=True, eq=False)
class _FastForward:
    """Steps of one group. Entry i of the arrays is step i; the last step is reported as usual."""

    run: StepRun
    worker: SimWorker
    took_ns: Times
    ends_ns: Times
    """When their ends arrive at the controller."""
    around_ns: int
    """Time from a step's end on the worker to its arrival at the controller."""
    end: Scheduled
    reported_ns: int
    """When the worker's last report before the first of these steps arrives."""
    num_settled: int = 0


class FastForwards:
    """All fast-forwards under way."""

    def __init__(self, plant: Plant, loop: EventLoop, ahead: FastForward, command_ns: int, report_ns: int) -> None:
        self._plant = plant
        self._loop = loop
        self._ahead = ahead
        self._command_ns = command_ns
        self._report_ns = report_ns
        self._away: dict[GroupId, _FastForward] = {}
        self._group_of: dict[int, GroupId] = {}
        """Groups by the id of the step in flight."""
        self.num_steps = 0
        """Steps that were no events."""

    @property
    def is_idle(self) -> bool:
        """No fast-forward is under way."""
        return not self._away

    def group_of(self, step_id: int) -> GroupId | None:
        """The group whose fast-forward a step belongs to."""
        return self._group_of.get(step_id)

    def begin(self, run: StepRun, worker: SimWorker, arrives_ns: int) -> bool:
        """Make a fast-forward of a step that is about to be issued; False where it has to be run by itself."""
        group_id = run.step.group_id
        if not worker.can_fast_forward(arrives_ns):
            return False
        count = self._ahead.most_steps(group_id)
        if count < LEAST_STEPS:
            return False
        shape = StageShape(self._plant.shape.num_layers, True, True)
        took = self._plant.executor.decode_ns(worker.worker_id, worker.num_steps, run.load, shape, count + 1)
        if worker.slowness != 1.0:
            took = np.rint(took * worker.slowness).astype(np.int64)
        around_ns = self._report_ns + worker.extra_hop_ns
        ends = np.cumsum(took + (around_ns + self._command_ns)) + (arrives_ns - self._command_ns)
        due_ns = self._ahead.due_ns
        if due_ns is not None:
            # The first step that ends then or later is reported by itself.
            count = min(count, int(np.searchsorted(ends, due_ns)))
            if count < LEAST_STEPS:
                return False
            took, ends = took[: count + 1], ends[: count + 1]
        reported_ns = worker.last_report_ns
        if ends[0] < reported_ns:
            return False  # its reports are delayed; in order all the same
        end = self._tell_last(run, worker, int(ends[-1]) - around_ns, int(took[-1]))
        worker.count_steps(1, int(took[0]))
        self._away[group_id] = _FastForward(run, worker, took, ends, around_ns, end, reported_ns)
        self._group_of[run.step.step_id] = group_id
        return True

    def settle(self, tell: Tell, *, including_now: bool = True) -> None:
        """Commit all steps that have ended by now, of all groups."""
        for forward in self._away.values():
            self._settle(forward, tell, including_now)

    def settle_group(self, group_id: GroupId, tell: Tell, *, including_now: bool) -> None:
        """The same for one group; without a fast-forward nothing happens."""
        forward = self._away.get(group_id)
        if forward is not None:
            self._settle(forward, tell, including_now)

    def settle_ended(self, group_id: GroupId, tell: Tell) -> None:
        """The last step of a group's fast-forward is about to be reported; without one nothing happens."""
        forward = self._away.get(group_id)
        if forward is not None and forward.ends_ns[-1] <= self._loop.now_ns:
            self._settle(forward, tell, True)
            del self._away[group_id], self._group_of[forward.run.step.step_id]

    def cut(self, group_id: GroupId, tell: Tell, *, including_now: bool = True) -> None:
        """End a group's fast-forward with the step under way; without one nothing happens."""
        forward = self._away.pop(group_id, None)
        if forward is None:
            return
        del self._group_of[forward.run.step.step_id]
        self._settle(forward, tell, including_now)
        now = forward.num_settled
        forward.end.cancel()
        forward.worker.last_report_ns = int(forward.ends_ns[now - 1]) if now else forward.reported_ns
        ended_ns = int(forward.ends_ns[now]) - forward.around_ns
        self._tell_last(forward.run, forward.worker, ended_ns, int(forward.took_ns[now]))

    def cut_at(self, worker_id: WorkerId, tell: Tell, *, including_now: bool) -> None:
        """The same for the group that computes on a worker, which is about to get other work."""
        for group_id, forward in list(self._away.items()):
            if forward.worker.worker_id == worker_id:
                self.cut(group_id, tell, including_now=including_now)

    def cut_all(self, tell: Tell, *, including_now: bool = True) -> None:
        """End all fast-forwards."""
        for group_id in list(self._away):
            self.cut(group_id, tell, including_now=including_now)

    def _settle(self, forward: _FastForward, tell: Tell, including_now: bool) -> None:
        ends, first = forward.ends_ns, forward.num_settled
        before_ns = self._loop.now_ns + including_now
        ended = min(int(np.searchsorted(ends, before_ns)), len(ends) - 1)
        if ended <= first:
            return
        forward.num_settled = ended
        self.num_steps += ended - first
        # Steps that have begun: all up to the one under way.
        forward.worker.count_steps(ended - first, int(forward.took_ns[first + 1 : ended + 1].sum()))
        step = self._ahead.advance(forward.run.step.group_id, ends[first:ended].tolist(), TOKEN.token_id)
        forward.run.step = step
        tell([row.state.request_id for row in step.rows], ends[first:ended])

    def _tell_last(self, run: StepRun, worker: SimWorker, ended_ns: int, took_ns: int) -> Scheduled:
        """Keep the worker busy until ``ended_ns``, when it reports the step that ends then."""
        tokens = [TOKEN] * run.load.num_samples
        done = ports.StepCompleted(run.step.step_id, tokens, {}, took_ns)
        end = self._plant.report(worker.worker_id, done, ended_ns)
        worker.hold(run, end, ended_ns)
        return end

"""How soon a drop serves the requests that waited for it: the time from its decision to the first step with one of
them.

A drop is to help within about one step: the step in flight at the decision ends, pages are remapped, and the queue is
admitted. This module watches every merge until it has, and says in one record (``queue_served``) how long it took, how
long the step that was in flight at the decision took, and how many steps the busiest group ended in between (a pipeline
has some in flight at once, one in each stage).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jettison.core.moving.merging import MergePhase, Merging
from jettison.core.ports import Record, RunStep
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.types import GroupId, RequestId, WorkerId


class _Decision:
    """One merge whose sources' queued requests have not been served yet, and what has happened since it was decided
    on."""

    def __init__(self, merge: Merging, now_ns: int) -> None:
        self.merge = merge
        self.decided_ns = now_ns
        self.queued: dict[RequestId, RequestState] = {s.request_id: s for g in merge.sources for s in g.queues.waiting}
        self.sources = {g.group_id for g in merge.sources}
        self.in_flight_since_ns = {
            step_id: flight.issued_ns for g in merge.sources for step_id, flight in g.in_flight.items()
        }
        self.step_in_flight_ns = 0
        self.num_steps: Counter[GroupId] = Counter()

    def involves(self, group_id: GroupId) -> bool:
        """Whether the group is one of the merge's sources, or the merged group."""
        merged = self.merge.group
        return group_id in self.sources or (merged is not None and merged.group_id == group_id)

    @property
    def is_moot(self) -> bool:
        """Whether the merge has failed or all its queued requests have ended, so that none is left to be served."""
        return self.merge.phase is MergePhase.FAILED or all(state.is_finished for state in self.queued.values())

    def record(self, now_ns: int) -> Record:
        """The log record that the first queued request is being served, with the time since the decision."""
        return Record("queue_served", now_ns, {
            "workers": list(self.merge.worker_ids),
            "queued": len(self.queued),
            "decision_to_first_queued_step_ms": (now_ns - self.decided_ns) / 1e6,
            "step_in_flight_ms": self.step_in_flight_ns / 1e6,
            "steps_between": max(self.num_steps.values(), default=0),
        })  # fmt: skip


class FirstServed:
    """The merges whose queued requests have not been served yet. It tells how long they took, and decides nothing."""

    def __init__(self) -> None:
        self.open: list[_Decision] = []
        """While it is empty, steps need not be reported here."""

    def begun(self, merge: Merging, now_ns: int) -> None:
        """Watch a merge from now on, if requests wait in its sources. Called before any of the merge is done."""
        self.abandoned(merge.worker_ids)
        if any(group.queues.waiting for group in merge.sources):
            self.open.append(_Decision(merge, now_ns))

    def abandoned(self, worker_ids: Iterable[WorkerId]) -> None:
        """Stop watching every merge with one of these workers: a member is dead, or merges anew."""
        if self.open:
            workers = set(worker_ids)
            self.open = [d for d in self.open if workers.isdisjoint(d.merge.worker_ids)]

    def step_ended(self, group: Group, step_id: int, now_ns: int) -> None:
        """Note that a step of a group has been computed, which may lie between a decision and its first served
        request."""
        for decision in self.open:
            if decision.involves(group.group_id):
                decision.num_steps[group.group_id] += 1
                issued_ns = decision.in_flight_since_ns.pop(step_id, now_ns)
                decision.step_in_flight_ns = max(decision.step_in_flight_ns, now_ns - issued_ns)

    def step_issued(self, step: RunStep, now_ns: int) -> list[Record]:
        """Note that a step goes to its stages. Returns the record of each merge with a queued request that this step is
        the first to serve; empty: none."""
        served: list[_Decision] = []
        for decision in self.open:
            if decision.involves(step.group_id) and any(r.state.request_id in decision.queued for r in step.rows):
                served.append(decision)
        self.open = [d for d in self.open if d not in served and not d.is_moot]
        return [decision.record(now_ns) for decision in served]

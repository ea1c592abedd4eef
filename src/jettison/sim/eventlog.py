"""A run as a hash: same seed, same hash.

Only facts that a user or an operator of the cluster could see are hashed, with their times: arrivals, ends of requests,
moves, layouts, deaths, decisions. Single steps are not hashed: they show in the times at which requests end. So a run
that advances steps together has the same hash as one that takes them one by one.
"""

from __future__ import annotations

import hashlib

from jettison.core import ports


class EventLog:
    """Running SHA-256 over times and facts, and how many there were."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self.num_entries = 0

    def note(self, now_ns: int, *facts: object) -> None:
        """Add one entry. Facts are named by their ``repr``: strings, numbers and tuples of these."""
        self.num_entries += 1
        self._sha.update(f"{now_ns} {facts!r}\n".encode())

    def note_event(self, now_ns: int, event: ports.Event) -> None:
        """Add an event of the core; steps and ticks are left out."""
        match event:
            case ports.StepCompleted() | ports.StepAbandoned() | ports.Tick():
                return
            case ports.Arrived():
                request = event.request
                self.note(now_ns, "arrived", request.request_id, *([request.tenant] if request.tenant else []))
            case ports.LayoutApplied():
                self.note(now_ns, "layout", event.worker_id, event.result.version, event.result.capacity_blocks)
            case ports.LayoutOffered():
                self.note(now_ns, "offer", event.worker_id, event.offer.version, event.offer.evacuate_from_block)
            case ports.WorkerJoined():
                self.note(now_ns, type(event).__name__, *event[:3], *sorted(event.kept))
            case _:
                self.note(now_ns, type(event).__name__, *event)

    def note_action(self, now_ns: int, action: ports.Action) -> None:
        """Add an action of the core: records, and ends of requests."""
        if isinstance(action, ports.Emit):
            if action.finish_reason is not None:
                self.note(now_ns, "end", action.request_id, str(action.finish_reason))
        elif isinstance(action, ports.Record):
            self.note(now_ns, "record", action.kind, sorted((k, repr(v)) for k, v in action.fields.items()))

    @property
    def hexdigest(self) -> str:
        """The hash so far."""
        return self._sha.hexdigest()

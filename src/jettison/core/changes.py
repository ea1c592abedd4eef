"""Which groups an event has changed, so that the core need not look at all of them.

A cluster core that asks every group after every event costs O(groups) an event. It may ask only those that are named
here, because of one rule:

Rule. Whatever could change what a group does next is noted here when it happens: its queues and flags, what its
      requests may do, and the ledgers of its workers (which it may share with other groups). A group that is not named
      would be planned, followed and advanced as it was the last time: nothing.

What depends on the clock or on prices as well is not a change and is asked for by itself (``core.moving.moves``).

What is different for a single request (where it is, what it does, what moves it) is noted in ``stirred``, for a reader
that looks at requests seldom: a step that gives a request its next token stirs no other.

``touched`` is emptied where steps are planned, group by group; ``recent`` is what the event before this one has
touched, for those who act earlier in an event than what they depend on.
"""

from __future__ import annotations

from collections.abc import Collection

from jettison.core.preemption import Preempted
from jettison.types import GroupId, RequestId, WorkerId

WaitsFor = tuple[Collection[object], ...]
"""What a pass of the core waits for: while all of these are empty, it would do nothing. They are kept by identity, so
their owner changes them in place."""


class Changes:
    """Sets of ids; a group that is no more may be named."""

    __slots__ = (
        "ended", "freer", "harvesting", "ledgers", "merged", "preempted", "queued", "queued_online", "recent",
        "reshaped", "stirred", "touched", "unnoted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.touched: set[GroupId] = set()
        """Groups that may have a step to plan."""
        self.recent: set[GroupId] = set()
        """Groups that the event before this one has touched."""
        self.unnoted: set[GroupId] = set()
        """Groups that were planned, and whose totals have not been looked at since."""
        self.freer: set[GroupId] = set()
        """Groups that may take more than they could before: all touched ones but those that were only given requests.
        Emptied where a group is chosen for a request (``core.driving.dispatching``)."""
        self.merged: set[GroupId] = set()
        """Groups that a merge has just formed. Emptied where queues are balanced (``core.driving.dispatching``)."""
        self.ledgers: set[WorkerId] = set()
        """Workers whose ledger was changed; to be resolved into groups before ``touched`` is read."""
        self.queued: set[GroupId] = set()
        """Groups with waiting requests of some class. Always exact."""
        self.queued_online: set[GroupId] = set()
        """Those with online ones. Always exact."""
        self.harvesting: set[GroupId] = set()
        """Groups that run offline requests or keep stored ones, or have done so: who looks at it takes those out that
        do so no more."""

        self.preempted: list[Preempted] = []
        """What has been preempted since an event's records were told last."""
        self.reshaped = 0
        """Times that groups were formed, dissolved, paused or told to go on, or that their memory changed: in between,
        the same groups serve with the same blocks."""
        self.stirred: set[RequestId] | None = None
        """Requests that have changed queues, that are ending, or that something has begun or ended to move. The reader
        empties it; None: there is no reader."""
        self.ended: set[RequestId] = set()
        """Of those, requests that are no more."""

    def stir(self, request_id: RequestId) -> None:
        """Something is different for a request."""
        if self.stirred is not None:
            self.stirred.add(request_id)

    def end(self, request_id: RequestId) -> None:
        """A request is no more."""
        if self.stirred is not None:
            self.stirred.add(request_id)
            self.ended.add(request_id)

    def touch(self, group_id: GroupId) -> None:
        """Something is different for a group: what it may do next has to be asked again."""
        self.touched.add(group_id)
        self.freer.add(group_id)

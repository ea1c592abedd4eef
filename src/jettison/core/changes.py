"""Which groups an event has changed, so that the core need not look at all of them.

A cluster core that asks every group after every event costs O(groups) an event. It may ask only the groups that are
named here, because of one rule:

Rule. Whatever could change what a group does next is noted here when it happens: its queues and flags, what its
      requests may do, and the ledgers of its workers (which it may share with other groups). A group that is not named
      would be planned, followed and advanced as it was the last time: nothing.

A decision that depends on the clock or on prices as well is no change; its owner asks for it (``core.moving.moves``).

A change of a single request (where it is, what it does, what moves it) is noted in ``stirred``, for a reader that looks
at requests seldom: a step that gives a request its next token stirs no other.

``touched`` is emptied where steps are planned, group by group; ``recent`` names the groups that the event before this
one has touched, for passes that run earlier in an event than the changes that they depend on.
"""

from __future__ import annotations

from collections.abc import Collection

from jettison.core.discards import Discarded
from jettison.core.preemption import Preempted
from jettison.types import GroupId, RequestId, WorkerId

WaitsFor = tuple[Collection[object], ...]
"""Collections that a pass of the core waits for: while all of them are empty, the pass would do nothing. They are kept
by identity, so their owner changes them in place."""


class Changes:
    """Sets of ids; they may name groups that no longer exist."""

    __slots__ = (
        "came", "discarded", "ended", "freer", "harvesting", "ledgers", "merged", "preempted", "queued",
        "queued_online", "recent", "reshaped", "stirred", "touched", "unnoted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.touched: set[GroupId] = set()
        """Groups that may have a step to plan."""
        self.recent: set[GroupId] = set()
        """Groups that the event before this one has touched."""
        self.unnoted: set[GroupId] = set()
        """Groups that were planned, with totals that have not been looked at since."""
        self.freer: set[GroupId] = set()
        """Groups that may take more than they could before: all touched ones except groups that were only given
        requests. Emptied where a group is chosen for a request (``core.driving.dispatching``)."""
        self.merged: set[GroupId] = set()
        """Groups that a merge has just formed. Emptied where queues are balanced (``core.driving.dispatching``)."""
        self.ledgers: set[WorkerId] = set()
        """Workers whose ledger was changed; to be resolved into groups before ``touched`` is read."""
        self.queued: set[GroupId] = set()
        """Groups with waiting requests of some class. Always exact."""
        self.queued_online: set[GroupId] = set()
        """Groups with waiting online requests. Always exact."""
        self.came: list[RequestId] = []
        """Online requests that have come to a group's queue from outside or from another group since steps were planned
        last. Emptied where steps make way for them (``core.driving.safepoints``)."""
        self.harvesting: set[GroupId] = set()
        """Groups that run offline requests or keep stored ones, or have done so: a reader takes out the groups that no
        longer do."""

        self.preempted: list[Preempted] = []
        """What has been preempted since an event's records were told last."""
        self.discarded: list[Discarded] = []
        """Slices that have been given up since an event's records were told last."""
        self.reshaped = 0
        """Times that groups were formed, dissolved, paused or told to go on, or that their memory changed: in between,
        the same groups serve with the same blocks."""
        self.stirred: set[RequestId] | None = None
        """Requests that have changed queues, that are ending, or that a move has begun or ended to carry. The reader
        empties it; None: there is no reader."""
        self.ended: set[RequestId] = set()
        """Requests of ``stirred`` that have ended."""

    def stir(self, request_id: RequestId) -> None:
        """A request has changed."""
        if self.stirred is not None:
            self.stirred.add(request_id)

    def end(self, request_id: RequestId) -> None:
        """A request has ended, and is forgotten."""
        if self.stirred is not None:
            self.stirred.add(request_id)
            self.ended.add(request_id)

    def touch(self, group_id: GroupId) -> None:
        """A group has changed: its next step has to be planned again."""
        self.touched.add(group_id)
        self.freer.add(group_id)

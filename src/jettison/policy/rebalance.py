"""Which waiting requests should wait in another group's queue (KunServe v1 section 4.3, online dispatcher).

Pure. After a drop memory no longer keeps requests out, but a group can only run so many at once: the batch limit, which
compute sets. Requests beyond it go back to the dispatcher, and on to groups that have both a place in their batch and
room. Where there is no such group they stay, and their group may run them beyond its limit. Requests that memory keeps
out of one group while another has room go there, too, before a drop is considered: the dispatcher chose by what was
known then, and long answers may have gathered in the group since. A waiting request holds no KV, so moving it costs
nothing.

Offline requests are rebalanced by themselves, after online ones. A group where none of them waits is given up to half
of those that wait elsewhere, even where they could begin there in time: no group should idle beside a batch.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jettison.types import GroupId, RequestId


class QueuedRequest(NamedTuple):
    """A waiting request."""

    request_id: RequestId
    num_blocks: int
    """Blocks that admission takes in any group."""


@dataclass(frozen=True, slots=True)
class GroupQueue:
    """One group as the rebalancing sees it."""

    group_id: GroupId
    batch_limit: int
    """Requests that it can usefully run at once (profiled, or the scheduler's bound)."""
    num_running: int
    """Running requests, and requests on their way to the group."""
    num_free_blocks: int
    """Free blocks above the watermark, less those reserved for KV on its way here; negative when more is promised than
    free."""
    waiting: Sequence[QueuedRequest]
    """In order of service."""
    takes_new: bool = True
    sends_blocked: bool = False
    """Requests that memory keeps out may go, not only those that the batch has no place for."""
    most_kept: int | None = None
    """Most waiting requests that it keeps, whatever places and room it has; None: no such bound."""

    @property
    def num_spare_places(self) -> int:
        """Places in the batch that neither a running nor a waiting request will take."""
        return max(0, self.batch_limit - self.num_running - len(self.waiting))

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that its own queue leaves."""
        return self.num_free_blocks - sum(r.num_blocks for r in self.waiting)

    def overflow(self) -> Sequence[QueuedRequest]:
        """Waiting requests that its batch has no place for, or its memory no room, in order of service."""
        num_served = max(0, self.batch_limit - self.num_running)
        if self.most_kept is not None:
            num_served = min(num_served, self.most_kept)
        if self.sends_blocked:
            needs = itertools.accumulate(request.num_blocks for request in self.waiting)
            num_served = min(num_served, sum(1 for _ in itertools.takewhile(self.num_free_blocks.__ge__, needs)))
        return self.waiting[num_served:]


class Reassignment(NamedTuple):
    """A waiting request that changes its queue."""

    request_id: RequestId
    source: GroupId
    destination: GroupId


def plan_rebalance(groups: Sequence[GroupQueue]) -> tuple[Reassignment, ...]:
    """Send overflowing requests to groups that can run them at once, oldest first, each to the group with most memory
    left.

    Every destination keeps a place and the blocks for each request that it is given, so none is sent that would wait
    again.
    """
    places = {g.group_id: g.num_spare_places for g in groups if g.takes_new and g.num_spare_places > 0}
    roomiest = [(-g.num_spare_blocks, g.group_id) for g in groups if g.group_id in places]
    heapq.heapify(roomiest)
    # The queues are merged by position: the first of each overflow before the second of any. A group that overflows has
    # no spare place or no spare blocks, so no request is sent to where it is.
    overflowing = [
        (position, g.group_id, request) for g in groups for position, request in enumerate(g.overflow())
    ]
    plan: list[Reassignment] = []
    for _, source, request in sorted(overflowing, key=lambda entry: entry[:2]):
        if not roomiest:
            break
        negative_blocks, destination = roomiest[0]
        if -negative_blocks < request.num_blocks:
            continue
        places[destination] -= 1
        if places[destination]:
            heapq.heapreplace(roomiest, (negative_blocks + request.num_blocks, destination))
        else:
            heapq.heappop(roomiest)
        plan.append(Reassignment(request.request_id, source, destination))
    return tuple(plan)

"""After a split: running requests leave the pipeline one by one for the groups that its members have become.

The pipeline and the new groups serve on the same workers meanwhile. ``core.moving.relocate`` moves one request; this
module chooses each request's home and turn, and handles a lost transfer.
"""

from __future__ import annotations

from jettison.core.moving.passage import Passage, Trip
from jettison.core.moving.relocate import Relocation
from jettison.core.pending import Owner, TransferPurpose
from jettison.core.ports import Action
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.types import GroupId, RequestId

MAX_RETURNING = 4
"""Most requests with KV on its way at the same time: short stops for few rather than long ones for all."""


class Returning:
    """The requests of ``pipeline`` on their way to ``homes``, the groups that its members have become."""

    def __init__(self, cluster: ClusterState, owner: Owner, pipeline: Group, homes: list[Group]) -> None:
        self._cluster = cluster
        self._owner = owner
        self._pipeline = pipeline
        self.homes = homes
        self.num_returned_bytes = 0
        self.on_their_way: dict[RequestId, Relocation] = {}
        """Requests that are returning now."""
        self._is_called_off = False

    @property
    def is_idle(self) -> bool:
        """Whether no transfer of a returning request is under way."""
        return all(p.purpose is not TransferPurpose.RETURN for p in self._cluster.book.transfers_of(self._owner))

    @property
    def is_over(self) -> bool:
        """Whether the pipeline is empty: it has no request and no step in flight."""
        return not (self._pipeline.in_flight or self._pipeline.queues.all_requests())

    # --- events -----------------------------------------------------------------------------------------------

    def cancel(self, state: RequestState) -> list[Action]:
        """Stop the transfers of a request that is ending; return the actions, none where it is not on its way."""
        relocation = self.on_their_way.pop(state.request_id, None)
        return [] if relocation is None else relocation.cancel()

    def call_off(self) -> list[Action]:
        """Stop the returns that can be stopped; return the actions. A request with its last blocks already on their way
        goes home."""
        self._is_called_off = True
        relocations = [r for r in self.on_their_way.values() if not r.is_landing]
        return [action for relocation in relocations for action in relocation.cancel()]

    # --- on the way -------------------------------------------------------------------------------------------

    def advance(self, now_ns: int) -> list[Action]:
        """Send all waiting and stored requests home, and advance the running ones in turn; return the actions."""
        for lost in [r for r in self.on_their_way.values() if r.lost_transfer]:
            self._leaves(lost)
        for state in [*self._pipeline.queues.waiting, *self._pipeline.queues.waiting_offline]:
            # Preempted in the pipeline, or never begun there: it starts (again) in a new group.
            self._pipeline.queues.take_out(state)
            self.on_their_way.pop(state.request_id, None)
            home = min(self.homes, key=lambda g: (g.blocks.num_used + g.queues.queued_blocks(), g.group_id))
            home.queues.enqueue(state)
        for state in list(self._pipeline.queues.stored.values()):
            # Its KV is in host pools: it goes along as it is.
            self._pipeline.queues.take_out(state)
            self._home_of_stored(state).queues.keep_stored(state)
            self._cluster.counters.hosted_carried += 1
        actions: list[Action] = []
        for state in list(self._pipeline.queues.running.values()):
            if state.ending is not None or state.transfers or state.recompute:
                continue
            relocation = self.on_their_way.get(state.request_id)
            if relocation is None:
                if len(self.on_their_way) >= MAX_RETURNING:
                    break
                relocation = self._begin(state, now_ns)
            actions += relocation.advance(now_ns)
        return actions

    def _begin(self, state: RequestState, now_ns: int) -> Relocation:
        """Begin to move a running request home; return its relocation."""
        trip = Trip(state, self._pipeline, self._home(state), now_ns, self._over)
        relocation = Relocation(self._cluster, trip, TransferPurpose.RETURN, owner=self._owner)
        self.on_their_way[state.request_id] = relocation
        return relocation

    def _over(self, relocation: Passage) -> list[Action]:
        """Count what a return has sent, and make its place free for another request. Returns no actions."""
        self.num_returned_bytes += relocation.num_bytes
        self._cluster.counters.returned_bytes += relocation.num_bytes
        if self.on_their_way.get(relocation.state.request_id) is relocation:
            self._leaves(relocation)
        return []

    def _leaves(self, relocation: Passage) -> None:
        """Make the place of a return that has ended free for another request. A request with a lost transfer is
        computed again: another try may fare no better, perhaps ever."""
        state = relocation.state
        del self.on_their_way[state.request_id]
        if relocation.lost_transfer and not self._is_called_off and state.ending is None:
            self._cluster.distrust(state)

    def _home(self, state: RequestState) -> Group:
        """The home with more room for a running request, with requests already on their way counted."""
        assigned = {g.group_id: g.blocks.num_used_by(g.queues.running) for g in self.homes}
        for request_id, relocation in self.on_their_way.items():
            home = relocation.destination
            assigned[home.group_id] += home.blocks.ledgers[0].num_blocks_of(request_id)
        return min(self.homes, key=lambda g: (assigned[g.group_id], g.group_id))

    def _home_of_stored(self, state: RequestState) -> Group:
        """The emptiest home that can hold a stored request. One that none can hold waits in the emptiest for the next
        pipeline (``HostBook.oversized``)."""

        def rank(home: Group) -> tuple[bool, int, GroupId]:
            owed = sum(home.limits.blocks_for(other.num_tokens) for other in home.queues.stored.values())
            load = home.blocks.num_used + home.queues.queued_blocks() + owed
            return home.blocks.is_oversized(state), load, home.group_id

        return min(self.homes, key=rank)

"""One running request on its way to another group, however it travels: which group owns it, which runs it, and how the
move ends.

    COPY           its KV comes to the destination, too, while the source goes on decoding it
    FINAL          little is left: the request stands still, finishes its step in flight, and the rest follows
    DONE           the destination owns the request
    FALLING_BACK   it stays at its source; transfers under way are being called off
    FAILED         nothing is under way any more: the request has never left its source

Ownership: the source owns the request, and has all of its KV, in every phase before DONE; the destination's blocks are
reserved before anything is written to them. How it travels: ``core.moving.relocate`` (as KV), ``core.moving.astokens``.
The caller decides which request goes where and when, and what follows from a failure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum
from typing import ClassVar, NamedTuple

from jettison.core.ports import Action
from jettison.core.requests import Phase, RequestState
from jettison.core.residence import Residence, changed
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.memory.kvtransfers import MigrationKind
from jettison.types import TransferId, WorkerId


class RelocationPhase(StrEnum):
    """The phases of one request on its way to another group; the module describes them."""

    COPY = "copy"
    FINAL = "final"
    DONE = "done"
    FALLING_BACK = "falling_back"
    FAILED = "failed"


class Trip(NamedTuple):
    """Which request goes from where to where, since when, and what is called at the end."""

    state: RequestState
    source: Group
    destination: Group
    now_ns: int
    """When it begins."""
    on_over: Callable[[Passage], list[Action]]
    """Called once, at the end."""


class Passage(ABC):
    """One running request on its way from ``source`` to ``destination``; each ``advance`` goes as far as the state
    allows. Subclasses send KV or have tokens computed."""

    kind: ClassVar[MigrationKind]

    def __init__(
        self, cluster: ClusterState, trip: Trip, *, max_rounds: int | None, num_cached_blocks: int
    ) -> None:
        """The request must be running, all of its KV in place.

        ``max_rounds``: rounds with decoding before it is given up, as the request grows as fast as the destination
        catches up. ``num_cached_blocks``: leading blocks that the destination had in its prefix cache, and has
        reserved.
        """
        state, source, destination, now_ns, self._on_over = trip
        assert state.phase is Phase.RUNNING and state.group_id == source.group_id, state
        self._cluster = cluster
        self._max_rounds = max_rounds
        self.state = state
        self.source = source
        self.destination = destination
        self.num_cached_blocks = num_cached_blocks
        self.phase = RelocationPhase.COPY
        self.failure: str | None = None
        self.lost_transfer = False
        """A transfer or step under way was lost without being called off: another try at once may fare no better."""
        self.num_rounds = 0
        self.num_bytes = 0
        """Bytes of KV sent."""
        self.num_tokens = 0
        """Tokens computed at the destination."""
        self.num_computed_blocks = 0
        """Leading blocks computed at the destination before the rest was sent as KV."""
        self.num_sent_blocks = num_cached_blocks
        """Leading blocks that are there, or on their way."""
        self.started_ns = now_ns
        self.stopped_ns: int | None = None
        """Since when the request stands still."""
        self.ended_ns: int | None = None
        """When the destination had all of its KV."""
        self._there: Residence | None = None
        self._resides_there(destination.residence.at(num_cached_blocks * cluster.limits.block_size))

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """The workers of both groups, those of the source first."""
        return (*self.source.worker_ids, *self.destination.worker_ids)

    @property
    def is_over(self) -> bool:
        """Whether the move has ended: the destination owns the request, or it has failed."""
        return self.phase in (RelocationPhase.DONE, RelocationPhase.FAILED)

    @property
    def _has_left(self) -> bool:
        """Whether the request is ending, or no longer runs at its source."""
        state = self.state
        return state.ending is not None or state.phase is not Phase.RUNNING or state.group_id != self.source.group_id

    # --- progress ---------------------------------------------------------------------------------------------

    @abstractmethod
    def advance(self, now_ns: int) -> list[Action]:
        """Go as far as the state allows; return the actions."""

    def go_on(self, now_ns: int) -> list[Action]:
        """Go on after a transfer of this move has ended; return the actions."""
        return self.advance(now_ns)

    @abstractmethod
    def _fall_back(self, reason: str) -> list[Action]:
        """Leave the request at its source for this reason, and return the actions that call off transfers under way."""

    def cancel(self) -> list[Action]:
        """Leave the request at its source, as it is ending or the move is no longer wanted; return the actions, none if
        the move is over or falls back already."""
        if self.is_over or self.phase is RelocationPhase.FALLING_BACK:
            return []
        return self._fall_back("cancelled")

    def let_go(self) -> None:
        """Leave the request at its source, at once. The caller takes care of transfers under way, and of the blocks
        that they write to."""
        self.phase = RelocationPhase.FAILED
        self.failure = "it gave way to a change of layouts"
        self._resides_there(None)
        self._let_run()

    def lose_source(self) -> set[TransferId]:
        """Give the request up to its dead source, where it starts again from its tokens. Returns its transfers, which
        now have no owner."""
        return self.state.transfers

    # --- common to both kinds ---------------------------------------------------------------------------------

    def _stand_still(self, now_ns: int) -> None:
        """Have the request stand still from now on, for the last round."""
        self.phase = RelocationPhase.FINAL
        self.stopped_ns = now_ns
        self.state.pause()
        self._cluster.touch(self.state)

    def _hand_over(self, now_ns: int) -> list[Action]:
        """Make the destination the owner of the request, and give its blocks at the source back; return what
        ``on_over`` does. Its full blocks can be found in the prefix cache at the destination."""
        state = self.state
        self.phase, self.ended_ns = RelocationPhase.DONE, now_ns
        self.source.queues.take_out(state)
        for worker_id, ledger in zip(self.source.worker_ids, self.source.blocks.ledgers, strict=True):
            if worker_id not in self.destination.worker_ids:
                ledger.release(state.request_id)
        state.resume()
        state.num_sealed = 0
        self.destination.queues.resume(state)
        self.destination.blocks.seal(state)
        return self._on_over(self)

    def _resides_there(self, there: Residence | None) -> None:
        """Note how much of the request's KV is at the destination now; None: nothing counts."""
        self.state.residences = changed(self.state.residences, self._there, there)
        self._there = there

    def _let_run(self) -> None:
        """Let the request go on at its source, unless it has left it."""
        if self.state.phase is Phase.RUNNING:
            self.state.resume()
            self._cluster.touch(self.state)

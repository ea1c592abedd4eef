"""Changing the layout of one worker (a relayout): offer, evacuate, apply, then update the ledger.

    offer --LayoutOffered--> (plan compaction) --apply--> LayoutApplied -> DONE
      |                            |                        |
      '------- CallFailed ---------'--- cannot evacuate ----'--CallFailed--> FAILED (worker and ledger as before)

A change that only gives pages of other layers' KV to the arenas (``gives_back``) disturbs no block, whatever the offer
would say: where the version of the worker's page map is known it is applied without one, as each call waits for the end
of a step.

The ledger changes only after the worker has applied the layout: a refused or rolled-back layout leaves both as they
were.
"""

from __future__ import annotations

from enum import StrEnum

from jettison.core.pending import CallAnswer, Owner, PendingCall
from jettison.core.ports import Action, ApplyLayout, CallFailed, LayoutApplied, LayoutOffered, OfferLayout
from jettison.core.state import ClusterState, WorkerState
from jettison.memory.layout import LayoutResult, LayoutSpec
from jettison.types import NANOSECONDS

RETRY_NS = NANOSECONDS // 10
"""Pause between attempts that have to succeed in the end: mapping back, giving pages back, dropping again, fetching."""


class RelayoutPhase(StrEnum):
    """The phases of one layout change."""

    OFFER = "offer"
    APPLY = "apply"
    DONE = "done"
    FAILED = "failed"


class Relayout:
    """One worker's change of layout to ``spec``.

    ``shrinks``: blocks may have to move. Then no group may plan steps on this worker meanwhile, and the ledger is
    locked (ended requests are reaped afterwards).
    """

    def __init__(
        self, cluster: ClusterState, owner: Owner, worker: WorkerState, spec: LayoutSpec, *, shrinks: bool,
        gives_back: bool = False,
    ) -> None:
        self._cluster = cluster
        self._owner = owner
        self.worker = worker
        self.spec = spec
        self.phase = RelayoutPhase.OFFER
        self.result: LayoutResult | None = None
        self.failure: str | None = None
        self._shrinks = shrinks
        self._gives_back = gives_back
        self._called_off = False
        self._copies: tuple[tuple[int, int], ...] = ()
        self._evacuate_from = 0
        # Growth must not disturb any block; a shrink keeps as many as are held.
        self._live_blocks = worker.ledger.num_held if shrinks else worker.ledger.capacity
        worker.num_relayouts_open += 1
        worker.ledger_locked = worker.ledger_locked or shrinks

    @property
    def is_over(self) -> bool:
        """Whether the change is done or has failed."""
        return self.phase in (RelayoutPhase.DONE, RelayoutPhase.FAILED)

    def start(self) -> list[Action]:
        """Ask the worker for an offer, or to give pages back at once; return the call."""
        book = self._cluster.book
        version = self.worker.layout_version
        if self._gives_back and version is not None:
            self._evacuate_from = self._live_blocks
            return [self._open_apply(version, self._owner)]
        call = OfferLayout(self.worker.worker_id, book.next_call_id, self.spec, self._live_blocks)
        return [book.open_call(call, self._owner, self)]

    def call_off(self) -> None:
        """Do not apply a layout that has only been offered. An answer still comes, and ends this change."""
        self._called_off = True

    def on_answer(self, pending: PendingCall, event: CallAnswer, now_ns: int) -> list[Action]:
        """Take the worker's answer to the offer, or to the change itself. Returns the call that applies an accepted
        offer, else nothing. A failure ends the change; cached blocks are forgotten if some may have been
        overwritten."""
        if isinstance(event, CallFailed):
            if self._copies:
                # Blocks may have been copied before the mapping failed, over cached blocks: their content is lost.
                self.worker.ledger.forget_cached()
            self.worker.layout_version = None
            self._close(RelayoutPhase.FAILED, event.message)
            return []
        if isinstance(event, LayoutOffered) and self._called_off:
            self._close(RelayoutPhase.FAILED, "called off")
            return []
        if isinstance(event, LayoutOffered):
            return self._apply(event, pending.owner)
        assert isinstance(event, LayoutApplied), event
        return self._applied(event)

    def _apply(self, event: LayoutOffered, owner: Owner) -> list[Action]:
        """Ask the worker to apply its offer; return the call. The change fails, with no call, where blocks would have
        to move and cannot."""
        ledger = self.worker.ledger
        self._evacuate_from = min(event.offer.evacuate_from_block, event.offer.capacity_blocks)
        if self._evacuate_from < ledger.capacity:
            copies = ledger.plan_compaction(self._evacuate_from) if self._shrinks else None
            if copies is None:
                self._close(RelayoutPhase.FAILED, "live blocks do not fit below the new line")
                return []
            if copies and self._cluster.book.lands_at((self.worker.worker_id,)):
                self._close(RelayoutPhase.FAILED, "KV is on its way into blocks that would have to move")
                return []
            if copies and self.spec.retained:
                self._close(RelayoutPhase.FAILED, "blocks whose foreign KV is kept cannot move")
                return []
            self._copies = tuple(copies)
        return [self._open_apply(event.offer.version, owner)]

    def _open_apply(self, version: int, owner: Owner) -> Action:
        """The call that applies the layout to this version of the worker's page map."""
        self.phase = RelayoutPhase.APPLY
        book = self._cluster.book
        call = ApplyLayout(
            self.worker.worker_id, book.next_call_id, self.spec, self._live_blocks, version, self._copies,
            self._gives_back,
        )
        return book.open_call(call, owner, self)

    def _applied(self, event: LayoutApplied) -> list[Action]:
        """Update the ledger, the layout and the missing shards after the worker has applied its layout. Returns no
        actions."""
        ledger = self.worker.ledger
        if self._evacuate_from < ledger.capacity:
            ledger.apply_compaction(self._copies, self._evacuate_from)
        ledger.resize(event.result.capacity_blocks)
        self._cluster.changes.reshaped += 1
        self.worker.layout, self.worker.layout_version = self.spec, event.result.version
        self.worker.unfilled &= self.spec.shards
        self.worker.unfilled |= event.result.missing_shards
        self.result = event.result
        self._close(RelayoutPhase.DONE, None)
        return []

    def _close(self, phase: RelayoutPhase, failure: str | None) -> None:
        """End the change, and unlock the ledger."""
        self.phase = phase
        self.failure = failure
        self.worker.num_relayouts_open -= 1
        if self._shrinks:
            self.worker.unlock()

"""Free: offline requests that are checkpointed give their blocks to online requests at once (ConServe 4.4).

A step's own planning evicts requests for what it admits (``policy.filling``). This rung acts on pressure before that:
for the head of the online queue, and for freed online requests that are to come back. No byte is copied. Those go first
whose copies lack the fewest blocks, as a victim computes again what its copy lacks: a request in the midst of its
prompt, which is often the newest, lacks what its last steps have computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jettison.core.ladder.rung import Moment, Offer, Rung, register
from jettison.core.moving.hostedkv import HostedPhase
from jettison.core.ports import Action
from jettison.core.preemption import Preemption
from jettison.core.requests import RequestState
from jettison.core.residence import hosted_only
from jettison.core.serving.group import Group
from jettison.types import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeOffer(Offer):
    """Offline requests of one group that give their blocks up: running ones with a checkpoint, and ones on their way
    back."""

    victims: tuple[RequestId, ...]
    turned: tuple[RequestId, ...] = ()
    """Offline requests that were on their way back, and stay at the host."""


@register
class FreeRung(Rung):
    """Frees running offline requests that have a checkpoint, as few as suffice, for online requests that lack room."""

    name = "free"
    rank = 30
    moments = frozenset({Moment.BEFORE_STEPS})
    is_word = False

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer]:
        """Yield one offer for each changed group whose next online request lacks room: the offline requests that give
        it their blocks. Nothing for a group without such requests, without a free place, or with a worker in a move."""
        state = self.means.state
        if not state.changes.harvesting:
            return
        busy = self.means.moves.moving_workers()
        for group in state.changed_groups():
            is_full = len(group.queues.running) >= group.max_running
            has_offline = group.queues.num_running_offline or group.queues.moving
            if is_full or not has_offline or not busy.isdisjoint(group.worker_ids):
                continue
            missing = self._missing(group)
            turned = self._turned(group) if missing > 0 else ()
            victims = self._victims(group, missing)
            if victims or turned:
                why = "an online request lacks room"
                yield FreeOffer(groups=(group.group_id,), why=why, victims=victims, turned=turned)

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Preempt the running requests of an offer, and break off those on their way back. Returns no actions: nothing
        is sent."""
        assert isinstance(offer, FreeOffer), offer
        group = self.means.state.groups[offer.groups[0]]
        for request_id in offer.victims:
            group.preempt(group.queues.running[request_id], Preemption.ONLINE_HEAD)
        for request_id in offer.turned:
            entry = self.means.hosted.store.entry(self.means.state.requests[request_id])
            assert entry is not None, request_id
            self.means.hosted.store.break_off(entry)
        return []

    def _turned(self, group: Group) -> tuple[RequestId, ...]:
        """Offline requests of a group on their way back from a host pool: once broken off, their blocks are free when
        no piece is on its way."""
        coming = self.means.hosted.store.of(group, HostedPhase.IN)
        return tuple(e.state.request_id for e in coming if e.state.is_offline)

    def _missing(self, group: Group) -> int:
        """Blocks of a group that its next online request needs beyond the free ones and above the watermark; 0 or less:
        none."""
        blocks, head = group.blocks, group.queues.waiting.head
        wanted = 0 if head is None or blocks.is_oversized(head) else blocks.cached_prefix(head)[1]
        for entry in self.means.hosted.store.of(group, HostedPhase.STORED):
            if not entry.state.is_offline:
                wanted = max(wanted, self.means.hosted.store.blocks_to_return(entry) + 1)
        return wanted and wanted + blocks.watermark - blocks.num_allocatable

    def _victims(self, group: Group, missing: int) -> tuple[RequestId, ...]:
        """Running offline requests that have a checkpoint and give at least ``missing`` blocks, or all of them: those
        whose copies lack the fewest blocks first, of these the newest. Empty where none is missing."""
        victims: list[RequestId] = []
        if missing <= 0:
            return ()
        found = [s for s in group.queues.running_offline() if is_preemptible(s) and is_checkpointed(s)]
        for state in sorted(found, key=self.means.checkpoints.num_lacking_blocks):
            if missing <= 0:
                break
            victims.append(state.request_id)
            missing -= min(ledger.num_exclusive_blocks(state.request_id) for ledger in group.blocks.ledgers)
        return tuple(victims)


def is_preemptible(state: RequestState) -> bool:
    """Whether a running request could give its blocks up now: it is in no step, neither ends nor starts again, and no
    copy of its KV is under way."""
    return state.num_pending == 0 and state.is_settled


def is_checkpointed(state: RequestState) -> bool:
    """Whether host pools have a copy of some of the request's KV."""
    return any(residence.num_tokens for residence in hosted_only(state.residences))

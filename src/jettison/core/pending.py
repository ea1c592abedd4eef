"""The book: every call and every transfer under way, with its owner, its ends, its purpose and its bytes.

An answer goes to its owner by one look-up. Calls and transfers that a dead worker leaves under way are handed over to
the recovery that waits for their end (``core.moving.recovering``). The bytes queued on a link, and at a port that links
share, are sums over the book: prices and budgets come from there.

    opened by its owner --answer--> closed; the waiter takes the answer, then the owner goes on
            '--the owner is abandoned--> handed over to another owner, which waits for the same answer

A call is answered by the worker that it was sent to, a transfer by its destination (``WorkerFenced`` ends the transfers
that a dead worker was sending, and the death of a destination ends the transfers to it; where the link fails between
two that live, so does the second one's ``LinkLost``). Ids come from counters in here, so equal runs give equal ids. An
answer to a call or transfer that is not in the book belongs to the past, and is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

from jettison.core.ports import (
    Action,
    ApplyLayout,
    CallFailed,
    FenceWorker,
    KeepShard,
    LayoutApplied,
    LayoutOffered,
    LoadShard,
    OfferLayout,
    SendKV,
    SendShard,
    ShardLoaded,
    Transfer,
    TransferEnded,
    WorkerFenced,
)
from jettison.core.requests import RequestState
from jettison.policy.links import PortId, PortKind, PortMap
from jettison.types import ShardId, TransferId, WorkerId

Call = OfferLayout | ApplyLayout | LoadShard | KeepShard | FenceWorker
CallAnswer = LayoutOffered | LayoutApplied | ShardLoaded | WorkerFenced | CallFailed
Answer = CallAnswer | TransferEnded


class TransferPurpose(StrEnum):
    """What a transfer is for."""

    EXCHANGE = "exchange"
    RETURN = "return"
    MIGRATION = "migration"
    HOST = "host"
    """KV to a host pool, or back."""
    PARAMETERS = "parameters"


KV_PURPOSES = (TransferPurpose.EXCHANGE, TransferPurpose.RETURN, TransferPurpose.MIGRATION, TransferPurpose.HOST)
"""Purposes that go before parameters on a link."""


APART = PortMap()
"""Each worker has ports of its own."""


class Owner(Protocol):
    """The owner of calls and transfers: one move of memory, with phases of its own."""

    def go_on(self, now_ns: int) -> list[Action]:
        """Go as far as the state allows; called after each answer."""
        ...


class CallWaiter(Protocol):
    """The part of an owner that an answer to a call is for."""

    def on_answer(self, pending: PendingCall, event: CallAnswer, now_ns: int) -> list[Action]:
        """Take the one answer."""
        ...


class TransferWaiter(Protocol):
    """The part of an owner that the end of a transfer is for."""

    def on_ended(self, pending: PendingTransfer, event: TransferEnded, now_ns: int) -> list[Action]:
        """Take the one end."""
        ...


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that has not been answered."""

    call: Call
    owner: Owner
    waiter: CallWaiter


@dataclass(slots=True, eq=False)
class PendingTransfer:
    """A transfer that has not ended."""

    transfer: Transfer
    owner: Owner
    waiter: TransferWaiter
    purpose: TransferPurpose
    num_bytes: int
    request: RequestState | None
    """The request that the KV belongs to: its blocks stay reserved at both ends until the transfer has ended."""
    ports: tuple[PortId, ...] = ()
    """Ports that it goes through."""

    @property
    def ends(self) -> tuple[WorkerId, WorkerId]:
        """Source and destination."""
        return self.transfer.src, self.transfer.dst


class LinkEnds(NamedTuple):
    """One direction between two workers; a host pool is at its worker."""

    src: WorkerId
    dst: WorkerId


class Book:
    """All calls and transfers under way in one cluster."""

    def __init__(
        self, kv_block_bytes: int, shard_bytes: Mapping[ShardId, int],
        ports_of: Callable[[WorkerId, WorkerId], tuple[PortId, ...]] = APART.of,
    ) -> None:
        """``kv_block_bytes``: bytes of one block in one layer. ``ports_of``: the ports that a link goes through."""
        self.calls: dict[int, PendingCall] = {}
        self.transfers: dict[TransferId, PendingTransfer] = {}
        self.next_call_id = 1
        """Id of the call that is opened next."""
        self.next_transfer_id: TransferId = 1
        """Id of the transfer that is opened next."""
        self._kv_block_bytes = kv_block_bytes
        self._shard_bytes = shard_bytes
        self._link_bytes: dict[LinkEnds, Counter[TransferPurpose]] = {}
        """Bytes under way by link and purpose; only those above 0."""
        self._ports_of = ports_of
        self._port_bytes: dict[PortId, Counter[TransferPurpose]] = {}
        """The same by port."""
        self.told: set[Owner] = set()
        """Owners that have had an answer since ``take_told`` was called last."""

    # --- reading ----------------------------------------------------------------------------------------------

    def bytes_between(self, src: WorkerId, dst: WorkerId, *purposes: TransferPurpose) -> int:
        """Bytes of transfers under way in one direction of a link, for these purposes (none named: for all)."""
        by_purpose = self._link_bytes.get(LinkEnds(src, dst))
        if by_purpose is None:
            return 0
        return sum(by_purpose[p] for p in purposes) if purposes else by_purpose.total()

    def bytes_at(self, port: PortId, *purposes: TransferPurpose) -> int:
        """Bytes of all transfers under way through a port, for these purposes (none named: for all)."""
        by_purpose = self._port_bytes.get(port)
        if by_purpose is None:
            return 0
        return sum(by_purpose[p] for p in purposes) if purposes else by_purpose.total()

    def waiting_at(self, port: PortId) -> dict[Hashable, float]:
        """Bytes under way through a port by what waits for them: a request's id, or the purpose where it is not a
        request's KV. O(transfers under way) where there are some."""
        found: dict[Hashable, float] = {}
        for pending in self.transfers.values() if port in self._port_bytes else ():
            if port in pending.ports:
                waiting = pending.purpose if pending.request is None else pending.request.request_id
                found[waiting] = found.get(waiting, 0.0) + pending.num_bytes
        return found

    def bytes_ahead(self, src: WorkerId, dst: WorkerId, *purposes: TransferPurpose) -> int:
        """Bytes that one more transfer over a link goes behind: all bytes on that link or, if more, all bytes through a
        card on its way that workers share."""
        cards = [port for port in self._ports_of(src, dst) if port.kind is PortKind.CARD]
        return max(self.bytes_between(src, dst, *purposes), *(self.bytes_at(port, *purposes) for port in cards), 0)

    def is_shared(self, src: WorkerId, dst: WorkerId, purpose: TransferPurpose) -> bool:
        """Transfers for this purpose are under way through a port of the link."""
        return any(self.bytes_at(port, purpose) for port in self._ports_of(src, dst))

    def calls_of(self, owner: Owner) -> list[PendingCall]:
        """An owner's calls, in the order in which they were opened. O(calls under way)."""
        return [pending for pending in self.calls.values() if pending.owner is owner]

    def transfers_of(self, owner: Owner) -> list[PendingTransfer]:
        """An owner's transfers, in the order in which they were opened. O(transfers under way)."""
        return [pending for pending in self.transfers.values() if pending.owner is owner]

    def lands_at(self, worker_ids: Collection[WorkerId]) -> bool:
        """KV is on its way into the arenas of one of these workers: no block there may be moved. O(transfers)."""
        return any(
            pending.ends[1] in worker_ids and isinstance(pending.transfer, SendKV) and not pending.transfer.to_host
            for pending in self.transfers.values()
        )

    # --- opening ----------------------------------------------------------------------------------------------

    def open_call(self, call: Call, owner: Owner, waiter: CallWaiter) -> Call:
        """Enter a call that was made under ``next_call_id``; returns it, to be sent."""
        assert call.call_id == self.next_call_id, f"{call} was made under another id than {self.next_call_id}"
        self.next_call_id += 1
        self.calls[call.call_id] = PendingCall(call, owner, waiter)
        return call

    def open_transfer(
        self, transfer: Transfer, owner: Owner, waiter: TransferWaiter, purpose: TransferPurpose,
        request: RequestState | None = None,
    ) -> PendingTransfer:
        """Enter a transfer that was made under ``next_transfer_id``: it is to be sent."""
        assert transfer.transfer_id == self.next_transfer_id, f"{transfer} is not number {self.next_transfer_id}"
        self.next_transfer_id += 1
        ports = self._ports_of(transfer.src, transfer.dst)
        pending = PendingTransfer(transfer, owner, waiter, purpose, self._num_bytes(transfer), request, ports)
        self.transfers[transfer.transfer_id] = pending
        self._count(pending, pending.num_bytes)
        if request is not None:
            request.note_transfer(transfer.transfer_id)
        return pending

    def _count(self, pending: PendingTransfer, num_bytes: int) -> None:
        """Count ``num_bytes`` more of it on its link and at its ports; below 0: fewer."""
        _add(self._link_bytes, LinkEnds(*pending.ends), pending.purpose, num_bytes)
        for port in pending.ports:
            _add(self._port_bytes, port, pending.purpose, num_bytes)

    def _num_bytes(self, transfer: Transfer) -> int:
        if isinstance(transfer, SendShard):
            return self._shard_bytes[transfer.shard]
        return len(transfer.layers) * len(transfer.src_blocks) * self._kv_block_bytes

    # --- closing ----------------------------------------------------------------------------------------------

    def answer(self, event: Answer, now_ns: int) -> list[Action]:
        """Close the call or transfer that has been answered; its waiter takes the answer and its owner goes on."""
        if isinstance(event, TransferEnded):
            transfer = self._close(event.transfer_id)
            if transfer is None:
                return []
            actions = transfer.waiter.on_ended(transfer, event, now_ns)
            return actions + self._go_on(transfer.owner, now_ns)
        call = self.calls.get(event.call_id)
        if call is None or call.call.worker_id != event.worker_id:
            return []
        del self.calls[event.call_id]
        actions = call.waiter.on_answer(call, event, now_ns)
        return actions + self._go_on(call.owner, now_ns)

    def _go_on(self, owner: Owner, now_ns: int) -> list[Action]:
        self.told.add(owner)
        return owner.go_on(now_ns)

    def _close(self, transfer_id: TransferId) -> PendingTransfer | None:
        pending = self.transfers.pop(transfer_id, None)
        if pending is None:
            return None
        self._count(pending, -pending.num_bytes)
        if pending.request is not None:
            pending.request.note_transfer_ended(transfer_id)
        return pending

    def disown(self, pending: PendingTransfer) -> None:
        """Take a transfer from its request: nothing of the request waits for its end any more."""
        if pending.request is not None:
            pending.request.note_transfer_ended(pending.transfer.transfer_id)
            pending.request = None

    def take_told(self) -> set[Owner]:
        """Owners that have had an answer since this was called last."""
        told = set(self.told)
        self.told.clear()
        return told

    # --- deaths -----------------------------------------------------------------------------------------------

    def forget_calls(self, worker_id: WorkerId) -> None:
        """The worker is dead: it answers nothing."""
        self.calls = {i: pending for i, pending in self.calls.items() if pending.call.worker_id != worker_id}

    def end_lost(self, transfer_ids: list[TransferId], now_ns: int) -> list[Action]:
        """End transfers from or to a dead worker, for which no report will come: each ends incomplete, and each owner
        goes on once, after all of its lost transfers have ended."""
        actions: list[Action] = []
        owners: dict[Owner, None] = {}
        for transfer_id in transfer_ids:
            pending = self._close(transfer_id)
            if pending is not None:
                actions += pending.waiter.on_ended(pending, TransferEnded(transfer_id, False, 0, 0), now_ns)
                owners[pending.owner] = None
        for owner in owners:
            actions += self._go_on(owner, now_ns)
        return actions

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError on any broken invariant."""
        sums: dict[LinkEnds, Counter[TransferPurpose]] = {}
        at_ports: dict[PortId, Counter[TransferPurpose]] = {}
        for transfer_id, pending in self.transfers.items():
            assert pending.transfer.transfer_id == transfer_id
            assert pending.request is None or transfer_id in pending.request.transfers, pending
            sums.setdefault(LinkEnds(*pending.ends), Counter())[pending.purpose] += pending.num_bytes
            for port in pending.ports:
                at_ports.setdefault(port, Counter())[pending.purpose] += pending.num_bytes
        assert self._link_bytes == {link: +by_purpose for link, by_purpose in sums.items() if +by_purpose}
        assert self._port_bytes == {port: +by_purpose for port, by_purpose in at_ports.items() if +by_purpose}


_Place = TypeVar("_Place")


def _add(sums: dict[_Place, Counter[TransferPurpose]], place: _Place, purpose: TransferPurpose, num_bytes: int) -> None:
    by_purpose = sums.setdefault(place, Counter())
    by_purpose[purpose] += num_bytes
    if not by_purpose[purpose]:
        del by_purpose[purpose]
    if not by_purpose:
        del sums[place]

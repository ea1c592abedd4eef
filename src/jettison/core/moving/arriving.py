"""Requests with KV on its way: which transfers each of them waits for, and what it may do meanwhile.

Bookkeeping of one exchange: nothing here sends, allocates or decides. A transfer may carry blocks for several requests
(a shared prefix travels once), so the end of a transfer concerns all of its users.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jettison.core.requests import RemotePart, RequestState
from jettison.types import RequestId, TransferId


@dataclass(slots=True)
class Arriving:
    """One request and the transfers that it waits for."""

    state: RequestState
    first: set[TransferId] = field(default_factory=set)
    """Without these it cannot run at all."""
    parts: dict[RemotePart, set[TransferId]] = field(default_factory=dict)
    """Live: parts that it attends to at their old home until these transfers have ended."""

    @property
    def remote(self) -> tuple[RemotePart, ...]:
        """The parts that are still at their old home."""
        return tuple(part for part, transfers in self.parts.items() if transfers)

    @property
    def is_complete(self) -> bool:
        """Nothing is on its way any more."""
        return not self.first and not any(self.parts.values())


class ArrivingSet:
    """All requests of an exchange that wait for transfers."""

    def __init__(self) -> None:
        self.entries: dict[RequestId, Arriving] = {}
        self._users: dict[TransferId, set[RequestId]] = {}

    def __bool__(self) -> bool:
        return bool(self.entries)

    def add(self, entry: Arriving) -> None:
        """A request's transfers have been started."""
        self.entries[entry.state.request_id] = entry
        for transfers in (entry.first, *entry.parts.values()):
            for transfer_id in transfers:
                self._users.setdefault(transfer_id, set()).add(entry.state.request_id)

    def forget(self, request_id: RequestId) -> None:
        """The request no longer waits for transfers, for whatever reason."""
        entry = self.entries.pop(request_id, None)
        if entry is not None:
            for transfers in (entry.first, *entry.parts.values()):
                for transfer_id in transfers:
                    self._users.get(transfer_id, set()).discard(request_id)

    def others_need(self, transfer_id: TransferId, request_id: RequestId) -> bool:
        """Whether some other request waits for this transfer."""
        return bool(self._users.get(transfer_id, set()) - {request_id})

    def ended(self, transfer_id: TransferId) -> list[Arriving]:
        """A transfer is over; returns the requests that waited for it."""
        entries = [self.entries[r] for r in sorted(self._users.pop(transfer_id, set()))]
        for entry in entries:
            entry.first.discard(transfer_id)
            for transfers in entry.parts.values():
                transfers.discard(transfer_id)
        return entries

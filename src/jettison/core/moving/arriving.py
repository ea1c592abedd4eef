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
    """One request of an exchange, and the transfers that it waits for."""

    state: RequestState
    first: set[TransferId] = field(default_factory=set)
    """Without these it cannot run at all."""
    parts: dict[RemotePart, set[TransferId]] = field(default_factory=dict)
    """Live: parts that it attends to at their old home until these transfers have ended."""

    @property
    def remote(self) -> tuple[RemotePart, ...]:
        """The parts of its KV that are still at their old home; empty: none."""
        return tuple(part for part, transfers in self.parts.items() if transfers)

    @property
    def is_complete(self) -> bool:
        """Whether no transfer of the request is on its way any more."""
        return not self.first and not any(self.parts.values())


class ArrivingSet:
    """All requests of an exchange that wait for transfers. True while there is any."""

    def __init__(self) -> None:
        self.entries: dict[RequestId, Arriving] = {}
        self._users: dict[TransferId, set[RequestId]] = {}

    def __bool__(self) -> bool:
        """Whether any request waits for transfers."""
        return bool(self.entries)

    def add(self, entry: Arriving) -> None:
        """Take in a request whose transfers have been started."""
        self.entries[entry.state.request_id] = entry
        for transfers in (entry.first, *entry.parts.values()):
            for transfer_id in transfers:
                self._users.setdefault(transfer_id, set()).add(entry.state.request_id)

    def forget(self, request_id: RequestId) -> None:
        """Drop a request, which waits for transfers no longer; nothing where it is not known."""
        entry = self.entries.pop(request_id, None)
        if entry is not None:
            for transfers in (entry.first, *entry.parts.values()):
                for transfer_id in transfers:
                    self._users.get(transfer_id, set()).discard(request_id)

    def others_need(self, transfer_id: TransferId, request_id: RequestId) -> bool:
        """Whether some request other than this one waits for the transfer."""
        return bool(self._users.get(transfer_id, set()) - {request_id})

    def ended(self, transfer_id: TransferId) -> list[Arriving]:
        """Note that a transfer has ended; return the requests that waited for it, empty where none did."""
        entries = [self.entries[r] for r in sorted(self._users.pop(transfer_id, set()))]
        for entry in entries:
            entry.first.discard(transfer_id)
            for transfers in entry.parts.values():
                transfers.discard(transfer_id)
        return entries

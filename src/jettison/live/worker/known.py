"""Which peers a worker may have a link to: what the controller has said of their lives and addresses, and of ends."""

from __future__ import annotations

from collections.abc import Iterable

from jettison.live.wire.messages import PeerAddress
from jettison.transport.handshake import Identity
from jettison.types import WorkerId


class KnownPeers:
    """The newest life of each peer that is not over."""

    def __init__(self) -> None:
        self._present: dict[WorkerId, PeerAddress] = {}
        self._over: dict[WorkerId, int] = {}
        """The newest life of each that is."""

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._present

    def add(self, peers: Iterable[PeerAddress]) -> None:
        """They are there; what is over stays so."""
        for peer in peers:
            if not self.is_over(Identity(peer.worker_id, peer.life)):
                self._present[peer.worker_id] = peer

    def end(self, worker: WorkerId, life: int) -> None:
        """This life, and every older one, is over."""
        self._over[worker] = max(life, self._over.get(worker, life))
        present = self._present.get(worker)
        if present is not None and present.life <= life:
            del self._present[worker]

    def is_over(self, them: Identity) -> bool:
        """Whether a peer that comes is one of the past."""
        return them.epoch <= self._over.get(them.worker_id, -1)

    def find(self, worker: WorkerId) -> PeerAddress | None:
        """Where a link to it is opened; None where it is not there."""
        return self._present.get(worker)

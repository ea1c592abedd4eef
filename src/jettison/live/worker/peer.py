"""One peer of a worker, as ``peers`` keeps it: its link, and what waits for a turn on it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from jettison.live.worker.activations import OutgoingActivation
from jettison.live.worker.pieces import PieceSizer
from jettison.live.worker.remote_attention import OutgoingFrame
from jettison.live.worker.transfers import IncomingTransfers, OutgoingTransfer
from jettison.transport.link import Frame, Link


@dataclass(slots=True)
class Peer:
    """Everything that goes on with one peer."""

    link: Link
    incoming: IncomingTransfers
    sizer: PieceSizer
    life: int = 0
    bulk_frames: deque[Frame] = field(default_factory=deque)
    """Received and not yet written; they hold the sender's room, so there are only a few."""
    activations: deque[OutgoingActivation | OutgoingFrame] = field(default_factory=deque)
    transfers: list[OutgoingTransfer] = field(default_factory=list)
    least_transit_ns: int | None = None
    """Of activations: what tells the two clocks apart, and the fastest way."""

    @property
    def takes_bulk(self) -> bool:
        """A refusal says something of the link's speed: it is in use."""
        return self.link.is_open and not self.link.is_opening

    def waiting_steps(self) -> list[int]:
        """Those that wait to be handed on."""
        return [frame.step_id for frame in self.activations if isinstance(frame, OutgoingActivation)]

    @property
    def next_transfer(self) -> OutgoingTransfer:
        """The transfer that has the link's next turn: the first of the most urgent."""
        return min(self.transfers, key=lambda t: (not t.cancelled, t.kind, not t.urgent))

"""Transfers on links: their turns, and how long an activation waits.

Each direction of a link sends one bulk transfer at a time: KV before parameters, urgent KV before other KV, then in
order, as ``live.worker.peers`` does. Bulk travels in pieces. With ``coordinate`` an activation waits for the piece that
is on the wire at either end's port, and then goes first (KunServe v3 section 4.2); without, it goes behind all that its
link has queued (for comparison only).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from jettison.sim.loop import EventLoop
from jettison.sim.network import Flow, FlowClass, Network
from jettison.types import TransferId, WorkerId


class TransferEnd(NamedTuple):
    """The end of a bulk transfer, at its destination."""

    is_complete: bool
    num_bytes: int
    duration_ns: int
    """From the first byte's arrival to the last one's."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One bulk transfer."""

    transfer_id: TransferId
    src: WorkerId
    dst: WorkerId
    num_bytes: int
    flow_class: FlowClass
    on_end: Callable[[TransferEnd], None]
    flow: Flow | None = None
    sent_bytes: int = 0
    """Bytes sent by flows that had to give way."""
    begun_ns: int | None = None
    """When the destination first heard of it."""


@dataclass(slots=True, eq=False)
class _Link:
    """One direction between two workers."""

    queue: list[Transfer] = field(default_factory=list)
    behind: list[tuple[set[TransferId], Callable[[], None]]] = field(default_factory=list)
    """Activations that wait until these transfers are over (no coordination)."""


class Transfers:
    """All bulk transfers and activations of a cluster."""

    def __init__(
        self, loop: EventLoop, network: Network, piece_bytes: int, piece_ns: int | None = None, *,
        coordinate: bool = True,
    ) -> None:
        self._loop = loop
        self.network = network
        self.piece_bytes = piece_bytes
        """At most, of a piece of bulk."""
        self._piece_ns = piece_ns
        self._coordinate = coordinate
        self._links: dict[tuple[WorkerId, WorkerId], _Link] = {}

    # --- bulk -------------------------------------------------------------------------------------------------

    def start(self, transfer: Transfer) -> None:
        """Queue a transfer on its link; ``on_end`` is called when its last byte has arrived."""
        link = self._link(transfer.src, transfer.dst)
        link.queue.append(transfer)
        self._take_turn(link)

    def cancel(self, src: WorkerId, transfer_id: TransferId) -> None:
        """Stop a transfer at its next piece; ``on_end`` is still called. A transfer that is over or unknown is
        ignored."""
        for (source, _), link in self._links.items():
            if source == src:
                for transfer in link.queue:
                    if transfer.transfer_id == transfer_id:
                        self._break_off(link, transfer)
                        self._deliver_end(transfer, is_complete=False)
                        self._take_turn(link)
                        return

    def drop(self, src: WorkerId, dst: WorkerId) -> list[Transfer]:
        """The link is gone: forget its transfers, without calling ``on_end``; returns them, queued ones included."""
        link = self._links.pop((src, dst), None)
        if link is None:
            return []
        dropped = list(link.queue)
        for transfer in dropped:
            self._stop_flow(transfer)
        link.queue.clear()
        link.behind.clear()
        return dropped

    def is_busy(self, src: WorkerId, dst: WorkerId) -> bool:
        """Bulk is on its way there."""
        link = self._links.get((src, dst))
        return link is not None and bool(link.queue)

    def _link(self, src: WorkerId, dst: WorkerId) -> _Link:
        return self._links.setdefault((src, dst), _Link())

    def _take_turn(self, link: _Link) -> None:
        """Send the most urgent transfer; a less urgent one gives way."""
        if not link.queue:
            return
        chosen = min(link.queue, key=lambda t: t.flow_class)  # the first of them
        if chosen.flow is not None:
            return
        for other in link.queue:
            if other.flow is not None:
                self._stop_flow(other)
        if chosen.begun_ns is None:
            chosen.begun_ns = self._loop.now_ns
        chosen.flow = self.network.start(
            chosen.src, chosen.dst, chosen.num_bytes - chosen.sent_bytes, chosen.flow_class,
            lambda: self._sent(link, chosen),
        )

    def _sent(self, link: _Link, transfer: Transfer) -> None:
        transfer.flow, transfer.sent_bytes = None, transfer.num_bytes
        link.queue.remove(transfer)
        self._deliver_end(transfer, is_complete=True)
        self._release_behind(link, transfer.transfer_id)
        self._take_turn(link)

    def _break_off(self, link: _Link, transfer: Transfer) -> None:
        self._stop_flow(transfer)
        link.queue.remove(transfer)
        self._release_behind(link, transfer.transfer_id)

    def _stop_flow(self, transfer: Transfer) -> None:
        if transfer.flow is not None:
            transfer.sent_bytes += self.network.stop(transfer.flow)
            transfer.flow = None

    def _deliver_end(self, transfer: Transfer, *, is_complete: bool) -> None:
        started_ns = self._loop.now_ns if transfer.begun_ns is None else transfer.begun_ns
        end = TransferEnd(is_complete, transfer.sent_bytes, self._loop.now_ns - started_ns)
        latency_ns = self.network.latency_ns(transfer.src, transfer.dst)
        self._loop.after(latency_ns, lambda: transfer.on_end(end))

    # --- activations ------------------------------------------------------------------------------------------

    def send_activation(self, src: WorkerId, dst: WorkerId, num_bytes: int, on_arrival: Callable[[], None]) -> None:
        """Send a stage's output to the next; ``on_arrival`` when all of it is there."""
        latency_ns = self.network.latency_ns(src, dst)

        def sent() -> None:
            self._loop.after(latency_ns, on_arrival)

        def send() -> None:
            self.network.start(src, dst, num_bytes, FlowClass.ACTIVATION, sent)

        link = self._link(src, dst)
        if not self._coordinate and link.queue:
            link.behind.append(({transfer.transfer_id for transfer in link.queue}, send))
        elif (wait_ns := self.piece_wait_ns(src, dst)) > 0:
            self._loop.after(wait_ns, send)
        else:
            send()

    def piece_wait_ns(self, src: WorkerId, dst: WorkerId) -> int:
        """Nanoseconds until the pieces on the wire at the two ports have been sent; 0 where no bulk flows."""
        waits = [0]
        for flow in self.network.bulk_flows_at(src, dst):
            if flow.rate > 0.0:
                piece_bytes = self.piece_bytes
                if self._piece_ns is not None:
                    piece_bytes = min(piece_bytes, max(1, int(flow.rate * self._piece_ns)))
                left = min(piece_bytes - flow.sent_bytes(self._loop.now_ns) % piece_bytes, flow.remaining)
                waits.append(math.ceil(left / flow.rate))
        return max(waits)

    def _release_behind(self, link: _Link, transfer_id: TransferId) -> None:
        for ahead, _ in link.behind:
            ahead.discard(transfer_id)
        free = [send for ahead, send in link.behind if not ahead]
        link.behind = [entry for entry in link.behind if entry[0]]
        for send in free:
            send()


"""A worker's peers: one link to each, what travels on it, and whose turn it is.

Activations, and questions and answers of remote attention, go first, then KV, then shards. ``worker.loop`` says when
links are served; what is done then is decided here, by that module's rules 4, 5 and 8 and by ``core.controlstream``'s
rules 6 and 7.
Not here: what the frames say (``activations``, ``remote_attention``, ``transfers``), and the control stream.

    in use --cut--> closed: what had arrived is still written --bulk turn--> given up
    in use --nonsense from the peer--> closed: nothing more is written --bulk turn--> given up
    in use --fenced, or replaced by a new link--> given up

No thread, and no waiting but in a step that waits for a peer's attention.
"""

from __future__ import annotations

import logging
import select
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from jettison.errors import LinkDownError
from jettison.live.wire import messages as m
from jettison.live.worker.activations import ActivationInbox, OutgoingActivation
from jettison.live.worker.device_port import Device
from jettison.live.worker.failpoints import Failpoint
from jettison.live.worker.pieces import PieceSizer
from jettison.live.worker.remote_attention import OutgoingFrame, PeerAttention
from jettison.live.worker.transfers import (
    IncomingTransfers,
    OutgoingKV,
    OutgoingShard,
    OutgoingTransfer,
)
from jettison.transport.link import Frame, FrameKind, Link
from jettison.types import ShardId, TransferId, WorkerId

log = logging.getLogger(__name__)

Emit = Callable[[m.Event], None]

ATTENTION_TIMEOUT_S = 10.0
"""For how long a step waits for a peer's attention before it fails and is repeated without."""

BULK_SHARE = 4
"""Of a stage's time, one part in so many may pass with bulk before the next step, where the links take it. One turn a
step would stretch an exchange over as many steps as it has frames: seconds of a burst, its requests standing still."""

MAX_BULK_NS = 10_000_000
"""At most, however long a stage takes."""

MAX_SPARE_NS = MAX_BULK_NS
"""Of the time that pieces sent between layers may take, what is saved up at most for one large piece."""

IDLE_WAIT_S = 0.05
"""A step that waits for a peer looks again after this long at the latest."""


@dataclass(slots=True)
class _Peer:
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


class Peers:
    """Every peer that one worker has a link to, and what travels between them. Used by one thread.

    ``attention`` is given to the device for a step: it serves the links from inside the step, so memory may be written,
    peers be given up and events be emitted before the step is over.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        device: Device,
        emit: Emit,
        on_lost: Callable[[WorkerId], None],
        *,
        piece_bytes: int,
        adapt_pieces: bool,
        coordinate: bool,
        shares_clock: bool,
        clock_ns: Callable[[], int],
        failpoint: Failpoint,
        wait: Callable[[], None] | None,
    ) -> None:
        """``on_lost`` is told of each peer given up, when ``inbox`` has all that will come of it. The rest: see
        ``WorkerLoop``.
        """
        self.inbox = ActivationInbox()
        self.stage_ns = 0
        """What a stage takes here, waiting apart; between its layers where attention is remote. The owner measures."""
        self._worker_id = worker_id
        self._device = device
        self._emit = emit
        self._on_lost = on_lost
        self._piece_bytes = piece_bytes
        self._adapt_pieces = adapt_pieces and coordinate
        self._coordinate = coordinate
        self._shares_clock = shares_clock
        self._clock_ns = clock_ns
        self._reach = failpoint
        self._peers: dict[WorkerId, _Peer] = {}
        self._spare_ns = 0
        """Time that pieces may take between the layers of a step; less than 0: a piece took more than there was."""
        self._spare_since_ns = 0
        """Up to when steps have earned it."""
        self._unexplained: dict[WorkerId, str] = {}
        """Links that closed by themselves, and how. A peer that was told to stop closes its links, and this worker may
        be told later than it: noted when it happens, but only a fence, or work for that peer, says that something is
        wrong. A new link ends what there was to explain."""
        self.attention = PeerAttention(
            device, self._link_of, self.post, self.serve, wait or self._wait_for_links, clock_ns, ATTENTION_TIMEOUT_S,
            failpoint, self._send_shards,
        )

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._peers

    # --- links

    def attach(self, worker: WorkerId, link: Link, life: int) -> None:
        """Use ``link`` for this peer from now on; an older one is closed and given up."""
        old = self._peers.get(worker)
        if old is not None:
            old.link.close()
            log.warning("link to worker %d is replaced by a new one", worker)
            self._give_up(worker, old)
        self._unexplained.pop(worker, None)
        sizer = PieceSizer(self._piece_bytes, self._adapt_pieces and link.queues_bulk)
        self._peers[worker] = _Peer(link, IncomingTransfers(self._worker_id), sizer, life)

    def fence(self, worker: WorkerId, life: int) -> None:
        """Close and give up the link to this life of a peer, or to an older one (rule 7)."""
        peer = self._peers.get(worker)
        if peer is not None and peer.life <= life:
            del self._peers[worker]
            log.warning("link to worker %d is down: the worker is lost", worker)
            self._give_up(worker, peer)
        elif (why := self._unexplained.pop(worker, None)) is not None:
            log.warning("link to worker %d is down: %s", worker, why)

    @property
    def links(self) -> dict[WorkerId, Link]:
        """The links in use; those given up are gone from it."""
        return {worker: peer.link for worker, peer in self._peers.items()}

    def close(self) -> None:
        """Close the links. Idempotent."""
        for peer in self._peers.values():
            peer.link.close()

    # --- a turn of all links

    def serve_urgent(self) -> bool:
        """Receive what there is (questions are answered at once), send what waits; whether there was anything."""
        progressed = False
        for peer in list(self._peers.values()):
            progressed |= self._receive(peer)
            progressed |= self._send_activations(peer)
        return progressed

    def serve(self, sends_bulk: bool = True) -> bool:
        """All that links ask for, steps and commands apart; whether there was anything. Also called inside a step."""
        progressed = self.serve_urgent()
        for peer in list(self._peers.values()):
            # A question may lie behind bulk that has arrived: take that in at once.
            while peer.bulk_frames:
                self._write_bulk(peer)
                self._receive(peer)
                progressed = True
        return self.run_bulk(sends_bulk) or progressed

    def _receive(self, peer: _Peer) -> bool:
        """Take in activations; keep bulk frames for their turn."""
        progressed = False
        for frame in peer.link.poll_frames():
            progressed = True
            if frame.kind.is_bulk:
                peer.bulk_frames.append(frame)
                continue
            with frame:
                try:
                    if frame.kind is FrameKind.ACTIVATION:
                        self.inbox.accept(peer.link.peer, frame, self._clock_ns())
                    else:
                        self.attention.accept(peer.link.peer, frame)
                except LinkDownError as error:
                    self._distrust(peer, error)
        return progressed

    def _wait_for_links(self) -> None:
        """Until a link has something new, or a moment has passed."""
        links = [peer.link for peer in self._peers.values() if peer.link.fileno() >= 0]
        select.select(links, [link for link in links if link.wants_write], [], IDLE_WAIT_S)

    def _link_of(self, worker: WorkerId) -> Link | None:
        peer = self._peers.get(worker)
        return None if peer is None else peer.link

    # --- activations, questions and answers

    def post(self, worker: WorkerId, frame: OutgoingActivation | OutgoingFrame) -> None:
        """Queue for a peer, and send if the link takes it; for one that is gone it is dropped."""
        peer = self._peers.get(worker)
        if peer is not None:
            peer.activations.append(frame)
            self._send_activations(peer)

    def delay_ns(self, worker: WorkerId, transit_ns: int) -> int:
        """How long an activation was on its way; with clocks of two machines, beyond the fastest one on the link."""
        peer = self._peers.get(worker)
        if self._shares_clock or peer is None:
            return transit_ns
        least_ns = transit_ns if peer.least_transit_ns is None else min(transit_ns, peer.least_transit_ns)
        peer.least_transit_ns = least_ns
        return transit_ns - least_ns

    def _send_activations(self, peer: _Peer) -> bool:
        """Push waiting activations into the link; whether any was sent whole."""
        progressed = False
        try:
            while peer.activations and peer.activations[0].send(peer.link):
                peer.activations.popleft()
                progressed = True
        except LinkDownError:
            pass  # the bulk turn finds the link closed and gives it up once all that was received is used
        return progressed

    # --- bulk

    def run_bulk_between_steps(self) -> bool:
        """Bulk turns of every link for as long as a step may be kept waiting (rule 4); whether anything happened."""
        end_ns = self._clock_ns() + min(MAX_BULK_NS, self.stage_ns // BULK_SHARE)
        progressed = turn = self.run_bulk()
        while turn and self._clock_ns() < end_ns:
            turn = self.serve_urgent()
            turn |= self.run_bulk()
        return progressed

    @property
    def sends_shards(self) -> bool:
        """A peer is being given parameters."""
        return any(t.kind is FrameKind.SHARD_PIECE for peer in self._peers.values() for t in peer.transfers)

    def begin_layers(self) -> None:
        """A step begins in which shards are sent between layers: what was not used before it is gone."""
        self._spare_ns, self._spare_since_ns = min(0, self._spare_ns), self._clock_ns()

    def _send_shards(self) -> None:
        """Between two layers: pieces of shards, for a quarter of the time that the layers take. Nothing is written.

        A link through shared memory holds a few pieces: with turns between steps alone it carries so many a step, and
        who is woken by busy peers waits for as many steps as there are pieces."""
        now_ns = self._clock_ns()
        earned_ns = self._spare_ns + (now_ns - self._spare_since_ns) // BULK_SHARE
        self._spare_ns, self._spare_since_ns = min(MAX_SPARE_NS, earned_ns), now_ns
        giving = [p for p in self._peers.values() if self._sends_shard(p)]
        if self._spare_ns > 0:
            for peer in giving:
                self._receive(peer)  # room that has been given back
        while self._spare_ns > 0 and giving:
            giving = [p for p in giving if self._sends_shard(p) and self._send_bulk(p)]
            self._spare_since_ns = self._clock_ns()
            self._spare_ns -= self._spare_since_ns - now_ns
            now_ns = self._spare_since_ns

    def _sends_shard(self, peer: _Peer) -> bool:
        """What would go next is a piece of one."""
        return peer.link.is_open and bool(peer.transfers) and _next_of(peer).kind is FrameKind.SHARD_PIECE

    def run_bulk(self, sends: bool = True) -> bool:
        """One bulk turn of every link; whether anything happened."""
        progressed = False
        for worker, peer in list(self._peers.items()):
            if peer.bulk_frames:
                self._write_bulk(peer)
                progressed = True
            elif not peer.link.is_open:
                del self._peers[worker]
                self._unexplained[worker] = why = peer.link.failure or "closed"
                log.info("link to worker %d closed: %s", worker, why)
                self._give_up(worker, peer)
                progressed = True
                continue
            if sends and peer.transfers and peer.link.is_open:
                sent = self._send_bulk(peer)
                progressed |= sent
                while sent and not self._coordinate and peer.transfers:
                    sent = self._send_bulk(peer)
        return progressed

    def _write_bulk(self, peer: _Peer) -> None:
        kind, is_check = peer.bulk_frames[0].kind, peer.incoming.is_end_of_shard(peer.bulk_frames[0])
        self._reach_bulk("before", kind, is_check)
        with peer.bulk_frames.popleft() as frame:
            try:
                ended = peer.incoming.accept(frame, self._device, self._clock_ns())
            except LinkDownError as error:
                self._distrust(peer, error)
                return
        self._reach_bulk("after", kind, is_check)
        if ended is not None:
            self._emit(ended)

    def _send_bulk(self, peer: _Peer) -> bool:
        transfer = _next_of(peer)
        is_shard = transfer.kind is FrameKind.SHARD_PIECE
        self._reach_piece("before", "sent", is_shard)
        try:
            sent, over = transfer.send_turn(peer.link, self._device, peer.sizer.piece_bytes)
        except LinkDownError:
            return True  # the next bulk turn gives the link up
        self._reach_piece("after", "sent", is_shard)
        if sent:
            peer.sizer.sent(transfer.last_bytes, self._clock_ns(), self.stage_ns)
            if self._adapt_pieces:
                peer.link.limit_unsent(peer.sizer.piece_bytes)
        else:
            peer.sizer.refused(self._clock_ns())
        if over:
            peer.transfers.remove(transfer)
        return sent

    def _reach_bulk(self, when: str, kind: FrameKind, is_check: bool) -> None:
        self._reach_piece(when, "written", kind is FrameKind.SHARD_PIECE)
        if is_check:
            self._reach(f"{when}_check")

    def _reach_piece(self, when: str, what: str, is_shard: bool) -> None:
        self._reach(f"{when}_piece_{what}")
        if is_shard:
            self._reach(f"{when}_shard_{what}")

    # --- transfers from here

    def start_transfer(self, command: m.SendKV | m.SendShard) -> None:
        """Queue it on its link; without one it ends here and now (rule 8)."""
        peer = self._peers.get(command.dst_worker)
        if peer is None:
            why = self._unexplained.get(command.dst_worker, "none was made")
            log.error("transfer %d: no link to worker %d: %s", command.transfer_id, command.dst_worker, why)
            self._emit(m.TransferEnded(self._worker_id, command.transfer_id, False, 0, 0))
            return
        peer.transfers.append(self._outgoing(command))

    def forget_shards(self, kept: Set[ShardId]) -> None:
        """A layout has been applied that has these shards: transfers of others from here end incomplete.

        A later layout may map such a shard again, empty: that must not go on where this one stopped.
        """
        for peer in self._peers.values():
            for transfer in peer.transfers:
                if isinstance(transfer, OutgoingShard) and transfer.shard not in kept:
                    transfer.fail()

    def cancel_transfer(self, transfer_id: TransferId) -> None:
        """Send no more pieces of it. Nothing, if no such transfer is going from here."""
        for peer in self._peers.values():
            for transfer in peer.transfers:
                if transfer.transfer_id == transfer_id:
                    transfer.cancel()

    def _outgoing(self, command: m.SendKV | m.SendShard) -> OutgoingTransfer:
        if isinstance(command, m.SendKV):
            return OutgoingKV(command, self._device.kv_block_bytes)
        try:
            return OutgoingShard(command, self._device.shard_num_bytes(command.shard))
        except Exception:
            log.exception("transfer %d: shard %s is not here", command.transfer_id, command.shard)
            transfer = OutgoingShard(command, 0)
            transfer.fail()
            return transfer

    # --- the end of a link

    def _distrust(self, peer: _Peer, error: LinkDownError) -> None:
        log.error("closing the link to worker %d: %s", peer.link.peer, error)
        peer.link.close()
        while peer.bulk_frames:
            peer.bulk_frames.popleft().release()

    def _give_up(self, worker: WorkerId, peer: _Peer) -> None:
        """The link is gone: end what can no longer end by itself (rules 6 and 8)."""
        while peer.bulk_frames:
            peer.bulk_frames.popleft().release()
        peer.link.close()
        for ended in peer.incoming.abandon(self._clock_ns()):
            self._emit(ended)
        for transfer in peer.transfers:
            if not transfer.begun:
                self._emit(m.TransferEnded(self._worker_id, transfer.transfer_id, False, 0, 0))
        self.inbox.forget_partial(worker)
        self.attention.lost(worker)
        self._on_lost(worker)


def _next_of(peer: _Peer) -> OutgoingTransfer:
    """Whose turn it is on a link: the first of the most urgent."""
    return min(peer.transfers, key=lambda t: (not t.cancelled, t.kind, not t.urgent))

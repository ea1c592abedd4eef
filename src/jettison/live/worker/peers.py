"""A worker's peers: one link to each, what travels on it, and whose turn it is.

Activations, and questions and answers of remote attention, go first, then KV, then shards. ``worker.loop`` says when
links are served; what is done then is decided here, by that module's rules 4, 5 and 8 and by ``core.controlstream``'s
rules 6 and 7.
Not here: what the frames say (``activations``, ``remote_attention``, ``transfers``), and the control stream.

    known --first use, here or there--> opening --the peer uses it--> in use
    opening --the peer's own connection, and its id is lower--> in use
    opening --refused for too long, or the controller says that its life is over--> given up
    in use --cut--> closed: what had arrived is still written --bulk turn--> given up
    in use --nonsense from the peer--> closed: nothing more is written --bulk turn--> given up
    in use --fenced, or replaced by a new link--> given up

What is to travel on a link that is opening waits for it; where it is given up, each step that was to be handed on is
told of as failed, for the next stage has no link whose end would tell it. A link that is given up is not opened again:
a peer's next life is another peer.
Only links that the kernel calls ready are polled, and those that have no descriptor.

No thread, and no waiting but in a step that waits for a peer's attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set

from jettison.core import ports
from jettison.errors import LinkDownError
from jettison.live.wire import messages as m
from jettison.live.worker.activations import ActivationInbox, OutgoingActivation
from jettison.live.worker.device_port import Device
from jettison.live.worker.doors import Doors
from jettison.live.worker.failpoints import Failpoint
from jettison.live.worker.known import KnownPeers
from jettison.live.worker.peer import Peer
from jettison.live.worker.pieces import PieceSizer, SpareTime
from jettison.live.worker.ready import Readiness
from jettison.live.worker.remote_attention import OutgoingFrame, PeerAttention
from jettison.live.worker.transfers import IncomingTransfers, OutgoingShard, outgoing
from jettison.transport.handshake import Identity
from jettison.transport.link import FrameKind, Link
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

DOORS: WorkerId = -1
"""Where peers connect, among what is watched."""

IDLE_WAIT_S = 0.05
"""A step that waits for a peer looks again after this long at the latest."""


class Peers:
    """Every peer of one worker, and what travels between them. Used by one thread.

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
        doors: Doors | None = None,
    ) -> None:
        """``on_lost`` is told of each peer given up, when ``inbox`` has all that will come of it. ``doors``: open links
        to peers that are known (None: all links are attached from outside). The rest: see ``WorkerLoop``.
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
        self._doors = doors
        self._known = KnownPeers()
        self._peers: dict[WorkerId, Peer] = {}
        """Those to which there is a link, or one is being opened."""
        self._readiness: Readiness[WorkerId] = Readiness()
        if doors is not None:
            self._readiness.watch(DOORS, doors)
        self.parted: set[WorkerId] = set()
        """Peers whose link was in use and is given up: they see its end, too."""
        self._spare = SpareTime(BULK_SHARE, MAX_BULK_NS)
        self._unexplained: dict[WorkerId, str] = {}
        """Links that closed by themselves, and how. A peer that was told to stop closes its links, and this worker may
        be told later than it: noted when it happens, but only a fence, or work for that peer, says that something is
        wrong. A new link ends what there was to explain."""
        self.attention = PeerAttention(
            device, self._link_of, self.post, self.serve, wait or self._wait_for_links, clock_ns, ATTENTION_TIMEOUT_S,
            failpoint, self._between_layers,
        )

    def __contains__(self, worker: WorkerId) -> bool:
        """Whether there is a link to it, or one would be opened."""
        return worker in self._peers or (self._doors is not None and worker in self._known)

    # --- links

    def know(self, peers: Sequence[m.PeerAddress]) -> None:
        """These peers are there now. A link to an older life of one is closed and given up."""
        self._known.add(peers)
        for peer in peers:
            old = self._peers.get(peer.worker_id)
            if old is not None and old.life < peer.life:
                self.fence(peer.worker_id, old.life)

    def forget(self, worker: WorkerId, life: int) -> None:
        """A life of a peer is over. Where there is a link to it, its own end tells, after all that has arrived."""
        self._known.end(worker, life)
        peer = self._peers.get(worker)
        if peer is None:
            self._on_lost(worker)
        elif peer.life <= life and peer.link.is_opening:
            del self._peers[worker]
            self._give_up(worker, peer)

    def attach(self, worker: WorkerId, link: Link, life: int) -> None:
        """Use ``link`` for this peer from now on; an older one is closed and given up.

        Where one to this life is being opened, ``link`` takes its place, and what waits for it goes on.
        """
        old = self._peers.get(worker)
        if old is not None and old.life == life and old.link.is_opening:
            self._replace(old, link)
            return
        if old is not None:
            old.link.close()
            log.warning("link to worker %d is replaced by a new one", worker)
            self._give_up(worker, old)
        self._unexplained.pop(worker, None)
        self.parted.discard(worker)
        sizer = PieceSizer(self._piece_bytes, self._adapt_pieces and link.queues_bulk)
        self._peers[worker] = Peer(link, IncomingTransfers(), sizer, life)
        self._readiness.forget(worker)
        self._readiness.watch(worker, link)

    def _replace(self, peer: Peer, link: Link) -> None:
        """The link that was being opened has settled, or another has come first."""
        opening, peer.link = peer.link, link
        self._readiness.forget(link.peer)
        opening.close()
        self._readiness.watch(link.peer, link)

    def _find(self, worker: WorkerId) -> Peer | None:
        """The peer, with a link that is open or, from now on, being opened; None where it is not there."""
        peer = self._peers.get(worker)
        if peer is None and self._doors is not None and (known := self._known.find(worker)) is not None:
            self.attach(worker, self._doors.dial(known), known.life)
            peer = self._peers[worker]
            if peer.link.settled is not None:  # a quick peer has answered meanwhile
                self._replace(peer, peer.link.settled)
        return peer

    def _is_wanted(self, them: Identity) -> bool:
        """Whether a peer that connects is to have a link. Of two that dial each other, the lower id's connection stays.
        """
        peer = self._peers.get(them.worker_id)
        if self._known.is_over(them) or (peer is not None and them.epoch < peer.life):
            return False
        if peer is None or peer.life < them.epoch:
            return True
        return peer.link.is_opening and them.worker_id < self._worker_id

    def fence(self, worker: WorkerId, life: int) -> None:
        """Close and give up the link to this life of a peer, or to an older one (rule 7)."""
        self._known.end(worker, life)
        peer = self._peers.get(worker)
        if peer is not None and peer.life <= life:
            del self._peers[worker]
            log.warning("link to worker %d is down: the worker is lost", worker)
            self._give_up(worker, peer)
        elif (why := self._unexplained.pop(worker, None)) is not None:
            log.warning("link to worker %d is down: %s", worker, why)

    @property
    def is_opening(self) -> bool:
        """A link is being opened, from here or by a peer."""
        comes = self._doors is not None and self._doors.is_opening
        return comes or any(peer.link.is_opening for peer in self._peers.values())

    @property
    def links(self) -> dict[WorkerId, Link]:
        """The links in use; those given up are gone from it."""
        return {worker: peer.link for worker, peer in self._peers.items()}

    def close(self) -> None:
        """Close the links. Idempotent."""
        for peer in self._peers.values():
            peer.link.close()
        self._readiness.close()

    def fileno(self) -> int:
        """Readable when a turn has something to do: a link or a connecting peer is ready."""
        return self._readiness.fileno()

    def _look(self) -> set[WorkerId]:
        """Peers whose links have something new. Peers that connect are let in."""
        ready = self._readiness.look()
        if self._doors is not None:
            for link, life in self._doors.accept(self._is_wanted) if DOORS in ready else ():
                self.attach(link.peer, link, life)
                ready.add(link.peer)
            self._doors.close_halves(self._is_wanted)
        return ready

    # --- a turn of all links

    def serve_urgent(self) -> bool:
        """Receive what there is (questions are answered at once), send what waits; whether there was anything."""
        progressed = False
        ready = self._look()
        for worker, peer in list(self._peers.items()):
            if worker in ready or peer.link.fileno() < 0:
                progressed |= self._receive(peer)
            if peer.activations:
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

    def _receive(self, peer: Peer) -> bool:
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
        if peer.link.settled is not None:
            self._replace(peer, peer.link.settled)
            return True
        self._readiness.watch(peer.link.peer, peer.link)
        return progressed

    def _wait_for_links(self) -> None:
        """Until a link has something new, or a moment has passed."""
        self._readiness.look(IDLE_WAIT_S)

    def _link_of(self, worker: WorkerId) -> Link | None:
        peer = self._find(worker)
        return None if peer is None else peer.link

    # --- activations, questions and answers

    def post(self, worker: WorkerId, frame: OutgoingActivation | OutgoingFrame) -> None:
        """Queue for a peer, and send if the link takes it; for one that is gone it is dropped."""
        peer = self._find(worker)
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

    def _send_activations(self, peer: Peer) -> bool:
        """Push waiting activations into the link; whether any was sent whole."""
        progressed = False
        try:
            while peer.activations and peer.activations[0].send(peer.link):
                peer.activations.popleft()
                progressed = True
        except LinkDownError:
            pass  # the bulk turn finds the link closed and gives it up once all that was received is used
        self._readiness.watch(peer.link.peer, peer.link)
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
        self._spare.begin(self._clock_ns())

    def _between_layers(self) -> None:
        """What goes on between the layers of a step that has no peer's attention to wait for."""
        if self.is_opening:
            self.serve_urgent()
        if self.sends_shards:
            self._send_shards()

    def _send_shards(self) -> None:
        """Between two layers: pieces of shards, for a quarter of the time that the layers take. Nothing is written.

        A link through shared memory holds a few pieces: with turns between steps alone it carries so many a step, and
        a worker that busy peers wake waits for as many steps as there are pieces."""
        self._spare.earn(self._clock_ns())
        giving = [p for p in self._peers.values() if self._sends_shard(p)]
        if self._spare:
            for peer in giving:
                self._receive(peer)  # room that has been given back
        while self._spare and giving:
            giving = [p for p in giving if self._sends_shard(p) and self._send_bulk(p)]
            self._spare.spend(self._clock_ns())

    def _sends_shard(self, peer: Peer) -> bool:
        """What would go next is a piece of one."""
        return peer.takes_bulk and bool(peer.transfers) and peer.next_transfer.kind is FrameKind.SHARD_PIECE

    def run_bulk(self, sends: bool = True) -> bool:
        """One bulk turn of every link; whether anything happened."""
        progressed = False
        for worker, peer in list(self._peers.items()):
            if peer.bulk_frames:
                self._write_bulk(peer)
                progressed = True
            elif not peer.link.is_open:
                del self._peers[worker]
                self._known.end(worker, peer.life)
                self._unexplained[worker] = why = peer.link.failure or "closed"
                log.info("link to worker %d closed: %s", worker, why)
                self._give_up(worker, peer)
                self._emit(ports.LinkLost(self._worker_id, worker, peer.life))
                progressed = True
                continue
            if sends and peer.transfers and peer.takes_bulk:
                sent = self._send_bulk(peer)
                progressed |= sent
                while sent and not self._coordinate and peer.transfers and peer.takes_bulk:
                    sent = self._send_bulk(peer)
        return progressed

    def _write_bulk(self, peer: Peer) -> None:
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
        self._readiness.watch(peer.link.peer, peer.link)  # room given back may wait to be told of

    def _send_bulk(self, peer: Peer) -> bool:
        transfer = peer.next_transfer
        is_shard = transfer.kind is FrameKind.SHARD_PIECE
        self._reach_piece("before", "sent", is_shard)
        try:
            sent, over = transfer.send_turn(peer.link, self._device, peer.sizer.piece_bytes)
        except LinkDownError:
            return True  # the next bulk turn gives the link up
        self._reach_piece("after", "sent", is_shard)
        self._readiness.watch(peer.link.peer, peer.link)
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

    def start_transfer(self, command: ports.Transfer) -> None:
        """Queue it on its link; without one it ends here and now (rule 8)."""
        peer = self._find(command.dst)
        if peer is None:
            why = self._unexplained.get(command.dst, "none was made")
            log.error("transfer %d: no link to worker %d: %s", command.transfer_id, command.dst, why)
            self._emit(ports.TransferEnded(command.transfer_id, False, 0, 0))
            return
        peer.transfers.append(outgoing(command, self._device))

    def forget_shards(self, kept: Set[ShardId]) -> None:
        """A layout has been applied that has these shards: transfers of others from here end incomplete.

        A later layout may map such a shard again, empty: that must not go on where this one stopped.
        """
        for peer in self._peers.values():
            for transfer in peer.transfers:
                if isinstance(transfer, OutgoingShard) and transfer.shard not in kept:
                    transfer.fail()

    def cancel_transfer(self, transfer_id: TransferId) -> None:
        """Send no more pieces of it; where nothing of it can have been sent, as its link is not open yet, it has ended.
        Nothing, if no such transfer is going from here."""
        for peer in self._peers.values():
            for transfer in [t for t in peer.transfers if t.transfer_id == transfer_id]:
                transfer.cancel()
                if peer.link.is_opening:
                    peer.transfers.remove(transfer)
                    self._emit(ports.TransferEnded(transfer_id, False, 0, 0))

    # --- the end of a link

    def _distrust(self, peer: Peer, error: LinkDownError) -> None:
        log.error("closing the link to worker %d: %s", peer.link.peer, error)
        peer.link.close()
        while peer.bulk_frames:
            peer.bulk_frames.popleft().release()

    def _give_up(self, worker: WorkerId, peer: Peer) -> None:
        """The link is gone: end what can no longer end by itself (rules 6 and 8)."""
        while peer.bulk_frames:
            peer.bulk_frames.popleft().release()
        self._readiness.forget(worker)
        peer.link.close()
        if peer.link.is_opening:
            why = f"no link to worker {worker}: {peer.link.failure or 'closed'}"
            for step_id in peer.waiting_steps():
                self._emit(ports.StepFailed(step_id, why, worker))
        else:
            self.parted.add(worker)
        for ended in peer.incoming.abandon(self._clock_ns()):
            self._emit(ended)
        for transfer in peer.transfers:
            if not transfer.begun:
                self._emit(ports.TransferEnded(transfer.transfer_id, False, 0, 0))
        self.inbox.forget_partial(worker)
        self.attention.lost(worker)
        self._on_lost(worker)

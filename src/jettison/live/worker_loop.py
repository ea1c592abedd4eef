"""What a worker does next: steps, control commands and bulk pieces on one thread, in a fixed order of urgency.

Deterministic and without sockets, threads or sleeping: whoever owns it delivers commands, calls ``tick`` until
it returns False, and then waits for a reason to call again. Control events leave through ``emit``; bulk bytes
go over ``transport`` links. No torch here: tensors pass through untouched.

Rule 1. The control stream is obeyed in order, except that a step whose input has arrived overtakes steps that
        still wait for theirs.
Rule 2. Layouts, moves, swaps, LoadShard and ReportMemory begin only when every step received before them has
        finished here, and one after the other.
Rule 3. No step received after an ApplyLayout runs before it. Steps do not wait for anything else.
Rule 4. Between two steps, and whenever no step is ready, each link gets one bulk turn: at most one received
        frame is written and at most one piece is sent. KV goes before shards, cancellations before both.
Rule 5. Memory is written by received pieces only in those turns: never while a step runs.
Rule 6. A step ends with exactly one StepDone or StepFailed, and its *last stage* tells. A stage that fails,
        refuses a step, or has lost the stage before it, hands a failure flag on in place of hidden states.
        Only a dead worker breaks this, and of that the controller hears from the operating system.
Rule 7. A fence takes effect at once: the link to the lost worker is closed, no piece it sent is written any more.
        It is answered like a layout: when every step received before has finished here.
Rule 8. A move ends with exactly one MoveEnded, and its *destination* tells. Only when the destination can
        not have heard of the move (no link, or the link failed before MOVE_BEGIN) does the source tell.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jettison.device.bytesview import as_numpy_uint8
from jettison.device.step import StepInput, StepOutput
from jettison.errors import JettisonError, LinkDownError, WorkerLostError
from jettison.live import codec
from jettison.live import messages as m
from jettison.live.activations import ActivationInbox, Arrived, OutgoingActivation
from jettison.live.device_port import Device
from jettison.live.moves import IncomingMoves, OutgoingKV, OutgoingMove, OutgoingShard, shard_num_bytes
from jettison.live.safepoints import Safepoint, nowhere
from jettison.memory.layout import LayoutSpec
from jettison.transport.link import EMPTY, Frame, FrameKind, Link
from jettison.types import LayerRange, MoveId, WorkerId

log = logging.getLogger(__name__)

Emit = Callable[[m.Event], None]

MAX_GROUPS_KNOWN = 256
"""Groups whose epoch is remembered: far more than exist at one time."""


@dataclass(slots=True, eq=False)
class _PendingStep:
    step: StepInput
    refused: str | None = None
    """Why it will not run. It still waits for its input, which would otherwise be nobody's."""
    orphaned: bool = False
    """The stage before it is gone: its input can no longer come."""


_Command = (
    m.OfferLayout | m.ApplyLayout | m.SendKV | m.SendShard | m.SwapKV | m.LoadShard | m.FenceWorker | m.ReportMemory
)
_Entry = _PendingStep | _Command


@dataclass(slots=True)
class _Peer:
    """Everything that goes on with one peer."""

    link: Link
    incoming: IncomingMoves
    life: int = 0
    bulk_frames: deque[Frame] = field(default_factory=deque)
    """Received and not yet written; they hold the sender's room, so there are only a few."""
    activations: deque[OutgoingActivation] = field(default_factory=deque)
    moves: list[OutgoingMove] = field(default_factory=list)


class WorkerLoop:
    """One worker's share of the work. See the module's rules."""

    def __init__(
        self,
        worker_id: WorkerId,
        device: Device,
        links: Mapping[WorkerId, Link],
        emit: Emit,
        piece_bytes: int = 1 << 20,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        safepoint: Safepoint = nowhere,
    ) -> None:
        self.worker_id = worker_id
        self.stopped = False
        self._device = device
        self._emit = emit
        self._piece_bytes = piece_bytes
        self._clock_ns = clock_ns
        self._reach = safepoint
        self._spec: LayoutSpec | None = None
        """The layout in force, once one has been applied."""
        self._peers: dict[WorkerId, _Peer] = {}
        self._stream: list[_Entry] = []
        """The control stream, less what is over. A few entries long: the controller keeps few steps in flight."""
        self._inbox = ActivationInbox()
        self._epochs: dict[int, int] = {}
        """Group -> newest epoch seen; the ``MAX_GROUPS_KNOWN`` used last, as every move makes a new group."""
        self._bulk_turn = False
        for peer, link in links.items():
            self.attach_link(peer, link)

    # --- what the owner calls

    def deliver(self, command: m.Command) -> None:
        """Take the next command of the control stream. Raises CodecError for a step that cannot be read."""
        match command:
            case m.Step():
                self._stream.append(self._admit_step(codec.decode_step(command.payload)))
            case m.CancelMove():
                self._cancel_move(command.move_id)
            case m.FenceWorker():
                peer = self._peers.get(command.lost_worker)
                if peer is not None and peer.life <= command.lost_life:
                    del self._peers[command.lost_worker]
                    self._give_up(command.lost_worker, peer, "the worker is lost")
                self._mark_orphans(command.lost_worker)
                self._stream.append(command)
            case m.Stop():
                self.stopped = True
            case _:
                self._stream.append(command)

    def tick(self) -> bool:
        """Do at most one unit of work, the most urgent that is ready; whether anything was done.

        A unit is one step, one control command, or one bulk turn of every link. Activations are moved in every
        tick: they are what the next stage waits for.
        """
        if self.stopped:
            return False
        progressed = False
        for peer in self._peers.values():
            progressed |= self._receive(peer)
            progressed |= self._send_activations(peer)
        if self._bulk_turn:
            self._bulk_turn = False
            if self._run_bulk():
                return True
        entry = self._next_entry()
        if entry is None:
            return self._run_bulk() or progressed
        self._stream.remove(entry)
        self._bulk_turn = True
        if isinstance(entry, _PendingStep):
            self._run_step(entry)
        else:
            self._run_command(entry)
        return True

    def attach_link(self, peer: WorkerId, link: Link, life: int = 0) -> None:
        """Use ``link`` for this peer from now on (a restarted worker); an older one is closed and given up."""
        old = self._peers.get(peer)
        if old is not None:
            old.link.close()
            self._give_up(peer, old, "replaced by a new link")
        self._peers[peer] = _Peer(link, IncomingMoves(self.worker_id), life)

    @property
    def links(self) -> dict[WorkerId, Link]:
        """The links in use; those that failed are gone from it."""
        return {worker: peer.link for worker, peer in self._peers.items()}

    def close(self) -> None:
        """Close the links. The device belongs to the caller. Idempotent."""
        self.stopped = True
        for peer in self._peers.values():
            peer.link.close()

    # --- control stream

    def _admit_step(self, step: StepInput) -> _PendingStep:
        pending = _PendingStep(step)
        newest = self._epochs.pop(step.group_id, step.epoch)
        if step.epoch < newest:
            pending.refused = f"step of epoch {step.epoch} of group {step.group_id}, which is at epoch {newest}"
        self._epochs[step.group_id] = max(step.epoch, newest)
        if len(self._epochs) > MAX_GROUPS_KNOWN:
            del self._epochs[next(iter(self._epochs))]
        if step.prev_worker is not None:
            self._inbox.expect(step.step_id)
            pending.orphaned = step.prev_worker not in self._peers
        return pending

    def _next_entry(self) -> _Entry | None:
        """The first entry of the control stream that may start (rules 1 to 3)."""
        earlier_step = earlier_barrier = False
        for entry in self._stream:
            if isinstance(entry, _PendingStep):
                if self._is_ready(entry):
                    return entry
                earlier_step = True
                continue
            if not earlier_step and not earlier_barrier:
                return entry
            if isinstance(entry, m.ApplyLayout):
                return None
            earlier_barrier = True
        return None

    def _is_ready(self, pending: _PendingStep) -> bool:
        return pending.step.prev_worker is None or pending.orphaned or self._inbox.ready(pending.step.step_id)

    def _run_command(self, command: _Command) -> None:
        if isinstance(command, m.SwapKV):
            self._swap(command)
            return
        if isinstance(command, m.SendKV | m.SendShard):
            self._start_move(command)
            return
        try:
            self._emit(self._answer(command))
        except WorkerLostError:
            # The device could not put its memory back: nothing it holds can be trusted, so this worker ends.
            raise
        except JettisonError as error:
            self._emit(m.CallFailed(self.worker_id, command.call_id, type(error).__name__, str(error)))
        except Exception as error:
            log.exception("%s failed", type(command).__name__)
            message = f"{type(error).__name__}: {error}"
            self._emit(m.CallFailed(self.worker_id, command.call_id, JettisonError.__name__, message))

    def _swap(self, command: m.SwapKV) -> None:
        """Copy between steps; a copy that fails is told of as an incomplete move."""
        started_ns, num_bytes, complete = self._clock_ns(), 0, True
        copy = self._device.swap_out if command.to_host else self._device.swap_in
        try:
            num_bytes = copy(LayerRange(command.layer_lo, command.layer_hi), command.blocks, command.slots)
        except Exception:
            log.exception("swap %d failed", command.move_id)
            complete = False
        duration_ns = self._clock_ns() - started_ns
        self._emit(m.MoveEnded(self.worker_id, command.move_id, complete, num_bytes, duration_ns))

    def _answer(
        self, command: m.OfferLayout | m.ApplyLayout | m.LoadShard | m.FenceWorker | m.ReportMemory
    ) -> m.Event:
        device, call_id = self._device, command.call_id
        match command:
            case m.OfferLayout():
                spec = codec.layout_from_record(command.spec)
                drops = bool(command.spec.retained) or self._changes(spec) == "drop"
                if drops:
                    self._reach("before_drop")
                offer = device.offer_layout(spec, command.live_blocks)
                if drops:
                    self._reach("after_drop")
                return codec.layout_offered(self.worker_id, call_id, offer)
            case m.ApplyLayout():
                spec = codec.layout_from_record(command.spec)
                copies = [(source, target) for source, target in command.copies]
                change = self._changes(spec)
                self._reach("before_remap")
                self._reach(f"before_{change}")
                result = device.apply_layout(spec, command.live_blocks, command.version, copies)
                self._spec = spec
                self._reach("after_remap")
                self._reach(f"after_{change}")
                return codec.layout_applied(self.worker_id, call_id, result, device.memory_report())
            case m.LoadShard():
                device.load_shard_from_disk(command.shard)
                return m.CallDone(self.worker_id, call_id)
            case m.FenceWorker():
                return m.Fenced(self.worker_id, call_id)
            case m.ReportMemory():
                return m.MemoryReported(self.worker_id, call_id, device.memory_report())

    def _changes(self, spec: LayoutSpec) -> str:
        """Which move a layout belongs to, for safepoints: drop, restore, split, or none of them."""
        before = self._spec
        if before is None or spec.shards < before.shards:
            return "drop"
        if spec.shards > before.shards:
            return "restore"
        return "split" if len(spec.kv_layers) > len(before.kv_layers) else "give_back"

    # --- steps

    def _run_step(self, pending: _PendingStep) -> None:
        step = pending.step
        failure = pending.refused
        lost_worker: WorkerId | None = None
        started_ns = self._clock_ns()
        result: object = None
        try:
            arrived = self._take_input(step)
            failure, lost_worker = arrived.failure or failure, arrived.lost_worker
            if failure is None:
                hidden = None if step.prev_worker is None else self._device.hidden_from_bytes(
                    arrived.data, step.num_tokens)
                what = "sample" if step.next_worker is None else "stage"
                self._reach(f"before_{what}")
                result = self._device.run_step(step, hidden)
                self._reach(f"after_{what}")
        except Exception as error:
            log.exception("step %d failed", step.step_id)
            failure = f"{type(error).__name__}: {error}"
        span = started_ns, self._clock_ns()
        if step.next_worker is None:
            self._end_step(step, result, failure, lost_worker, span)
        else:
            self._hand_on(step, step.next_worker, result, failure, lost_worker, span)

    def _take_input(self, step: StepInput) -> Arrived:
        """The stage's input, or why there is none."""
        if step.prev_worker is None:
            return Arrived(EMPTY)
        if not self._inbox.ready(step.step_id):
            self._inbox.forget(step.step_id)
            message = f"worker {step.prev_worker} went away before this step's input was complete"
            return Arrived(EMPTY, message, step.prev_worker)
        return self._inbox.take(step.step_id)

    def _end_step(
        self, step: StepInput, result: object, failure: str | None, lost_worker: WorkerId | None,
        span: tuple[int, int],
    ) -> None:
        if failure is None and not isinstance(result, StepOutput):
            failure = f"the last stage returned {type(result).__name__}"
        if failure is not None:
            self._emit(m.StepFailed(self.worker_id, step.step_id, failure, lost_worker))
        elif isinstance(result, StepOutput):
            self._reach("before_flush")
            self._emit(codec.step_done(self.worker_id, result, result.compute_ns or span[1] - span[0], span))
            self._reach("after_flush")

    def _hand_on(
        self, step: StepInput, next_worker: WorkerId, hidden: object, failure: str | None,
        lost_worker: WorkerId | None, span: tuple[int, int],
    ) -> None:
        if failure is None:
            self._emit(m.StageDone(self.worker_id, step.step_id, span[1] - span[0], *span))
            activation = OutgoingActivation(step.step_id, as_numpy_uint8(hidden))
        else:
            activation = OutgoingActivation.of_failure(step.step_id, failure, lost_worker)
        peer = self._peers.get(next_worker)
        if peer is None:
            # The next stage has lost the same link and ends the step there (rule 6), or is dead.
            log.warning("step %d: no link to worker %d", step.step_id, next_worker)
            return
        peer.activations.append(activation)
        self._send_activations(peer)

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

    # --- links and moves

    def _receive(self, peer: _Peer) -> bool:
        """Take in activations; keep bulk frames for their turn."""
        progressed = False
        for frame in peer.link.poll_frames():
            progressed = True
            if frame.kind is not FrameKind.ACTIVATION:
                peer.bulk_frames.append(frame)
                continue
            with frame:
                try:
                    self._inbox.accept(peer.link.peer, frame)
                except LinkDownError as error:
                    self._distrust(peer, error)
        return progressed

    def _run_bulk(self) -> bool:
        """One bulk turn of every link (rule 4); whether anything happened."""
        progressed = False
        for worker, peer in list(self._peers.items()):
            if peer.bulk_frames:
                self._write_bulk(peer)
                progressed = True
            elif not peer.link.is_open:
                del self._peers[worker]
                self._give_up(worker, peer, peer.link.failure or "closed")
                progressed = True
                continue
            if peer.moves and peer.link.is_open:
                progressed |= self._send_bulk(peer)
        return progressed

    def _write_bulk(self, peer: _Peer) -> None:
        self._reach("before_piece_written")
        with peer.bulk_frames.popleft() as frame:
            try:
                ended = peer.incoming.accept(frame, self._device, self._clock_ns())
            except LinkDownError as error:
                self._distrust(peer, error)
                return
        self._reach("after_piece_written")
        if ended is not None:
            self._emit(ended)

    def _send_bulk(self, peer: _Peer) -> bool:
        move = min(peer.moves, key=lambda move: (not move.cancelled, move.kind))  # the first of the most urgent
        self._reach("before_piece_sent")
        try:
            sent, over = move.send_turn(peer.link, self._device, self._piece_bytes)
        except LinkDownError:
            return True  # the next bulk turn gives the link up
        self._reach("after_piece_sent")
        if over:
            peer.moves.remove(move)
        return sent

    def _start_move(self, command: m.SendKV | m.SendShard) -> None:
        peer = self._peers.get(command.dst_worker)
        if peer is None:
            log.error("move %d: no link to worker %d", command.move_id, command.dst_worker)
            self._emit(m.MoveEnded(self.worker_id, command.move_id, False, 0, 0))
            return
        peer.moves.append(self._outgoing(command))

    def _outgoing(self, command: m.SendKV | m.SendShard) -> OutgoingMove:
        if isinstance(command, m.SendKV):
            return OutgoingKV(command, self._device.kv_block_bytes)
        try:
            return OutgoingShard(command, shard_num_bytes(self._device, command.shard))
        except Exception:
            log.exception("move %d: shard %s is not here", command.move_id, command.shard)
            move = OutgoingShard(command, 0)
            move.fail()
            return move

    def _cancel_move(self, move_id: MoveId) -> None:
        for entry in self._stream:
            if isinstance(entry, m.SendKV | m.SendShard) and entry.move_id == move_id:
                # Nothing of it will be read, so it need not wait for the steps before it.
                self._stream.remove(entry)
                self._start_move(entry)
                break
        for peer in self._peers.values():
            for move in peer.moves:
                if move.move_id == move_id:
                    move.cancel()

    def _distrust(self, peer: _Peer, error: LinkDownError) -> None:
        log.error("closing the link to worker %d: %s", peer.link.peer, error)
        peer.link.close()
        while peer.bulk_frames:
            peer.bulk_frames.popleft().release()

    def _give_up(self, worker: WorkerId, peer: _Peer, why: str) -> None:
        """The link is gone: end what can no longer end by itself (rules 6 and 8)."""
        log.warning("link to worker %d is down: %s", worker, why)
        while peer.bulk_frames:
            peer.bulk_frames.popleft().release()
        peer.link.close()
        for ended in peer.incoming.abandon(self._clock_ns()):
            self._emit(ended)
        for move in peer.moves:
            if not move.begun:
                self._emit(m.MoveEnded(self.worker_id, move.move_id, False, 0, 0))
        self._inbox.forget_partial(worker)
        self._mark_orphans(worker)

    def _mark_orphans(self, worker: WorkerId) -> None:
        """Steps whose input can no longer come from this worker need not wait for it."""
        for entry in self._stream:
            if isinstance(entry, _PendingStep) and entry.step.prev_worker == worker:
                entry.orphaned = not self._inbox.ready(entry.step.step_id)

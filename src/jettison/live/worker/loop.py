"""What a worker does next: steps, control commands and bulk pieces on one thread, in a fixed order of urgency.

Deterministic and without sockets, threads or sleeping: its owner delivers commands, calls ``tick`` until
it returns False, and then waits for a reason to call again. Control events leave through ``emit``; bulk bytes
go over ``transport`` links, which ``live.worker.peers`` serves; when it does is decided here. No torch: tensors pass
through untouched.

What may start next, and which steps cannot run, are rules of the control stream, the same for simulated workers:
rules 1 to 3, 6, 7 and 9 stand in ``core.controlstream``. Here are those on links and transfers.

Rule 4. Whenever no step is ready each link gets a bulk turn: at most one received frame is written and at most
        one piece is sent. Between two steps it gets one, and more until a quarter of a stage's time has passed.
        KV goes before shards, cancellations before both.
        While this worker takes part in a live exchange, links get such turns between two layers of a step, too, and
        while a step waits for a peer's attention: what arrives is then never what the step reads (the core's care).
        While a peer is given parameters, pieces of them go between two layers of any step, for a quarter of their time.
        Those need none of that on a device that computes by itself: while it computes a step that is all launched,
        links get turns as if no step were ready, and between that step and the next one none.
Rule 5. Memory is written by received pieces only in those turns. No step that may be under way then reads or writes
        that memory, as the core does not know where among the steps here a piece arrives: a transfer's blocks are in no
        step from its beginning to its end, but where a peer attends to them in this worker's place, and a shard is in
        none before it is complete. Nor does such a step write what is being sent: it was written by steps that had run
        before the transfer began. Layouts change between steps alone. (docs/decisions.md, "Links")
Rule 8. A transfer ends with exactly one TransferEnded, and its *destination* tells. Only when the destination can
        not have heard of the transfer (no link, or the link failed before TRANSFER_BEGIN) does the source tell. Both
        then tell of a link that failed (``ports.LinkLost``), and the core ends what neither has told of.
        A layout without some shard ends what is being sent of it from here.

A step's one end (rule 6) is a StepDone, a StepFailed or a StepAbandoned. Only a dead worker gives none, and of that the
controller hears from the operating system. Where a stage has no link to the next one, and never had, it reports the
failure itself: the next one knows of no loss.
A fence (rule 7) closes the link to the lost worker: no piece it sent is written any more. Nor is sent what still waits
to be sent to it: its next life may be linked by then, and the blocks be other requests'. The core has ended these
transfers itself.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from jettison.core import ports
from jettison.core.controlstream import (
    ABANDONED,
    MAX_GROUPS_KNOWN,
    ControlStream,
    Failure,
    GroupEpochs,
    Kind,
    StepEntry,
)
from jettison.device.step import Running, Shed, StepInput, StepOutput
from jettison.errors import JettisonError, WorkerLostError
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.live.wire.stepflag import StepFlag
from jettison.live.worker.activations import OutgoingActivation
from jettison.live.worker.behind import Behind
from jettison.live.worker.beside import serve_beside
from jettison.live.worker.copies import Copier, Copies, CopyTurns, copy_kind
from jettison.live.worker.device_port import Device
from jettison.live.worker.doors import Doors
from jettison.live.worker.failpoints import Failpoint, layout_change, nowhere
from jettison.live.worker.peers import Emit, Peers
from jettison.live.worker.stepends import ended_early, why_failed
from jettison.memory.layout import LayoutSpec
from jettison.transport.link import Link
from jettison.types import TransferId, WorkerId

log = logging.getLogger(__name__)

_Call = ports.OfferLayout | ports.ApplyLayout | ports.FenceWorker | m.ReportMemory
_InPieces = ports.LoadShard | ports.KeepShard
_Command = _Call | ports.Transfer | _InPieces

_KINDS: dict[type, Kind] = {
    ports.OfferLayout: Kind.OFFER_LAYOUT, ports.ApplyLayout: Kind.APPLY_LAYOUT, ports.LoadShard: Kind.LOAD,
    ports.KeepShard: Kind.LOAD, m.ReportMemory: Kind.REPORT, ports.FenceWorker: Kind.FENCE,
}


class _Loading(NamedTuple):
    """A shard on its way from the model folder, or to or from the machine's copy."""

    command: _InPieces
    pieces: Iterator[None]


class WorkerLoop:
    """One worker's share of the work. See the module's rules."""

    def __init__(
        self,
        worker_id: WorkerId,
        device: Device,
        links: Mapping[WorkerId, Link],
        emit: Emit,
        piece_bytes: int = 1 << 20,
        adapt_pieces: bool = False,
        coordinate: bool = True,
        shares_clock: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        failpoint: Failpoint = nowhere,
        wait: Callable[[], None] | None = None,
        copier: Copier | None = None,
        flag: StepFlag | None = None,
        doors: Doors | None = None,
        receive: Callable[[], Iterable[m.Command]] = tuple,
    ) -> None:
        """``piece_bytes``: the most a bulk piece has; ``adapt_pieces``: less where the link is slow (``.pieces``).
        ``shares_clock``: peers' times can be compared with this one's. ``coordinate=False``: a bulk turn sends all that
        the link takes (for comparison only). ``wait``: returns when a link may have something new (None: watch their
        descriptors). ``copier``: copies beside steps (None: between them, in turns). ``flag``: names the step to be
        given up (None: steps run to their ends). ``doors``: links to peers that the controller names are opened when
        they are first used (None: there are ``links`` alone). ``receive``: commands that have come, for a look inside a
        step.
        """
        self.worker_id = worker_id
        self.stopped = False
        self._device = device
        self._emit = emit
        self._clock_ns = clock_ns
        self._reach = failpoint
        self._flag = flag
        self._spec: LayoutSpec | None = None
        """The layout in force, once one has been applied."""
        self._stream: ControlStream[StepInput, _Command] = ControlStream(self._has_input)
        self._epochs = GroupEpochs(MAX_GROUPS_KNOWN)
        self._bulk_turn = self._had_turns = self._has_prepared = False
        """Links are to get turns; they have had some, beside the last step."""
        self._loading: _Loading | None = None
        self._keeps_foreign_kv = False
        """Peers may ask for attention over layers that are not run here any more."""
        self._peers = Peers(
            worker_id, device, emit, self._stream.orphan, piece_bytes=piece_bytes, adapt_pieces=adapt_pieces,
            coordinate=coordinate, shares_clock=shares_clock, clock_ns=clock_ns, failpoint=failpoint, wait=wait,
            doors=doors,
        )
        self._behind = Behind(device, self._stream, receive, self.deliver)
        self._copies = Copies(device, emit, copier or CopyTurns(piece_bytes, clock_ns), failpoint)
        self._inbox = self._peers.inbox
        self._attention = self._peers.attention
        for peer, link in links.items():
            self.attach_link(peer, link)

    # --- what the owner calls

    def deliver(self, command: m.Command) -> None:
        """Take the next command of the control stream. Raises CodecError for a step that cannot be read."""
        match command:
            case m.Step():
                self._deliver_step(codec.decode_step(command.payload))
            case ports.CancelTransfer():
                self._cancel_transfer(command.transfer_id)
            case ports.FenceWorker():
                self._peers.fence(command.lost, command.lost_life)
                self._stream.orphan(command.lost)
                self._stream.withdraw_transfers(lambda transfer: _goes_to(transfer, command.lost))
                self._stream.append_command(command, Kind.FENCE)
            case m.KnowPeers():
                self._peers.know(command.peers)
            case m.ForgetPeer():
                self._peers.forget(command.worker_id, command.life)
            case m.AdoptWeights():
                self._device.adopt_weights(command.identity)
            case m.Stop():
                self.stopped = True
            case m.Certificate() | m.TakeOver():
                pass  # it came before this loop began
            case ports.SendKV() if command.dst == self.worker_id:
                self._stream.append_command(command, copy_kind(command), command.transfer_id)
            case ports.SendKV() | ports.SendShard():
                settled = isinstance(command, ports.SendKV) and command.is_settled
                kind = Kind.SETTLED_TRANSFER if settled else Kind.TRANSFER
                self._stream.append_command(command, kind, command.transfer_id)
            case ports.ApplyLayout() if command.gives_back:
                self._stream.append_command(command, Kind.GIVE_BACK)
            case _:
                self._stream.append_command(command, _KINDS[type(command)])

    def tick(self) -> bool:
        """Do at most one unit of work, the most urgent that is ready; whether anything was done.

        A unit is one step, one control command, or the bulk turns after one, with a piece of a shard that is being
        loaded. Activations go in every tick: they are what the next stage waits for.
        """
        if self.stopped:
            return False
        progressed = self._peers.serve_urgent()
        progressed |= self._copies.serve()
        if self._bulk_turn:
            self._bulk_turn = False
            was_bulk = not self._had_turns and self._peers.run_bulk_between_steps()
            self._had_turns = False
            if (self._stream.owes_piece and self._load_piece()) or was_bulk:
                return True
        if self._behind.entry is not None:
            self._bulk_turn = True
            self._run_step(self._behind.entry)
            return True
        entry = self._stream.next_entry()
        if entry is None:
            was_bulk = self._peers.run_bulk()
            return self._load_piece() or was_bulk or progressed
        self._stream.begin(entry)
        self._bulk_turn = True
        if isinstance(entry, StepEntry):
            self._run_step(entry)
        else:
            self._run_command(entry.command)
        return True

    def serve(self) -> bool:
        """All that links ask for, steps and commands apart; whether there was anything."""
        return self._peers.serve()

    def attach_link(self, peer: WorkerId, link: Link, life: int = 0) -> None:
        """Use ``link`` for this peer from now on (a restarted worker); an older one is closed and given up."""
        self._peers.attach(peer, link, life)

    def hold_steps(self, held: bool) -> None:
        """Begin no step from now on, or again: so that what has to meet does. What waits for steps waits with them."""
        self._stream.holds_steps = held

    @property
    def links(self) -> dict[WorkerId, Link]:
        """The links in use; those that failed are gone from it."""
        return self._peers.links

    @property
    def links_fd(self) -> int:
        """Readable when a link or a connecting peer has something for ``tick``."""
        return self._peers.fileno()

    @property
    def copies_fd(self) -> int | None:
        """Readable when a copy beside steps has ended and ``tick`` has to tell; None without a thread that copies."""
        return self._copies.fileno()

    def close(self) -> None:
        """Stop copying and close the links. The device belongs to the caller. Idempotent."""
        self.stopped = True
        self._copies.close()
        self._behind.close()
        self._loading = None
        self._peers.close()

    # --- control stream

    def _deliver_step(self, step: StepInput) -> None:
        previous = step.prev_worker
        if previous is not None:
            self._inbox.expect(step.step_id)
        is_linked = previous is None or previous in self._peers
        refusal = self._epochs.refusal(step.group_id, step.epoch)
        self._stream.append(self._stream.admit(step, previous, refusal, is_linked=is_linked))

    def _has_input(self, step: StepInput) -> bool:
        return self._inbox.ready(step.step_id)

    def _run_command(self, command: _Command) -> None:
        if isinstance(command, ports.SendKV) and command.dst == self.worker_id:
            if command.beside_steps:
                self._copies.begin(command)
            else:
                self._copy(command)
            return
        if isinstance(command, ports.Transfer):
            self._peers.start_transfer(command)
            return
        if isinstance(command, _InPieces):
            # Its first piece comes in the turn that follows every command.
            device, is_load = self._device, isinstance(command, ports.LoadShard)
            pieces = (device.loading_shard_from_disk if is_load else device.keeping_shard)(command.shard)
            self._loading = _Loading(command, pieces)
            return
        try:
            self._emit(self._answer(command))
        except WorkerLostError:
            # The device could not put its memory back: nothing it holds can be trusted, so this worker ends.
            raise
        except Exception as error:  # noqa: BLE001  # logged by _failure_of
            self._emit(self._failure_of(command, error))

    def _failure_of(self, command: _Call | _InPieces, error: Exception) -> ports.CallFailed:
        if isinstance(error, JettisonError):
            name, message = type(error).__name__, str(error)
        else:
            log.exception("%s failed", type(command).__name__)
            name, message = JettisonError.__name__, f"{type(error).__name__}: {error}"
        return ports.CallFailed(self.worker_id, command.call_id, f"{name}: {message}")

    def _load_piece(self) -> bool:
        """Load the next piece of a shard (rule 2); whether one was being loaded."""
        if self._loading is None:
            return False
        self._stream.note_piece()
        command, pieces = self._loading
        what = "load" if isinstance(command, ports.LoadShard) else "keep"
        self._reach(f"before_{what}")
        try:
            next(pieces)
            self._reach(f"after_{what}")
            return True
        except StopIteration:
            if what == "load":
                self._reach("after_check")
            self._emit(ports.ShardLoaded(self.worker_id, command.call_id))
        except WorkerLostError:
            raise
        except Exception as error:  # noqa: BLE001  # logged by _failure_of
            self._emit(self._failure_of(command, error))
        self._loading = None
        self._stream.end_load()
        return True

    def _copy(self, command: ports.SendKV) -> None:
        """Copy between steps; a copy that fails is told of as an incomplete transfer."""
        started_ns, num_bytes, complete = self._clock_ns(), 0, True
        layers, src, dst = command.layers, command.src_blocks, command.dst_blocks
        try:
            if command.to_host:
                num_bytes = self._device.copy_to_host(layers, src, dst)
            else:
                num_bytes = self._device.copy_from_host(layers, dst, src)
        except WorkerLostError:
            raise
        except Exception:
            log.exception("copy %d failed", command.transfer_id)
            complete = False
        duration_ns = self._clock_ns() - started_ns
        self._emit(ports.TransferEnded(command.transfer_id, complete, num_bytes, duration_ns))

    def _answer(self, command: _Call) -> m.Event:
        device, call_id = self._device, command.call_id
        match command:
            case ports.OfferLayout():
                spec = command.spec
                drops = bool(spec.retained) or layout_change(self._spec, spec) == "drop"
                if drops:
                    self._reach("before_drop")
                offer = device.offer_layout(spec, command.live_blocks)
                if drops:
                    self._reach("after_drop")
                return ports.LayoutOffered(self.worker_id, call_id, offer)
            case ports.ApplyLayout():
                spec = command.spec
                change = layout_change(self._spec, spec)
                self._reach("before_remap")
                self._reach(f"before_{change}")
                with self._copies.halted():
                    result = device.apply_layout(spec, command.live_blocks, command.version, list(command.copies))
                    self._copies.change_layout(spec.kv_layers, device.capacity_blocks, command.copies)
                self._peers.forget_shards(spec.shards)
                self._keeps_foreign_kv = bool(spec.retained)
                self._spec = spec
                self._reach("after_remap")
                self._reach(f"after_{change}")
                self._emit(m.MemoryReported(self.worker_id, call_id, device.memory_report()))
                return ports.LayoutApplied(self.worker_id, call_id, result)
            case ports.FenceWorker():
                return ports.WorkerFenced(self.worker_id, call_id)
            case m.ReportMemory():
                return m.MemoryReported(self.worker_id, call_id, device.memory_report())

    # --- steps

    def _run_step(self, entry: StepEntry[StepInput]) -> None:
        step = entry.step
        started_ns = self._clock_ns()
        result: object = None
        failure: Failure | None = None
        delay_ns, kept_layers = 0, None
        try:
            hidden, failure, delay_ns, kept_layers = self._take_input(entry)
            step = entry.step
            if failure is None:
                what = "sample" if step.next_worker is None else "stage"
                self._reach(f"before_{what}")
                result = self._compute(step, hidden, self._behind.take(entry))
                if isinstance(result, Shed):
                    kept_layers, result = result
                    failure = Failure.of_kept(kept_layers) if result is None else None
                elif result is None and step.safepoint_layers:
                    failure = ABANDONED
                self._reach(f"after_{what}")
                if failure is not None:
                    self._reach("before_abandon")
        except WorkerLostError:
            raise  # the device has failed for good, so this worker ends
        except Exception as error:  # noqa: BLE001  # logged by why_failed
            failure = why_failed(step, error)
        span = started_ns, self._clock_ns()
        compute_ns = span[1] - span[0]
        waited_ns, self._attention.waited_ns = self._attention.waited_ns, 0
        times = *span, delay_ns, waited_ns
        # What waits behind a piece is the next stage; with remote attention each layer waits twice, there and back.
        num_waits = 2 * (step.layer_hi - step.layer_lo) if step.remote or self._keeps_foreign_kv else 1
        self._peers.stage_ns = (3 * self._peers.stage_ns + (compute_ns - waited_ns) // num_waits) // 4
        if step.next_worker is not None:
            self._hand_on(step, step.next_worker, result, failure, kept_layers)  # first: the next stage waits for it
            if failure is None:
                self._emit(m.StageDone(self.worker_id, step.step_id, compute_ns, *times, self._has_prepared))
            return
        if failure is None and not isinstance(result, StepOutput):
            failure = Failure(f"the last stage returned {type(result).__name__}")
        if failure is not None:
            nothing = ports.StepCompleted(step.step_id, [], {}, compute_ns, failure.kept_layers)
            kept = m.StepDone(self.worker_id, nothing, *times)
            self._emit(ended_early(step.step_id, failure, kept))
            if failure.abandoned or failure.kept_layers is not None:
                self._reach("after_abandon")
        elif isinstance(result, StepOutput):
            self._reach("before_flush")
            completed = ports.StepCompleted(
                result.step_id, result.tokens, result.prompt_logprobs, result.compute_ns or compute_ns, kept_layers,
                self._has_prepared)
            done = m.StepDone(self.worker_id, completed, *times, *result.routed)
            for event in codec.step_answer(done):
                self._emit(event)
            self._reach("after_flush")

    def _compute(self, step: StepInput, hidden: object, started: Running | None) -> object:
        """Run the stage, which may have been started already; None where it was given up at a safepoint.

        A device that computes by itself leaves this thread to its peers meanwhile (rules 4 and 5).
        """
        attention, peers, by_itself = self._attention, self._peers, self._device.computes_by_itself
        attention.is_live = bool(step.remote) or self._keeps_foreign_kv
        sends_shards = not by_itself and peers.sends_shards
        if not attention.is_live and sends_shards:
            peers.begin_layers()
        port = attention if attention.is_live or sends_shards or (peers.is_opening and not by_itself) else None
        flag = self._flag
        gives_up = None if flag is None or not step.safepoint_layers else lambda: flag.names(step.step_id)
        running = started or self._device.start_step(step, hidden, port, gives_up)
        try:
            self._had_turns = serve_beside(running, peers, self._behind, self._device.ahead)
        except Exception:
            with contextlib.suppress(Exception):  # no step is left running beside what comes next
                running.result()
            raise
        result, self._has_prepared = running.result(), running.has_prepared
        return result

    def _take_input(self, entry: StepEntry[StepInput]) -> tuple[object, Failure | None, int, int | None]:
        """The stage's input, or why it is not computed; how long it was on its way; and after how many layers the first
        stage has kept rows, if it has: the entry's step is of the others from now on."""
        step = entry.step
        if step.prev_worker is None:
            return None, entry.failure, 0, None
        if entry.orphaned:
            self._inbox.forget(step.step_id)
            return None, entry.failure, 0, None
        arrived = self._inbox.take(step.step_id)
        if arrived.failure is not None:
            return None, arrived.failure, 0, None
        delay_ns = self._peers.delay_ns(step.prev_worker, arrived.transit_ns)
        if arrived.kept_layers is not None:
            entry.step = step = step.leading(step.sheds_from or 0)
        hidden = self._device.hidden_from_bytes(arrived.data, step.num_tokens)
        return hidden, entry.failure, delay_ns, arrived.kept_layers

    def _hand_on(
        self, step: StepInput, next_worker: WorkerId, hidden: object, failure: Failure | None, kept_layers: int | None
    ) -> None:
        if failure is None:
            data = self._device.hidden_to_bytes(hidden)
            activation = OutgoingActivation(step.step_id, data, self._clock_ns(), kept_layers=kept_layers)
        else:
            activation = OutgoingActivation.of_failure(step.step_id, failure)
        if next_worker not in self._peers:
            log.warning("step %d: no link to worker %d", step.step_id, next_worker)
            if next_worker in self._peers.parted:
                return  # the next stage has lost the same link and ends the step there (rule 6), or is dead
            failure = failure or Failure(f"no link to worker {next_worker}, the next stage", next_worker)
            self._emit(ended_early(step.step_id, failure))
            return
        self._peers.post(next_worker, activation)

    # --- withdrawals

    def _cancel_transfer(self, transfer_id: TransferId) -> None:
        command = self._stream.withdraw(transfer_id)
        if isinstance(command, ports.SendKV) and command.dst == self.worker_id:
            self._copies.refuse(command)
        elif isinstance(command, ports.Transfer):
            self._peers.start_transfer(command)
        if not self._copies.cancel(transfer_id):
            self._peers.cancel_transfer(transfer_id)


def _goes_to(command: _Command, worker: WorkerId) -> bool:
    return isinstance(command, ports.Transfer) and command.dst == worker

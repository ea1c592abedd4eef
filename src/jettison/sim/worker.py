"""One modelled worker: its control stream, its memory, and the one thread that takes turns with both.

It models ``live.worker.loop``. Both have a ``core.controlstream``, which says which entry may start next, which steps
cannot run and what a fence does (rules 1 to 3, 6 and 7); rules 4, 5 and 8, on links, are in ``live.worker.loop``.
``sim.executor`` and the profile say how long work takes; bytes travel in ``sim.transfers``, and beside steps in
``sim.copies`` (rule 9).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

from jettison.core import ports
from jettison.core.controlstream import ABANDONED, ControlStream, Failure, GroupEpochs, StepEntry
from jettison.errors import JettisonError
from jettison.sim.copies import SimCopies
from jettison.sim.links import host_of
from jettison.sim.loop import Scheduled
from jettison.sim.memory import ModelledMemory
from jettison.sim.network import FlowClass
from jettison.sim.plant import Plant, far_ns
from jettison.sim.tasks import (
    TOKEN,
    Command,
    Running,
    ShardLoading,
    StageTask,
    StepRun,
    ended_early,
    kind_of,
)
from jettison.sim.transfers import Transfer, TransferEnd
from jettison.types import NANOSECONDS, LayerRange, ShardId, TransferId, WorkerId


class SimWorker:
    """A worker id, one life after the other. ``make_memory``: the memory of a new life, with the layers of its home."""

    def __init__(self, worker_id: WorkerId, plant: Plant, make_memory: Callable[[], ModelledMemory]) -> None:
        self.worker_id = worker_id
        self.life = 0
        self.alive = True
        self.slowness = 1.0
        """A step's time here over its undisturbed time."""
        self.extra_hop_ns = 0
        """Delay of all of its reports to the controller."""
        self.last_report_ns = 0
        self.num_steps = 0
        self.busy_ns = 0
        self.memory = make_memory()
        self.filled: set[ShardId] = set(self.memory.shards)
        """Mapped shards that hold their bytes."""
        self._plant = plant
        self._make_memory = make_memory
        self._stream: ControlStream[StageTask, Command] = ControlStream(attrgetter("has_input"))
        self._epochs = GroupEpochs()
        self._free_ns = 0
        self._flag: int | None = None
        """The step to be given up (``live.wire.stepflag``)."""
        self._kept: tuple[int, int] | None = None
        """The step whose rows are kept, and the layers that these have behind them."""
        self._sampled_in: int | None = None
        """The last step that sampled here."""
        self._running: Running | None = None
        self._wake: Scheduled | None = None
        self._loading: ShardLoading | None = None
        self._copies = SimCopies(
            plant.loop, lambda: self.memory, plant.profile, plant.transfers.network.topology.host, self._tell_copy
        )
        self._shards_out: dict[TransferId, ShardId] = {}
        """Shards being sent from here."""
        self._runnable: set[LayerRange] = set()
        """Layer ranges that have been found complete in the present layout."""

    # --- life -------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """Stop at once. Reports already sent are on their way."""
        self.alive = False
        self.life += 1
        self._stream.clear()
        self._copies.clear()
        self._shards_out.clear()
        self._loading = None
        if self._running is not None and self._running.end_ns > self._plant.loop.now_ns:
            self._running.end.cancel()
        self._running = None
        if self._wake is not None:
            self._wake.cancel()

    def rise(self) -> None:
        """A new life: the layers of its home are mapped, and empty."""
        self.alive = True
        self.memory = self._make_memory()
        self.filled = set()
        self._free_ns = self.last_report_ns = self._plant.loop.now_ns
        self._flag = self._sampled_in = self._kept = None
        self._epochs.clear()
        self._runnable.clear()

    # --- control stream ---------------------------------------------------------------------------------------

    def deliver_step(self, run: StepRun, index: int, arrives_ns: int) -> None:
        """Take a step of the control stream."""
        task, step = StageTask(run, index, has_input=index == 0), run.step
        previous = task.previous
        is_linked = previous is None or self._plant.is_linked(previous, self.worker_id)
        refusal = self._epochs.refusal(step.group_id, step.epoch)
        entry = self._stream.admit(task, previous, refusal, is_linked=is_linked, arrives_ns=arrives_ns)
        is_idle = self._free_ns <= arrives_ns and not self._stream and self._wake_ns() is None and not self._copies
        if is_idle and self._stream.is_ready(entry) and not self._plant.shares_cores:
            self._run_step(entry, arrives_ns)  # nothing can come between: one event less
            return
        self._stream.append(entry)
        self._wake_at(arrives_ns)

    def is_busy(self, now_ns: int) -> bool:
        """It is computing, copying or loading."""
        return self.alive and self._free_ns > now_ns

    def can_fast_forward(self, arrives_ns: int) -> bool:
        """A step that arrives then would start at once, and need not be reported by itself."""
        return (
            self.alive and not self._stream and self._free_ns <= arrives_ns and not self.memory.has_intact_shards
            and not self._copies
        )

    def hold(self, run: StepRun, end: Scheduled, end_ns: int) -> None:
        """Compute steps of a lone stage until a time; ``end`` reports the last one (``sim.fastforward``)."""
        self._free_ns = end_ns
        self._running = Running(StageTask(run, 0, has_input=True), end, end_ns)

    def count_steps(self, num_steps: int, busy_ns: int) -> None:
        """Count steps that were not run one by one."""
        self.num_steps += num_steps
        self.busy_ns += busy_ns

    def deliver(self, command: Command, arrives_ns: int) -> None:
        """Take a command of the control stream; a command sent to a dead worker reaches no later life."""
        if self.alive:
            transfer_id = command.transfer_id if isinstance(command, ports.SendKV | ports.SendShard) else None
            self._stream.append_command(command, kind_of(command), transfer_id, arrives_ns)
            self._wake_at(arrives_ns)

    def abandon(self, step_id: int) -> None:
        """Set the flag to a step: a step that has not begun is given up when it begins, one being computed at its next
        safepoint. A step that may shed rows sheds them there."""
        self._flag = step_id
        running, now_ns = self._running, self._plant.loop.now_ns
        if running is None or running.end_ns <= now_ns or not running.task.heeds(step_id):
            return
        plant, num_layers = self._plant, self._plant.shape.num_layers
        stop = running.next_safepoint(plant.executor, self.worker_id, num_layers, now_ns)
        if stop is None:
            return
        running.end.cancel()
        task, (end_ns, layer), self.last_report_ns = running.task, stop, running.reported_ns
        failure: Failure | None = ABANDONED
        if task.run.step.sheds_from is not None:
            failure = task.shed(layer)
            self._kept = task.kept_after(self._kept)
            took_ns = task.stage_ns(plant.executor, self.worker_id, num_layers) * task.slowness
            end_ns = end_ns if failure is not None else running.start_ns + round(took_ns)
        self.busy_ns -= running.end_ns - end_ns
        self._free_ns = end_ns
        self._finish(task, running.start_ns, end_ns, failure)
        self._wake_at(end_ns)

    def cancel_transfer(self, transfer_id: TransferId) -> None:
        """Rule 4: cancellations go before everything. A transfer that has not begun ends at once, with 0 bytes."""
        command = self._stream.withdraw(transfer_id)
        if isinstance(command, ports.SendKV | ports.SendShard):
            self._tell_end(command, TransferEnd(False, 0, 0))
        elif not self._copies.cancel(transfer_id):
            self._plant.transfers.cancel(self.worker_id, transfer_id)

    def take_input(self, run: StepRun, failure: Failure | None) -> None:
        """Take input, or a failure in its place, from the stage before."""
        for entry in self._stream.steps():
            if entry.step.run is run and not entry.orphaned:
                entry.step.has_input = True
                entry.failure = failure or entry.failure
                self._wake_at(self._plant.loop.now_ns)
                return

    def lose_link(self, peer: WorkerId) -> None:
        """The link to a peer is lost: steps that wait for its output fail, and a running step that attends to its
        KV."""
        self._stream.orphan(peer)
        now_ns = self._plant.loop.now_ns
        running = self._running
        if running is not None and running.end_ns > now_ns:
            if any(far.src == peer for far in running.task.run.far.get(self.worker_id, ())):
                running.end.cancel()
                self._free_ns = now_ns
                message = f"the link to worker {peer}, which holds KV that this step needs, is down"
                self._finish(running.task, now_ns, now_ns, Failure(message, peer, True))
        self._wake_at(now_ns)

    def _wake_ns(self) -> int | None:
        return self._wake.time_ns if self._wake is not None and self._wake.is_pending else None

    def _wake_at(self, time_ns: int) -> None:
        if not self._stream:
            return
        time_ns = max(time_ns, self._free_ns)
        planned = self._wake_ns()
        if planned is not None and planned <= time_ns:
            return
        if planned is not None and self._wake is not None:
            self._wake.cancel()
        self._wake = self._plant.loop.at(time_ns, self._work)

    def _work(self) -> None:
        """Start entries that may start, one after the other, until one takes time."""
        now_ns = self._plant.loop.now_ns
        while self.alive and self._free_ns <= now_ns:
            entry = self._stream.next_entry(now_ns)
            if self._loading is not None and (entry is None or self._stream.owes_piece):
                self._load_piece(self._loading, now_ns)
                continue
            if entry is None:
                break
            self._stream.begin(entry)
            if isinstance(entry, StepEntry):
                self._run_step(entry, now_ns)
            else:
                self._run_command(entry.command, now_ns)
        if self._free_ns > now_ns:
            self._wake_at(self._free_ns)
        elif (next_ns := self._stream.next_arrival_ns(now_ns)) is not None:
            self._wake_at(next_ns)

    # --- steps ------------------------------------------------------------------------------------------------

    def _run_step(self, entry: StepEntry[StageTask], start_ns: int) -> None:
        task, plant = entry.step, self._plant
        run = task.run
        stage = run.step.stages[task.index]
        failure = entry.failure or self._why_not(run, stage.layers) or task.why_lost(self._kept)
        follows = run.step.follows
        if failure is None and follows is not None:
            if follows.step_id != self._sampled_in:
                failure = Failure.of_lost_tokens(follows.step_id)
            elif entry.arrives_ns < start_ns:
                run.load = run.load._replace(hides_host=True)
        verdict = None
        if failure is None:
            verdict = task.begin()
        if failure is None and self._flag is not None and task.heeds(self._flag):
            verdict = None
            failure = ABANDONED if run.step.sheds_from is None else task.shed(0)
        self._kept = task.kept_after(self._kept)
        if failure is not None:
            self._finish(task, start_ns, start_ns, failure)
            return
        if self.worker_id in run.high_blocks:
            self.memory.note_written(run.high_blocks[self.worker_id])
        task.number = self.num_steps
        took_ns = task.stage_ns(plant.executor, self.worker_id, plant.shape.num_layers)
        slowness = self.slowness * plant.slowdown()
        if slowness != 1.0:
            took_ns = round(took_ns * slowness)
        for far in run.far.get(self.worker_id, ()):
            took_ns += far_ns(plant, self.worker_id, far)
        took_ns = self._copies.slowed_ns(took_ns)
        task.slowness = slowness
        self.num_steps += 1
        self.busy_ns += took_ns
        self._free_ns = start_ns + took_ns
        if task.is_last:
            self._sampled_in = run.step.step_id
        self._finish(task, start_ns, self._free_ns, verdict)

    def _why_not(self, run: StepRun, layers: LayerRange) -> Failure | None:
        if layers not in self._runnable:
            if not self._plant.shape.shards_for(layers) <= self.filled:
                return Failure(f"layers {layers.lo} to {layers.hi} are not all resident here")
            self._runnable.add(layers)
        for far in run.far.get(self.worker_id, ()):
            if not self._plant.is_linked(self.worker_id, far.src):
                return Failure(f"no link to worker {far.src}, which holds KV that this step needs", far.src, True)
        return None

    def _finish(self, task: StageTask, start_ns: int, end_ns: int, failure: Failure | None) -> None:
        plant, step = self._plant, task.run.step
        reported_ns = self.last_report_ns
        if not task.is_last:
            if end_ns <= plant.loop.now_ns:
                self._hand_on(task, start_ns, failure)
                return
            end = plant.loop.at(end_ns, lambda: self._hand_on(task, start_ns, failure))
        elif failure is not None:
            end = plant.report(self.worker_id, ended_early(step.step_id, failure, end_ns - start_ns), end_ns)
        else:
            if len(step.stages) > 1 or plant.is_watched:
                self._note_stage(task, start_ns, end_ns)
            tokens = [TOKEN] * task.run.load.num_samples
            completed = ports.StepCompleted(step.step_id, tokens, {}, end_ns - start_ns, task.run.kept_layers)
            end = plant.report(self.worker_id, completed, end_ns)
        self._running = Running(task, end, end_ns, start_ns, reported_ns=reported_ns)

    def _note_stage(self, task: StageTask, start_ns: int, end_ns: int) -> None:
        """Report the last stage's times: at once, unless its step may still be given up."""
        plant, step_id = self._plant, task.run.step.step_id
        if not task.heeds(step_id):
            plant.note_stage(self.worker_id, step_id, start_ns, end_ns)
            return

        def note() -> None:
            running = self._running
            if running is not None and running.task is task and running.end_ns == end_ns:
                plant.note_stage(self.worker_id, step_id, start_ns, end_ns)

        plant.loop.at(end_ns, note)

    def _hand_on(self, task: StageTask, start_ns: int, failure: Failure | None) -> None:
        plant, run = self._plant, task.run
        now_ns, here = plant.loop.now_ns, self.worker_id
        following = run.step.stages[task.index + 1].worker_id
        if failure is None:
            plant.note_stage(here, run.step.step_id, start_ns, now_ns)
        if not plant.is_linked(here, following):
            return  # the next stage has lost the same link and ends the step there, or is dead
        peer = plant.worker(following)
        if failure is not None:
            latency_ns = plant.transfers.network.latency_ns(here, following)
            plant.loop.after(latency_ns, lambda: peer.take_input(run, failure))
            return
        life = peer.life, self.life

        def arrive() -> None:
            if (peer.life, self.life) == life:
                plant.note_activation(plant.loop.now_ns - now_ns)
                peer.take_input(run, None)

        num_bytes = run.load.num_tokens * plant.shape.hidden_size * plant.shape.dtype_bytes
        plant.transfers.send_activation(here, following, num_bytes, arrive)

    # --- commands ---------------------------------------------------------------------------------------------

    def _run_command(self, command: Command, now_ns: int) -> None:
        match command:
            case ports.SendKV() if command.src == command.dst and command.beside_steps:
                self._copies.begin(command)
            case ports.SendKV() if command.src == command.dst:
                self._copy(command, now_ns)
            case ports.SendKV() | ports.SendShard():
                self._send(command)
            case ports.LoadShard() | ports.KeepShard():
                self._load(command, now_ns)
            case ports.FenceWorker():
                self._answer(ports.WorkerFenced(self.worker_id, command.call_id), now_ns)
            case ports.OfferLayout() | ports.ApplyLayout():
                try:
                    self._change_layout(command, now_ns)
                except JettisonError as error:
                    message = f"{type(error).__name__}: {error}"
                    self._answer(ports.CallFailed(self.worker_id, command.call_id, message), now_ns)

    def _answer(self, event: ports.Event, at_ns: int) -> None:
        self._free_ns = max(self._free_ns, at_ns)
        self._plant.report(self.worker_id, event, at_ns)

    def _change_layout(self, command: ports.OfferLayout | ports.ApplyLayout, now_ns: int) -> None:
        if isinstance(command, ports.OfferLayout):
            offer = self.memory.offer(command.spec, command.live_blocks)
            self._answer(ports.LayoutOffered(self.worker_id, command.call_id, offer), now_ns)
            return
        result = self.memory.apply(command.spec, command.live_blocks, command.version, command.copies)
        took_s = self._plant.profile.remap_cost_s(max(1, abs(result.bytes_to_kv)), result.num_map_calls)
        copied = len(command.copies) * self.memory.sizes.kv_block_bytes * len(command.spec.kv_layers)
        took_s += self._plant.profile.device_copy_cost_s(copied)
        took_ns = round(took_s * NANOSECONDS)
        self.filled = (self.filled & command.spec.shards) | result.intact_shards
        for transfer_id in [transfer_id for transfer_id, shard in self._shards_out.items() if shard not in self.filled]:
            self._plant.transfers.cancel(self.worker_id, transfer_id)
        self._runnable.clear()
        self._copies.follow_layout(command.copies, now_ns + took_ns)
        result = replace(result, duration_ns=took_ns)
        self._answer(ports.LayoutApplied(self.worker_id, command.call_id, result), now_ns + took_ns)

    def _load(self, command: ports.LoadShard | ports.KeepShard, now_ns: int) -> None:
        """Rule 2: in pieces, one between two steps."""
        is_load, profile = isinstance(command, ports.LoadShard), self._plant.profile
        if command.shard not in (self.memory.shards if is_load else self.filled):
            self._stream.end_load()
            self._answer(ports.CallFailed(self.worker_id, command.call_id, f"{command.shard} is not here"), now_ns)
            return
        num_bytes = self._plant.shape.shard_bytes[command.shard]
        in_memory = not is_load or command.shard in self._plant.shared_copy(self.worker_id)
        took_s = (profile.host_copy_cost_s if in_memory else profile.disk_cost_s)(num_bytes)
        self._loading = ShardLoading.begin(command, num_bytes, took_s)

    def _load_piece(self, loading: ShardLoading, now_ns: int) -> None:
        self._stream.note_piece()
        end_ns = self._free_ns = now_ns + loading.take_piece()
        if not loading.left_ns:
            self._loading = None
            self._stream.end_load()
            is_load = isinstance(loading.command, ports.LoadShard)
            (self.filled if is_load else self._plant.shared_copy(self.worker_id)).add(loading.command.shard)
            self._answer(ports.ShardLoaded(self.worker_id, loading.command.call_id), end_ns)

    def _copy(self, command: ports.SendKV, now_ns: int) -> None:
        num_bytes = len(command.layers) * len(command.src_blocks) * self.memory.sizes.kv_block_bytes
        if not self._plant.has_copy_engine:
            took_ns = round(self._plant.profile.host_copy_cost_s(num_bytes) * NANOSECONDS)
            self._answer(ports.TransferEnded(command.transfer_id, True, num_bytes, took_ns), now_ns + took_ns)
            return
        ends = (self.worker_id, host_of(self.worker_id))
        src, dst = ends if command.to_host else reversed(ends)
        life = self.life

        def end(how: TransferEnd) -> None:
            if self.life == life:
                ended = ports.TransferEnded(command.transfer_id, *how)
                self._plant.report(self.worker_id, ended, self._plant.loop.now_ns)

        self._plant.transfers.start(Transfer(command.transfer_id, src, dst, num_bytes, FlowClass.KV, end))

    def _tell_copy(self, transfer_id: TransferId, is_complete: bool, num_bytes: int, duration_ns: int) -> None:
        """Report the end of a copy, between two steps, when the worker's thread gets to it."""
        ended = ports.TransferEnded(transfer_id, is_complete, num_bytes, duration_ns)
        self._plant.report(self.worker_id, ended, max(self._plant.loop.now_ns, self._free_ns))

    # --- transfers --------------------------------------------------------------------------------------------

    def _send(self, transfer: ports.SendKV | ports.SendShard) -> None:
        """Rule 8: the destination reports the end; the source only where the destination cannot know of the
        transfer."""
        nothing = TransferEnd(False, 0, 0)
        if not self._plant.is_linked(self.worker_id, transfer.dst):
            ended = ports.TransferEnded(transfer.transfer_id, *nothing)
            self._plant.report(self.worker_id, ended, self._plant.loop.now_ns)
            return
        if isinstance(transfer, ports.SendShard):
            if transfer.shard not in self.filled:
                self._tell_end(transfer, nothing)
                return
            num_bytes, flow_class = self._plant.shape.shard_bytes[transfer.shard], FlowClass.PARAMETERS
        else:
            num_bytes = len(transfer.layers) * len(transfer.src_blocks) * self.memory.sizes.kv_block_bytes
            flow_class = FlowClass.URGENT_KV if transfer.urgent else FlowClass.KV
        peer = self._plant.worker(transfer.dst)
        life = peer.life

        def land(end: TransferEnd) -> None:
            self._shards_out.pop(transfer.transfer_id, None)
            if peer.life == life:
                peer.land(transfer, end)

        if isinstance(transfer, ports.SendShard):
            self._shards_out[transfer.transfer_id] = transfer.shard
        self._plant.transfers.start(
            Transfer(transfer.transfer_id, self.worker_id, transfer.dst, num_bytes, flow_class, land)
        )

    def _tell_end(self, transfer: ports.SendKV | ports.SendShard, end: TransferEnd) -> None:
        """End a transfer before its first byte: its destination reports, as long as it is linked."""
        if transfer.dst == self.worker_id or not self._plant.is_linked(self.worker_id, transfer.dst):
            self._plant.report(self.worker_id, ports.TransferEnded(transfer.transfer_id, *end), self._plant.loop.now_ns)
            return
        latency_ns = self._plant.transfers.network.latency_ns(self.worker_id, transfer.dst)
        peer = self._plant.worker(transfer.dst)
        life = peer.life
        self._plant.loop.after(latency_ns, lambda: peer.land(transfer, end) if peer.life == life else None)

    def land(self, transfer: ports.SendKV | ports.SendShard, end: TransferEnd) -> None:
        """The last byte of a transfer has arrived here, or its sender has given it up."""
        is_complete = end.is_complete
        if isinstance(transfer, ports.SendShard):
            is_complete = is_complete and transfer.shard in self.memory.shards
            if is_complete:
                self.filled.add(transfer.shard)
        elif end.num_bytes and not transfer.to_host:
            served, room = self.memory.kv_layers, self.memory.capacity_blocks
            is_complete = is_complete and served.covers(transfer.layers) and max(transfer.dst_blocks) < room
            self.memory.note_landed(transfer.layers, transfer.dst_blocks)
        ended = ports.TransferEnded(transfer.transfer_id, is_complete, end.num_bytes, end.duration_ns)
        self._plant.report(self.worker_id, ended, self._plant.loop.now_ns)


"""Carries the core's actions to workers and their answers back. Synchronous; owns no sockets and no clock.

Used by the asyncio engine (real processes) and by the in-process cluster of tests and ``jettison verify``: both
differ only in ``send`` and ``abandon`` and in the caller of ``on_worker_event``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.core.load.bubbles import BubbleMeter
from jettison.core.observing import RunObserver, group_gauges, transfers_under_way
from jettison.live.engine.encoder import StepEncoder
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.types import SampledToken, WorkerId

MAX_RECENT_DELAYS = 65_536

SendCommand = Callable[[WorkerId, m.Command], None]


@dataclass(slots=True)
class Delays:
    """What stages tell of themselves: times that they waited, for their input on the link and for attention at peers,
    and what their experts had."""

    num_activations: int = 0
    activation_ns: int = 0
    remote_attention_ns: int = 0
    recent_activation_ns: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_DELAYS))
    """Delays of the newest activations, for quantiles."""
    expert_tokens: int = 0
    expert_tokens_at_busiest: int = 0
    """Both as in StepDone."""

    def note(self, event: m.StepDone | m.StageDone) -> None:
        """Take a stage's account. Without a delay there was no input."""
        self.remote_attention_ns += event.remote_wait_ns
        if isinstance(event, m.StepDone):
            self.expert_tokens += event.expert_tokens
            self.expert_tokens_at_busiest += event.expert_tokens_at_busiest
        if event.input_delay_ns > 0:
            self.num_activations += 1
            self.activation_ns += event.input_delay_ns
            self.recent_activation_ns.append(event.input_delay_ns)

    def totals(self) -> dict[str, float]:
        """For /metrics."""
        return {
            "activations": self.num_activations,
            "activation_delay_seconds": self.activation_ns / 1e9,
            "remote_attention_seconds": self.remote_attention_ns / 1e9,
            "expert_tokens": self.expert_tokens,
            "expert_tokens_at_busiest": self.expert_tokens_at_busiest,
        }


class CoreDriver:
    """Glue between one ``ClusterCore`` and its workers."""

    def __init__(
        self,
        core: ClusterCore,
        encoder: StepEncoder,
        send: SendCommand,
        abandon: Callable[[WorkerId, int], None],
        emit: Callable[[ports.EmitTokens | ports.Emit], None],
        record: Callable[[ports.Record], None],
        on_event: Callable[[ports.Event, int], None] | None = None,
        observer: RunObserver | None = None,
    ) -> None:
        self.core = core
        self.provision: Callable[[ports.AskInstance | ports.ReleaseInstance], None] | None = None
        """Starts processes and gives them back; None: there are as many as there are workers, for good."""
        self._encoder = encoder
        self._send = send
        self._abandon = abandon
        """Has a worker give a step up, without a message."""
        self._emit = emit
        self._record = record
        self._on_event = on_event
        """Sees every event before the core does: a recording replays."""
        self._observer = observer
        self.after_event: Callable[[], None] | None = None
        """Called when all that follows from an event or an order has been carried out: faults meet phases of moves."""
        self.memory: dict[WorkerId, dict[str, int]] = {}
        """Latest memory report of each worker."""
        self.bubbles = BubbleMeter()
        self.delays = Delays()
        self._parts: dict[int, list[m.StepLogprobs]] = {}
        """Step -> what has come of its logprobs; the step itself is still to be told."""
        self._prepared: deque[int] = deque(maxlen=64)
        """The last steps of which a stage before the last has prepared later ones: far more than are under way. The
        last stage's answer comes later, as it waits for the others' and they tell at once."""

    def handle(self, event: ports.Event, now_ns: int) -> None:
        """Let the core handle an event and carry out what follows."""
        if self._on_event is not None:
            self._on_event(event, now_ns)
        if isinstance(event, ports.WorkerLost):
            self._encoder.forget_places()
            self._parts = {i: p for i, p in self._parts.items() if p[0].worker_id != event.worker_id}
        if self._observer is not None and isinstance(event, ports.TransferEnded):
            self._observer.transfer_ended(event, now_ns)
        actions = self.core.handle(event, now_ns)
        if isinstance(event, ports.WorkerLost):
            self.bubbles.keep_groups(self.core.groups)
        self.carry_out(actions, now_ns)
        if self._observer is not None:
            self._observer.transfers_left(transfers_under_way(self.core), now_ns)
            if isinstance(event, ports.Tick):
                self._observer.looked(group_gauges(self.core), now_ns)

    def on_start(self, ready: Sequence[m.WorkerReady], links_lost: Sequence[ports.LinkLost], now_ns: int) -> None:
        """What all workers have told of the start."""
        told: list[m.Event] = [*ready, *links_lost]
        for event in told:
            self.on_worker_event(event, now_ns)
        empty = tuple(event.worker_id for event in ready if event.weights is None)
        if empty:
            self.handle(ports.WorkersEmpty(empty), now_ns)

    def on_worker_event(self, event: m.Event, now_ns: int) -> None:
        """An answer of a worker."""
        core_event = self._translate(event)
        if core_event is not None:
            self.handle(core_event, now_ns)

    # --- actions ----------------------------------------------------------------------------------------------

    def carry_out(self, actions: list[ports.Action], now_ns: int) -> None:
        """Carry out actions of this time: what workers wait for, then what clients and logs get; each in order."""
        told: list[ports.EmitTokens | ports.Emit | ports.Record] = []
        for action in actions:
            match action:
                case ports.RunStep():
                    self.bubbles.issued(action)
                    if self._observer is not None:
                        self._observer.step_issued(action)
                    for worker_id, step in self._encoder.encode(action):
                        self._send(worker_id, codec.step_command(step))
                case ports.AbandonStep():
                    self._abandon(action.worker_id, action.step_id)
                case ports.EmitTokens() | ports.Emit() | ports.Record():
                    told.append(action)
                case ports.AskInstance() | ports.ReleaseInstance():
                    self._encoder.forget_places()
                    self.memory.pop(action.worker_id, None)
                    assert self.provision is not None, "all workers have a process for good"
                    self.provision(action)
                case ports.SendKV() | ports.SendShard():
                    if self._observer is not None:
                        self._observer.transfer_begun(action, now_ns)
                    self._send(action.src, action)
                case ports.CancelTransfer():
                    self._send(action.src, action)
                case _:
                    self._send(action.worker_id, action)
        for action in told:
            if isinstance(action, ports.Record):
                if self._observer is not None:
                    self._observer.recorded(action)
                self._record(action)
                continue
            if self._observer is not None:
                for emit in action.each():
                    self._observer.emitted(emit)
            if isinstance(action, ports.Emit) and action.finish_reason is not None:
                self._encoder.forget(action.request_id)
            self._emit(action)
        if self.after_event is not None:
            self.after_event()

    # --- events -----------------------------------------------------------------------------------------------

    def _translate(self, event: m.Event) -> ports.Event | None:
        """What the core hears of it; None: nothing."""
        match event:
            case m.StepDone():
                self._note_stage(event)
                self._note_step_ended(event.step_id)
                return self._completed(event.completed)
            case m.StepLogprobs():
                self._parts.setdefault(event.step_id, []).append(event)
            case m.StageDone():
                self._note_stage(event)
                if event.has_prepared:
                    self._prepared.append(event.step_id)
            case m.MemoryReported() | m.WorkerReady():
                self.memory[event.worker_id] = event.memory
            case m.WorkerStartFailed() | m.CertificateWanted():
                pass
            case ports.StepAbandoned() | ports.StepFailed():
                self._encoder.forget_places()
                self._note_ended_early(event.step_id)
                return event
            case _:
                return event
        return None

    def _completed(self, completed: ports.StepCompleted) -> ports.StepCompleted:
        """With what came ahead of it, and without what was sampled though its request's wishes were not sent."""
        if completed.kept_layers is not None:
            self._encoder.forget_places()  # the last stage has not seen the rows that an earlier one has shed
        if completed.step_id in self._prepared:
            completed = completed._replace(has_prepared=True)
        if parts := self._parts.pop(completed.step_id, []):
            completed = codec.with_parts(completed, parts)
        for place, token_id in self._encoder.take_refused(completed.step_id).items():
            if place < len(completed.tokens):  # else its row was shed, and is asked for once more
                completed.tokens[place] = SampledToken(token_id)
        return completed

    def _note_stage(self, event: m.StepDone | m.StageDone) -> None:
        self.bubbles.stage_done(event.worker_id, event.step_id, event.started_ns, event.ended_ns)
        self.delays.note(event)
        if self._observer is not None:
            self._observer.stage_done(event.worker_id, event.step_id, event.started_ns, event.ended_ns)

    def _note_ended_early(self, step_id: int) -> None:
        self._parts.pop(step_id, None)
        self._encoder.take_refused(step_id)
        self._note_step_ended(step_id)

    def _note_step_ended(self, step_id: int) -> None:
        self.bubbles.ended(step_id)
        if self._observer is not None:
            self._observer.step_ended(step_id)

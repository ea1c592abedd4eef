"""A whole cluster inside one process, synchronous: real devices, real memory moves, no sockets.

For tests, ``jettison verify``, benchmarks of the engine itself, and offline use from Python. Time is a counter that
advances with every unit of work, so runs repeat exactly; a seed interleaves the workers at random but reproducibly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path

import msgspec

from jettison.config import EngineConfig
from jettison.config.scale import ScaleConfig
from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.cost.hardware import HardwareProfile
from jettison.device.beside import open_shared_copy
from jettison.device.model.identity import agreed_identity
from jettison.errors import StalledError
from jettison.live.engine.assembly import Assembly, assemble
from jettison.live.engine.driver import CoreDriver
from jettison.live.engine.encoder import StepEncoder
from jettison.live.engine.inprocess import InProcessCluster
from jettison.live.wire import messages as m
from jettison.live.worker.main import make_device_worker
from jettison.memory.kvtransfers import MAX_PIECE_BYTES, MigrationKind
from jettison.types import (
    FinishReason,
    GroupId,
    Request,
    RequestId,
    SampledToken,
    SamplingParams,
    ServiceClass,
    TokenLogprobs,
    WorkerId,
)

TICK_EVERY_NS = 100_000_000
NS_PER_UNIT = 1_000_000
"""Virtual time of one unit of work."""
STALL_NS = 300_000_000_000
"""Virtual time without any work after which none will come: longer than whatever the core waits for by itself."""

NS_PER_READING = 20_000
"""Of the workers' clock, which no real time moves: what they take from it repeats exactly, too."""

REST = "all requests to end and all moves to be over"


class Pace(Enum):
    """What a cluster does first where there is a choice: any order is one that real processes could have. So what has
    to meet meets, whatever a model's layers, KV and answers make of the time that each takes."""

    BY_LOT = auto()
    STEPS_LAST = auto()
    """A step begins only where nothing else can be done: moves get ahead, and no request ends before they are over."""
    STEPS_FIRST = auto()
    """Links take KV and parameters only where nothing else can be done: requests get ahead."""


@dataclass(frozen=True, slots=True)
class Until:
    """A condition to work for, and its name for the error of one that waits in vain."""

    what: str
    """Completes "waited for"."""
    holds: Callable[[], bool]

    def __call__(self) -> bool:
        return self.holds()


@dataclass(slots=True)
class Completion:
    """What a request produced."""

    params: SamplingParams
    """What it asked for."""
    was_cancelled: bool = False
    """By its submitter."""
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_live_rows: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def token_ids(self) -> list[int]:
        """Ids only."""
        return [t.token_id for t in self.tokens]


class LocalCluster:
    """``instances`` workers in this process behind one core."""

    def __init__(
        self, config: EngineConfig, *, seed: int | None = None, auto_restore: bool = False,
        max_units: int = 10_000_000, profile: HardwareProfile | None = None, num_logprobs: int | None = None,
    ) -> None:
        """``max_units``: of work that one ``run`` may take. ``profile``: by which the core judges steps and copies.
        ``num_logprobs``: that every request is told, whatever it asks for."""
        config = replace(config, scale=ScaleConfig())  # there is no process that could come or go
        self._max_units = max_units
        self._config = config
        self._seed = seed
        self._auto_restore = auto_restore
        self._profile = profile
        self._num_logprobs = num_logprobs
        self.assembly: Assembly = assemble(config)
        self.completions: dict[RequestId, Completion] = {}
        self.records: list[ports.Record] = []
        self._now_ns = 0
        self._read_ns = 0
        """What the workers' clock said last."""
        self._next_tick_ns = TICK_EVERY_NS
        self._cluster: InProcessCluster | None = None
        self._driver: CoreDriver | None = None
        self._num_open = 0
        self._shared_copy_fd: int | None = None

    def start(self) -> None:
        """Load every device. Raises BudgetError, ModelError. Idempotent."""
        if self._cluster is not None:
            return
        self._shared_copy_fd = fd = open_shared_copy()
        specs = [msgspec.structs.replace(s, shared_copy_fd=fd) for s in self.assembly.worker_specs]
        devices = {s.worker_id: make_device_worker(s) for s in specs}
        cluster = InProcessCluster(
            devices, self._on_event, piece_bytes=self._config.overload.exchange_piece_bytes or MAX_PIECE_BYTES,
            seed=self._seed, clock_ns=self._read_clock_ns,
        )
        ready = cluster.start()
        self._cluster = cluster
        parts = [r.weights for r in ready if r.weights is not None]
        weights = agreed_identity(Path(self._config.model.model), parts)
        for event in ready:
            cluster.send(event.worker_id, m.AdoptWeights(weights))
        capacity_blocks = {r.worker_id: r.capacity_blocks for r in ready}
        core = self.assembly.build_core(capacity_blocks, b"local-cluster", self._profile)
        if not self._auto_restore:
            core.reconfigure(replace(core.params, auto_restore=False))
        ledgers = {w: s.ledger for w, s in core.state.workers.items()}
        encoder = StepEncoder(ledgers, self._config.memory.block_size, core.state.limits.eos_token_ids)
        self._driver = CoreDriver(core, encoder, cluster.send, cluster.abandon, self._on_emit, self.records.append)
        for event in ready:
            self._driver.on_worker_event(event, self._now_ns)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
        if self._shared_copy_fd is not None:
            os.close(self._shared_copy_fd)
            self._shared_copy_fd = None

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def core(self) -> ClusterCore:
        """The core, for reading."""
        assert self._driver is not None, "not started"
        return self._driver.core

    @property
    def num_open(self) -> int:
        """Requests without a terminal event."""
        return self._num_open

    # --- requests ---------------------------------------------------------------------------------------------

    def submit(
        self, request_id: RequestId, prompt: list[int], params: SamplingParams, cache_salt: str = "",
        service_class: ServiceClass = ServiceClass.ONLINE,
    ) -> None:
        """Accept a request; it runs in later pumps. Raises ValueError for a token that the model does not have."""
        if prompt and not 0 <= min(prompt) <= max(prompt) < self.assembly.shape.vocab_size:
            raise ValueError(f"{request_id}: a token outside of the vocabulary of {self.assembly.shape.vocab_size}")
        if self._num_logprobs is not None:
            params = replace(params, logprobs=self._num_logprobs)
        self.completions[request_id] = Completion(params)
        self._num_open += 1
        request = Request(
            request_id, tuple(prompt), params, self._now_ns, 0, cache_salt, service_class=service_class
        )
        self._handle(ports.Arrived(request))

    def cancel(self, request_id: RequestId) -> None:
        """End a request wherever it is."""
        self.completions[request_id].was_cancelled = True
        self._handle(ports.CancelRequested(request_id))

    def request_drop(self) -> None:
        """Merge now."""
        self._carry_out(self.core.request_drop(self._now_ns))

    def request_restore(self) -> None:
        """Restore now."""
        self._carry_out(self.core.request_restore(self._now_ns))

    def request_migration(
        self, request_id: RequestId, destination: GroupId, kind: MigrationKind, max_step_tokens: int | None = None
    ) -> None:
        """Have a request go to another group, if it can go there now."""
        self._carry_out(self.core.request_migration(
            request_id, destination, self._now_ns, kind=kind, max_step_tokens=max_step_tokens
        ))

    def request_sleep(self, *worker_ids: WorkerId, level: int = 2) -> None:
        """Have workers give up their layers. Raises ValueError where they cannot."""
        self._carry_out(self.core.request_sleep(worker_ids, level, self._now_ns))

    def request_wake(self, worker_id: WorkerId) -> None:
        """Have it serve again. Raises ValueError where it does not sleep."""
        self._carry_out(self.core.request_wake(worker_id, self._now_ns))

    def _carry_out(self, actions: list[ports.Action]) -> None:
        assert self._driver is not None, "not started"
        self._driver.carry_out(actions, self._now_ns)

    def run(
        self, until: Callable[[], bool] | None = None, pace: Pace = Pace.BY_LOT,
        workers: Collection[WorkerId] | None = None,
    ) -> None:
        """Work until ``until`` holds (checked after every unit of work), or until nothing is open or on the move.

        ``workers``: with ``Pace.STEPS_LAST``, the steps of these workers come last; None: those of all.

        Raises StalledError, with the name of an ``Until``, where no worker has done anything for ``STALL_NS`` (of
        virtual time: no slow machine is blamed), or where ``max_units`` were not enough.
        """
        assert self._cluster is not None
        what = until.what if isinstance(until, Until) else "a condition" if until is not None else REST
        worked_ns = self._now_ns
        for _ in range(self._max_units):
            if until is not None and until():
                return
            if until is None and self._num_open == 0 and not self.core.in_transition and self.core.state.is_idle():
                return
            worked = self._work(self._cluster, pace, workers)
            self._now_ns += NS_PER_UNIT
            if worked:
                worked_ns = self._now_ns
            elif self._now_ns - worked_ns > STALL_NS:
                raise StalledError(f"waited for {what}, and no worker works on it: {self._describe()}")
            if self._now_ns >= self._next_tick_ns or not worked:
                self._now_ns = max(self._now_ns, self._next_tick_ns)
                self._next_tick_ns = self._now_ns + TICK_EVERY_NS
                self._handle(ports.Tick())
        raise StalledError(
            f"waited for {what}, which {self._max_units} units of work have not brought: {self._describe()}"
        )

    def _work(self, cluster: InProcessCluster, pace: Pace, workers: Collection[WorkerId] | None) -> bool:
        """A unit of work, if there is any."""
        if pace is not Pace.BY_LOT:
            slow = cluster.workers if workers is None else workers
            cluster.hold(steps_of=slow if pace is Pace.STEPS_LAST else (), bulk=pace is Pace.STEPS_FIRST)
            worked = cluster.pump(1) > 0
            cluster.hold()
            if worked:
                return True
        return cluster.pump(1) > 0

    def _read_clock_ns(self) -> int:
        self._read_ns = max(self._read_ns + NS_PER_READING, self._now_ns)
        return self._read_ns

    def _describe(self) -> str:
        """How things stand, for an error."""
        core = self.core
        groups = {g.group_id: f"{len(g.stages)} stages" + ", paused" * bool(g.paused) for g in core.groups.values()}
        moves = [str(m.phase) for m in core.merges] + [str(r.phase) for r in core.restores]
        running = sum(len(g.queues.running) for g in core.groups.values())
        return f"groups {groups}, moves {moves}, {self._num_open} requests open, {running} of them running"

    # --- glue -------------------------------------------------------------------------------------------------

    def _handle(self, event: ports.Event) -> None:
        assert self._driver is not None, "not started"
        self._driver.handle(event, self._now_ns)

    def _on_event(self, worker_id: WorkerId, event: m.Event) -> None:
        del worker_id
        if self._driver is not None:
            self._driver.on_worker_event(event, self._now_ns)

    def _on_emit(self, emit: ports.EmitTokens | ports.Emit) -> None:
        for each in emit.each():
            self._note_tokens(each)

    def _note_tokens(self, emit: ports.Emit) -> None:
        completion = self.completions[emit.request_id]
        completion.tokens += emit.tokens
        if emit.finish_reason is not None:
            self._num_open -= 1
            completion.finish_reason = emit.finish_reason
            completion.error = emit.error
            if emit.state is not None:
                completion.num_cached_tokens = emit.state.num_cached
                completion.num_preemptions = emit.state.num_preemptions
                completion.num_live_rows = emit.state.num_live_rows
                completion.prompt_logprobs = emit.state.prompt_logprobs


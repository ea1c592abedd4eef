"""The running engine: one core, its workers, and the streams of its clients, on one asyncio loop.

Reads the wall clock and owns processes; decides nothing (the core does). Implements ``live.engine.api.EngineClient``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Sequence
from pathlib import Path

from jettison.config import EngineConfig
from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.cost.deployment import deployment_to_document
from jettison.device.model.identity import WeightsIdentity
from jettison.errors import NotReadyError, OverCapacityError, RequestError, TooLongError
from jettison.live.engine.api import EngineInfo, EngineSnapshot, EngineState, LogPart, RequestTimings, TokenEvent
from jettison.live.engine.assembly import Assembly, assemble
from jettison.live.engine.crew import Crew
from jettison.live.engine.deployed import deployment_of
from jettison.live.engine.driver import CoreDriver, Delays
from jettison.live.engine.encoder import StepEncoder
from jettison.live.engine.launchers import spawner_of
from jettison.live.engine.loading import LoadingWatch
from jettison.live.engine.move_log import log_document, log_move, newest_records
from jettison.live.engine.orders import Orders
from jettison.live.engine.own_products import OwnProducts
from jettison.live.engine.provisioner import Provisioner
from jettison.live.engine.restart import Restarter
from jettison.live.engine.snapshot import take_snapshot
from jettison.live.engine.spawner import Spawner, machines_of
from jettison.live.engine.stream import OpenStreams, Stream, events_of
from jettison.live.engine.suspects import Suspects
from jettison.live.engine.takeover import agree_on_weights, fill_kept, missing_of
from jettison.live.engine.warmup import WarmUp
from jettison.live.host.heritage import Heritage
from jettison.live.wire import messages as m
from jettison.live.wire.heartbeat import Patience
from jettison.policy.refusal import why_too_long
from jettison.policy.slo import UNKNOWN_OBJECTIVES, Objectives
from jettison.report.timeline import Timeline
from jettison.types import Request, RequestId, ServiceClass, WorkerId

logger = logging.getLogger(__name__)

MAX_EVENT_LOG = 10_000
MAX_PREEMPTIONS = 2_000
"""Decisions kept in memory; older ones are dropped."""

RESTART_WINDOW_S = 300.0
"""Restarts are counted over this long."""

DEPENDENT_ROWS = ": products by torch, so requests in a step may change each other's last bits (see docs/decisions.md)"


class Engine:
    """Jettison, running. ``start`` loads workers, ``submit`` streams tokens, ``drain`` and ``close`` end it."""

    def __init__(
        self, config: EngineConfig, spawner: Spawner | None = None, heritage: Heritage | None = None,
        must_serve: str | None = None,
    ) -> None:
        """``spawner``: where workers run; None: where ``config`` says. ``heritage``: what workers find that outlive
        this process. ``must_serve``: digest of the only weights that may be served."""
        self._config = config
        self._spawner = spawner
        self._must_serve = must_serve
        self._heritage = heritage
        self._state: EngineState = "loading"
        self._streams = OpenStreams(lambda: self._fail("internal error in telling tokens", is_bug=True))
        self._assembly: Assembly | None = None
        self._info: EngineInfo | None = None
        self._crew: Crew | None = None
        self._driver: CoreDriver | None = None
        self._orders: Orders | None = None
        self._restarter: Restarter | None = None
        self._suspects: Suspects | None = None
        self._provisioner: Provisioner | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._warm_up: WarmUp | None = None
        self._loading: LoadingWatch | None = None
        self._weights: WeightsIdentity | None = None
        """What the workers have read at the start, and serve."""
        self._weights_digest: str | None = None
        self._own_products = OwnProducts()
        self.timeline = Timeline() if config.server.timeline is not None else None
        """What is written at the end, as it is now."""
        self.event_log: deque[ports.Record] = deque(maxlen=MAX_EVENT_LOG)
        self._preempted_log: deque[ports.Record] = deque(maxlen=MAX_PREEMPTIONS)
        """Apart: where memory is short there are tens a second, which would push every decision out."""
        self.started_ns = time.monotonic_ns()
        self.failure: str | None = None
        self.on_failure: Callable[[], None] | None = None
        """Called once when the engine cannot go on: too many workers are gone for good, or the core met a bug."""
        self.on_bug: Callable[[], None] | None = None
        """Called before that where the core met a bug, while all streams are open. It may end the process."""

    # --- life -------------------------------------------------------------------------------------------------

    def prepare(self) -> Assembly:
        """Read the model's configuration, and settle what all workers compute with and in. Idempotent. Raises
        ModelError, ConfigError and BudgetError where no worker could start: see ``Assembly.check``."""
        if self._assembly is None:
            assembly = assemble(self._config)
            assembly.check()
            self._assembly = assembly
            logger.info("kernels %s%s", assembly.kernels, "" if assembly.rows_are_independent else DEPENDENT_ROWS)
        return self._assembly

    async def start(self) -> None:
        """Start workers and load the model. Raises ModelError, BudgetError, ConfigError. Idempotent."""
        if self._crew is not None:
            return
        assembly, faults = self.prepare(), self._config.faults
        self._loading = LoadingWatch(assembly.parameter_bytes)
        num_at_start, begun_ns = self._config.instances, time.monotonic_ns()
        spawner = self._spawner or spawner_of(
            self._config.hosts, assembly.worker_specs, num_at_start, self._config.scale.min_instances, self._heritage)
        spawner.tell_waits(self._on_worker_waits)
        self._crew = Crew(
            assembly.worker_specs, spawner, self._on_worker_event, self._on_worker_exit, num_at_start=num_at_start,
            patience=Patience(faults.worker_heartbeat_timeout_s, faults.worker_step_timeout_s), heritage=self._heritage,
        )
        self._restarter = Restarter(
            self._crew.restart, self._on_worker_joined, self._on_worker_gone, self._on_worker_waits,
            max_restarts=faults.max_worker_restarts, window_s=RESTART_WINDOW_S, able=spawner.able,
        )
        ready = await self._crew.start()
        ready_ns = time.monotonic_ns()
        self._loading.all_read()
        self._weights = agree_on_weights(ready, Path(self._config.model.model), self._must_serve, self._crew.send)
        self._weights_digest = self._weights.summary
        self._own_products.note(ready)
        capacity = {r.worker_id: r.capacity_blocks for r in ready}
        profile, machine_of = assembly.load_profile(), machines_of(capacity, spawner)
        slowest, missing = max(ready, key=lambda r: r.read_ns), missing_of(ready, assembly.worker_specs, num_at_start)
        core = assembly.build_core(
            capacity, os.urandom(16), profile, machine_of, has_profiled_links=len(set(machine_of.values())) == 1,
            loading_bytes_per_s=1e9 * assembly.shape.parameter_bytes / slowest.read_ns if slowest.read_ns else None,
            start_s=max(0, ready_ns - begun_ns - slowest.read_ns) / 1e9, missing=missing,
        )
        self._suspects = Suspects(self._crew, core.state)
        self._provisioner = Provisioner(
            self._crew, self._restarter, spawner, self._forget_info,
            names_machines=not self._config.overload.machines, heritage=self._heritage)
        ledgers = {w: s.ledger for w, s in core.state.workers.items()}
        encoder = StepEncoder(ledgers, self._config.memory.block_size, core.state.limits.eos_token_ids)
        driver = CoreDriver(
            core, encoder, self._crew.send, self._crew.abandon, self._streams.on_emit, self._on_record,
            observer=self.timeline)
        driver.provision = self._provisioner.carry_out
        if all(event.kept is None for event in ready):  # others are warm, and clients wait
            self._warm_up = warm_up = WarmUp(assembly, ready, self._crew.send)
            await warm_up.run(core)
            self._warm_up = None
            driver.on_start(ready, warm_up.links_lost, time.monotonic_ns())
        self._provisioner.begin(core)
        self._driver, self._orders = driver, Orders(driver, self._crew)
        fill_kept(ready, missing, driver, self._crew.life, self._handle, self._restarter.worker_lost)
        self._ticker = asyncio.create_task(self._tick(), name="jettison-ticker")
        if self._state == "loading":
            self._state = "ready"
        logger.info(
            "weights %s read in %.2f s, of which hashing and checking took %.2f s",
            self._weights_digest, slowest.read_ns / 1e9, slowest.check_ns / 1e9,
        )
        blocks = sorted(set(capacity.values()))
        logger.info("ready: %d instance(s), %s KV blocks each, kernels %s", len(ready), blocks, assembly.kernels)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the accepted ones; True if all ended in time."""
        if self._state in ("ready", "loading"):
            self._state = "draining"
        try:
            await asyncio.wait_for(self._streams.none.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End everything; requests still open end with ERROR. Idempotent."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
            self._ticker = None
        if self._state != "failed":
            self._state = "draining"
        self._streams.fail_all("the server is shutting down")
        if self._restarter is not None:
            await self._restarter.close()
        if self._crew is not None:
            await self._crew.close(5.0)
            self._crew = None
            if self.timeline is not None and (path := self._config.server.timeline) is not None:
                self.timeline.write_or_tell(Path(path), logger)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.overload.check_interval_ms / 1e3)
            self._handle(ports.Tick())

    # --- EngineClient -----------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What does not change. Raises NotReadyError before ``start`` has read the model."""
        if self._assembly is None:
            raise NotReadyError("the model is still loading")
        if self._info is None or self._info.max_request_tokens == 0:
            core, block_size = self._driver.core if self._driver else None, self._config.memory.block_size
            self._info = EngineInfo(
                model_dir=str(Path(self._config.model.model)),
                max_model_len=self._assembly.limits.max_model_len,
                max_request_tokens=core.max_request_blocks() * block_size if core else 0,
                max_offline_tokens=core.max_request_blocks(is_offline=True) * block_size if core else 0,
                vocab_size=self._assembly.shape.vocab_size,
                eos_token_ids=tuple(sorted(self._assembly.limits.eos_token_ids)),
            )
        return self._info

    @property
    def state(self) -> EngineState:
        """loading, ready, draining or failed."""
        return self._state

    def ready_in_s(self) -> float | None:
        """See ``EngineClient.ready_in_s``."""
        if self._state != "loading" or self._loading is None or self._crew is None:
            return None
        part_warm = 0.0 if self._warm_up is None else self._warm_up.part_done
        return self._loading.left_s(self._crew.pids.values(), part_warm)

    @property
    def core(self) -> ClusterCore:
        """The core, for reading (tests, benchmarks). Raises NotReadyError before start."""
        if self._driver is None:
            raise NotReadyError("the engine has not started")
        return self._driver.core

    @property
    def orders(self) -> Orders:
        """For administration and experiments. Raises NotReadyError before start."""
        if self._orders is None:
            raise NotReadyError("the engine has not started")
        return self._orders

    def submit(self, request: Request, *, is_further: bool = False) -> AsyncIterator[TokenEvent]:
        """See ``EngineClient.submit``."""
        stream = Stream(request.arrival_ns)
        self.submit_to(request, stream, is_further=is_further)
        return events_of(stream, lambda: self.cancel(request.request_id))

    def submit_to(self, request: Request, stream: Stream, *, is_further: bool = False) -> None:
        """As ``submit``, with the events put into a stream of the caller's."""
        if self._state != "ready":
            raise NotReadyError(f"the engine is {self._state}")
        if not is_further and request.service_class is ServiceClass.ONLINE:
            self.check_queue(request.tenant)
        self._check(request)
        self._streams.open(request.request_id, stream)
        self._handle(ports.Arrived(request))

    def check_queue(self, tenant: str, num_arriving: int = 0) -> None:
        """See ``EngineClient.check_queue``."""
        if self._driver is None:
            return
        limit = self._config.scheduler.max_num_queued_reqs
        refusal = self._driver.core.ladder.why_refuse(tenant, limit, num_arriving, time.monotonic_ns())
        if refusal is not None:
            raise OverCapacityError(refusal.message, refusal.retry_after_ms)

    def _check(self, request: Request) -> None:
        """What would raise, read out of bounds or never fit, further in. Raises RequestError."""
        ids = request.prompt_token_ids
        vocab_size = self.info.vocab_size
        if not ids or min(ids) < 0 or max(ids) >= vocab_size:
            raise RequestError(f"a prompt needs token ids, all of them in [0, {vocab_size})", param="prompt")
        try:
            request.cache_salt.encode()
        except UnicodeEncodeError:
            raise RequestError("cache_salt is no valid text", param="cache_salt") from None
        info = self.info
        is_offline = request.service_class is ServiceClass.OFFLINE
        room = info.max_offline_tokens if is_offline else info.max_request_tokens
        too_long = why_too_long(len(ids), request.params.max_tokens, info.max_model_len, room)
        if too_long is not None:
            raise TooLongError(too_long, param="max_tokens", code="context_length_exceeded")

    def cancel(self, request_id: RequestId) -> None:
        """See ``EngineClient.cancel``."""
        self._handle(ports.CancelRequested(request_id))

    def finish_early(self, request_id: RequestId) -> None:
        """See ``EngineClient.finish_early``."""
        self._handle(ports.FinishRequested(request_id))

    def objectives(self) -> Objectives:
        """See ``EngineClient.objectives``."""
        return UNKNOWN_OBJECTIVES if self._driver is None else self._driver.core.objectives

    def num_unread(self, request_id: RequestId) -> int:
        """See ``EngineClient.num_unread``."""
        return self._streams.num_unread(request_id)

    def timings(self, request_id: RequestId) -> RequestTimings | None:
        """See ``EngineClient.timings``."""
        state = None if self._driver is None else self._driver.core.state.requests.get(request_id)
        return None if state is None else RequestTimings(state.request.arrival_ns).note(state)

    def note_stored(self, works: Sequence[ports.StoredWork]) -> None:
        """See ``EngineClient.note_stored``."""
        if self._state == "ready" and self._driver is not None:
            self._handle(ports.OfflineStored(tuple(works)))

    def snapshot(self) -> EngineSnapshot:
        """See ``EngineClient.snapshot``."""
        if self._driver is None or self._crew is None or self._restarter is None:
            troubles = () if self._crew is None else tuple(self._crew.troubles)
            return EngineSnapshot(self._state, self._config.memory.block_size, troubles=troubles)
        snapshot = take_snapshot(
            self._driver, self._state, self._config, self._crew.pids, self._restarter.why_down, self._crew.troubles)
        snapshot.weights = self._weights_digest
        snapshot.own_products, snapshot.products_of_some = self._own_products.all, self._own_products.of_some
        return snapshot

    @property
    def weights_digest(self) -> str:
        """Of what is served. Raises NotReadyError before ``start``."""
        if self._weights_digest is None:
            raise NotReadyError("the model is still loading")
        return self._weights_digest

    def event_document(self) -> dict[str, object]:
        """Decisions and milestones so far, times in seconds since the engine was made: ``GET /jettison/events``."""
        return log_document((self.event_log, self._preempted_log), self.started_ns, time.monotonic_ns())

    def records_since(self, after_ns: int, most: int, kinds: Container[str], until_ns: int | None = None) -> LogPart:
        """The newest decisions and milestones: see ``move_log.newest_records``."""
        return newest_records((self.event_log, self._preempted_log), after_ns, most, kinds, until_ns)

    def deployment_document(self) -> dict[str, object]:
        """What runs here, for a simulation of it (``cost.deployment``): ``GET /jettison/deployment``.

        Raises NotReadyError before ``start`` has ended.
        """
        if self._assembly is None or self._driver is None:
            raise NotReadyError("the model is still loading")
        return deployment_to_document(deployment_of(self._assembly))

    @property
    def delays(self) -> Delays:
        """What stages have waited for so far. Raises NotReadyError before ``start``."""
        if self._driver is None:
            raise NotReadyError("the engine is not started")
        return self._driver.delays

    # --- glue -------------------------------------------------------------------------------------------------

    def _handle(self, event: ports.Event) -> None:
        if self._driver is None or self._state == "failed":
            return
        num_issued = self._driver.core.num_issued
        try:
            self._driver.handle(event, time.monotonic_ns())
        except Exception:
            logger.exception("the core failed on %s", type(event).__name__)
            if not (isinstance(event, ports.Arrived) and self._fail_alone(event.request.request_id, num_issued)):
                self._fail("internal error in the scheduler", is_bug=True)

    def _fail_alone(self, request_id: RequestId, num_issued: int) -> bool:
        """End the one request whose arrival raised. False when more than its place in a queue may be wrong.

        What the core had decided before it raised is lost, so this is sound only if that was nothing: no worker was to
        be told anything (``num_issued`` still holds), and every other open stream still has its request.
        """
        core = self.core
        try:
            if core.num_issued != num_issued or not core.withdraw(request_id):
                return False
        except AssertionError:
            logger.exception("the core's books do not agree without request %s", request_id)
            return False
        live = core.state.requests
        if any(name not in live or live[name].is_finished for name in self._streams.ids if name != request_id):
            return False
        self._streams.fail(request_id, "the request could not be scheduled")
        return True

    def _on_worker_event(self, worker_id: WorkerId, event: m.Event) -> None:
        if self._warm_up is not None:
            self._warm_up.on_event(worker_id, event)
        elif self._driver is not None and self._state != "failed":
            if isinstance(event, ports.StepFailed) and event.lost_worker is not None and self._suspects is not None:
                self._suspects.suspect(event.lost_worker, event.step_id)
            try:
                self._driver.on_worker_event(event, time.monotonic_ns())
            except Exception:
                logger.exception("the core failed on %s", type(event).__name__)
                self._fail("internal error in the scheduler", is_bug=True)

    # --- workers that die -------------------------------------------------------------------------------------

    def _on_worker_exit(self, worker_id: WorkerId, returncode: int) -> None:
        if self._crew is None or self._state == "failed":
            return
        logger.error("worker %d ended with code %d", worker_id, returncode)
        if self._driver is None or self._restarter is None:
            if self._warm_up is not None:
                self._warm_up.fail(f"worker {worker_id} ended with code {returncode}")
            self._fail(f"worker {worker_id} is gone")
            return
        self._handle(ports.WorkerLost(worker_id))
        self._restarter.worker_lost(worker_id, self._crew.why_over(worker_id))

    def _on_worker_joined(self, ready: m.WorkerReady) -> None:
        assert self._driver is not None and self._crew is not None and self._provisioner is not None
        assert self._weights is not None and self._suspects is not None
        life = self._crew.life(ready.worker_id)
        self._crew.send(ready.worker_id, m.AdoptWeights(self._weights))
        logger.warning("worker %d is there (life %d)", ready.worker_id, life)
        self._own_products.note([ready])
        self._driver.on_worker_event(ready, time.monotonic_ns())
        self._suspects.joined(ready.worker_id)
        self._provisioner.joined(ready.worker_id, self.core)
        self._handle(ports.WorkerJoined(ready.worker_id, ready.capacity_blocks, life))
        self._forget_info()  # it may be longer again

    def _on_worker_waits(self, worker_id: WorkerId, reason: str) -> None:
        if self._restarter is not None:
            self._restarter.note_waits(worker_id, reason)
        self._handle(ports.StartFailed(worker_id, reason))

    def _forget_info(self) -> None:
        """The longest request that fits may be another now."""
        self._info = None

    def _on_worker_gone(self, worker_id: WorkerId) -> None:
        self._handle(ports.WorkerGone(worker_id))
        self._forget_info()
        if self.core.max_request_blocks() == 0:
            self._fail("too many workers are gone: nothing can serve")

    def _fail(self, reason: str, *, is_bug: bool = False) -> None:
        if is_bug and self.on_bug is not None:
            self.on_bug()
        self._state = "failed"
        self.failure = reason
        if self.on_failure is not None:
            self.on_failure()
        self._streams.fail_all("the engine failed; the request was not completed")

    def _on_record(self, record: ports.Record) -> None:
        (self._preempted_log if record.kind == "preempted" else self.event_log).append(record)
        if self._driver is not None:
            log_move(record, self._driver.core)

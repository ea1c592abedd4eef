"""A whole cluster in virtual time: the real core, modelled workers, links and faults.

``ClusterCore`` is imported and called, never copied: events go in, and its actions are carried out in order, as
``live.engine.driver`` does. The differences from a live cluster are the clock (``sim.loop``), the executor
(``sim.executor``), the memory (``sim.memory``) and the links (``sim.network``, ``sim.transfers``).

    cluster = SimulatedCluster(setup)          # sim.setup
    cluster.submit(request, at_ns)             # as many as there are
    cluster.run()                              # until everything has ended
    cluster.core.state.counters, cluster.log.hexdigest

``jettison.simulate.run.simulate_workload`` does this for a workload and makes a ``RunResult`` of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.core.founding import initial_groups
from jettison.core.load.bubbles import BubbleMeter
from jettison.core.observing import RunObserver, group_gauges, transfers_under_way
from jettison.memory.kvtransfers import MigrationKind
from jettison.sim.breaking import Breaking
from jettison.sim.eventlog import EventLog
from jettison.sim.executor import StepLoad
from jettison.sim.fastforward import FastForwards, Tell, Times
from jettison.sim.faults import Fault
from jettison.sim.loop import ARRIVAL, LATE, EventLoop, Scheduled
from jettison.sim.memory import home_memory
from jettison.sim.network import Network
from jettison.sim.provisioning import Starts
from jettison.sim.setup import ClusterSetup
from jettison.sim.tasks import FarRows, StepRun
from jettison.sim.transfers import Transfers
from jettison.sim.worker import SimWorker
from jettison.types import GroupId, Request, RequestId, ShardId, WorkerId

TICKS_REMEMBERED = 110
"""The core's longest memory of ticks is 10 s."""


class SimulatedCluster:
    """One core and its modelled workers. Used once: time does not run back."""

    def __init__(
        self, setup: ClusterSetup, *,
        on_emit: Callable[[ports.Emit, int], None] | None = None,
        on_record: Callable[[ports.Record], None] | None = None,
        on_event: Callable[[ports.Event, int], None] | None = None,
        on_tokens: Tell | None = None,
        observer: RunObserver | None = None,
    ) -> None:
        """``on_tokens`` takes tokens of one step or several: each of these requests has got one at each of these times,
        and goes on. Without it ``on_emit``, which otherwise takes the ends of requests alone, takes every token by
        itself, and no steps are told of together. ``on_event`` sees every event before the core
        does: a recording replays. ``observer`` is told of everything, as by ``live.engine.driver``, so steps are not
        taken together. Raises BudgetError.
        """
        self.setup = setup
        self.loop = EventLoop()
        self.log = EventLog()
        self.bubbles = BubbleMeter()
        self.num_activations = 0
        self.activation_ns = 0
        """Time that activations were on their way between stages, summed."""
        self.shape = setup.shape
        self.executor = setup.executor
        self.profile = setup.profile
        self.has_copy_engine = setup.topology.host is not None
        self.network = Network(self.loop, setup.topology)
        self.transfers = Transfers(
            self.loop, self.network, setup.piece_bytes, setup.piece_ns, coordinate=setup.coordinate_links
        )
        self._on_emit = on_emit
        self._on_record = on_record
        self._on_event = on_event
        self._on_tokens = on_tokens
        self._observer = observer
        self._shared_copies: dict[int | None, set[ShardId]] = {}
        self.shares_cores = setup.profile.shares_cores
        fast_forwards = observer is None and not self.shares_cores and (on_tokens is not None or on_emit is None)
        self._compress = setup.compress and fast_forwards
        self._workers = _workers_at_home(self, setup)
        self._capacity = {w: worker.memory.capacity_blocks for w, worker in self._workers.items()}
        params = replace(setup.params, machine_of=setup.topology.near, card_of=setup.topology.card_of)
        self.core = ClusterCore(
            setup.shape, setup.limits, params, self._capacity, setup.secret,
            catch_up=self._settle_group, catch_up_all=self._settle_all,
        )
        self.fast_forwards = FastForwards(
            self, self.loop, self.core.fast_forward, setup.hops.command_ns, setup.hops.report_ns
        )
        self._including_now = True
        self.breaking = Breaking(self)
        self._starts = Starts(self, setup.start_ns)
        for worker_id in sorted(self._workers)[setup.num_at_start :]:
            self._workers[worker_id].die()
        self._num_arriving = 0
        self._tick: Scheduled | None = None
        self._next_tick_ns = setup.tick_ns

    # --- for users --------------------------------------------------------------------------------------------

    def submit(self, request: Request, at_ns: int | None = None) -> None:
        """Have a request arrive, at a time or now."""
        self.expect_arrival(self.loop.now_ns if at_ns is None else at_ns, lambda: self.arrive_now(request))

    def expect_arrival(self, at_ns: int, send: Callable[[], None]) -> None:
        """Expect ``send`` to call ``arrive_now`` at that time (it may not): for sources of many requests."""
        self._num_arriving += 1

        def arrive() -> None:
            self._num_arriving -= 1
            send()

        self.loop.at(at_ns, arrive, ARRIVAL)
        self.start_ticks()

    def arrive_now(self, request: Request) -> None:
        """A request arrives in this moment."""
        self.handle(ports.Arrived(request))

    def cancel(self, request_id: RequestId, at_ns: int) -> None:
        """A client hangs up at a time."""
        self.loop.at(at_ns, lambda: self.handle(ports.CancelRequested(request_id)), ARRIVAL)

    def inject(self, faults: Iterable[Fault]) -> None:
        """Plan these faults."""
        self.breaking.plan(faults)
        self.start_ticks()

    def request_drop(self) -> None:
        """Merge groups now, whatever the load."""
        self.stop_fast_forwards()
        self._carry_out(self.core.request_drop(self.loop.now_ns))

    def request_restore(self) -> None:
        """Restore merged groups now, whatever the load."""
        self.stop_fast_forwards()
        self._carry_out(self.core.request_restore(self.loop.now_ns))

    def request_migration(
        self, request_id: RequestId, destination: GroupId, kind: MigrationKind, max_step_tokens: int | None = None
    ) -> None:
        """Have a request go to another group, if it can go there now."""
        self.stop_fast_forwards()
        self._carry_out(self.core.request_migration(
            request_id, destination, self.loop.now_ns, kind=kind, max_step_tokens=max_step_tokens
        ))

    def request_migrations(self, destinations: Mapping[RequestId, GroupId], kinds: Collection[MigrationKind]) -> None:
        """Have requests go to other groups, each in the kind that is best for it and the others; some wait for the next
        epoch."""
        self.stop_fast_forwards()
        self._carry_out(self.core.request_migrations(destinations, self.loop.now_ns, kinds))

    def request_sleep(self, worker_ids: Sequence[WorkerId], level: int = 2) -> None:
        """Put workers to sleep now. Raises ValueError where they cannot."""
        self.stop_fast_forwards()
        self._carry_out(self.core.request_sleep(worker_ids, level, self.loop.now_ns))

    def request_wake(self, worker_id: WorkerId) -> None:
        """Wake a worker now. Raises ValueError for one that does not sleep."""
        self.stop_fast_forwards()
        self._carry_out(self.core.request_wake(worker_id, self.loop.now_ns))

    def run(self, until_ns: int | None = None, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run until the cluster is at rest, until a time, or until ``is_over`` is true."""
        self.start_ticks()
        self.loop.run(until_ns, is_over)
        self.settle()

    @property
    def is_at_rest(self) -> bool:
        """Nothing is expected, running or on its way, and no group is merged that would be restored."""
        if self._num_arriving or self.breaking.num_ahead or not self.core.state.is_idle() or self.core.in_transition:
            return False
        if not self._starts.is_idle:
            return False
        params = self.core.params
        restores = "restore" in params.rungs and params.auto_restore
        return not restores or all(len(group.stages) == 1 for group in self.core.groups.values())

    @property
    def workers(self) -> dict[WorkerId, SimWorker]:
        """Modelled workers, for reading."""
        return self._workers

    # --- the core's events and actions ------------------------------------------------------------------------

    def handle(self, event: ports.Event) -> None:
        """Let the core handle an event, and carry its actions out."""
        now_ns = self.loop.now_ns
        observer = self._observer
        if isinstance(event, ports.Tick):
            self._next_tick_ns = now_ns + self.setup.tick_ns
        else:
            self._pass_ticks()
        if not self.fast_forwards.is_idle:
            self._catch_up(event)
        self.log.note_event(now_ns, event)
        if self._on_event is not None:
            self._on_event(event, now_ns)
        if observer is not None and isinstance(event, ports.TransferEnded):
            observer.transfer_ended(event, now_ns)
        self._carry_out(self.core.handle(event, now_ns))
        if observer is not None:
            observer.transfers_left(transfers_under_way(self.core), now_ns)
            if isinstance(event, ports.Tick):
                observer.looked(group_gauges(self.core), now_ns)
        if not self.fast_forwards.is_idle:
            self._cut_what_decides(event)
        self.start_ticks()

    def settle(self) -> None:
        """Bring the core's books up to now. They lag behind where decode steps are advanced together."""
        self._including_now = True
        self._pass_ticks()
        self.fast_forwards.settle(self._tell_tokens)

    def stop_fast_forwards(self, *, including_now: bool = True) -> None:
        """Settle, and go on step by step until the next fast-forward: the cluster is about to change."""
        self._pass_ticks()
        self.fast_forwards.cut_all(self._tell_tokens, including_now=including_now)

    def _catch_up(self, event: ports.Event) -> None:
        """Before the core handles an event: commit the steps that it depends on. For other steps the core itself asks
        (``_settle_group``, ``_settle_all``). A client's event comes before steps that end at the same time, a tick
        after them."""
        self._including_now = not isinstance(event, ports.Arrived | ports.CancelRequested)
        due_ns = self.core.fast_forward.due_ns
        is_due = due_ns is not None and self.loop.now_ns >= due_ns
        if is_due or not isinstance(event, ports.StepCompleted | ports.Arrived | ports.Tick):
            self._settle_all()

    def _settle_all(self) -> None:
        if not self.fast_forwards.is_idle:
            self.fast_forwards.settle(self._tell_tokens, including_now=self._including_now)

    def _settle_group(self, group_id: GroupId) -> None:
        if not self.fast_forwards.is_idle:
            self.fast_forwards.settle_group(group_id, self._tell_tokens, including_now=self._including_now)

    def _cut_what_decides(self, event: ports.Event) -> None:
        """After an event: groups that now have something to decide go on step by step."""
        match event:
            case _ if not self.core.fast_forward.is_quiet:
                self.stop_fast_forwards(including_now=self._including_now)
            case ports.StepCompleted():
                pass
            case ports.Arrived():
                state = self.core.state.requests.get(event.request.request_id)
                if state is not None:
                    self.fast_forwards.cut(state.group_id, self._tell_tokens, including_now=False)
            case ports.Tick():
                for group_id in sorted(self.core.state.changes.queued):
                    self.fast_forwards.cut(group_id, self._tell_tokens)
            case _:
                self.stop_fast_forwards(including_now=self._including_now)

    def _tell_tokens(self, request_ids: Sequence[RequestId], ends_ns: Times) -> None:
        if self._on_tokens is not None:
            self._on_tokens(request_ids, ends_ns)

    def _carry_out(self, actions: list[ports.Action]) -> None:
        now_ns = self.loop.now_ns
        told: list[ports.EmitTokens | ports.Emit | ports.Record] = []
        arrives_ns = now_ns + self.setup.hops.command_ns
        observer = self._observer
        for action in actions:
            if observer is not None and isinstance(action, ports.Transfer):
                observer.transfer_begun(action, now_ns)
            match action:
                case ports.RunStep():
                    self._issue(action, arrives_ns)
                case ports.EmitTokens() | ports.Emit() | ports.Record():
                    told.append(action)
                case ports.AskInstance() | ports.ReleaseInstance():
                    self._starts.carry_out(action)
                case ports.AbandonStep():
                    self._after_hop(action.worker_id, partial(SimWorker.abandon, step_id=action.step_id))
                case ports.CancelTransfer():
                    self._after_hop(action.src, partial(SimWorker.cancel_transfer, transfer_id=action.transfer_id))
                case ports.FenceWorker():
                    self._after_hop(action.worker_id, partial(self.breaking.close_link, lost=action.lost))
                    self._workers[action.worker_id].deliver(action, arrives_ns)
                case ports.SendKV() | ports.SendShard():
                    if isinstance(action, ports.SendKV) and action.beside_steps:
                        # The copy begins between steps that are taken together, and slows the later ones.
                        self.fast_forwards.cut_at(action.src, self._tell_tokens, including_now=self._including_now)
                    self._workers[action.src].deliver(action, arrives_ns)
                case _:
                    self._workers[action.worker_id].deliver(action, arrives_ns)
        for action in told:
            if isinstance(action, ports.EmitTokens):
                self._emit_tokens(action, now_ns)
                continue
            self.log.note_action(now_ns, action)
            if isinstance(action, ports.Record):
                if observer is not None:
                    observer.recorded(action)
                if self._on_record is not None:
                    self._on_record(action)
                continue
            if observer is not None:
                observer.emitted(action)
            if self._on_emit is not None:
                self._on_emit(action, now_ns)

    def _emit_tokens(self, action: ports.EmitTokens, now_ns: int) -> None:
        if self._observer is not None:
            for emit in action.each():
                self._observer.emitted(emit)
        if self._on_tokens is not None:
            self._on_tokens([state.request_id for state in action.states], np.array((now_ns,), np.int64))
        elif self._on_emit is not None:
            for emit in action.each():
                self._on_emit(emit, now_ns)

    def _after_hop(self, worker_id: WorkerId, act: Callable[[SimWorker], None]) -> None:
        """Call ``act`` at a worker after a hop, out of turn, if the worker lives now and in the same life then."""
        worker, life = self._workers[worker_id], self._workers[worker_id].life
        if not worker.alive:
            return
        self.loop.after(self.setup.hops.command_ns, lambda: act(worker) if worker.life == life else None)

    def _issue(self, step: ports.RunStep, arrives_ns: int) -> None:
        self.bubbles.issued(step)
        if self._observer is not None:
            self._observer.step_issued(step)
        work = self.core.groups[step.group_id].in_flight[step.step_id].work
        load = StepLoad.of(work, [row.samples for row in step.rows].count(True))
        if load.num_samples == load.num_tokens and len(step.stages) == 1 and self._compress:
            run, lone = StepRun(step, load, {}, {}), self._workers[step.stages[0].worker_id]
            repeats = bool(self.breaking.copies_after_ns(lone.worker_id))
            if not repeats and self.fast_forwards.begin(run, lone, arrives_ns):
                return
        run = StepRun(step, load, self._far_rows(step), self._high_blocks(step))
        for index, stage in enumerate(step.stages):
            worker = self._workers[stage.worker_id]
            if worker.alive:
                worker.deliver_step(run, index, arrives_ns)

    def _far_rows(self, step: ports.RunStep) -> dict[WorkerId, list[FarRows]]:
        """Rows of each stage that attend to KV at peers."""
        totals: dict[tuple[WorkerId, WorkerId, int, int], tuple[int, int]] = {}
        for row in step.rows:
            for part in row.remote:
                key = (part.dst, part.src, *part.layers)
                tokens, rows = totals.get(key, (0, 0))
                held = part.num_blocks * self.setup.limits.block_size
                totals[key] = (tokens + held * row.num_tokens, rows + row.num_tokens)
        far: dict[WorkerId, list[FarRows]] = {}
        for (dst, src, lo, hi), (tokens, rows) in totals.items():
            far.setdefault(dst, []).append(FarRows(src, hi - lo, tokens, rows))
        return far

    def _high_blocks(self, step: ports.RunStep) -> dict[WorkerId, int]:
        """1 + the highest block that a step touches, by worker; only where a dropped shard may come back by mapping
        alone, as it does not matter elsewhere."""
        high: dict[WorkerId, int] = {}
        for stage in step.stages:
            if self._workers[stage.worker_id].memory.has_intact_shards:
                ledger = self.core.state.workers[stage.worker_id].ledger
                tables = (ledger.table(row.state.request_id).ids for row in step.rows)
                high[stage.worker_id] = 1 + max((max(ids) for ids in tables if ids), default=-1)
        return high

    # --- ticks ------------------------------------------------------------------------------------------------

    def start_ticks(self) -> None:
        """Schedule the next tick, where it could decide something, or an observer looks at it."""
        is_planned = self._tick is not None and self._tick.is_pending
        counts = self._observer is not None
        if not is_planned and (counts or self.core.awaits_tick) and not self.is_at_rest:
            at_ns = max(self._next_tick_ns, self.loop.now_ns)
            self._tick = self.loop.at(at_ns, lambda: self.handle(ports.Tick()), LATE)

    def _pass_ticks(self) -> None:
        """Ticks before this moment had nothing to decide: have the core note them together."""
        tick_ns, now_ns = self.setup.tick_ns, self.loop.now_ns
        if now_ns <= self._next_tick_ns:
            return
        # The first one at this moment or later.
        next_ns = -(-now_ns // tick_ns) * tick_ns
        if next_ns > self._next_tick_ns and not self.core.awaits_tick:
            first_ns = max(self._next_tick_ns, next_ns - TICKS_REMEMBERED * tick_ns)
            self.core.skip_ticks(range(first_ns, next_ns, tick_ns))
        self._next_tick_ns = max(self._next_tick_ns, next_ns)

    # --- for workers (sim.plant.Plant) -----------------------------------------------------------------------

    def report(self, worker_id: WorkerId, event: ports.Event, at_ns: int) -> Scheduled:
        """Send an event to the controller; the events of one worker arrive in order."""
        worker = self._workers[worker_id]
        at_ns = max(at_ns + self.setup.hops.report_ns + worker.extra_hop_ns, worker.last_report_ns)
        worker.last_report_ns = at_ns
        life = worker.life
        copies_after_ns = self.breaking.copies_after_ns(worker_id)
        if not copies_after_ns:
            return self.loop.at(at_ns, lambda: self._receive(worker_id, life, event))

        def arrive() -> None:
            # Copies follow the first report: where a death or a lost link cancels that one, no copy is sent.
            for delay_ns in copies_after_ns:
                self.loop.after(delay_ns, lambda: self._receive(worker_id, life, event))
            self._receive(worker_id, life, event)

        return self.loop.at(at_ns, arrive)

    def _receive(self, worker_id: WorkerId, life: int, event: ports.Event) -> None:
        if self.breaking.is_told_dead(worker_id, life):
            return  # reports of a dead worker are not delivered
        if isinstance(event, ports.StepCompleted | ports.StepFailed | ports.StepAbandoned):
            self.bubbles.ended(event.step_id)
            if self._observer is not None:
                self._observer.step_ended(event.step_id)
            if (group_id := self.fast_forwards.group_of(event.step_id)) is not None:
                self._pass_ticks()
                self.fast_forwards.settle_ended(group_id, self._tell_tokens)
            if isinstance(event, ports.StepFailed) and event.lost_worker is not None:
                self.breaking.suspect(event.lost_worker)
        self.handle(event)

    def worker(self, worker_id: WorkerId) -> SimWorker:
        """A worker by its id."""
        return self._workers[worker_id]

    def is_linked(self, a: WorkerId, b: WorkerId) -> bool:
        """Both workers live, and the link between them is not cut."""
        return self._workers[a].alive and self._workers[b].alive and not self.breaking.is_cut(a, b)

    def shared_copy(self, worker_id: WorkerId) -> set[ShardId]:
        """See ``Plant.shared_copy``."""
        return self._shared_copies.setdefault(self.setup.topology.near.get(worker_id), set())

    def slowdown(self) -> float:
        """The time of a step that begins now over its time alone."""
        if not self.shares_cores:
            return 1.0
        now_ns = self.loop.now_ns
        return self.profile.slowdown(1 + sum(worker.is_busy(now_ns) for worker in self._workers.values()))

    @property
    def is_watched(self) -> bool:
        """Stages of groups of one stage are to be reported, too."""
        return self._observer is not None

    def note_stage(self, worker_id: WorkerId, step_id: int, started_ns: int, ended_ns: int) -> None:
        """A stage computes its part from ``started_ns`` to ``ended_ns``."""
        self.bubbles.stage_done(worker_id, step_id, started_ns, ended_ns)
        if self._observer is not None:
            self._observer.stage_done(worker_id, step_id, started_ns, ended_ns)

    def note_activation(self, delay_ns: int) -> None:
        """An activation was on its way for ``delay_ns``."""
        self.num_activations += 1
        self.activation_ns += delay_ns


def _workers_at_home(cluster: SimulatedCluster, setup: ClusterSetup) -> dict[WorkerId, SimWorker]:
    """Each with the layers of the stage that it starts as. Raises BudgetError."""
    groups = initial_groups(range(setup.num_workers), setup.shape, static_pipeline=setup.params.static_pipeline)
    return {
        stage.worker_id: SimWorker(stage.worker_id, cluster, partial(
            home_memory, setup.shape, setup.limits.block_size, setup.memory.budget_bytes,
            setup.memory.workspace_bytes, setup.memory.page_bytes, stage.layers, setup.memory.drops,
        ))
        for stages in groups
        for stage in stages
    }

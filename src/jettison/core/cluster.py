"""The core of the whole cluster, sans-I/O: ``handle(event, now_ns) -> actions``.

Dispatches requests to groups, lets groups plan steps, watches for overload, and runs the moves (``core.merging``,
``core.restoring``). One call handles one event completely; the same events at the same times give the same actions.

Every accepted request ends with exactly one ``Emit`` that has a finish reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jettison.core.balancing import Balancing
from jettison.core.dropping import ScaleOutWatch, kv_region_bytes, merge_candidate, required_bytes
from jettison.core.group import GroupCore, SchedulerLimits
from jettison.core.merging import MergePhase, Merging
from jettison.core.monitor import GroupMonitor, TrafficMonitor
from jettison.core.ports import (
    Action,
    Arrived,
    CallFailed,
    CancelRequested,
    Emit,
    Event,
    FinishRequested,
    LayoutApplied,
    LayoutOffered,
    MoveEnded,
    Record,
    ShardLoaded,
    StepCompleted,
    StepFailed,
    Tick,
    WorkerFenced,
    WorkerGone,
    WorkerJoined,
    WorkerLost,
)
from jettison.core.recovering import FaultParams, Recoveries
from jettison.core.rehousing import Rehousing, max_request_blocks
from jettison.core.relief import Relief
from jettison.core.request import Phase, RequestState
from jettison.core.restoring import RestorePhase, Restoring, fits, room_blocks
from jettison.core.state import ClusterState, WorkerState
from jettison.core.swapping import Swapping
from jettison.cost.hardware import HardwareProfile
from jettison.cost.steptime import StepTimeModel, StepTimePrior
from jettison.memory.blocks import BlockLedger
from jettison.memory.layout import LayoutSpec
from jettison.memory.prefix import PrefixHasher
from jettison.policy.computeload import Arrangement, compute_load
from jettison.policy.dispatch import GroupFreeness, choose_group
from jettison.policy.exchange import ExchangeCosts, ExchangeMode
from jettison.policy.merge import (
    DropPlan,
    MergeStrategy,
    PlannerParams,
    StagePlan,
    plan_drop,
    throughput_cost,
)
from jettison.policy.migration import MigrationParams
from jettison.policy.overload import Assessment, OverloadParams, assess_overload, foreseen_missing_blocks
from jettison.policy.pipeline import plan_static_groups
from jettison.policy.ranges import Pull
from jettison.policy.rebalance import GroupQueue, QueuedRequest, plan_rebalance
from jettison.policy.restore import (
    MergedLoad,
    RestoreParams,
    SplitPlan,
    is_drowning,
    plan_splits,
    should_restore,
    should_yield,
)
from jettison.policy.swapping import SwapParams
from jettison.types import NANOSECONDS, FinishReason, GroupId, ModelShape, Request, RequestId, WorkerId

OverloadPolicy = Literal["drop", "recompute", "swap", "migrate", "pipeline"]
"""What is done when KV memory runs out; all but the first are baselines (docs/baselines.md)."""


@dataclass(frozen=True, slots=True)
class ClusterParams:
    """Policies and their parameters."""

    overload_policy: OverloadPolicy = "drop"
    overload: OverloadParams = field(default_factory=OverloadParams)
    restore: RestoreParams = field(default_factory=RestoreParams)
    swap: SwapParams = field(default_factory=SwapParams)
    migration: MigrationParams = field(default_factory=MigrationParams)
    drop_dwell_s: float = 0.5
    """Least time between the end of one move of a group and its next drop."""
    growth_factor: float = 1.2
    """Room to grow when computing what a plan must free: queued prompts will produce tokens."""
    rebalance: bool = True
    """Send waiting requests that a group's batch has no place for to other groups (KunServe v1 section 4.3)."""
    batch_limit: int | None = None
    """Requests that an instance can usefully run at once; None = what the profile says, else ``max_num_seqs``."""
    planner: MergeStrategy = "throughput"
    """How far to merge: as little as suffices (KunServe v3), or until the added KV exceeds the first (v1)."""
    link_bytes_per_s: float = 1e9
    """Expected rate of a pull where there is no profile, for the choice between pulling and not merging."""
    exchange: ExchangeMode = ExchangeMode.AUTO
    """How stalled requests get to run again after a merge."""
    auto_restore: bool = True
    """False leaves restoring to ``request_restore`` (experiments with restore off; verification)."""
    profile: HardwareProfile | None = None
    """What steps and moves cost here, where it was profiled."""
    faults: FaultParams = field(default_factory=FaultParams)


class ClusterCore:
    """Groups, requests and the moves between them."""

    def __init__(
        self,
        shape: ModelShape,
        limits: SchedulerLimits,
        params: ClusterParams,
        capacity_blocks: Mapping[WorkerId, int],
        secret: bytes,
    ) -> None:
        self.params = params
        groups = initial_groups(params.overload_policy, sorted(capacity_blocks), shape)
        workers = {
            s.worker_id: WorkerState(
                s.worker_id, BlockLedger(capacity_blocks[s.worker_id], limits.block_size),
                capacity_blocks[s.worker_id], LayoutSpec(shape.shards_for(s.layers), s.layers),
            )
            for stages in groups
            for s in stages
        }
        self.state = ClusterState(shape, limits, PrefixHasher(limits.block_size, secret), workers)
        self.state.profiled_cost = None if params.profile is None else params.profile.cost
        self.state.exchange_mode = params.exchange
        self.state.exchange_costs = self._exchange_costs
        self.merges: list[Merging] = []
        self.restores: list[Restoring] = []
        self.rehousing = Rehousing(self.state, params.faults, self._place)
        self.scale_out = ScaleOutWatch()
        self.steptimes: dict[int, StepTimeModel] = {}
        """Step-time fit by number of stages: a deeper pipeline steps faster and more often."""
        self.traffic = TrafficMonitor()
        self._monitors: dict[GroupId, GroupMonitor] = {}
        for stages in groups:
            self.state.form_group(stages)
        self.relief = Relief()
        """What a policy other than dropping does."""
        if params.overload_policy == "swap":
            self.relief = Swapping(self.state, params.swap)
        elif params.overload_policy == "migrate":
            self.relief = Balancing(self.state, params.migration)
        self.recoveries = Recoveries(self.state, params.faults, groups, self.relief)

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def groups(self) -> dict[GroupId, GroupCore]:
        """Groups that exist now."""
        return self.state.groups

    @property
    def in_transition(self) -> bool:
        """Some move is under way."""
        return bool(self.merges or self.restores) or not self.recoveries.is_idle

    @property
    def _moves(self) -> list[Merging | Restoring]:
        """Moves under way."""
        return [*self.merges, *self.restores]

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission."""
        return sum(len(g.waiting) for g in self.groups.values()) + len(self.state.homeless)

    def max_request_blocks(self) -> int:
        """Blocks that one request could ever get: an undropped member's, or a stage's when all members merge.

        Dead workers count unless they are gone for good: requests can wait for them.
        """
        return max_request_blocks(self.state, may_merge=self.params.overload_policy == "drop")

    # --- the one entry ----------------------------------------------------------------------------------------

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Everything that follows from one event at one time."""
        actions = self._on(event, now_ns)
        self.state.recompute_distrusted()
        actions += self._advance_moves(now_ns)
        actions += self.rehousing.advance(now_ns)
        actions += self.relief.before_steps(self._moving_workers(), now_ns)
        actions += self._plan_steps(now_ns)
        actions += self.relief.after_steps(now_ns)
        for group in self.groups.values():
            self._monitor(group).note_blocked(group, now_ns)
        return actions

    def _on(self, event: Event, now_ns: int) -> list[Action]:
        match event:
            case Arrived():
                self._dispatch(event.request)
                return []
            case StepCompleted():
                return self._on_step(event, now_ns) + self._watch(now_ns)
            case StepFailed():
                return self._on_step_failed(event, now_ns)
            case CancelRequested():
                return self._end_early(event.request_id, FinishReason.CANCELLED, now_ns)
            case FinishRequested():
                return self._end_early(event.request_id, FinishReason.STOP, now_ns)
            case LayoutOffered() | LayoutApplied() | CallFailed():
                return self._on_layout(event, now_ns)
            case ShardLoaded():
                return self._first_answer([r.on_shard_loaded(event, now_ns) for r in (*self._moves, self.recoveries)])
            case WorkerLost():
                return self._on_worker_lost(event, now_ns)
            case WorkerJoined():
                return self._on_worker_joined(event, now_ns)
            case WorkerGone():
                return self._on_worker_gone(event, now_ns)
            case WorkerFenced():
                return [a for ended in self.recoveries.on_fenced(event) for a in self._on(ended, now_ns)]
            case MoveEnded():
                if self.recoveries.on_move(event, now_ns) is not None:
                    return []
                self.state.open_moves.pop(event.move_id, None)
                for move in self._moves:
                    actions = move.on_move(event, now_ns)
                    if actions is not None:
                        return actions
                return self.relief.on_move(event, now_ns) or []
            case Tick():
                self.traffic.look(now_ns)
                for group in self.groups.values():
                    self._monitor(group).look(group, now_ns)
                looks = self._rebalance(now_ns) + self._watch(now_ns)
                return looks + self.scale_out.look(self.state, self.groups.values(), now_ns)

    @staticmethod
    def _first_answer(answers: list[list[Action] | None]) -> list[Action]:
        return next((a for a in answers if a is not None), [])

    # --- requests ---------------------------------------------------------------------------------------------

    @property
    def num_issued(self) -> int:
        """Steps, calls and moves begun so far: while it stays the same, no worker has been asked for anything."""
        return self.state.next_step_id + self.state.next_call_id + self.state.next_move_id

    def withdraw(self, request_id: RequestId) -> bool:
        """Take out a request whose arrival raised, as if it had never come. False when it is more than queued.

        Raises AssertionError when the books do not agree without it: then the core cannot go on.
        """
        state = self.state.requests.get(request_id)
        if state is not None:
            if state.phase is not Phase.WAITING:
                return False
            group = self.groups.get(state.group_id)
            if group is not None and state in group.waiting:
                group.take_out(state)
            self.state.homeless.pop(request_id, None)
            del self.state.requests[request_id]
        self.check()
        return True

    def _dispatch(self, request: Request) -> None:
        state = RequestState(request, self.state.next_order)
        self.state.next_order += 1
        self.traffic.note_arrival(len(request.prompt_token_ids))
        self.state.requests[request.request_id] = state
        if self._place(state):
            # Here only: a request that changes its queue later is no new demand.
            group = self.groups[state.group_id]
            fresh = group.blocks_for(state.num_prompt) * (1.0 - self._prefix_hit_share())
            self._monitor(group).num_arrived_blocks += round(fresh)

    def _place(self, state: RequestState) -> bool:
        """Queue a request in the freest group; False if there is none and it has to wait for one."""
        open_groups = [g for g in self.groups.values() if not self._is_emptying(g)]
        if not open_groups:
            self.state.homeless[state.request_id] = state
            return False
        self.state.homeless.pop(state.request_id, None)
        needed = open_groups[0].blocks_for(len(state.tokens))
        chosen = choose_group([self._freeness(g) for g in open_groups], needed)
        assert chosen is not None
        self.groups[chosen].enqueue(state)
        return True

    def _is_emptying(self, group: GroupCore) -> bool:
        """A pipeline whose members already serve on their own takes nothing new."""
        return any(r.group is group and r.has_split for r in self.restores)

    def _freeness(self, group: GroupCore) -> GroupFreeness:
        return GroupFreeness(
            group.group_id,
            min(group.capacity_blocks, group.admission_cap_blocks or group.capacity_blocks),
            group.used_blocks,
            group.queued_blocks() + self.relief.owed_blocks(group),
            len(group.running) + len(group.moving) + len(group.waiting),
            len(group.stages),
        )

    def _on_step(self, event: StepCompleted, now_ns: int) -> list[Action]:
        group = self._group_of_step(event.step_id)
        if group is None:
            return []
        flight = group.in_flight[event.step_id]
        seconds = (now_ns - flight.issued_ns) / NANOSECONDS
        self.steptime(len(group.stages)).observe(flight.num_tokens, flight.num_kv_tokens, seconds)
        self.relief.note_step(group, seconds)
        chunks = ((row.num_tokens, row.context_len) for row in flight.step.rows)
        group.chunk_cost.observe(chunks, event.compute_ns / NANOSECONDS)
        actions: list[Action] = []
        for result in group.commit(event, now_ns):
            if result.finish_reason is None:
                actions.append(Emit(result.state.request_id, (result.token,), state=result.state))
            elif result.finish_reason is FinishReason.ERROR:
                actions += self.state.end(result.state, FinishReason.ERROR, now_ns, error="no token could be sampled")
                actions += self._stop_moves_of(result.state)
            else:
                self.traffic.note_end(result.state.num_output)
                self._note_stay(group, result.state, now_ns)
                actions += self.state.end(
                    result.state, result.finish_reason, now_ns,
                    tokens=(result.token,), stop_token_id=result.stop_token_id,
                )
                actions += self._stop_moves_of(result.state)
        for row in flight.step.rows:
            self.state.counters.num_live_rows += bool(row.remote)
            self.state.reap(row.state)
        return actions

    def _note_stay(self, group: GroupCore, state: RequestState, now_ns: int) -> None:
        if state.first_scheduled_ns is not None:
            stay_s = (now_ns - state.first_scheduled_ns) / NANOSECONDS
            self.traffic.note_stay(group.blocks_for(len(state.tokens)), stay_s)

    def _on_step_failed(self, event: StepFailed, now_ns: int) -> list[Action]:
        group = self._group_of_step(event.step_id)
        if group is None:
            return []
        actions: list[Action] = [Record("step_failed", now_ns, {"step": event.step_id, "message": event.message})]
        if event.recompute and event.lost_worker is None:
            return actions + self._compute_again(group, event.step_id)
        for state in group.fail(event.step_id):
            if event.lost_worker is not None:
                # The step is not to blame, and the group cannot go on: whoever is lost will be declared dead.
                group.paused = True
                self.state.reap(state)
                continue
            actions += self.state.end(state, FinishReason.ERROR, now_ns, error="the model step failed")
            actions += self._stop_moves_of(state)
            self.state.reap(state)
        return actions

    def _compute_again(self, group: GroupCore, step_id: int) -> list[Action]:
        """A peer did not compute attention: rows that need none run again; others start again from their tokens."""
        remote = {r.state.request_id for r in group.in_flight[step_id].step.rows if r.remote}
        actions: list[Action] = []
        for state in group.fail(step_id):
            # Chunks that were planned to follow this one have run on KV that is not there.
            if state.ending is None and (state.request_id in remote or state.num_pending):
                actions += self._stop_moves_of(state)
                self.state.distrust(state)
            self.state.reap(state)
        return actions

    def _group_of_step(self, step_id: int) -> GroupCore | None:
        return next((g for g in self.groups.values() if step_id in g.in_flight), None)

    def _end_early(
        self, request_id: RequestId, reason: FinishReason, now_ns: int, error: str | None = None
    ) -> list[Action]:
        state = self.state.requests.get(request_id)
        if state is None or state.is_finished:
            return []
        if state.num_output:
            self.traffic.note_end(state.num_output)
        stop = self._stop_moves_of(state)
        return stop + self.state.end(state, reason, now_ns, error=error)

    def _stop_moves_of(self, state: RequestState) -> list[Action]:
        actions: list[Action] = []
        for move in self._moves:
            actions += move.cancel(state)
        return actions + self.relief.cancel(state)

    def _rebalance(self, now_ns: int) -> list[Action]:
        """Waiting requests that a full batch keeps out go to groups that can run them."""
        if not self.params.rebalance or len(self.groups) < 2 or not self.num_waiting:
            return []
        busy = self._busy_workers()
        plan = plan_rebalance([self._group_queue(g, busy) for g in self.groups.values()])
        for entry in plan:
            state = self.state.requests[entry.request_id]
            self.groups[entry.source].take_out(state)
            self.groups[entry.destination].enqueue(state)
        if not plan:
            return []
        self.state.counters.num_rebalanced += len(plan)
        return [Record("rebalanced", now_ns, {"requests": len(plan), "to": sorted({e.destination for e in plan})})]

    def _group_queue(self, group: GroupCore, busy: set[WorkerId]) -> GroupQueue:
        num_stages, profile, most = len(group.stages), self.params.profile, self.state.limits.max_num_seqs
        limit = self.params.batch_limit or (profile.batch_limit(num_stages) if profile is not None else None)
        return GroupQueue(
            group.group_id,
            # A pipeline has as many microbatches in flight as stages, each of them a batch.
            most if limit is None else min(limit * num_stages, most),
            len(group.running) + len(group.moving),
            group.num_free_blocks - group.watermark_blocks(),
            [QueuedRequest(s.request_id, group.blocks_for(len(s.tokens))) for s in group.waiting],
            takes_new=not set(group.worker_ids) & busy and group.admission_cap_blocks is None,
        )

    # --- dead workers -----------------------------------------------------------------------------------------

    def _on_worker_lost(self, event: WorkerLost, now_ns: int) -> list[Action]:
        if not self.state.workers[event.worker_id].alive:
            return []
        involved = [m for m in self._moves if event.worker_id in m.worker_ids]
        self.merges = [m for m in self.merges if m not in involved]
        self.restores = [r for r in self.restores if r not in involved]
        actions = self.recoveries.lose(event.worker_id, involved, now_ns)
        for ended in self.recoveries.ended_with(event.worker_id):
            actions += self._on(ended, now_ns)
        self._settle(tuple(w for m in involved for w in m.worker_ids), now_ns)
        return actions

    def _on_worker_joined(self, event: WorkerJoined, now_ns: int) -> list[Action]:
        actions = self.recoveries.join(event, now_ns)
        self.rehousing.share_queues()
        self._settle((event.worker_id,), now_ns)
        return actions

    def _on_worker_gone(self, event: WorkerGone, now_ns: int) -> list[Action]:
        """Requests that only fit with this worker's memory have nothing left to wait for."""
        self.state.workers[event.worker_id].is_gone = True
        actions: list[Action] = [Record("worker_gone", now_ns, {"worker": event.worker_id})]
        room = self.max_request_blocks() * self.state.limits.block_size
        for state in list(self.state.requests.values()):
            most = min(state.num_prompt + state.request.params.max_tokens, self.state.limits.max_model_len)
            if most > room:
                actions += self._end_early(
                    state.request_id, FinishReason.ERROR, now_ns, "a worker whose memory it needs is gone for good"
                )
        return actions

    # --- steps ------------------------------------------------------------------------------------------------

    def _plan_steps(self, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        for group in list(self.groups.values()):
            while True:
                step = group.next_step(self.state.next_step_id, now_ns)
                if step is None:
                    break
                self.state.next_step_id += 1
                actions.append(step)
        return actions

    # --- moves ------------------------------------------------------------------------------------------------

    def _on_layout(self, event: LayoutOffered | LayoutApplied | CallFailed, now_ns: int) -> list[Action]:
        for move in (*self._moves, self.recoveries):
            actions = move.on_layout(event, now_ns)
            if actions is not None:
                return actions
        return []

    def _advance_moves(self, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        for merge in list(self.merges):
            actions += merge.advance(now_ns)
            if merge.is_over:
                self.merges.remove(merge)
                self._settle(merge.worker_ids, now_ns, failed=merge.phase is MergePhase.FAILED)
                if merge.phase is MergePhase.FAILED:
                    actions += self._return_again(merge, now_ns)
        for restore in list(self.restores):
            actions += restore.advance(now_ns)
            if restore.is_over:
                self.restores.remove(restore)
                self._settle(restore.worker_ids, now_ns, failed=restore.has_failed)
                if restore.phase is RestorePhase.TURNED and restore.has_split:
                    sources = [*restore.homes, restore.group]
                    actions += self._merge(sources, restore.group.stages, now_ns)
        if not self.recoveries.is_idle:
            recovering = tuple(self.recoveries.by_worker)
            actions += self.recoveries.advance(now_ns, {w for m in self._moves for w in m.worker_ids})
            if done := tuple(w for w in recovering if w not in self.recoveries.by_worker):
                self.rehousing.share_queues()
                self._settle(done, now_ns)
        return actions

    def _settle(self, worker_ids: tuple[WorkerId, ...], now_ns: int, *, failed: bool = False) -> None:
        for group in self.groups.values():
            if set(group.worker_ids) & set(worker_ids):
                monitor = self._monitor(group)
                monitor.settled_since_ns = now_ns
                monitor.num_failures = monitor.num_failures + 1 if failed else 0

    def _monitor(self, group: GroupCore) -> GroupMonitor:
        return self._monitors.setdefault(group.group_id, GroupMonitor())

    def _moving_workers(self) -> set[WorkerId]:
        return {w for move in self._moves for w in move.worker_ids} | self.recoveries.busy_workers()

    def _busy_workers(self) -> set[WorkerId]:
        return self._moving_workers() | set(self.relief.worker_ids)

    def _watch(self, now_ns: int) -> list[Action]:
        """Overload and restore checks: on every tick and after every step."""
        for group_id in [g for g in self._monitors if g not in self.groups]:
            del self._monitors[group_id]
        if self.params.overload_policy != "drop":
            return []
        actions: list[Action] = []
        for group in list(self.groups.values()):
            if group.group_id not in self.groups:
                continue
            assessment = self._assess(group, now_ns)
            if assessment.overloaded:
                actions += self._relieve(group, assessment, now_ns)
            elif assessment.declines and self._monitor(group).is_news(now_ns):
                actions.append(Record("drop_declined", now_ns, {"group": group.group_id} | assessment.as_fields()))
        if self.params.auto_restore:
            for group in list(self.groups.values()):
                actions += self._consider_restore(group, now_ns)
        return actions

    def _assess(self, group: GroupCore, now_ns: int) -> Assessment:
        steptime = self.steptime(len(group.stages))
        load = self._monitor(group).load(group, steptime, now_ns, self.traffic.mean_stay_s)
        num_stages = len(group.stages)
        merged, separate = (num_stages, 1) if self._is_restoring(group) else (num_stages + 1, num_stages)
        missing = foreseen_missing_blocks(load, self.params.overload)
        load = load._replace(
            foreseen_s=self._monitor(group).note_foreseen(missing, now_ns),
            merged_compute_load=self._compute_load(merged), separate_compute_load=self._compute_load(separate)
        )
        return assess_overload(load, self.params.overload)

    def _prefix_hit_share(self) -> float:
        """Share of prompt tokens that the prefix cache has spared."""
        counters = self.state.counters
        queries = counters.prefix_queries + sum(g.counters.prefix_queries for g in self.groups.values())
        hits = counters.prefix_hits + sum(g.counters.prefix_hits for g in self.groups.values())
        return hits / queries if queries else 0.0

    def _is_restoring(self, group: GroupCore) -> bool:
        return any(set(r.worker_ids) & set(group.worker_ids) for r in self.restores)

    def _compute_load(self, num_stages: int) -> float | None:
        """Of the whole cluster, were it made of groups of so many members; None while too little is known."""
        traffic = self.traffic.traffic(self._prefix_hit_share())
        if traffic is None:
            return None
        shape, limits = self.state.shape, self.state.limits
        token_bytes = shape.num_layers * shape.block_bytes_per_layer(limits.block_size) / limits.block_size
        workers = [w for w in self.state.workers.values() if w.alive]
        if not workers:
            return None
        full_tokens = min(w.full_blocks for w in workers) * limits.block_size
        spare_copies = (num_stages - 1) / num_stages
        arrangement = Arrangement(
            len(workers),
            full_tokens + spare_copies * shape.parameter_bytes / token_bytes,
            limits.max_num_seqs / num_stages,
            1.0 if num_stages == 1 else self.params.overload.pipeline_efficiency,
        )
        return compute_load(traffic, arrangement, self.steptime(1).predict_s)

    def steptime(self, num_stages: int) -> StepTimeModel:
        """The step-time fit of groups of so many stages; until it has data, the profile answers."""
        profile = self.params.profile
        if num_stages not in self.steptimes:
            prior = None if profile is None else StepTimePrior(profile.cost, num_stages)
            self.steptimes[num_stages] = StepTimeModel(prior=prior)
        return self.steptimes[num_stages]

    # --- drop -------------------------------------------------------------------------------------------------

    def _relieve(self, group: GroupCore, assessment: Assessment, now_ns: int) -> list[Action]:
        """A group is overloaded: turn a restore round, or drop."""
        members = set(group.worker_ids)
        for restore in self.restores:
            if members & set(restore.worker_ids):
                return restore.turn_round(now_ns, assessment.reason)
        if members & self._busy_workers() or not self._dwelled(group, now_ns):
            return []
        busy = self._busy_workers()
        free = [
            g for g in self.groups.values()
            if g is group or (not (set(g.worker_ids) & busy) and self._dwelled(g, now_ns))
        ]
        overloaded = [g for g in free if g is group or self._assess(g, now_ns).overloaded]
        required = required_bytes(self.state, overloaded, self.params.growth_factor)
        plan = self._plan_drop(free, required, group.group_id, assessment.memory_wait_s - assessment.compute_wait_s)
        actions: list[Action] = []
        if plan.merges:
            decision = {
                "group": group.group_id,
                "required_bytes": required,
                "freed_bytes": plan.freed_bytes,
                "sufficient": plan.sufficient,
                "overloaded_groups": [g.group_id for g in overloaded],
                "pulled_shards": sum(len(m.pulls) for m in plan.merges),
                "throughput_cost": self._throughput_cost(plan),
            } | assessment.as_fields()
            actions.append(Record("drop_decided", now_ns, decision))
        for merge in plan.merges:
            actions += self._merge([self.groups[g] for g in merge.sources], merge.stages, now_ns, merge.pulls)
        if not plan.sufficient and not busy:
            missing = required - plan.freed_bytes
            actions += self.scale_out.ask(group.group_id, missing, "no drop plan frees enough", now_ns)
        return actions

    def _plan_drop(
        self, groups: list[GroupCore], required: int, asking: GroupId | None, max_pull_s: float
    ) -> DropPlan:
        profile = self.params.profile
        rate = self.params.link_bytes_per_s if profile is None else profile.link_bytes_per_s
        params = PlannerParams(self.params.planner, kv_region_bytes(self.state), rate, max_pull_s)
        candidates = [merge_candidate(self.state, g) for g in groups]
        return plan_drop(candidates, required, self.state.shape, params, asking)

    def _throughput_cost(self, plan: DropPlan) -> float | None:
        """v1's cost of the groups that a plan leaves; None without a profile of such groups."""
        profile = self.params.profile
        if profile is None:
            return None
        merged = {g for m in plan.merges for g in m.sources}
        sizes = [len(m.stages) for m in plan.merges]
        sizes += [len(g.stages) for g in self.groups.values() if g.group_id not in merged]
        return throughput_cost(sizes, profile.group_tokens_per_s)

    def _exchange_costs(self, group: GroupCore) -> ExchangeCosts:
        """Prices as they were met so far: links by the transfers that have ended (before: as profiled), compute by the
        steps."""
        fit = self.steptimes.get(len(group.stages)) or self.steptimes.get(1) or StepTimeModel()
        size = self.state.limits.block_size
        rate = fit.prefill_tokens_per_s(self.state.limits.max_num_batched_tokens, 0, 0)
        profile = self.params.profile
        assumed = None if profile is None else profile.link_bytes_per_s
        return ExchangeCosts(
            lambda link: self.state.link_rate(link).bytes_per_s or assumed,
            lambda num_tokens: None if rate is None else num_tokens / rate,
            fit.predict_s(len(group.running) + len(group.moving), group.used_blocks * size),
        )

    def _dwelled(self, group: GroupCore, now_ns: int) -> bool:
        monitor = self._monitor(group)
        since = monitor.settled_since_ns
        return since is None or now_ns - since >= monitor.patience(self.params.drop_dwell_s) * NANOSECONDS

    def _merge(
        self, sources: list[GroupCore], stages: tuple[StagePlan, ...], now_ns: int,
        pulls: tuple[Pull, ...] = (),
    ) -> list[Action]:
        merge = Merging(self.state, sources, stages, now_ns, pulls)
        self.merges.append(merge)
        return merge.advance(now_ns)

    def request_drop(self, now_ns: int) -> list[Action]:
        """Merge the two smallest idle-of-moves groups whatever the load (administration, verification).

        Static pipelines stay as they are.
        """
        if self.params.overload_policy == "pipeline":
            return []
        busy = self._busy_workers()
        for restore in self.restores:
            return restore.turn_round(now_ns, "requested")
        idle = [g for g in self.groups.values() if not set(g.worker_ids) & busy]
        plan = self._plan_drop(idle, 1, None, math.inf)
        actions: list[Action] = []
        for merge in plan.merges:
            actions += self._merge([self.groups[g] for g in merge.sources], merge.stages, now_ns, merge.pulls)
        return actions + self._plan_steps(now_ns)

    # --- restore ----------------------------------------------------------------------------------------------

    def _consider_restore(self, group: GroupCore, now_ns: int) -> list[Action]:
        if len(group.stages) == 1:
            return []
        under_way = next((r for r in self.restores if r.group is group), None)
        if under_way is not None:
            return self._reconsider(under_way, now_ns)
        if set(group.worker_ids) & self._busy_workers():
            return []
        load, params = self._merged_load(group, now_ns), self.params.restore
        patient = replace(params, min_settled_s=self._monitor(group).patience(params.min_settled_s))
        if group.admission_cap_blocks is None:
            if should_restore(load, patient) and self._can_split(group):
                return self._restore(group, now_ns)
            if not should_yield(load, patient) or self._needs_merging(group):
                return []
            return [self._yield(group, load, now_ns)]
        if self._needs_merging(group):
            group.admission_cap_blocks = None
        elif group.used_blocks <= group.admission_cap_blocks and not group.moving:
            return self._restore(group, now_ns)
        return []

    def _reconsider(self, restore: Restoring, now_ns: int) -> list[Action]:
        """A restore whose members have not split yet: does what has arrived since let it come to an end?"""
        group = restore.group
        if not restore.may_still_wait or not group.waiting:
            return []
        if self._needs_merging(group):
            return restore.turn_round(now_ns, "a request needs all members' memory")
        load = self._merged_load(group, now_ns)
        if not restore.takes_queue_along and should_yield(load, self.params.restore):
            restore.take_queue_along()
            return [self._yield(group, load, now_ns), *restore.advance(now_ns)]
        return []

    def _yield(self, group: GroupCore, load: MergedLoad, now_ns: int) -> Record:
        """Compute binds: admit only what the members could hold when they take their layers back."""
        group.admission_cap_blocks = self._fitting_blocks(group)
        fields = {
            "group": group.group_id,
            "merged_compute_load": load.merged_compute_load,
            "separate_compute_load": load.separate_compute_load,
            "cap_blocks": group.admission_cap_blocks,
        }
        return Record("yield", now_ns, fields)

    def _can_split(self, group: GroupCore) -> bool:
        ways = plan_splits(group.stages, self.state.shape.num_layers)
        return any(fits(self.state, group, way) for way in ways)

    def _merged_load(self, group: GroupCore, now_ns: int) -> MergedLoad:
        monitor = self._monitor(group)
        since = monitor.settled_since_ns
        load = MergedLoad(
            group.used_blocks,
            sum(self.state.workers[w].full_blocks for w in group.worker_ids),
            len(group.waiting) + len(group.moving),
            monitor.used.per_s() or 0.0,
            0.0 if since is None else (now_ns - since) / NANOSECONDS,
            self._compute_load(len(group.stages)),
            self._compute_load(1),
        )
        drowns = is_drowning(load, self.params.restore)
        return load._replace(drowning_s=monitor.note_drowning(drowns, now_ns))

    def _needs_merging(self, group: GroupCore) -> bool:
        """Some request is too large for a member on its own."""
        least = min(self.state.workers[w].full_blocks for w in group.worker_ids)
        states = (*group.waiting, *group.running.values(), *group.moving.values())
        return any(group.blocks_for(s.num_prompt + s.request.params.max_tokens) > least for s in states)

    def _fitting_blocks(self, group: GroupCore) -> int:
        """Blocks that may be held when the members take layers back, in the way of splitting that has most room."""
        ways = plan_splits(group.stages, self.state.shape.num_layers)
        most = max(min(room_blocks(self.state, part) for part in way.parts) for way in ways)
        return most - most // 7

    def _restore(self, group: GroupCore, now_ns: int, homes: list[GroupCore] | None = None) -> list[Action]:
        """Begin a restore with the first way of splitting that fits, the furthest one if none does."""
        ways = plan_splits(group.stages, self.state.shape.num_layers)
        split = next((way for way in ways if fits(self.state, group, way)), ways[0])
        if homes:
            split = SplitPlan(tuple(g.stages for g in homes))
        yields = group.admission_cap_blocks is not None
        restore = Restoring(self.state, group, split, now_ns, homes, with_queue=yields)
        self.restores.append(restore)
        return restore.advance(now_ns)

    def _return_again(self, merge: Merging, now_ns: int) -> list[Action]:
        """A merge failed. If it was to put a turned restore together again, its requests go on returning home."""
        for group in merge.sources:
            homes = [g for g in merge.sources if g is not group]
            if homes and sorted(w for g in homes for w in g.worker_ids) == sorted(group.worker_ids):
                return self._restore(group, now_ns, homes)
        return []

    def request_restore(self, now_ns: int) -> list[Action]:
        """Restore every merged group that no move is touching (administration, verification), static ones excepted."""
        if self.params.overload_policy == "pipeline":
            return []
        actions: list[Action] = []
        for group in list(self.groups.values()):
            if len(group.stages) > 1 and not set(group.worker_ids) & self._busy_workers():
                actions += self._restore(group, now_ns)
        return actions + self._plan_steps(now_ns)

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Invariants 5 to 7, for tests and idle moments. Raises AssertionError."""
        self.state.check()
        self.relief.check()
        assert all(m.phase is not MergePhase.SETTLED for m in self.merges)


def initial_groups(
    policy: OverloadPolicy, worker_ids: Sequence[WorkerId], shape: ModelShape
) -> tuple[tuple[StagePlan, ...], ...]:
    """Groups and stages that a cluster starts with: workers must load exactly these layers."""
    if policy == "pipeline":
        return plan_static_groups(worker_ids, shape)
    return tuple((StagePlan(w, shape.all_layers),) for w in worker_ids)


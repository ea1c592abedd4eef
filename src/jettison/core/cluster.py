"""The core of the whole cluster, sans-I/O: ``handle(event, now_ns) -> actions``.

Dispatches requests to groups, lets groups plan steps, watches for overload, and runs the moves (``core.merging``,
``core.restoring``). One call handles one event completely; the same events at the same times give the same actions.

Every accepted request ends with exactly one ``Emit`` that has a finish reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from jettison.core.balancing import Balancing
from jettison.core.dispatching import Dispatcher
from jettison.core.dropping import ScaleOutWatch
from jettison.core.group import GroupCore, SchedulerLimits
from jettison.core.loads import Loads
from jettison.core.merging import MergePhase, Merging
from jettison.core.monitor import TrafficMonitor
from jettison.core.moves import Moves
from jettison.core.params import ClusterParams, OverloadPolicy
from jettison.core.ports import (
    Action,
    Arrived,
    CallFailed,
    CancelRequested,
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
from jettison.core.recovering import Recoveries
from jettison.core.rehousing import Rehousing, max_request_blocks
from jettison.core.relief import Relief
from jettison.core.request import Phase, RequestState
from jettison.core.restoring import Restoring
from jettison.core.state import ClusterState, WorkerState
from jettison.core.stepping import Stepping
from jettison.core.strides import Strides
from jettison.core.swapping import Swapping
from jettison.core.watching import Watching
from jettison.cost.steptime import StepTimeModel
from jettison.memory.blocks import BlockLedger
from jettison.memory.layout import LayoutSpec
from jettison.memory.prefix import PrefixHasher
from jettison.policy.merge import StagePlan
from jettison.policy.pipeline import plan_static_groups
from jettison.types import FinishReason, GroupId, ModelShape, Request, RequestId, WorkerId

__all__ = ["ClusterCore", "ClusterParams", "OverloadPolicy", "initial_groups"]


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
        self.state.machine_of = params.machine_of
        for stages in groups:
            self.state.form_group(stages)
        relief = Relief()
        if params.overload_policy == "swap":
            relief = Swapping(self.state, params.swap)
        elif params.overload_policy == "migrate":
            relief = Balancing(self.state, params.migration)
        self.recoveries = Recoveries(self.state, params.faults, groups, relief)
        self.loads = Loads(self.state, params)
        self.state.exchange_costs = self.loads.exchange_costs
        self.moves = Moves(self.state, self.loads, self.recoveries, relief)
        self.watching = Watching(self.state, self.loads, self.moves)
        self.dispatcher = Dispatcher(self.state, self.loads, self.moves)
        self.rehousing = Rehousing(self.state, params.faults, self.dispatcher.place)
        self.strides = Strides(self.state, self.loads, self.moves, self.recoveries)
        self.stepping = Stepping(self.state, self.loads, self.moves)

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def groups(self) -> dict[GroupId, GroupCore]:
        """Groups that exist now."""
        return self.state.groups

    @property
    def params(self) -> ClusterParams:
        """Policies and their parameters; others may be put in their place between two events."""
        return self.loads.params

    @params.setter
    def params(self, params: ClusterParams) -> None:
        self.loads.params = params
        self.state.machine_of = params.machine_of

    @property
    def relief(self) -> Relief:
        """What a policy other than dropping does."""
        return self.moves.relief

    @relief.setter
    def relief(self, relief: Relief) -> None:
        self.moves.relief = relief

    @property
    def merges(self) -> list[Merging]:
        """Drops under way."""
        return self.moves.merges

    @property
    def restores(self) -> list[Restoring]:
        """Restores under way."""
        return self.moves.restores

    @property
    def scale_out(self) -> ScaleOutWatch:
        """Requests for more instances."""
        return self.watching.scale_out

    @property
    def traffic(self) -> TrafficMonitor:
        """What arrives, and how long answers are."""
        return self.loads.traffic

    def steptime(self, num_stages: int) -> StepTimeModel:
        """The step-time fit of groups of so many stages; until it has data, the profile answers."""
        return self.loads.steptime(num_stages)

    @property
    def in_transition(self) -> bool:
        """Some move is under way."""
        return not (self.moves.is_idle and self.recoveries.is_idle)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission."""
        return sum(len(self.groups[g].waiting) for g in self.state.changes.queued) + len(self.state.homeless)

    def predicted_wait_s(self, now_ns: int) -> float:
        """How long a request that came now would wait for admission."""
        return self.loads.predicted_wait_s(now_ns)

    def num_waiting_of(self, tenant: str) -> tuple[int, int]:
        """A tenant's requests that wait for admission, and how many tenants wait, this one counted in."""
        waiting: Counter[str] = Counter(state.tenant for state in self.state.homeless.values())
        for group_id in self.state.changes.queued:
            waiting.update(self.groups[group_id].waiting.num_by_tenant())
        return waiting[tenant], len(waiting.keys() | {tenant})

    def max_request_blocks(self) -> int:
        """Blocks that one request could ever get: an undropped member's, or a stage's when all members merge.

        Dead workers count unless they are gone for good: requests can wait for them. 0 when nothing can serve again.
        """
        may_merge = self.params.overload_policy == "drop"
        return max_request_blocks(self.state, self.recoveries.homes, may_merge=may_merge)

    # --- the one entry ----------------------------------------------------------------------------------------

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Everything that follows from one event at one time."""
        actions = self._on(event, now_ns)
        if self.state.distrusted:
            self.state.recompute_distrusted()
        actions += self._advance_moves(now_ns)
        actions += self.rehousing.advance(now_ns)
        actions += self.dispatcher.rebalance_merged(now_ns)
        relief = self.moves.relief
        actions += relief.before_steps(self.moves.moving_workers(), now_ns)
        actions += self.stepping.plan(now_ns)
        actions += relief.after_steps(now_ns)
        self._follow_up(now_ns)
        return actions

    def _on(self, event: Event, now_ns: int) -> list[Action]:
        match event:
            case Arrived():
                return self._dispatch(event.request, now_ns)
            case StepCompleted():
                return self.stepping.on_completed(event, now_ns) + self.watching.look(now_ns, after_step=True)
            case StepFailed():
                return self.stepping.on_failed(event, now_ns)
            case CancelRequested():
                return self._end_early(event.request_id, FinishReason.CANCELLED, now_ns)
            case FinishRequested():
                return self._end_early(event.request_id, FinishReason.STOP, now_ns)
            case LayoutOffered() | LayoutApplied() | CallFailed():
                answer = self.moves.on_layout(event, now_ns)
                return (self.recoveries.on_layout(event, now_ns) if answer is None else answer) or []
            case ShardLoaded():
                answer = self.moves.on_shard_loaded(event, now_ns)
                return (self.recoveries.on_shard_loaded(event, now_ns) if answer is None else answer) or []
            case WorkerLost():
                return self._on_worker_lost(event, now_ns)
            case WorkerJoined():
                return self._on_worker_joined(event, now_ns)
            case WorkerGone():
                return self._on_worker_gone(event, now_ns)
            case WorkerFenced():
                return [a for ended in self.recoveries.on_fenced(event) for a in self._on(ended, now_ns)]
            case MoveEnded():
                if (actions := self.recoveries.on_move(event, now_ns)) is not None:
                    return actions
                transfer = self.state.open_moves.pop(event.move_id, None)
                answer = self.moves.on_move(event, transfer, now_ns)
                return (self.relief.on_move(event, now_ns) if answer is None else answer) or []
            case Tick():
                # Whatever was done between two events (an administrator's order) is seen by this tick.
                for group in self.state.changed_groups():
                    self.loads.note_totals(group)
                self.loads.note_tick(now_ns)
                looks = self.dispatcher.rebalance(now_ns) + self.watching.look(now_ns)
                return looks + self.scale_out.look(self.state, now_ns)

    # --- ticks ------------------------------------------------------------------------------------------------

    @property
    def awaits_tick(self) -> bool:
        """A tick now could decide something. Otherwise, until the next event, ``skip_ticks`` does for every tick."""
        state, changes = self.state, self.state.changes
        return bool(
            changes.touched or changes.ledgers or changes.unnoted or changes.queued or state.pipelines
            or state.homeless or state.distrusted or self.in_transition or self.scale_out.is_open
            or self.relief.awaits_tick or self.watching.foresees
        )

    def skip_ticks(self, times_ns: Sequence[int]) -> None:
        """Ticks came at these times (ascending, since the last event) and there was nothing to decide.

        Does what handling them would have done, at next to no cost: a driver in virtual time need not stop for them.
        Raises AssertionError where ``awaits_tick``.
        """
        assert not self.awaits_tick, "ticks that decide something cannot be skipped"
        self.loads.note_ticks(times_ns)

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

    def _dispatch(self, request: Request, now_ns: int) -> list[Action]:
        state = RequestState(request, self.state.next_order)
        self.state.next_order += 1
        why_not = self.rehousing.cut_to_room(state)
        if why_not is not None:
            return [self.state.refuse(state, why_not, now_ns)]
        self.traffic.note_arrival(len(request.prompt_token_ids))
        self.state.requests[request.request_id] = state
        if self.dispatcher.place(state):
            self.loads.note_arrival(self.groups[state.group_id], state)
        return []

    def _end_early(
        self, request_id: RequestId, reason: FinishReason, now_ns: int, error: str | None = None
    ) -> list[Action]:
        state = self.state.requests.get(request_id)
        if state is None or state.is_finished:
            return []
        self.loads.note_cut_short(state)
        stop = self.moves.cancel(state) + self.relief.cancel(state)
        return stop + self.state.end(state, reason, now_ns, error=error)

    # --- dead workers -----------------------------------------------------------------------------------------

    def _on_worker_lost(self, event: WorkerLost, now_ns: int) -> list[Action]:
        if not self.state.workers[event.worker_id].alive:
            return []
        involved = self.moves.take_out(event.worker_id)
        actions = self.recoveries.lose(event.worker_id, involved, now_ns)
        for ended in self.recoveries.ended_with(event.worker_id):
            actions += self._on(ended, now_ns)
        self.loads.note_settled(tuple(w for m in involved for w in m.worker_ids), now_ns)
        self.stepping.forget_ended()
        return actions

    def _on_worker_joined(self, event: WorkerJoined, now_ns: int) -> list[Action]:
        actions = self.recoveries.join(event, now_ns)
        self.rehousing.note_room(self.max_request_blocks())
        self.rehousing.share_queues()
        self.loads.note_settled((event.worker_id,), now_ns)
        return actions

    def _on_worker_gone(self, event: WorkerGone, now_ns: int) -> list[Action]:
        """Requests that only fit with this worker's memory have nothing left to wait for; those that nobody wanted
        that long are cut where memory now ends."""
        self.state.workers[event.worker_id].is_gone = True
        actions: list[Action] = [Record("worker_gone", now_ns, {"worker": event.worker_id})]
        self.rehousing.note_room(self.max_request_blocks())
        for state in list(self.state.requests.values()):
            if (why_not := self.rehousing.cut_to_room(state)) is not None:
                actions += self._end_early(state.request_id, FinishReason.ERROR, now_ns, why_not)
        return actions

    # --- the end of an event ----------------------------------------------------------------------------------

    def _follow_up(self, now_ns: int) -> None:
        """At the end of an event: remember what it has touched, and how those groups are now."""
        changes = self.state.changes
        noted = changes.unnoted
        noted |= changes.touched
        for group_id in noted:
            if (group := self.groups.get(group_id)) is not None:
                self.loads.note_group(group, now_ns)
        self.loads.note_waiting(bool(changes.queued or self.state.homeless), now_ns)
        if self.state.pipelines:
            self.scale_out.note_touched(noted)
        changes.recent, changes.unnoted = noted, set()

    # --- moves ------------------------------------------------------------------------------------------------

    def _advance_moves(self, now_ns: int) -> list[Action]:
        actions = self.moves.advance(now_ns)
        if not self.recoveries.is_idle:
            recovering = tuple(self.recoveries.by_worker)
            actions += self.recoveries.advance(now_ns)
            if done := tuple(w for w in recovering if w not in self.recoveries.by_worker):
                self.rehousing.share_queues()
                self.loads.note_settled(done, now_ns)
        return actions

    def request_drop(self, now_ns: int) -> list[Action]:
        """Merge the two smallest idle-of-moves groups whatever the load (administration, verification).

        Static pipelines stay as they are.
        """
        return self.watching.request_drop(now_ns) + self.stepping.plan(now_ns)

    def request_restore(self, now_ns: int) -> list[Action]:
        """Restore every merged group that no move is touching (administration, verification), static ones excepted."""
        return self.watching.request_restore(now_ns) + self.stepping.plan(now_ns)

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


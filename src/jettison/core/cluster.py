"""The core of the whole cluster, sans-I/O: ``handle(event, now_ns) -> actions``.

Dispatches requests to groups, lets groups plan steps, watches for overload, and runs the moves
(``core.moving.merging``, ``core.moving.restoring``). One call handles one event completely; the same events at the
same times give the same actions.

Every accepted request ends with exactly one ``Emit`` that has a finish reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from jettison.core.changes import WaitsFor
from jettison.core.discards import told as told_of_slices
from jettison.core.driving.awake import Awake
from jettison.core.driving.dispatching import Dispatcher
from jettison.core.driving.fastforward import FastForward
from jettison.core.driving.filling import FillWatch
from jettison.core.driving.safepoints import Safepoints
from jettison.core.driving.standing import StandingWatch
from jettison.core.driving.stepping import Stepping
from jettison.core.driving.unplaced import Unplaced, max_request_blocks
from jettison.core.founding import initial_groups, initial_workers
from jettison.core.ladder.advising import Adviser
from jettison.core.ladder.climb import Ladder
from jettison.core.ladder.movekinds import reconsider
from jettison.core.ladder.orders import Orders
from jettison.core.ladder.rung import Moment
from jettison.core.load.views import Loads
from jettison.core.moving.checkpoints import Checkpoints
from jettison.core.moving.hosted import Hosted
from jettison.core.moving.leaving import Leaving
from jettison.core.moving.merging import MergePhase, Merging
from jettison.core.moving.migrations import Migrations
from jettison.core.moving.moves import Moves
from jettison.core.moving.recovering import Recoveries
from jettison.core.moving.restoring import Restoring
from jettison.core.moving.sleeping import Foresight, Sleepers
from jettison.core.params import ClusterParams
from jettison.core.ports import (
    Action,
    Arrived,
    CancelRequested,
    Event,
    FinishRequested,
    LinkLost,
    OfflineStored,
    Record,
    StartFailed,
    StepAbandoned,
    StepCompleted,
    StepFailed,
    Tick,
    WorkerGone,
    WorkerJoined,
    WorkerLost,
    WorkersEmpty,
)
from jettison.core.preemption import told
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.group import Group, SchedulerLimits
from jettison.core.state import Answers, ClusterState
from jettison.errors import ConfigError
from jettison.memory.kvtransfers import MigrationKind
from jettison.memory.prefix import PrefixHasher
from jettison.policy.refusal import why_not_offline
from jettison.policy.slo import Objectives, objectives
from jettison.policy.waketimes import left_s
from jettison.types import FinishReason, GroupId, ModelShape, Request, RequestId, WorkerId

__all__ = ["ClusterCore", "ClusterParams", "initial_groups"]


Pass = tuple[WaitsFor, Callable[[int], list[Action]]]
"""The collections that a pass waits for, and the pass itself, called with a time (ns) while one of them is not
empty."""


class ClusterCore:
    """Groups, requests and the moves between them."""

    def __init__(
        self, shape: ModelShape, limits: SchedulerLimits, params: ClusterParams,
        capacity_blocks: Mapping[WorkerId, int], secret: bytes, *,
        catch_up: Callable[[GroupId], None] = lambda group_id: None,
        catch_up_all: Callable[[], None] = lambda: None,
    ) -> None:
        """``catch_up``: a driver in virtual time that tells of steps late is asked to tell of all that have ended in a
        group, before its books are read; ``catch_up_all``: of all groups, before step times are predicted.
        """
        groups = initial_groups(sorted(capacity_blocks), shape, static_pipeline=params.static_pipeline)
        workers = initial_workers(groups, shape, limits, params, capacity_blocks)
        self.state = ClusterState(
            shape, limits, PrefixHasher(limits.block_size, secret), workers, params, self._answers,
            catch_up=catch_up, catch_up_all=catch_up_all,
        )
        for stages in groups:
            if all(workers[stage.worker_id].is_provisioned for stage in stages):
                self.state.form_group(stages)
        self.migrations = Migrations(self.state)
        self.recoveries = Recoveries(self.state, groups, self.hosted, self.migrations)
        self.moves = Moves(self.state, self.loads, self.recoveries, self._clear)
        self.sleepers = Sleepers(
            self.state, self.moves, self.recoveries, self.migrations, self.checkpoints, self._why_needed,
            Foresight(lambda worker_id: self.ladder.expect_wake(worker_id), left_s), self._note_room,
        )
        self._awake = Awake(self.state, self.moves, self.recoveries, self.sleepers, self._why_too_large)
        self.ladder = Ladder(
            params.rungs, self.state, self.loads, self.moves, self.hosted, self.checkpoints, self.migrations,
            self.sleepers,
        )
        self._orders = Orders(self.state, self.loads, self.moves)
        self.dispatcher = Dispatcher(self.state, self.moves, self.hosted, self.ladder)
        self.unplaced = Unplaced(self.state, self.dispatcher.place)
        self._room_without: tuple[object, tuple[int, ...]] | None = None
        """The last answer of ``_rooms_without``, and what it was asked for."""
        self._note_room()
        self.fast_forward = FastForward(
            self.state, self.loads, self.moves, self.recoveries, self.migrations, self.ladder
        )
        self._safepoints = Safepoints(self.state)
        self._filling = FillWatch(self.state, self.loads.outlook)
        self._standing = StandingWatch(self.state, self.moves, self.hosted.store)
        self._moving: tuple[Pass, ...] = (
            (self.moves.waits_for, self.moves.advance),
            (self.sleepers.waits_for, self.sleepers.advance),
            (self.recoveries.waits_for, self._advance_recoveries),
        )
        self._passes: tuple[Pass, ...] = (
            *self._moving,
            (self._awake.waits_for, self._awake.advance),
            (self.unplaced.waits_for, self.unplaced.advance),
            (self.dispatcher.waits_for, self.dispatcher.rebalance_merged),
            (self.migrations.waits_for, self.migrations.advance),
        )
        """Passes that an event may wake before steps are planned, in this order. A plain step wakes none of them."""
        self.stepping = Stepping(
            self.state, self.loads, self.moves, self._safepoints, self._stop_moves_of, self.ladder
        )

    def _answers(self, state: ClusterState) -> Answers:
        self.hosted = Hosted(state)
        self.checkpoints = Checkpoints(state, self.hosted.store)
        self.loads = Loads(state)
        return Answers(Adviser(state, self.loads), self.checkpoints.kept_tokens)

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def groups(self) -> dict[GroupId, Group]:
        """Groups that exist now."""
        return self.state.groups

    @property
    def params(self) -> ClusterParams:
        """Policies and their parameters."""
        return self.state.params

    def reconfigure(self, params: ClusterParams) -> None:
        """Put other parameters in the place of the present ones, between two events: all of them, or none.

        Raises ConfigError, and changes nothing, for another layout at the start, other host pools or another profile
        (memory and fits have been made from these), and for rungs that the ladder cannot change to (``Ladder.change``).
        """
        if (why := self.state.params.why_fixed(params)) is not None:
            raise ConfigError(f"{why} cannot be changed later")
        blocks_before = self.max_request_blocks()
        self.ladder.change(params.rungs)
        if (num_blocks := self.max_request_blocks()) != blocks_before:
            self._note_room()
            for state in self.state.requests.values():
                state.cut_default_length(num_blocks * self.state.limits.block_size)
        self.state.params = params
        for group in self.groups.values():
            group.touch()

    @property
    def merges(self) -> list[Merging]:
        """Drops under way."""
        return self.moves.merges

    @property
    def restores(self) -> list[Restoring]:
        """Restores under way."""
        return self.moves.restores

    @property
    def objectives(self) -> Objectives:
        """Latency objectives of online requests, as known now."""
        return objectives(self.params.offline.slo, self.state.predictor)

    @property
    def in_transition(self) -> bool:
        """Some move is under way."""
        return not (self.moves.is_idle and self.recoveries.is_idle and self.sleepers.is_idle)

    @property
    def num_waiting(self) -> int:
        """Online requests that wait for admission."""
        queued = (self.groups[g].queues.waiting for g in self.state.changes.queued_online)
        return sum(map(len, queued)) + len(self.state.unplaced_online())

    def max_request_blocks(self, *, is_offline: bool = False) -> int:
        """Blocks that one request could ever get: an undropped member's, or a stage's when all members merge, which
        they do for no offline request.

        Dead workers count unless they are gone for good: requests can wait for them. So do those that
        sleep: a request that needs them wakes them. 0 when nothing can serve again.
        """
        return self._max_request_blocks(may_merge=not is_offline and self.ladder.forms_pipelines)

    def _max_request_blocks(self, *, may_merge: bool, without: Collection[WorkerId] = ()) -> int:
        return max_request_blocks(self.state, self.recoveries.homes, may_merge=may_merge, without=without)

    def _note_room(self) -> None:
        self.unplaced.note_room(self.max_request_blocks(), self.max_request_blocks(is_offline=True))

    # --- the one entry ----------------------------------------------------------------------------------------

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Everything that follows from one event at one time."""
        actions = self.migrations.before_event() if self.migrations.left_late else []
        actions += self._on(event, now_ns)
        if self.state.distrusted:
            self.state.recompute_distrusted()
        for waits_for, advance in self._passes:
            if any(waits_for):
                actions += advance(now_ns)
        if self.ladder.looking[Moment.BEFORE_STEPS]:
            actions += self.ladder.climb(Moment.BEFORE_STEPS, now_ns)
        if self.state.changes.came:
            actions += self._safepoints.make_way(now_ns)
        actions += self.stepping.plan(now_ns)
        if self.ladder.copying:
            actions += self.ladder.after_steps(now_ns)
        if self.migrations.under_way:
            actions += self.migrations.after_steps(now_ns)
        if preempted := self.state.changes.preempted:
            actions += [Record("preempted", now_ns, fields) for fields in told(preempted)]
            preempted.clear()
        if discarded := self.state.changes.discarded:
            actions += [Record("slice_discarded", now_ns, fields) for fields in told_of_slices(discarded)]
            discarded.clear()
        self._follow_up(now_ns)
        return actions

    def _on(self, event: Event, now_ns: int) -> list[Action]:
        match event:
            case Arrived():
                return self._dispatch(event.request, now_ns)
            case StepCompleted():
                return self.stepping.on_completed(event, now_ns) + self._climb(Moment.STEP_ENDED, now_ns)
            case StepAbandoned():
                return self.stepping.on_abandoned(event, now_ns) + self._climb(Moment.STEP_ENDED, now_ns)
            case StepFailed():
                return self.stepping.on_failed(event, now_ns)
            case CancelRequested():
                return self._end_early(event.request_id, FinishReason.CANCELLED, now_ns)
            case FinishRequested():
                return self._end_early(event.request_id, FinishReason.STOP, now_ns)
            case LinkLost():
                return self.recoveries.part(event, now_ns)
            case WorkerLost():
                return self._on_worker_lost(event, now_ns)
            case WorkerJoined():
                return self._on_worker_joined(event, now_ns)
            case WorkerGone():
                return self._on_worker_gone(event, now_ns)
            case WorkersEmpty():
                return self.recoveries.start_empty(event.worker_ids, now_ns)
            case StartFailed():
                return self.sleepers.provisioning.failed(event.worker_id, event.reason, now_ns)
            case OfflineStored():
                self.state.stored_offline = event.works
                return []
            case Tick():
                # Changes made between two events (an administrator's order) are seen by this tick.
                for group in self.state.changed_groups():
                    self.loads.note_totals(group)
                self.loads.note_tick(now_ns)
                actions = self.dispatcher.rebalance(now_ns) + self._awake.for_outgrown(now_ns)
                actions += self._climb(Moment.TICK, now_ns)
                actions += reconsider(self.state, self.migrations, now_ns)
                return [*actions, *self._filling.look(now_ns), *self._standing.look(now_ns)]
            case _:
                return self.state.book.answer(event, now_ns)

    def _climb(self, moment: Moment, now_ns: int) -> list[Action]:
        self.loads.forget_dissolved()
        return self.ladder.climb(moment, now_ns)

    def _clear(self, worker_ids: Collection[WorkerId]) -> list[Action]:
        """Break off KV on its way to or from workers whose layers are about to change, whichever move has begun it."""
        self.hosted.give_way(worker_ids)
        return self.migrations.give_way(worker_ids)

    def _stop_moves_of(self, state: RequestState) -> list[Action]:
        actions = self.moves.cancel(state) + self.migrations.cancel(state)
        self.hosted.cancel(state)
        return actions

    # --- ticks ------------------------------------------------------------------------------------------------

    @property
    def awaits_tick(self) -> bool:
        """A tick now could decide something. Otherwise, until the next event, ``skip_ticks`` does for every tick."""
        state, changes = self.state, self.state.changes
        return bool(
            changes.touched or changes.ledgers or changes.unnoted or changes.queued or state.pipelines
            or state.unplaced or state.distrusted or self.in_transition or self.ladder.awaits_tick
            or self._standing.awaits_tick or self._filling.awaits_tick or self.migrations.may_change
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
        return self.state.next_step_id + self.state.book.next_call_id + self.state.book.next_transfer_id

    def withdraw(self, request_id: RequestId) -> bool:
        """Take out a request after its arrival raised, as if it had never come. False when it is past its queue.

        Raises AssertionError when the books do not agree without it: then the core cannot go on.
        """
        state = self.state.requests.get(request_id)
        if state is not None:
            if state.phase is not Phase.WAITING:
                return False
            group = self.groups.get(state.group_id)
            if group is not None and state in group.queues.queue_of(state):
                group.queues.take_out(state)
            self.state.unplaced.pop(request_id, None)
            self.state.forget(state)
        self.check()
        return True

    def _dispatch(self, request: Request, now_ns: int) -> list[Action]:
        state = RequestState(request, self.state.next_order, self.state.limits.scheduling_policy)
        self.state.next_order += 1
        why_not = self.unplaced.cut_to_room(state)
        if state.is_offline:
            why_not = why_not_offline(self.params.offline.serves) or why_not
        if why_not is not None:
            return [self.state.refuse(state, why_not, now_ns)]
        self.loads.note_accepted(state)
        self.state.requests[request.request_id] = state
        if self.dispatcher.place(state):
            self.loads.note_arrival(self.groups[state.group_id], state)
        return self._awake.for_request(state, now_ns) if self.sleepers.out else []

    def _end_early(
        self, request_id: RequestId, reason: FinishReason, now_ns: int, error: str | None = None
    ) -> list[Action]:
        state = self.state.requests.get(request_id)
        if state is None or state.is_finished:
            return []
        self.loads.note_cut_short(state)
        return self._stop_moves_of(state) + self.state.end(state, reason, now_ns, error=error)

    # --- dead workers -----------------------------------------------------------------------------------------

    def _on_worker_lost(self, event: WorkerLost, now_ns: int) -> list[Action]:
        if not self.state.workers[event.worker_id].alive:
            return []
        involved = self.moves.take_out(event.worker_id)
        self.sleepers.lost(event.worker_id, was_leaving=any(isinstance(move, Leaving) for move in involved))
        actions = self.recoveries.lose(event.worker_id, involved, now_ns)
        actions += self.recoveries.end_transfers_to(event.worker_id, now_ns)
        self.loads.note_settled(tuple(w for m in involved for w in m.worker_ids), now_ns)
        self.stepping.forget_ended()
        return actions

    def _on_worker_joined(self, event: WorkerJoined, now_ns: int) -> list[Action]:
        actions = self.recoveries.join(event, now_ns)
        actions += self.sleepers.joined(event.worker_id, now_ns)
        self._note_room()
        self.unplaced.share_queues()
        self.loads.note_settled((event.worker_id,), now_ns)
        return actions

    def _on_worker_gone(self, event: WorkerGone, now_ns: int) -> list[Action]:
        """End requests that only fit with this worker's memory: they have nothing left to wait for. Requests of a
        default length are cut where memory now ends."""
        actions = self.recoveries.give_up(event.worker_id, now_ns)
        self._note_room()
        for state in list(self.state.requests.values()):
            if (why_not := self.unplaced.cut_to_room(state)) is not None:
                actions += self._end_early(state.request_id, FinishReason.ERROR, now_ns, why_not)
            elif self.sleepers.out:
                actions += self._awake.for_request(state, now_ns)
        return actions

    # --- the end of an event ----------------------------------------------------------------------------------

    def _follow_up(self, now_ns: int) -> None:
        """At the end of an event: remember the groups that it has touched, and their present totals."""
        changes = self.state.changes
        noted = changes.unnoted
        noted |= changes.touched
        for group_id in noted:
            if (group := self.groups.get(group_id)) is not None:
                self.loads.note_group(group, now_ns)
        self.loads.note_waiting(bool(changes.queued_online or self.state.unplaced_online()), now_ns)
        self.ladder.note_touched(noted)
        changes.recent, changes.unnoted = noted, set()

    # --- moves ------------------------------------------------------------------------------------------------

    def _advance_moves(self, now_ns: int) -> list[Action]:
        return [a for waits_for, advance in self._moving if any(waits_for) for a in advance(now_ns)]

    def _advance_recoveries(self, now_ns: int) -> list[Action]:
        recovering = tuple(self.recoveries.by_worker)
        actions = self.recoveries.advance(now_ns)
        if done := tuple(w for w in recovering if w not in self.recoveries.by_worker):
            self.unplaced.share_queues()
            self.loads.note_settled(done, now_ns)
        return actions

    def request_drop(self, now_ns: int) -> list[Action]:
        """Merge the two smallest groups without a move under way, whatever the load (administration, verification).

        Static pipelines stay as they are.
        """
        return self._orders.drop(self.ladder, now_ns) + self.stepping.plan(now_ns)

    def request_restore(self, now_ns: int) -> list[Action]:
        """Restore every merged group that no move is touching (administration, verification), static ones excepted."""
        return self._orders.restore(self.ladder, now_ns) + self.stepping.plan(now_ns)

    def request_migration(
        self, request_id: RequestId, destination: GroupId, now_ns: int, *,
        kind: MigrationKind = MigrationKind.KV, max_step_tokens: int | None = None,
    ) -> list[Action]:
        """Have a request go to another group whatever the load (administration, verification); nothing where it cannot
        go now. ``max_step_tokens``: see ``Migrations.start``."""
        actions = self._orders.migrate(
            self.migrations, request_id, destination, now_ns, kind=kind, max_step_tokens=max_step_tokens
        )
        return actions + self.stepping.plan(now_ns) + self.migrations.after_steps(now_ns)

    def request_migrations(
        self, destinations: Mapping[RequestId, GroupId], now_ns: int,
        kinds: Collection[MigrationKind] = tuple(MigrationKind),
    ) -> list[Action]:
        """Have requests go to other groups whatever the load, each in the best of these kinds. A request that has to
        wait is to be asked for again in the next epoch (``params.moves.epoch_s``)."""
        actions = self._orders.migrate_all(self.migrations, destinations, now_ns, kinds)
        return actions + self.stepping.plan(now_ns) + self.migrations.after_steps(now_ns)

    def request_sleep(self, worker_ids: Sequence[WorkerId], level: int, now_ns: int) -> list[Action]:
        """Have workers that serve alone hand their requests on and give up all their layers (``Sleepers``). Raises
        ValueError where they cannot."""
        actions = self.sleepers.sleep(worker_ids, level, now_ns)
        return actions + self._advance_moves(now_ns) + self.unplaced.advance(now_ns) + self.stepping.plan(now_ns)

    def request_wake(self, worker_id: WorkerId, now_ns: int) -> list[Action]:
        """Have a worker that sleeps, or is about to, serve again. Raises ValueError for one that does not."""
        return self.sleepers.wake(worker_id, now_ns) + self._advance_moves(now_ns) + self.stepping.plan(now_ns)

    def _why_needed(self, without: Collection[WorkerId]) -> str | None:
        """Why some request could never be held without these workers; None: no request needs them."""
        rooms = self._rooms_without(without)
        reasons = (self.unplaced.why_too_large(state, *rooms) for state in self.state.requests.values())
        return next((why for why in reasons if why is not None), None)

    def _why_too_large(self, state: RequestState, without: Collection[WorkerId]) -> str | None:
        return self.unplaced.why_too_large(state, *self._rooms_without(without))

    def _rooms_without(self, without: Collection[WorkerId]) -> tuple[int, ...]:
        """Blocks that one request could have, merged and alone."""
        key = (self.state.num_roster_changes, self.ladder.forms_pipelines, frozenset(without))
        if self._room_without is None or self._room_without[0] != key:
            rooms = (self._max_request_blocks(may_merge=may, without=without) for may in (key[1], False))
            self._room_without = key, tuple(rooms)
        return self._room_without[1]

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Invariants 5 to 7, for tests and idle moments. Raises AssertionError."""
        self.state.check()
        self.sleepers.check()
        self.hosted.check()
        self.checkpoints.check()
        self.migrations.check()
        self.ladder.check()
        assert all(m.phase is not MergePhase.SETTLED for m in self.merges)

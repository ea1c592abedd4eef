"""The state of the cluster core: workers with their ledgers, groups, requests, and the counters that make ids.

Data and lookups only; decisions are in ``policy``, sequences in ``core.moving.merging`` and ``core.moving.restoring``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import NamedTuple

from jettison.core import residence
from jettison.core.advice import Advice
from jettison.core.changes import Changes
from jettison.core.counters import ClusterCounters
from jettison.core.discards import Discard
from jettison.core.params import ClusterParams
from jettison.core.pending import Book, Owner, TransferPurpose, TransferWaiter
from jettison.core.ports import Action, Emit, SendKV, StoredWork
from jettison.core.preemption import Preemption
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.group import Group, SchedulerLimits, Shared
from jettison.core.serving.virtualtokens import VirtualTokens
from jettison.cost.linkrate import LinkRate
from jettison.cost.predictor import StepTimePredictor
from jettison.memory.blocks import BlockLedger
from jettison.memory.hostpool import HostPool
from jettison.memory.kvtransfers import Place
from jettison.memory.layout import LayoutSpec
from jettison.memory.prefix import PrefixHasher
from jettison.memory.stages import StagePlan
from jettison.policy.exchange import LinkId
from jettison.policy.slo import Pace
from jettison.types import (
    FinishReason,
    GroupId,
    LayerRange,
    ModelShape,
    RequestId,
    SampledToken,
    ShardId,
    TransferId,
    WorkerId,
)


@dataclass(slots=True)
class WorkerState:
    """One worker's memory as the controller knows it."""

    worker_id: WorkerId
    ledger: BlockLedger
    full_blocks: int
    """Capacity with every layer resident."""
    layout: LayoutSpec
    pool: HostPool
    """Slots of its host pool."""
    unfilled: set[ShardId] = field(default_factory=set)
    """Shards of the layout that are mapped but not filled (yet)."""
    layout_version: int | None = None
    """Version of its page map since the last layout change that it has answered; None: not known."""
    num_relayouts_open: int = 0
    ledger_locked: bool = False
    """A shrinking layout is being applied: no block may change hands until the worker has answered."""
    alive: bool = True
    is_gone: bool = False
    """Dead, and will not be started again."""
    is_asleep: bool = False
    """It holds no layers and serves in no group until it is woken (``core.moving.sleeping``)."""
    is_provisioned: bool = True
    """It has a process, or had one that died and is started again. One without is dead, and sleeps until it is asked
    for (``core.moving.provisioning``)."""
    life: int = 0
    """Which life of the worker id; moves and links of older ones do not count."""
    ghosts: dict[RequestId, set[TransferId]] = field(default_factory=dict)
    """Tables of requests that have left because of a fault: held until no old step and none of these transfers can
    write to their blocks any more (``core.moving.recovering``)."""

    given_up: list[RequestId] = field(default_factory=list)
    """Names that hold nothing any more once the ledger is unlocked."""
    copying: set[RequestId] = field(default_factory=set)
    """Names under which copies beside steps hold the blocks and slots that they read and write here
    (``core.moving.checkpoints``)."""

    @property
    def can_serve(self) -> bool:
        """Plans may count on its memory."""
        return self.alive and not self.is_asleep

    @property
    def is_missed(self) -> bool:
        """It has died awake, and is being started again."""
        return self.is_provisioned and not (self.alive or self.is_gone or self.is_asleep)

    def give_up(self, name: RequestId) -> None:
        """Release the blocks that a name holds, if any: at once, or when the ledger is unlocked. The blocks that a
        layout moves as it is applied are those that were held when it was offered."""
        if self.ledger_locked:
            self.given_up.append(name)
        elif self.ledger.has(name):
            self.ledger.release(name)

    def unlock(self) -> None:
        """Let blocks change hands again, and release what was given up meanwhile."""
        self.ledger_locked = False
        names, self.given_up = self.given_up, []
        for name in names:
            self.give_up(name)

    def resident(self, shape: ModelShape) -> LayerRange:
        """Layers whose parameters it holds and may run (a contiguous range)."""
        has_all = self.layout.shards >= shape.all_shards and not self.unfilled
        return shape.all_layers if has_all else self.layout.kv_layers


class Answers(NamedTuple):
    """What parts of the state ask of the mechanisms, and these of policies."""

    advice: Advice
    kept_tokens: Callable[[RequestState], int]


@dataclass(slots=True)
class ClusterState:
    """All state of the core, in one place. Ids come from counters in here, so equal runs give equal ids."""

    shape: ModelShape
    limits: SchedulerLimits
    hasher: PrefixHasher
    workers: dict[WorkerId, WorkerState]
    params: ClusterParams
    """Policies and their numbers; every part of the core reads them here."""
    answers: InitVar[Callable[[ClusterState], Answers]]
    """Makes, of the state, what parts of it ask."""
    groups: dict[GroupId, Group] = field(default_factory=dict)
    requests: dict[RequestId, RequestState] = field(default_factory=dict)
    counters: ClusterCounters = field(default_factory=ClusterCounters)
    book: Book = field(init=False)
    """Calls and transfers under way."""
    unplaced: dict[RequestId, RequestState] = field(default_factory=dict)
    """Accepted requests without a group: no worker can take them now."""
    stored_offline: tuple[StoredWork, ...] = ()
    """Offline work that front ends have promised to finish by its deadline."""
    predictor: StepTimePredictor = field(init=False)
    """Predictor of the steps of all groups."""
    advice: Advice = field(init=False)
    """Decisions that mechanisms ask for."""
    kept_tokens: Callable[[RequestState], int] = field(init=False)
    """Called with a request that gives its blocks up; returns how many leading tokens keep their KV elsewhere."""
    catch_up: Callable[[GroupId], None] = lambda group_id: None
    """Called before the books of a group are read: some of its ended steps may not have been reported yet
    (``core.driving.fastforward``)."""
    catch_up_all: Callable[[], None] = lambda: None
    """The same for all groups, before the predictor answers."""
    link_rates: dict[LinkId, LinkRate] = field(default_factory=dict)
    distrusted: dict[RequestId, tuple[RequestState, Preemption]] = field(default_factory=dict)
    """Requests with ``recompute`` set, and why."""
    checked_versions: dict[WorkerId, int] = field(default_factory=dict)
    """Version of each worker's ledger that ``check`` has last found in order."""
    changes: Changes = field(default_factory=Changes)
    """Changes that groups note; shared with all of them."""
    tokens: VirtualTokens = field(init=False)
    """Virtual tokens that each tenant's online requests have been served; shared with all groups."""
    offline_tokens: VirtualTokens = field(init=False)
    """The same for offline requests."""
    groups_of: dict[WorkerId, list[Group]] = field(default_factory=dict)
    """Groups that use each worker: one, or several during a restore after its split; none for a dead worker."""
    shared_workers: set[WorkerId] = field(default_factory=set)
    """Workers that several groups use."""
    pipelines: dict[GroupId, Group] = field(default_factory=dict)
    """Groups of several stages."""
    num_dissolved: int = 0
    """Groups dissolved so far."""
    next_group_id: GroupId = 0
    next_epoch: int = 0
    next_step_id: int = 1
    next_order: int = 0
    num_roster_changes: int = 0
    """Deaths, returns, and workers put to sleep or woken so far: while it stays the same, the same workers can
    serve."""
    _alive: tuple[int, int, int] | None = None
    """(roster changes at that time, workers that can serve, least of their full blocks)."""

    def __post_init__(self, answers: Callable[[ClusterState], Answers]) -> None:
        profile = self.params.profile
        self.predictor = StepTimePredictor(
            self.shape.num_layers, None if profile is None else profile.cost,
            added_stage_s=None if profile is None else profile.added_stage_s,
            copy_bytes_per_s=None if profile is None else profile.host_copy_bytes_per_s,
            beside_byte_s=None if profile is None else profile.beside_byte_s,
            catch_up=self.catch_up_all,
        )
        self.tokens, self.offline_tokens = (
            VirtualTokens(lambda: (s.tenant for s in self.requests.values()), self.catch_up_all)
            for _ in range(2)
        )
        self.book = Book(
            self.shape.block_bytes_per_layer(self.limits.block_size), self.shape.shard_bytes,
            lambda src, dst: self.params.ports.of(src, dst),
        )
        for worker_id, worker in self.workers.items():
            self.groups_of[worker_id] = []
            worker.ledger.report_to(self.changes.ledgers, worker_id)
        self.advice, self.kept_tokens = answers(self)

    # --- changes ----------------------------------------------------------------------------------------------

    def touch(self, state: RequestState) -> None:
        """A request's state or holds have changed: its group has to be planned again."""
        self.changes.touched.add(state.group_id)
        self.changes.freer.add(state.group_id)
        self.changes.stir(state.request_id)

    def resolve_ledgers(self) -> None:
        """Note the groups of workers with changed ledgers, whichever group has changed them."""
        ledgers = self.changes.ledgers
        if ledgers:
            ids = [g.group_id for w in ledgers for g in self.groups_of[w]]
            self.changes.touched.update(ids)
            self.changes.freer.update(ids)
            ledgers.clear()

    def changed_groups(self) -> list[Group]:
        """Groups that this event or the one before has touched, in order of formation."""
        self.resolve_ledgers()
        changes = self.changes
        ids = changes.touched | changes.recent | changes.unnoted
        return [self.groups[g] for g in sorted(ids) if g in self.groups]

    def sharers(self, group: Group) -> set[GroupId]:
        """Other groups that use a worker of this one."""
        return {g.group_id for w in group.worker_ids for g in self.groups_of[w]} - {group.group_id}

    # --- groups -----------------------------------------------------------------------------------------------

    def form_group(self, stages: tuple[StagePlan, ...]) -> Group:
        """A new, empty group over existing workers."""
        group = Group(
            self.next_group_id,
            self.next_epoch,
            stages,
            {w: s.ledger for w, s in self.workers.items()},
            self.limits,
            self.hasher,
            lambda: self.predictor.chunk_prices(len(stages), len(stages[-1].layers)),
            Shared(
                self.changes, self.tokens, self.offline_tokens, lambda: Pace(self.params.offline, self.predictor),
                self.kept_tokens,
            ),
        )
        self.next_group_id += 1
        self.next_epoch += 1
        self.groups[group.group_id] = group
        self.changes.reshaped += 1
        if len(stages) > 1:
            self.pipelines[group.group_id] = group
        for worker_id in group.worker_ids:
            self._use(worker_id, [*self.groups_of[worker_id], group])
        group.touch()
        return group

    def dissolve(self, group: Group) -> None:
        """Remove an empty group and keep its totals."""
        assert not group.queues.running and not group.queues.has_waiting and not group.in_flight, "group not empty"
        assert not group.queues.moving and not group.queues.stored, "group not empty"
        del self.groups[group.group_id]
        self.changes.reshaped += 1
        self.changes.harvesting.discard(group.group_id)
        self.pipelines.pop(group.group_id, None)
        for worker_id in group.worker_ids:
            self._use(worker_id, [g for g in self.groups_of[worker_id] if g is not group])
        self.num_dissolved += 1
        self.counters.num_preemptions += group.counters.num_preemptions
        self.counters.num_shed_steps += group.counters.num_shed_steps
        self.counters.num_resumptions += group.counters.num_resumptions
        self.counters.num_discarded_slices += group.counters.num_discarded_slices
        self.counters.num_discarded_tokens += group.counters.num_discarded_tokens
        self.counters.num_recomputed_tokens += group.counters.num_recomputed_tokens
        self.counters.fresh.add(group.counters.fresh)
        self.counters.prefix_queries += group.counters.prefix_queries
        self.counters.prefix_hits += group.counters.prefix_hits

    def _use(self, worker_id: WorkerId, groups: list[Group]) -> None:
        self.groups_of[worker_id] = groups
        if len(groups) > 1:
            self.shared_workers.add(worker_id)
        else:
            self.shared_workers.discard(worker_id)

    def stage_layout(self, layers: LayerRange) -> LayoutSpec:
        """The layout of a stage: only its own layers."""
        return LayoutSpec(self.shape.shards_for(layers), layers)

    # --- ids --------------------------------------------------------------------------------------------------

    def member_budget_bytes(self, worker: WorkerState) -> int:
        """Bytes that a worker has for parameters and KV, from its capacity with every layer resident."""
        block_bytes = self.shape.num_layers * self.shape.block_bytes_per_layer(self.limits.block_size)
        return worker.full_blocks * block_bytes + self.shape.parameter_bytes

    def link_rate(self, link: LinkId) -> LinkRate:
        """The measured rate of one direction of a link, made if need be."""
        return self.link_rates.setdefault(link, LinkRate())

    # --- requests ---------------------------------------------------------------------------------------------

    def send_kv(
        self, state: RequestState, move: SendKV, *, owner: Owner, waiter: TransferWaiter, purpose: TransferPurpose,
        reserves: bool = True,
    ) -> SendKV:
        """Open a transfer of a request's KV, which has the book's next id: the request's blocks stay reserved until it
        has ended. ``reserves`` False: the caller keeps the blocks reserved."""
        self.book.open_transfer(move, owner, waiter, purpose, state if reserves else None)
        self.touch(state)
        return move

    def distrust(self, state: RequestState, why: Preemption = Preemption.KV_LOST) -> None:
        """Some of the request's KV was lost: it starts again from its tokens, as soon as no step and no transfer
        touches it."""
        state.distrust()
        self.touch(state)
        self.distrusted[state.request_id] = state, why

    def recompute_distrusted(self) -> None:
        """Queue the distrusted requests again that no step and no transfer touches any more."""
        for request_id, (state, why) in list(self.distrusted.items()):
            # Requests of a dead worker's group have started again elsewhere.
            if state.ending is None and state.recompute:
                group = self.groups[state.group_id]
                if state.num_pending or state.transfers or any(self.workers[w].ledger_locked for w in group.worker_ids):
                    continue
                group.preempt(state, why)
            del self.distrusted[request_id]

    def end(
        self, state: RequestState, reason: FinishReason, now_ns: int, *,
        tokens: tuple[SampledToken, ...] = (), stop_token_id: int | None = None, error: str | None = None,
    ) -> list[Action]:
        """Give a request its one terminal event, and its blocks back as soon as no step and no transfer touches
        them."""
        if state.is_finished:
            return []
        state.finish_reason = reason
        state.finished_ns = now_ns
        state.end_with(reason)
        self.touch(state)
        if reason is FinishReason.CANCELLED:
            self.counters.num_cancelled += 1
        self.reap(state)
        return [Emit(state.request_id, tokens, reason, stop_token_id, error, state)]

    def refuse(self, state: RequestState, error: str, now_ns: int) -> Action:
        """The terminal event of a refused request, which enters no queue."""
        state.finish_reason = FinishReason.ERROR
        state.end_with(FinishReason.ERROR)
        state.finished_ns = now_ns
        state.phase = Phase.FINISHED
        return Emit(state.request_id, (), FinishReason.ERROR, None, error, state)

    def reap(self, state: RequestState) -> bool:
        """Free an ended request if no step, move or layout change touches its blocks any more."""
        if state.ending is None or state.phase is Phase.FINISHED:
            return False
        if state.request_id in self.unplaced:
            del self.unplaced[state.request_id]
            self.forget(state)
            state.phase = Phase.FINISHED
            return True
        group = self.groups[state.group_id]
        if group.slices.kept is not None and group.slices.kept.has(state):
            group.slices.discard(Discard.ENDED)
        is_locked = any(self.workers[w].ledger_locked for w in group.worker_ids)
        if state.num_pending or state.transfers or (is_locked and state.phase is not Phase.WAITING):
            return False  # one that waits has no blocks
        group.queues.take_out(state)
        group.release_blocks(state)
        state.phase = Phase.FINISHED
        self.forget(state)
        return True

    def forget(self, state: RequestState) -> None:
        """Drop a request that is in no queue and holds nothing."""
        del self.requests[state.request_id]
        self.changes.end(state.request_id)
        (self.offline_tokens if state.is_offline else self.tokens).leave(state)

    def alive_workers(self) -> tuple[int, int]:
        """How many workers can serve, and the least capacity of one with every layer resident (0 if none can), which
        any of them has. Plans that name members use each member's own."""
        if self._alive is None or self._alive[0] != self.num_roster_changes:
            full_blocks = [w.full_blocks for w in self.workers.values() if w.can_serve]
            self._alive = (self.num_roster_changes, len(full_blocks), min(full_blocks, default=0))
        return self._alive[1:]

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Invariants of the whole cluster, for tests and idle moments. Raises AssertionError."""
        queued: dict[RequestId, GroupId] = {}
        for worker_id, worker in self.workers.items():
            # Groups share ledgers; a ledger with an unchanged version is still in order.
            if self.checked_versions.get(worker_id) != worker.ledger.version:
                worker.ledger.check()
                self.checked_versions[worker_id] = worker.ledger.version
        for group in self.groups.values():
            group.check(with_ledgers=False)
            for state in group.queues.all_requests():
                assert state.request_id not in queued, f"{state} is in two queues"
                queued[state.request_id] = group.group_id
                state.check_holds()
        for state in self.unplaced.values():
            assert state.request_id not in queued and state.num_computed + state.num_pending == 0, state
            queued[state.request_id] = -1
        assert queued.keys() == self.requests.keys(), "every live request is in exactly one queue"
        for worker in self.workers.values():
            for request_id in worker.ledger.requests():
                known = request_id in self.requests or request_id in worker.ghosts or request_id in worker.copying
                known = known or request_id in worker.given_up
                assert known, f"blocks of {request_id} at worker {worker.worker_id} leaked"
        self._check_residences()
        lost = {w.worker_id for w in self.workers.values() if not w.alive}
        assert not any(lost & set(g.worker_ids) for g in self.groups.values()), "a group with a dead member"
        self.book.check()
        for tokens, is_offline in ((self.tokens, False), (self.offline_tokens, True)):
            tokens.check(s for s in self.requests.values() if s.is_offline is is_offline)
        assert self.pipelines == {i: g for i, g in self.groups.items() if len(g.stages) > 1}
        assert self.changes.queued == {i for i, g in self.groups.items() if g.queues.has_waiting}
        assert self.changes.queued_online == {i for i, g in self.groups.items() if g.queues.waiting}
        for worker_id in self.workers:
            assert (worker_id in self.shared_workers) == (len(self.groups_of[worker_id]) > 1)
            assert self.groups_of[worker_id] == [g for g in self.groups.values() if worker_id in g.worker_ids]

    def _check_residences(self) -> None:
        """Check that each request's KV is at its residences, and nowhere else."""
        size = self.limits.block_size

        def held_tokens(request_id: RequestId, place: Place) -> int:
            worker = self.workers[place.worker_id]
            return size * (worker.pool if place.is_host else worker.ledger).num_blocks_of(request_id)

        for state in self.requests.values():
            if state.phase is Phase.WAITING:
                assert not state.residences, f"{state} waits, and has KV"
                continue
            runs_in = self.groups[state.group_id].residence if state.phase is Phase.RUNNING else None
            residence.check(
                state.residences, runs_in=runs_in, num_computed=state.num_computed,
                held_tokens=partial(held_tokens, state.request_id),
            )
        for worker in self.workers.values():
            place = Place(worker.worker_id)
            for request_id in worker.ledger.requests():
                holder = self.requests.get(request_id)
                if holder is None or holder.transfers:
                    continue
                for kept in holder.residences:
                    if place in kept.places:
                        break
                else:
                    raise AssertionError(f"{holder} holds blocks at {place}")

    def unplaced_online(self) -> list[RequestState]:
        """The online ones of ``unplaced``."""
        return [s for s in self.unplaced.values() if not s.is_offline]

    def is_idle(self) -> bool:
        """No requests, no moves."""
        return not self.requests and not self.book.transfers



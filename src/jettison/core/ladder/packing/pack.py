"""Pack: online requests live on the fewest groups that hold them (MELL); the others may sleep.

Every epoch, and at once where a group is about to run out of memory, the desired placement is planned anew
(``core.ladder.packing.desired``). Requests that live elsewhere move, as far as there is room, time and worth:

    waits for its first step      it is queued where it should live
    decodes                       it migrates, as KV or as tokens, where that costs less than it saves
    prefills, moves, is stored    later: it stays owed
    outgrew its group, and the packer does not migrate (best-fit, worst-fit), or nothing has room in a circle
                                  it is computed again where it should live

Under pressure none of these begins: memory is for requests that wait. Where memory keeps the head of a queue out,
running requests make room for it (``policy.relief``), if the groups in use have room together; else an empty group is
taken into use, and only by this rung. Newcomers go where the packing wants them, without pressure and while packing
could empty a group at all; a long prompt goes to an empty group where it costs less there.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from jettison.core.advice import Going, WantedMove
from jettison.core.ladder.hooks import Calm
from jettison.core.ladder.movekinds import choose_kinds
from jettison.core.ladder.packing.desired import Desired, Owed
from jettison.core.ladder.packing.refusals import Refusals
from jettison.core.ladder.packing.relief import Reliefs
from jettison.core.ladder.packing.told import Told
from jettison.core.ladder.rung import Means, Moment, Offer, Rung, register
from jettison.core.moving.migrations import may_go
from jettison.core.moving.passage import Passage
from jettison.core.ports import Action, Record
from jettison.core.preemption import Preemption
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.group import Group
from jettison.policy.packing.ordering import MoveMode, order_moves
from jettison.policy.packing.params import PackParams, goes_on
from jettison.policy.packing.types import PackMove
from jettison.types import NANOSECONDS, GroupId, RequestId, WorkerId

EARLY_STEPS = 16
"""Steps ahead for which a group that grows has to have room, or an epoch begins early: a move takes some of them."""

LEAST_EPOCHS = 0.1
"""Least part of an epoch before the next one, however short of memory groups are: moves have to take effect first."""

KEPT_OUT = "memory keeps the head of a queue out"
"""The pressure that moves can do something about."""


class How(StrEnum):
    """How a request changes groups: queued there, migrated, or computed again there."""

    QUEUED = "queued"
    MIGRATED = "migrated"
    RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOffer(Offer):
    """One request is to go from the group ``groups[0]`` to ``groups[1]``, in the way ``how``."""

    request_id: RequestId
    how: How
    going: Going | None = None
    """The kind of migration; None unless ``how`` is MIGRATED."""
    preempts: Preemption = Preemption.OUTGREW
    """Why it is preempted; only where ``how`` is RECOMPUTED."""


_WHY = {Preemption.OUTGREW: "it has outgrown its group", Preemption.NO_SPARE: "no free group lets it pass"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOffer(Offer):
    """Migrations to be called off, as their destinations lack memory."""

    request_ids: tuple[RequestId, ...]


@register
class PackRung(Rung):
    """Decides in which group each online request should live, and has those elsewhere move
    (``core.moving.migrations``)."""

    name = "pack"
    acts_between_steps = True
    rank = 20
    moments = frozenset({Moment.BEFORE_STEPS})
    is_word = False

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._state, self._loads, self._migrations = means.state, means.loads, means.migrations
        self.desired = desired = Desired(means.state, means.loads, means.moves, means.migrations)
        self._reliefs = Reliefs(
            means.state, means.loads, means.migrations, desired.may_relieve, desired.growth_blocks, self.closed
        )
        self._relieving: set[RequestId] = set()
        """Requests of its migrations that make room for the head of a queue."""
        self._relieved_ns: int | None = None
        """When it last looked for requests that make room; None: never."""
        self._planned_ns: int | None = None
        self._num_reshaped = means.state.changes.reshaped
        self._mine: dict[RequestId, Passage] = {}
        """Migrations that it has begun, and that have neither ended nor failed."""
        self._has_ended = False
        """Whether some of them have ended since it looked last: there may be room for others."""
        self._failed: list[RequestId] = []
        """Moves that failed since it looked last."""
        self._retry_ns: dict[RequestId, int] = {}
        """By request whose move failed: the time from which on it may be tried again."""
        self._num_waited: Counter[RequestId] = Counter()
        """By request: epochs in which neither link nor destination had room for its move."""
        self._leaving: dict[RequestId, tuple[GroupId, Preemption]] = {}
        """By request that is to be computed again elsewhere as soon as no step has it: the group, and why."""
        self._num_owed = 0
        self._refusals = Refusals(means.state, means.loads)
        self._told = Told(self.desired)

    @property
    def _params(self) -> PackParams:
        """The settings of packing. Raises AssertionError where nothing is packed."""
        params = self._state.params.packing
        assert params is not None, "the rung is there and nothing is packed"
        return params

    def go(self) -> None:
        """Stop noting which single requests change, as the rung is about to be removed."""
        self._state.changes.stirred = None
        self._state.changes.ended.clear()

    # --- what the loop asks -----------------------------------------------------------------------------------

    def decides_nothing_before(self, moment: Moment) -> Calm:
        """No calm on ticks while there are requests or an outdated placement, nor before a request is computed again
        elsewhere; else until the next epoch, or without end. Only while groups have room for ``EARLY_STEPS`` steps."""
        may_plan = bool(self._state.requests) or self._is_outdated()
        if moment is Moment.TICK:
            return Calm(0 if may_plan else None, EARLY_STEPS)
        if self._leaving:
            return Calm(0, EARLY_STEPS)
        return Calm(self._epoch_end_ns(1.0) if may_plan else None, EARLY_STEPS)

    def worker_ids(self) -> Collection[WorkerId]:
        """The workers of groups between which this rung's migrations go; empty: none is under way."""
        return {w for passage in self._mine.values() for w in passage.worker_ids}

    def closed(self) -> frozenset[GroupId]:
        """Ids of the packed groups where no online request should live, and none lives or waits."""
        return self.desired.closed()

    def lacking_blocks(self, opening_s: float) -> int:
        """See ``hooks.Places``: a group that comes is taken into use an epoch later at most."""
        return self.desired.lacking_blocks(opening_s + self._params.epoch_s)

    def shut(self) -> Set[GroupId]:
        """The closed groups, while relief opens them for every queue that memory keeps out; else empty."""
        kept_out = [group for g in self._loads.kept_out if (group := self._state.groups.get(g)) is not None]
        if self.pressure() not in (None, KEPT_OUT) or not all(map(self.desired.may_relieve, kept_out)):
            return frozenset()
        return frozenset(group_id for group_id in self.closed() if self.desired.pool_of(group_id).migrates)

    def gauges(self) -> Mapping[str, float]:
        """Groups ("devices") needed and used, moves owed, share of blocks used, and groups lost to refused moves."""
        num_used, share_used = self.desired.used()
        return {
            "devices_needed": self.desired.num_needed(), "devices_used": num_used, "packing_owed": self._num_owed,
            "packing_utilisation": share_used, "packing_lost": self._told.num_lost,
        }

    def note_touched(self, group_ids: Collection[GroupId]) -> None:
        """Note groups in which requests may have ended: the next placement of a newcomer first takes their seats away,
        and a new plan looks at all requests that ended."""
        self.desired.note_touched(group_ids)

    def place(self, state: RequestState) -> GroupId | None:
        """The group in which a newcomer is to be queued; None, for dispatch to choose: it is offline, the packing has
        no group for it, or memory is short and no group in use takes it."""
        pressure = None if state.is_offline else self.pressure()
        if state.is_offline or pressure not in (None, KEPT_OUT):
            return None
        return self.desired.place(state, only_in_use=pressure is not None)

    # --- deciding ---------------------------------------------------------------------------------------------

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer | Record]:
        """Yield offers of moves that begin now, of migrations to be called off, and records of epochs: where it is time
        or a group runs short an epoch begins, in between moves go on that had no room. Without requests the placement
        alone is kept up to date, as workers of closed groups may fall asleep."""
        if not self._state.requests:
            if self._is_outdated():
                self.desired.refresh(now_ns)
            return
        if self._mine:  # some have given way, some go on otherwise
            under_way = {passage.state.request_id: passage for passage in self._migrations.under_way}
            self._mine = {r: under_way[r] for r in self._mine if r in under_way}
        self._relieving &= self._mine.keys()  # a request that has given way, or found no room, makes room for no other
        self._retry_ns |= dict.fromkeys(self._failed, now_ns + round(self._params.retry_s * NANOSECONDS))
        self._failed.clear()
        pressure = self.pressure()
        if pressure is not None:
            yield from self._stop(pressure)
            if pressure == KEPT_OUT:
                yield from self._relieve(now_ns)
        is_early = pressure is None and now_ns >= self._epoch_end_ns(LEAST_EPOCHS) and self._runs_short()
        is_opened = pressure is None and self._is_reshaped() and bool(self._state.changes.queued_online)
        is_epoch = is_early or is_opened or now_ns >= self._epoch_end_ns(1.0)
        if is_epoch:
            self._planned_ns = now_ns
            self.desired.release(self._refusals.take_due(self.desired.capacities()))
            self.desired.refresh(now_ns)
            self._leaving.clear()
        if is_epoch or (self._has_ended and pressure is None):
            self._has_ended = False
            yield from self._epoch(pressure, now_ns, is_new=is_epoch, is_early=is_early)
        yield from self._leave()

    def _epoch_end_ns(self, num_epochs: float) -> int:
        """The time at which ``num_epochs`` epochs have passed since the last plan; 0 before the first."""
        if self._planned_ns is None:
            return 0
        return self._planned_ns + math.ceil(num_epochs * self._params.epoch_s * NANOSECONDS)

    def _is_reshaped(self) -> bool:
        """Whether a group has come, gone or changed its memory since it was asked last: a late request may go there."""
        before, self._num_reshaped = self._num_reshaped, self._state.changes.reshaped
        return before != self._num_reshaped

    def _is_outdated(self) -> bool:
        """Whether a plan without requests could find groups that have come, gone or changed, or seats of ended ones."""
        return self.desired.num_reshaped != self._state.changes.reshaped or bool(self.desired.active())

    def pressure(self) -> str | None:
        """Why memory is for other things than packing now, in words; None: nothing is short."""
        state, moves = self._state, self.means.moves
        if moves.merges or moves.restores:
            return "layers are being dropped or restored"
        if state.unplaced and any(not s.is_offline for s in state.unplaced.values()):
            return "no group takes a request"
        if any(w.is_missed for w in state.workers.values()):
            return "a worker is down"
        return KEPT_OUT if self._loads.kept_out else None

    def _runs_short(self) -> bool:
        """Whether some changed group of one instance lacks blocks for its next steps."""
        return any(self._lacks_room(group) for group in self._state.changed_groups() if len(group.stages) == 1)

    def _lacks_room(self, group: Group) -> bool:
        """Whether the group lacks blocks for ``EARLY_STEPS`` more steps of its running requests."""
        running, blocks, limits = group.queues.running, group.blocks, group.limits
        ahead = -(-EARLY_STEPS // limits.block_size)
        if len(running) * (ahead + 1) <= blocks.num_allocatable:
            return False
        return blocks.num_to_grow(running.values(), EARLY_STEPS) > blocks.num_allocatable

    def _epoch(self, pressure: str | None, now_ns: int, *, is_new: bool, is_early: bool) -> Iterator[Offer | Record]:
        """Yield offers of the moves that begin now, none under pressure; then, with ``is_new``, the epoch's record."""
        owed = list(self.desired.owed())
        begun: Counter[str] = Counter()
        if is_new:
            self._told.refused.clear()
            known = {o.state.request_id for o in owed}
            self._retry_ns = {r: at_ns for r, at_ns in self._retry_ns.items() if r in known}
            self._num_waited = Counter({r: n for r, n in self._num_waited.items() if r in known})
        if pressure is None:
            for late, group in self.desired.late():
                self.desired.send(late.state.request_id, group.group_id)
                yield self._offer(Owed(late.state, late.group, group), How.QUEUED, "an empty group serves it sooner")
            for offer in self._offers(owed, now_ns):
                begun[str(offer.how)] += 1
                begun["as_tokens"] += offer.going is not None and offer.going.max_step_tokens is not None
                yield offer
        self._num_owed = sum(1 for o in self.desired.owed() if not self._migrations.is_moving(o.state))
        if is_new:
            self._told.count_lost(now_ns)
            yield from self._tell(pressure, begun, is_early, now_ns)

    def _offers(self, owed: Sequence[Owed], now_ns: int) -> Iterator[PackOffer]:
        """Yield owed moves that can begin now. Where a packer does not migrate, note requests to be computed again."""
        # One that waits may have been sent to an empty group since.
        for o in [o for o in owed if o.state.phase is Phase.WAITING and o.state.group_id == o.source.group_id]:
            if not self.desired.places.stays(*o):
                yield self._offer(o, How.QUEUED, "it waits, and should live there")
        going = [
            o for o in owed
            if may_go(o.state) and not self._migrations.is_moving(o.state)
            and (not self.desired.pool_of(o.source.group_id).is_saturated or self._lacks_room(o.source))
        ]
        ready = list[Owed]()
        for o in going:
            if not self.desired.pool_of(o.source.group_id).migrates:
                self._leaving[o.state.request_id] = o.destination.group_id, Preemption.OUTGREW
            elif self._retry_ns.get(o.state.request_id, 0) <= now_ns:
                ready.append(o)
        yield from self._migrating(self._ordered(self._worthy(ready)))

    def _worthy(self, owed: Sequence[Owed]) -> list[Owed]:
        """The moves that are worth it, all moves out of a group that lacks room, and those of packers that spread
        requests, which are to save no group. The others are held where they are."""
        capacities = self.desired.capacities() if owed else {}
        gathering = [o for o in owed if self.desired.pool_of(o.source.group_id).gathers]
        worthy, refused = self._refusals.sift(gathering, self._lacks_room, self.desired.empties, capacities)
        worthy += [o for o in owed if not self.desired.pool_of(o.source.group_id).gathers]
        if refused:
            self._told.refused |= refused
            self._state.counters.packing_refused += len(refused)
            self.desired.hold(refused)
        return worthy

    def _ordered(self, owed: Sequence[Owed]) -> Iterator[Owed]:
        """The moves that have room now, pool by pool: a spare group of another pool would keep the request that passes
        through it. A move that waits for the room of another is left for later."""
        groups = self._state.groups
        by_pool: defaultdict[int, list[Owed]] = defaultdict(list)
        for o in owed:
            by_pool[o.source.blocks.capacity].append(o)
        for capacity, moves in by_pool.items():
            spares = [d for d in self.desired.spares() if groups[d].blocks.capacity == capacity]
            yield from self._ordered_with(moves, spares)

    def _ordered_with(self, owed: Sequence[Owed], spares: Sequence[GroupId]) -> Iterator[Owed]:
        """Yield the moves of one pool that have room now. In a circle of moves for which none has room, the requests of
        a group that lacks room go by way of a spare group, or are to be computed again; others wait."""
        groups = self._state.groups
        by_id = {o.state.request_id: o for o in owed}
        devices = {g.group_id for o in owed for g in (o.source, o.destination)}.union(spares)
        free = {d: max(0, groups[d].blocks.num_free - groups[d].blocks.watermark) for d in devices}
        moves = [
            PackMove(r, o.source.group_id, o.destination.group_id, self._blocks(o.state)) for r, o in by_id.items()
        ]
        for step in order_moves(moves, free, spares).steps:
            if step.wave > 0:
                return
            o = by_id[step.move.request_id]
            is_aside = step.way is not MoveMode.LIVE or step.move.destination != o.destination.group_id
            if is_aside and not self._lacks_room(o.source):
                continue
            if step.way is MoveMode.LIVE:
                yield o._replace(destination=groups[step.move.destination])
            else:
                self._leaving[step.move.request_id] = o.destination.group_id, Preemption.NO_SPARE

    def _migrating(self, owed: Iterator[Owed]) -> Iterator[PackOffer]:
        """Yield migrations of the requests that links and destinations take now, and count the waits of the others."""
        found = {
            o.state.request_id: o for o in owed if len(o.destination.queues.running) < o.destination.max_running
        }
        kinds = self._params.kinds
        wanted = [WantedMove(o.state, o.destination, self._num_waited[r], kinds) for r, o in found.items()]
        chosen = choose_kinds(self._state, wanted)
        for request_id, o in found.items():
            going = chosen.get(request_id)
            if going is None:
                self._num_waited[request_id] += 1
                continue
            why = "its group is to be empty" if self.desired.empties(o.source.group_id) else "it fits better there"
            yield self._offer(o, How.MIGRATED, why, going)

    def _offer(self, o: Owed, how: How, why: str, going: Going | None = None) -> PackOffer:
        """The offer of one owed move."""
        ends = (o.source.group_id, o.destination.group_id)
        return PackOffer(groups=ends, why=why, request_id=o.state.request_id, how=how, going=going)

    def _blocks(self, state: RequestState) -> int:
        """Blocks that a request needs for all its tokens."""
        return self._state.limits.blocks_for(state.num_tokens)

    # --- computed again elsewhere -----------------------------------------------------------------------------

    def _leave(self) -> Iterator[PackOffer]:
        """Yield offers for requests that are to be computed again elsewhere, and that no step has now."""
        for request_id, (destination, reason) in list(self._leaving.items()):
            state, groups = self._state.requests.get(request_id), self._state.groups
            if state is None or destination not in groups or not may_go(state) or state.group_id == destination:
                del self._leaving[request_id]
            elif not state.num_pending and not self._migrations.is_moving(state):
                del self._leaving[request_id]
                yield PackOffer(
                    groups=(state.group_id, destination), why=_WHY[reason], request_id=request_id,
                    how=How.RECOMPUTED, preempts=reason,
                )

    # --- pressure ---------------------------------------------------------------------------------------------

    def _stop(self, why: str) -> Iterator[StopOffer]:
        """Yield an offer to call off the rung's migrations to groups that lack memory, but for those in their last
        round."""
        short = self._loads.kept_out
        stopped = [
            r for r, passage in self._mine.items()
            if not goes_on(
                destination_lacks=passage.destination.group_id in short, is_landing=passage.stopped_ns is not None
            )
        ]
        if stopped:
            yield StopOffer(groups=tuple(sorted(short)), why=why, request_ids=tuple(stopped))

    def _relieve(self, now_ns: int) -> Iterator[PackOffer]:
        """Yield moves after which heads of queues are let in, looked for as often as epochs may begin early."""
        least_ns = round(LEAST_EPOCHS * self._params.epoch_s * NANOSECONDS)
        if self._relieved_ns is not None and now_ns < self._relieved_ns + least_ns:
            return
        self._relieved_ns = now_ns
        groups, requests = self._state.groups, self._state.requests
        for head, source, relief in self._reliefs.wanted(self._retry_ns, now_ns):
            at = groups[relief.group_id]
            leaving = [Owed(requests[leave.request_id], at, groups[leave.destination]) for leave in relief.leaves]
            chosen = choose_kinds(
                self._state, [WantedMove(o.state, o.destination, kinds=self._params.kinds) for o in leaving]
            )
            if len(chosen) < len(leaving):
                continue  # links or destinations have no room for all of them, and some of them alone let no head in
            why = f"it makes room for {head.request_id}"
            if at is not source:
                self.desired.send(head.request_id, at.group_id)
                yield self._offer(Owed(head, source, at), How.QUEUED, "others make room for it there")
            for o in leaving:
                self._relieving.add(o.state.request_id)
                self.desired.send(o.state.request_id, o.destination.group_id)
                yield self._offer(o, How.MIGRATED, why, chosen[o.state.request_id])

    # --- beginning --------------------------------------------------------------------------------------------

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Queue or recompute a request elsewhere, start its migration, or call migrations off. Returns record and
        actions."""
        if isinstance(offer, StopOffer):
            passages = [self._mine.pop(request_id) for request_id in offer.request_ids]
            return [action for passage in passages for action in passage.cancel()]
        assert isinstance(offer, PackOffer), offer
        groups, counters = self._state.groups, self._state.counters
        source, destination = (groups[group_id] for group_id in offer.groups)
        state = self._state.requests[offer.request_id]
        told = Record("pack", now_ns, {
            "request": offer.request_id, "source": source.group_id, "destination": destination.group_id,
            "how": str(offer.how), "reason": offer.why,
        } | ({} if offer.going is None else {"goes_as": str(offer.going.kind)}))
        if offer.how is How.MIGRATED:
            return self._migrate(state, source, destination, offer, told, now_ns)
        if offer.how is How.RECOMPUTED:
            source.preempt(state, offer.preempts)
            counters.packing_recomputed += 1
        else:
            counters.packing_queued += 1
        if state.phase is Phase.WAITING:
            source.queues.take_out(state)
            destination.queues.enqueue(state)
        return [told]

    def _migrate(
        self, state: RequestState, source: Group, destination: Group, offer: PackOffer, told: Record, now_ns: int
    ) -> list[Action]:
        """Start the migration of an offer; return its record and actions, nothing where it could not start."""
        assert offer.going is not None
        actions = self._migrations.start(
            state, source, destination, now_ns, self._over, offer.going
        )
        passage = next((p for p in self._migrations.under_way if p.state is state), None)
        if passage is None and not actions:
            return []
        if passage is not None:
            self._mine[state.request_id] = passage
        self._num_waited.pop(state.request_id, None)
        self._state.counters.packing_migrations += 1
        return [told, *actions]

    def _over(self, passage: Passage) -> None:
        """Note that one of the rung's migrations has ended: where its request lives now, or that it failed."""
        self._has_ended = True
        request_id = passage.state.request_id
        self._mine.pop(request_id, None)
        if passage.failure is None:
            self.desired.note_moved(request_id, passage.destination.group_id)
        else:
            self._failed.append(request_id)
            if request_id in self._relieving:
                self.desired.send(request_id, passage.source.group_id)
        self._relieving.discard(request_id)

    # --- telling ----------------------------------------------------------------------------------------------

    def _tell(self, pressure: str | None, begun: Counter[str], is_early: bool, now_ns: int) -> Iterator[Record]:
        """Yield the record of an epoch, unless it began nothing and came to the same as the last one."""
        gauges = self.gauges()
        yield from self._told.epoch({
            "needed": gauges["devices_needed"], "used": gauges["devices_used"], "closed": sorted(self.closed()),
            "queued": begun[How.QUEUED], "migrated": begun[How.MIGRATED], "owed": self._num_owed,
            "lost": self._told.num_lost, "utilisation": round(gauges["packing_utilisation"], 4), "pressure": pressure,
            "early": is_early,
        }, now_ns, is_news=bool(begun))

    def check(self) -> None:
        """The books of the desired placement agree. Raises AssertionError otherwise."""
        self.desired.check()

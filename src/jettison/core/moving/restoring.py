"""Restore and split as one phase table (KunServe v3 section 4.4; design 5.1).

A group is split into instances or, where its requests together would not fit into one member's memory, into two groups
of every second member (``policy.restore.plan_splits``); these are split again later. Of three members one may be *left
over*: it stays as it is, in the pipeline alone, until all requests have gone home to the other two. Then it is empty
and comes home by itself (``core.moving.recovering``), as an instance.

    DRAIN_1    the group finishes its steps in flight
    MAP        every member maps the shards of its next layout (KV shrinks accordingly; blocks move down)
    PULL       the group serves as a pipeline while missing shards come (``core.moving.gather``), behind its
               activations
    FIT        all shards are here; wait until all requests fit into the next layouts
    DRAIN_2    the group finishes its steps in flight
    SPREAD     every member gives KV pages to all layers that it will run
    RETURN     the new groups serve; running requests stay in the pipeline until their KV is there
               (``core.moving.returning``)
    DONE       the pipeline is empty; a member that was left over is on its own
    TURNING    a burst or a failure: transfers are called off ...
    REDROP     ... and the mapped shards dropped again (not needed once the split has begun; tried until it works)
    TURNED     the pipeline (and, after a split, the groups beside it) can be merged again; should that merge
               fail, another restore goes on from RETURN

Ownership: until its last move has ended, a request runs in the pipeline and its blocks stay at every member. So a
restore with a member left over can be turned round, and that member can die, as others can: until DONE it is a stage of
the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from jettison.core.moving.gather import Gather
from jettison.core.moving.relayout import RETRY_NS, Relayout, RelayoutPhase
from jettison.core.moving.returning import Returning
from jettison.core.ports import Action, Record
from jettison.core.preemption import Preemption
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.serving.holds import RESTORE, GroupHold
from jettison.core.state import ClusterState
from jettison.memory.layout import LayoutSpec
from jettison.memory.stages import SplitPlan, StagePlan, stage_bytes
from jettison.types import RequestId, WorkerId

HEADROOM = 20
"""1 / ``HEADROOM`` of a member's blocks stays free at a split, so that running requests can grow."""


class RestorePhase(StrEnum):
    """The phases of one restore, in the order of the module's table."""

    DRAIN_1 = "drain_1"
    MAP = "map"
    PULL = "pull"
    FIT = "fit"
    DRAIN_2 = "drain_2"
    SPREAD = "spread"
    RETURN = "return"
    DONE = "done"
    TURNING = "turning"
    REDROP = "redrop"
    TURNED = "turned"


class Restoring:
    """One merged group on its way back to instances, or to smaller groups."""

    def __init__(
        self, cluster: ClusterState, group: Group, split: SplitPlan, now_ns: int,
        homes: list[Group] | None = None, *, with_queue: bool = False, max_overflow_blocks: int = 0,
        reason: str = "",
    ) -> None:
        """Begin a restore. It holds the group's steps, unless there are ``homes``: with these the group has been split
        already, and its requests go on returning to them.

        ``with_queue``: split although requests wait (they wait for compute, and the members have more of it apart).
        ``max_overflow_blocks``: most blocks of requests that do not fit at the split, to be given up and computed
        again.
        """
        self._cluster = cluster
        self.group = group
        self.phase = RestorePhase.RETURN if homes else RestorePhase.DRAIN_1
        self.returning = Returning(cluster, self, group, homes) if homes else None
        """None until the split."""
        self.reason = reason
        """Why it was begun."""
        self.failure: str | None = None
        self.has_failed = False
        """It was called off because a member failed, not because the pipeline was needed."""
        self.split_plan = split
        self._next_layers = {stage.worker_id: stage.layers for part in split.parts for stage in part}
        self.left_over = tuple(w for w in group.worker_ids if w not in self._next_layers)
        """Members that are in no new group."""
        self._with_queue = with_queue
        self._max_overflow_blocks = max_overflow_blocks
        self._num_recomputed = 0
        self._started_ns = now_ns
        self._relayouts: list[Relayout] = []
        self._fetching = Gather(cluster, self, group.worker_ids)
        self._retry_ns: int | None = None
        """When members that failed to drop again try once more."""
        if not homes:
            group.hold(RESTORE, GroupHold.STEPS)

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """The members of the merged group."""
        return self.group.worker_ids

    @property
    def broken_groups(self) -> Sequence[Group]:
        """The groups that cannot serve on if the restore is abandoned now: the pipeline alone."""
        return (self.group,)

    @property
    def is_over(self) -> bool:
        """Whether the restore has ended: done, or called off."""
        return self.phase in (RestorePhase.DONE, RestorePhase.TURNED)

    @property
    def may_still_wait(self) -> bool:
        """Whether it may still wait for requests to fit: until they do, that depends on what is admitted."""
        before = (RestorePhase.DRAIN_1, RestorePhase.MAP, RestorePhase.PULL, RestorePhase.FIT)
        return self.phase in before

    def take_queue_along(self) -> None:
        """Let the group split although requests wait: they wait for compute, and the members have more of it apart."""
        self._with_queue = True

    @property
    def lacks_offline_room(self) -> bool:
        """Whether all shards are here, and only offline requests keep the group from splitting."""
        return self.phase is RestorePhase.FIT and not self._fits() and self._fits(without_offline=True)

    @property
    def takes_queue_along(self) -> bool:
        """Whether it will split although requests wait."""
        return self._with_queue

    @property
    def has_split(self) -> bool:
        """Whether the new groups already serve beside the pipeline."""
        return self.returning is not None

    @property
    def homes(self) -> list[Group]:
        """The new groups; empty before the split."""
        return self.returning.homes if self.returning is not None else []

    @property
    def waits_for_time(self) -> bool:
        """Whether its next step may come without an event of its members."""
        return self.phase is RestorePhase.REDROP

    # --- events -----------------------------------------------------------------------------------------------

    def go_on(self, now_ns: int) -> list[Action]:
        """Go on after a call or a transfer of this restore has been answered; call it off where a shard could not be
        had. Returns the actions."""
        why = self._fetching.take_failure()
        if why is not None:
            self.has_failed = True
            return self.turn_round(now_ns, why)
        return self.advance(now_ns)

    def cancel(self, state: RequestState) -> list[Action]:
        """Stop the transfers of a request that is ending; return the actions, none before the split."""
        return self.returning.cancel(state) if self.returning is not None else []

    def abandon(self) -> None:
        """Do nothing when a member is dead: the members' own groups, once split, serve on."""

    def turn_round(self, now_ns: int, reason: str) -> list[Action]:
        """Call the restore off, as the pipeline is needed or a member failed; return the actions, none if it is over or
        called off already."""
        if self.is_over or self.phase in (RestorePhase.TURNING, RestorePhase.REDROP):
            return []
        self.failure = reason
        self.phase = RestorePhase.TURNING
        actions: list[Action] = [Record("restore_turned", now_ns, {"reason": reason, "group": self.group.group_id})]
        actions += self._fetching.call_off()
        if self.returning is not None:
            actions += self.returning.call_off()
        return actions + self.advance(now_ns)

    @property
    def _is_quiet(self) -> bool:
        """Whether no call or transfer of this restore is under way."""
        is_still = self._fetching.is_idle and (self.returning is None or self.returning.is_idle)
        return is_still and all(r.is_over for r in self._relayouts)

    @property
    def _is_still(self) -> bool:
        """Whether no step is in flight and no KV of a move that gave way is on its way here, so that blocks may be
        moved."""
        return not self.group.in_flight and not self._cluster.book.lands_at(self.worker_ids)

    def advance(self, now_ns: int) -> list[Action]:
        """Go as far as the state allows; return the actions, none while the present phase lasts."""
        match self.phase:
            case RestorePhase.DRAIN_1 if self._is_still:
                return self._map(now_ns)
            case RestorePhase.MAP if all(r.is_over for r in self._relayouts):
                return self._pull(now_ns)
            case RestorePhase.PULL if self._fetching.is_idle:
                self.phase = RestorePhase.FIT
                return self.advance(now_ns)
            case RestorePhase.FIT if self._fits():
                self.group.hold(RESTORE, GroupHold.STEPS)
                self.phase = RestorePhase.DRAIN_2
                return self.advance(now_ns)
            case RestorePhase.DRAIN_2 if self._is_still:
                self._give_up_overflow()
                return self._spread(now_ns)
            case RestorePhase.SPREAD if all(r.is_over for r in self._relayouts):
                return self._split(now_ns)
            case RestorePhase.RETURN:
                return self._return_home(now_ns)
            case RestorePhase.TURNING if self._is_quiet:
                return self._turned(now_ns)
            case RestorePhase.REDROP if all(r.is_over for r in self._relayouts):
                return self._redropped(now_ns)
        return []

    # --- map and pull -----------------------------------------------------------------------------------------

    def _change_layouts(self, specs: dict[WorkerId, LayoutSpec], *, shrinks: bool) -> list[Action]:
        """Begin to change these workers' layouts; return the actions."""
        actions: list[Action] = []
        self._relayouts = []
        for worker_id, spec in specs.items():
            relayout = Relayout(self._cluster, self, self._cluster.workers[worker_id], spec, shrinks=shrinks)
            self._relayouts.append(relayout)
            actions += relayout.start()
        return actions

    def _end_relayouts(self) -> str | None:
        """Let the group begin steps again, as all layout changes are over. Returns why one has failed; None: none
        has."""
        self._reap_ended()
        self.group.release(RESTORE, GroupHold.STEPS)
        failure = next((r.failure for r in self._relayouts if r.phase is RelayoutPhase.FAILED), None)
        self.has_failed |= failure is not None
        return failure

    def _map(self, now_ns: int) -> list[Action]:
        """Begin to map the shards of the members' next layouts; return the actions."""
        self.phase = RestorePhase.MAP
        shape = self._cluster.shape
        specs = {
            s.worker_id: LayoutSpec(shape.shards_for(self._next_layers[s.worker_id]), s.layers)
            for s in self.group.stages if s.worker_id in self._next_layers
        }
        return self._change_layouts(specs, shrinks=True)

    def _pull(self, now_ns: int) -> list[Action]:
        """Let the group serve on while missing shards are fetched; return the record and the actions. Where a member
        could not map its shards, call the restore off."""
        if (failure := self._end_relayouts()) is not None:
            return self.turn_round(now_ns, failure)
        self.phase = RestorePhase.PULL
        actions: list[Action] = []
        num_intact = 0
        for relayout in self._relayouts:
            assert relayout.result is not None
            num_intact += len(relayout.result.intact_shards)
            # Also shards that an earlier restore mapped, did not fetch, and then could not drop again.
            actions += self._fetching.fetch_all(relayout.worker.worker_id)
        actions.append(
            Record(
                "restore_begin",
                now_ns,
                {
                    "group": self.group.group_id,
                    "workers": list(self.worker_ids),
                    "intact_shards": num_intact,
                    "pulled_shards": len(self._fetching.transfers),
                    "capacity_blocks": self.group.blocks.capacity,
                },
            )
        )
        return actions + self.advance(now_ns)

    # --- fit and split ----------------------------------------------------------------------------------------

    def _fits(self, *, without_offline: bool = False) -> bool:
        """Whether every request has a home in the next layouts, with room to grow, and none moves or, unless the queue
        goes along, waits."""
        queues = self.group.queues
        moves = any(not (without_offline and s.is_offline) for s in queues.moving.values())
        waits = queues.waiting and not (without_offline and self.group.head_blocked_by is None)
        if moves or (waits and not self._with_queue):
            return False
        return fits(
            self._cluster, self.group, self.split_plan, self._max_overflow_blocks, without_offline=without_offline
        )

    def _give_up_overflow(self) -> None:
        """Preempt requests that do not fit; they are computed again at home, and the queue goes along. The last steps
        may have made them a few more. Nothing where no overflow was allowed."""
        if not self._max_overflow_blocks:
            return
        for state in overflow(self._cluster, self.group, self.split_plan, self.group.blocks.capacity) or ():
            self.group.preempt(state, Preemption.SPLIT)
            self._num_recomputed += 1
            self._with_queue = True

    def _spread(self, now_ns: int) -> list[Action]:
        """Begin to give KV pages to all layers that members will run; return the actions. Cached blocks are forgotten,
        and none is sealed from now on."""
        self.phase = RestorePhase.SPREAD
        for worker_id in self.worker_ids:
            # The new layers' arenas start empty, so no cached block is complete any more.
            self._cluster.workers[worker_id].ledger.forget_cached()
        for state in self.group.queues.running.values():
            state.num_sealed = 0
        self.group.blocks.seals = False
        specs = {w: self._cluster.stage_layout(layers) for w, layers in self._next_layers.items()}
        return self._change_layouts(specs, shrinks=True)

    def _split(self, now_ns: int) -> list[Action]:
        """Form the new groups, and begin to send requests home; return the record and the actions. Where a member could
        not change its layout, call the restore off."""
        if (failure := self._end_relayouts()) is not None:
            return self.turn_round(now_ns, failure)
        self.phase = RestorePhase.RETURN
        homes = [self._cluster.form_group(part) for part in self.split_plan.parts]
        self.returning = Returning(self._cluster, self, self.group, homes)
        done = {
            "group": self.group.group_id,
            "homes": {g.group_id: list(g.worker_ids) for g in homes},
            "left_over": list(self.left_over),
            "returning": len(self.group.queues.running),
            "recomputed": self._num_recomputed,
            "ms": (now_ns - self._started_ns) / 1e6,
        }
        return [Record("split", now_ns, done), *self._return_home(now_ns)]

    def _reap_ended(self) -> None:
        """Free requests that ended while ledgers were locked."""
        for state in self.group.queues.all_requests():
            self._cluster.reap(state)

    # --- return -----------------------------------------------------------------------------------------------

    def _return_home(self, now_ns: int) -> list[Action]:
        """Go on sending requests home, and end the restore with the last; return the actions, and the record of the
        end."""
        assert self.returning is not None
        actions = self.returning.advance(now_ns)
        if self.returning.is_over:
            self._cluster.dissolve(self.group)
            self.phase = RestorePhase.DONE
            counters = self._cluster.counters
            counters.num_restores += 1
            counters.restore_ns += now_ns - self._started_ns
            done = {
                "workers": list(self.worker_ids),
                "pulled_bytes": self._fetching.num_bytes,
                "returned_bytes": self.returning.num_returned_bytes,
                "ms": (now_ns - self._started_ns) / 1e6,
            }
            actions.append(Record("restore_done", now_ns, done))
        return actions

    # --- turning round ----------------------------------------------------------------------------------------

    def _turned(self, now_ns: int) -> list[Action]:
        """End a restore that was called off and is quiet: after the split at once, else begin to drop the mapped shards
        again. Its requests run on. Returns the actions."""
        self._reap_ended()
        self.group.touch()
        for state in self.group.queues.running.values():
            state.resume()
        if self.has_split:
            return self._over(now_ns)
        if any(w.layout.kv_layers != s.layers for s in self.group.stages for w in [self._cluster.workers[s.worker_id]]):
            # It stopped while pages were given to all layers, when the new layers hold no KV yet.
            self.group.hold(RESTORE, GroupHold.STEPS)
        self.phase = RestorePhase.REDROP
        specs = {s.worker_id: self._cluster.stage_layout(s.layers) for s in self.group.stages}
        return self._change_layouts(specs, shrinks=False)

    def _redropped(self, now_ns: int) -> list[Action]:
        """End a called-off restore whose members have dropped again; members that failed to are tried again later. The
        group serves on either way, and seals blocks again. Returns the actions."""
        self.group.release(RESTORE, GroupHold.STEPS)
        self.group.blocks.seals = self._cluster.limits.enable_prefix_caching
        failed = [r for r in self._relayouts if r.phase is RelayoutPhase.FAILED]
        if not failed:
            return self._over(now_ns)
        # The group serves on with the room that the member has; but some request may need more room than that.
        if self._retry_ns is None:
            self._retry_ns = now_ns + RETRY_NS
        if now_ns < self._retry_ns:
            return []
        self._retry_ns = None
        return self._change_layouts({r.worker.worker_id: r.spec for r in failed}, shrinks=False)

    def _over(self, now_ns: int) -> list[Action]:
        """Note that a called-off restore is over, and lift its cap on admission. Returns no actions."""
        self.phase = RestorePhase.TURNED
        self.group.blocks.uncap_admission(RESTORE)
        self._cluster.counters.num_turned_restores += 1
        return []


def room_blocks(cluster: ClusterState, part: tuple[StagePlan, ...]) -> int:
    """Blocks that the tightest member of a part of a split will have in its next layout."""
    shape = cluster.shape
    block_bytes = shape.block_bytes_per_layer(cluster.limits.block_size)
    room: list[int] = []
    for stage in part:
        spare_bytes = cluster.workers[stage.worker_id].full_blocks * shape.num_layers * block_bytes
        spare_bytes += shape.parameter_bytes - stage_bytes(stage.layers, shape)
        room.append(spare_bytes // (len(stage.layers) * block_bytes))
    return min(room)


def overflow(
    cluster: ClusterState, group: Group, split: SplitPlan, max_blocks: int, *, without_offline: bool = False
) -> list[RequestState] | None:
    """The newest running requests to preempt so that the others fit into the parts of ``split``; empty: all fit.

    Until requests have moved, every member holds blocks of all of them, in the layers of its next layout; then each
    part holds its own. None if giving up ``max_blocks`` is not enough. ``without_offline``: as if offline requests held
    nothing.
    """
    room = {index: room_blocks(cluster, part) for index, part in enumerate(split.parts)}
    most = max(room.values())
    if any(group.limits.blocks_for(s.num_tokens) > most for s in group.queues.waiting):
        return None
    num_blocks_of = group.blocks.ledgers[0].num_blocks_of
    gone = {s.request_id for s in group.queues.holding_offline()} if without_offline else set[RequestId]()
    left = {r: num_blocks_of(r) for r in (*group.queues.running, *group.queues.moving) if r not in gone}
    held: dict[WorkerId, int] = {}
    for part in split.parts:
        for stage in part:
            ledger = cluster.workers[stage.worker_id].ledger
            held[stage.worker_id] = ledger.num_held - sum(ledger.num_exclusive_blocks(r) for r in gone if ledger.has(r))
    victims: list[RequestState] = []
    candidates = [
        s for s in group.queues.running.values() if s.ending is None and not s.transfers and s.request_id in left
    ]
    while True:
        homes = cluster.advice.place(left, room, most // HEADROOM)
        if homes is not None and _has_room(cluster, split, room, held, victims):
            return victims
        if not candidates:
            return None
        victims.append(candidates.pop())
        del left[victims[-1].request_id]
        if sum(num_blocks_of(s.request_id) for s in victims) > max_blocks:
            return None


def _has_room(
    cluster: ClusterState, split: SplitPlan, room: dict[int, int], held: dict[WorkerId, int],
    given_up: list[RequestState],
) -> bool:
    """Whether every member can hold its ``held`` blocks, less those of the requests given up, in the layers of its next
    layout."""
    for index, part in enumerate(split.parts):
        for stage in part:
            ledger = cluster.workers[stage.worker_id].ledger
            # Shared prefix blocks count as staying, so too much may be given up, but not too little.
            freed = sum(ledger.num_exclusive_blocks(s.request_id) for s in given_up)
            if held[stage.worker_id] - freed > room[index] - room[index] // HEADROOM:
                return False
    return True


def fits(
    cluster: ClusterState, group: Group, split: SplitPlan, max_overflow_blocks: int = 0, *,
    without_offline: bool = False,
) -> bool:
    """Whether all requests of ``group``, or all online ones, fit into the parts of ``split``, except for at most
    ``max_overflow_blocks`` of the newest."""
    return overflow(cluster, group, split, max_overflow_blocks, without_offline=without_offline) is not None


def will_hold(cluster: ClusterState, group: Group, split: SplitPlan, usual_output: float) -> bool:
    """Whether each part of ``split`` will have room for any one online request of the group at its foreseen length.

    A request that outgrows its home is preempted there, makes the members merge again and is computed twice. It then
    holds more than a member has room for, so the members stay merged until it ends: such a drop happens once a request.
    An offline request does not keep members merged for its foreseen length: at home it gives way, and waits for the
    next pipeline.
    """
    room = min(room_blocks(cluster, part) for part in split.parts)
    foreseen = (s.num_tokens_foreseen(usual_output) for s in group.queues.online_requests())
    return all(group.limits.blocks_for(num_tokens) <= room for num_tokens in foreseen)

"""Restore: a merged group goes back to instances when its wave has passed, or when compute binds (KunServe).

The forecast decides (``core.ladder.forecasts``), or a threshold of usage where settings say so;
``core.moving.restoring`` carries restores out. Offline KV keeps no group merged: where the online requests alone would
let a group go back, or let a restore under way split, rungs below are asked to take offline KV out first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from jettison.core.ladder.forecasts import TakingApart, parts_of, taking_apart
from jettison.core.ladder.outcomes import Decided
from jettison.core.ladder.rung import Means, Moment, Offer, Rung, register
from jettison.core.ladder.splits import choose_split
from jettison.core.moving.restoring import Restoring, fits, room_blocks, will_hold
from jettison.core.ports import Action, Record
from jettison.core.serving.group import Group
from jettison.policy.forecast import Forecast
from jettison.policy.overload import Trigger
from jettison.policy.restore import plan_splits
from jettison.types import NANOSECONDS, GroupId, WorkerId

AS_GOOD = 0.02
"""Share of a cost by which two forecasts may differ through whole turns alone."""

ASK_EVERY_NS = NANOSECONDS // 2
"""Least time between two forecasts for a merged group: its wave passes in seconds."""

_ROOM = "without offline work its load fits into its members again"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOffer(Offer):
    """A merged group is to be taken apart."""

    max_overflow_blocks: int = 0
    """Most blocks of requests that do not fit at the split, and are computed again; 0: all have to fit."""
    forecast: TakingApart | None = None
    """None where there was nothing to weigh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomOffer(Offer):
    """Offline KV alone keeps a merged group from being taken apart: rungs below are to take it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldOffer(Offer):
    """Compute binds a merged group: it is to admit only what its members could hold apart, so that it can be
    restored."""

    forecast: TakingApart


@dataclass(frozen=True, slots=True, kw_only=True)
class CapOffer(Offer):
    """A merged group that had yielded is to admit again what it has room for, as a request needs the memory of all its
    members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOffer(Offer):
    """A restore under way is to be called off, as a request needs the memory of all members."""


@register
class RestoreRung(Rung):
    """Decides when merged groups are restored, and when a restore is called off. ``core.moving.moves`` carries on what
    it begins."""

    name = "restore"
    is_word = False
    rank = 60
    moments = frozenset({Moment.TICK})

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._state, self._loads, self._moves = means.state, means.loads, means.moves
        self._asked_ns: dict[GroupId, int] = {}
        """When the forecast for each merged group was asked for last."""

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer]:
        """Yield offers for every merged group on every tick: restore it, make room for that, cap its admission or lift
        that cap, or call its restore off. Nothing where settings leave restores to an administrator."""
        if self._state.params.auto_restore:
            for group in list(self._state.pipelines.values()):
                yield from self._consider(group, now_ns)

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Do what the offer says: begin a restore, ask rungs below to take offline KV out, cap the group's admission,
        lift that cap, or call its restore off. Returns the actions and records. Raises AssertionError for another
        rung's offer."""
        group = self._state.groups[offer.groups[0]]
        match offer:
            case RestoreOffer():
                actions = list[Action]()
                if offer.forecast is not None:
                    actions += self._decide("restore_decided", group, offer.forecast, offer.forecast.now, now_ns)
                actions += self.means.ask_way(self, group.worker_ids, offer.why, now_ns)
                split = choose_split(self._state, group, self._usual_output, offer.max_overflow_blocks)
                return actions + self._moves.restore(
                    group, split, now_ns, offer.why, max_overflow_blocks=offer.max_overflow_blocks
                )
            case RoomOffer():
                return self.means.ask_room(self, group, offer.why, now_ns)
            case YieldOffer():
                group.blocks.cap_admission(self.name, self._fitting_blocks(group))
                actions = self._decide("yield", group, offer.forecast, offer.forecast.emptied, now_ns)
                restore = self._moves.restore_of(group)
                return actions if restore is None else [*actions, *self._moves.take_queue_along(restore, now_ns)]
            case CapOffer():
                group.blocks.uncap_admission(self.name)
                return []
            case TurnOffer():
                return self._turn_round(group.worker_ids, offer.why, now_ns)
        raise AssertionError(offer)

    def give_way(self, worker_ids: Collection[WorkerId], by: Rung | None, why: str, now_ns: int) -> list[Action]:
        """Call off every restore that touches these workers, as the pipeline is needed after all; return the
        actions."""
        return self._turn_round(worker_ids, why, now_ns)

    def _turn_round(self, worker_ids: Collection[WorkerId], why: str, now_ns: int) -> list[Action]:
        """Call off every restore that touches one of these workers; return the actions, none without such a restore."""
        restores = [r for r in self._moves.restores if any(w in worker_ids for w in r.worker_ids)]
        return [action for restore in restores for action in self._moves.turn_round(restore, now_ns, why)]

    def go(self) -> None:
        """Lift the cap on admission that this rung has set on merged groups, as it is about to be removed."""
        for group in self._state.pipelines.values():
            group.blocks.uncap_admission(self.name)

    def worker_ids(self) -> Collection[WorkerId]:
        """The members of all restores under way; empty: none."""
        return [w for restore in self._moves.restores for w in restore.worker_ids]

    @property
    def _gives_room(self) -> bool:
        """Whether settings let offline work be taken out of a group for a restore; with priorities alone they do
        not."""
        return self._state.params.offline.slo_aware

    @property
    def _usual_output(self) -> float:
        """Mean tokens of the last online answers; 0 until one has ended."""
        return self._loads.traffic.mean_output_tokens

    # --- tests ------------------------------------------------------------------------------------------------

    def _consider(self, group: Group, now_ns: int) -> Iterator[Offer]:
        """Yield offers for one merged group; nothing while another move touches it, or where it is to stay as it is."""
        ids = (group.group_id,)
        under_way = self._moves.restore_of(group)
        if under_way is not None and under_way.group is group:
            yield from self._reconsider(under_way, now_ns)
            return
        if self._moves.is_moving(group):
            return
        if (cap := group.blocks.caps.get(self.name)) is not None:
            if self._needs_merging(group):
                yield CapOffer(groups=ids, why="a request needs all members' memory")
            elif group.blocks.num_used <= cap and not group.queues.moving:
                yield RestoreOffer(groups=ids, why="compute binds, and its members have more of it apart")
            return
        patience_s = self._loads.monitor(group).patience(self._state.params.restore.min_settled_s)
        if self._loads.settled_s(group, now_ns) < patience_s:
            return
        if self._is_calm(group):
            yield from self._restore(group, now_ns)
        elif (found := self._taking_apart(group, now_ns)) is not None and found.should_empty:
            if not self._needs_merging(group):
                yield YieldOffer(groups=ids, why="compute binds", forecast=found)

    def _is_calm(self, group: Group) -> bool:
        """Whether no request waits: none is kept out, and none that has come since the last step was planned counts, as
        long steps keep newcomers waiting."""
        return not self._loads.num_kept_waiting(group) or (
            group.head_blocked_by is None and not group.queues.moving and not group.queues.stored
        )

    @property
    def _weighs(self) -> bool:
        """Whether a forecast decides; else a threshold does."""
        return self._state.params.overload.trigger is Trigger.FORECAST

    def _taking_apart(self, group: Group, now_ns: int) -> TakingApart | None:
        """What the group would save by being taken apart. None where settings have a threshold decide, within
        ``ASK_EVERY_NS`` of the last answer, and while step times are not known."""
        asked_ns = self._asked_ns.get(group.group_id)
        if not self._weighs or (asked_ns is not None and now_ns - asked_ns < ASK_EVERY_NS):
            return None
        self._asked_ns = {g: at_ns for g, at_ns in self._asked_ns.items() if g in self._state.pipelines}
        self._asked_ns[group.group_id] = now_ns
        return taking_apart(self.means, group, self._fitting_blocks(group) * self._state.limits.block_size)

    def _restore(self, group: Group, now_ns: int) -> Iterator[Offer]:
        """Yield an offer to restore a group whose requests all run, if its load fits into its members, or all but a
        little of it, or will without offline work; nothing where it is better off merged."""
        ids = (group.group_id,)
        everything = sum(self._state.workers[w].full_blocks for w in group.worker_ids)
        if group.blocks.num_used >= everything and not self._can_split(group, without_offline=self._gives_room):
            return
        found = self._taking_apart(group, now_ns) if self._weighs else None
        if found is None and not self._is_idle(group) and (self._weighs or not self._is_below_threshold(group)):
            return
        if found is not None and found.saved_request_s < -AS_GOOD * found.staying.cost_request_s:
            return
        if self._can_split(group):
            yield RestoreOffer(groups=ids, why="its load fits into its members again", forecast=found)
        elif (overflow := self._overflow_blocks(group, found)) and self._can_split(group, overflow):
            why = "all but a little of its load fits into its members again"
            yield RestoreOffer(groups=ids, why=why, max_overflow_blocks=overflow, forecast=found)
        elif self._gives_room and group.queues.holding_offline() and self._can_split(group, without_offline=True):
            yield RoomOffer(groups=ids, why=_ROOM)

    def _is_idle(self, group: Group) -> bool:
        """Whether the group has no online request: then there is nothing to weigh."""
        return not group.queues.online_requests()

    def _is_below_threshold(self, group: Group) -> bool:
        """Whether online requests hold less than the threshold of the members' undropped capacity (KunServe v3 section
        4.4)."""
        offline = (s.request_id for s in group.queues.holding_offline()) if self._gives_room else ()
        used = group.blocks.num_used_without(offline)
        capacity = sum(self._state.workers[w].full_blocks for w in group.worker_ids)
        return used < self._state.params.restore.usage_threshold * capacity

    def _overflow_blocks(self, group: Group, found: TakingApart | None) -> int:
        """Blocks that may be given up and computed again at a restore: as many as cost less than the restore saves,
        while all running requests wait for them."""
        block_s = self._loads.recompute_block_s(group)
        if found is None or not block_s:
            return 0
        return int(found.saved_request_s / (block_s * max(1, len(group.queues.running))))

    def _reconsider(self, restore: Restoring, now_ns: int) -> Iterator[Offer]:
        """Yield offers for a restore whose members have not split yet: to call it off if a request needs all members,
        to take offline KV out of its way, or to yield if compute binds. Nothing once it has gone too far, or if it goes
        well."""
        group = restore.group
        ids = (group.group_id,)
        if not restore.may_still_wait:
            return
        if not will_hold(self._state, group, restore.split_plan, self._usual_output):
            yield TurnOffer(groups=ids, why="a request needs all members' memory")
            return
        if self._gives_room and restore.lacks_offline_room:
            yield RoomOffer(groups=ids, why=_ROOM)
        if not group.queues.waiting or restore.takes_queue_along:
            return
        found = self._taking_apart(group, now_ns)
        if found is not None and found.should_empty:
            yield YieldOffer(groups=ids, why="compute binds", forecast=found)

    def _decide(
        self, kind: str, group: Group, found: TakingApart, taken: Forecast, now_ns: int
    ) -> list[Action]:
        """Begin to count what comes of a decision about a merged group; return its record, behind that of the decision
        before where it ends here."""
        decided = Decided(kind, group.group_id, taken, frozenset(group.worker_ids))
        fields = {"group": group.group_id, "workers": list(group.worker_ids)} | found.as_fields(taken)
        if (cap := group.blocks.caps.get(self.name)) is not None:
            fields["cap_blocks"] = cap
        return [*self.means.outcomes.begin(decided, now_ns), Record(kind, now_ns, fields)]

    def _can_split(self, group: Group, max_overflow_blocks: int = 0, *, without_offline: bool = False) -> bool:
        """Whether some way of splitting holds all requests of the group, now and at their foreseen lengths, but for
        ``max_overflow_blocks``. ``without_offline``: offline requests need no room now."""
        ways = plan_splits(group.stages, self._state.shape.num_layers)
        return any(
            will_hold(self._state, group, way, self._usual_output)
            and fits(self._state, group, way, max_overflow_blocks, without_offline=without_offline)
            for way in ways
        )

    def _needs_merging(self, group: Group) -> bool:
        """Whether some online request of the group is foreseen to become too large for the parts that the forecast
        weighs: three members that would leave one over, for a group of two, are not emptied for that."""
        parts = parts_of(len(group.worker_ids))
        ways = plan_splits(group.stages, self._state.shape.num_layers)
        weighed = [way for way in ways if [len(part) for part in way.parts] == list(parts)]
        return not any(will_hold(self._state, group, way, self._usual_output) for way in weighed)

    def _fitting_blocks(self, group: Group) -> int:
        """Most blocks that the group may hold for its members to take layers back, in the way of splitting with most
        room, less a seventh."""
        ways = plan_splits(group.stages, self._state.shape.num_layers)
        most = max(min(room_blocks(self._state, part) for part in way.parts) for way in ways)
        return most - most // 7

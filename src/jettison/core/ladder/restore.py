"""Restore: a merged group goes back to instances when its wave has passed, or when compute binds (KunServe).

Policies decide (``policy.restore``) over the views of ``core.load.views``; ``core.moving.restoring`` carries restores
out. Offline KV keeps no group merged: where the online requests alone would let a group go back, or let a restore under
way split, rungs below are asked to take offline KV out first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from jettison.core.load.pullrates import PullRates
from jettison.policy.forecast import Plan, forecast
from jettison.core.ladder.drop import HORIZON_S, MARGIN
from jettison.core.ladder.rung import Means, Moment, Offer, Rung, register
from jettison.core.ladder.splits import choose_split
from jettison.core.moving.restoring import Restoring, fits, room_blocks, will_hold
from jettison.core.ports import Action, Record
from jettison.core.serving.group import Group
from jettison.policy.restore import (
    MergedLoad,
    RestoreParams,
    early_overflow_blocks,
    plan_splits,
    should_restore,
    should_yield,
)
from jettison.types import WorkerId

LATER_S = 1.0
import os
YMARGIN = float(os.environ.get("YMARGIN", "0.5"))
_ROOM = "without offline work its load fits into its members again"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOffer(Offer):
    """A merged group is to be taken apart."""

    max_overflow_blocks: int = 0
    """Most blocks of requests that do not fit at the split, and are computed again; 0: all have to fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomOffer(Offer):
    """Offline KV alone keeps a merged group from being taken apart: rungs below are to take it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldOffer(Offer):
    """Compute binds a merged group: it is to admit only what its members could hold apart, so that it can be
    restored."""

    load: MergedLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class CapOffer(Offer):
    """A merged group that had yielded is to admit again what it has room for, as a request needs the memory of all its
    members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOffer(Offer):
    """A restore under way is to be called off, as a request needs the memory of all members."""


class Comparison(NamedTuple):
    """What alternatives to staying merged are forecast to save, in request-seconds."""

    gain_request_s: float
    """By restoring now and not later."""
    yield_gain_request_s: float
    """By emptying the memory for a restore."""


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
                actions = self.means.ask_way(self, group.worker_ids, offer.why, now_ns)
                split = choose_split(self._state, group, self._usual_output, offer.max_overflow_blocks)
                return actions + self._moves.restore(
                    group, split, now_ns, offer.why, max_overflow_blocks=offer.max_overflow_blocks
                )
            case RoomOffer():
                return self.means.ask_room(self, group, offer.why, now_ns)
            case YieldOffer():
                record = self._yield(group, offer.load, now_ns)
                restore = self._moves.restore_of(group)
                return [record] if restore is None else [record, *self._moves.take_queue_along(restore, now_ns)]
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
        load = self._loads.merged_load(group, now_ns)
        if load.settled_s < self._loads.monitor(group).patience(self._state.params.restore.min_settled_s):
            return
        found = self._compare(group)
        if found is None:
            return
        gain = found.gain_request_s
        if gain >= 0.0 and not load.num_waiting:
            overflow = 0 if not load.recompute_block_s or gain <= 0.0 else int(
                gain / (load.recompute_block_s * max(1, len(group.queues.running)))
            )
            if self._can_split(group):
                yield RestoreOffer(groups=ids, why="its load fits into its members again")
                return
            if overflow and self._can_split(group, overflow):
                why = "all but a little of its load fits into its members again"
                yield RestoreOffer(groups=ids, why=why, max_overflow_blocks=overflow)
                return
            if self._gives_room and group.queues.holding_offline() and self._can_split(group, without_offline=True):
                yield RoomOffer(groups=ids, why=_ROOM)
                return
        if found.yield_gain_request_s > 0.0 and not self._needs_merging(group):
            yield YieldOffer(groups=ids, why="compute binds", load=load)

    def _compare(self, group: Group) -> Comparison | None:
        """What restoring now, and emptying the memory for a restore, are forecast to save over staying merged for
        longer; None while step times are not known."""
        outlook, members = self._loads.outlook, group.worker_ids
        merged = outlook.arrangement([len(members)], outlook.capacity_tokens([group]))
        # A long pipeline goes back by halves: a group of every second member has room for more while requests return.
        parts = [1] * len(members) if len(members) < 4 else [(len(members) + 1) // 2, len(members) // 2]
        apart_tokens = outlook.apart_tokens(members) + outlook.copies_tokens(len(members) - len(parts))
        apart = outlook.arrangement(parts, apart_tokens)
        room = self._fitting_blocks(group) * self._state.limits.block_size / apart_tokens
        if merged is None or apart is None:
            return None
        missing_bytes = self._state.shape.parameter_bytes * (len(members) - 1) / len(members)
        takes_s = missing_bytes / PullRates(self._state).slowest(members)
        load = outlook.load([group])
        now = forecast(load, Plan(merged, apart._replace(starts_s=takes_s)), HORIZON_S)
        later = forecast(load, Plan(merged, apart._replace(starts_s=takes_s + LATER_S), room), HORIZON_S)
        emptied = forecast(load, Plan(merged, apart._replace(starts_s=takes_s), room, is_capped=True), HORIZON_S)
        import os
        if os.environ.get("SHOW"):
            print(group.group_id, "now", now, "later", later, "yield", emptied)
        return Comparison(
            later.cost_request_s - now.cost_request_s,
            later.cost_request_s - emptied.cost_request_s - YMARGIN * later.cost_request_s,
        )

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
        found = self._compare(group)
        if found is not None and found.yield_gain_request_s > 0.0:
            yield YieldOffer(groups=ids, why="compute binds", load=self._loads.merged_load(group, now_ns))

    def _yield(self, group: Group, load: MergedLoad, now_ns: int) -> Record:
        """Cap the group's admission at what its members could hold apart; return the record of that."""
        group.blocks.cap_admission(self.name, self._fitting_blocks(group))
        fields = {
            "group": group.group_id,
            "merged_compute_load": load.merged_compute_load,
            "separate_compute_load": load.separate_compute_load,
            "cap_blocks": group.blocks.caps.get(self.name),
        }
        return Record("yield", now_ns, fields)

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
        """Whether some online request of the group is foreseen to become too large for its smallest member on its
        own."""
        least = min(self._state.workers[w].full_blocks for w in group.worker_ids)
        foreseen = (s.num_tokens_foreseen(self._usual_output) for s in group.queues.online_requests())
        return any(group.limits.blocks_for(num_tokens) > least for num_tokens in foreseen)

    def _fitting_blocks(self, group: Group) -> int:
        """Most blocks that the group may hold for its members to take layers back, in the way of splitting with most
        room, less a seventh."""
        ways = plan_splits(group.stages, self._state.shape.num_layers)
        most = max(min(room_blocks(self._state, part) for part in way.parts) for way in ways)
        return most - most // 7

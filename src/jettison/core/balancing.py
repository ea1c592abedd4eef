"""The ``migrate`` baseline: every so often the fullest instances give a running request to the emptiest (Llumnix).

Decisions are ``policy.migration``'s, one move is ``core.migrating``'s; here is only when to look, and that an instance
takes part in one migration at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from jettison.core.group import GroupCore
from jettison.core.migrating import Migration
from jettison.core.ports import Action, MoveEnded
from jettison.core.relief import Abandoned, Relief
from jettison.core.request import RequestState
from jettison.core.state import ClusterState
from jettison.policy.migration import (
    InstanceLoad,
    MigrationParams,
    MigrationRow,
    Pair,
    choose_request,
    may_give,
    plan_pairs,
)
from jettison.types import NANOSECONDS, GroupId, MoveId, WorkerId


class Balancing(Relief):
    """Migrations between instances, lowest freeness to highest."""

    def __init__(self, cluster: ClusterState, params: MigrationParams) -> None:
        self._cluster = cluster
        self._params = params
        self.migrations: list[Migration] = []
        self._looked_ns: int | None = None
        self._may_have_ended = False
        """Some migration was told something since those that are over were last sorted out."""
        self._stale: set[GroupId] = set()
        """Groups that were touched since ``_loads`` was made from them."""
        self._loads: dict[GroupId, InstanceLoad] = {}
        self._low: set[GroupId] = set()
        """Groups that would give a request away: while there is none, the others need not be looked at."""
        self._num_dissolved = 0
        """Groups dissolved when ``_loads`` was last rid of them."""
        self._avoided_until_ns: dict[Pair, int] = {}
        """Pairs between which a transfer failed, either way round."""

    @property
    def dispatches_once(self) -> bool:
        """As published: who waits stays, and running requests leave to make room for it."""
        return True

    @property
    def is_quiet(self) -> bool:
        """Nobody migrates."""
        return not self.migrations

    @property
    def due_ns(self) -> int | None:
        """It looks at all instances every period."""
        return 0 if self._looked_ns is None else self._looked_ns + math.ceil(self._params.period_s * NANOSECONDS)

    def note_grown(self, group: GroupCore) -> None:
        """What is known of its load is not true any more."""
        self._stale.add(group.group_id)

    @property
    def awaits_tick(self) -> bool:
        """It looks at groups from time to time."""
        return True

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Workers of groups that take part in a migration."""
        return tuple(w for migration in self.migrations for w in migration.worker_ids)

    def on_move(self, event: MoveEnded, now_ns: int) -> list[Action] | None:
        """Take the end of a transfer."""
        for migration in self.migrations:
            actions = migration.on_move(event, now_ns)
            if actions is not None:
                self._may_have_ended = True
                return actions
        return None

    def cancel(self, state: RequestState) -> list[Action]:
        """The request is ending."""
        if not self.migrations:
            return []
        self._may_have_ended = True
        return [action for m in self.migrations if m.state is state for action in m.cancel()]

    def abandon(self, broken: Sequence[GroupCore]) -> Abandoned:
        """Requests whose source is broken start again; those whose destination is broken stay where they are."""
        moves: set[MoveId] = set()
        actions: list[Action] = []
        for migration in self.migrations:
            if migration.source in broken:
                moves |= migration.state.moves
            elif migration.destination in broken:
                actions += migration.cancel()
        self.migrations = [m for m in self.migrations if m.source not in broken]
        self._may_have_ended = True
        return Abandoned(moves, actions)

    def before_steps(self, busy: Set[WorkerId], now_ns: int) -> list[Action]:
        """Let migrations go on; look for new pairs when it is time, or when an instance has become free for one."""
        actions: list[Action] = []
        changed = {g.group_id for g in self._cluster.changed_groups()}
        self._stale |= changed
        for migration in self.migrations:
            if migration.source.group_id in changed or migration.destination.group_id in changed:
                actions += migration.advance(now_ns)
                self._may_have_ended = True
        has_ended = False
        if self._may_have_ended:
            ended = [m for m in self.migrations if m.is_over]
            has_ended = bool(ended)
            if has_ended:
                self.migrations = [m for m in self.migrations if not m.is_over]
                self._note_lost(ended, now_ns)
            self._may_have_ended = False
        period_ns = self._params.period_s * NANOSECONDS
        if has_ended or self._looked_ns is None or now_ns - self._looked_ns >= period_ns:
            self._looked_ns = now_ns
            actions += self._look(busy, now_ns)
        return actions

    def _note_lost(self, ended: Sequence[Migration], now_ns: int) -> None:
        """What failed is not tried again at once, nor the way back."""
        until_ns = now_ns + round(self._params.retry_s * NANOSECONDS)
        for migration in ended:
            if migration.lost_transfer:
                ends = migration.source.group_id, migration.destination.group_id
                self._avoided_until_ns |= {Pair(*ends): until_ns, Pair(*ends[::-1]): until_ns}

    def _avoided(self, now_ns: int) -> Set[Pair]:
        if self._avoided_until_ns:
            self._avoided_until_ns = {p: end for p, end in self._avoided_until_ns.items() if end > now_ns}
        return self._avoided_until_ns.keys()

    def _look(self, busy: Set[WorkerId], now_ns: int) -> list[Action]:
        self._refresh_loads()
        if not self._low:
            return []
        taken = busy | set(self.worker_ids)
        groups = self._cluster.groups
        if not any(_is_idle(groups[g], taken) for g in self._low):
            return []
        idle = {i: g for i, g in groups.items() if _is_idle(g, taken)}
        loads = self._loads
        actions: list[Action] = []
        for pair in plan_pairs([loads[i] for i in idle], self._params, self._avoided(now_ns)):
            source, destination = idle[pair.source], idle[pair.destination]
            if len(destination.running) >= destination.max_running:
                continue
            chosen = choose_request(_rows(source), loads[pair.source], loads[pair.destination], self._params)
            if chosen is None:
                continue
            migration = Migration(self._cluster, source.running[chosen], source, destination)
            actions += migration.start(now_ns)
            if not migration.is_over:
                self.migrations.append(migration)
        return actions

    def _refresh_loads(self) -> None:
        """What is known of groups that nothing has touched is what it was."""
        groups = self._cluster.groups
        if self._num_dissolved != self._cluster.num_dissolved:
            self._num_dissolved = self._cluster.num_dissolved
            self._loads = {g: load for g, load in self._loads.items() if g in groups}
            self._low &= self._loads.keys()
        for group_id in self._stale & groups.keys():
            self._loads[group_id] = load = _load(groups[group_id])
            if may_give(load, self._params):
                self._low.add(group_id)
            else:
                self._low.discard(group_id)
        self._stale.clear()

    def check(self) -> None:
        """No instance takes part in two migrations."""
        workers = self.worker_ids
        assert len(set(workers)) == len(workers), "an instance takes part in two migrations"


def _is_idle(group: GroupCore, taken: Set[WorkerId]) -> bool:
    return not group.paused and taken.isdisjoint(group.worker_ids)


def _load(group: GroupCore) -> InstanceLoad:
    head = group.waiting.head
    head_blocks = 0 if head is None else group.blocks_for(head.num_tokens)
    batch = len(group.running) + (1 if group.waiting else 0)
    return InstanceLoad(group.group_id, group.capacity_blocks, group.used_blocks, head_blocks, batch)


def _rows(group: GroupCore) -> list[MigrationRow]:
    """Requests that decode: one in prefill would be copied while it is written."""
    return [
        MigrationRow(s.request_id, s.request.priority, group.ledgers[0].num_blocks_of(s.request_id))
        for s in group.running.values()
        if s.num_output > 0 and s.num_tokens - s.num_computed <= 1
        and s.ending is None and not s.moves and not s.paused
    ]

"""An administrator's orders to drop, restore and migrate: they are obeyed whatever the load is, and whatever rungs
there are. In a cluster of static pipelines no order changes groups."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from jettison.core.advice import Going, WantedMove
from jettison.core.ladder.climb import Ladder
from jettison.core.ladder.dropplans import DropPlanner
from jettison.core.ladder.movekinds import choose_kinds
from jettison.core.ladder.splits import choose_split
from jettison.core.load.views import Loads
from jettison.core.moving.migrations import Migrations, may_go
from jettison.core.moving.moves import Moves
from jettison.core.ports import Action
from jettison.core.state import ClusterState
from jettison.memory.kvtransfers import MigrationKind
from jettison.types import GroupId, RequestId

_WHY = "requested"


class Orders:
    """Carries out an administrator's orders at once. What cannot begin now is left out; each order returns its
    actions."""

    def __init__(self, state: ClusterState, loads: Loads, moves: Moves) -> None:
        self._state = state
        self._loads = loads
        self._moves = moves
        self._planner = DropPlanner(state, loads)

    def drop(self, ladder: Ladder, now_ns: int) -> list[Action]:
        """Call off the first restore under way; without one, merge the two smallest groups that no move touches.
        Returns the actions; none where no two groups can merge, and with static pipelines."""
        if self._state.params.static_pipeline:
            return []
        for restore in self._moves.restores:
            return self._moves.turn_round(restore, now_ns, _WHY)
        moving = self._moves.moving_workers()
        idle = [g for g in self._state.groups.values() if moving.isdisjoint(g.worker_ids)]
        actions: list[Action] = []
        for merge in self._planner.plan(idle, 1, None, math.inf).merges:
            actions += ladder.ask_way(None, [s.worker_id for s in merge.stages], _WHY, now_ns)
            sources = [self._state.groups[g] for g in merge.sources]
            actions += self._moves.merge(sources, merge.stages, now_ns, merge.pulls)
        return actions

    def restore(self, ladder: Ladder, now_ns: int) -> list[Action]:
        """Begin to restore every merged group that no move touches. Returns the actions; none without such a group, and
        with static pipelines."""
        if self._state.params.static_pipeline:
            return []
        actions: list[Action] = []
        for group in list(self._state.groups.values()):
            if len(group.stages) > 1 and not self._moves.is_moving(group):
                actions += ladder.ask_way(None, group.worker_ids, _WHY, now_ns)
                split = choose_split(self._state, group, self._loads.traffic.mean_output_tokens)
                actions += self._moves.restore(group, split, now_ns, _WHY)
        return actions

    def migrate(
        self, migrations: Migrations, request_id: RequestId, destination: GroupId, now_ns: int, *,
        kind: MigrationKind, max_step_tokens: int | None,
    ) -> list[Action]:
        """Begin to migrate a request to the group ``destination``, in the given kind. Returns the actions; none where
        the request cannot go now, or where either group is paused or in a move."""
        wanted = self._wanted(migrations, request_id, destination)
        if wanted is None:
            return []
        source = self._state.groups[wanted.state.group_id]
        return migrations.start(
            wanted.state, source, wanted.destination, now_ns, going=Going(kind, max_step_tokens)
        )

    def migrate_all(
        self, migrations: Migrations, destinations: Mapping[RequestId, GroupId], now_ns: int,
        kinds: Collection[MigrationKind],
    ) -> list[Action]:
        """Begin to migrate these requests, each to its group in the best of these kinds, as ``choose_kinds`` says.
        Returns the actions; a request that has to wait, or cannot go now, stays, and has to be ordered again."""
        found = [self._wanted(migrations, r, g) for r, g in destinations.items()]
        wanted = {w.state.request_id: w._replace(kinds=kinds) for w in found if w is not None}
        actions: list[Action] = []
        for request_id, going in choose_kinds(self._state, wanted.values()).items():
            state, destination, *_ = wanted[request_id]
            source = self._state.groups[state.group_id]
            actions += migrations.start(state, source, destination, now_ns, going=going)
        return actions

    def _wanted(self, migrations: Migrations, request_id: RequestId, destination: GroupId) -> WantedMove | None:
        """The move of a request to a group, if it can begin now; None if the request or the group is unknown, the
        request cannot go, or either group is paused, in a move, or shares workers with the other."""
        state, groups = self._state.requests.get(request_id), self._state.groups
        if state is None or not may_go(state) or migrations.is_moving(state) or destination not in groups:
            return None
        ends = source, target = groups[state.group_id], groups[destination]
        if set(source.worker_ids) & set(target.worker_ids) or any(g.paused or self._moves.is_moving(g) for g in ends):
            return None
        return WantedMove(state, target)

"""Which groups may hold packed requests, by their memory in blocks, and the machine of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from jettison.core.moving.moves import Moves
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.policy.links import MachineId
from jettison.types import GroupId, WorkerId


class Packable:
    """The groups that may hold packed requests. It remembers what it found, and looks again only after some group was
    reshaped or while groups move."""

    def __init__(self, cluster: ClusterState, moves: Moves) -> None:
        self._cluster, self._moves = cluster, moves
        self.machine_of: dict[GroupId, MachineId] = {}
        """The machine of each group that was found last; packers keep this mapping."""
        self._sizes: dict[GroupId, int] = {}
        """Blocks of each group that was found last ..."""
        self._by_size: defaultdict[int, set[GroupId]] = defaultdict(set)
        """... and the same the other way round."""
        self._machines: Mapping[WorkerId, MachineId] = {}
        """The settings' machines of workers at that time."""
        self._num_reshaped: int | None = None
        """``Changes.reshaped`` at that time; None: groups were moving."""

    def is_packed(self, group: Group) -> bool:
        """Whether the group may hold packed requests now: not while its layouts change, it is about to sleep, or it
        shares a worker; a merged one only in static pipelines."""
        cluster = self._cluster
        if len(group.stages) > 1 and not cluster.params.static_pipeline:
            return False
        if group.paused or self._moves.is_moving(group) or self._moves.is_emptying(group):
            return False
        return not cluster.shared_workers or cluster.shared_workers.isdisjoint(group.worker_ids)

    def by_size(self) -> Mapping[int, set[GroupId]]:
        """The ids of all groups that may hold packed requests now, by their number of blocks. The caller must not
        change it."""
        machines, is_calm = self._cluster.params.machine_of, self._is_calm()
        num_reshaped = self._cluster.changes.reshaped if is_calm else None
        if num_reshaped is None or num_reshaped != self._num_reshaped or machines is not self._machines:
            self._note(self._sizes_now(is_calm), machines)
            self._num_reshaped = num_reshaped
        return self._by_size

    def _is_calm(self) -> bool:
        """Whether no group moves, is merged or shares workers, so that what was found stays true."""
        cluster = self._cluster
        return not (self._moves.moving_workers() or cluster.shared_workers or cluster.pipelines)

    def _sizes_now(self, is_calm: bool) -> dict[GroupId, int]:
        """The blocks of each group that may hold packed requests now. ``is_calm``: no group moves, so only pauses are
        asked for."""
        return {
            group_id: group.blocks.capacity for group_id, group in self._cluster.groups.items()
            if (not group.paused if is_calm else self.is_packed(group))
        }

    def _note(self, sizes: dict[GroupId, int], machines: Mapping[WorkerId, MachineId]) -> None:
        """Remember these sizes and the groups' machines, if they differ from those remembered."""
        if sizes != self._sizes or machines is not self._machines:
            self._sizes, self._machines, self._by_size = sizes, machines, defaultdict(set)
            for group_id, size in sizes.items():
                self._by_size[size].add(group_id)
                worker_id = self._cluster.groups[group_id].worker_ids[0]
                self.machine_of[group_id] = machines.get(worker_id, worker_id)
            for group_id in self.machine_of.keys() - sizes.keys():
                del self.machine_of[group_id]

    def check(self) -> None:
        """What is remembered agrees with the groups, unless it would be looked at anew. Raises AssertionError
        otherwise."""
        if self._num_reshaped == self._cluster.changes.reshaped and self._is_calm():
            assert self._sizes == self._sizes_now(is_calm=False), "groups that are packed"

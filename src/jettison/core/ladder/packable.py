"""Groups that may hold requests that are packed, by their memory, and in which machines they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from jettison.core.moving.moves import Moves
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.policy.links import MachineId
from jettison.types import GroupId, WorkerId


class Packable:
    """Remembers what it found, which seldom changes: a pass reads two things of each group for it."""

    def __init__(self, cluster: ClusterState, moves: Moves) -> None:
        self._cluster, self._moves = cluster, moves
        self.machine_of: dict[GroupId, MachineId] = {}
        """Of the groups that were found last; packers keep it."""
        self._sizes: dict[GroupId, int] = {}
        """Blocks of each ..."""
        self._by_size: defaultdict[int, set[GroupId]] = defaultdict(set)
        """... and the same the other way round."""
        self._machines: Mapping[WorkerId, MachineId] = {}
        """Where workers were."""

    def is_packed(self, group: Group) -> bool:
        """It may hold requests that are packed: merged groups, and those whose layouts change or that are about to
        sleep, may not."""
        cluster = self._cluster
        if len(group.stages) > 1 and not cluster.params.static_pipeline:
            return False
        if group.paused or self._moves.is_moving(group) or self._moves.is_emptying(group):
            return False
        return not cluster.shared_workers or cluster.shared_workers.isdisjoint(group.worker_ids)

    def by_size(self) -> Mapping[int, set[GroupId]]:
        """All that are packed now, by their blocks; not to be changed."""
        cluster, machines = self._cluster, self._cluster.params.machine_of
        is_calm = not (self._moves.moving_workers() or cluster.shared_workers or cluster.pipelines)
        sizes = {
            group_id: group.blocks.capacity for group_id, group in cluster.groups.items()
            if (not group.paused if is_calm else self.is_packed(group))
        }
        if sizes != self._sizes or machines is not self._machines:
            self._sizes, self._machines, self._by_size = sizes, machines, defaultdict(set)
            for group_id, size in sizes.items():
                self._by_size[size].add(group_id)
                worker_id = cluster.groups[group_id].worker_ids[0]
                self.machine_of[group_id] = machines.get(worker_id, worker_id)
            for group_id in self.machine_of.keys() - sizes.keys():
                del self.machine_of[group_id]
        return self._by_size

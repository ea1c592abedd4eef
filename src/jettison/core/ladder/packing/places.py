"""The groups of a pool that a newcomer may go to: those in use, and those without online requests. What each costs is
``core.ladder.packing.newcomers``'."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jettison.core.ladder.packing.newcomers import Late, Newcomers, fits_compute, has_room
from jettison.core.ladder.packing.packable import Packable
from jettison.core.ladder.packing.seats import Pool
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.types import GroupId


class Places:
    """Chooses among the groups of a pool."""

    def __init__(self, cluster: ClusterState, packable: Packable, newcomers: Newcomers) -> None:
        self._cluster, self._packable, self.newcomers = cluster, packable, newcomers

    def takes(self, group_id: GroupId, state: RequestState) -> bool:
        """Whether a group is packed, has room for this newcomer now, and leaves it its objective for a first token."""
        cluster = self._cluster
        group = cluster.groups.get(group_id)
        if group is None or not self._packable.is_packed(group):
            return False
        cluster.catch_up(group_id)
        return has_room(cluster, group, state) and fits_compute(cluster, group, state)

    def stays(self, state: RequestState, source: Group, destination: Group) -> bool:
        """Whether a request that waits for its first step stays for now although packing wants it elsewhere: it would
        not be taken there, or its prompt costs less where it is."""
        return not self.takes(destination.group_id, state) or self.newcomers.stays(state, source, destination)

    def choose(self, state: RequestState, pool: Pool, wanted: GroupId, *, only_in_use: bool) -> GroupId | None:
        """The group of a pool for a newcomer whose place by memory is ``wanted``; ``only_in_use``: the fullest in use
        that takes it at once. None: none has room for it."""
        group = self._cluster.groups.get(wanted)
        if only_in_use or group is None or not self._packable.is_packed(group):
            takers = [d for d in self._in_use(pool) if self.takes(d, state)]
            return min(takers, key=lambda d: (self._cluster.groups[d].blocks.num_free, d), default=None)
        chosen = self.newcomers.choose(group, state, lambda: self._others(pool, wanted), pool.packer.active)
        return None if chosen is None else chosen.group_id

    def late(self, pool: Pool) -> Iterator[tuple[Late, Group]]:
        """Yield the requests of a pool that wait for their first step and would better be served by a group without
        online requests, with such a group for each."""
        groups = self._cluster.groups
        queued = sorted(self._cluster.changes.queued_online & pool.devices & groups.keys())
        spares = list(self._packed(pool.devices - self._in_use(pool))) if queued else []
        for late in self.newcomers.late(groups[g] for g in queued) if spares else ():
            spare = next((g for g in spares if has_room(self._cluster, g, late.state)), None)
            if spare is None:
                return
            spares.remove(spare)
            yield late, spare

    def _in_use(self, pool: Pool) -> set[GroupId]:
        """A pool's groups where some online request should live, or does."""
        groups = self._cluster.groups
        return {*pool.packer.active, *(d for d in pool.devices if d in groups and groups[d].queues.serves_online)}

    def _others(self, pool: Pool, wanted: GroupId) -> tuple[Iterator[Group], Iterator[Group]]:
        """Of a pool's groups that are packed, but for one: those in use, and the others."""
        in_use = self._in_use(pool)
        return self._packed(in_use - {wanted}), self._packed(pool.devices - in_use - {wanted})

    def _packed(self, devices: Iterable[GroupId]) -> Iterator[Group]:
        """The groups among these devices that are packed now, in order."""
        found = (self._cluster.groups[d] for d in sorted(devices) if d in self._cluster.groups)
        return (group for group in found if self._packable.is_packed(group))

"""Who is near whom: decides between partners of a merge, and between senders of a shard, that are otherwise alike.

Pure. Where the distances come from: ``core.load.distances``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from jettison.types import WorkerId

MachineId = int
"""A machine's number, >= 0."""

NEAR = 0.0
"""Inside one machine."""

FAR = 1.0
"""Across a network of which nothing else is known."""


@dataclass(frozen=True, slots=True)
class Links:
    """Machines, and how far they are from each other; only the order of distances means anything."""

    machine_of: Mapping[WorkerId, MachineId]
    """Workers that are not named are alone in their machines."""
    between: Mapping[tuple[MachineId, MachineId], float] = field(default_factory=dict)
    """From one machine to another, where it is more than ``FAR``."""

    def machine(self, worker_id: WorkerId) -> MachineId:
        """The worker's machine; a number of its own (< 0) where it is alone."""
        return self.machine_of.get(worker_id, -1 - worker_id)

    def distance(self, src: WorkerId, dst: WorkerId) -> float:
        """From one worker to another: a ``policy.ranges.LinkDistance``."""
        return self._one_way(self.machine(src), self.machine(dst))

    def farthest(self, some: Collection[MachineId], others: Collection[MachineId]) -> float:
        """The longest way between one of the first and one of the second, in either direction."""
        if not self.between:
            return NEAR if len({*some, *others}) == 1 else FAR
        return max(max(self._one_way(a, b), self._one_way(b, a)) for a in some for b in others)

    def _one_way(self, src: MachineId, dst: MachineId) -> float:
        return NEAR if src == dst else self.between.get((src, dst), FAR)

"""How near workers are to each other, and which ports a transfer goes through. Distance decides between partners of a
merge, and between senders of a shard, that are otherwise alike.

Pure. Where the distances come from: ``core.load.distances``; rates of ports: ``core.load.portrates``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from jettison.types import WorkerId

MachineId = int
"""A machine's number, >= 0."""

NEAR = 0.0
"""Inside one machine."""

FAR = 1.0
"""Across a network whose speed is not known."""

MachineDistance = Callable[[Hashable, Hashable], float]
"""From one machine to another, whatever names them."""


def one_or_another(src: Hashable, dst: Hashable) -> float:
    """The distance of machines where all networks are alike."""
    return NEAR if src == dst else FAR


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


class PortKind(StrEnum):
    """What a transfer goes through."""

    CARD = "card"
    """A network card that all workers of a machine share."""
    NETWORK = "network"
    """A worker's own way to other machines."""
    MEMORY = "memory"
    """Its way to the other workers of its machine."""
    HOST = "host"
    """Its way to its machine's host memory."""


class PortId(NamedTuple):
    """One direction of one port: all transfers through it share what it carries."""

    kind: PortKind
    number: int
    """Of the card, or the worker."""
    is_out: bool
    """Bytes leave by it; else they come in. False for a host's port, as one copy engine serves both directions."""


@dataclass(frozen=True, slots=True)
class PortMap:
    """Which ports transfers take (MELL, Fig. 9: two that go to other machines by one card share it)."""

    machine_of: Mapping[WorkerId, MachineId] = field(default_factory=dict)
    """Workers that are not named are alone in their machines."""
    card_of: Mapping[WorkerId, int] = field(default_factory=dict)
    """By which network card workers reach other machines; a worker that is not named has a port of its own."""

    def of(self, src: WorkerId, dst: WorkerId) -> tuple[PortId, ...]:
        """Ports by which bytes leave one worker and enter another; from a worker to itself: its host's memory."""
        if src == dst:
            return (PortId(PortKind.HOST, src, False),)
        if src in self.machine_of and self.machine_of[src] == self.machine_of.get(dst):
            return PortId(PortKind.MEMORY, src, True), PortId(PortKind.MEMORY, dst, False)
        return self._network(src, is_out=True), self._network(dst, is_out=False)

    def _network(self, worker_id: WorkerId, *, is_out: bool) -> PortId:
        card = self.card_of.get(worker_id)
        if card is None:
            return PortId(PortKind.NETWORK, worker_id, is_out)
        return PortId(PortKind.CARD, card, is_out)

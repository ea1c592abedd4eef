"""Links between workers: their kinds, their capacities, and the machine of each worker. Values only.

A worker stands for an instance: its network cards (one a GPU) are one port with their sum, unless all workers of a
machine share one card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from jettison.types import NANOSECONDS, WorkerId


class LinkClass(StrEnum):
    """The technology of a link."""

    NVLINK = "nvlink"
    RDMA = "rdma"
    PCIE = "pcie"
    ETHERNET = "ethernet"


LATENCY_S: Mapping[LinkClass, float] = {
    LinkClass.NVLINK: 8e-6,
    LinkClass.RDMA: 10e-6,
    LinkClass.PCIE: 10e-6,
    LinkClass.ETHERNET: 35e-6,
}
"""Seconds for a small message between devices, where the spec names no latency: the floors of vidur's measured
send/recv tables (8 to 35 microseconds; github.com/microsoft/vidur, data/profiling/network)."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One port of a worker."""

    bytes_per_s: float
    """Rate of one direction."""
    latency_s: float
    """Seconds from a sender to a receiver that waits, for an empty message."""
    duplex_efficiency: float = 1.0
    """A port carries in both directions together at most (1 + this) times the rate of one direction: 1 = full duplex, 0
    = half. The 1.3 s that KunServe reports for 33 GB at 200 Gbps are half duplex if both directions are meant."""
    link_class: LinkClass = LinkClass.RDMA

    def __post_init__(self) -> None:
        if not 0.0 < self.bytes_per_s < float("inf") or not 0.0 <= self.latency_s < float("inf"):
            raise ValueError("a link needs a finite rate > 0 and a finite latency >= 0")
        if not 0.0 <= self.duplex_efficiency <= 1.0:
            raise ValueError(f"duplex efficiency {self.duplex_efficiency} is not in [0, 1]")

    @classmethod
    def of(cls, link_class: LinkClass, bytes_per_s: float, duplex_efficiency: float = 1.0) -> LinkSpec:
        """A link with its class's usual latency."""
        return cls(bytes_per_s, LATENCY_S[link_class], duplex_efficiency, link_class)

    @property
    def latency_ns(self) -> int:
        """Whole nanoseconds."""
        return round(self.latency_s * NANOSECONDS)


class PortId(NamedTuple):
    """One worker's port of one kind. Links of a class with different rates are different hardware, and share
    nothing."""

    worker_id: WorkerId
    link_class: LinkClass
    bytes_per_s: float
    duplex_efficiency: float

    @classmethod
    def of(cls, worker_id: WorkerId, link: LinkSpec) -> PortId:
        """The worker's end of a link."""
        return cls(worker_id, link.link_class, link.bytes_per_s, link.duplex_efficiency)


@dataclass(frozen=True, slots=True)
class Topology:
    """The links between workers: ``inside`` one machine, ``between`` machines."""

    between: LinkSpec
    inside: LinkSpec | None = None
    """None: machines hold one worker each, or their workers talk over the network, too."""
    host: LinkSpec | None = None
    """Link to the host's memory, by copy engines that work beside the steps. None: the worker's own thread copies."""
    machine_of: Mapping[WorkerId, int] = field(default_factory=dict)
    """Workers that are not named are alone in their machines."""
    card_of: Mapping[WorkerId, int] = field(default_factory=dict)
    """Workers whose links between machines go through one card, which has the rate of ``between``. Workers that are not
    named have one each."""

    @property
    def near(self) -> Mapping[WorkerId, int]:
        """Machines, for plans that prefer links inside one (``ClusterParams.machine_of``); empty without any."""
        return {} if self.inside is None else self.machine_of

    def link(self, a: WorkerId, b: WorkerId) -> LinkSpec:
        """The link from one worker to the other (``host_of`` a worker included)."""
        if self.host is not None and (a < 0 or b < 0):
            return self.host
        if self.inside is not None and a in self.machine_of and self.machine_of[a] == self.machine_of.get(b):
            return self.inside
        return self.between


    def ends(self, src: WorkerId, dst: WorkerId) -> tuple[PortId, PortId]:
        """The ports that bytes leave by and come in by: a card's is named after the first of its workers."""
        link = self.link(src, dst)
        owners = (src, dst) if link is not self.between else (self._owner(src), self._owner(dst))
        return PortId.of(owners[0], link), PortId.of(owners[1], link)

    def _owner(self, worker_id: WorkerId) -> WorkerId:
        card = self.card_of.get(worker_id)
        return worker_id if card is None else min(w for w, c in self.card_of.items() if c == card)


def host_of(worker_id: WorkerId) -> WorkerId:
    """The worker's host memory as an end of a link."""
    return -1 - worker_id

"""The parameters of a cluster core: which policies it follows, and their numbers.

The meaning of a number is documented where it is used; ``jettison.config`` reads the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jettison.cost.hardware import HardwareProfile
from jettison.memory.kvtransfers import ExchangeMode
from jettison.policy.batchworth import BatchPrices
from jettison.policy.dispatch import DispatchOrder, by_freeness
from jettison.policy.links import MachineId, PortMap
from jettison.policy.merge import MergeStrategy
from jettison.policy.migration import MigrationParams
from jettison.policy.movekinds import MoveParams
from jettison.policy.offline import OfflineParams
from jettison.policy.overload import OverloadParams
from jettison.policy.packing.params import PackParams
from jettison.policy.restore import RestoreParams
from jettison.policy.swapping import SwapParams
from jettison.types import WorkerId


@dataclass(frozen=True, slots=True)
class FaultParams:
    """Bounds of how long, and how often, faults are tolerated."""

    max_outage_s: float = 60.0
    """How long requests wait while no worker can take them; then they end with an error."""
    max_deaths_per_request: int = 3
    """A request ends with an error after this many workers have died during its steps: it may be what kills them."""


@dataclass(frozen=True, slots=True)
class AwakeParams:
    """How many workers rungs leave awake; orders by hand may go below."""

    min_awake: int = 2
    max_awake: int | None = None
    """None: all may be."""
    falls_asleep: bool = False
    """A worker that is not needed goes to sleep by itself ..."""
    after_s: float = 30.0
    """... once no online request has used it for so long."""
    prices: BatchPrices = field(default_factory=BatchPrices)
    """What offline work without a deadline is worth: workers stay awake, and are woken, for it."""


@dataclass(frozen=True, slots=True)
class ProvisionParams:
    """How many workers have a process."""

    min_instances: int | None = None
    """Processes that are never given back; None: all of them."""
    num_at_start: int | None = None
    """The workers with the lowest ids that have a process from the start; None: all have one."""
    start_s: float | None = None
    """Seconds that a process took to start until it could be filled, before any was asked for; None: not known."""
    at_start: frozenset[WorkerId] | None = None
    """The workers that have one, where they are others: those that have outlived an earlier controller."""


@dataclass(frozen=True, slots=True)
class ClusterParams:
    """Policies and their parameters."""

    rungs: tuple[str, ...] = ("drop", "restore", "scale", "shed")
    """Rungs, by name: what is done when demand for memory and supply differ (``core.ladder``)."""
    static_pipeline: bool = False
    """Workers serve as pipelines from the start, and stay so (a baseline)."""
    overload: OverloadParams = field(default_factory=OverloadParams)
    restore: RestoreParams = field(default_factory=RestoreParams)
    offline: OfflineParams = field(default_factory=OfflineParams)
    swap: SwapParams = field(default_factory=SwapParams)
    migration: MigrationParams = field(default_factory=MigrationParams)
    moves: MoveParams = field(default_factory=MoveParams)
    """How migrations are divided between kinds, where each request gets its own kind."""
    packing: PackParams | None = None
    """How the rung ``pack`` packs, where it is one of ``rungs``."""
    drop_dwell_s: float = 0.5
    """Least time between the end of one move of a group and its next drop."""
    growth_factor: float = 1.2
    """Factor on the need that a plan must free, as room to grow: queued prompts will produce tokens."""
    dispatch: DispatchOrder = by_freeness
    """Which group gets a new request: the first in this order."""
    rebalance: bool = True
    """Send waiting requests that a group's batch or memory has no room for to other groups (KunServe v1 section
    4.3)."""
    batch_limit: int | None = None
    """Requests that an instance can usefully run at once; None = from the profile, else ``max_num_seqs``. It bounds
    which requests are left waiting while other groups have places, not what a group admits."""
    planner: MergeStrategy = "throughput"
    """How far to merge: as little as suffices (KunServe v3), or until the added KV exceeds the first (v1)."""
    link_bytes_per_s: float = 1e9
    """Expected rate of links between workers of one machine where there is no profile and no transfer has ended yet,
    for the choice of merging, and of pulling for it."""
    machine_of: Mapping[WorkerId, MachineId] = field(default_factory=dict)
    """Which workers share a machine: drop plans prefer near partners and senders. Workers that are not named are alone;
    empty = all are as near to each other."""
    shares_copies: bool = True
    """Sleepers of one machine share the copy of the parameters in its memory; else each worker has its own, which may
    end with it."""
    card_of: Mapping[WorkerId, int] = field(default_factory=dict)
    """By which network card each worker reaches other machines: transfers through one card share it. Workers that are
    not named have cards of their own."""
    card_bytes_per_s: float | None = None
    """Rate of a card in each direction; None: as its links were profiled, or measured."""
    exchange: ExchangeMode = ExchangeMode.AUTO
    """How stalled requests get to run again after a merge."""
    auto_restore: bool = True
    """False leaves restoring to ``request_restore`` (experiments with restore off; verification)."""
    profile: HardwareProfile | None = None
    """Measured costs of steps and moves on this machine, where it was profiled."""
    loading_bytes_per_s: float | None = None
    """Rate at which a worker read the model folder at its start, hashes and checks included; None: as profiled."""
    has_profiled_links: bool = True
    """The workers are joined by links of the kind that was profiled."""
    near_bytes_per_s: float | None = None
    """Rate of links inside one machine, where they differ from the profiled ones; for requests that move."""
    networks: Mapping[tuple[MachineId, MachineId], float] = field(default_factory=dict)
    """Bytes per second from one machine to another, by (from, to), as measured at the start, when nothing else was on
    the way. Pairs that are not there were not measured; empty: all workers were on one machine then."""
    faults: FaultParams = field(default_factory=FaultParams)
    awake: AwakeParams = field(default_factory=AwakeParams)
    provision: ProvisionParams = field(default_factory=ProvisionParams)

    @property
    def ports(self) -> PortMap:
        """Which ports transfers between its workers take."""
        return PortMap(self.machine_of, self.card_of)

    @property
    def profiled_link(self) -> tuple[float, float] | None:
        """(bytes per second, seconds there and back) of a link, as profiled; None where links were not profiled."""
        if self.profile is None or not self.has_profiled_links:
            return None
        return self.profile.link_bytes_per_s, 2 * self.profile.link_latency_s

    def why_fixed(self, after: ClusterParams) -> str | None:
        """Which parameter of ``after`` differs and cannot be changed while a cluster runs, as memory and fits have been
        made from it. None: no such parameter."""
        if self.static_pipeline != after.static_pipeline:
            return "the layout at the start"
        if self.swap.num_host_slots != after.swap.num_host_slots:
            return "the size of host pools"
        if self.provision.num_at_start != after.provision.num_at_start:
            return "the number of instances at the start"
        return "the profile" if self.profile != after.profile else None

"""The parts of a simulated cluster, as values."""

from __future__ import annotations

from dataclasses import dataclass, field

from jettison.core.params import ClusterParams
from jettison.core.serving.group import SchedulerLimits
from jettison.cost.hardware import HardwareProfile
from jettison.memory.kvtransfers import MAX_PIECE_NS
from jettison.sim.executor import Executor, ModelledExecutor
from jettison.sim.links import LinkSpec, Topology
from jettison.types import NANOSECONDS, LayerRange, ModelShape

CUDA_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class MemorySetup:
    """The memory of one worker; all devices of an instance together."""

    budget_bytes: int
    """Hard limit: parameters, KV and workspace."""
    workspace_bytes: int = 0
    page_bytes: int = CUDA_PAGE_BYTES
    drops: tuple[LayerRange, ...] | None = None
    """On a card, where a page stays mapped where it served: the layers that drops leave which are mapped ahead. None:
    mappings do not stay."""

    @classmethod
    def for_blocks(
        cls, shape: ModelShape, block_size: int, num_blocks: int, *, page_bytes: int = CUDA_PAGE_BYTES,
        workspace_bytes: int = 0,
    ) -> MemorySetup:
        """The budget in which all parameters and ``num_blocks`` KV blocks fit."""
        arena = -(-num_blocks * shape.block_bytes_per_layer(block_size) // page_bytes)
        pages = sum(-(-size // page_bytes) for size in shape.shard_bytes.values()) + arena * shape.num_layers
        return cls((pages + -(-workspace_bytes // page_bytes)) * page_bytes, workspace_bytes, page_bytes)


@dataclass(frozen=True, slots=True)
class Hops:
    """Times between the controller and a worker, one way; the controller's own work for a step is part of them."""

    command_s: float = 50e-6
    report_s: float = 50e-6

    @property
    def command_ns(self) -> int:
        """Whole nanoseconds."""
        return round(self.command_s * NANOSECONDS)

    @property
    def report_ns(self) -> int:
        """Whole nanoseconds."""
        return round(self.report_s * NANOSECONDS)


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """Everything but the requests."""

    shape: ModelShape
    limits: SchedulerLimits
    params: ClusterParams
    num_workers: int
    """Instances, those included that may be started later: tensor parallelism is inside the executor and the ports."""
    memory: MemorySetup
    profile: HardwareProfile
    """Times of remaps, copies and loads, and how much slower steps are beside others. The *core* knows
    ``params.profile`` instead."""
    executor: Executor
    topology: Topology
    hops: Hops = field(default_factory=Hops)
    piece_bytes: int = 4 << 20
    """Bytes of a piece of bulk transfers."""
    piece_ns: int | None = MAX_PIECE_NS
    """Most nanoseconds that a piece takes on its link; None: as long as its bytes do."""
    coordinate_links: bool = True
    """Activations go before bulk, piece by piece."""
    compress: bool = True
    """Advance decode steps with nothing to decide in between together. The results are the same."""
    tick_s: float = 0.1
    secret: bytes = b"simulated"
    start_s: float = 0.0
    """From asking for a worker's process until it can be filled."""
    max_num_queued_reqs: int | None = None
    """Waiting requests beyond which an online one is refused; None: no limit."""

    @property
    def tick_ns(self) -> int:
        """Whole nanoseconds."""
        return round(self.tick_s * NANOSECONDS)

    @property
    def start_ns(self) -> int:
        """Whole nanoseconds."""
        return round(self.start_s * NANOSECONDS)

    @property
    def num_at_start(self) -> int:
        """Workers that have a process from the start."""
        return self.params.provision.num_at_start or self.num_workers


def setup_from_profile(
    shape: ModelShape, limits: SchedulerLimits, params: ClusterParams, num_workers: int, memory: MemorySetup,
    profile: HardwareProfile, *, overhead_s: float = 0.0, noise: float = 0.0, seed: int = 0, hops: Hops | None = None,
) -> ClusterSetup:
    """A cluster of workers as a profile describes them, all linked alike."""
    between = LinkSpec(profile.link_bytes_per_s, profile.link_latency_s)
    executor = ModelledExecutor(profile.cost, overhead_s, noise, seed)
    return ClusterSetup(
        shape, limits, params, num_workers, memory, profile, executor, Topology(between), hops or Hops()
    )

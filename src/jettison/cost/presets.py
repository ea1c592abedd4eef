"""Instances and clusters by name: the capacity and speed of simulated devices, without a machine to measure.

An ``InstancePreset`` is a model on its processors; a ``ClusterPreset`` is several of them with their links. Both are
plain values: change one with ``dataclasses.replace``. A measured ``HardwareProfile`` takes the place of the computed
one (``ClusterPreset.measured``). docs/cost-model.md says which values are calibrated and which are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from jettison.config.values import did_you_mean
from jettison.cost.gpus import GPUS, PCIE_REACHED, GpuPreset, LinkPreset, network
from jettison.cost.hardware import BatchPoint, HardwareProfile, PrefillPoint
from jettison.cost.model import ChunkShape, CostModel
from jettison.cost.models import MODELS, ModelPreset, SmallWeights
from jettison.cost.roofline import Collective, RooflineCostModel, Split, roofline_cost_model
from jettison.cost.shapes import beside_shape
from jettison.errors import ConfigError
from jettison.types import ModelShape

Preset = TypeVar("Preset")

HOST_STEP_S = 2e-3
"""Assumed seconds that scheduling, launching and sampling add to a step; later published engines hide most of them."""

REMAP_S = 3.2e-3
"""Seconds of one change of layout without a call of the driver: planning and books, of half of 14B's layers on an H200
(``benchmarks/results/gpu/pages.json``)."""

REMAP_PAGE_S = 43e-6
"""Seconds of the driver's calls for one page, whatever its size: map, access, and unmap at another place (H200)."""

PAPERS_REMAP_S = 5e-3
"""Seconds of one change of layout whatever its size (KunServe v3 section 4.1: "5 ms on our platform"), in clusters of
papers."""

DISK_BYTES_PER_S = 6e9
"""Assumed rate of loads: one NVMe drive of PCIe 4 for each instance."""

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BATCH_CONTEXT = 1024
"""Cached tokens of each request in ``batch_points`` and ``prefill_points``."""

PREFILL_TOKENS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Tokens of the chunks in ``prefill_points``."""


@dataclass(frozen=True, slots=True)
class InstancePreset:
    """One full copy of a model (or more of some parts) over ``num_gpus`` processors that step together."""

    gpu: GpuPreset
    model: ModelPreset
    num_gpus: int = 1
    attention_ranks: int | None = None
    """Processors that share one attention; None: all. With fewer than all, each such set replicates everything but the
    routed experts."""
    redundant_experts: int = 0
    """Copies of routed experts beyond one of each, in every layer."""
    memory_utilisation: float = 0.9
    gpus_per_node: int = 8
    network_bytes_per_s: float = 50e9
    """Nominal rate of one processor's network card, which carries the collectives of instances that span nodes."""
    host_step_s: float = HOST_STEP_S
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    remap_s: float = REMAP_S
    remap_page_s: float | None = REMAP_PAGE_S
    """None: a change of layout takes ``remap_s`` whatever it maps."""

    def __post_init__(self) -> None:
        if not 0.0 < self.memory_utilisation <= 1.0:
            raise ValueError(f"memory utilisation must be in (0, 1], not {self.memory_utilisation:g}")
        ranks = self.ranks
        if self.num_gpus < 1 or ranks < 1 or self.num_gpus % ranks:
            raise ValueError(f"{self.num_gpus} processors cannot be {ranks} attention ranks each")
        if ranks < self.num_gpus and self.model.experts is None:
            raise ValueError(f"{self.model.name} has no experts: all processors of an instance share its attention")
        if self.model.num_heads % ranks:
            raise ValueError(f"{self.model.num_heads} heads of {self.model.name} cannot be split over {ranks}")
        if self.kv_bytes <= 0:
            raise ValueError(
                f"{self.model.name} needs {self.parameter_bytes} bytes for parameters, "
                f"{self.num_gpus} x {self.gpu.name} at {self.memory_utilisation:g} have {self.budget_bytes}"
            )

    @property
    def name(self) -> str:
        """``model/gpu x n``, with the form of weights that are no bf16."""
        weights = "" if self.model.weights is None else f" {self.model.weights.name}"
        return f"{self.model.name}{weights}/{self.gpu.name}" + (f"x{self.num_gpus}" if self.num_gpus > 1 else "")

    @property
    def ranks(self) -> int:
        """``attention_ranks``, resolved."""
        return self.num_gpus if self.attention_ranks is None else self.attention_ranks

    @property
    def split(self) -> Split:
        """How the model is split over processors. Latent attention caches one vector, of which every rank needs a
        copy."""
        copies = self.ranks if self.model.latent is not None else math.ceil(self.ranks / self.model.num_kv_heads)
        return Split(self.num_gpus, self.ranks, copies)

    # --- memory -----------------------------------------------------------------------------------------------

    @property
    def shape(self) -> ModelShape:
        """The sizes of the instance's shards and of its KV, replicas included."""
        experts = self.model.experts
        scale = 1.0 if experts is None else 1.0 + self.redundant_experts / experts.num_experts
        return self.model.shape(
            dense_copies=self.num_gpus // self.ranks, routed_scale=scale, kv_copies=self.split.kv_copies
        )

    @property
    def memory_bytes(self) -> int:
        """All of its processors' memory."""
        return self.num_gpus * self.gpu.memory_bytes

    @property
    def budget_bytes(self) -> int:
        """Bytes that parameters and KV may take."""
        return int(self.memory_bytes * self.memory_utilisation)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, none dropped."""
        return self.shape.parameter_bytes

    @property
    def parameter_share(self) -> float:
        """Parameters over memory, the papers' ratio: from their Table 1 where that states another size."""
        stated = self.model.table_weight_bytes if self.model.weights is None else None
        return (stated or self.parameter_bytes) / self.memory_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes left for KV, with no parameters dropped."""
        return self.budget_bytes - self.parameter_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV in all layers, all copies included."""
        shape = self.shape
        return shape.num_layers * shape.kv_bytes_per_token_layer

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that fit, with no parameters dropped."""
        return self.kv_bytes // self.kv_bytes_per_token

    # --- speed ------------------------------------------------------------------------------------------------

    @property
    def host_link_bytes_per_s(self) -> float:
        """Rate between host memory and all of the processors together, per direction."""
        return self.num_gpus * self.gpu.host_copy_bytes_per_s

    @property
    def device_copy_bytes_per_s(self) -> float:
        """Rate of copies inside the processors' memory, all of them together."""
        return self.num_gpus * self.gpu.copy_bytes_per_s

    @property
    def beside_byte_s(self) -> float:
        """Seconds that a byte adds to a step when a copy engine moves it beside the step: while the byte is read or
        written, the step cannot use the processors' memory. An assumption: no publication states it by itself."""
        return 1.0 / (self.num_gpus * self.gpu.memory_bytes_per_s * self.gpu.efficiency.memory)

    @property
    def collective(self) -> Collective:
        """The interconnect of all-reduces: the network where the instance does not fit into one node."""
        reached = self.gpu.efficiency
        if self.num_gpus > self.gpus_per_node:
            return Collective(reached.collective_s + reached.network_s, self.network_bytes_per_s * reached.collective)
        return Collective(reached.collective_s, self.gpu.peer_bytes_per_s * reached.collective)

    def cost_model(self) -> RooflineCostModel:
        """Steps of the whole instance."""
        return roofline_cost_model(self.gpu, self.model, self.split, self.collective, host_step_s=self.host_step_s)

    def profile(self, link: LinkPreset) -> HardwareProfile:
        """The profile that plans predict with, given ``link`` to the other instances."""
        cost = self.cost_model()
        return HardwareProfile(
            cost=cost,
            link_bytes_per_s=link.bytes_per_s,
            link_latency_s=link.latency_s,
            remap_fixed_s=self.remap_s,
            remap_s_per_byte=0.0,
            remap_page_s=self.remap_page_s,
            host_copy_bytes_per_s=self.host_link_bytes_per_s,
            disk_bytes_per_s=self.disk_bytes_per_s,
            batch_points=batch_points(cost),
            device_copy_bytes_per_s=self.device_copy_bytes_per_s,
            beside_byte_s=self.beside_byte_s,
            link_beside_byte_s=self.beside_byte_s,
            prefill_points=prefill_points(cost),
        )


def batch_points(cost: CostModel) -> tuple[BatchPoint, ...]:
    """The points that ``jettison profile`` would measure: decodes on the last stage of pipelines of equal stages."""
    points = []
    for num_stages in (count for count in (1, 2, 4) if count <= cost.num_layers):
        layers = math.ceil(cost.num_layers / num_stages)
        for size in BATCH_SIZES:
            chunks = (ChunkShape(BATCH_CONTEXT, 1),) * size
            seconds = cost.batch_cost_s(chunks, layers, is_first=num_stages == 1)
            points.append(BatchPoint(num_stages, size, BATCH_CONTEXT, size / seconds))
    return tuple(points)


def prefill_points(cost: CostModel) -> tuple[PrefillPoint, ...]:
    """The points that ``jettison profile`` would measure: chunks of prompts beside decodes, on an instance alone."""
    return tuple(
        PrefillPoint(size, num_tokens, cost.step_cost_s(beside_shape(size, num_tokens, BATCH_CONTEXT, cost.num_layers)))
        for size in BATCH_SIZES for num_tokens in PREFILL_TOKENS
    )


@dataclass(frozen=True, slots=True)
class ClusterPreset:
    """Equal instances in numbered places: the first ``instances_per_node`` share node 0, and so on.

    A link joins two instances, each with all its processors' cards. The traffic of one instance to several others
    shares that instance's end.
    """

    name: str
    instance: InstancePreset
    num_instances: int
    instances_per_node: int
    scale_out: LinkPreset
    """Between nodes."""
    scale_up: LinkPreset | None = None
    """Inside a node; None: as between nodes."""
    source: str = ""
    measured: HardwareProfile | None = field(default=None, repr=False)
    """A measured profile of these instances, used instead of the computed one."""

    def __post_init__(self) -> None:
        if self.num_instances < 1 or self.instances_per_node < 1:
            raise ValueError(f"cluster {self.name}: needs at least one instance, and one in a node")

    @property
    def slowest_link(self) -> LinkPreset:
        """The link that plans count on: a plan may join any two instances."""
        if self.scale_up is not None and self.num_instances <= self.instances_per_node:
            return self.scale_up
        return self.scale_out

    def profile(self) -> HardwareProfile:
        """The measured profile where there is one, else the computed one over the slowest link."""
        return self.instance.profile(self.slowest_link) if self.measured is None else self.measured


def instance_preset(
    model: str, gpu: str, num_gpus: int | None = None, weights: SmallWeights | None = None
) -> InstancePreset:
    """The instance of a model and a processor, both by name. ``num_gpus`` None: the papers' number for the model on
    processors of 80 GB, else, and where ``weights`` are small, the smallest power of two that holds the model in 0.7 of
    its memory. Raises ConfigError for an unknown name, or where it does not fit."""
    found, processor = replace(named("model", model, MODELS), weights=weights), named("GPU", gpu, GPUS)
    if num_gpus is None and weights is None:
        num_gpus = _PAPER_GPUS.get(model) if processor.memory_bytes == GPUS["a800-80g"].memory_bytes else None
    if num_gpus is None:
        shape_bytes = found.shape().parameter_bytes
        num_gpus = 1
        while shape_bytes > 0.7 * num_gpus * processor.memory_bytes:
            num_gpus *= 2
    ranks, redundant = _DEPLOYED.get((model, num_gpus), (None, 0))
    try:
        return InstancePreset(processor, found, num_gpus, attention_ranks=ranks, redundant_experts=redundant)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def named(kind: str, name: str, known: Mapping[str, Preset]) -> Preset:
    """The preset of this name; ConfigError lists the known ones."""
    if name not in known:
        hint = did_you_mean(name, tuple(known))
        raise ConfigError(f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}")
    return known[name]


def cluster_preset(name: str) -> ClusterPreset:
    """The cluster of this name. Raises ConfigError."""
    return named("cluster", name, CLUSTERS)


_PAPER_GPUS = {
    "qwen2.5-14b": 1, "qwen2.5-72b": 4, "llama-3.1-70b": 4, "llama-3.2-90b": 4, "llama-3.1-405b": 16, "qwen3-235b": 8,
    "deepseek-v3": 32,
}  # fmt: skip
"""KunServe v1 to v3, Table 1: processors of 80 GB in an instance."""

_DEPLOYED = {("qwen3-235b", 8): (2, 0), ("deepseek-v3", 32): (4, 32)}
"""(attention ranks, redundant experts). DeepSeek-V3's own prefill unit (its report, section 3.4.1) and, for Qwen3, the
split with the replicated weights nearest to Table 1: 1,625 GiB for 1,572, and 482.6 for 479."""


def _of_paper(model: str, gpu: str, num_gpus: int | None = None) -> InstancePreset:
    """An instance whose changes of layout take what KunServe says of its platform."""
    return replace(instance_preset(model, gpu, num_gpus), remap_s=PAPERS_REMAP_S, remap_page_s=None)


def _cluster_a() -> ClusterPreset:
    instance = _of_paper("qwen2.5-14b", "a800-80g")
    rdma = network("200 Gbps RDMA", 200, instance.gpu.efficiency.network_s)
    return ClusterPreset("kunserve-a", instance, 8, 1, rdma, source="KunServe v2, v3 Table 2; v1 section 5.1")


def _cluster_b() -> ClusterPreset:
    instance = _of_paper("qwen2.5-72b", "h800-80g")
    instance = replace(instance, gpu=replace(instance.gpu, nvlink_bytes_per_s=300e9))  # as their Table 2 has it
    reached = instance.gpu.efficiency
    rdma = network("4 x 400 Gbps RDMA", 400, reached.network_s, num_links=4)
    nvlink = LinkPreset("4 x NVLink, 300 GB/s", 4 * 300e9, reached.peer_s, efficiency=reached.peer)
    return ClusterPreset("kunserve-b", instance, 4, 2, rdma, nvlink, source="KunServe v2, v3 Table 2")


def _cluster_v1(name: str, model: str) -> ClusterPreset:
    instance = _of_paper(model, "a800-80g")
    reached = instance.gpu.efficiency
    rdma = network("4 x 100 Gbps RDMA", 100, reached.network_s, num_links=4)
    nvlink = LinkPreset("4 x NVLink, 200 GB/s", 4 * 200e9, reached.peer_s, efficiency=reached.peer)
    return ClusterPreset(name, instance, 4, 2, rdma, nvlink, source="KunServe v1 section 5.1")


def _mell(name: str, model: str, gpu: str, num_instances: int, in_node: int) -> ClusterPreset:
    instance = _of_paper(model, gpu, 1)
    ethernet = network("10 Gbps", 10, instance.gpu.efficiency.network_s)
    pcie = LinkPreset("PCIe 4", 32e9, instance.gpu.efficiency.peer_s, efficiency=PCIE_REACHED)
    return ClusterPreset(name, instance, num_instances, in_node, ethernet, pcie, source="MELL section VIII")


CLUSTERS: dict[str, ClusterPreset] = {
    cluster.name: cluster
    for cluster in (
        _cluster_a(),
        _cluster_b(),
        _cluster_v1("kunserve-v1-70b", "llama-3.1-70b"),
        _cluster_v1("kunserve-v1-90b", "llama-3.2-90b"),
        _mell("mell-4090", "llama-2-7b", "rtx-4090", 8, 8),
        _mell("mell-a100", "llama-2-13b", "a100-40g", 4, 4),
        ClusterPreset(
            "conserve", _of_paper("llama-2-7b", "a100-40g", 1), 1, 1, network("none", 10, 24e-6),
            source="ConServe section 6.1: one processor",
        ),
    )
}  # fmt: skip
"""The papers' clusters by name."""

"""Graphics processors and links as data: peak rates from data sheets, and the part of each peak that kernels reach.

Peaks are the vendors'. ``python tests/cost/calibrate_presets.py`` fits the parts reached (``Efficiency``) to
published measurements; docs/cost-model.md lists them, and names the assumed ones as assumptions. None is fitted to
a figure that a reproduction is compared with. Arithmetic over them is in ``cost.roofline``; models are in
``cost.models``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 1 << 30

LINE_RATE_REACHED = 0.87
"""RDMA: Mooncake's transfer engine moves 87 GB/s over four 200 Gbps links (its README)."""

PCIE_REACHED = 0.78
"""Pinned copies: 12.36 of 15.75 GB/s on PCIe 3 x16 (sample output in the README of NVIDIA's nvbandwidth)."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The efficiency of the kernels of one family of processors: shares of a peak in (0, 1], seconds, one exponent."""

    gemm: float
    """Matrix products: share of dense bf16 FLOP/s."""
    memory: float
    """Reading weights and KV: share of memory bandwidth."""
    knee: float
    """Exponent p of (compute^p + memory^p)^(1/p): how sharp the knee between the two bounds is."""
    gemm_layer_s: float
    """Fixed seconds of one layer's products, whatever their size."""
    elementwise: float
    """Norms, rotary embedding, activation, residuals: share of memory bandwidth."""
    elementwise_layer_s: float
    """Fixed seconds of the same in one layer, whatever the number of tokens."""
    attention: float
    """Attention over many queries: share of dense bf16 FLOP/s."""
    collective: float
    """All-reduce inside a node: share of the link's rate per direction."""
    collective_s: float
    """Fixed seconds of one all-reduce: its latency."""
    peer: float
    """One transfer inside a node: share of the link's rate per direction."""
    peer_s: float
    """Seconds of one small message inside a node."""
    network_s: float
    """Seconds of one small message between nodes."""

    def __post_init__(self) -> None:
        parts = ("gemm", "memory", "elementwise", "attention", "collective", "peer")
        bad = [name for name in parts if not 0.0 < getattr(self, name) <= 1.0]
        times = ("gemm_layer_s", "elementwise_layer_s", "collective_s", "peer_s", "network_s")
        bad += [name for name in times if not 0.0 <= getattr(self, name) < 1.0]
        if bad or self.knee < 1.0:
            raise ValueError(f"not a part of a peak, a time or an exponent >= 1: {', '.join(bad or ['knee'])}")


@dataclass(frozen=True, slots=True)
class GpuPreset:
    """One processor. Rates in bytes (FLOP) per second; links per direction."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: float
    """Dense bf16, accumulated in fp32."""
    nvlink_bytes_per_s: float | None
    """Nominal rate to the other processors of a node; None: they are reached through the host link."""
    host_bytes_per_s: float
    """Nominal rate of the host link (PCIe)."""
    efficiency: Efficiency
    source: str

    @property
    def peer_bytes_per_s(self) -> float:
        """Nominal rate to a neighbour in the node."""
        return self.host_bytes_per_s if self.nvlink_bytes_per_s is None else self.nvlink_bytes_per_s

    @property
    def copy_bytes_per_s(self) -> float:
        """Copies inside the device's memory: each byte is read and written, at the bandwidth that steps reach."""
        return self.memory_bytes_per_s * self.efficiency.memory / 2

    @property
    def host_copy_bytes_per_s(self) -> float:
        """Pinned copies between device and host, as reached."""
        return self.host_bytes_per_s * PCIE_REACHED


@dataclass(frozen=True, slots=True)
class LinkPreset:
    """The connection of two instances; rates are of one direction unless said otherwise."""

    name: str
    line_bytes_per_s: float
    """Nominal rate."""
    latency_s: float
    """Seconds of one small message."""
    efficiency: float = LINE_RATE_REACHED
    """Part of the line rate that bulk transfers reach."""
    duplex_efficiency: float = 1.0
    """Part of its rate that each direction keeps while both are busy: 1 is full duplex, 0.5 half."""

    def __post_init__(self) -> None:
        if not (self.line_bytes_per_s > 0 and 0 < self.efficiency <= 1 and 0.5 <= self.duplex_efficiency <= 1):
            raise ValueError(
                f"link {self.name}: needs a rate above 0, an efficiency in (0, 1] and a duplex efficiency in [0.5, 1]"
            )
        if not 0 <= self.latency_s < 1:
            raise ValueError(f"link {self.name}: needs a latency from 0 to 1 s, not {self.latency_s:g}")

    @property
    def bytes_per_s(self) -> float:
        """Bulk, while the other direction is idle."""
        return self.line_bytes_per_s * self.efficiency


AMPERE = Efficiency(
    gemm=0.721, memory=0.848, knee=1.49, gemm_layer_s=26.2e-6, elementwise=0.552, elementwise_layer_s=16.7e-6,
    attention=0.615, collective=0.475, collective_s=28.2e-6, peer=0.761, peer_s=9.0e-6, network_s=24e-6,
)  # fmt: skip
"""A100 and its kin. ``attention``: the middle of 50 to 73 % (FlashAttention-2, abstract)."""

HOPPER = Efficiency(
    gemm=0.726, memory=0.983, knee=1.23, gemm_layer_s=22.2e-6, elementwise=0.613, elementwise_layer_s=13.5e-6,
    attention=0.35, collective=0.649, collective_s=18.4e-6, peer=0.773, peer_s=5.5e-6, network_s=18e-6,
)  # fmt: skip
"""H100 and its kin. ``attention``: FlashAttention-2 on H100, 35 % (FlashAttention-3, abstract): the kernels of 2024."""

HOPPER_OWN = replace(
    HOPPER, gemm=0.816, memory=0.735, knee=2.38, gemm_layer_s=15.7e-6, elementwise_layer_s=4e-6, attention=0.30,
)
"""Our own kernels (``device.cuda``), in graphs: fitted to steps measured on an H200
(``benchmarks/results/gpu/kernels.json``), within 8 %. ``attention`` as measured alone: 275 to 299 of 989 TFLOP/s."""

GPUS: dict[str, GpuPreset] = {
    gpu.name: gpu
    for gpu in (
        GpuPreset("a800-80g", 80 * GIB, 2.039e12, 312e12, 200e9, 32e9, AMPERE, "A100 80 GB SXM, NVLink 400 GB/s"),
        GpuPreset("a100-40g", 40 * GIB, 1.555e12, 312e12, 300e9, 32e9, AMPERE, "A100 40 GB SXM, NVLink 600 GB/s"),
        GpuPreset("h800-80g", 80 * GIB, 3.35e12, 989e12, 200e9, 64e9, HOPPER, "H100 80 GB SXM, NVLink 400 GB/s"),
        GpuPreset("rtx-4090", 24 * GIB, 1.008e12, 165e12, None, 32e9, AMPERE, "data sheet; efficiencies of the A100"),
        GpuPreset("h200", 139 * GIB, 4.8e12, 989e12, 450e9, 64e9, HOPPER_OWN, "data sheet; 139 GiB of 141 GB usable"),
        GpuPreset("h100-80g", 79 * GIB, 3.35e12, 989e12, 450e9, 64e9, HOPPER_OWN, "data sheet; 79 GiB usable"),
    )
}
"""By name. Memory in GiB: KunServe's "80 GB" are 80 GiB (their KV capacities say so)."""


def network(name: str, gbit_per_s: float, latency_s: float, *, num_links: int = 1) -> LinkPreset:
    """``num_links`` network cards side by side, each of ``gbit_per_s``; 10 Gbps is Ethernet like any other."""
    return LinkPreset(name, num_links * gbit_per_s * 1e9 / 8, latency_s)

"""The hardware profile: what steps, links, remaps and copies cost, and what throughput a batch reaches.

Live cores take from it the costs that they have not measured themselves yet; simulated machines are built from it.

Pure values. Measured by ``live.profile.measure``; written and read as documents by ``cost.profile_document``.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from jettison.cost.grouprate import TokenMix, prefill_token_s, rate_between, with_bubbles_s
from jettison.cost.model import CostModel

SATURATED = 0.9
"""A batch has reached its limit at this share of the best throughput: a larger batch can gain no more than the rest."""

USUAL_BESIDE = 0.5
"""Share of a byte's copy time that the copy adds to a step that runs beside it, where that was not measured: both use
the same memory, and the copies have a thread of their own."""


class BatchPoint(NamedTuple):
    """Measured decode steps of one batch size on the slowest stage of a pipeline without bubbles."""

    num_stages: int
    batch_size: int
    """Requests in one microbatch."""
    num_context: int
    """Cached tokens of each request."""
    tokens_per_s: float
    """Tokens a second of the whole group with as many microbatches in flight as stages: batch size over the slowest
    stage's time."""


class PrefillPoint(NamedTuple):
    """A measured step of decodes with a chunk of a prompt beside them."""

    batch_size: int
    """Requests that decode."""
    num_tokens: int
    """Tokens of the chunk; 0: the decodes alone."""
    seconds: float


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """The measured speeds of one device of this kind with this model. Rates in bytes per second, all > 0."""

    cost: CostModel
    link_bytes_per_s: float
    """Bulk pieces from one worker into another's memory, copies on both sides included."""
    link_latency_s: float
    """Seconds of one small message to a waiting peer."""
    remap_fixed_s: float
    """Fixed seconds of one change of layout, whatever its size: planning included."""
    remap_s_per_byte: float
    """Seconds per byte that changes between parameters and KV."""
    host_copy_bytes_per_s: float
    """Copies from memory to memory inside one process."""
    disk_bytes_per_s: float
    """Loads of layer shards from the model folder, with the operating system's cache as it was during profiling."""
    batch_points: tuple[BatchPoint, ...] = ()
    device_copy_bytes_per_s: float | None = None
    """Copies from one place in a device's memory to another; None: its memory is the host's."""
    hop_s: float | None = None
    """Seconds of a message from a worker to the controller, or back, one way; each includes half of the controller's
    turn. None: it was not measured."""
    contention: float = 1.0
    """A step's time while ``contention_instances`` compute, over its time alone, for instances that share a machine's
    cores, caches and memory. 1 where each has an accelerator of its own."""
    contention_instances: int = 1
    """Instances that computed when ``contention`` was measured; 1: no others did."""
    beside_bytes_per_s: float | None = None
    """Rate reached by copies between KV and host pool while steps run. None: ``host_copy_bytes_per_s``."""
    beside_byte_s: float | None = None
    """Seconds that a byte copied beside a step adds to the step. None: it was not measured."""
    link_beside_byte_s: float | None = None
    """Seconds that a byte on a link adds to a step, while the link's ends decode. None: it was not measured."""
    prefill_points: tuple[PrefillPoint, ...] = ()
    """Measured steps of decodes with chunks beside them, which slow them down (MELL section V); empty: not measured."""
    remap_page_s: float | None = None
    """Seconds of the driver's calls for a page that is not mapped yet where it is to serve, beside the times of a remap
    above; on a card, where mappings stay. None: those are all."""

    def __post_init__(self) -> None:
        rates = (
            "link_bytes_per_s", "host_copy_bytes_per_s", "disk_bytes_per_s", "device_copy_bytes_per_s",
            "beside_bytes_per_s",
        )
        bad = [name for name in rates if (rate := getattr(self, name)) is not None and not 0.0 < rate < float("inf")]
        times = ("link_latency_s", "remap_fixed_s", "remap_s_per_byte")
        bad += [name for name in times if not 0.0 <= getattr(self, name) < float("inf")]
        rare = ("hop_s", "beside_byte_s", "link_beside_byte_s", "remap_page_s")
        bad += [name for name in rare if (s := getattr(self, name)) is not None and not 0.0 <= s < float("inf")]
        if bad:
            raise ValueError(f"rates must be finite and > 0, times finite and >= 0: {', '.join(bad)}")
        if not 1.0 <= self.contention < float("inf") or self.contention_instances < 1:
            raise ValueError("contention must be finite and >= 1, of >= 1 instances")
        if any(min(point) <= 0 for point in self.batch_points):
            raise ValueError("batch points must be > 0")
        if any(min(p.batch_size, p.seconds) <= 0 or p.num_tokens < 0 for p in self.prefill_points):
            raise ValueError("prefill points must be > 0")

    def remap_cost_s(self, num_bytes: int, num_pages: int = 0) -> float:
        """Seconds to turn ``num_bytes`` of parameters into KV, or back, without filling them. ``num_pages``: those that
        have to be mapped, where others are mapped already."""
        calls_s = num_pages * (self.remap_page_s or 0.0)
        return self.remap_fixed_s + self.remap_s_per_byte * num_bytes + calls_s if num_bytes > 0 else 0.0

    @property
    def keeps_mappings(self) -> bool:
        """Whether a device's mappings stay and are made ahead, as a card's are."""
        return self.remap_page_s is not None

    @property
    def shares_cores(self) -> bool:
        """Whether steps take longer while other instances compute."""
        return self.contention > 1.0 and self.contention_instances > 1

    def slowdown(self, num_computing: int) -> float:
        """A step's time while ``num_computing`` instances compute, its own among them, over its time alone; linear
        through the measured point."""
        if not self.shares_cores:
            return 1.0
        return 1.0 + (self.contention - 1.0) * (num_computing - 1) / (self.contention_instances - 1)

    def host_copy_cost_s(self, num_bytes: int) -> float:
        """Seconds to copy inside the host's memory."""
        return num_bytes / self.host_copy_bytes_per_s

    @property
    def copies_beside_bytes_per_s(self) -> float:
        """Rate of copies between KV and host pool while steps run."""
        return self.beside_bytes_per_s or self.host_copy_bytes_per_s

    @property
    def copies_beside_byte_s(self) -> float:
        """Seconds that each byte of such copies adds to the step."""
        if self.beside_byte_s is not None:
            return self.beside_byte_s
        return USUAL_BESIDE / self.host_copy_bytes_per_s

    def device_copy_cost_s(self, num_bytes: int) -> float:
        """Seconds to copy inside a device's memory."""
        return num_bytes / (self.device_copy_bytes_per_s or self.host_copy_bytes_per_s)

    def disk_cost_s(self, num_bytes: int) -> float:
        """Seconds to load shards from the model folder."""
        return num_bytes / self.disk_bytes_per_s

    def group_tokens_per_s(self, num_stages: int) -> float | None:
        """Best decode throughput, tokens a second, of a pipeline of so many stages, without bubbles.

        For measured numbers of stages, the measured value; between and beyond them, ``grouprate.rate_between``. None
        where nothing was measured, and below the smallest measured number.
        """
        best: dict[int, float] = {}
        for point in self.batch_points:
            best[point.num_stages] = max(point.tokens_per_s, best.get(point.num_stages, 0.0))
        return rate_between(best, num_stages)

    def serving_rates(self, mix: TokenMix) -> dict[int, float]:
        """Tokens of answers a second, by each measured number of stages: measured decodes with their bubbles, and the
        prompts that come with them. ``Thpt_g`` of KunServe v1.

        The cost of uneven microbatches is not in it: ``cost.predictor`` learns it from pipelines that serve.
        """
        rates: dict[int, float] = {}
        for point in self.batch_points:
            stage_s = point.batch_size / point.tokens_per_s
            period_s = with_bubbles_s(
                self.cost, point.num_stages, point.batch_size, point.num_context, stage_s, self.link_latency_s
            )
            prompts_s = mix.prompt_tokens * prefill_token_s(self.cost, point.num_stages, mix.chunk_tokens)
            rate = 1.0 / (period_s / point.batch_size + prompts_s)
            rates[point.num_stages] = max(rate, rates.get(point.num_stages, 0.0))
        return rates

    def added_stage_s(self, num_stages: int) -> float:
        """Seconds that a microbatch takes in each stage of such a pipeline beyond its share of a lone step; at least 0.

        The median over the batches that were measured with one stage and with so many (else with the next larger
        number, else with the largest); 0.0 where there are none.
        """
        longer = sorted({point.num_stages for point in self.batch_points} - {1})
        if longer:
            nearest = next((n for n in longer if n >= num_stages), longer[-1])
            took_s = {
                (p.num_stages, p.batch_size, p.num_context): p.batch_size / p.tokens_per_s for p in self.batch_points
            }
            added = [
                took_s[nearest, size, context] - alone_s / nearest
                for (n, size, context), alone_s in took_s.items() if n == 1 and (nearest, size, context) in took_s
            ]
            if added:
                return max(0.0, median(added))
        return 0.0

    def batch_limit(self, num_stages: int) -> int | None:
        """The smallest measured microbatch that reaches ``SATURATED`` of the best throughput: beyond it a larger
        batch only adds latency (the maximum batch of KunServe v1's dispatcher). None where nothing was measured."""
        points = self._of(num_stages)
        best = max((point.tokens_per_s for point in points), default=0.0)
        return min((p.batch_size for p in points if p.tokens_per_s >= SATURATED * best), default=None)

    def _of(self, num_stages: int) -> list[BatchPoint]:
        measured = [point.num_stages for point in self.batch_points if point.num_stages <= num_stages]
        return [point for point in self.batch_points if measured and point.num_stages == max(measured)]

"""The fairness header: the conditions under which a ratio between two runs was measured.

"Dropping is ten times better" means nothing without the memory load and the size of the burst. Every comparison, live
or simulated, prints this header. The papers' conditions: parameters 34 to 75 % of memory, mean load under 60 %, KV
capacity 2.1 times the mean need (KunServe v2, v3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jettison.errors import ConfigError
from jettison.report.results import METRIC_DEFINITIONS, RequestRecord

Floats = npt.NDArray[np.float64]


class LengthRow(Protocol):
    """One request of a workload; ``workload.traces.TraceRow`` is one."""

    @property
    def arrival_s(self) -> float: ...

    @property
    def input_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int: ...


class TimedRows(Protocol):
    """The parts of a workload that demand depends on; ``workload.traces.Workload`` is one."""

    @property
    def rows(self) -> Sequence[LengthRow]: ...

    @property
    def duration_s(self) -> float: ...

    @property
    def source(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class FairnessHeader:
    """Conditions of a comparison; None where not given. Tokens are KV tokens of the whole cluster."""

    mean_demand_tokens: float
    peak_demand_tokens: float
    demand_model: str
    """How the mean and peak demand were found."""
    parameter_share: float | None = None
    """Parameters / memory of one device, with none dropped. The papers' models: 0.34 to 0.75."""
    kv_capacity_tokens: float | None = None
    """KV capacity with no parameters dropped."""
    merged_capacity_tokens: float | None = None
    """KV capacity with every spare copy of the parameters dropped."""
    online_load_share: float | None = None
    """Online load as a share of the most that the system serves (harvesting experiments)."""
    arrivals: tuple[str, ...] = ()
    """Lines on the sources of arrivals and lengths, and the changes made to them."""
    metric_definitions: dict[str, str] = field(default_factory=lambda: dict(METRIC_DEFINITIONS))

    @property
    def mean_load(self) -> float | None:
        """Mean demand / undropped capacity. The papers keep it under 0.6."""
        return _ratio(self.mean_demand_tokens, self.kv_capacity_tokens)

    @property
    def capacity_over_mean_need(self) -> float | None:
        """Undropped capacity / mean demand. The papers: 2.1."""
        return _ratio(self.kv_capacity_tokens, self.mean_demand_tokens)

    @property
    def peak_over_capacity(self) -> float | None:
        """(Peak demand, queue included) / undropped capacity: above 1 there is an overload."""
        return _ratio(self.peak_demand_tokens, self.kv_capacity_tokens)

    @property
    def peak_over_merged(self) -> float | None:
        """(Peak demand, queue included) / merged capacity: beyond about 0.9 dropping does not suffice either."""
        return _ratio(self.peak_demand_tokens, self.merged_capacity_tokens)

    def as_dict(self) -> dict[str, Any]:
        """The fields and the ratios, for ``config.fairness`` of a run."""
        ratios = ("mean_load", "capacity_over_mean_need", "peak_over_capacity", "peak_over_merged")
        return asdict(self) | {name: getattr(self, name) for name in ratios}


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def merged_capacity_factor(parameter_share: float, num_instances: int = 2) -> float:
    """KV capacity after merging ``num_instances`` into one group over the capacity before: (1 - r/n) / (1 - r).

    ``parameter_share`` is r = parameters / memory of one instance; one copy stays. For two instances 1.33 at
    r = 0.4, 1.5 at 0.5, 2.17 at 0.7.
    """
    if not 0.0 <= parameter_share < 1.0:
        raise ConfigError(f"the parameters' share of memory must be in [0, 1), got {parameter_share:g}")
    if num_instances < 1:
        raise ConfigError(f"a group has at least one instance, got {num_instances}")
    return (1.0 - parameter_share / num_instances) / (1.0 - parameter_share)


def estimate_demand(workload: TimedRows, ttft_s: float, tpot_s: float) -> tuple[float, float]:
    """(mean, peak) KV tokens that ``workload`` would hold at one time with unlimited memory.

    Unconstrained residency: a request holds its prompt from its arrival, grows linearly from ``ttft_s`` later by one
    token each ``tpot_s``, and leaves with its last token. The mean is over the workload's duration. Both times must be
    those of an unloaded system at its usual batch size.
    """
    if ttft_s < 0 or tpot_s < 0:
        raise ConfigError("service times must be at least 0 s")
    arrivals = np.array([row.arrival_s for row in workload.rows], dtype=np.float64)
    inputs = np.array([row.input_tokens for row in workload.rows], dtype=np.float64)
    outputs = np.array([row.output_tokens for row in workload.rows], dtype=np.float64)
    firsts = arrivals + ttft_s
    return _residency(arrivals, firsts, firsts + outputs * tpot_s, inputs, outputs, workload.duration_s)


def measured_in(run_name: str) -> str:
    """The ``demand_model`` of demand that a run measured; the name "run" is not repeated."""
    where = run_name if run_name.split()[:1] == ["run"] else f"run {run_name}"
    return f"the requests' own times in {where}, queue included"


def measured_demand(records: Sequence[RequestRecord], horizon_s: float) -> tuple[float, float]:
    """(mean, peak) KV tokens that the requests of a run held or waited for, queue included.

    As :func:`estimate_demand` with each request's own times. An unanswered request counts with its prompt until it
    ended.
    """
    known = [record for record in records if record.finished_s is not None and record.status != "rejected"]
    arrivals = np.array([record.scheduled_s for record in known], dtype=np.float64)
    ends = np.array([max(record.finished_s or 0.0, record.scheduled_s) for record in known], dtype=np.float64)
    firsts = np.array([record.first_s if record.first_s is not None else record.finished_s for record in known])
    inputs = np.array([record.input_tokens for record in known], dtype=np.float64)
    outputs = np.array([record.output_tokens for record in known], dtype=np.float64)
    return _residency(arrivals, np.clip(firsts.astype(np.float64), arrivals, ends), ends, inputs, outputs, horizon_s)


def _residency(
    starts: Floats, firsts: Floats, ends: Floats, inputs: Floats, outputs: Floats, horizon_s: float
) -> tuple[float, float]:
    """Mean over [0, horizon] and peak of the sum over requests; each is flat, then a ramp, then zero."""
    if len(starts) == 0:
        return 0.0, 0.0
    horizon_s = max(horizon_s, float(starts.max()))
    grow_s = ends - firsts
    slopes = np.divide(outputs, grow_s, out=np.zeros_like(outputs), where=grow_s > 0)
    # The total is piecewise linear between these instants, with steps at starts and ends. A request that
    # grows in no time (tpot 0) jumps to its full size when it starts to grow: then it has left already.
    times = np.concatenate([starts, firsts, ends])
    jumps = np.concatenate([inputs, np.zeros_like(inputs), -(inputs + slopes * grow_s)])
    turns = np.concatenate([np.zeros_like(slopes), slopes, -slopes])
    order = np.argsort(times, kind="stable")
    times, jumps, turns = times[order], jumps[order], turns[order]
    widths = np.diff(times, append=times[-1])
    slope_after = np.cumsum(turns)
    grown = np.concatenate([[0.0], np.cumsum(slope_after * widths)[:-1]])
    after = np.cumsum(jumps) + grown
    before_next = after + slope_after * widths
    peak = float(max(after.max(), before_next.max()))
    left = np.clip(times, 0.0, horizon_s)
    inside = np.clip(times + widths, 0.0, horizon_s) - left
    # Where the horizon cuts a piece, its height is taken over the part inside.
    area = float(np.sum(inside * (after + slope_after * ((left - times) + inside / 2))))
    return (max(area, 0.0) / horizon_s if horizon_s > 0 else 0.0), max(peak, 0.0)

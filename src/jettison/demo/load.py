"""The demo's day: phases, arrivals, and the batch that begins in the night. Pure.

A day has as many users at any hour as the machine at hand can bear: its rates are fitted by ``fit_day``, its hours
are not, so that a slower machine has fewer users and not a longer day.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jettison.cost.deployment import Deployment
from jettison.cost.speed import MachineSpeed
from jettison.errors import ConfigError
from jettison.simulate.calibrate import ACCEPTED, CLOSE_ENOUGH, peak_demand_tokens
from jettison.simulate.loads import search_factor
from jettison.workload.arrivals import Burst
from jettison.workload.conditions import capacities
from jettison.workload.lengths import Lengths, LogNormalPair
from jettison.workload.pool import OfflinePool
from jettison.workload.synthetic import SyntheticSpec, generate
from jettison.workload.traces import Workload

MOST_CORE_SHARE = 0.6
"""Of what the cores can compute, the most that the day's busiest phase may ask for: memory is to bind, and not they."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the day."""

    name: str
    start_s: float
    end_s: float
    rates: tuple[float, ...]
    """Of arrivals, in turn, for equal parts of the phase; in units of the night's."""


@dataclass(frozen=True, slots=True)
class Day:
    """Online requests by the hour, and a batch of which all lines come at once."""

    phases: tuple[Phase, ...]
    prompt: Lengths
    output: Lengths
    batch: OfflinePool
    peak_share: float
    """Of the undropped KV capacity of all instances: what requests are to hold or wait for when most are there."""

    @property
    def duration_s(self) -> float:
        """Of the arrivals, in seconds."""
        return self.phases[-1].end_s

    def arrivals(self, rate_per_s: float) -> SyntheticSpec:
        """With so many arrivals a second at night."""
        pieces = []
        for phase in self.phases:
            width_s = (phase.end_s - phase.start_s) / len(phase.rates)
            pieces += [Burst(phase.start_s + i * width_s, width_s, rate) for i, rate in enumerate(phase.rates)]
        return SyntheticSpec(
            "day", rate_per_s, self.duration_s, self.prompt, self.output, bursts=tuple(pieces),
            source=f"synthetic: a day of {self.duration_s:g} s: {', '.join(phase.name for phase in self.phases)}",
        )

    def workload(self, rate_per_s: float, seed: int) -> Workload:
        """The day's online requests."""
        return generate(self.arrivals(rate_per_s), seed)


DAY = Day(
    (
        Phase("night", 0.0, 30.0, (1.0,)),
        Phase("morning", 30.0, 50.0, (2.0, 3.5, 5.0, 5.0)),
        Phase("burst", 50.0, 56.0, (9.0,)),
        Phase("afternoon", 56.0, 70.0, (4.0, 2.5)),
        Phase("evening", 70.0, 100.0, (1.0,)),
    ),
    prompt=Lengths(median=64, sigma=0.5, cap=160), output=Lengths(median=400, sigma=0.4, cap=800),
    batch=OfflinePool(
        LogNormalPair(Lengths(median=96, sigma=0.3, cap=200), Lengths(median=160, sigma=0.3, cap=300)),
        num_requests=220, start_s=2.0,
    ),
    peak_share=1.3,
)  # fmt: skip
"""What ``jettison demo`` plays. Long answers in little memory: few requests fill it, and few are little work."""


@dataclass(frozen=True, slots=True)
class FittedDay:
    """How many users the day has on this machine, and what that comes to."""

    rate_per_s: float
    """At night."""
    peak_over_capacity: float
    """Demand of KV at its peak, with unlimited memory, over the undropped capacity."""
    core_share: float
    """Of the whole day."""
    burst_core_share: float
    """Of the phase with most arrivals."""

    @property
    def caution(self) -> str | None:
        """What to tell where this machine computes so slowly beside what it holds that it is another experiment."""
        if self.burst_core_share <= MOST_CORE_SHARE:
            return None
        return (
            f"when most users are there they ask for {self.burst_core_share:.0%} of what the cores can compute, more "
            f"than {MOST_CORE_SHARE:.0%}: the cores may bind, and not memory"
        )


def fit_day(day: Day, speed: MachineSpeed, deployment: Deployment, seed: int) -> FittedDay:
    """So many users that demand is at its peak ``day.peak_share`` of the undropped capacity, in virtual time.

    Raises ConfigError where no number of users gets there; where the cores would bind, and not memory, ``caution`` says
    so.
    """
    capacity, _ = capacities(deployment)
    target = day.peak_share * capacity
    rate, found = search_factor(
        lambda factor: peak_demand_tokens(day.workload(factor, seed), speed, deployment), target, 1.0,
        close_enough=CLOSE_ENOUGH,
    )
    if abs(found / target - 1.0) > ACCEPTED:
        raise ConfigError(f"no number of users gives the day a peak demand of {target:.0f} KV tokens: {found:.0f}")
    workload = day.workload(rate, seed)
    share = core_share(workload, speed, deployment.num_instances)
    busiest = max(day.phases, key=lambda phase: max(phase.rates))
    burst = core_share(workload, speed, deployment.num_instances, busiest.start_s, busiest.end_s)
    return FittedDay(rate, found / capacity, share, burst)


def core_share(
    workload: Workload, speed: MachineSpeed, num_instances: int, start_s: float = 0.0, end_s: float | None = None
) -> float:
    """What the requests that arrive in a time ask of the cores, over what these could compute in it, were memory
    unlimited: steps so large that what each costs whatever is in it does not count.

    ``speed``: of one instance while all compute.
    """
    end_s = workload.duration_s if end_s is None else end_s
    work_s = sum(
        row.output_tokens * speed.decode_per_request_s + row.input_tokens / speed.prefill_tokens_per_s
        for row in workload.rows
        if start_s <= row.arrival_s < end_s
    )
    return work_s / (num_instances * (end_s - start_s))


def seeded(pool: OfflinePool, seed: int) -> OfflinePool:
    """The batch with lengths of its own for each seed."""
    return replace(pool, seed=seed)

"""How many users make a wanted mean load: pilot simulations with memory to spare.

Mean demand grows with the number of users, faster than in proportion once steps grow with the batch, and without bound
where compute saturates; so the factor is searched between bounds, from an estimate of where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jettison.cost.model import ChunkShape
from jettison.errors import ConfigError
from jettison.report.fairness import estimate_demand
from jettison.sim.setup import ClusterSetup
from jettison.simulate.machines import Machine, cluster_setup
from jettison.simulate.run import SimulationOptions, simulate_workload
from jettison.simulate.spec import ExperimentSpec, VariantSpec
from jettison.simulate.workloads import build_workload
from jettison.workload.rows import Workload

CLOSE_ENOUGH = 0.01
"""Of the wanted load, relative."""

ACCEPTED = 0.05
"""What is left after the last pilot may be off by so much: small workloads cannot be scaled finely."""

MAX_PILOTS = 10
SPARE_MEMORY = 8
"""Pilots have so many times the KV memory."""

OnPilot = Callable[[int, float, float], None]
"""Told number, factor and mean load of each pilot."""

OnTime = Callable[[float, float], None]
"""Told the virtual time of a simulation as it goes on, and that of its last arrival, in seconds."""


def find_factor(
    spec: ExperimentSpec, machine: Machine, base_dir: Path = Path(), *, on_pilot: OnPilot = lambda *_: None,
    on_time: OnTime = lambda *_: None,
) -> float:
    """The ``factor`` of ``build_workload`` at which mean demand is ``workload.mean_load`` of the capacity; else 1.

    With the first seed; demand is what requests hold or wait for, each by its own times in the pilot, undropped and
    with recompute, which has nothing to do as memory is to spare. Raises ConfigError where no factor gets there.
    """
    wanted = spec.workload.mean_load
    if wanted is None:
        return 1.0
    seed = spec.seeds[0]
    setup = cluster_setup(machine, spec, VariantSpec("pilot", "recompute"), seed)
    capacity = float(machine.num_instances * machine.kv_tokens)

    first = build_workload(spec.workload, seed, base_dir)

    def load_at(factor: float) -> float:
        try:
            load = build_workload(spec.workload, seed, base_dir, factor=factor)
        except ConfigError as error:  # without a factor it could be made
            raise ConfigError(
                f"workload.mean_load {wanted:g}: {factor:.4g} times the users of {first.name}: {error}"
            ) from None
        return mean_demand(load, setup, machine, on_time) / capacity

    factor, found = search_factor(load_at, wanted, _guess(first, machine, wanted * capacity), on_pilot=on_pilot)
    if abs(found / wanted - 1.0) > ACCEPTED:
        raise ConfigError(
            f"workload.mean_load {wanted:g} is not reached: at {factor:.4g} times the users of {first.name} it is "
            f"{found:.3g}"
        )
    return factor


def mean_demand(
    load: Workload, setup: ClusterSetup, machine: Machine, on_time: OnTime = lambda *_: None
) -> float:
    """KV tokens held or waited for at one time, over the workload's duration, memory to spare."""
    spare = machine.kv_tokens * machine.shape.num_layers * machine.shape.kv_bytes_per_token_layer * (SPARE_MEMORY - 1)
    memory = replace(setup.memory, budget_bytes=setup.memory.budget_bytes + spare)
    ample = replace(setup, memory=memory, max_num_queued_reqs=None)
    run = simulate_workload(load, ample, SimulationOptions(
        name="pilot", detail=False, observe_interval_s=60.0,
        on_time=lambda now_s: on_time(now_s, load.rows[-1].arrival_s),
    ))  # fmt: skip
    demand: float = run.config["fairness"]["mean_demand_tokens"]
    return demand


def search_factor(
    load_at: Callable[[float], float], wanted: float, factor: float = 1.0, *, close_enough: float = CLOSE_ENOUGH,
    on_pilot: OnPilot = lambda *_: None,
) -> tuple[float, float]:
    """Where ``load_at``, which grows with its factor, is ``wanted``, searched from ``factor`` on.

    Between the largest factor that is too small and the smallest that is too large, or by steps while there is only
    one of them. Returns the best of ``MAX_PILOTS`` at most, and its load: whether that is near enough is the caller's
    affair.
    """
    low: tuple[float, float] | None = None
    high: tuple[float, float] | None = None
    best = (factor, math.inf)
    for number in range(1, MAX_PILOTS + 1):
        found = load_at(factor)
        on_pilot(number, factor, found)
        if abs(found - wanted) < abs(best[1] - wanted):
            best = (factor, found)
        if abs(found / wanted - 1.0) <= close_enough:
            break
        if found < wanted:
            low = (factor, max(found, wanted / 100.0))
        else:
            high = (factor, found)
        factor = _next(low, high, wanted)
    return best


def _next(low: tuple[float, float] | None, high: tuple[float, float] | None, wanted: float) -> float:
    """By proportion, at most four times at once; between two bounds on the line through both, in logarithms, but not
    too near to either."""
    if low is None or high is None:
        at, found = low or high or (1.0, wanted)
        return at * min(4.0, max(0.25, wanted / found)) * (1.02 if low is not None else 0.98)
    share = math.log(wanted / low[1]) / math.log(high[1] / low[1]) if high[1] > low[1] else 0.5
    share = min(0.9, max(0.1, share))
    return float(low[0] * (high[0] / low[0]) ** share)


def _guess(load: Workload, machine: Machine, wanted_tokens: float) -> float:
    """By unconstrained residency: requests of this workload, in batches of about the wanted size."""
    columns = load.columns
    mean_input, mean_output = float(columns.input_tokens.mean()), float(columns.output_tokens.mean())
    mean_context = mean_input + mean_output / 2
    batch = max(1, round(wanted_tokens / machine.num_instances / mean_context))
    cost = machine.profile.cost
    decode_s = cost.batch_cost_s([ChunkShape(round(mean_context), 1)] * min(batch, 4096))
    prefill_s = cost.batch_cost_s([ChunkShape(0, max(1, round(mean_input)))])
    # A batch's worth of requests comes, each with its prompt, while each of its requests decodes its output.
    tpot_s = decode_s + batch * prefill_s / max(mean_output, 1.0)
    demand, _ = estimate_demand(load, prefill_s + decode_s, tpot_s)
    if demand <= 0.0:
        raise ConfigError(f"workload.mean_load: {load.name} has no demand to scale")
    return wanted_tokens / demand

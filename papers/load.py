"""How many users there are: so many that the mean KV demand, with memory to spare, is the spec's ``mean_load``.

As ``simulate.loads`` finds it, but for each seed, with a first guess that the spec states (its rate), and less exactly:
pilots are the most expensive runs there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from jettison.simulate.loads import mean_demand
from jettison.simulate.machines import Machine, cluster_setup
from jettison.simulate.spec import ExperimentSpec, VariantSpec
from papers.requests import requests_of

CLOSE = 0.04
"""Relative distance from the wanted load at which the search ends."""

MAX_PILOTS = 6


class Tried(NamedTuple):
    """One pilot."""

    factor: float
    load: float


def find_load(spec: ExperimentSpec, machine: Machine) -> float:
    """The ``factor`` of ``build_workload`` for the spec's first seed."""
    wanted, seed = spec.workload.mean_load, spec.seeds[0]
    assert wanted is not None
    setup = cluster_setup(machine, spec, VariantSpec("pilot", "recompute"), seed)
    capacity = float(machine.num_instances * machine.kv_tokens)

    def load_at(factor: float) -> float:
        return mean_demand(requests_of(spec, factor), setup, machine) / capacity

    return search(load_at, wanted).factor


def search(load_at: Callable[[float], float], wanted: float, close: float = CLOSE) -> Tried:
    """From factor 1: demand grows faster than the number of users, so steps are a little shorter than in proportion;
    between two bounds, on the line through both in logarithms."""
    tried = [Tried(1.0, load_at(1.0))]
    while _distance(tried[-1], wanted) > close and len(tried) < MAX_PILOTS:
        factor = _next_factor(tried, wanted)
        tried.append(Tried(factor, load_at(factor)))
    return min(tried, key=lambda t: _distance(t, wanted))


def _distance(tried: Tried, wanted: float) -> float:
    return abs(tried.load / wanted - 1.0)


def _next_factor(tried: list[Tried], wanted: float) -> float:
    below = max((t for t in tried if t.load < wanted), default=None)
    above = min((t for t in tried if t.load >= wanted), default=None)
    if below is None or above is None:
        last = tried[-1]
        return last.factor * min(2.0, max(0.5, math.pow(wanted / max(last.load, 1e-6), 0.7)))
    part = math.log(wanted / below.load) / math.log(above.load / below.load)
    return float(below.factor * (above.factor / below.factor) ** min(0.9, max(0.1, part)))

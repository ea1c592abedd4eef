"""The requests of a job, upscaled as KunServe upscales BurstGPT.

``simulate.workloads`` draws as many arrivals as a process has. Here the process has the rate that the papers' trace
files have (BurstGPT's own, its timestamps divided by 10: KunServe's ``evaluation/trace/burstgpt.py``), and users are
added by TraceUpscaler's method (its ``evaluation/bench.py``): copies stand on their original's instant, so that ten
times the users means ten requests at once. The papers' arrivals are that clumpy, and no process at the final rate is.
Lengths are drawn for every request, as the papers take them from another data set.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jettison.simulate.spec import ExperimentSpec
from jettison.simulate.workloads import build_workload
from jettison.workload import shaping
from jettison.workload.lengths import published_lengths
from jettison.workload.rows import Workload

SPECS = Path(__file__).parent / "specs"
"""Where files of specs are, too."""


def requests_of(spec: ExperimentSpec, factor: float) -> Workload:
    """For the spec's first seed, with ``factor`` times the users that it states. Raises ConfigError."""
    seed, wanted = spec.seeds[0], spec.workload
    if wanted.upscale is None or wanted.arrivals is None or wanted.lengths is None or wanted.lengths.name is None:
        return build_workload(wanted, seed, SPECS, factor=factor)
    one_user = build_workload(replace(wanted, upscale=None, replay_burst=None), seed)
    load = shaping.upscale(one_user, max(1.0, wanted.upscale * factor), seed, keep="span", spread_s=wanted.spread_s)
    load = shaping.draw_lengths(load, published_lengths(wanted.lengths.name), seed)
    burst = wanted.replay_burst
    return load if burst is None else shaping.replay_burst(load, burst.start_s, burst.end_s, burst.repeats)

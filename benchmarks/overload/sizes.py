"""How long instances stay merged after a burst, for two to eight of them, in virtual time. Table and JSON.

    python -m benchmarks overload sizes [--instances 2 3 4 5 6 7 8] [--rates 1.1 1.55] [--processes N] [--json OUT]

A burst of 4.2 times the load for 25 s merges most or all of them; then requests come at ``--rates`` for each instance,
where members are clearly faster apart, until 200 s. ``merged``: seconds from the burst's end to 200 s in which some
group was a pipeline. ``after``: of the requests that came after the burst. Restores and drops take each other's back
where there are as many; more than the burst's own are flapping.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.shared import VIRTUAL, keep, parse, print_block
from jettison.report.results import RunResult
from jettison.simulate.batch import run_cases
from jettison.simulate.cases import Case, cases_of

DURATION_S = 200.0
BURST_S = (20.0, 25.0)
"""Beginning and length."""


def case_of(num_instances: int, rate_per_s: float) -> Case:
    """One size at one rate for each instance."""
    burst = {"start_s": BURST_S[0], "duration_s": BURST_S[1], "multiplier": 4.2}
    arrivals = {
        "process": "gamma", "cv": 0.3, "rate_per_s": rate_per_s * num_instances, "duration_s": DURATION_S,
        "bursts": [burst],
    }
    spec: dict[str, Any] = {
        "name": "odd sizes",
        "cluster": {"preset": "kunserve-a", "instances": num_instances, "kv_tokens": 60_000},
        "workload": {"arrivals": arrivals, "lengths": {"input": 600, "output": 600}},
        "variants": ["drop"],
        "settings": {"block_size": 64, "max_num_batched_tokens": 4096, "max_num_seqs": 1024},
    }
    return cases_of(spec, f"{num_instances} at {rate_per_s}")[0]


def figures(run: RunResult, num_instances: int, rate_per_s: float) -> dict[str, Any]:
    """One row."""
    ends_s = sum(BURST_S)
    groups = [point for point in run.series["groups"] if ends_s <= point[0] <= DURATION_S]
    late = [row["tpot_s"] for row in run.requests_detail or () if row["scheduled_s"] > ends_s and row["tpot_s"]]
    return {
        "instances": num_instances,
        "rate_per_s": rate_per_s,
        "merged_s": sum(b[0] - a[0] for a, b in pairwise(groups) if a[1] < num_instances),
        "tpot_p50_s": run.tpot_s.p50,
        "tpot_p50_after_s": float(np.median(late)),
        "ttft_p99_s": run.ttft_s.p99,
        "failed": run.requests.failed,
        **{name: run.events[name] for name in ("drops", "restores", "restores_turned", "preemptions")},
    }


def main() -> None:
    args = parse(__doc__, instances=list(range(2, 9)), rates=[1.1, 1.55], processes=int)
    sizes = [(number, rate) for rate in args.rates for number in args.instances]
    runs = run_cases([case_of(*size) for size in sizes], num_processes=args.processes)
    rows = [figures(run, *size) for run, size in zip(runs, sizes, strict=True)]
    print_block("odd_sizes", {"rows": rows})
    keep(args.json, {"rows": rows}, *VIRTUAL)

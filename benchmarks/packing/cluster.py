"""Instances in use over time under each packing, in virtual time: 7B on twelve RTX 4090, Poisson, long contexts.

    python -m benchmarks packing cluster --rate 0.5 --duration-s 300 --json packed_cluster.json

The whole core decides (``--packing``): arrivals, moves while requests decode, prices, head-room, pressure. Lengths are
log-normal and long, so that memory binds; requests that one instance could not hold are cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.shared import VIRTUAL, Row, keep, parse, print_rows
from jettison.policy.packing.named import PACKERS
from jettison.report.results import RunResult
from jettison.simulate.batch import run_cases
from jettison.simulate.cases import cases_of


def spec(rate: float, duration_s: float, num_instances: int, seed: int) -> Row:
    """One variant a packing; ``recompute`` without one is the first."""
    lengths = {
        "input": {"median": 2400, "sigma": 0.9, "cap": 12000}, "output": {"median": 1200, "sigma": 0.8, "cap": 4000},
    }  # fmt: skip
    variants = [{"name": name, "policy": "recompute", "settings": {"packing": name}} for name in PACKERS]
    return {
        "name": "packed cluster", "cluster": {"preset": "mell-4090", "instances": num_instances},
        "workload": {
            "arrivals": {"process": "poisson", "rate_per_s": rate, "duration_s": duration_s}, "lengths": lengths,
        },
        "settings": {"enable_prefix_caching": False, "max_num_batched_tokens": 2048},
        "variants": [{"name": "none", "policy": "recompute"}, *variants], "seeds": [seed],
    }  # fmt: skip


def time_mean(epochs: Sequence[Row], name: str) -> float:
    """Of a value that each epoch's record has, until the next one differs."""
    span_s = epochs[-1]["t"] - epochs[0]["t"]
    return sum(a[name] * (b["t"] - a["t"]) for a, b in itertools.pairwise(epochs)) / span_s


def used_at(epochs: Sequence[Row], at_s: float) -> int:
    """Instances in use at a time."""
    before = [epoch["used"] for epoch in epochs if epoch["t"] <= at_s]
    return int(before[-1]) if before else 0


def row_of(run: RunResult, duration_s: float) -> Row:
    """What one packing came to."""
    epochs = [event for event in run.events["log"] if event["kind"] == "packed"]
    row: Row = {"packing": run.name, "p99_ttft_s": run.ttft_s.p99, "preemptions": run.events["preemptions"]}
    if epochs:
        times = range(0, int(duration_s), max(1, int(duration_s) // 20))
        row |= {
            "used_mean": time_mean(epochs, "used"), "used_peak": max(epoch["used"] for epoch in epochs),
            "utilisation": time_mean(epochs, "utilisation"),
            "moves": sum(event["kind"] == "pack" for event in run.events["log"]),
            "used_over_time": [used_at(epochs, at_s) for at_s in times],
        }
    return row


def main() -> None:
    args = parse(__doc__, rate=(0.5, "arrivals a second"), duration_s=300.0, instances=12, seed=0)
    rows = []
    for case in cases_of(spec(args.rate, args.duration_s, args.instances, args.seed), "packed cluster"):
        (run,) = run_cases([case], num_processes=1)
        rows.append(row_of(run, args.duration_s))
    print_rows(rows, [*rows[-1]])
    keep(args.json, {"rate_per_s": args.rate, "duration_s": args.duration_s, "rows": rows}, *VIRTUAL)

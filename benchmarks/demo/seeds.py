"""The demo's comparison over several seeds: P99 TTFT with dropping against recompute, same bytes, same arrivals.

    python -m benchmarks demo seeds [--seeds 5] [--beyond-seeds 1] [--oracle] [--json OUT] [--runs OUT] [--work DIR]
    python -m benchmarks demo seeds --seeds 10 --scales [--speed TOKENS_PER_S BASE_S PER_REQUEST_S]    # no replays

For every seed: calibrate to the machine as it is now, replay the burst under both policies in turn (which goes first
alternates); the first seeds also beyond the merged capacity. Prints a table with the ratio of each seed and the median.
``--oracle``: also recompute with the merged memory from the first second, without a pipeline: the most that dropping
could bring. ``share_of_gain`` is dropping's part of that in the logarithm of P99 TTFT.
With ``--scales``: what each seed is calibrated to, and the time that takes; ``--speed`` in place of a measured one.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from benchmarks.shared import LIVE, Row, in_turn, keep, parse, print_block, print_rows, ratio, say, work_folder
from jettison.cost.speed import MachineSpeed
from jettison.demo.burst import demo_workload, make_setup, plan_beyond, plan_load
from jettison.live.experiments.overload import ExperimentSetup, measure_speed, run_policy
from jettison.report.failures import exit_if_unanswered
from jettison.report.results import RunResult, write_results
from jettison.report.summary import print_fairness
from jettison.workload.shaping import scale_time


def compare(
    setup: ExperimentSetup, seed: int, scale: float, label: str, *, with_oracle: bool = False
) -> dict[str, RunResult]:
    """Both policies on the same arrivals; the oracle too."""
    load = scale_time(demo_workload(seed), scale)
    merged = replace(setup, kv_tokens_per_instance=int(setup.merged_capacity_tokens() / setup.instances))
    contenders = {"recompute": (setup, "recompute"), "drop": (setup, "drop")}
    if with_oracle:
        contenders["oracle"] = merged, "recompute"
    runs = {}
    for name in in_turn(tuple(contenders), seed):
        its, policy = contenders[name]
        runs[name] = run_policy(its, policy, load, name=f"{label} seed {seed}: {name}", seed=seed)
    return runs


def row_of(runs: dict[str, RunResult], seed: int, label: str) -> Row:
    """The figures that count."""
    base, drop = runs["recompute"], runs["drop"]
    fairness = base.config["fairness"]
    oracle: Row = {}
    if (best := runs.get("oracle")) is not None:
        oracle = {"oracle_p99_ttft_s": best.ttft_s.p99, "share_of_gain": share_of_gain(base, drop, best)}
    return {
        "label": label, "seed": seed, "requests": drop.requests.submitted, "recompute_p99_ttft_s": base.ttft_s.p99,
        "drop_p99_ttft_s": drop.ttft_s.p99, "p99_ratio": ratio(base.ttft_s.p99, drop.ttft_s.p99),
        "p50_ratio": ratio(base.ttft_s.p50, drop.ttft_s.p50),
        "throughput_ratio": ratio(drop.output_tokens_per_s, base.output_tokens_per_s),
        "tpot_p50_ratio": ratio(drop.tpot_s.p50, base.tpot_s.p50), "drops": drop.events.get("drops", 0),
        "restores": drop.events.get("restores", 0), "mean_load": fairness["mean_load"],
        "peak_over_merged": fairness["peak_over_merged"], "e2e_ratio": ratio(drop.e2e_s.mean, base.e2e_s.mean),
        "failed": sum(run.requests.unanswered for run in runs.values()),
    } | oracle  # fmt: skip


def share_of_gain(base: RunResult, drop: RunResult, best: RunResult) -> float | None:
    """In the logarithm of P99 TTFT; None where the oracle gains nothing."""
    found, possible = ratio(base.ttft_s.p99, drop.ttft_s.p99), ratio(base.ttft_s.p99, best.ttft_s.p99)
    return None if not found or not possible or possible <= 1.0 else math.log(found) / math.log(possible)


def print_scales(setup: ExperimentSetup, speed: MachineSpeed, num_seeds: int) -> None:
    """What each seed is calibrated to at this speed, and the processor time that this takes."""
    rows: list[Row] = []
    for seed in range(num_seeds):
        began_s = time.process_time()
        plan, beyond = plan_load(setup, speed, seed), plan_beyond(setup, speed, seed)
        rows.append({"seed": seed, **asdict(plan), "beyond": beyond, "CPU s": time.process_time() - began_s})
    print_rows(rows, title=str(speed))


def main() -> None:
    args = parse(
        __doc__, seeds=5, beyond_seeds=(1, "seeds that also run beyond the merged capacity"),
        oracle=(False, "also recompute with the merged memory from the first second"),
        runs=(Path, "also write all runs in the common result format"), work=Path,
        scales=(False, "print the rate scales, and replay nothing"),
        speed=(None, "with --scales: prefill tokens a second, seconds of a decode step, of each request in it",
               {"nargs": 3, "type": float}),
    )  # fmt: skip
    if args.speed and not args.scales:
        raise SystemExit("--speed goes with --scales only")
    console = Console(width=170)
    setup = make_setup(work_folder(args.work, "seeds"), 0)
    if args.scales:
        print_scales(setup, MachineSpeed(*args.speed) if args.speed else measure_speed(setup), args.seeds)
        return
    rows: list[Row] = []
    runs: list[RunResult] = []
    for seed in range(args.seeds):
        speed = measure_speed(setup)
        plan = plan_load(setup, speed, seed)
        settings = [("burst", plan.rate_scale)]
        if seed < args.beyond_seeds:
            settings.append(("beyond the merged capacity", plan_beyond(setup, speed, seed)))
        for label, scale in settings:
            met = compare(setup, seed, scale, label, with_oracle=args.oracle)
            runs += met.values()
            rows.append(row_of(met, seed, label) | {"rate_scale": scale})
            say(rows[-1])
    print_block("demo_seeds", {"rows": rows})
    print_fairness(runs[0], console)
    keep(args.json, {"rows": rows}, *LIVE)
    if args.runs:
        write_results(args.runs, runs)
    exit_if_unanswered(runs, console)

"""The demo's comparison over several seeds: P99 TTFT with dropping against recompute, same bytes, same arrivals.

    python -m benchmarks demo seeds [--seeds 5] [--beyond-seeds 1] [--json OUT] [--runs OUT] [--work DIR]
    python -m benchmarks demo seeds --seeds 10 --scales [--speed TOKENS_PER_S BASE_S PER_REQUEST_S]    # no replays

For every seed: calibrate to the machine as it is now, replay the burst under both policies in turn (which goes first
alternates); the first seeds also beyond the merged capacity. Prints a table with the ratio of each seed and the median.
With ``--scales``: what each seed is calibrated to, and the time that takes; ``--speed`` in place of a measured one.
"""

from __future__ import annotations

import time
from dataclasses import asdict
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


def compare(setup: ExperimentSetup, seed: int, scale: float, label: str) -> dict[str, RunResult]:
    """Both policies on the same arrivals."""
    load = scale_time(demo_workload(seed), scale)
    order = in_turn(("recompute", "drop"), seed)
    return {p: run_policy(setup, p, load, name=f"{label} seed {seed}: {p}", seed=seed) for p in order}


def row_of(runs: dict[str, RunResult], seed: int, label: str) -> Row:
    """The figures that count."""
    base, drop = runs["recompute"], runs["drop"]
    fairness = base.config["fairness"]
    return {
        "label": label, "seed": seed, "requests": drop.requests.submitted, "recompute_p99_ttft_s": base.ttft_s.p99,
        "drop_p99_ttft_s": drop.ttft_s.p99, "p99_ratio": ratio(base.ttft_s.p99, drop.ttft_s.p99),
        "p50_ratio": ratio(base.ttft_s.p50, drop.ttft_s.p50),
        "throughput_ratio": ratio(drop.output_tokens_per_s, base.output_tokens_per_s),
        "tpot_p50_ratio": ratio(drop.tpot_s.p50, base.tpot_s.p50), "drops": drop.events.get("drops", 0),
        "restores": drop.events.get("restores", 0), "mean_load": fairness["mean_load"],
        "peak_over_merged": fairness["peak_over_merged"], "failed": base.requests.unanswered + drop.requests.unanswered,
    }  # fmt: skip


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
            pair = compare(setup, seed, scale, label)
            runs += pair.values()
            rows.append(row_of(pair, seed, label) | {"rate_scale": scale})
            say(rows[-1])
    print_block("demo_seeds", {"rows": rows})
    print_fairness(runs[0], console)
    keep(args.json, {"rows": rows}, *LIVE)
    if args.runs:
        write_results(args.runs, runs)
    exit_if_unanswered(runs, console)

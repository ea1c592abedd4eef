"""The demo's comparison over several seeds: P99 TTFT with dropping against recompute, same bytes, same arrivals.

    python benchmarks/demo_seeds.py [--seeds 5] [--beyond-seeds 1] [--json OUT] [--runs OUT] [--work DIR]
    python benchmarks/demo_seeds.py --seeds 10 --scales [--speed TOKENS_PER_S BASE_S PER_REQUEST_S]    # no replays

For every seed: calibrate to the machine as it is now, replay the burst under both policies in turn (which goes first
alternates); the first seeds also beyond the merged capacity. Prints a table with the ratio of each seed and the median.
With ``--scales``: what each seed is calibrated to, and the time that takes; ``--speed`` in place of a measured one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from evidence import LIVE, write_result
from rich.console import Console
from rich.table import Table

from jettison.cost.speed import MachineSpeed
from jettison.demo.burst import demo_workload, make_setup, plan_beyond, plan_load
from jettison.live.experiments.overload import ExperimentSetup, measure_speed, run_policy
from jettison.report.failures import exit_if_unanswered
from jettison.report.results import RunResult, write_results
from jettison.report.summary import print_fairness
from jettison.workload.shaping import scale_time


def compare(setup: ExperimentSetup, seed: int, scale: float, label: str, first: str) -> dict[str, RunResult]:
    """Both policies on the same arrivals."""
    load = scale_time(demo_workload(seed), scale)
    order = ("recompute", "drop") if first == "recompute" else ("drop", "recompute")
    return {p: run_policy(setup, p, load, name=f"{label} seed {seed}: {p}", seed=seed) for p in order}


def row_of(runs: dict[str, RunResult], seed: int, label: str) -> dict[str, object]:
    """The figures that count."""
    base, drop = runs["recompute"], runs["drop"]
    fairness = base.config["fairness"]

    def ratio(a: float | None, b: float | None) -> float | None:
        return a / b if a is not None and b else None

    return {
        "label": label,
        "seed": seed,
        "requests": drop.requests.submitted,
        "recompute_p99_ttft_s": base.ttft_s.p99,
        "drop_p99_ttft_s": drop.ttft_s.p99,
        "p99_ratio": ratio(base.ttft_s.p99, drop.ttft_s.p99),
        "p50_ratio": ratio(base.ttft_s.p50, drop.ttft_s.p50),
        "throughput_ratio": ratio(drop.output_tokens_per_s, base.output_tokens_per_s),
        "tpot_p50_ratio": ratio(drop.tpot_s.p50, base.tpot_s.p50),
        "drops": drop.events.get("drops", 0),
        "restores": drop.events.get("restores", 0),
        "mean_load": fairness["mean_load"],
        "peak_over_merged": fairness["peak_over_merged"],
        "failed": base.requests.unanswered + drop.requests.unanswered,
    }


def print_table(rows: list[dict[str, object]], console: Console) -> None:
    """One line a seed, then medians."""
    columns = [k for k in rows[0] if k != "label"]
    for label in dict.fromkeys(str(r["label"]) for r in rows):
        chosen = [r for r in rows if r["label"] == label]
        table = Table(title=f"{label}: recompute / drop for times, drop / recompute for throughput")
        for column in columns:
            table.add_column(column.replace("_", " "), justify="right")
        for row in chosen:
            table.add_row(*[_text(row[c]) for c in columns])
        medians = {
            c: statistics.median([float(str(r[c])) for r in chosen if r[c] is not None] or [0.0]) for c in columns
        }
        table.add_row(*["median" if c == "seed" else _text(medians[c]) for c in columns], style="bold")
        console.print(table)


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def print_scales(setup: ExperimentSetup, speed: MachineSpeed, num_seeds: int, console: Console) -> None:
    """What each seed is calibrated to at this speed."""
    console.print(speed)
    table = Table()
    for column in ("seed", "rate scale", "beyond", "peak / capacity", "peak / merged", "P99 TTFT separate s",
                   "P99 TTFT merged s", "worst gain", "CPU s"):  # fmt: skip
        table.add_column(column, justify="right")
    for seed in range(num_seeds):
        began_s = time.process_time()
        plan, beyond = plan_load(setup, speed, seed), plan_beyond(setup, speed, seed)
        figures = (
            plan.rate_scale, beyond, plan.peak_over_capacity, plan.peak_over_merged,
            plan.predicted_p99_ttft_separate_s, plan.predicted_p99_ttft_merged_s, plan.worst_gain,
            time.process_time() - began_s,
        )
        table.add_row(str(seed), *(_text(figure) for figure in figures))
    console.print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--beyond-seeds", type=int, default=1, help="seeds that also run beyond the merged capacity")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=Path, help="also write all runs in the common result format")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--scales", action="store_true", help="print the rate scales, and replay nothing")
    parser.add_argument(
        "--speed", type=float, nargs=3, metavar="NUMBER",
        help="with --scales, of one instance: prefill tokens a second, seconds of a decode step, of each request in it",
    )
    args = parser.parse_args()
    if args.speed and not args.scales:
        parser.error("--speed goes with --scales only")
    console = Console(width=170)
    work = args.work or Path(tempfile.mkdtemp(prefix="jettison-seeds-"))
    setup = make_setup(work, 0)
    if args.scales:
        print_scales(setup, MachineSpeed(*args.speed) if args.speed else measure_speed(setup), args.seeds, console)
        return
    rows: list[dict[str, object]] = []
    runs: list[RunResult] = []
    for seed in range(args.seeds):
        speed = measure_speed(setup)
        plan = plan_load(setup, speed, seed)
        settings = [("burst", plan.rate_scale)]
        if seed < args.beyond_seeds:
            settings.append(("beyond the merged capacity", plan_beyond(setup, speed, seed)))
        for label, scale in settings:
            pair = compare(setup, seed, scale, label, "recompute" if seed % 2 == 0 else "drop")
            runs += pair.values()
            rows.append(row_of(pair, seed, label) | {"rate_scale": scale})
            console.print({k: _text(v) for k, v in rows[-1].items()})
    print_table(rows, console)
    print_fairness(runs[0], console)
    if args.json:
        write_result(args.json, {"rows": rows}, *LIVE)
    if args.runs:
        write_results(args.runs, runs)
    exit_if_unanswered(runs, console)


if __name__ == "__main__":
    main()

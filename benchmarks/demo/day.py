"""The demo's day over several seeds: device-seconds, P99 TTFT and the batch, against the same day all awake.

    python -m benchmarks demo day [--seeds 3] [--json OUT] [--work DIR]

Each seed is a whole ``jettison demo``: profiled, measured, fitted and served both ways.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from benchmarks.shared import LIVE, Row, keep, parse, print_block, say, work_folder
from jettison.demo.day import run_day
from jettison.demo.load import DAY
from jettison.report.day import day_figures, missed_goals
from jettison.report.results import RunResult, read_results

TOLD = ("drops", "restores", "sleeps", "wakes", "preemptions")


def served(work: Path, seeds: range) -> Iterator[list[RunResult]]:
    """Both ways of each seed's day, by servers on this machine."""
    for seed in seeds:
        run_day(work / str(seed), seed)
        yield read_results(work / str(seed) / "report.json")


def row_of(seed: int, runs: list[RunResult]) -> Row:
    """What a day came to, beside its baseline."""
    baseline, day = (day_figures(run, DAY.duration_s) for run in runs)
    return {
        "seed": seed, "requests": runs[0].ttft_s.count, "baseline": dataclasses.asdict(baseline),
        "day": dataclasses.asdict(day), "device_seconds_over_baseline": day.device_s / baseline.device_s,
        "missed": missed_goals(baseline, day), "events": {key: runs[1].events.get(key) for key in TOLD},
    }  # fmt: skip


def main() -> None:
    args = parse(__doc__, seeds=3, work=Path)
    work, seeds = work_folder(args.work, "day"), range(args.seeds)
    rows = []
    for seed, runs in zip(seeds, served(work, seeds), strict=True):
        rows.append(row_of(seed, runs))
        say(rows[-1])
    print_block("demo_day", {"rows": rows})
    keep(args.json, {"rows": rows}, *LIVE)

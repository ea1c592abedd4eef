"""Real arrivals against ``jettison serve``, with dropping and with recompute: all slices, no picking.

    python benchmarks/real_traces.py [--data DIR] [--json OUT] [--markdown OUT]

Traces: Azure 2023 conv and code (CC-BY 4.0, Patel et al., ISCA 2024), whole. Three loads: conv with its own lengths,
code with its own lengths, code arrivals with conv lengths (in conv's order). Rules, the same for every load:

* lengths are multiplied by ``--length-scale`` (both prompt and output) so that they fit a laptop's model;
* time is divided by ``--compress``: the hour is replayed in minutes, gaps and bursts squeezed alike;
* arrivals are thinned by one seeded draw with one probability per load, chosen so that the mean KV demand of the whole
  trace (predicted with memory to spare, from this machine's measured speed) is ``--mean-load`` of the capacity:
  the papers keep it under 60 %.

The whole trace is replayed once per policy; figures are given for each slice of ``--slice`` trace seconds. Memory binds
in a slice where the peak demand under recompute, queue included, is above the capacity.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jettison.live.demo import DemoModel, make_setup
from jettison.live.experiment import ExperimentSetup, measure_speed, run_policy
from jettison.report.results import RunResult, write_results
from jettison.workload import shaping
from jettison.workload.probe import MachineSpeed, predict
from jettison.workload.traces import Workload, read_trace

MODEL = DemoModel(kv_tokens_per_instance=3008)
"""The demo's model with more KV: real prompts are longer than the demo's."""


def data_dir(given: Path | None) -> Path:
    """Where the traces are: the option, JETTISON_DATA, or a shared folder beside the checkout."""
    for candidate in (given, os.environ.get("JETTISON_DATA"), Path(__file__).parents[2] / "shared" / "data"):
        if candidate and (Path(candidate) / "arrivals").is_dir():
            return Path(candidate) / "arrivals"
    raise SystemExit("no traces: give --data DIR or set JETTISON_DATA")


def shape(
    load: Workload, args: argparse.Namespace, setup: ExperimentSetup, speed: MachineSpeed
) -> tuple[Workload, float]:
    """Scaled, compressed and thinned by the stated rules; also the probability that an arrival is kept."""
    load = shaping.scale_lengths(load, args.length_scale, floor_tokens=2)
    load = shaping.cap_lengths(load, min(MODEL.context, setup.kv_tokens_per_instance // 2))
    load = shaping.scale_time(load, args.compress)
    low, high = 0.0, 1.0
    for _ in range(12):
        keep = (low + high) / 2
        thinned = shaping.thin_by_probability(load, keep, seed=0)
        demand = predict(thinned, speed, setup.overload_setting().unlimited)
        too_much = demand.mean_demand_tokens > args.mean_load * setup.capacity_tokens()
        low, high = (low, keep) if too_much else (keep, high)
    return shaping.thin_by_probability(load, low, seed=0), low


def slice_rows(name: str, runs: dict[str, RunResult], width_s: float, setup: ExperimentSetup) -> list[dict[str, Any]]:
    """One row per slice."""
    details = {policy: run.requests_detail or [] for policy, run in runs.items()}
    end = max(row["scheduled_s"] for row in details["drop"])
    rows = []
    for index in range(int(end // width_s) + 1):
        span = (index * width_s, (index + 1) * width_s)
        row: dict[str, Any] = {"load": name, "slice": index}
        for policy, requests in details.items():
            chosen = [r for r in requests if span[0] <= r["scheduled_s"] < span[1]]
            ttft = [r["ttft_s"] for r in chosen if r["ttft_s"] is not None]
            tokens = sum(r["output_tokens"] for r in chosen)
            row["requests"] = len(chosen)
            row[f"{policy}_p50_ttft_s"] = float(np.percentile(ttft, 50)) if ttft else None
            row[f"{policy}_p99_ttft_s"] = float(np.percentile(ttft, 99)) if ttft else None
            row[f"{policy}_mean_e2e_s"] = float(np.mean([r["e2e_s"] for r in chosen if r["e2e_s"]])) if ttft else None
            row[f"{policy}_tokens"] = tokens
            row[f"{policy}_unfinished"] = sum(r["status"] != "completed" for r in chosen)
        log = runs["drop"].events.get("log") or []
        row["drops"] = sum(e["kind"] == "drop" and span[0] <= e["t"] < span[1] for e in log)
        row["peak_over_capacity"] = _peak(details["recompute"], span) / setup.capacity_tokens()
        if row["drop_p99_ttft_s"]:
            row["p99_ratio"] = row["recompute_p99_ttft_s"] / row["drop_p99_ttft_s"]
            row["e2e_ratio"] = row["recompute_mean_e2e_s"] / row["drop_mean_e2e_s"]
        rows.append(row)
    return rows


def _peak(requests: list[dict[str, Any]], span: tuple[float, float]) -> float:
    """Most KV tokens wanted at once in a span: everything between its arrival and its end, queue included."""
    points: list[tuple[float, float]] = []
    for r in requests:
        if r["e2e_s"] is None:
            continue
        size = r["input_tokens"] + r["output_tokens"] / 2
        points += [(r["scheduled_s"], size), (r["scheduled_s"] + r["e2e_s"], -size)]
    level = peak = 0.0
    for t, change in sorted(points):
        level += change
        if span[0] <= t < span[1]:
            peak = max(peak, level)
    return peak


def markdown(rows: list[dict[str, Any]], header: list[str]) -> str:
    """The report."""
    lines = [*header, ""]
    keys = [
        ("load", "load"), ("slice", "slice"), ("requests", "requests"),
        ("peak_over_capacity", "peak demand / capacity"),
        ("recompute_p50_ttft_s", "P50 TTFT recompute, s"), ("drop_p50_ttft_s", "P50 TTFT drop, s"),
        ("recompute_p99_ttft_s", "P99 TTFT recompute, s"), ("drop_p99_ttft_s", "P99 TTFT drop, s"),
        ("p99_ratio", "P99 ratio"), ("e2e_ratio", "mean e2e ratio"), ("drops", "drops"),
    ]
    lines.append("| " + " | ".join(title for _, title in keys) + " |")
    lines.append("|" + "---|" * len(keys))
    for row in rows:
        cells = [row.get(key) for key, _ in keys]
        lines.append("| " + " | ".join(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--compress", type=float, default=56.0)
    parser.add_argument("--length-scale", type=float, default=0.125)
    parser.add_argument("--mean-load", type=float, default=0.55)
    parser.add_argument("--slice", type=float, default=600.0, help="trace seconds")
    parser.add_argument("--duration", type=float, help="only the first so many trace seconds (a quick look)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="jettison-traces-"))
    setup = make_setup(work, 0, MODEL)
    folder = data_dir(args.data)
    conv = read_trace(folder / "AzureLLMInferenceTrace_conv.csv.gz")
    code = read_trace(folder / "AzureLLMInferenceTrace_code.csv.gz")
    loads = {"conv": conv, "code": code, "code, conv lengths": shaping.swap_lengths(code, conv)}
    rows: list[dict[str, Any]] = []
    runs: list[RunResult] = []
    header = [
        "# Azure arrivals, dropping against recompute", "",
        f"Two instances, {MODEL.hidden}-wide {MODEL.layers}-layer Qwen3 in float32, parameters "
        f"{setup.parameter_share():.0%} of memory, KV for {setup.capacity_tokens():.0f} tokens (merged "
        f"{setup.merged_capacity_tokens():.0f}). Lengths times {args.length_scale:g}, time divided by "
        f"{args.compress:g}, thinned to a predicted mean KV demand of {args.mean_load:.0%} of the capacity.", "",
    ]
    for index, (name, load) in enumerate(loads.items()):
        speed = measure_speed(setup)
        if args.duration:
            load = shaping.limit(load, duration_s=args.duration)
        shaped, keep = shape(load, args, setup, speed)
        header.append(f"* {name}: every arrival kept with probability {keep:.4f}, {len(shaped.rows)} requests")
        order = ("recompute", "drop") if index % 2 == 0 else ("drop", "recompute")
        pair = {p: run_policy(setup, p, shaped, name=f"{name}: {p}") for p in order}
        rows += slice_rows(name, pair, args.slice / args.compress, setup)
        for policy, run in pair.items():
            header.append(
                f"  * {policy}: P50 TTFT {run.ttft_s.p50:.3f} s, P99 {run.ttft_s.p99:.3f} s, P50 TPOT "
                f"{run.tpot_s.p50:.4f} s, {run.output_tokens_per_s:.0f} output tokens/s, "
                f"{run.requests.completed} of {run.requests.submitted} completed, "
                f"drops {run.events.get('drops', 0):g}, mean load {run.config['fairness']['mean_load']:.2f}"
            )
        runs += [replace(run, requests_detail=None) for run in pair.values()]
        print("\n".join(header[-3:]))
    text = markdown(rows, header)
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    if args.json:
        write_results(args.json, runs)
        args.json.with_suffix(".slices.json").write_text(json.dumps({"rows": rows}, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

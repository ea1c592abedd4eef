"""Real arrivals against ``jettison serve``, with dropping and with recompute: all slices, no picking.

    python -m benchmarks overload traces [--data DIR] [--json OUT]

Traces: Azure 2023 conv and code (CC-BY 4.0, Patel et al., ISCA 2024), whole. Three loads: conv with its own lengths,
code with its own lengths, code arrivals with conv lengths (in conv's order). Rules, the same for every load:

* lengths are scaled to the machine: outputs by ``--output-scale``, and prompts by as much less as prefill is dearer
  here than on the papers' hardware: a prompt token costs an A800 with a 14B model 0.3 % of a decode step (6,900
  tokens/s, 45 ms), a CPU with a small model 2 to 3 %. So a request keeps the shares of its time that go to prefill and
  to decoding, and with them what its load is bound by. What is longer than three quarters of an instance's KV is cut;
* time is divided by ``--compress``: the hour is replayed in minutes, gaps and bursts squeezed alike;
* arrivals are thinned by one seeded draw with one probability per load, chosen so that the mean KV demand of the whole
  trace, with memory to spare, is ``--mean-load`` of the capacity: the papers keep it under 60 %. It is predicted from
  this machine's measured speed; then the thinned load is replayed against instances with ``PILOT_MEMORY`` times the
  KV (a pilot), and the speed is corrected by one factor, so that the prediction agrees with what that replay wanted.

The whole trace is replayed ``--rounds`` times per policy, in alternating order; figures are given for each slice of
``--slice`` trace seconds, over all rounds. What binds in a slice is measured, by one more replay, with recompute and
eight times the KV: *memory* where the experiment's KV raises recompute's P99 TTFT to at least
``--memory-binds-above`` times that replay's; else *compute* where the slice would take more than 80 % of its seconds to
serve at full batches or its requests would hold more than the capacity, at the measured speed (they pile up, and
memory does not help); else nothing. What a simulation at that speed (``simulate.calibrate``) expects is kept beside it.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.evidence import LIVE
from benchmarks.shared import Row, data_dir, in_turn, keep, parse, print_block, print_rows, ratio, work_folder
from jettison.cost.speed import MachineSpeed
from jettison.demo.burst import DemoModel, make_setup
from jettison.live.experiments.overload import ExperimentSetup, measure_speed, run_policy
from jettison.report.failures import check_answered, exit_if_unanswered
from jettison.report.results import RunResult, write_results
from jettison.report.summary import print_fairness
from jettison.simulate.calibrate import foresee
from jettison.workload import shaping
from jettison.workload.traces import Workload, read_trace

MODEL = DemoModel(layers=12, hidden=384, heads=6, kv_heads=2, context=1024)
"""20M parameters: the demo's 4M make steps so short that clients and HTTP take as much of two cores as the model, and
a pipeline, which steps twice as often, pays for it in TPOT."""

PAPER_PREFILL_TOKENS_PER_S = 6900.0
PAPER_DECODE_STEP_S = 0.045
"""Qwen2.5-14B on an A800 at the load of KunServe v3 section 5 (roofline; its stay time of 11 s comes out)."""

LOADS = ("conv", "code", "mixed")
"""``mixed``: code arrivals with conv lengths."""

COMPUTE_BINDS_ABOVE = 0.8

PILOT_MEMORY = 8
"""KV of a pilot's instances over that of the experiment's: nothing waits for memory there."""

CLOSE_TO_TARGET = 0.1
"""A pilot whose mean demand is this near to the target is the last one."""

PIPELINE_EFFICIENCY = 0.7
"""Of a merged group in the predictions (0.62 to 0.72 seen with this model on two cores)."""


def prefill_weight(speed: MachineSpeed, batch: int = 12) -> float:
    """A prompt token in decode steps on the papers' hardware over the same here; at most 1."""
    there = 1.0 / (PAPER_PREFILL_TOKENS_PER_S * PAPER_DECODE_STEP_S)
    here = 1.0 / (speed.prefill_tokens_per_s * speed.step_s(batch, 0))
    return min(1.0, there / here)


def shape(load: Workload, args: Namespace, setup: ExperimentSetup, speed: MachineSpeed) -> Workload:
    """Scaled to this machine and compressed; not yet thinned."""
    prompt_scale = args.output_scale * prefill_weight(speed)
    load = shaping.scale_lengths(load, args.output_scale, floor_tokens=2, input_factor=prompt_scale)
    load = shaping.cap_lengths(load, min(MODEL.context, setup.kv_tokens_per_instance * 3 // 4))
    return shaping.scale_time(load, args.compress)


def thin(load: Workload, mean_load: float, setup: ExperimentSetup, speed: MachineSpeed) -> tuple[Workload, float]:
    """Thinned to a predicted mean demand; also the probability that an arrival is kept."""
    low, high = 0.0, 1.0
    for _ in range(12):
        keep = (low + high) / 2
        demand = mean_demand(shaping.thin_by_probability(load, keep, seed=0), speed, setup)
        too_much = demand > mean_load * setup.capacity_tokens()
        low, high = (low, keep) if too_much else (keep, high)
    return shaping.thin_by_probability(load, low, seed=0), low


def mean_demand(load: Workload, speed: MachineSpeed, setup: ExperimentSetup) -> float:
    """KV tokens at one time, predicted with memory to spare; none of no requests."""
    if not load.rows:
        return 0.0
    run = foresee(load, speed, setup.deployment(), "unlimited")
    return float(run.config["fairness"]["mean_demand_tokens"])


def with_memory_to_spare(setup: ExperimentSetup) -> ExperimentSetup:
    """The same instances with so much KV that nothing waits for memory."""
    return replace(setup, kv_tokens_per_instance=PILOT_MEMORY * setup.kv_tokens_per_instance)


def correct_speed(load: Workload, setup: ExperimentSetup, speed: MachineSpeed) -> tuple[MachineSpeed, float, float]:
    """Replay a load with memory to spare; (speed that explains its mean demand, that demand / capacity, factor)."""
    run = run_policy(with_memory_to_spare(setup), "recompute", load, name="pilot")
    check_answered([run])  # what was not answered is no demand
    wanted = float(run.config["fairness"]["mean_demand_tokens"])
    low, high = 0.25, 8.0
    for _ in range(14):
        factor = (low * high) ** 0.5
        found = mean_demand(load, speed.slowed(factor), setup)
        low, high = (low, factor) if found > wanted else (factor, high)
    return speed.slowed(high), wanted / setup.capacity_tokens(), high


def thin_by_pilots(
    load: Workload, args: Namespace, setup: ExperimentSetup, speed: MachineSpeed
) -> tuple[Workload, float, MachineSpeed, list[str]]:
    """The thinned load, the probability of its arrivals, the corrected speed, and what the pilots said."""
    notes: list[str] = []
    thinned, keep = thin(load, args.mean_load, setup, speed)
    for turn in range(args.pilots):
        speed, mean_load, factor = correct_speed(thinned, setup, speed)
        notes.append(
            f"pilot {turn}, {len(thinned.rows)} requests: mean demand {mean_load:.2f}, {factor:.2f} x the time foreseen"
        )
        if abs(mean_load / args.mean_load - 1.0) <= CLOSE_TO_TARGET:
            break
        thinned, keep = thin(load, args.mean_load, setup, speed)
    return thinned, keep, speed, notes


def what_binds(
    load: Workload, span: tuple[float, float], speed: MachineSpeed, setup: ExperimentSetup, memory_raises_p99: bool
) -> Row:
    """Predictions for the arrivals of a span on their own, and what binds there."""
    rows = [r for r in load.rows if span[0] <= r.arrival_s < span[1]]
    seconds = span[1] - span[0]
    if not rows:
        return {"compute_load": 0.0, "demand_over_capacity": 0.0, "binds": "nothing"}
    mean_tokens = sum(r.input_tokens + r.output_tokens / 2 for r in rows) / len(rows)
    batch = max(1.0, setup.kv_tokens_per_instance / mean_tokens)
    token_s = speed.decode_per_request_s + speed.decode_base_s / batch
    busy_s = sum(r.input_tokens / speed.prefill_tokens_per_s + r.output_tokens * token_s for r in rows)
    compute_load = busy_s / setup.instances / seconds
    alone = replace(load, rows=tuple(rows))
    deployment = setup.deployment()
    spared = foresee(alone, speed, deployment, "unlimited")
    limited = foresee(alone, speed, deployment, "separate")
    merged = foresee(alone, speed, deployment, "merged", pipeline_efficiency=PIPELINE_EFFICIENCY)
    over = spared.config["fairness"]["peak_demand_tokens"] / setup.capacity_tokens()
    binds = "nothing"
    if memory_raises_p99:
        binds = "memory"
    elif compute_load > COMPUTE_BINDS_ABOVE or over > 1.0:
        binds = "compute"
    return {
        "compute_load": compute_load,
        "demand_over_capacity": over,
        "predicted_p99_ttft_s": {
            "undropped": limited.ttft_s.p99, "unlimited": spared.ttft_s.p99, "merged": merged.ttft_s.p99
        },
        "binds": binds,
    }


def slice_rows(
    name: str, load: Workload, runs: dict[str, list[RunResult]], width_s: float, setup: ExperimentSetup,
    speed: MachineSpeed, memory_binds_above: float,
) -> list[Row]:
    """One row per slice, over all rounds."""
    details = {name: [row for run in rounds for row in run.requests_detail or []] for name, rounds in runs.items()}
    end = max(row["scheduled_s"] for row in details["drop"])
    rows = []
    for index in range(int(end // width_s) + 1):
        span = (index * width_s, (index + 1) * width_s)
        row: Row = {"load": name, "slice": index}
        for policy, requests in details.items():
            chosen = [r for r in requests if span[0] <= r["scheduled_s"] < span[1]]
            ttft = [r["ttft_s"] for r in chosen if r["ttft_s"] is not None]
            tokens = sum(r["output_tokens"] for r in chosen)
            if policy == "recompute":
                row["requests"] = len(chosen) // len(runs[policy])
            row[f"{policy}_ttft_s"] = ttft
            row[f"{policy}_p50_ttft_s"] = float(np.percentile(ttft, 50)) if ttft else None
            row[f"{policy}_p99_ttft_s"] = float(np.percentile(ttft, 99)) if ttft else None
            row[f"{policy}_mean_e2e_s"] = float(np.mean([r["e2e_s"] for r in chosen if r["e2e_s"]])) if ttft else None
            row[f"{policy}_tokens"] = tokens
            row[f"{policy}_unfinished"] = sum(r["status"] != "completed" for r in chosen)
        limited, spare = row["recompute_p99_ttft_s"], row["spare_p99_ttft_s"]
        raised = bool(limited and spare and limited >= memory_binds_above * spare)
        row |= what_binds(load, span, speed, setup, raised)
        logs = [e for run in runs["drop"] for e in run.events.get("log") or []]
        row["drops"] = sum(e["kind"] == "drop" and span[0] <= e["t"] < span[1] for e in logs) / len(runs["drop"])
        row["p99_ratio"] = ratio(row["recompute_p99_ttft_s"], row["drop_p99_ttft_s"])
        row["e2e_ratio"] = ratio(row["recompute_mean_e2e_s"], row["drop_mean_e2e_s"])
        rows.append(row)
    return rows


def by_what_binds(rows: list[Row]) -> list[Row]:
    """The slices of a load that the same thing binds, pooled: the verdict on each load."""
    pooled = []
    for key in sorted({(row["load"], row["binds"]) for row in rows}):
        members = [row for row in rows if (row["load"], row["binds"]) == key]
        requests = sum(row["requests"] for row in members)
        ttft = {p: [t for row in members for t in row[f"{p}_ttft_s"]] for p in ("recompute", "drop")}
        e2e = {
            p: sum(row[f"{p}_mean_e2e_s"] * row["requests"] for row in members if row["requests"]) / max(1, requests)
            for p in ttft
        }
        if not ttft["drop"] or not ttft["recompute"]:
            continue
        pooled.append({
            "load": key[0], "binds": key[1], "slices": len(members), "requests": requests,
            "drops": sum(row["drops"] for row in members),
            "p50_ratio": float(np.percentile(ttft["recompute"], 50) / np.percentile(ttft["drop"], 50)),
            "p99_ratio": float(np.percentile(ttft["recompute"], 99) / np.percentile(ttft["drop"], 99)),
            "e2e_ratio": e2e["recompute"] / e2e["drop"],
        })
    return pooled


def main() -> None:
    args = parse(
        __doc__, data=Path, loads=(list(LOADS), {"choices": LOADS}), compress=75.0, rounds=2,
        first_round=(0, "odd: the other policy goes first"), output_scale=0.625, mean_load=0.55,
        pilots=(3, "most replays with ample memory that correct the speed"),
        memory_binds_above=(2.0, "factor of predicted P99 TTFT"), slice=(600.0, "trace seconds"),
        duration=(float, "only the first so many trace seconds (a quick look)"), work=Path,
    )  # fmt: skip
    setup = make_setup(work_folder(args.work, "traces"), 0, MODEL)
    conv, code = (read_trace(data_dir(args.data) / f"AzureLLMInferenceTrace_{n}.csv.gz") for n in ("conv", "code"))
    loads = {"conv": conv, "code": code, "mixed": shaping.swap_lengths(code, conv)}
    rows: list[Row] = []
    runs: list[RunResult] = []
    for index, (name, load) in enumerate((name, load) for name, load in loads.items() if name in args.loads):
        speed = measure_speed(setup)
        if args.duration:
            load = shaping.limit(load, duration_s=args.duration)
        shaped, keep_share, speed, pilots = thin_by_pilots(shape(load, args, setup, speed), args, setup, speed)
        print(f"{name}: arrivals kept with probability {keep_share:.4f}", *pilots, sep="; ", flush=True)
        done = {
            "recompute": [], "drop": [],
            "spare": [run_policy(with_memory_to_spare(setup), "recompute", shaped, name=f"{name}: memory to spare")],
        }  # fmt: skip
        for turn in range(args.first_round, args.first_round + args.rounds):
            for policy in in_turn(("recompute", "drop"), index + turn):
                done[policy].append(run_policy(setup, policy, shaped, name=f"{name}: {policy}, round {turn}"))
        rows += slice_rows(name, shaped, done, args.slice / args.compress, setup, speed, args.memory_binds_above)
        runs += [replace(run, requests_detail=None) for each in done.values() for run in each]
    document = {"rows": rows, "pooled": by_what_binds(rows)}
    for row in rows:
        del row["recompute_ttft_s"], row["drop_ttft_s"], row["spare_ttft_s"]
    print_rows(rows)
    print_block("real_traces", document)
    print_fairness(runs[0], Console())
    if args.json:
        write_results(args.json, runs)
        keep(args.json.with_suffix(".slices.json"), document, *LIVE)
    exit_if_unanswered(runs, Console())

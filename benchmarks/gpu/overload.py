"""A burst that memory cannot hold, at two instances of 14B on one card: recompute, swap, migrate, drop, with targets.

    python3 -m benchmarks gpu overload --out gpu_overload.json                       # five minutes, not in gpu-check
    python3 -m benchmarks gpu overload --instances 3 --seconds-a-policy 75           # an H200 has room for three
    python3 -m benchmarks gpu overload --trace FILE --slice 120 --slice-index 3      # real arrivals and lengths
    python3 -m benchmarks gpu overload --device cpu --tiny                           # the same at toy sizes

All policies have the same workers, one after the other: a policy is a new core over them (``replay.PolicyEngine``), so
bytes, weights and graphs are equal by construction, and one start pays for all. Arrivals are those of a trace's slice,
or a synthetic burst from a seed; either has so many users that its peak KV demand with memory to spare, foreseen at the
speed that is measured first, is ``--peak`` times the undropped capacity (several: a sweep of load). A policy has
``--seconds-a-policy`` for arrivals and what follows them; what is open at twice that is counted as not answered.
Every figure is of one card that is time-sliced, without MPS: instances take turns, so it hides bubbles of pipelines,
and each instance has its part of the card's speed: with three, answers take longer, and the same mean load takes more
seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu.engine import config_for
from benchmarks.gpu.replay import PolicyEngine, at_once, measured_speed, replay
from benchmarks.gpu.shapes import SHAPES, TINY, folder_of
from jettison.config import EngineConfig
from jettison.config.cards import visible_cards
from jettison.cost.speed import MachineSpeed
from jettison.live.engine.assembly import assemble
from jettison.live.engine.deployed import deployment_of
from jettison.report.results import RunResult
from jettison.report.summary import print_fairness
from jettison.simulate.calibrate import peak_demand_tokens
from jettison.simulate.loads import search_factor
from jettison.workload.conditions import capacities
from jettison.workload.rows import Workload
from jettison.workload.shaping import cap_lengths, scale_lengths, scale_time, slices, thin_by_probability, upscale
from jettison.workload.synthetic import Burst, Lengths, SyntheticSpec, generate
from jettison.workload.traces import read_trace
from jettison.workload.units import Reading

POLICIES = ("recompute", "swap", "migrate", "drop")
BESIDE = "drop beside a batch"
ONE_CARD = "one card, time-sliced, no MPS"
MEMORY = "36GiB"
ARRIVALS_SHARE = 0.95
"""Of a policy's seconds; the last requests' answers take the rest."""
MOST_SHARE, MOST_LOAD, LEAST_GAIN, WANTED_REQUESTS = 0.77, 0.6, 5.0, 1000
CLOSE_ENOUGH = 0.04
"""Of the wanted peak: a look takes a second of the card's time."""
RESTORE_S = 8.0
"""After the last answer a dropped group may take so long to come back by itself."""
Document = dict[str, Any]


def config_of(models: Path, options: argparse.Namespace) -> EngineConfig:
    """Of all policies; the budget is the papers' 36 GiB for a 14B, or 32 blocks of the toy."""
    more: dict[str, object] = {
        "instances": options.instances, "overload": "drop", "max_num_batched_tokens": 2048, "max_num_queued_reqs": None,
        "overload_trigger": options.overload_trigger, "timeline": options.timeline,
        "profile": "none", "memory": MEMORY, "host_memory": "4GiB", "log_level": "warning",
    }  # fmt: skip
    config = config_for("14b", models, options, **more)
    if options.tiny:
        sized = assemble(config).memory_for_blocks(32)
        small = {"memory": sized, "host_memory": sized, "num_threads": 1, "max_num_seqs": 64,
                 "overload_trigger": "pressure", "overload_min_wait_ms": 5, "overload_check_interval_ms": 10,
                 "restore_dwell_ms": 200}  # fmt: skip
        config = EngineConfig.resolve(**config.flat() | small)
    return config


def base_load(options: argparse.Namespace, context: int) -> Workload:
    """Arrivals over ``ARRIVALS_SHARE`` of a policy's seconds, before they are made as many as the peak asks for."""
    seconds = ARRIVALS_SHARE * options.seconds_a_policy
    if options.trace is not None:
        load = read_trace(options.trace, seed=options.seed, reading=Reading(options.format, options.unit))
        if options.slice is not None:
            load = slices(load, options.slice)[options.slice_index]
        load = scale_lengths(load, options.length_scale)
        return cap_lengths(scale_time(load, load.duration_s / seconds), context)
    tiny = options.tiny
    prompt, output, rate = (16, 48, 20.0) if tiny else (options.prompt_tokens, options.output_tokens, 1.0)
    spec = SyntheticSpec(
        "burst", rate, seconds, Lengths(prompt, 0.5, cap=8 * prompt), Lengths(output, 0.5, cap=2 * output),
        bursts=(Burst(seconds / 5, seconds / 12, 120.0),),
    )  # fmt: skip
    return cap_lengths(generate(spec, options.seed), context)


def with_users(load: Workload, factor: float, seed: int) -> Workload:
    """The same moments with so many times the users."""
    if factor < 1.0:
        return thin_by_probability(load, factor, seed)
    return upscale(load, factor, seed, keep="span", spread_s=0.25)


def with_peak(load: Workload, wanted_tokens: float, speed: MachineSpeed, deployment: Any, seed: int) -> Workload:
    """As many users as the peak demand asks for."""
    factor, _ = search_factor(
        lambda factor: peak_demand_tokens(with_users(load, factor, seed), speed, deployment), wanted_tokens,
        close_enough=CLOSE_ENOUGH,
    )  # fmt: skip
    return with_users(load, factor, seed)


async def serve(engine: PolicyEngine, policy: str, load: Workload, options: argparse.Namespace) -> RunResult:
    """One policy's run; its workers are whole again at the end. Raises TimeoutError where they are not."""
    batch = [(options.batch_prompt, options.batch_output)] * options.batch if policy == BESIDE else []
    engine.serve_by(policy.partition(" ")[0])
    warm = at_once([(load.rows[0].input_tokens, 8)] * (4 * options.instances), "warm")
    await replay(engine, warm, f"warm {policy}", options.seed + 1)
    run = await replay(engine, load, policy, options.seed, most_s=2 * options.seconds_a_policy, batch=batch)
    ends_s = time.monotonic() + RESTORE_S
    while any(len(g.stages) > 1 for g in engine.core.groups.values()) and time.monotonic() < ends_s:
        await asyncio.sleep(0.05)  # by itself, where the queue is short for long enough
    run.events["restores"] = engine.totals()["restores"]
    if not await engine.until_whole(30.0):
        raise TimeoutError(f"after {policy} the workers did not come back to the whole model")
    return run


def row_of(run: RunResult, instances: int) -> Document:
    """What is kept of a policy."""
    counted = ("drops", "restores", "drop_seconds", "restore_seconds", "exchanged_bytes", "stalls", "stall_seconds",
               "num_preemptions", "recomputed_tokens", "migrations", "swapped_out_blocks", "rebalanced",
               "offline_prompt_tokens", "offline_output_tokens")  # fmt: skip
    kinds = ("drop", "restore", "restored", "split", "served")
    return {
        "conditions": ONE_CARD, "instances": instances, "requests": run.requests.submitted,
        "unanswered": run.requests.unanswered, "duration_s": run.duration_s,
        "ttft_p50_s": run.ttft_s.p50, "ttft_p99_s": run.ttft_s.p99, "tpot_p50_s": run.tpot_s.p50,
        "tpot_p99_s": run.tpot_s.p99, "end_to_end_p50_s": run.e2e_s.p50, "end_to_end_p99_s": run.e2e_s.p99,
        "gap_p99_s": run.itl_s.p99, "tokens_per_s": run.output_tokens_per_s,
        "events": {name: run.events[name] for name in counted if run.events.get(name)},
        "log": [event for event in run.log() if event["kind"] in kinds][:100],
        "fairness": {k: v for k, v in run.config["fairness"].items() if k != "metric_definitions"},
    }  # fmt: skip


def checks_of(rows: dict[str, Document], deployment: Any, at: str = "") -> list[Document]:
    """Figures with the issue's targets; the mean load is that of the run in which requests waited least. ``at``: of
    which load."""
    share = deployment.shape.parameter_bytes / deployment.budget_bytes
    load = min(row["fairness"]["mean_load"] for row in rows.values())
    found: list[tuple[str, Any, str | None, bool | None]] = [
        ("parameters' share of memory", share, f"<= {MOST_SHARE}", share <= MOST_SHARE),
        ("mean load", load, f"<= {MOST_LOAD}", load <= MOST_LOAD),
    ]
    for name, row in rows.items():
        found.append((f"{name}: requests not answered", row["unanswered"], "0", row["unanswered"] == 0))
        figures = [("requests", row["requests"]), ("output tokens/s", row["tokens_per_s"])]
        figures += [(f"{told} P{p}, s", row[f"{what}_p{p}_s"]) for p in (50, 99)
                    for told, what in (("TTFT", "ttft"), ("TPOT", "tpot"), ("end to end", "end_to_end"))]  # fmt: skip
        found += [(f"{name}: {what}", value, None, None) for what, value in figures if value is not None]
    if dropped := rows.get("drop"):
        for what in ("drops", "restores"):
            count = dropped["events"].get(what, 0)
            found.append((f"{what} seen", count, ">= 1", count >= 1))
        if beside := rows.get(BESIDE):
            harvested = beside["events"].get("offline_output_tokens", 0) / beside["duration_s"]
            found.append((f"{BESIDE}: offline output tokens/s", harvested, None, None))
        for name, row in rows.items():
            if name != "drop" and row["ttft_p99_s"] and dropped["ttft_p99_s"]:
                gain = row["ttft_p99_s"] / dropped["ttft_p99_s"]
                is_aim = name == "recompute"
                found.append((f"P99 TTFT, {name}'s over drop's", gain, f">= {LEAST_GAIN:g}, goal 12.7" if is_aim else
                              None, gain >= LEAST_GAIN if is_aim else None))  # fmt: skip
    return [{"name": f"{name}{at} ({ONE_CARD})", "value": v, "target": t, "pass": p} for name, v, t, p in found]


async def run_all(models: Path, options: argparse.Namespace, document: Document) -> None:
    """One start, the speed, and for each peak the load and the policies; the file is written after each of them."""
    begun = time.monotonic()
    engine = PolicyEngine(config_of(models, options))
    deployment = deployment_of(engine.assembly)
    capacity, merged = capacities(deployment)
    runs: list[Document] = []
    try:
        await engine.start()
        document |= {"start_s": time.monotonic() - begun, "capacity_tokens": capacity, "merged_tokens": merged,
                     "settings": deployment.settings, "runs": runs}  # fmt: skip
        batches, prompt = ((2, 8), 48) if options.tiny else ((8, 32, 96), 2047)
        speed = await measured_speed(engine, batches, prompt)
        document |= {"speed": [speed.prefill_tokens_per_s, speed.decode_base_s, speed.decode_per_request_s]}
        longest = min(engine.info.max_request_tokens, capacity // options.instances)  # not all policies merge
        base = base_load(options, longest * 3 // 4)
        for peak in options.peak:
            load = with_peak(base, peak * capacity, speed, deployment, options.seed)
            runs.append({"peak": peak} | told_of(load, options))
            for policy in [*options.policies, *([BESIDE] if options.batch else [])]:
                run = await serve(engine, policy, load, options)
                runs[-1]["policies"][policy] = row_of(run, options.instances)
                document |= {"checks": [check for each in runs for check in checks_of(each["policies"], deployment,
                             f" at peak {each['peak']:g}" if len(options.peak) > 1 else "")],
                             "seconds": time.monotonic() - begun}  # fmt: skip
                options.out.write_text(json.dumps(document, indent=1) + "\n")
                print(f"-- peak {peak:g}, {policy}: {len(load.rows)} requests in {run.duration_s:.0f} s", flush=True)
                if len(runs) == len(runs[-1]["policies"]) == 1:
                    print_fairness(run, Console(width=140))
    finally:
        await engine.close()


def told_of(load: Workload, options: argparse.Namespace) -> Document:
    """The load, as the file has it."""
    told: Document = {"num_requests": len(load.rows), "wanted_requests": WANTED_REQUESTS,
                      "arrivals": [load.source, *load.notes], "policies": {}}  # fmt: skip
    if len(load.rows) < WANTED_REQUESTS:
        told["fewer"] = f"as many as {options.seconds_a_policy:g} s a policy allow"
    if options.trace is None:  # a recorded trace is not ours to copy
        told["requests"] = [[round(r.arrival_s, 4), r.input_tokens, r.output_tokens] for r in load.rows]
    return told


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_overload.json"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--instances", type=int, default=2, help="an H200 has room for 3")
    parser.add_argument("--seconds-a-policy", type=float, default=45.0)
    parser.add_argument("--peak", type=float, nargs="+", default=[1.35],
                        help="peak KV demand over the undropped capacity; several: a sweep")  # fmt: skip
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--overload-trigger", choices=["forecast", "pressure"], default="forecast",
                        help="of drop: what it foresees, or KunServe's own rule")  # fmt: skip
    parser.add_argument("--batch", type=int, default=0, help="then dropping once more beside so many offline requests")
    parser.add_argument("--batch-prompt", type=int, default=1024, help="tokens of each")
    parser.add_argument("--batch-output", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=96, help="median of the synthetic burst's prompts")
    parser.add_argument("--output-tokens", type=int, default=500,
                        help="median of its answers: long ones fill memory before the card's computing is full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeline", metavar="FILE", help="write all steps, moves and requests there, at the end")
    parser.add_argument("--trace", type=Path, help="a file that jettison bench reads")
    parser.add_argument("--format", help="of the trace, where its columns leave it open")
    parser.add_argument("--unit", help="of the trace's stamps")
    parser.add_argument("--slice", type=float, help="trace seconds; they are replayed in those of a policy")
    parser.add_argument("--slice-index", type=int, default=0)
    parser.add_argument("--length-scale", type=float, default=1.0)
    options = parser.parse_args()
    name = "cpu"
    if options.device == "cuda":
        name = visible_cards()[0].name
    document: Document = {"benchmark": "gpu_overload", "card": name, "conditions": ONE_CARD, "cores": os.cpu_count(),
                          "seconds_a_policy": options.seconds_a_policy, "seed": options.seed}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        for shape, layout in (TINY if options.tiny else SHAPES).items():
            layout.write(folder_of(models, shape))
        asyncio.run(run_all(models, options, document))
    for row in document["checks"]:
        said = "" if row["target"] is None else f" (target {row['target']}: {'met' if row['pass'] else 'MISSED'})"
        value = f"{row['value']:.4g}" if isinstance(row["value"], float) else row["value"]
        print(f"{row['name']}: {value}{said}")
    return 0

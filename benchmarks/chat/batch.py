"""A batch beside real arrivals on one machine, live: what it gets done, and what online requests pay for it.

    python -m benchmarks chat batch [--instances 1 2] [--rounds 3] [--requests 1000] [--data DIR] [--json OUT]

A random Qwen3 of 107M parameters in bfloat16, workers of one thread each. Online: Azure 2023 conv (CC-BY 4.0, Patel et
al., ISCA 2024), lengths times `--online-scale`, each round another stretch of the trace, its time stretched so that
online requests alone are the share `--share` of the most this machine does (calibrated first, printed, and judged by
the rounds themselves). Offline: an endless batch of LongBench lengths, cut to 3,500 tokens, times `--offline-scale`.

Arms, in an order that turns with the rounds, a fresh server each:

  alone      --offline none, prompts bounded by the TPOT objective, as the online part of harvesting's steps is
  alone512   --offline none, every step as many tokens as --max-num-batched-tokens: the lower P99 of the two counts
  harvest    --offline harvest, the batch beside
  priority   --offline priority, the batch beside (ConServe's vLLM++): its total throughput is the maximum

Objectives: TPOT is 9 decode steps of one request, TTFT 14 times that (the paper's proportions), measured first.
Throughput counts tokens computed for the first time inside the arrival window. Percentiles are of all rounds' requests
pooled; beside them stands each round's, and how far `alone` is from itself between rounds: the floor of noise.

KV memory holds online requests alone several times over, and is full with the batch: so its requests are copied, give
their blocks up to online ones, and come back. What a run does not show is said in words.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.engines.weights import QWEN3_110M, make_folder
from benchmarks.evidence import LIVE
from benchmarks.servers import ServerProcess, profiled, replayed
from benchmarks.shared import (
    Row,
    data_dir,
    in_turn,
    keep,
    parse,
    print_block,
    print_rows,
    print_verdicts,
    say,
    work_folder,
)
from jettison.live.experiments.overload import ExperimentSetup
from jettison.profiles import read_profile
from jettison.report.classes import grown, total_per_s
from jettison.report.results import RunResult
from jettison.workload import shaping
from jettison.workload.lengths import published_lengths
from jettison.workload.pool import OfflinePool
from jettison.workload.traces import TraceRow, Workload, read_trace

DECODE_STEPS_PER_TPOT, TPOTS_PER_TTFT = 9, 14
"""The paper's 110 ms and 1,500 ms on Llama-2-7B and an A100."""
BATCH_CUT_TOKENS = 3500
PILOT_REQUESTS, PILOTS = 150, 2
WARM_UP = [TraceRow(0.0, 200, 4)] * 4
SHARES = (0.43, 0.49)
BOUND, GOAL, LEAST_OF_PRIORITY = 1.25, 1.1, 0.86
ARMS = ("alone", "harvest", "alone512", "priority")
COUNTS = (
    "steps_shed", "slices_resumed", "slices_discarded", "steps_abandoned", "checkpointed_blocks", "checkpointed_bytes",
    "checkpoint_frees", "offline_discards",
    "prefetched_blocks", "prefetch_stalls", "offline_pauses", "recomputed_tokens",
)
"""Of harvesting."""
MECHANISMS = {
    "steps that shed rows": "steps_shed", "copies beside steps": "checkpointed_blocks",
    "blocks given up at once": "checkpoint_frees", "coming back beside steps": "prefetched_blocks",
    "work thrown away": "offline_discards", "pauses": "offline_pauses",
}
"""And their counts: where one is zero a run proves nothing about it."""


@dataclass(frozen=True)
class Place:
    """One deployment with its objectives and its load."""

    setup: ExperimentSetup
    objectives: dict[str, object]
    contention: float
    """A step while every instance computes, in the same step alone (as profiled)."""
    trace: Workload
    """Lengths scaled, as long as the trace is."""
    pool: OfflinePool

    @property
    def slo_s(self) -> tuple[float, float]:
        """(TTFT, TPOT) in seconds."""
        return float(str(self.objectives["slo_ttft_ms"])) / 1e3, float(str(self.objectives["slo_tpot_ms"])) / 1e3

    def load(self, first: int, num: int, tokens_per_s: float) -> Workload:
        """So many requests of the trace from one on, that ask for so many tokens a second, from time 0 on. Their
        lengths drift along the trace."""
        rows = self.trace.rows[first : first + num]
        num_tokens = sum(row.input_tokens + row.output_tokens for row in rows)
        stretch = num_tokens / tokens_per_s / (rows[-1].arrival_s - rows[0].arrival_s)
        moved = tuple(r._replace(arrival_s=(r.arrival_s - rows[0].arrival_s) * stretch) for r in rows)
        return replace(
            self.trace, rows=moved, notes=(*self.trace.notes, f"{tokens_per_s:.0f} tokens/s from request {first}"))

    def serve(self, arm: str, load: Workload, name: str) -> RunResult:
        """A fresh server of one arm meets a load."""
        mode = "none" if arm.startswith("alone") else arm
        objectives = {} if arm in ("alone512", "priority") else self.objectives
        flags = self.setup.flags() | {"offline": mode} | objectives
        slo_ttft_s, slo_tpot_s = self.slo_s
        pool = None if mode == "none" else self.pool
        with ServerProcess(self.setup.model_dir, flags, self.setup.work_dir / "server.log") as server:
            replayed(server.url, WARM_UP)
            return replayed(
                server.url, load, name=name, pool=pool, slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_tpot_s, observe=True
            )


def decode_step_ms(setup: ExperimentSetup) -> float:
    """Of one request alone, through the server."""
    with ServerProcess(setup.model_dir, setup.flags(), setup.work_dir / "server.log") as server:
        replayed(server.url, WARM_UP)
        run = replayed(server.url, [TraceRow(0.0, 32, 128)])
    assert run.itl_s.p50 is not None
    return 1e3 * run.itl_s.p50


def tokens_per_s(run: RunResult, window_s: float) -> float:
    """First-time tokens of both classes a second of the arrivals' window."""
    if (both := total_per_s(run)) is not None:
        return both
    parts = [grown(run.series.get(f"online_{kind}_tokens", ()), 0.0, window_s) for kind in ("prompt", "output")]
    if None in parts:  # a server that has seen no offline request keeps no such series: what its clients got
        rows = run.requests_detail or []
        return sum(r["input_tokens"] + r["output_tokens"] for r in rows) / window_s
    return sum(part for part in parts if part is not None) / window_s


def calibrate(place: Place, share: float, num: int) -> tuple[float, list[str]]:
    """(Tokens a second of online requests that are this share of the maximum, what the pilots said)."""
    asked, notes = share * 1500.0 * place.setup.instances, []
    for turn in range(PILOTS):
        load = place.load(0, num, asked)
        most = tokens_per_s(place.serve("priority", load, "pilot"), load.duration_s)
        notes.append(f"pilot {turn}: {asked:.0f} tokens/s of chat beside a batch, {most:.0f} tokens/s in all")
        asked = share * most
    return asked, notes


def make_place(work: Path, instances: int, args: Namespace) -> Place:
    """Model, profile, objectives, trace and batch."""
    model_dir = make_folder(work, QWEN3_110M)
    extra: dict[str, object] = {"num_threads": 1}
    setup = ExperimentSetup(
        model_dir, work, args.kv_tokens, instances=instances, dtype="bfloat16", max_num_batched_tokens=512,
        extra_flags=extra)
    extra["profile"] = path = work / f"profile-{instances}.yaml"
    profiled(replace(setup, extra_flags={"num_threads": 1}), path)
    tpot_ms = DECODE_STEPS_PER_TPOT * decode_step_ms(setup)
    trace = read_trace(data_dir(args.data) / "AzureLLMInferenceTrace_conv.csv.gz")
    lengths = published_lengths("longbench")
    pool = OfflinePool(
        replace(lengths, scale=lengths.scale * args.offline_scale), unfinished=args.unfinished * instances,
        max_input_tokens=round(BATCH_CUT_TOKENS * args.offline_scale),
    )
    objectives: dict[str, object] = {
        "slo_ttft_ms": f"{TPOTS_PER_TTFT * tpot_ms:.1f}", "slo_tpot_ms": f"{tpot_ms:.1f}"
    }
    return Place(
        setup, objectives, read_profile(path).profile.contention,
        shaping.scale_lengths(trace, args.online_scale, floor_tokens=2), pool)


def pooled(runs: Sequence[RunResult]) -> Row:
    """Latencies of all rounds' online requests together, each round's P99, and what was computed."""
    rows = [row for run in runs for row in run.requests_detail or []]
    ttft = [row["ttft_s"] for row in rows if row["ttft_s"] is not None]
    each = [run.ttft_s.p99 for run in runs]
    figures = {f"p{q}_ttft_s": float(np.percentile(ttft, q)) for q in (50, 95, 99)}
    gaps = {q: [getattr(r.itl_s, f"p{q}") for r in runs] for q in (50, 99)}  # they are not kept one by one
    figures |= {f"p{q}_itl_s": float(np.mean([gap for gap in of if gap is not None])) for q, of in gaps.items()}
    return figures | {
        "requests": len(rows), "rounds_p99_ttft_s": each,
        "without_online": float(np.mean([without_online(run) for run in runs])),
        "counts": {name: sum(run.events.get(name, 0) for run in runs) for name in COUNTS},
    }


def without_online(run: RunResult) -> float:
    """Part of the time, from the first online request to the end of the last, in which none of them was there."""
    stays = sorted((row["scheduled_s"], row["e2e_s"] or 0.0) for row in run.requests_detail or [])
    began_s = here_until_s = stays[0][0]
    alone_s = 0.0
    for arrival_s, stay_s in stays:
        alone_s += max(0.0, arrival_s - here_until_s)
        here_until_s = max(here_until_s, arrival_s + stay_s)
    return alone_s / max(1e-9, here_until_s - began_s)


def unseen(harvest: Row) -> list[str]:
    """What a run says nothing about."""
    return [
        f"{what}: none, so nothing is shown about it" for what, name in MECHANISMS.items()
        if not harvest["counts"][name]
    ]


def judge(arms: dict[str, Row], tpot_s: float, contention: float, num_instances: int) -> list[Row]:
    """Each line that is to hold: what was seen, its bound, whether it does."""
    harvest, priority = arms["harvest"], arms["priority"]
    floor_s = min(arms[name]["p99_ttft_s"] for name in ("alone", "alone512"))
    same = arms["alone"]["p99_ttft_s"]
    bound_s, why = BOUND * floor_s, f"{BOUND} x online alone"
    if tpot_s > floor_s / 4:
        bound_s, why = floor_s + tpot_s, "online alone + one TPOT objective (a mixed step cannot be given up)"
    ratio, free_gaps = harvest["p99_ttft_s"] / floor_s, arms["alone512"]["p99_itl_s"] / tpot_s
    lines = [
        ("online share u", arms["alone"]["tokens_per_s"] / priority["tokens_per_s"], SHARES, "calibrated"),
        (f"P99 TTFT, s (at most {why})", harvest["p99_ttft_s"], (0.0, bound_s), f"{ratio:.2f} x online alone"),
        ("P99 TTFT, s (at most that of online alone with the same objectives x 1.25)", harvest["p99_ttft_s"],
         (0.0, BOUND * same), f"{harvest['p99_ttft_s'] / same:.2f} x; P99 ITL of alone512 {free_gaps:.2f} objectives"),
        ("P99 ITL, s (at most the TPOT objective)", harvest["p99_itl_s"], (0.0, tpot_s), ""),
        ("total over priority's", harvest["tokens_per_s"] / priority["tokens_per_s"], (LEAST_OF_PRIORITY, 9.0), ""),
    ]
    if num_instances > 1:
        lines.append((
            "P99 TTFT, s (at most the bound x contention)", harvest["p99_ttft_s"], (0.0, bound_s * contention),
            f"contention {contention:.2f}"))
    return [
        {"line": text, "value": value, "low": low, "high": high, "holds": low <= value <= high, "beside": beside}
        for text, value, (low, high), beside in lines
    ]


def experiment(instances: int, args: Namespace) -> Row:
    """All rounds of one deployment."""
    place = make_place(work_folder(args.work, "coserving"), instances, args)
    asked, notes = calibrate(place, args.share, PILOT_REQUESTS * instances)
    slo_ttft_s, slo_tpot_s = place.slo_s
    notes.append(
        f"{instances} instances, objectives {slo_ttft_s:.3f} s and {slo_tpot_s:.4f} s, {asked:.0f} tokens/s of chat, "
        f"contention {place.contention:.2f}, {place.pool.describe()}")
    print(*notes, sep="\n", flush=True)
    runs: dict[str, list[RunResult]] = {arm: [] for arm in ARMS}
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    num = -(-args.requests // args.rounds)
    for turn in range(args.rounds):
        load = place.load(PILOT_REQUESTS * instances + turn * num, num, asked)
        for arm in in_turn(ARMS, turn):
            run = place.serve(arm, load, f"{arm}, round {turn}")
            runs[arm].append(run)
            rates[arm].append(tokens_per_s(run, load.duration_s))
            say(f"{run.name}: P99 TTFT {run.ttft_s.p99} s, P99 ITL {run.itl_s.p99} s, {rates[arm][-1]:.0f} tokens/s")
    arms = {
        arm: pooled(runs[arm]) | {
            "rounds_tokens_per_s": rates[arm], "tokens_per_s": float(np.mean(rates[arm])),
        } for arm in ARMS
    }
    judged = judge(arms, place.slo_s[1], place.contention, instances)
    found = {"instances": instances, "notes": notes, "objectives_s": place.slo_s, "arms": arms, "judged": judged,
             "unseen": unseen(arms["harvest"])}  # fmt: skip
    print_block("coserving", {"experiments": [found]})
    print(*found["unseen"], sep="\n")
    print_rows([{"round": n, "P99 TTFT alone": s} for n, s in enumerate(arms["alone"]["rounds_p99_ttft_s"])])
    print_verdicts((e["holds"], f"{e['line']}: {e['value']:.3f} in {e['low']:.3f} to {e['high']:.3f} {e['beside']}")
                   for e in judged)  # fmt: skip
    return found


def main() -> None:
    args = parse(
        __doc__, instances=[1, 2], rounds=3, requests=(1000, "online requests an arm, over all rounds"),
        share=(0.46, "of online tokens alone in the maximum"), online_scale=0.1, offline_scale=0.25,
        unfinished=(64, "requests of the batch in the system, an instance"), kv_tokens=(8_000, "an instance"),
        data=Path, work=Path,
    )  # fmt: skip
    experiments: list[Row] = []
    for instances in args.instances:
        experiments.append(experiment(instances, args))
        keep(args.json, {"experiments": experiments}, *LIVE)  # now: the next count takes half an hour

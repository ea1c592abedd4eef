"""Four instances on the CPU under each packing: who is awake, who moves, and what moves cost those who decode.

    python benchmarks/packed_live.py --work DIR --plan                      # once: model, profile, load, right answers
    python benchmarks/packed_live.py --work DIR --arms none mell --json 1.json        # some arms, in this order
    python benchmarks/packed_live.py --pieces 1.json 2.json... --json OUT   # runs nothing: several files together

`jettison serve` with four workers of one thread each and a random Qwen3 of 6M parameters in float64. Arrivals: Azure
2023 code from ``--from-s`` on, times divided by ``--compress``; lengths: Azure 2023 conv, in its order (CC-BY 4.0,
Patel et al., ISCA 2024), outputs times ``--output-scale``, prompts times ``--prompt-scale``, so that requests decode
for seconds and grow. An instance that decodes takes one of the machine's cores, however few requests it has: so memory
can bind below 60 % of the cores only where arrivals come in waves, as code's do (conv's, thinned this far, are
Poisson). ``--plan`` keeps so few arrivals that ``none`` keeps the cores at most 60 % busy, in a replay that it makes.

Arms, a fresh server each: ``none`` (all four awake), ``mell``, ``best-fit``, ``worst-fit``, ``load-balance`` with
``--sleep auto --sleep-after-s 2 --min-awake 1``; ``mell-kv`` and ``mell-tokens`` as ``mell`` with moves of one kind;
and ``still``: ``mell`` with an epoch that never comes, so newcomers are placed as it wants and nobody who decodes is
moved. Epochs are a quarter of a second: requests decode several times as fast here as on the papers' devices.

Measured: processor time of the server, its workers and the client (psutil) over that of all cores; instances awake and
instances with KV of some request, every quarter of a second; times at the client. Judged, for each arm: no failed
stream; each answer equal, token for token, to that of ``jettison batch run``; P99 TPOT of those who were there during
moves over that of the same requests under ``none``; and during moves no gap between two tokens longer than two steps
and the measured stop of the request's own move. A step here is the longest that an instance of the request ran in that
gap by the server's time line, and at least what a token takes (P99) in this run while nobody moves: beside the step
itself that is the scheduler's, the server's and the client's time on cores that all of them share. Longer gaps during
moves are listed with what the server tells of that moment; those at other times are counted, as ``none``'s are. Who was
evicted waits for memory and is computed again, which is no move: as many of its longest gaps are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from evidence import LIVE, write_result
from real_traces import data_dir
from rich.console import Console
from rich.table import Table
from token_times import POLL_S, TimeLine, latencies, moved, replay

from jettison.demo.burst import DemoModel, make_setup
from jettison.live.experiments.overload import ExperimentSetup
from jettison.live.experiments.server_process import ServerProcess, flag_arguments
from jettison.workload import shaping
from jettison.workload.prompts import PromptMaker
from jettison.workload.traces import Workload, read_trace

INSTANCES = 4
MODEL = DemoModel(layers=8, hidden=256, heads=4, kv_heads=1, context=1024, kv_tokens_per_instance=1536)
SLEEPS: dict[str, object] = {"sleep": "auto", "sleep_after_s": 2, "min_awake": 1}
PACKED: dict[str, object] = {"packing": "mell", "packing_epoch_s": 0.25} | SLEEPS
ARMS: dict[str, dict[str, object]] = {
    "none": {}, "mell": PACKED, "best-fit": PACKED | {"packing": "best-fit"},
    "worst-fit": PACKED | {"packing": "worst-fit"}, "load-balance": PACKED | {"packing": "load-balance"},
    "mell-kv": PACKED | {"packing_moves": "kv"}, "mell-tokens": PACKED | {"packing_moves": "tokens"},
    "still": PACKED | {"packing_epoch_s": 86400},
}
MOST_BUSY = 0.6
MOST_TPOT_RATIO = 1.5
PILOTS = 3

JETTISON = (sys.executable, "-m", "jettison")


# --- the load


def slice_of_trace(args: argparse.Namespace, keep: float) -> Workload:
    """Arrivals and lengths, from time 0 on."""
    folder = data_dir(args.data)
    code = read_trace(folder / "AzureLLMInferenceTrace_code.csv.gz")
    conv = read_trace(folder / "AzureLLMInferenceTrace_conv.csv.gz")
    load = shaping.window(code, args.from_s, args.from_s + args.seconds * args.compress)
    load = shaping.scale_time(shaping.swap_lengths(load, conv), args.compress)
    load = shaping.scale_lengths(load, args.output_scale, floor_tokens=8, input_factor=args.prompt_scale)
    load = shaping.cap_lengths(load, MODEL.context)
    return shaping.thin_by_probability(load, keep, seed=0)


def bodies(load: Workload, model: str) -> list[dict[str, Any]]:
    """Of the requests, as the API takes them."""
    prompts = PromptMaker(seed=25)
    return [
        {"model": model, "prompt": prompts.token_ids(index, row.input_tokens), "max_tokens": row.output_tokens,
         "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        for index, row in enumerate(load.rows)
    ]  # fmt: skip


def right_answers(setup: ExperimentSetup, load: Workload) -> list[list[int]]:
    """Of every request, computed without a server, by one instance."""
    lines = [
        {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}
        for index, body in enumerate(bodies(load, setup.model_dir.name))
    ]
    alone = replace(setup, instances=1)
    with tempfile.TemporaryDirectory(dir=setup.work_dir) as folder:
        path, out = Path(folder) / "lines.jsonl", Path(folder) / "answers.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        command = [*JETTISON, "batch", "run", str(path), str(setup.model_dir), "-o", str(out)]
        subprocess.run([*command, *flag_arguments(alone.flags())], check=True, stdout=subprocess.DEVNULL)
        answers = [json.loads(line) for line in out.read_bytes().splitlines()]
    found = {int(each["custom_id"]): each["response"]["body"]["choices"][0]["token_ids"] for each in answers}
    return [found[index] for index in range(len(lines))]


# --- the machine


@dataclass(frozen=True)
class Processors:
    """Processor seconds of a server with its workers, and of this process, up to a moment."""

    ours_s: float
    all_s: float
    """Of all that ran on the machine."""
    at_s: float

    @classmethod
    def now(cls, pid: int) -> Processors:
        """At this moment. Raises psutil.NoSuchProcess."""
        server = psutil.Process(pid)
        times = [p.cpu_times() for p in (server, *server.children(recursive=True), psutil.Process())]
        whole = psutil.cpu_times()
        busy_s = sum(whole) - whole.idle - getattr(whole, "iowait", 0.0) - getattr(whole, "guest", 0.0)
        return cls(sum(t.user + t.system for t in times), busy_s, time.monotonic())

    def until(self, later: Processors) -> tuple[float, float]:
        """Shares of all cores: (ours, of others)."""
        whole_s = (later.at_s - self.at_s) * (os.cpu_count() or 1)
        ours = (later.ours_s - self.ours_s) / whole_s
        return ours, max(0.0, (later.all_s - self.all_s) / whole_s - ours)


# --- one arm


def serve(arm: str, setup: ExperimentSetup, load: Workload, right: Sequence[list[int]], number: int) -> dict[str, Any]:
    """A fresh server of one arm meets the load; its row."""
    path = setup.work_dir / f"timeline-{arm}-{number}.json"
    path.unlink(missing_ok=True)
    flags = setup.flags() | ARMS[arm] | {"timeline": path}
    requests = bodies(load, setup.model_dir.name)
    with ServerProcess(setup.model_dir, flags, setup.work_dir / f"server-{arm}.log") as server:
        before = Processors.now(server.pid)
        answers, scrapes = asyncio.run(replay(server.url, load, requests, 60.0 + 2 * load.duration_s))
        busy, others = before.until(Processors.now(server.pid))
    failed = [answer.error for answer in answers if answer.error or not answer.at_s]
    row: dict[str, Any] = {"arm": arm, "round": number, "requests": len(answers), "failed": len(failed)}
    if failed:
        return row | {"first_error": failed[0]}
    line = TimeLine.read(path)
    line.name(answers)
    gauges, counts = scrapes.read()
    awake = [each["devices_awake"] for each in gauges]
    used = [sum(v > 0 for name, v in each.items() if name.startswith("kv_blocks_used/")) for each in gauges]
    return row | latencies(answers, line) | moved(answers, line) | {
        "mismatches": sum(a.token_ids != tokens for a, tokens in zip(answers, right, strict=True)),
        "tokens": sum(len(a.token_ids) for a in answers), "busy": busy, "others_busy": others,
        "seconds": max(a.at_s[-1] for a in answers) - answers[0].due_s,
        "awake_mean": float(np.mean(awake)), "awake_peak": max(awake), "awake": awake,
        "used_mean": float(np.mean(used)), "used_peak": max(used), "used": used,
        "queued": counts.get("packing_queued", 0), "recomputed": counts.get("packing_recomputed", 0),
        "evictions": counts.get("preemptions", 0), "sleeps": counts.get("sleeps", 0), "wakes": counts.get("wakes", 0),
    }  # fmt: skip


# --- figures


def tpot_ratio(row: dict[str, Any], base: dict[str, Any]) -> float | None:
    """P99 TPOT of those who were there during moves, over that of the same requests in another arm of the round."""
    who = row.get("during_moves")
    if not who or "tpot_ms" not in base:
        return None
    here, there = (float(np.percentile([each["tpot_ms"][i] for i in who], 99)) for each in (row, base))
    return here / there


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows, each with its ratios over ``none`` and ``still`` of its round."""
    by_name = {(row["round"], row["arm"]): row for row in rows}
    bases = ("none", "still")
    return [
        row | {f"tpot_over_{base}": tpot_ratio(row, by_name.get((row["round"], base), {})) for base in bases}
        for row in rows
    ]


def judge(rows: Sequence[dict[str, Any]]) -> list[tuple[bool, str]]:
    """What has to hold, and whether it does."""
    failed = sum(row["failed"] for row in rows)
    wrong, tokens = (sum(row.get(name, 0) for row in rows) for name in ("mismatches", "tokens"))
    verdicts = [
        (failed == 0, f"{failed} of {sum(row['requests'] for row in rows)} streams failed"),
        (wrong == 0 and tokens > 0, f"{wrong} answers differ from those of a batch run, {tokens:,} tokens"),
    ]
    busy = [row["busy"] for row in rows if row["arm"] == "none" and "busy" in row]
    if busy:
        verdicts.append((max(busy) <= MOST_BUSY, f"none: {max(busy):.0%} of the cores, at most {MOST_BUSY:.0%}"))
    for row in with_ratios(rows):
        if (ratio := row["tpot_over_none"]) is not None and row["arm"] != "none":
            text = f"{row['arm']}, round {row['round']}: P99 TPOT during moves {ratio:.2f} of none's, at most "
            verdicts.append((ratio <= MOST_TPOT_RATIO, text + str(MOST_TPOT_RATIO)))
    for row in rows:
        if "long_gaps" in row and row["arm"] != "none":
            text = f"{row['arm']}, round {row['round']}: {len(row['long_gaps'])} gaps above two steps and the stop"
            verdicts.append((not row["long_gaps"], f"{text} during moves, not evicted"))
    return verdicts


COLUMNS = {
    "arm": "arm", "round": "round", "busy": "cores", "awake_mean": "awake", "awake_peak": "most", "used_mean": "used",
    "used_peak": "most", "moves_kv": "kv", "moves_tokens": "tokens", "queued": "queued", "recomputed": "recomp.",
    "evictions": "evict.", "sleeps": "sleeps", "ttft_p50_ms": "TTFT P50", "ttft_p99_ms": "P99",
    "tpot_p50_ms": "TPOT P50", "tpot_p99_ms": "P99", "itl_p50_ms": "ITL P50", "itl_p99_ms": "P99", "itl_max_ms": "max",
    "evicted_gaps": "evicted", "other_long_gaps": "long gaps",
    "tpot_over_none": "in moves/none", "tpot_over_still": "/still", "failed": "failed", "mismatches": "wrong",
}  # fmt: skip


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """A line an arm, who was awake and used over time, long gaps, verdicts."""
    table = Table(title="Four instances (times in ms)")
    for title in COLUMNS.values():
        table.add_column(title, justify="right")
    for row in with_ratios(rows):
        table.add_row(*(_text(row.get(name)) for name in COLUMNS))
    console.print(table)
    every = round(2.0 / POLL_S)
    for row in rows:
        for what in ("awake", "used"):
            seen = "".join(f"{max(row[what][i : i + every]):.0f}" for i in range(0, len(row.get(what, ())), every))
            console.print(f"{row['arm']:>12} {what}, most of every 2 s: {seen}", markup=False, highlight=False)
    for row in rows:
        for gap in sorted(row.get("long_gaps", ()), key=lambda gap: gap["at_s"]):
            text = f"{row['arm']}: request {gap['request']} at {gap['at_s']:.1f} s waited {gap['gap_ms']:.0f} ms"
            text += f", longest step {gap['step_ms']:.0f}, stop {gap['stop_ms']:.0f}: "
            console.print(text + ("; ".join(gap["told"]) or "nothing told"), markup=False, highlight=False)
    for is_met, text in judge(rows):
        console.print(f"{'met' if is_met else 'MISSED'}: {text}", markup=False, highlight=False)


def _text(value: object) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def read_pieces(files: Sequence[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of several files of this script, and their evidence. Raises ValueError where load or sources differ,
    or an arm is there twice."""
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for name, of in (("plan", lambda d: d["plan"]), ("sources", lambda d: d["evidence"]["rooms"])):
        if any(of(each) != of(documents[0]) for each in documents):
            raise ValueError(f"the pieces differ in their {name}")
    rows = [row for document in documents for row in document["rows"]]
    if len({(row["round"], row["arm"]) for row in rows}) != len(rows):
        raise ValueError("an arm of a round is there twice")
    rows.sort(key=lambda row: (row["round"], list(ARMS).index(row["arm"])))
    return {"plan": documents[0]["plan"], "rows": rows}, documents[-1]["evidence"]


# --- running


def setup_in(work: Path) -> ExperimentSetup:
    """The deployment; model folder and profile are made where they are missing."""
    model_dir = work / "model"
    if not model_dir.is_dir():
        make_setup(work, 0, MODEL)
    setup = ExperimentSetup(
        model_dir, work, MODEL.kv_tokens_per_instance, instances=INSTANCES, dtype="float64", max_num_seqs=128,
        extra_flags={"num_threads": 1, "overload": "recompute"},
    )
    if not [*model_dir.glob("jettison-profile-*")]:
        command = [*JETTISON, "profile", str(model_dir), "--quick"]
        subprocess.run([*command, *flag_arguments(setup.flags())], check=True, stdout=subprocess.DEVNULL)
    return setup


def make_plan(args: argparse.Namespace, console: Console) -> None:
    """Thin the arrivals until ``none`` keeps the cores within bounds; keep the load's figures and the right answers."""
    setup = setup_in(args.work)
    keep, notes = args.keep, []
    for turn in range(PILOTS):
        load = slice_of_trace(args, keep)
        right = right_answers(setup, load)
        row = serve("none", setup, load, right, turn)
        if row["failed"]:
            raise SystemExit(f"the pilot failed: {row['first_error']}")
        notes.append(f"{len(load.rows)} requests, kept {keep:.3f}: {row['busy']:.2f} of the cores")
        console.print(notes[-1])
        if row["busy"] <= MOST_BUSY:
            break
        keep *= 0.92 * MOST_BUSY / row["busy"]
    else:
        raise SystemExit(f"the cores are busier than {MOST_BUSY:.0%} still")
    wanted = ("from_s", "seconds", "compress", "output_scale", "prompt_scale")
    plan = {name: getattr(args, name) for name in wanted} | {
        "keep": keep, "pilots": notes, "requests": len(load.rows), "notes": list(load.notes),
        "kv_tokens_per_instance": setup.capacity_tokens() / INSTANCES, "parameter_share": setup.parameter_share(),
        "output_tokens": sum(row.output_tokens for row in load.rows),
    }  # fmt: skip
    (args.work / "plan.json").write_text(json.dumps({"plan": plan, "right": right}), encoding="utf-8")


def run_arms(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The arms that were asked for, in that order."""
    kept = json.loads((args.work / "plan.json").read_text(encoding="utf-8"))
    plan = kept["plan"]
    load = slice_of_trace(argparse.Namespace(**(vars(args) | plan)), plan["keep"])
    setup = setup_in(args.work)
    rows: list[dict[str, Any]] = []
    for arm in args.arms:
        rows.append(serve(arm, setup, load, kept["right"], args.round))
        console.print({name: _text(value) for name, value in rows[-1].items() if not isinstance(value, list)})
        if args.json:
            write_result(args.json, {"plan": plan, "rows": rows}, *LIVE)
    return {"plan": plan, "rows": rows}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder of the model, the plan, logs and time lines")
    parser.add_argument("--plan", action="store_true", help="make these, and end; a profile that is there stays")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--round", type=int, default=0, help="its number: arms are compared within a round")
    parser.add_argument("--pieces", type=Path, nargs="+", metavar="FILE", help="show these files together")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--from-s", type=float, default=170.0, help="of the trace")
    parser.add_argument("--seconds", type=float, default=40.0, help="of the replay")
    parser.add_argument("--compress", type=float, default=15.0)
    parser.add_argument("--keep", type=float, default=0.0135, help="of the arrivals, at most")
    parser.add_argument("--output-scale", type=float, default=2.0)
    parser.add_argument("--prompt-scale", type=float, default=0.1)
    args = parser.parse_args()
    console = Console(width=260)
    if args.pieces:
        document, evidence = read_pieces(args.pieces)
        if args.json:
            args.json.write_text(json.dumps(document | {"evidence": evidence}, indent=1) + "\n", encoding="utf-8")
        show(document["rows"], console)
        return 0
    if args.work is None:
        parser.error("--work DIR is needed to run")
    args.work.mkdir(parents=True, exist_ok=True)
    if args.plan:
        make_plan(args, console)
        return 0
    show(run_arms(args, console)["rows"], console)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Instances on the CPU under each packing: which are awake, which requests move, and what moves cost others.

    python -m benchmarks packing live --work DIR --plan                    # once: model, profile, load, right answers
    python -m benchmarks packing live --work DIR --arms none mell --json 1.json     # some arms, in this order
    python -m benchmarks packing live --pieces 1.json 2.json... --json OUT          # runs nothing: files together
    python -m benchmarks packing live --work DIR --shape twelve --plan       # the same with twelve tiny instances

`jettison serve` with four workers of one thread each and a random Qwen3 of 6M parameters in float64. Arrivals: Azure
2023 code from ``--from-s`` on, times divided by ``--compress``; lengths: Azure 2023 conv, in its order (CC-BY 4.0,
Patel et al., ISCA 2024), outputs times ``--output-scale``, prompts times ``--prompt-scale``, so that requests decode
for seconds and grow. An instance that decodes takes one of the machine's cores, however few requests it has: so memory
can bind below 60 % of the cores only where arrivals come in waves, as code's do (conv's, thinned this far, are
Poisson). ``--plan`` keeps so few arrivals that ``none`` keeps the cores at most 60 % busy, in a replay that it makes.

Arms, a fresh server each: ``none`` (all four awake), ``mell``, ``best-fit``, ``worst-fit``, ``load-balance`` with
``--sleep auto --sleep-after-s 2 --min-awake 1``; ``mell-kv`` and ``mell-tokens`` as ``mell`` with moves of one kind;
and ``still``: ``mell`` with an epoch that never comes, so newcomers are placed as it wants and nobody who decodes is
moved. Epochs are a tenth of a second: requests decode several times as fast here as on the papers' devices.

``--shape twelve``: twelve instances of a tiny model and ``--requests`` requests of an eighth of an instance to all of
it, in waves; ``--plan`` looks for a rate at which ``none`` fills 0.15 to 0.3 of all memory. Judged besides: instances
in use at equal evictions (``best-fit-roomy`` and its like leave half of the memory free, and evict less), P99 TTFT
over that of ``none``. ``still`` places and sleeps without moves, ``awake`` moves without sleep. ``--step-ms``: a step
lasts so long at least, its core free for others, as on a device of its own. Without it instances that share cores are
slow while many are in use, requests stay longer then, and more instances are in use.

Measured: processor time of the server, its workers and the client (psutil) over that of all cores; instances awake and
instances with KV of some request, every quarter of a second; times at the client. Judged, for each arm: no failed
stream; each answer equal, token for token, to that of ``jettison batch run``; P99 TPOT of the requests that were there
during moves over that of the same requests under ``none``; and during moves no gap between two tokens longer than two
steps and the measured stop of the request's own move. A step here is the longest that an instance of the request ran
in that gap by the server's time line, and at least what a token takes (P99) in this run while no request moves: beside
the step itself that is the scheduler's, the server's and the client's time on cores that all of them share. Longer gaps
during moves are listed with what the server tells of that moment; those at other times are counted, as ``none``'s are.
A request that was evicted waits for memory and is computed again, which is no move: as many of its longest gaps are
counted apart.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil

from benchmarks.packing.shapes import SHAPES, Shape, judge_devices, sized_load
from benchmarks.packing.token_times import TimeLine, latencies, moved, replay
from benchmarks.servers import ServerProcess, answers_alone, batch_lines, completion, profiled
from benchmarks.shared import LIVE, Namespace, Row, data_dir, keep, parse, print_rows, print_verdicts, read_pieces, say
from jettison.demo.burst import make_setup
from jettison.live.experiments.overload import ExperimentSetup
from jettison.workload import shaping
from jettison.workload.prompts import PromptMaker
from jettison.workload.traces import Workload, read_trace

SLEEPS: dict[str, object] = {"sleep": "auto", "sleep_after_s": 2, "min_awake": 1}
EPOCH: dict[str, object] = {"packing_epoch_s": 0.1, "packing_head_room": 0.0}
"""Of all packings: a request here takes a sixth of an instance in a second. Memory is left free for growth alone."""
PACKED: dict[str, object] = {"packing": "mell"} | EPOCH | SLEEPS
ROOMY = 0.5
"""Share of an instance's memory that the roomy arms leave free: best-fit evicts a third less then."""
ARMS: dict[str, dict[str, object]] = {
    "none": {}, "mell": PACKED, "best-fit": PACKED | {"packing": "best-fit"},
    "worst-fit": PACKED | {"packing": "worst-fit"}, "load-balance": PACKED | {"packing": "load-balance"},
    "mell-kv": PACKED | {"packing_moves": "kv"}, "mell-tokens": PACKED | {"packing_moves": "tokens"},
    "still": PACKED | {"packing_epoch_s": 86400},
    "awake": {"packing": "mell", "packing_saves": "idle"} | EPOCH,
    "mell-few": PACKED | {"packing_gather": "close"},
} | {
    f"{name}-roomy": PACKED | {"packing": name, "packing_head_room": ROOMY}
    for name in ("best-fit", "worst-fit", "load-balance")
}
MOST_BUSY = SHAPES["four"].most_busy
MOST_TPOT_RATIO = 1.5
PILOTS = 3

# --- the load


def load_of(args: Namespace, keep: float) -> Workload:
    """Arrivals and lengths, from time 0 on; ``keep``: part of the trace's arrivals, or of ``--rate``."""
    shape = SHAPES[args.shape]
    if args.shape == "twelve":
        return sized_load(args.requests, args.rate * keep, shape.model.kv_tokens_per_instance, args.seed)
    return slice_of_trace(args, keep)


def slice_of_trace(args: Namespace, keep: float) -> Workload:
    """Arrivals and lengths of the trace, from time 0 on."""
    folder = data_dir(args.data)
    code = read_trace(folder / "AzureLLMInferenceTrace_code.csv.gz")
    conv = read_trace(folder / "AzureLLMInferenceTrace_conv.csv.gz")
    load = shaping.window(code, args.from_s, args.from_s + args.seconds * args.compress)
    load = shaping.scale_time(shaping.swap_lengths(load, conv), args.compress)
    load = shaping.scale_lengths(load, args.output_scale, floor_tokens=8, input_factor=args.prompt_scale)
    load = shaping.cap_lengths(load, SHAPES[args.shape].model.context)
    return shaping.thin_by_probability(load, keep, seed=0)


def bodies(load: Workload, model: str) -> list[Row]:
    """Of the requests, as the API takes them."""
    prompts = PromptMaker(seed=25)
    return [completion(model, prompts.token_ids(index, row.input_tokens), row.output_tokens)
            for index, row in enumerate(load.rows)]  # fmt: skip


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


def serve(arm: str, setup: ExperimentSetup, load: Workload, right: Sequence[list[int]], number: int) -> Row:
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
    row: Row = {"arm": arm, "round": number, "requests": len(answers), "failed": len(failed)}
    if failed:
        return row | {"first_error": failed[0]}
    line = TimeLine.read(path)
    line.name(answers)
    gauges, counts = scrapes.read()
    awake = [each["devices_awake"] for each in gauges]
    held = [sum(v for name, v in each.items() if name.startswith("kv_blocks_used/")) for each in gauges]
    total = max(sum(v for name, v in each.items() if name.startswith("kv_blocks_total/")) for each in gauges)
    used = [sum(v > 0 for name, v in each.items() if name.startswith("kv_blocks_used/")) for each in gauges]
    return row | latencies(answers, line) | moved(answers, line) | {
        "mismatches": sum(a.token_ids != tokens for a, tokens in zip(answers, right, strict=True)),
        "tokens": sum(len(a.token_ids) for a in answers), "busy": busy, "others_busy": others,
        "seconds": max(a.at_s[-1] for a in answers) - answers[0].due_s, "awake_mean": float(np.mean(awake)),
        "awake_peak": max(awake), "awake": awake, "used_mean": float(np.mean(used)), "used_peak": max(used),
        "used": used, "memory": float(np.mean(held)) / total if total else None,
        "queued": counts.get("packing_queued", 0), "recomputed": counts.get("packing_recomputed", 0),
        "evictions": counts.get("preemptions", 0), "sleeps": counts.get("sleeps", 0), "wakes": counts.get("wakes", 0),
    }  # fmt: skip


# --- figures


def tpot_ratio(row: Row, base: Row) -> float | None:
    """P99 TPOT of those who were there during moves, over that of the same requests in another arm of the round."""
    who = row.get("during_moves")
    if not who or "tpot_ms" not in base:
        return None
    here, there = (float(np.percentile([each["tpot_ms"][i] for i in who], 99)) for each in (row, base))
    return here / there


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows, each with its ratios over ``none`` and ``still`` of its round."""
    by_name = {(row["round"], row["arm"]): row for row in rows}
    bases = ("none", "still")
    return [
        row | {f"tpot_over_{base}": tpot_ratio(row, by_name.get((row["round"], base), {})) for base in bases}
        for row in rows
    ]


def judge(rows: Sequence[Row], most_busy: float | None = MOST_BUSY) -> list[tuple[bool, str]]:
    """What has to hold, and whether it does. ``most_busy``: part of the cores that ``none`` may keep busy; None: any,
    and times of single tokens are not judged."""
    failed = sum(row["failed"] for row in rows)
    wrong, tokens = (sum(row.get(name, 0) for row in rows) for name in ("mismatches", "tokens"))
    verdicts = [
        (failed == 0, f"{failed} of {sum(row['requests'] for row in rows)} streams failed"),
        (wrong == 0 and tokens > 0, f"{wrong} answers differ from those of a batch run, {tokens:,} tokens"),
    ]
    busy = [row["busy"] for row in rows if row["arm"] == "none" and "busy" in row]
    if most_busy is None:
        return verdicts
    if busy:
        verdicts.append((max(busy) <= most_busy, f"none: {max(busy):.0%} of the cores, at most {most_busy:.0%}"))
    for row in with_ratios(rows):
        if (ratio := row["tpot_over_none"]) is not None and row["arm"] != "none":
            text = f"{row['arm']}, round {row['round']}: P99 TPOT during moves {ratio:.2f} of none's, at most "
            verdicts.append((ratio <= MOST_TPOT_RATIO, text + str(MOST_TPOT_RATIO)))
    for row in rows:
        if "long_gaps" in row and row["arm"] != "none":
            text = f"{row['arm']}, round {row['round']}: {len(row['long_gaps'])} gaps above two steps and the stop"
            verdicts.append((not row["long_gaps"], f"{text} during moves, not evicted"))
    return verdicts


# --- running


@contextmanager
def paced(step_ms: float) -> Iterator[None]:
    """Processes that start inside take at least this long for a step (``paced/sitecustomize.py``)."""
    folder = str(Path(__file__).with_name("paced"))
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    with patch.dict(os.environ, {"JETTISON_BENCH_STEP_MS": str(step_ms), "PYTHONPATH": path} if step_ms else {}):
        yield


def setup_in(work: Path, shape: Shape, step_ms: float) -> ExperimentSetup:
    """The deployment; model folder and profile are made where they are missing."""
    model_dir = work / "model"
    if not model_dir.is_dir():
        make_setup(work, 0, shape.model)
    setup = ExperimentSetup(
        model_dir, work, shape.model.kv_tokens_per_instance, instances=shape.instances, dtype="float64",
        max_num_seqs=128, extra_flags={"num_threads": 1, "overload": "recompute"},
    )
    if not [*model_dir.glob("jettison-profile-*")]:
        with paced(step_ms):
            profiled(setup)
    return setup


def make_plan(args: Namespace) -> None:
    """Thin the arrivals until ``none`` keeps the cores, or memory, within bounds; keep the load's figures and the right
    answers."""
    shape = SHAPES[args.shape]
    setup = setup_in(args.work, shape, args.step_ms)
    keep, notes = (args.keep if args.shape == "four" else 1.0), []
    for turn in range(PILOTS):
        load = load_of(args, keep)
        found = answers_alone(replace(setup, instances=1), batch_lines(bodies(load, setup.model_dir.name)))
        right = [found[index] for index in range(len(load.rows))]
        with paced(args.step_ms):
            row = serve("none", setup, load, right, turn)
        if row["failed"]:
            raise SystemExit(f"the pilot failed: {row['first_error']}")
        notes.append(
            f"{len(load.rows)} requests, kept {keep:.3f}: {row['busy']:.2f} of the cores, {row['memory']:.2f} of memory"
        )
        say(notes[-1])
        if (factor := factor_to(shape, row)) is None:
            break
        keep *= factor
    else:
        raise SystemExit("the load is not within bounds still: give another --keep or --rate")
    wanted = (
        "shape", "from_s", "seconds", "compress", "output_scale", "prompt_scale", "requests", "rate", "seed", "step_ms"
    )  # fmt: skip
    plan = {name: getattr(args, name) for name in wanted} | {
        "keep": keep, "pilots": notes, "requests": len(load.rows), "notes": list(load.notes),
        "kv_tokens_per_instance": setup.capacity_tokens() / shape.instances, "parameter_share": setup.parameter_share(),
        "output_tokens": sum(row.output_tokens for row in load.rows),
    }  # fmt: skip
    (args.work / "plan.json").write_text(json.dumps({"plan": plan, "right": right}), encoding="utf-8")


def factor_to(shape: Shape, row: Row) -> float | None:
    """By what a load has to be multiplied after this pilot; None: it is within the shape's bounds."""
    if shape.most_busy is not None and row["busy"] > shape.most_busy:
        return float(0.92 * shape.most_busy / row["busy"])
    if shape.memory is None or shape.memory[0] <= row["memory"] <= shape.memory[1]:
        return None
    # Requests stay longer the more of them there are, so memory follows the rate by more than its ratio.
    return float((sum(shape.memory) / 2 / max(0.01, row["memory"])) ** 0.5)


COLUMNS = (
    "arm", "round", "busy", "memory", "awake_mean", "awake_peak", "used_mean", "used_peak", "moves_kv", "moves_tokens",
    "queued", "recomputed", "evictions", "sleeps", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms",
    "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "evicted_gaps", "other_long_gaps", "tpot_over_none", "tpot_over_still",
    "failed", "mismatches",
)  # fmt: skip


def main() -> None:
    args = parse(
        __doc__, work=(Path, "folder of the model, the plan, logs and time lines"),
        plan=(False, "make these, and end; a profile that is there stays"), arms=([*ARMS], {"choices": list(ARMS)}),
        round=(0, "its number: arms are compared within a round"),
        pieces=(Path, "show these files together", {"nargs": "+"}), data=Path, from_s=(170.0, "of the trace"),
        seconds=(40.0, "of the replay"), compress=15.0, keep=(0.0135, "of the arrivals, at most"), output_scale=2.0,
        prompt_scale=0.1, shape=("four", {"choices": list(SHAPES)}), requests=(520, "twelve: how many"),
        rate=(5.5, "twelve: requests a second, in the first pilot"), seed=(0, "twelve: of the load"),
        step_ms=(0.0, "a step takes this at least, as on a device of its own"),
    )  # fmt: skip
    if args.pieces:
        document = read_pieces(args.pieces, lambda row: (row["round"], list(ARMS).index(row["arm"])), ("plan",))
        keep(args.json, document, *document["evidence"]["rooms"])
    elif args.work is None:
        raise SystemExit("--work DIR is needed to run")
    else:
        args.work.mkdir(parents=True, exist_ok=True)
        if args.plan:
            return make_plan(args)
        kept = json.loads((args.work / "plan.json").read_text(encoding="utf-8"))
        document = {"plan": kept["plan"], "rows": []}
        planned = Namespace(**(vars(args) | kept["plan"]))
        load = load_of(planned, kept["plan"]["keep"])
        setup = setup_in(args.work, SHAPES[planned.shape], planned.step_ms)
        for arm in args.arms:
            with paced(planned.step_ms):
                document["rows"].append(serve(arm, setup, load, kept["right"], args.round))
            keep(args.json, document, *LIVE)
    print_rows(with_ratios(document["rows"]), COLUMNS, "times in ms")
    shape = SHAPES[document["plan"].get("shape", "four")]
    if shape.most_busy is not None:
        gaps = [gap | {"arm": row["arm"]} for row in document["rows"] for gap in row.get("long_gaps", ())]
        print_rows(gaps, ("arm", "request", "at_s", "gap_ms", "step_ms", "stop_ms", "told"))
    judged = judge_devices(document["rows"]) if shape.memory is not None else []
    print_verdicts(judge(document["rows"], shape.most_busy) + judged)
    return None

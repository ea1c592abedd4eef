"""A burst that makes instances drop, with and without a batch beside it: what the batch costs the online requests.

    python -m benchmarks chat burst [--seeds 10] [--first-seed 0] [--json OUT] [--kept DIR] [--work DIR]
    python -m benchmarks chat burst --pieces FILE...    # runs nothing: the seeds of several files together

A random Qwen3 of 2.6M parameters in float64, profiled first, and the first half of the demo's burst, calibrated to the
machine at every seed. Each seed meets three fresh servers with ``--overload drop --offline harvest``, in turns: the
burst alone, the same burst alone again (the noise), and beside a batch. The batch is a file at the server's Batches
API, of prompts of about 300 tokens, and as large as the machine alone would compute in most of the burst's time. It is
in progress when the first online request comes, and is to end after the last. Its answers are compared, token for
token, with those of ``jettison batch run`` on the same file: in float64 on the CPU no batch, chunk or split changes a
token.

Judged: the median of P99 TTFT beside the batch over P99 TTFT alone is at most 1.25; every batch ends, exactly; and each
of what was to be shown has been there: drops, checkpoints that were freed, and tokens of the batch. ``--kept DIR``
keeps the runs of a seed whose ratio is above 2, with all events and series, for ``jettison explain``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks.evidence import LIVE
from benchmarks.servers import Batch, answers_alone, batch_lines, completion, profiled
from benchmarks.shared import Row, in_turn, keep, parse, print_block, print_verdicts, read_pieces, say, work_folder
from jettison.cost.speed import MachineSpeed
from jettison.demo.burst import DemoModel, demo_workload, make_setup, plan_load
from jettison.live.experiments.overload import ExperimentSetup, measure_speed, run_policy
from jettison.report.failures import exit_if_unanswered
from jettison.report.results import RunResult, write_results
from jettison.workload.lengths import Lengths, LogNormalPair
from jettison.workload.pool import OfflinePool
from jettison.workload.prompts import PromptMaker
from jettison.workload.shaping import scale_time
from jettison.workload.synthetic import preset
from jettison.workload.traces import Workload

MODEL = DemoModel(layers=6, hidden=256, heads=4, kv_heads=1)
ARMS = ("alone", "again", "beside")
MOST_RATIO = 1.25
LOOKED_INTO = 2.0
"""A seed with a larger ratio is explained, and its runs are kept."""
WHOLE = preset("burst")
BURST = replace(WHOLE, duration_s=WHOLE.duration_s / 2, bursts=WHOLE.bursts[:1])
FLAGS: dict[str, object] = {"offline": "harvest"}
BATCH_LENGTHS = LogNormalPair(Lengths(300, 0.3, 600), Lengths(32, 0.4, 128))
BATCH_SEED = 24
BATCH_SHARE = 0.7
"""Of the time that the burst takes: what the batch would take alone, by the measured speed."""
MOST_BATCH_S = 180.0
"""From the last online answer: a batch that has not ended by then does not end."""
COUNTED = {
    "drops": "drops", "pauses": "offline_pauses", "frees": "checkpoint_frees", "discards": "offline_discards",
    "abandoned": "steps_abandoned", "returned blocks": "prefetched_blocks", "restores": "restores",
}  # fmt: skip
"""Columns, and the engine's counters behind them."""
SHOWN = ("drops", "frees", "batch tokens")
"""Without these a run says nothing."""
Met = tuple[dict[str, RunResult], Row]
"""Runs by arm, and what became of the batch."""


@dataclass(frozen=True, slots=True)
class Seed:
    """What all arms of a seed meet."""

    number: int
    load: Workload
    num_lines: int
    rate_scale: float


# --- the batch


def lines_for(seconds: float, speed: MachineSpeed, num_instances: int) -> int:
    """How many the machine would compute alone in this time."""
    prompt, output = BATCH_LENGTHS.prompt.median, BATCH_LENGTHS.output.median
    line_s = prompt / speed.prefill_tokens_per_s + output * speed.decode_per_request_s
    return max(1, round(seconds * num_instances / line_s))


def serve(setup: ExperimentSetup, seed: Seed, lines: bytes, alone: dict[int, list[int]]) -> Met:
    """All arms, the first another one at every seed; and how the batch ended."""
    runs: dict[str, RunResult] = {}
    told: Row = {"lines": seed.num_lines}

    @contextmanager
    def begin(url: str) -> Iterator[None]:
        """In progress inside; it ends after the last online answer."""
        batch = Batch(url, lines)
        batch.wait(lambda status: status != "validating", MOST_BATCH_S)
        yield
        began_s = time.monotonic()
        status = batch.wait(lambda status: status in Batch.ENDED, MOST_BATCH_S)
        told.update({"batch": status, "batch last s": time.monotonic() - began_s})
        answers = batch.answers()
        told.update({"compared tokens": sum(map(len, answers.values())),
                     "mismatches": sum(answers.get(line) != tokens for line, tokens in alone.items())})  # fmt: skip

    for arm in in_turn(ARMS, seed.number):
        fresh = replace(setup, extra_flags=setup.extra_flags | {"batch_dir": setup.work_dir / f"{seed.number}-{arm}"})
        name = f"seed {seed.number}: {arm}"
        more: Row = {"beside": begin} if arm == "beside" else {}
        runs[arm] = run_policy(fresh, "drop", seed.load, name=name, seed=seed.number, **more)
    return runs, told


# --- figures


def row_of(seed: Seed, runs: dict[str, RunResult], batch: Row) -> Row:
    """The figures that count."""
    p99 = {arm: run.ttft_s.p99 or 0.0 for arm, run in runs.items()}
    events = runs["beside"].events
    return {
        "seed": seed.number, "requests": len(seed.load.rows), "rate scale": seed.rate_scale,
        "failed": sum(run.requests.unanswered for run in runs.values()), **{f"{arm} P99 s": p99[arm] for arm in ARMS},
        "ratio": p99["beside"] / p99["alone"], "noise": p99["again"] / p99["alone"],
        **{f"{arm} first drop s": first_drop_s(run) for arm, run in runs.items() if arm != "again"},
        "drops alone": runs["alone"].events.get("drops", 0),
        **{column: events.get(name, 0) for column, name in COUNTED.items()},
        "batch tokens": events.get("offline_prompt_tokens", 0) + events.get("offline_output_tokens", 0), **batch,
    }  # fmt: skip


def is_looked_into(runs: dict[str, RunResult]) -> bool:
    """Whether the batch cost this seed's P99 TTFT more than is usual."""
    return (runs["beside"].ttft_s.p99 or 0.0) > LOOKED_INTO * (runs["alone"].ttft_s.p99 or 0.0)


def first_drop_s(run: RunResult) -> float | None:
    """When it was decided; None where nothing was dropped."""
    return next((event["t"] for event in run.events.get("log", ()) if event["kind"] == "drop_decided"), None)


def judge(rows: Sequence[Row]) -> list[tuple[bool, str]]:
    """What has to hold, and whether it does."""
    ratio, noise = (statistics.median(row[name] for row in rows) for name in ("ratio", "noise"))
    has_ended = sum(row["batch"] == "completed" for row in rows)
    outlasts = sum(row["batch last s"] > 0.0 for row in rows)
    verdicts = [
        (ratio <= MOST_RATIO, f"median ratio of P99 TTFT {ratio:.3f}, at most {MOST_RATIO}; twice alone {noise:.3f}"),
        (has_ended == len(rows), f"{has_ended} of {len(rows)} batches ended, {outlasts} after the last online answer"),
    ]
    wrong, tokens = (sum(row[name] for row in rows) for name in ("mismatches", "compared tokens"))
    text = f"{wrong} lines of batches differ from the batch alone, {tokens} tokens"
    verdicts.append((not wrong and tokens > 0, text))
    for name in SHOWN:
        num_seen = sum(row[name] > 0 for row in rows)
        verdicts.append((num_seen == len(rows), f"{name} in {num_seen} of {len(rows)} seeds"))
    return verdicts


def seed_of(number: int, setup: ExperimentSetup, speed: MachineSpeed, num_lines: int | None) -> Seed:
    """Its arrivals at this speed."""
    scale = plan_load(setup, speed, number, BURST).rate_scale
    load = scale_time(demo_workload(number, BURST), scale)
    return Seed(number, load, num_lines or lines_for(BATCH_SHARE * load.duration_s, speed, setup.instances), scale)


def batch_of(num_lines: int, model: str) -> bytes:
    """The file; a shorter one is the beginning of a longer one."""
    prompts, pool = PromptMaker(seed=BATCH_SEED), OfflinePool(BATCH_LENGTHS, num_requests=num_lines, seed=BATCH_SEED)
    lengths = enumerate(pool.lengths_drawn())
    return batch_lines(completion(model, prompts.token_ids(i, prompt), output) for i, (prompt, output) in lengths)


def main() -> None:
    args = parse(
        __doc__, seeds=(10, "how many"), first_seed=0, lines=(int, "of the batch (default: by the speed at the first)"),
        slo_ttft_ms=(float, "of all servers (default: auto)"),
        pieces=(Path, "show these files together", {"nargs": "+"}),
        kept=(Path, "where runs of seeds that are looked into are written"), work=Path,
    )  # fmt: skip
    runs: list[RunResult] = []
    rows: list[Row] = []
    if args.pieces:
        document = read_pieces(args.pieces, lambda row: row["seed"])
        rows = document["rows"]
        keep(args.json, document, *document["evidence"]["rooms"])
    else:
        extra = FLAGS | ({} if args.slo_ttft_ms is None else {"slo_ttft_ms": args.slo_ttft_ms})
        made = make_setup(work_folder(args.work, "burst-beside"), 0, MODEL)
        setup = replace(made, dtype="float64", extra_flags=extra)
        profiled(setup)
        num_lines, lines, alone = args.lines, b"", {}
        for number in range(args.first_seed, args.first_seed + args.seeds):
            seed = seed_of(number, setup, measure_speed(setup), num_lines)
            if not lines:
                num_lines, lines = seed.num_lines, batch_of(seed.num_lines, setup.model_dir.name)
                alone = answers_alone(setup, lines, overload="recompute", log_level="warning")
            met, batch = serve(setup, seed, lines, alone)
            rows.append(row_of(seed, met, batch))
            runs += met.values()
            say(rows[-1])
            if args.kept and is_looked_into(met):
                args.kept.mkdir(parents=True, exist_ok=True)
                write_results(args.kept / f"seed-{number}.json", list(met.values()))
            keep(args.json, {"rows": rows}, *LIVE)
    print_block("overload_beside_batch", {"rows": rows})
    print_verdicts(judge(rows))
    exit_if_unanswered(runs, Console())

"""A burst that makes instances drop, with and without a batch beside it: what the batch costs the online requests.

    python benchmarks/overload_beside_batch.py [--seeds 10] [--first-seed 0] [--json OUT] [--kept DIR] [--work DIR]
    python benchmarks/overload_beside_batch.py --simulated    # in virtual time, at the speed that was profiled here
    python benchmarks/overload_beside_batch.py --pieces FILE...    # runs nothing: the seeds of several files together

The demo's model in float64, profiled first, and the first half of the demo's burst, calibrated to the machine at every
seed. Each seed meets three fresh servers with ``--overload drop --offline harvest``, in turns: the burst alone, the
same burst alone again (the noise), and beside a batch. The batch is a file at the server's Batches API, of prompts of
about 300 tokens, and as large as the machine alone would compute in most of the burst's time. It is in progress when
the first online request comes, and is to end after the last. Its answers are compared, token for token, with those of
``jettison batch run`` on the same file: in float64 on the CPU no batch, chunk or split changes a token.

Judged: the median of P99 TTFT beside the batch over P99 TTFT alone is at most 1.25; every batch ends, exactly; and each
of what was to be shown has been there: drops, checkpoints that were freed, and tokens of the batch. The row of a seed
whose ratio is above 2 says what its slowest request met in either arm, and ``--kept DIR`` keeps its runs with all
events and series, for ``jettison explain``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from evidence import LIVE, VIRTUAL, write_result
from rich.console import Console
from rich.table import Table

from jettison.config import EngineConfig
from jettison.cost.deployment import Deployment, deployment_to_document
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import ChunkShape, StepShape
from jettison.cost.speed import MachineSpeed
from jettison.demo.burst import demo_workload, make_setup, plan_load
from jettison.live.engine.deployed import describe
from jettison.live.experiments.overload import ExperimentSetup, measure_speed, run_policy
from jettison.live.experiments.server_process import flag_arguments
from jettison.report.failures import exit_if_unanswered
from jettison.report.results import RunResult, write_results
from jettison.simulate.machines import cluster_setup, resolve_machine
from jettison.simulate.run import SimulationOptions, simulate_workload
from jettison.simulate.spec import parse_spec
from jettison.workload.lengths import Lengths, LogNormalPair
from jettison.workload.pool import OfflinePool
from jettison.workload.prompts import PromptMaker
from jettison.workload.shaping import scale_time
from jettison.workload.synthetic import preset
from jettison.workload.traces import Workload

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
    "abandoned": "steps_abandoned", "returned blocks": "prefetched_blocks",
    "restores": "restores",
}
"""Columns, and the engine's counters behind them."""
SHOWN = ("drops", "frees", "batch tokens")
"""Without these a run says nothing."""
BOUNDARY = "one-file"
SERIES = ("queue", "running", "kv_blocks_", "offline_blocks", "group_requests_")
"""Beginnings of the names of what is told of a slow request's time."""
SAMPLE_S = 0.5
"""Series have a sample so often."""

JETTISON = (sys.executable, "-m", "jettison")

Answers = dict[str, list[int]]
"""Token ids by ``custom_id``."""

Met = tuple[dict[str, RunResult], dict[str, Any]]
"""Runs by arm, and what became of the batch."""


@dataclass(frozen=True, slots=True)
class Seed:
    """What all arms of a seed meet."""

    number: int
    load: Workload
    num_lines: int
    rate_scale: float


# --- the batch


def pool_of(num_lines: int) -> OfflinePool:
    """Its lengths: a shorter batch is the beginning of a longer one."""
    return OfflinePool(BATCH_LENGTHS, num_requests=num_lines, seed=BATCH_SEED)


def lines_of(num_lines: int, model: str) -> bytes:
    """The file."""
    prompts = PromptMaker(seed=BATCH_SEED)
    lines = [
        {"custom_id": f"line-{index}", "method": "POST", "url": "/v1/completions", "body": {
            "model": model, "prompt": prompts.token_ids(index, num_prompt), "max_tokens": num_output,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }}
        for index, (num_prompt, num_output) in enumerate(pool_of(num_lines).lengths_drawn())
    ]  # fmt: skip
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def lines_for(seconds: float, speed: MachineSpeed, num_instances: int) -> int:
    """How many the machine would compute alone in this time."""
    prompt, output = BATCH_LENGTHS.prompt.median, BATCH_LENGTHS.output.median
    line_s = prompt / speed.prefill_tokens_per_s + output * speed.decode_per_request_s
    return max(1, round(seconds * num_instances / line_s))


def read_answers(output: bytes) -> Answers:
    """Of an output file; of a line that is there twice, or has no answer, ValueError is raised."""
    found: Answers = {}
    for line in output.splitlines():
        document = json.loads(line)
        name, response = document["custom_id"], document["response"]
        if name in found or response["status_code"] != 200:
            raise ValueError(f"{name}: {'twice' if name in found else response}")
        found[name] = response["body"]["choices"][0]["token_ids"]
    return found


class BatchAt:
    """One batch at a server: entered when it is in progress, left when it has ended or its time is up."""

    def __init__(self, lines: bytes, url: str) -> None:
        self._lines, self._url, self._id = lines, url, ""
        self.document: dict[str, Any] = {}
        self.answers: Answers = {}
        self.last_s = 0.0
        """From the last online answer to the end of the batch."""

    def __enter__(self) -> BatchAt:
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name='
        form = f'{head}"purpose"\r\n\r\nbatch\r\n{head}"file"; filename="batch.jsonl"\r\n\r\n'.encode()
        form += self._lines + f"\r\n--{BOUNDARY}--\r\n".encode()
        file = json.loads(self._ask("/v1/files", form, f"multipart/form-data; boundary={BOUNDARY}"))
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        self._id = json.loads(self._ask("/v1/batches", json.dumps(wanted).encode()))["id"]
        self._await(lambda: self.document["status"] != "validating")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            return
        began_s = time.monotonic()
        self._await(lambda: self.document["status"] in ("completed", "failed", "expired", "cancelled"))
        self.last_s = time.monotonic() - began_s
        if self.document.get("output_file_id"):
            self.answers = read_answers(self._ask(f"/v1/files/{self.document['output_file_id']}/content"))

    def _await(self, is_there: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + MOST_BATCH_S
        while True:
            self.document = json.loads(self._ask(f"/v1/batches/{self._id}"))
            if is_there() or time.monotonic() > ends_s:
                return
            time.sleep(0.2)

    def _ask(self, path: str, body: bytes | None = None, content_type: str = "application/json") -> bytes:
        request = urllib.request.Request(self._url + path, body, headers={"Content-Type": content_type})
        with urllib.request.urlopen(request, timeout=60.0) as response:
            return bytes(response.read())


def compute_alone(setup: ExperimentSetup, lines: bytes) -> Answers:
    """The batch by itself, without a server."""
    path = setup.work_dir / "batch.jsonl"
    path.write_bytes(lines)
    out = setup.work_dir / "batch-alone.jsonl"
    flags = flag_arguments(setup.flags() | {"overload": "recompute", "log_level": "warning"})
    command = [*JETTISON, "batch", "run", str(path), str(setup.model_dir), "-o", str(out)]
    subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
    return read_answers(out.read_bytes())


# --- live


def serve(setup: ExperimentSetup, seed: Seed, lines: bytes, alone: Answers) -> Met:
    """All arms, the first another one at every seed; and how the batch ended."""
    turn = seed.number % len(ARMS)
    runs: dict[str, RunResult] = {}
    batch: BatchAt | None = None

    def begin(url: str) -> BatchAt:
        nonlocal batch
        batch = BatchAt(lines, url)
        return batch

    for arm in (*ARMS[turn:], *ARMS[:turn]):
        fresh = replace(setup, extra_flags=setup.extra_flags | {"batch_dir": setup.work_dir / f"{seed.number}-{arm}"})
        name = f"seed {seed.number}: {arm}"
        more: dict[str, Any] = {"beside": begin} if arm == "beside" else {}
        runs[arm] = run_policy(fresh, "drop", seed.load, name=name, seed=seed.number, **more)
    assert batch is not None
    return runs, ended(batch, alone, seed.num_lines)


def ended(batch: BatchAt, alone: Answers, num_lines: int) -> dict[str, Any]:
    """What is to be said of a batch that has ended, or has not."""
    return {
        "batch": batch.document["status"], "lines": num_lines, "batch last s": batch.last_s,
        "compared tokens": sum(map(len, batch.answers.values())),
        "mismatches": sum(batch.answers.get(name) != alone[name] for name in list(alone)[:num_lines]),
    }


# --- simulated


def profiled_speed(profile: HardwareProfile, setup: ExperimentSetup) -> MachineSpeed:
    """As a client would measure it, from what was profiled: all instances work."""
    slower, layers = profile.slowdown(setup.instances), profile.cost.num_layers

    def step_s(*chunks: ChunkShape) -> float:
        return slower * profile.cost.step_cost_s(StepShape(chunks, layers, num_samples=len(chunks)))

    budget = setup.max_num_batched_tokens
    decodes = [(num, step_s(*[ChunkShape(32, 1)] * num)) for num in (4, 16, 40)]
    return MachineSpeed.from_points(budget / step_s(ChunkShape(0, budget)), decodes)


def simulate(deployment: Deployment, flags: dict[str, object], seed: Seed) -> Met:
    """All arms in virtual time. That the batch ends is all that is judged of it: there are no tokens."""
    spec = parse_spec({
        "name": "burst", "cluster": {"description": deployment_to_document(deployment)}, "workload": "burst",
        "variants": [{"policy": "drop", "settings": flags}],
    })  # fmt: skip
    machine = resolve_machine(spec.cluster, spec.settings)
    runs = {}
    for arm in ARMS:
        options = SimulationOptions(
            name=f"seed {seed.number}: {arm}", prompts=PromptMaker(seed=seed.number),
            pool=pool_of(seed.num_lines) if arm == "beside" else None,
        )
        runs[arm] = simulate_workload(seed.load, cluster_setup(machine, spec, spec.variants[0], seed.number), options)
    batch, online = (runs["beside"].classes or {}).get("offline", {}), runs["beside"].requests_detail or []
    num_ended = batch["requests"]["completed"]
    ends_s = [max(row["scheduled_s"] + row["e2e_s"] for row in rows) for rows in (online, batch["requests_detail"])]
    status = "completed" if num_ended == seed.num_lines else f"{num_ended} of {seed.num_lines} lines"
    return runs, {"batch": status, "lines": seed.num_lines, "batch last s": ends_s[1] - ends_s[0]}


# --- figures


def row_of(seed: Seed, runs: dict[str, RunResult], batch: dict[str, Any]) -> dict[str, Any]:
    """The figures that count."""
    p99 = {arm: run.ttft_s.p99 or 0.0 for arm, run in runs.items()}
    events = runs["beside"].events
    return {
        "seed": seed.number, "requests": len(seed.load.rows), "rate scale": seed.rate_scale,
        "failed": sum(run.requests.unanswered for run in runs.values()),
        **{f"{arm} P99 s": p99[arm] for arm in ARMS},
        "ratio": p99["beside"] / p99["alone"], "noise": p99["again"] / p99["alone"],
        **{f"{arm} first drop s": first_drop_s(run) for arm, run in runs.items() if arm != "again"},
        "drops alone": runs["alone"].events.get("drops", 0),
        **{column: events.get(name, 0) for column, name in COUNTED.items()},
        "batch tokens": events.get("offline_prompt_tokens", 0) + events.get("offline_output_tokens", 0),
        **batch,
        **({"slowest": {arm: met_by_slowest(runs[arm]) for arm in ARMS}} if is_looked_into(runs) else {}),
    }  # fmt: skip


def is_looked_into(runs: dict[str, RunResult]) -> bool:
    """Whether the batch cost this seed's P99 TTFT more than is usual."""
    return (runs["beside"].ttft_s.p99 or 0.0) > LOOKED_INTO * (runs["alone"].ttft_s.p99 or 0.0)


def met_by_slowest(run: RunResult) -> dict[str, Any]:
    """What the online request with the longest TTFT met from its arrival to its first token: extremes of the run's
    series in that time (a sample before and one after included), and how many events of each kind."""
    answered = [row for row in run.requests_detail or [] if row["ttft_s"] is not None]
    slowest = max(answered, key=lambda row: row["ttft_s"])
    begin_s = slowest["scheduled_s"]
    end_s = begin_s + slowest["ttft_s"]
    met: dict[str, Any] = {"arrives_s": begin_s, "ttft_s": slowest["ttft_s"], "prompt tokens": slowest["input_tokens"]}
    for name, samples in run.series.items():
        if not name.startswith(SERIES):
            continue
        within = [value for at_s, value in samples if begin_s - SAMPLE_S <= at_s <= end_s + SAMPLE_S]
        if within:
            met[name] = [min(within), max(within)]
    log = run.events.get("log", ())
    kinds = Counter(event["kind"] for event in log if begin_s <= event["t"] <= end_s)
    return met | {"events": dict(kinds)}


def first_drop_s(run: RunResult) -> float | None:
    """When it was decided; None where nothing was dropped."""
    return next((event["t"] for event in run.events.get("log", ()) if event["kind"] == "drop_decided"), None)


def judge(rows: Sequence[dict[str, Any]]) -> list[tuple[bool, str]]:
    """What has to hold, and whether it does."""
    ratio, noise = (statistics.median(row[name] for row in rows) for name in ("ratio", "noise"))
    has_ended = sum(row["batch"] == "completed" for row in rows)
    outlasts = sum(row["batch last s"] > 0.0 for row in rows)
    verdicts = [
        (ratio <= MOST_RATIO, f"median ratio of P99 TTFT {ratio:.3f}, at most {MOST_RATIO}; twice alone {noise:.3f}"),
        (has_ended == len(rows), f"{has_ended} of {len(rows)} batches ended, {outlasts} after the last online answer"),
    ]
    compared = [row for row in rows if "mismatches" in row]
    if compared:
        wrong, tokens = (sum(row[name] for row in compared) for name in ("mismatches", "compared tokens"))
        text = f"{wrong} lines of batches differ from the batch alone, {tokens} tokens"
        verdicts.append((not wrong and tokens > 0, text))
    for name in SHOWN:
        num_seen = sum(row[name] > 0 for row in rows)
        verdicts.append((num_seen == len(rows), f"{name} in {num_seen} of {len(rows)} seeds"))
    return verdicts


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """A line a seed, medians, verdicts."""
    table = Table(title="P99 TTFT of online requests in a burst: beside a batch / alone (noise: alone again / alone)")
    columns = [column for column in rows[0] if column != "slowest"]
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(_text(row[column]) for column in columns))
    medians = [[v for row in rows if isinstance(v := row.get(column), int | float)] for column in columns]
    table.add_row("median", *(_text(statistics.median(m)) if m else "" for m in medians[1:]), style="bold")
    console.print(table)
    for is_met, text in judge(rows):
        console.print(f"{'met' if is_met else 'MISSED'}: {text}", markup=False, highlight=False)
    for column in COUNTED:
        if not any(row[column] for row in rows):
            console.print(f"{column}: none, so nothing is shown about these", markup=False)


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def read_pieces(files: Sequence[Path]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of several runs of this script, and the evidence of all of them. Raises ValueError where it differs."""
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    rooms = [document["evidence"]["rooms"] for document in documents]
    if any(each != rooms[0] for each in rooms):
        raise ValueError("the pieces were measured with different sources")
    rows = sorted((row for document in documents for row in document["rows"]), key=lambda row: row["seed"])
    if len({row["seed"] for row in rows}) != len(rows):
        raise ValueError("a seed is in two pieces")
    return rows, documents[-1]["evidence"]


# --- running


def make(work: Path, args: argparse.Namespace) -> ExperimentSetup:
    """The demo in float64 with all arms' flags, and its profile, where ``serve`` finds it."""
    extra = FLAGS | ({} if args.slo_ttft_ms is None else {"slo_ttft_ms": args.slo_ttft_ms})
    setup = replace(make_setup(work, 0), dtype="float64", extra_flags=extra)
    command = [*JETTISON, "profile", str(setup.model_dir), "--quick"]
    subprocess.run([*command, *flag_arguments(setup.flags())], check=True, stdout=subprocess.DEVNULL)
    return setup


def seed_of(number: int, setup: ExperimentSetup, speed: MachineSpeed, num_lines: int | None) -> Seed:
    """Its arrivals at this speed."""
    scale = plan_load(setup, speed, number, BURST).rate_scale
    load = scale_time(demo_workload(number, BURST), scale)
    return Seed(number, load, num_lines or lines_for(BATCH_SHARE * load.duration_s, speed, setup.instances), scale)


def run_all(args: argparse.Namespace, console: Console) -> tuple[list[dict[str, Any]], list[RunResult]]:
    """Every seed. The first one's speed says how large the batch is."""
    setup = make(args.work or Path(tempfile.mkdtemp(prefix="jettison-beside-batch-")), args)
    deployment = describe(EngineConfig.resolve(model=str(setup.model_dir), **setup.flags()))
    assert deployment.profile is not None, "it was made just now"
    speed = profiled_speed(deployment.profile, setup)
    num_lines, lines, alone = args.lines, b"", Answers()
    rows: list[dict[str, Any]] = []
    runs: list[RunResult] = []
    for number in range(args.first_seed, args.first_seed + args.seeds):
        if not args.simulated:
            speed = measure_speed(setup)
        seed = seed_of(number, setup, speed, num_lines)
        num_lines = seed.num_lines
        if args.simulated:
            met, batch = simulate(deployment, setup.extra_flags, seed)
        else:
            lines = lines or lines_of(num_lines, setup.model_dir.name)
            alone = alone or compute_alone(setup, lines)
            met, batch = serve(setup, seed, lines, alone)
        rows.append(row_of(seed, met, batch))
        runs += met.values()
        console.print({name: _text(value) for name, value in rows[-1].items()})
        if args.kept and is_looked_into(met):
            args.kept.mkdir(parents=True, exist_ok=True)
            write_results(args.kept / f"seed-{number}.json", list(met.values()))
        save(args, rows)
    return rows, runs


def save(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """What there is so far."""
    if args.json:
        kind = "simulated" if args.simulated else "live"
        write_result(args.json, {"kind": kind, "rows": rows}, *(VIRTUAL if args.simulated else LIVE))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--lines", type=int, help="of the batch (default: by the speed at the first seed)")
    parser.add_argument("--slo-ttft-ms", type=float, help="of all servers (default: auto)")
    parser.add_argument("--simulated", action="store_true", help="in virtual time")
    parser.add_argument("--pieces", type=Path, nargs="+", metavar="FILE", help="show these files together")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kept", type=Path, metavar="DIR", help="where runs of seeds that are looked into are written")
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    console = Console(width=250)
    if args.pieces:
        rows, evidence = read_pieces(args.pieces)
        if args.json:
            args.json.write_text(json.dumps({"rows": rows, "evidence": evidence}, indent=1) + "\n", encoding="utf-8")
        show(rows, console)
        return
    rows, runs = run_all(args, console)
    show(rows, console)
    exit_if_unanswered(runs, console)


if __name__ == "__main__":
    main()

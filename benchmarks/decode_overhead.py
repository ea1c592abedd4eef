"""What a decode step costs beside the arithmetic: a 0.2M-parameter model at batch 1, 64 and 256.

    python benchmarks/decode_overhead.py
    python benchmarks/decode_overhead.py --vllm-python VLLM_ENV/bin/python --openvino-python OPENVINO_ENV/bin/python

The model is so small that nearly all of a step is the engine: planning, encoding, passing messages, launching
kernels, sampling, taking tokens back. Time a step is the slope between a long and a short output of the same batch, so
that prefill, admission and clean-up drop out. `jettison` runs everything in one process, `jettison-workers` is the live
engine with its worker process and an event stream for every request. Engines are started, interleaved and bound to
cores as in `benchmarks/peers.py`; docs/performance.md says how to make the peers' environments. Prints a table, writes
JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from engines.host import EngineFailedError, EngineProcess, EngineSpec, Workload
from engines.weights import QWEN3_02M, make_folder
from evidence import write_result
from peers import Peers, absolute, machine, spread, start_all

PROMPT_LEN = 16
SHORT, LONG = 16, 80
GOALS_MS = {1: 0.6, 64: 1.5, 256: 4.0}
"""What the engine is held to in one process, in milliseconds a step; over HTTP 10 at 256."""
RUN_TIMEOUT_S = 300


def all_specs(peers: Peers) -> list[EngineSpec]:
    """The engines of the table. Float32 everywhere but OpenVINO's weights: no CPU lacks it."""
    own: dict[str, Any] = {"max_num_batched_tokens": 4096, "max_num_seqs": 256}
    specs = [
        peers.jettison("jettison", "one process", **own),
        peers.jettison("jettison-workers", "engine and worker process", mode="workers", **own),
        peers.jettison("jettison-http", "jettison serve", mode="http", **own),
    ]
    if peers.vllm is not None:
        specs.append(peers.vllm_spec("vllm", "engine process", dtype="float32", max_num_seqs=256))
        in_process = peers.vllm_spec("vllm-in-process", "one process", dtype="float32", max_num_seqs=256)
        environ = (*in_process.environ, ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"))
        specs.append(EngineSpec(in_process.name, in_process.script, in_process.settings, in_process.python, environ,
                                in_process.note))  # fmt: skip
    if peers.openvino is not None:
        scheduler = {"max_num_batched_tokens": 4096, "max_num_seqs": 256, "dynamic_split_fuse": False}
        specs.append(peers.openvino_spec("openvino", "one process", {"INFERENCE_NUM_THREADS": 2}, **scheduler))
    return specs


def step_ms(engine: EngineProcess, batch: int, seed: int) -> float:
    """Milliseconds a decode step, from the slope between two output lengths."""
    short = engine.run(Workload(batch, PROMPT_LEN, SHORT), seed, RUN_TIMEOUT_S).seconds
    long = engine.run(Workload(batch, PROMPT_LEN, LONG), seed + 1, RUN_TIMEOUT_S).seconds
    return (long - short) / (LONG - SHORT) * 1e3


def measure(
    engines: list[EngineProcess], batches: list[int], num_rounds: int, failures: dict[str, str]
) -> dict[str, dict[int, list[float]]]:
    """Engine -> batch -> milliseconds, one a round; the first round warms up and is not counted."""
    results: dict[str, dict[int, list[float]]] = {engine.spec.name: {} for engine in engines}
    for batch in batches:
        for round_index in range(-1, num_rounds):
            turn = max(round_index, 0) % max(1, len(engines))
            for engine in engines[turn:] + engines[:turn]:
                name = engine.spec.name
                if name in failures:
                    continue
                try:
                    taken = step_ms(engine, batch, seed=10 * round_index + 100)
                except EngineFailedError as error:
                    failures[name] = str(error)
                    print(f"{name} failed: {error}", file=sys.stderr)
                    continue
                if round_index >= 0:
                    results[name].setdefault(batch, []).append(taken)
    return results


def print_table(results: dict[str, dict[int, list[float]]], batches: list[int], failures: dict[str, str]) -> None:
    print(f"\n{'ms a decode step':19}" + "".join(f"{f'batch {batch}':>24}" for batch in batches))
    for name, by_batch in results.items():
        cells = [spread(by_batch[batch]) if batch in by_batch else "-" for batch in batches]
        print(f"{name:19}" + "".join(f"{cell:>24}" for cell in cells))
    print(f"{'goal':19}" + "".join(f"{GOALS_MS.get(batch, '-'):>24}" for batch in batches))
    for name, reason in failures.items():
        print(f"{name:19}does not run: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--openvino-python", type=Path)
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, nargs="+", default=[0, 1], metavar="CORE")
    parser.add_argument("--realtime", action="store_true", help="measure at real-time priority (root)")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "jettison-peers")
    parser.add_argument("--json", type=Path, default=Path("decode_overhead.json"))
    arguments = parser.parse_args()

    model = make_folder(arguments.models, QWEN3_02M, "float32")
    others = {"vllm": absolute(arguments.vllm_python), "openvino": absolute(arguments.openvino_python)}
    specs = all_specs(Peers(model, "float32", 512, 256, **others))
    specs = [spec for spec in specs if not arguments.engines or spec.name in arguments.engines]
    print(f"machine: {json.dumps(machine())}")
    print(f"model: {QWEN3_02M.name}, {QWEN3_02M.num_parameters() / 1e3:.0f}k parameters, {QWEN3_02M.layers} layers")
    engines, failures = start_all(specs, arguments.cores, arguments.realtime)
    try:
        results = measure(engines, arguments.batches, arguments.rounds, failures)
    finally:
        for engine in engines:
            engine.close()
    print_table(results, arguments.batches, failures)
    document = {
        "machine": machine(),
        "engines": {e.spec.name: {"note": e.spec.note, **e.facts} for e in engines},
        "step_ms": results,
        "does_not_run": failures,
    }
    write_result(arguments.json, document, "device")
    print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()

"""What a decode step costs beside the arithmetic: a 0.2M-parameter model at batch 1, 64 and 256.

    python -m benchmarks peers step
    python -m benchmarks peers step --vllm-python VLLM_ENV/bin/python --openvino-python OPENVINO_ENV/bin/python

The model is so small that nearly all of a step is the engine: planning, encoding, passing messages, launching
kernels, sampling, taking tokens back. Time a step is the slope between a long and a short output of the same batch, so
that prefill, admission and clean-up drop out. `jettison` runs everything in one process, `jettison-workers` is the live
engine with its worker process and an event stream for every request. Engines are started, interleaved and bound to
cores as in `throughput.py`; docs/performance.md says how to make the peers' environments. Prints a table, writes
JSON.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.host import EngineFailedError, EngineSpec, Runs, Workload
from benchmarks.engines.weights import QWEN3_02M, make_folder
from benchmarks.peers.throughput import Peers, start_all
from benchmarks.shared import absolute, in_turn, keep, machine, parse, print_rows, say, spread

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


def step_ms(engine: Runs, batch: int, seed: int, num_steps: int) -> float:
    """Milliseconds a decode step, from the slope between two output lengths."""
    short = engine.run(Workload(batch, PROMPT_LEN, SHORT), seed, RUN_TIMEOUT_S).seconds
    long = engine.run(Workload(batch, PROMPT_LEN, SHORT + num_steps), seed + 1, RUN_TIMEOUT_S).seconds
    return (long - short) / num_steps * 1e3


def measure(
    engines: Sequence[Runs], batches: list[int], num_rounds: int, failures: dict[str, str],
    num_steps: int = LONG - SHORT,
) -> dict[str, dict[int, list[float]]]:
    """Engine -> batch -> milliseconds, one a round; the first round warms up and is not counted."""
    results: dict[str, dict[int, list[float]]] = {engine.spec.name: {} for engine in engines}
    for batch in batches:
        for round_index in range(-1, num_rounds):
            for engine in in_turn(engines, max(round_index, 0)):
                name = engine.spec.name
                if name in failures:
                    continue
                try:
                    taken = step_ms(engine, batch, 10 * round_index + 100, num_steps)
                except EngineFailedError as error:
                    failures[name] = str(error)
                    say(f"{name} failed: {error}")
                    continue
                say(f"batch {batch}, round {round_index}, {name}: {taken:.2f} ms a step")
                if round_index >= 0:
                    results[name].setdefault(batch, []).append(taken)
    return results


def main() -> None:
    arguments = parse(
        __doc__, vllm_python=Path, openvino_python=Path, engines=(None, "only these", {"nargs": "+"}),
        batches=[1, 64, 256], rounds=5, cores=[0, 1], realtime=(False, "measure at real-time priority (root)"),
        models=Path(tempfile.gettempdir()) / "jettison-peers", json=Path("decode_overhead.json"),
    )  # fmt: skip

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
    print_rows([{"ms a decode step": name} | {f"batch {b}": spread(by_batch[b]) for b in by_batch}
                for name, by_batch in results.items()] + [{"ms a decode step": "goal"} | {
                    f"batch {b}": goal for b, goal in GOALS_MS.items()}],
               ("ms a decode step", *(f"batch {b}" for b in arguments.batches)))  # fmt: skip
    document = {
        "machine": machine(), "engines": {e.spec.name: {"note": e.spec.note, **e.facts} for e in engines},
        "step_ms": results, "does_not_run": failures,
    }  # fmt: skip
    keep(arguments.json, document, "device")

"""Decode speed with matrices kept as 4-bit integers, beside bfloat16 and llama.cpp: the same tensors on all sides.

    python -m benchmarks peers quantized --llama-bin LLAMA_CPP/build/bin

A random Qwen3 of 673M parameters, 2 % of them its head, is written once in bfloat16; its layers' matrices are quantized
once, to Q4_0 by the `gguf` library. llama.cpp reads that file; Jettison reads the folder that `jettison model import`
makes of it, and beside it the folder in bfloat16. Embedding and head, which are one matrix, are bfloat16 everywhere.
Jettison computes in bfloat16 and does not round activations; llama.cpp rounds them to 8 bits.

Every engine is a process of its own, bound to the same cores; while one computes, the others are stopped, and each
round measures all, in an order that turns by one. A step's time is the slope between 16 and 144 tokens of output after
16 of prompt, so that prompts and admission drop out. llama.cpp is measured twice: `llama-server`, with a slot a
request, and `llama-batched-bench`, which has no server and draws no tokens; the faster one counts. Ratios are taken
round by round. Prints tables, writes JSON.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.engines.host import EngineSpec, Runs
from benchmarks.engines.llama_bench import LlamaBatchedBench
from benchmarks.engines.weights import QWEN3_700M, make_folder, make_gguf
from benchmarks.evidence import LIVE
from benchmarks.peers.step import measure
from benchmarks.peers.throughput import Peers, start_all
from benchmarks.servers import JETTISON
from benchmarks.shared import Row, keep, machine, parse, print_block, print_verdicts, say

NUM_STEPS = 128
CONTEXT = 512
OURS, WIDE = "jettison-int4", "jettison-bf16"
THEIRS = ("llama-server", "llama-batched-bench")
BLOCK = "quantized_peers"

Times = dict[str, dict[int, list[float]]]
"""Engine -> requests -> milliseconds a step, one a round."""


def imported(gguf: Path) -> Path:
    """The folder that ``jettison model import`` makes of the file, beside it, unless it is there."""
    folder = gguf.with_suffix("")
    if not folder.exists():
        subprocess.run([*JETTISON, "model", "import", str(gguf), str(folder)], check=True)
    return folder


def all_specs(peers: Peers, kept: Path) -> list[EngineSpec]:
    """The engines that are processes."""
    size = f"{(kept / 'model.safetensors').stat().st_size / 1e6:.0f} MB of weights in the folder"
    specs = [
        peers.jettison(OURS, f"Q4_0 as imported, {size}", model=str(kept), max_num_batched_tokens=2048),
        peers.jettison(WIDE, "the folder in bfloat16", max_num_batched_tokens=2048),
    ]
    if peers.llama is not None:
        specs.append(peers.llama_spec(THEIRS[0], "Q4_0, a slot a request", "q4_0", "-b", "2048"))
    return specs


def ratios(times: Times, requests: int) -> dict[str, list[float]]:
    """How many times as fast as each other engine ours is, round by round; of llama.cpp's two the faster."""
    ours = times[OURS][requests]

    def beside(*names: str) -> list[float]:
        found = [times[name][requests] for name in names if requests in times.get(name, {})]
        return [min(theirs) / own for own, *theirs in zip(ours, *found)] if found else []

    return {WIDE: beside(WIDE), "llama.cpp": beside(*THEIRS)}


def verdicts(found: dict[int, dict[str, list[float]]]) -> list[tuple[bool, str]]:
    """What is asked: at one request twice our bfloat16 and llama.cpp's speed, beyond at least both."""
    told = []
    for requests, by_engine in found.items():
        for name, values in by_engine.items():
            asked = 2.0 if name == WIDE and requests == 1 else 1.0
            if values:
                text = f"{requests} requests: {median(values):.2f} times {name}, asked {asked:g}"
                told.append((median(values) >= asked, text))
    return told


def document_of(times: Times, engines: Sequence[Runs], failures: dict[str, str], batches: list[int]) -> Row:
    """What is kept."""
    found = {n: ratios(times, n) for n in batches if n in times.get(OURS, {})}
    speeds = {
        name: {str(n): [1e3 * n / ms for ms in values] for n, values in by_batch.items()}
        for name, by_batch in times.items()
    }
    return {
        "machine": machine(), "model": {"name": QWEN3_700M.name, "parameters": QWEN3_700M.num_parameters()},
        "engines": {e.spec.name: {"note": e.spec.note, **getattr(e, "facts", {})} for e in engines},
        "does_not_run": failures, "tokens_per_s": speeds, "times_as_fast": {str(n): of for n, of in found.items()},
        "verdicts": [{"met": is_met, "text": text} for is_met, text in verdicts(found)],
    }  # fmt: skip


def main() -> None:
    args = parse(
        __doc__, llama_bin=(Path, "llama.cpp's programs, built for this machine"),
        kept=(Path, "the imported folder, else made of the file"), batches=[1, 16], rounds=5, cores=[0, 1],
        realtime=(False, "measure at real-time priority (root)"),
        models=(Path(tempfile.gettempdir()) / "jettison-peers", "where the models are made and kept"),
        json=Path("quantized_peers.json"),
    )  # fmt: skip
    model = make_folder(args.models, QWEN3_700M)
    gguf = make_gguf(model, "q4_0")
    programs = args.llama_bin and args.llama_bin.absolute()
    peers = Peers(model, "bfloat16", CONTEXT, max(args.batches), llama=programs and programs / THEIRS[0])
    print(f"machine: {json.dumps(machine())}")
    engines, failures = start_all(all_specs(peers, args.kept or imported(gguf)), args.cores, args.realtime)
    measured: list[Runs] = [*engines]
    if programs:
        measured.append(LlamaBatchedBench(programs / THEIRS[1], gguf, args.cores, CONTEXT, args.realtime))
    times: Times = {}
    try:
        for requests in args.batches:  # a run that is cut off leaves what it has
            for name, taken in measure(measured, [requests], args.rounds, failures, NUM_STEPS).items():
                times.setdefault(name, {}).update(taken)
            document = document_of(times, measured, failures, args.batches)
            keep(args.json, document, *LIVE)
    finally:
        for engine in engines:
            engine.close()
    print_block(BLOCK, document)
    print_verdicts((each["met"], each["text"]) for each in document["verdicts"])
    for name, reason in failures.items():
        say(f"{name} does not run: {reason}")

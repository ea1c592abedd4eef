"""How long steps of the CUDA kernels take on one card, with targets beside: decoding and a prefill of whole models.

    python -m benchmarks gpu kernels --out gpu_kernels.json        # both kinds, about a minute, a table last
    python -m benchmarks gpu kernels --kind cuda

Whether they are right is for `pytest tests/device/cuda`. Needs PyTorch, Triton and numpy only. Each kind runs in a
process of its own: how products are made is a setting of a process. Without a GPU: toy sizes, TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.model import CONTEXT, DEVICE, GPU, SHAPES, Model, products
from benchmarks.gpu.results import Results
from jettison.device.cuda.kernels import CudaKernels

IS_H100 = GPU and "H100" in torch.cuda.get_device_name()
DENSE_TFLOPS = 989.0  # the vendor's, for bfloat16
TARGETS_MS = {"7b 1": 6.0, "7b 64": 7.6, "14b 1": 11.9} if IS_H100 else {"7b 1": 4.2, "7b 64": 5.3, "14b 1": 8.3}
MOST_S = {"cuda": 33, "cuda-invariant": 27}
"""Of a kind: the first compiles for both. What a kind has measured until then stays."""
POOL = torch.cuda.graph_pool_handle() if GPU else None
KEEPS_POOL: list[torch.cuda.CUDAGraph] = []
"""One graph that is never released: a pool ends with the last of its graphs."""


def gpu_us(function, repeat: int = 15) -> float:
    """Median microseconds of one call."""
    start, times = time.perf_counter(), []
    function()
    if not GPU:
        return (time.perf_counter() - start) * 1e6
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def captured(function):
    """A graph of a function, which has run before."""
    function()
    if not GPU:
        return function
    torch.cuda.synchronize()
    if not KEEPS_POOL:
        KEEPS_POOL.append(_graph_of(lambda: torch.zeros(1, device=DEVICE)))
    return _graph_of(function).replay


def _graph_of(function) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=POOL):
        function()
    return graph


def step_ms(model: Model, rows: int) -> float:
    parts = model.prepare([1] * rows, [CONTEXT] * rows)  # they hold what the graphs read
    graphs = [captured(part) for part in parts]
    return gpu_us(lambda: [graph() for graph in graphs]) / 1e3


def decode(model: Model, name: str, rows: int, results: Results) -> None:
    """Early twice: how far two measurements of one thing differ."""
    target = TARGETS_MS.get(f"{name} {rows}")
    for variant in ("early", "not early", "early again"):
        model.kernels.launches_early = GPU and variant != "not early"
        ms = step_ms(model, rows)
        results.tell(f"step {name} {rows}: {variant}", ms, target, target and ms <= target)


def breakdown(model: Model, rows: int) -> dict[str, float]:
    """How much shorter a step is without each of its parts, in microseconds a layer."""
    kernels, whole, told = model.kernels, step_ms(model, rows), {}
    for part in ("attend", "prepare_and_write", "add_rms_norm", "silu_mul", "linear"):
        setattr(kernels, part, lambda *_, **__: None)
        try:
            told[part] = (whole - step_ms(model, rows)) * 1e3 / model.m["layers"]
        finally:
            delattr(kernels, part)
    return told


def prefill(model: Model, name: str, prompt: int, results: Results) -> None:
    m, parts = model.m, model.prepare([prompt], [0])
    ms = gpu_us(lambda: [part() for part in parts], 5) / 1e3
    flop = 2 * prompt * m["layers"] * sum(n * k for n, k in products(m).values())
    flop += 2 * m["heads"] * m["dim"] * m["layers"] * prompt**2
    share = flop / ms / 1e9 / DENSE_TFLOPS
    results.tell(f"step {name} prefill {prompt}: early", ms)
    results.tell(f"prefill {name} {prompt}: share of {DENSE_TFLOPS} TFLOP/s", share, 0.5, share >= 0.5)


def measure(kernels: CudaKernels, results: Results) -> None:
    for name, m in SHAPES.items():
        prompt = (8192 if GPU else 24) if name == "7b" else 0
        batches = ((1, 16, 64, 256) if name == "7b" else (1, 64)) if GPU else (1, 3)
        model = Model(kernels, m, batches[-1], prompt)
        for rows in batches:
            decode(model, name, rows, results)
        if prompt:
            prefill(model, name, prompt, results)
            if not kernels.rows_are_independent:
                results.tell(f"decode {name} 1: us a layer that each part takes", breakdown(model, 1))
        del model
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()


def print_table(both: dict[str, dict]) -> None:
    """Steps of both kinds beside what is asked; the last: how much equal bits cost."""
    print(f"\n{'step, ms':40}{'target':>8}{'cuda':>9}{'invariant':>10}{'ratio':>7}", flush=True)
    for name in dict.fromkeys(name for results in both.values() for name in results if name.startswith("step ")):
        entries = [both.get(kind, {}).get(name) for kind in MOST_S]
        cuda, invariant = (entry and entry["value"] for entry in entries)
        target = next(entry["target"] for entry in entries if entry)
        cells = ((target, 8, 1), (cuda, 9, 3), (invariant, 10, 3), (cuda and invariant and invariant / cuda, 7, 3))
        print(f"{name:40}" + "".join(f"{value:{width}.{digits}f}" if value else " " * width
                                     for value, width, digits in cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="gpu_kernels.json")
    parser.add_argument("--kind", choices=list(MOST_S))
    options = parser.parse_args()
    if options.kind is not None:
        measure(CudaKernels(options.kind, DEVICE), Results(options.out))
        return 0
    both = {}
    for kind, most_s in MOST_S.items():
        print(f"--- {kind}", flush=True)
        own = Path(f"{options.out}.{kind}")
        command = [sys.executable, "-m", "benchmarks", "gpu", "kernels", "--kind", kind, "--out", own]
        subprocess.run(["timeout", str(most_s), *command])
        if own.exists():
            both[kind] = json.loads(own.read_text())
            own.unlink()
    Path(options.out).write_text(json.dumps(both, indent=1))
    print_table(both)
    return 0

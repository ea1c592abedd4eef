"""How fast the CUDA kernels are on one card, with targets beside: attention, a whole decode step, a prefill.

    python benchmarks/gpu_kernels.py --out gpu_kernels.json        # both kinds, about two minutes
    python benchmarks/gpu_kernels.py --kind cuda --parts steps

Whether they are right is for `pytest tests/device/cuda`. Needs PyTorch, Triton and numpy only. Each kind runs in a
process of its own: how products are made is a setting of a process. Without a GPU: toy sizes, TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from gpu_model import CONTEXT, DEVICE, GPU, SHAPES, Model, products, randn

from jettison.device.cuda import attention, tiles, worklist
from jettison.device.cuda.attention import Launch, Parts, attend
from jettison.device.cuda.kernels import CudaKernels
from jettison.device.cuda.tiles import Tile, tiles_for
from jettison.device.cuda.worklist import WorkShape, fill_work, num_words

IS_H100 = GPU and "H100" in torch.cuda.get_device_name()
READ_GBPS, DENSE_TFLOPS = 3050.0 if IS_H100 else 4339.0, 989.0  # an H200's was measured; the vendor's for bfloat16
TARGETS_MS = {"7b 1": 6.0, "7b 64": 7.6, "14b 1": 11.9} if IS_H100 else {"7b 1": 4.2, "7b 64": 5.3, "14b 1": 8.3}
KV_HEADS, GROUP, DIM = (4, 7, 128) if GPU else (1, 3, 16)
POOL = torch.cuda.graph_pool_handle() if GPU else None
RESULTS: dict[str, object] = {}


def tell(name: str, value: object, target: str = "", passed: bool | None = None) -> None:
    RESULTS[name] = {"value": value, "target": target, "pass": passed}
    verdict = "" if passed is None else "pass " if passed else "FAIL "
    rounded = json.dumps(json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.4g}")))
    print(f"{verdict}{name}: {rounded} {target and f'({target})'}", flush=True)


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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=POOL):
        function()
    return graph.replay


class Cache:
    """Rows of equal length in an arena, and attention over them with any tile."""

    def __init__(self, rows: int, length: int) -> None:
        width = -(-length // 16)
        self.arena = randn(rows * width, 2, KV_HEADS, 16, DIM)
        self.tables = torch.randperm(rows * width, device=DEVICE).to(torch.int32).view(rows, width)
        self.parts = Parts(KV_HEADS, DIM, DEVICE)

    def attend(self, q, queries, contexts, tile: Tile, early: bool = False):
        """A launch, and its output and sums in float32."""
        programs = tile.programs * (torch.cuda.get_device_properties(0).multi_processor_count if GPU else 4)
        shape = WorkShape(tile, GROUP, KV_HEADS, programs)
        words = np.empty(num_words(shape, len(q), len(queries)), dtype=np.int32)
        fill_work(words, np.array(queries, np.int32), np.array(contexts, np.int32), shape)
        work, out = torch.from_numpy(words).to(DEVICE), torch.empty(q.shape, device=DEVICE)
        lse = torch.empty(q.shape[:2], device=DEVICE)
        launch = Launch(tile, programs, False, lse, early)

        def run() -> None:
            attend(q, self.arena, self.tables, work, out, DIM**-0.5, self.parts, launch)

        run()
        return run, out, lse


def part_tiles(kernels: CudaKernels) -> None:
    """Whether tiles of other sizes have the same bits: in float32, where bfloat16 hides nothing."""
    length = 2200 if GPU else 70
    cache, q = Cache(1, length), randn(length, GROUP * KV_HEADS, DIM)
    results = {rows: cache.attend(q, [length], [0], tile)[1:] for rows, tile in tiles_for(DIM, 2).items()}
    for rows, result in results.items():
        shares = [float((a == b).float().mean()) for a, b in zip(result, results[tiles.ONE_SIZE])]
        tell(f"share of outputs and sums with equal bits, tile of {rows} and of {tiles.ONE_SIZE}", shares)


def part_attention(kernels: CudaKernels) -> None:
    ways = [(Tile(rows, 4, stages, programs), early, split)
            for rows in ((16, 64) if GPU else (16,))
            for stages, programs, early, split in (
                (3, 2, False, 512), (3, 3, False, 512), (2, 2, False, 512), (4, 2, False, 512), (3, 2, True, 512),
                (3, 2, False, 256))[: 6 if GPU else 1]]  # fmt: skip
    for rows, context in ((1, 1024), (1, 8192), (64, 1024), (64, 4096), (256, 1024)) if GPU else ((2, 40),):
        num_bytes = rows * context * 4 * KV_HEADS * DIM
        caches = [Cache(rows, context + 1) for _ in range(max(2, min(64, (768 << 20) // num_bytes)) if GPU else 1)]
        q, told = randn(rows, GROUP * KV_HEADS, DIM), {}
        for tile, early, split in ways:
            attention.SPLIT = worklist.SPLIT = split
            try:
                runs = [c.attend(q, [1] * rows, [context] * rows, tile, early)[0] for c in caches]
                us = gpu_us(captured(lambda runs=runs: [run() for run in runs])) / len(caches)
            except Exception as error:  # noqa: BLE001 - a tile too large says so, and the others are measured
                us = repr(error)[:60]
            told[f"{tile.rows}/{tile.stages}/{tile.programs}/{split}{' early' if early else ''}"] = us
        attention.SPLIT = worklist.SPLIT = tiles.SPLIT
        tell(f"decode attention {rows} x {context}, us by rows/stages/programs/split", told,
             f"the memory's limit {num_bytes / READ_GBPS / 1e3:.1f}")
    for length, context in ((8192, 0), (2048, 6144)) if GPU else ((20, 20),):
        cache, q = Cache(1, length + context), randn(length, GROUP * KV_HEADS, DIM)
        for tile in [*list(tiles_for(DIM, 2).values())[1:], Tile(64, 4, 2, 2)]:
            us = gpu_us(cache.attend(q, [length], [context], tile)[0], 5)
            tflops = 4 * GROUP * KV_HEADS * DIM * (length * context + length * (length + 1) / 2) / us / 1e6
            tell(f"prefill attention {length} + {context}, {tile}", tflops, "TFLOP/s: 250", tflops >= 250)


def part_steps(kernels: CudaKernels) -> None:
    for name, m in SHAPES.items():
        prompt = (8192 if GPU else 24) if name == "7b" else 0
        batches = ((1, 64, 256) if name == "7b" else (1, 64)) if GPU else (1, 3)
        model = Model(kernels, m, batches[-1], prompt)
        read = 2 * (m["layers"] * sum(n * k for n, k in products(m).values()) + model.head.numel())
        for early in (True, False) if GPU else (False,):
            kernels.launches_early = early
            for rows in batches:
                graphs = [captured(part) for part in model.prepare([1] * rows, [CONTEXT] * rows)]
                ms = gpu_us(lambda graphs=graphs: [graph() for graph in graphs]) / 1e3
                gbps = (read + rows * CONTEXT * 4 * m["kv_heads"] * m["dim"] * m["layers"]) / ms / 1e6
                target = TARGETS_MS.get(f"{name} {rows}")
                tell(f"decode {name} {rows} x {CONTEXT}{' early' if early else ''}: ms, GB/s, share of the read limit",
                     [ms, gbps, gbps / READ_GBPS], f"at most {target} ms" if target else "",
                     None if target is None else ms <= target)
        if prompt:
            parts = model.prepare([prompt], [0])
            ms = gpu_us(lambda parts=parts: [part() for part in parts], 5) / 1e3
            flop = 2 * prompt * (read / 2 - model.head.numel()) + 2 * m["heads"] * m["dim"] * m["layers"] * prompt**2
            share = flop / ms / 1e9 / DENSE_TFLOPS
            tell(f"prefill {name} {prompt}: ms, share of {DENSE_TFLOPS} TFLOP/s", [ms, share],
                 "at least 0.5", share >= 0.5)
        del model
        if GPU:
            torch.cuda.empty_cache()


PARTS = {"tiles": part_tiles, "attention": part_attention, "steps": part_steps}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="gpu_kernels.json")
    parser.add_argument("--kind", choices=["cuda", "cuda-invariant"])
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    if options.kind is None:
        both = {}
        for kind in ("cuda-invariant", "cuda"):
            print(f"--- {kind}", flush=True)
            subprocess.run(["timeout", "240", sys.executable, __file__, "--kind", kind, "--parts", options.parts,
                            "--out", f"{options.out}.{kind}"])
            own = Path(f"{options.out}.{kind}")
            if own.exists():
                both[kind] = json.loads(own.read_text())
                own.unlink()
        Path(options.out).write_text(json.dumps(both, indent=1))
        return 0
    kernels = CudaKernels(options.kind, DEVICE)
    for name in options.parts.split(","):
        try:
            PARTS[name](kernels)
        except Exception:  # noqa: BLE001 - a part that dies leaves the others
            tell(f"part {name}", traceback.format_exc()[-800:], "runs", False)
        Path(options.out).write_text(json.dumps(RESULTS, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

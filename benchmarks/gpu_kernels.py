"""How fast the CUDA kernels are on one card, with targets and predictions beside: attention, products, whole steps.

    python benchmarks/gpu_kernels.py --out gpu_kernels.json        # both kinds, about two minutes, a table last
    python benchmarks/gpu_kernels.py --kind cuda --parts steps

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
import traceback
from pathlib import Path

import numpy as np
import torch
from gpu_model import CONTEXT, DEVICE, GPU, SHAPES, Model, products, randn

from jettison.device.cuda import attention, skinny, tiles, worklist
from jettison.device.cuda.attention import Launch, Parts, attend
from jettison.device.cuda.kernels import CudaKernels
from jettison.device.cuda.tiles import READ_AHEAD, Skinny, Tile, tiles_for
from jettison.device.cuda.worklist import WorkShape, fill_work, num_words

IS_H100 = GPU and "H100" in torch.cuda.get_device_name()
READ_GBPS, DENSE_TFLOPS = 3050.0 if IS_H100 else 4339.0, 989.0  # an H200's was measured; the vendor's for bfloat16
TARGETS_MS = {"7b 1": 6.0, "7b 64": 7.6, "14b 1": 11.9} if IS_H100 else {"7b 1": 4.2, "7b 64": 5.3, "14b 1": 8.3}
MB = 1 << 20
NOTHING = READ_AHEAD._replace(attention=0, norm=0, silu=0)
WAYS = [Skinny(32, 256, 4, 4), Skinny(16, 256, 2, 6), Skinny(32, 128, 4, 7), Skinny(64, 128, 4, 6)]
WAYS = WAYS if GPU else [Skinny(16, 32, 2, 3)]
VARIANTS = {  # of a step: bytes read ahead by norms and SiLU, by attention, pause, splits of attention
    "plain": (0, 0, 0, 512), "norms 8 MB": (8, 0, 0, 512), "norms 16 MB": (16, 0, 0, 512),
    "norms 8, attention 24": (8, 24, 500, 512), "norms 8, attention 24 at once": (8, 24, 0, 512),
    "norms 16, attention 24": (16, 24, 500, 512), "norms 16, attention 40": (16, 40, 500, 512),
    "norms 16, attention 24, splits of 256": (16, 24, 500, 256),
}  # fmt: skip
PREDICTED_MS = {  # an H200, before any of it had run there
    "7b 1": (4.48, 4.31, 4.24, 4.19, 4.21, 4.12, 4.10, 4.05), "7b 64": (5.52, 5.36, 5.29, 5.29, 5.29, 5.22, 5.22, 5.27),
    "14b 1": (8.45, 8.17, 8.05, 7.97, 8.0, 7.85, 7.8, 7.75), "14b 64": (13.1, 12.9, 12.8, 12.8, 12.8, 12.7, 12.7, 12.8),
}  # fmt: skip
PREDICTED_SKINNY_MS = {"7b 1": 3.98, "14b 1": 7.7}
KV_HEADS, GROUP, DIM = (4, 7, 128) if GPU else (1, 3, 16)
POOL = torch.cuda.graph_pool_handle() if GPU else None
KEEPS_POOL: list[torch.cuda.CUDAGraph] = []
"""One graph that is never released: a pool ends with the last of its graphs."""
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
    if not KEEPS_POOL:
        KEEPS_POOL.append(_graph_of(lambda: torch.zeros(1, device=DEVICE)))
    return _graph_of(function).replay


def _graph_of(function) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=POOL):
        function()
    return graph


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


def set_split(split: int) -> None:
    attention.SPLIT = worklist.SPLIT = split


def part_attention(kernels: CudaKernels) -> None:
    tile = tiles_for(DIM, 2)[tiles.ONE_SIZE if kernels.rows_are_independent and GPU else 16]
    for rows, context in ((1, 1024), (1, 8192), (64, 1024), (256, 1024)) if GPU else ((2, 40),):
        num_bytes = rows * context * 4 * KV_HEADS * DIM
        caches = [Cache(rows, context + 1) for _ in range(max(2, min(64, (768 << 20) // num_bytes)) if GPU else 1)]
        q, told = randn(rows, GROUP * KV_HEADS, DIM), {}
        for split in (512, 256, 128) if GPU else (512,):
            set_split(split)
            try:
                runs = [c.attend(q, [1] * rows, [context] * rows, tile, GPU)[0] for c in caches]
                told[split] = gpu_us(captured(lambda runs=runs: [run() for run in runs])) / len(caches)
            except Exception as error:  # noqa: BLE001 - a split without room says so, and the others are measured
                told[split] = repr(error)[:60]
        set_split(tiles.SPLIT)
        tell(f"decode attention {rows} x {context}, us by split, tile of {tile.rows}", told,
             f"the memory's limit {num_bytes / READ_GBPS / 1e3:.1f}")


def part_products(kernels: CudaKernels) -> None:
    """Each product over enough copies of its matrix that none lies in a cache."""
    if kernels.rows_are_independent:
        return
    for name, m in SHAPES.items():
        for product, (n, k) in {**products(m), "head": (m["vocab"], m["hidden"])}.items():
            weights = [randn(n, k, scale=0.02) for _ in range(max(2, (400 << 20) // (2 * n * k)) if GPU else 1)]
            for rows in (1, 2, 4, 8, 16) if GPU else (2,):
                tell(f"product {name} {product} of {rows} rows, us", product_us(weights, randn(rows, k)),
                     f"the memory's limit {2 * n * k / READ_GBPS / 1e3:.1f}")
            del weights
            if GPU:
                torch.cuda.empty_cache()


def product_us(weights: list[torch.Tensor], x: torch.Tensor) -> dict[str, float]:
    out, told = torch.empty(len(x), len(weights[0]), device=DEVICE, dtype=x.dtype), {}

    def run(way: Skinny | None) -> None:
        for weight in weights:
            if way is None:
                torch.mm(x, weight.t(), out=out)
            else:
                skinny.multiply(x, weight, out, way, GPU)

    for way in (None, *WAYS):
        if way is None or skinny.fits(x, weights[0], way):
            name = "cublas" if way is None else "/".join(map(str, way))
            told[name] = gpu_us(captured(lambda way=way: run(way)), 7) / len(weights)
    return told


def step_ms(model: Model, rows: int, repeat: int = 15) -> float:
    parts = model.prepare([1] * rows, [CONTEXT] * rows)  # they hold what the graphs read
    graphs = [captured(part) for part in parts]
    return gpu_us(lambda: [graph() for graph in graphs], repeat) / 1e3


def choose(kernels: CudaKernels, norm: int, by_attention: int, pace_ns: int, split: int) -> None:
    set_split(split)
    kernels.read_ahead = tiles.ReadAhead(by_attention * MB, norm * MB, norm * MB, pace_ns) if GPU else NOTHING


def breakdown(model: Model, rows: int) -> dict[str, float]:
    """How much shorter a step is without each of its parts, in microseconds a layer."""
    kernels, whole, told = model.kernels, step_ms(model, rows), {}
    for part in ("attend", "prepare_and_write", "add_rms_norm", "silu_mul", "linear"):
        setattr(kernels, part, lambda *_, **__: None)
        try:
            told[part] = (whole - step_ms(model, rows, 7)) * 1e3 / model.m["layers"]
        finally:
            delattr(kernels, part)
    return told


def decode_steps(kernels: CudaKernels, model: Model, name: str, batches: tuple[int, ...]) -> None:
    for rows in batches:
        predictions = PREDICTED_MS.get(f"{name} {rows}", (None,) * len(VARIANTS))
        target = TARGETS_MS.get(f"{name} {rows}")
        found = {}
        for (variant, sizes), predicted in zip(VARIANTS.items(), predictions, strict=True):
            if target is None and variant not in ("plain", "norms 8, attention 24", "norms 16, attention 24"):
                continue
            choose(kernels, *sizes)
            found[variant] = (step_ms(model, rows), predicted)
        best = min(found, key=lambda variant: found[variant][0])
        choose(kernels, *VARIANTS[best])
        if rows <= skinny.MOST_ROWS and not kernels.rows_are_independent:
            kernels.skinny_rows = skinny.MOST_ROWS
            for kernels.skinny in WAYS:
                way = "/".join(map(str, kernels.skinny))
                found[f"{best}, skinny {way}"] = (step_ms(model, rows), PREDICTED_SKINNY_MS.get(f"{name} {rows}"))
            kernels.skinny_rows = 0
        kernels.launches_early, kernels.read_ahead = False, NOTHING
        found["plain, not early"] = (step_ms(model, rows), None)
        kernels.launches_early = GPU
        choose(kernels, *VARIANTS["plain"])
        found["plain again"] = (step_ms(model, rows), predictions[0])
        for variant, (ms, predicted) in found.items():
            RESULTS[f"step {name} {rows}: {variant}"] = {
                "value": ms, "predicted": predicted, "target": target, "pass": target and ms <= target,
            }
        tell(f"decode {name} {rows} x {CONTEXT}, ms", {variant: ms for variant, (ms, _) in found.items()},
             f"at most {target}" if target else "")
        choose(kernels, *VARIANTS[best])
        if target:
            tell(f"decode {name} {rows} x {CONTEXT}, {best}: us a layer that each part takes", breakdown(model, rows))
        choose(kernels, *VARIANTS["norms 8, attention 24"])


def part_steps(kernels: CudaKernels) -> None:
    for name, m in SHAPES.items():
        prompt = (8192 if GPU else 24) if name == "7b" else 0
        batches = ((1, 16, 64, 256) if name == "7b" else (1, 64)) if GPU else (1, 3)
        model = Model(kernels, m, batches[-1], prompt)
        decode_steps(kernels, model, name, batches)
        if prompt:
            parts = model.prepare([prompt], [0])
            ms = gpu_us(lambda parts=parts: [part() for part in parts], 5) / 1e3
            flop = 2 * prompt * m["layers"] * sum(n * k for n, k in products(m).values())
            flop += 2 * m["heads"] * m["dim"] * m["layers"] * prompt**2
            share = flop / ms / 1e9 / DENSE_TFLOPS
            RESULTS[f"step {name} prefill {prompt}: plain"] = {"value": ms, "predicted": None, "target": None}
            tell(f"prefill {name} {prompt}: ms, share of {DENSE_TFLOPS} TFLOP/s", [ms, share],
                 "at least 0.5", share >= 0.5)
            del parts
        del model
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()


def print_table(both: dict[str, dict]) -> None:
    """Steps of both kinds beside what was predicted and what is asked; the last: how much equal bits cost."""
    print(f"\n{'step, ms':62}{'predicted':>10}{'target':>8}{'cuda':>9}{'invariant':>10}{'ratio':>7}", flush=True)
    names = dict.fromkeys(name for results in both.values() for name in results if name.startswith("step "))
    best: dict[str, dict[str, float]] = {}
    for name in sorted(names, key=lambda name: name.partition(":")[0]):
        entries = {kind: results[name] for kind, results in both.items() if name in results}
        values = {kind: entry["value"] for kind, entry in entries.items()}
        entry = next(iter(entries.values()))
        line(name, entry["predicted"], entry["target"], values)
        for kind, ms in values.items():
            of_step = best.setdefault(name.partition(":")[0], {})
            of_step[kind] = min(ms, of_step.get(kind, ms))
    for step, values in best.items():
        line(f"{step}: best", None, TARGETS_MS.get(step.removeprefix("step ")), values)


def line(name: str, predicted: float | None, target: float | None, values: dict[str, float]) -> None:
    cuda, invariant = values.get("cuda"), values.get("cuda-invariant")
    ratio = f"{invariant / cuda:7.3f}" if cuda and invariant else f"{'':7}"
    shown = [f"{value:{width}.{digits}f}" if value else " " * width
             for value, width, digits in ((predicted, 10, 2), (target, 8, 1), (cuda, 9, 3), (invariant, 10, 3))]
    met = [kind for kind, ms in values.items() if target and ms <= target]
    print(f"{name:62}{''.join(shown)}{ratio} {'met by ' + ', '.join(met) if met else ''}", flush=True)


PARTS = {"steps": part_steps, "attention": part_attention, "products": part_products, "tiles": part_tiles}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="gpu_kernels.json")
    parser.add_argument("--kind", choices=["cuda", "cuda-invariant"])
    parser.add_argument("--parts", default="steps,attention,products")
    options = parser.parse_args()
    if options.kind is None:
        both = {}
        for kind, most_s in (("cuda", "80"), ("cuda-invariant", "50")):
            print(f"--- {kind}", flush=True)
            subprocess.run(["timeout", most_s, sys.executable, __file__, "--kind", kind, "--parts", options.parts,
                            "--out", f"{options.out}.{kind}"])
            own = Path(f"{options.out}.{kind}")
            if own.exists():
                both[kind] = json.loads(own.read_text())
                own.unlink()
        Path(options.out).write_text(json.dumps(both, indent=1))
        print_table(both)
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

"""Native kernels against torch's, operation by operation, in one run and interleaved.

    python -m benchmarks kernels compare [--dtype bfloat16 --dtype float32] [--threads 1] [--quick] [--json OUT]

Prints one line a case: median microseconds of each back end, what rate that is, and the ratio (above 1: native is
faster) with its spread over the repetitions. Absolute times drift on shared machines; the ratio is what to read.
Weights of small batches are rotated through more memory than the caches hold, as a decode step finds them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.shared import Row, keep, machine, parse, print_rows
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.operands import PackedMatrix, Weight
from jettison.device.sampler import Sampler
from jettison.device.step import SamplingRow

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 768, 2048, 12, 4, 64, 16
"""A 110M-parameter Qwen3-like layer."""

CACHE_BYTES = 96 << 20
"""More than the last-level cache of the machines this runs on."""

Run = Callable[[Kernels], None]


@dataclass
class Case:
    """One operation at one size."""

    operation: str
    size: str
    dtype: str
    run: Run
    flops: float
    """Arithmetic of one call; 0 where the rate would mean nothing."""
    calls: int = 1
    """Calls that one ``run`` makes."""


@dataclass
class Result:
    operation: str
    size: str
    dtype: str
    native_us: float
    torch_us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    native_gflops: float


def linear_cases(dtype: torch.dtype, batches: list[int]) -> Iterator[Case]:
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    for n, k in ((qkv, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)):
        for m in batches:
            weight_bytes = n * k * dtype.itemsize
            copies = max(1, CACHE_BYTES // weight_bytes) if m <= 16 else 1
            plain = [torch.randn(n, k).to(dtype) for _ in range(copies)]
            x, out = torch.randn(m, k).to(dtype), torch.empty(m, n, dtype=dtype)

            forms: dict[str, list[Weight]] = {}

            def run(kernels: Kernels, plain: Any = plain, x: Any = x, out: Any = out, forms: Any = forms) -> None:
                if kernels.name not in forms:  # in the first run, which is thrown away
                    forms[kernels.name] = [in_slab(kernels, weight) for weight in plain]
                for weight in forms[kernels.name]:
                    kernels.linear(x, weight, None, out)

            yield Case("linear", f"M={m} N={n} K={k}", _name(dtype), run, 2.0 * m * n * k, copies)


def in_slab(kernels: Kernels, plain: torch.Tensor) -> Weight:
    """A matrix as it lies in a slab of a worker with these kernels."""
    if not kernels.packs(tuple(plain.shape), plain.dtype):
        return plain
    packed = PackedMatrix(torch.empty_like(plain))
    kernels.pack_rows(plain, 0, packed)
    return packed


def attention_cases(dtype: torch.dtype, shapes: list[tuple[int, int, int]]) -> Iterator[Case]:
    for rows, context, queries in shapes:
        blocks = -(-(context + queries) // BLOCK_SIZE)
        arena = torch.randn(rows * blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)
        tables = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks).astype(np.int32)
        q = torch.randn(rows * queries, HEADS, HEAD_DIM).to(dtype)
        out = torch.empty_like(q)
        query_lens, context_lens = np.full(rows, queries, np.int32), np.full(rows, context, np.int32)
        pairs = rows * (queries * context + queries * (queries + 1) / 2)

        def run(kernels: Kernels, args: Any = (q, arena, tables, query_lens, context_lens, out)) -> None:
            kernels.attention(*args, HEAD_DIM**-0.5)

        size = f"rows={rows} context={context} queries={queries}"
        yield Case("attention", size, _name(dtype), run, 4.0 * HEADS * HEAD_DIM * pairs)


def small_cases(dtype: torch.dtype, batches: list[int]) -> Iterator[Case]:
    weight, head_weight = torch.ones(HIDDEN, dtype=dtype), torch.ones(HEAD_DIM, dtype=dtype)
    cos, sin = torch.randn(512, HEAD_DIM), torch.randn(512, HEAD_DIM)
    for m in batches:
        x, residual = torch.randn(m, HIDDEN).to(dtype), torch.randn(m, HIDDEN).to(dtype)
        gate_up, half = torch.randn(m, 2 * INTERMEDIATE).to(dtype), torch.empty(m, INTERMEDIATE, dtype=dtype)
        fused = torch.randn(m, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype).unflatten(1, (-1, HEAD_DIM))
        q, k, v = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        positions = np.arange(m, dtype=np.int32) % 512
        arena = torch.zeros(m, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype)
        rows = np.arange(m, dtype=np.int32)[:, None], np.ones(m, np.int32), np.zeros(m, np.int32)
        runs: dict[str, Run] = {
            "rms_norm": lambda kn, x=x: kn.rms_norm(x, weight, 1e-6, x),  # type: ignore[misc]
            "add_rms_norm": lambda kn, x=x, r=residual: kn.add_rms_norm(x, r, weight, 1e-6, x),  # type: ignore[misc]
            "head_rms_norm": lambda kn, q=q: kn.head_rms_norm(q, head_weight, 1e-6),  # type: ignore[misc]
            "rotary": lambda kn, q=q, k=k, p=positions: kn.rotary(q, k, cos, sin, p),  # type: ignore[misc]
            "silu_mul": lambda kn, g=gate_up, o=half: kn.silu_mul(g, o),  # type: ignore[misc]
            "write_kv": lambda kn, k=k, v=v, a=arena, r=rows: kn.write_kv(k, v, a, *r),  # type: ignore[misc]
        }
        for operation, run in runs.items():
            yield Case(operation, f"T={m}", _name(dtype), run, 0.0)


def measure(case: Case, native: Kernels, reference: Kernels, repeats: int, clock: Callable[[], float]) -> Result:
    """Interleaved repetitions; each side's first run is thrown away."""
    times: dict[str, list[float]] = {"native": [], "torch": []}
    for repeat in range(repeats + 1):
        for side, kernels in (("native", native), ("torch", reference)):
            start = clock()
            case.run(kernels)
            if repeat:
                times[side].append((clock() - start) / case.calls * 1e6)
    ratios = [b / a for a, b in zip(times["native"], times["torch"], strict=True)]
    fast = statistics.median(times["native"])
    return Result(
        case.operation, case.size, case.dtype, fast, statistics.median(times["torch"]), statistics.median(ratios),
        min(ratios), max(ratios), case.flops / fast / 1e3,
    )  # fmt: skip


def sampler_times(quick: bool) -> list[Row]:
    """Milliseconds of one call for a whole batch; there is no second back end to compare with."""
    results = []
    for vocab_size in (320, 32_000) if quick else (320, 32_000, 151_936):
        sampler, logits = Sampler(vocab_size), torch.randn(256, vocab_size) * 4
        base: dict[str, Any] = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        kinds = {"greedy": None, "temperature": {}, "top_k=50": {"top_k": 50}, "top_p=0.9": {"top_p": 0.9}}
        for kind, fields in kinds.items():
            rows = range(256)
            specs = [] if fields is None else [SamplingRow(row, row, row, **(base | fields)) for row in rows]
            best = float("inf")
            for _ in range(2):
                start = time.perf_counter()
                sampler.sample(logits, rows, specs)
                best = min(best, (time.perf_counter() - start) * 1e3)
            results.append({"vocab_size": vocab_size, "batch": 256, "kind": kind, "ms": best})
    return results


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    options = parse(
        __doc__, dtype=(None, {"action": "append", "choices": ["bfloat16", "float32", "float64"]}),
        kernels=("native", "what to compare with torch: native or native-<variant>"), threads=1, repeats=5,
        quick=(False, "fewer sizes"),
    )  # fmt: skip
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    native, reference = load_kernels(options.kernels), load_kernels("torch")
    # One thread's own time leaves out what other processes take from a shared core.
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    setting = machine() | {
        "kernels": native.name, "threads": options.threads, "repeats": options.repeats, "clock": clock.__name__
    }  # fmt: skip
    print(setting)
    batches = [1, 16, 64] if options.quick else [1, 2, 4, 8, 16, 32, 64, 128, 512]
    shapes = [(1, 128, 1), (16, 160, 1), (64, 160, 1), (256, 64, 1), (4, 2000, 1), (4, 0, 128), (1, 0, 512),
              (1, 1536, 512)]  # fmt: skip
    results = []
    for dtype in (getattr(torch, name) for name in options.dtype or ["bfloat16", "float32"]):
        for cases in (
            linear_cases(dtype, batches), attention_cases(dtype, shapes[::3] if options.quick else shapes),
            small_cases(dtype, [1, 64] if options.quick else [1, 16, 64, 256]),
        ):
            for case in cases:
                results.append(asdict(measure(case, native, reference, options.repeats, clock)))
    print_rows(results)
    sampler = sampler_times(options.quick)
    print_rows(sampler)
    keep(options.json, {"machine": setting, "results": results, "sampler": sampler}, "device")

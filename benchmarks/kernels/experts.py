"""A layer's experts against our own dense MLP that reads the same bytes and does the same operations.

    python -m benchmarks kernels experts [--dtype bfloat16] [--threads 2] [--repeats 9] [--json OUT]

With even routing, T tokens of k experts each, of E, read A = min(E, T * k) experts, each for T * k / A tokens. A dense
MLP of A times an expert's width does so for that many rows. Layers are rotated through more memory than the caches
hold, as a step finds them; both sides are interleaved. The ratio is dense time over experts' time: 1 is as fast.
Besides: the same tokens with random routing, and the loop over experts that ``Kernels.experts`` stands for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.compare import CACHE_BYTES, in_slab
from benchmarks.shared import Row, keep, machine, parse, print_rows
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.experts import pass_experts
from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.operands import ExpertWeights, PackedMatrix, RoutedBuffers, Weight, WeightStack

NUMBER, CHOSEN, HIDDEN, INNER = 32, 4, 1024, 512
"""A small mixture: 50 million parameters a layer, 6.3 of them for a token."""
BATCHES = (1, 16, 64)


class Shape(NamedTuple):
    """Experts that are read, and rows of the dense MLP, for a number of tokens."""

    tokens: int
    experts: int
    rows: int

    @classmethod
    def of(cls, tokens: int) -> Shape:
        experts = min(NUMBER, tokens * CHOSEN)
        return cls(tokens, experts, tokens * CHOSEN // experts)


def experts_of(kernels: Kernels, dtype: torch.dtype) -> ExpertWeights:
    """One layer's, as they lie in a slab."""
    def stack(rows: int, columns: int) -> WeightStack:
        plain = [torch.randn(rows, columns).mul_(0.02).to(dtype) for _ in range(NUMBER)]
        forms = [in_slab(kernels, matrix) for matrix in plain]
        data = torch.stack([form.data if isinstance(form, PackedMatrix) else form for form in forms])
        return WeightStack(data, isinstance(forms[0], PackedMatrix))

    router = torch.empty(NUMBER, HIDDEN)
    return ExpertWeights(router, None, None, stack(2 * INNER, HIDDEN), None, stack(HIDDEN, INNER), None)


def routed(
    kernels: Kernels, layers: list[ExpertWeights], turns: list[Tensor], dtype: torch.dtype, *, loops: bool = False
) -> tuple[int, Callable[[], None]]:
    """(calls, a pass through all layers for each choice of experts). Nothing of torch is in it: its threads would go on
    to look for work on the cores that the kernels' need."""
    tokens = len(turns[0])
    x, out = torch.randn(tokens, HIDDEN).to(dtype), torch.empty(tokens, HIDDEN, dtype=dtype)
    shares = torch.full(turns[0].shape, 1.0 / CHOSEN)
    sizes = 2 * INNER, INNER, HIDDEN
    buffers = RoutedBuffers(*(torch.zeros(tokens * CHOSEN, size, dtype=dtype) for size in sizes))
    compute = partial(pass_experts, kernels) if loops else kernels.experts

    def run() -> None:
        for chosen in turns:
            for weights in layers:
                compute(x, chosen, shares, weights, "silu", buffers, out)

    return len(turns) * len(layers), run


def dense(
    kernels: Kernels, layers: list[list[Weight]], shape: Shape, dtype: torch.dtype
) -> tuple[int, Callable[[], None]]:
    """Likewise."""
    inner = shape.experts * INNER
    x, up = torch.randn(shape.rows, HIDDEN).to(dtype), torch.empty(shape.rows, 2 * inner, dtype=dtype)
    activated, out = torch.empty(shape.rows, inner, dtype=dtype), torch.empty(shape.rows, HIDDEN, dtype=dtype)

    def run() -> None:
        for first, second in layers:
            kernels.linear(x, first, None, up)
            kernels.silu_mul(up, activated)
            kernels.linear(activated, second, None, out)

    return len(layers), run


def measure(
    kernels: Kernels, dtype: torch.dtype, tokens: int, repeats: int, clock: Callable[[], float]
) -> Row:
    """Medians of one layer."""
    shape = Shape.of(tokens)
    layer_bytes = 3 * INNER * HIDDEN * dtype.itemsize * shape.experts
    copies = max(1, CACHE_BYTES // layer_bytes)
    stacks = [experts_of(kernels, dtype) for _ in range(max(1, CACHE_BYTES // (NUMBER * layer_bytes // shape.experts)))]
    even = (torch.arange(tokens * CHOSEN) % NUMBER).view(tokens, CHOSEN)
    random = torch.stack([torch.randperm(NUMBER)[:CHOSEN] for _ in range(tokens)])
    inner = shape.experts * INNER
    sizes = (2 * inner, HIDDEN), (HIDDEN, inner)
    denses = [[in_slab(kernels, torch.randn(*size).to(dtype)) for size in sizes] for _ in range(copies)]
    # One token's experts change from pass to pass, as layers do: else they would stay in the caches.
    turns = [(even + shape.experts * i) % NUMBER for i in range(NUMBER // shape.experts)]
    runs = {
        "dense": dense(kernels, denses, shape, dtype), "experts": routed(kernels, stacks, turns, dtype),
        "random": routed(kernels, stacks, [random], dtype), "loop": routed(kernels, stacks, [even], dtype, loops=True),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, (calls, run) in runs.items():
            started = clock()
            run()
            if repeat:
                times[name].append(1e3 * (clock() - started) / calls)
    ratios = sorted(a / b for a, b in zip(times["dense"], times["experts"], strict=True))
    medians = {f"{name}_ms": round(statistics.median(values), 4) for name, values in times.items()}
    return {
        "dtype": str(dtype).removeprefix("torch."), "tokens": tokens, "experts": shape.experts, "rows": shape.rows,
        **medians, "ratio": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1],
        "gb_s": layer_bytes / statistics.median(times["experts"]) / 1e6,
    }  # fmt: skip


def main() -> None:
    dtypes = {"action": "append", "choices": ["bfloat16", "float32"]}
    options = parse(__doc__, dtype=(None, dtypes), threads=2, repeats=9)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    # One thread's own time leaves out what other processes take from a shared core.
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    rows = []
    for name in options.dtype or ["bfloat16"]:
        dtype = getattr(torch, name)
        kernels = load_kernels("native")
        rows += [measure(kernels, dtype, tokens, options.repeats, clock) for tokens in BATCHES]
    print_rows(rows)
    setting = machine() | {"kernels": kernels.name, "threads": options.threads}
    keep(options.json, {"machine": setting, "rows": rows}, "device")

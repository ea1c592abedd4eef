"""What this machine could do at best: bytes a second from memory, and the rate of matrix products.

    python -m benchmarks kernels limits [--threads 2] [--json OUT]

Reading: a matrix larger than every cache times one row by the kernels, and torch's sum over as many bytes; the faster
counts. Products: 2,048 rows by matrices that stay in the cache, by the kernels and by torch (MKL, oneDNN); the faster
counts. From both follows the least time of a decode step of the 107M model of `peers throughput`: its weights are
read once, and every row multiplied by all of them; keys and values, norms and Python come on top. What share of it is
reached is in `docs/performance.md`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.engines.weights import QWEN3_110M
from benchmarks.kernels.compare import in_slab
from benchmarks.shared import keep, machine, milliseconds, parse, print_rows
from jettison.device.dtypes import name_of
from jettison.device.kernels.loading import load_kernels

READ_BYTES = 512 << 20
ROWS, COLS = 2048, 768
BATCHES = (1, 16, 64, 256)


def best_of(run: Callable[[], object], repeats: int = 7) -> float:
    """Seconds of the fastest run: a limit is not a median."""
    run()
    return min(milliseconds(run) for _ in range(repeats)) / 1e3


def read_rates(dtype: torch.dtype) -> dict[str, float]:
    """GB/s by what reads."""
    kernels = load_kernels("auto", name_of(dtype))
    outputs = READ_BYTES // COLS // dtype.itemsize
    weight = in_slab(kernels, torch.zeros(outputs, COLS, dtype=dtype))
    x, out = torch.ones(1, COLS, dtype=dtype), torch.empty(1, outputs, dtype=dtype)
    numbers = torch.zeros(READ_BYTES // 8, dtype=torch.int64)
    return {
        kernels.name: READ_BYTES / best_of(lambda: kernels.linear(x, weight, None, out)) / 1e9,
        "torch sum": READ_BYTES / best_of(numbers.sum) / 1e9,
    }


def product_rates(dtype: torch.dtype) -> dict[str, float]:
    """GFLOP/s by what multiplies."""
    x, plain = torch.randn(ROWS, COLS).to(dtype), torch.randn(COLS, COLS).to(dtype)
    out, rates = torch.empty(ROWS, COLS, dtype=dtype), {}
    for name in ("auto", "torch"):
        kernels = load_kernels(name, name_of(dtype))
        weight = in_slab(kernels, plain)
        rates[kernels.name] = 2.0 * ROWS * COLS * COLS / best_of(lambda: kernels.linear(x, weight, None, out)) / 1e9  # noqa: B023
    return rates


def main() -> None:
    options = parse(__doc__, threads=2)
    torch.set_num_threads(options.threads)
    document: dict[str, object] = {"machine": machine(), "threads": options.threads}
    for dtype in (torch.bfloat16, torch.float32):
        reads, products = read_rates(dtype), product_rates(dtype)
        num_weights = QWEN3_110M.num_parameters()
        read_ms = 1e3 * num_weights * dtype.itemsize / (max(reads.values()) * 1e9)
        steps = {b: max(read_ms, 1e3 * 2.0 * b * num_weights / (max(products.values()) * 1e9)) for b in BATCHES}
        name = str(dtype).removeprefix("torch.")
        document[name] = {"read_gb_s": reads, "products_gflop_s": products, "step_ms": steps}
        rates = {f"GB/s, {by}": r for by, r in reads.items()} | {f"GFLOP/s, {by}": r for by, r in products.items()}
        print_rows([{"dtype": name} | rates | {f"step of {b}, ms": ms for b, ms in steps.items()}])
    keep(options.json, document, "device")

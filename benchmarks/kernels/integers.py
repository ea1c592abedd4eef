"""Weights that are kept as small integers against the same shapes in bfloat16, packed.

    python -m benchmarks kernels integers [--forms int4-g32 ...] [--batches 1 ...] [--threads 2] [--json OUT]

Matrices are rotated through more memory than the caches hold, as a step finds them; the forms are interleaved. The
ratio is bfloat16's time over the form's: above 1 integers are faster. GB/s are of the form's own bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.kernels.compare import CACHE_BYTES, in_slab
from benchmarks.shared import Row, keep, machine, parse, print_rows
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.operands import IntegerMatrix, Weight
from jettison.device.model.integers import IntegerForm

SHAPES = ((4096, 2048), (2048, 5632))
"""Of an MLP of some 1.1 billion parameters."""
BATCHES = (1, 4, 16, 64)
FORMS = {
    "bfloat16": None,
    "int4-g32": IntegerForm(4, 32, "float16", "none"), "int4-g32-min": IntegerForm(4, 32, "float16", "min"),
    "int4-g128-zero": IntegerForm(4, 128, "float16", "zero"), "int8-g32": IntegerForm(8, 32, "float16", "none"),
}  # fmt: skip


def matrices(kernels: Kernels, form: IntegerForm | None, rows: int, columns: int) -> list[Weight]:
    """As many different ones as caches cannot hold."""
    if form is None:
        plain = torch.randn(rows, columns).mul_(0.02).to(torch.bfloat16)
        return [in_slab(kernels, plain) for _ in range(-(-CACHE_BYTES // plain.nbytes))]
    numbers, most = (rows, columns // form.group_size), 1 << (form.bits - 1)
    integers = torch.randint(-most, most, (rows, columns), dtype=torch.int8)
    scales, offsets = torch.full(numbers, 0.02 / most).half(), torch.ones(numbers).half()
    num_bytes = form.num_bytes(rows, columns)
    made: list[Weight] = []
    for _ in range(-(-CACHE_BYTES // num_bytes)):
        matrix = IntegerMatrix(torch.empty(num_bytes, dtype=torch.uint8), rows, columns, form)
        kernels.pack_integers(integers, scales, None if form.offset == "none" else offsets, 0, matrix)
        made.append(matrix)
    return made


def measure(
    kernels: Kernels, names: list[str], batches: list[int], shape: tuple[int, int], repeats: int,
    clock: Callable[[], float],
) -> list[Row]:
    """Medians of one product; each repeat takes all of a form's matrices once."""
    weights = {name: matrices(kernels, FORMS[name], *shape) for name in ("bfloat16", *names)}
    found: list[Row] = []
    for batch in batches:
        x, out = torch.randn(batch, shape[1]).bfloat16(), torch.empty(batch, shape[0], dtype=torch.bfloat16)
        times: dict[str, list[float]] = {name: [] for name in weights}
        for repeat in range(repeats + 1):
            for name, those in weights.items():
                started = clock()
                for weight in those:
                    kernels.linear(x, weight, None, out)
                if repeat:
                    times[name].append((clock() - started) / len(those))
        for name in names:
            ratios = sorted(a / b for a, b in zip(times["bfloat16"], times[name], strict=True))
            took = statistics.median(times[name])
            form = FORMS[name]
            assert form is not None
            found.append({
                "shape": f"{shape[0]}x{shape[1]}", "batch": batch, "form": name, "us": round(1e6 * took, 1),
                "bfloat16_us": round(1e6 * statistics.median(times["bfloat16"]), 1),
                "ratio": round(statistics.median(ratios), 2), "lowest": round(ratios[0], 2),
                "highest": round(ratios[-1], 2), "gb_s": round(form.num_bytes(*shape) / took / 1e9, 1),
                "bfloat16_gb_s": round(2 * shape[0] * shape[1] / statistics.median(times["bfloat16"]) / 1e9, 1),
            })  # fmt: skip
    return found


def main() -> None:
    names = [name for name in FORMS if name != "bfloat16"]
    options = parse(__doc__, forms=names, batches=list(BATCHES), threads=2, repeats=9)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    # One thread's own time leaves out what other processes take from a shared core.
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    kernels = load_kernels("native")
    rows: list[Row] = []
    for shape in SHAPES:
        rows += measure(kernels, options.forms, options.batches, shape, options.repeats, clock)
    print_rows(rows)
    setting = machine() | {"kernels": kernels.name, "threads": options.threads}
    keep(options.json, {"machine": setting, "rows": rows}, "device")

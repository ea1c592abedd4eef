"""What has become slower or faster since the stored figures, machine's mood aside: no test, a look before a landing.

    python -m benchmarks kernels guard            # compares with guard.json
    python -m benchmarks kernels guard --store    # keeps this run's figures for this kind of processor
    python -m benchmarks kernels guard --file F   # compares with figures that another checkout's guard has stored

Every measure is taken between two runs of a reference that no change of ours touches (a product of numpy's, sorting, a
loop of Python), and divided by them: a machine that drifts moves both. Medians of several rounds; their spread is
shown, and what moved by more than a tenth and by more than both spreads is named. Figures are kept by the kernels'
name: another processor has others.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.engines.weights import QWEN3_02M, make_folder
from benchmarks.kernels.compare import in_slab
from benchmarks.servers import greedy
from benchmarks.shared import Row, milliseconds, parse, print_rows
from jettison.config import EngineConfig
from jettison.device.dtypes import name_of
from jettison.device.kernels.loading import load_kernels
from jettison.live.engine.local_cluster import LocalCluster

STORED = Path(__file__).with_name("guard.json")
Measure = Callable[[], float]
"""Runs once; seconds."""


def reference() -> None:
    """A few milliseconds of what engines do: products, memory, Python."""
    matrix = np.full((256, 256), 0.5, dtype=np.float32)
    for _ in range(4):
        matrix = matrix @ matrix * np.float32(1e-2)
    np.sort(np.arange(200_000, 0, -1, dtype=np.int32) % 9973)
    total = {}
    for number in range(20_000):
        total[number % 97] = total.get(number % 97, 0) + number


def products(dtype: torch.dtype, rows: int) -> Measure:
    kernels = load_kernels("auto", name_of(dtype))
    weights = [in_slab(kernels, torch.randn(1280, 768).to(dtype)) for _ in range(24)]
    x, out = torch.randn(rows, 768).to(dtype), torch.empty(rows, 1280, dtype=dtype)

    def run() -> None:
        for weight in weights:
            kernels.linear(x, weight, None, out)

    return lambda: milliseconds(run) / 1e3


def steps(cluster: LocalCluster, batch: int) -> Measure:
    """32 decode steps of a model with next to nothing to compute."""
    names = iter(range(1_000_000_000))

    def run() -> float:
        ids = [f"{batch}-{next(names)}" for _ in range(batch)]
        for request_id in ids:
            cluster.submit(request_id, [65 + hash(request_id) % 60] * 16, greedy(33))
        took_ms = milliseconds(cluster.run)
        for request_id in ids:
            del cluster.completions[request_id]
        return took_ms / 1e3

    return run


def measure(measures: dict[str, Measure], rounds: int) -> dict[str, list[float]]:
    """Each measure over its reference, round by round; the first round is thrown away."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds + 1):
        for name, run in measures.items():
            before_ms, own_s, after_ms = milliseconds(reference), run(), milliseconds(reference)
            if number:
                found[name].append(2e3 * own_s / (before_ms + after_ms))
    return found


def main() -> None:
    options = parse(__doc__, rounds=15, store=(False, "write the file"), file=(STORED, "of stored figures"))
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        model = make_folder(Path(folder), QWEN3_02M, "float32")
        config = EngineConfig.resolve(
            model=str(model), instances=1, num_threads=1, memory="256MiB", overload="recompute", max_num_seqs=256,
            max_num_batched_tokens=4096, enable_prefix_caching=False,
        )
        cluster = LocalCluster(config)
        cluster.start()
        try:
            found = measure({
                **{f"steps of {batch}, engine": steps(cluster, batch) for batch in (1, 64, 256)},
                **{f"products of {rows} rows, {str(dtype).removeprefix('torch.')}": products(dtype, rows)
                   for dtype in (torch.bfloat16, torch.float32) for rows in (1, 16, 64)},
            }, options.rounds)
        finally:
            cluster.close()
    kind = load_kernels("auto", "bfloat16").name
    stored = json.loads(options.file.read_text()) if options.file.exists() else {}
    before = stored.get(kind, {})
    rows: list[Row] = []
    ours: dict[str, dict[str, float]] = {}
    for name, ratios in found.items():
        median = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4)
        spread = (high - low) / median
        ours[name] = {"ratio": round(median, 4), "spread": round(spread, 4)}
        old = before.get(name)
        change = median / old["ratio"] if old else 1.0
        has_moved = old is not None and abs(change - 1) > max(0.1, spread, old["spread"])
        verdict = ("slower" if change > 1 else "faster") if has_moved else ""
        rows.append({"in references": name, "now": median, "spread": spread, "stored": old and old["ratio"],
                     "now / stored": change, "moved": verdict})  # fmt: skip
    print_rows(rows, title=f"kernels {kind}; what is stored is of {'this kind' if before else 'no such processor'}")
    if options.store:
        options.file.write_text(json.dumps({**stored, kind: ours}, indent=1) + "\n")

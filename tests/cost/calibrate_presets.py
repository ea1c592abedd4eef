"""Fit the efficiencies of ``jettison.cost.gpus`` to measured operator times, and say how far off they are.

    JETTISON_DATA=DIR python tests/cost/calibrate_presets.py

The data are Vidur's profiling tables (microsoft/vidur, MIT, commit 7d47513): linear and elementwise operators of
Llama-2-7B, Qwen-72B and Llama-3-70B on A100 and of the first two on H100, split over 1 to 8 processors; all-reduce and
send/recv on DGX nodes. Fitted at one number of tokens in each quarter of a doubling; all the others judge. Prints what
``gpus.py`` should hold.
"""

from __future__ import annotations

import csv
import gzip
import os
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jettison.cost.roofline import elementwise_bytes

PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
ELEMENTWISE = ("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add")
MODELS = {
    "a100": ("meta-llama_Llama-2-7b-hf", "Qwen_Qwen-72B", "meta-llama_Meta-Llama-3-70B"),
    "h100": ("meta-llama_Llama-2-7b-hf", "Qwen_Qwen-72B"),
}
PEAKS = {"a100": (312e12, 2.039e12, 300e9), "h100": (989e12, 3.35e12, 450e9)}
"""FLOP/s, bytes/s of memory, NVLink bytes/s per direction of the machines that were measured (DGX A100 80 GB, H100)."""
MAX_TOKENS = 8192


@dataclass(frozen=True)
class Point:
    """One layer at one number of tokens on one of ``ranks`` processors."""

    model: str
    ranks: int
    num_tokens: int
    parameters: float
    products_s: float
    moved_bytes: float
    elementwise_s: float
    is_fitted: bool


def rows(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def operator_points(family: str, folder: Path) -> list[Point]:
    points = []
    for model in MODELS[family]:
        groups: dict[tuple[int, int], list[dict[str, str]]] = defaultdict(list)
        for row in rows(folder / f"vidur_compute_{family}_{model}_mlp.csv.gz"):
            groups[int(row["num_tensor_parallel_workers"]), int(row["num_tokens"])].append(row)
        chosen = middle_of_each_quarter({num_tokens for _, num_tokens in groups if num_tokens <= MAX_TOKENS})
        for (ranks, num_tokens), found in sorted(groups.items()):
            if num_tokens <= MAX_TOKENS:
                points.append(_point(model, ranks, num_tokens, found, num_tokens in chosen))
    return points


def middle_of_each_quarter(sizes: set[int]) -> set[int]:
    """One size of each quarter of a doubling: even over the logarithm, and not only the round ones."""
    quarters: dict[int, list[int]] = defaultdict(list)
    for size in sorted(sizes):
        quarters[int(4 * np.log2(size))].append(size)
    return {found[len(found) // 2] for found in quarters.values()}


def _point(model: str, ranks: int, num_tokens: int, found: list[dict[str, str]], is_fitted: bool) -> Point:
    def seconds(names: tuple[str, ...]) -> float:
        return sum(1e-3 * statistics.median(float(row[f"time_stats.{n}.median"]) for row in found) for n in names)

    hidden, heads = int(found[0]["n_embd"]), int(found[0]["n_head"])
    keys, width = int(found[0]["n_kv_head"]) * hidden // heads, int(found[0]["n_expanded_embd"])
    parameters = (hidden * (2 * hidden + 2 * keys) + 3 * hidden * width) / ranks
    moved = num_tokens * elementwise_bytes(hidden, (hidden + keys) / ranks, width / ranks)
    return Point(model, ranks, num_tokens, parameters, seconds(PRODUCTS), moved, seconds(ELEMENTWISE), is_fitted)


def fit_products(points: list[Point], family: str) -> dict[str, float]:
    """Grid over (gemm, memory, knee), refined twice; the fixed part follows by least squares of the relative error."""
    flops, bandwidth, _ = PEAKS[family]
    measured = np.array([p.products_s for p in points])
    compute = np.array([2.0 * p.num_tokens * p.parameters / flops for p in points]) / measured
    memory = np.array([2.0 * p.parameters / bandwidth for p in points]) / measured
    once = 1.0 / measured
    centre, width = np.array([0.72, 0.8, 3.0]), np.array([0.14, 0.18, 1.8])
    best: tuple[float, tuple[float, ...]] = (np.inf, ())
    for _ in range(4):
        axes = [np.linspace(c - w, c + w, 13) for c, w in zip(centre, width, strict=True)]
        for gemm in axes[0]:
            for reached in axes[1][axes[1] <= 1.0]:
                for knee in axes[2][axes[2] >= 1.0]:
                    shape = ((compute / gemm) ** knee + (memory / reached) ** knee) ** (1.0 / knee)
                    fixed = max(0.0, float(once @ (1.0 - shape) / (once @ once)))
                    error = float(np.mean((shape + fixed * once - 1.0) ** 2))
                    if error < best[0]:
                        best = (error, (gemm, reached, knee, fixed))
        centre, width = np.array(best[1][:3]), width / 4
    return dict(zip(("gemm", "memory", "knee", "gemm_layer_s"), map(float, best[1]), strict=True))


def predict_products(found: dict[str, float], p: Point, family: str) -> float:
    flops, bandwidth, _ = PEAKS[family]
    compute = 2.0 * p.num_tokens * p.parameters / flops / found["gemm"]
    memory = 2.0 * p.parameters / bandwidth / found["memory"]
    return found["gemm_layer_s"] + (compute ** found["knee"] + memory ** found["knee"]) ** (1.0 / found["knee"])


def fit_line(xs: np.ndarray, ys: np.ndarray) -> tuple[float, float]:
    """(constant, slope) >= 0 with the least relative squared error."""
    matrix = np.stack([1.0 / ys, xs / ys], axis=1)
    solution, *_ = np.linalg.lstsq(matrix, np.ones(len(ys)), rcond=None)
    return max(0.0, float(solution[0])), max(0.0, float(solution[1]))


def network_points(folder: Path, family: str, what: str) -> dict[tuple[int, int], list[tuple[int, float]]]:
    """(ranks, processors per node) -> (bytes, seconds), the median over repeats."""
    found: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for row in rows(folder / f"vidur_network_{family}_dgx_{what}.csv.gz"):
        key = (int(row["num_workers"]), int(row["devices_per_node"]), int(row["size"]))
        found[key].append(1e-3 * float(row[f"time_stats.{what}.median"]))
    points: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for (ranks, per_node, size), times in sorted(found.items()):
        points[ranks, per_node].append((size, statistics.median(times)))
    return points


def evenly(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most one point per eighth of a doubling, so that large sizes, which are many, do not decide alone."""
    chosen: dict[int, tuple[int, float]] = {}
    for size, seconds in points:
        chosen.setdefault(int(8 * np.log2(size)), (size, seconds))
    return list(chosen.values())


def small_message_s(points: list[tuple[int, float]]) -> float:
    return statistics.median(seconds for size, seconds in points if size <= 16384)


def fit_network(folder: Path, family: str) -> tuple[dict[str, float], list[float]]:
    nvlink = PEAKS[family][2]
    wire, times = [], []
    for (ranks, per_node), points in network_points(folder, family, "all_reduce").items():
        if ranks == per_node:
            for size, seconds in evenly(points):
                wire.append(2.0 * (ranks - 1) / ranks * size)
                times.append(seconds)
    xs, ys = np.array(wire), np.array(times)
    latency, slope = fit_line(xs, ys)
    errors = list(np.abs((latency + slope * xs) / ys - 1.0))
    send = network_points(folder, family, "send_recv")
    largest, seconds = send[2, 2][-1]  # bulk moves are large: the rate is that of the largest size, not of a fit
    found = {
        "collective": 1.0 / slope / nvlink, "collective_s": latency, "peer": largest / seconds / nvlink,
        "peer_s": small_message_s(send[2, 2]), "network_s": small_message_s(send[2, 1]),
    }  # fmt: skip
    return found, errors


def shown(errors: list[float]) -> dict[str, float]:
    array = np.array(errors)
    return {"mean": float(array.mean()), "p90": float(np.quantile(array, 0.9)), "max": float(array.max())}


def calibrate(family: str, folder: Path) -> dict[str, object]:
    points = operator_points(family, folder)
    fitted = [p for p in points if p.is_fitted]
    found = fit_products(fitted, family)
    moved = np.array([p.moved_bytes for p in fitted])
    constant, slope = fit_line(moved, np.array([p.elementwise_s for p in fitted]))
    found |= {"elementwise": 1.0 / slope / PEAKS[family][1], "elementwise_layer_s": constant}
    network, network_errors = fit_network(folder, family)
    found |= network
    residuals: dict[str, dict[str, float]] = {}
    for name, chosen in (("fitted", fitted), ("held out", [p for p in points if not p.is_fitted])):
        products = [abs(predict_products(found, p, family) / p.products_s - 1.0) for p in chosen]
        layers = [
            abs((predict_products(found, p, family) + constant + slope * p.moved_bytes)
                / (p.products_s + p.elementwise_s) - 1.0)
            for p in chosen
        ]  # fmt: skip
        residuals[f"products, {name} ({len(chosen)})"] = shown(products)
        residuals[f"products and elementwise, {name} ({len(chosen)})"] = shown(layers)
    for ranks in (1, 2, 4, 8):
        errors = [abs(predict_products(found, p, family) / p.products_s - 1.0)
                  for p in points if p.ranks == ranks and not p.is_fitted]  # fmt: skip
        residuals[f"products, held out, split over {ranks} ({len(errors)})"] = shown(errors)
    residuals[f"all-reduce ({len(network_errors)})"] = shown(network_errors)
    return {"efficiency": found, "residuals": residuals}


def main() -> None:
    folder = Path(os.environ.get("JETTISON_DATA", "")) / "calibration"
    if not folder.is_dir():
        raise SystemExit("no calibration tables: set JETTISON_DATA to the folder that has calibration/")
    for family in MODELS:
        parts = calibrate(family, folder)
        print(f"\n{family}")
        for name, value in parts["efficiency"].items():  # type: ignore[attr-defined]
            print(f"  {name:22} {value:.4g}")
        for name, errors in parts["residuals"].items():  # type: ignore[attr-defined]
            print(f"  {name:60} " + "  ".join(f"{key} {value:6.1%}" for key, value in errors.items()))


if __name__ == "__main__":
    main()

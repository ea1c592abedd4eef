"""How well the cost model predicts steps that it was not fitted to, beside two simpler models.

    PYTHONPATH=src python benchmarks/cost_model.py [--model demo --model qwen3-110m] [--repeats 1] [--json cost.json]

KunServe v3's Fig. 15 (Qwen-2.5-14B on A800) has under 5 % for its model, and up to 48 % and 74 % for one without
attention, read as maxima. Here: random models on this CPU. Fitted and held-out shapes run interleaved in an order drawn
anew each round, every shape counts with its median, and no held-out shape is fitted. `--repeats` profiles again with
other held-out shapes: the spread of the mean error over them is printed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from engines.weights import QWEN3_110M, make_folder
from evidence import write_result

from jettison.config import EngineConfig
from jettison.demo.burst import DemoModel
from jettison.device.model.create import create_model
from jettison.live.profile.command import document, error_rows, speed_rows, term_rows
from jettison.live.profile.measure import FULL_MODEL, ProfileResult, run_profile

TARGET_MEAN = 0.05


def demo_folder(folder: Path) -> Path:
    """The demo's model: float32, a quarter of its time is attention at the lengths profiled."""
    path, model = folder / "demo", DemoModel()
    if not path.exists():
        create_model(
            path, arch="qwen3", layers=model.layers, hidden=model.hidden, heads=model.heads, kv_heads=model.kv_heads,
            seed=0, max_position_embeddings=2048,
        )  # fmt: skip
    return path


def qwen3_folder(folder: Path) -> Path:
    """107M parameters in bfloat16, the model of ``peers.py``."""
    return make_folder(folder, QWEN3_110M)


MODELS = {"demo": demo_folder, "qwen3-110m": qwen3_folder}


def show(rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    print(flush=True)


def measure(name: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    config = EngineConfig.resolve(
        model=str(MODELS[name](folder)), num_threads=args.threads, max_num_batched_tokens=args.max_num_tokens
    )
    results: list[ProfileResult] = []
    for repeat in range(args.repeats):
        result = run_profile(config, quick=args.quick, seed=args.seed + repeat, budget_s=args.seconds)
        results.append(result)
        fitted = sum(not m.is_held_out for m in result.measured)
        spread = statistics.median(m.spread for m in result.measured)
        print(
            f"{name}, {args.threads} thread(s), {result.stored.fingerprint.dtype}: {fitted} shapes fitted, "
            f"{len(result.held_out())} held out, {result.num_rounds} rounds, {result.elapsed_s:.0f} s, "
            f"quartile spread of a shape {spread:.1%} (median)"
        )
        show(error_rows(result))
        show(term_rows(result))
        show(speed_rows(result))
    means = [errors.mean for r in results if (errors := r.errors(FULL_MODEL)) is not None]
    verdict = "met" if max(means) <= TARGET_MEAN else "missed"
    print(f"{name}: mean error {min(means):.1%} to {max(means):.1%}, target {TARGET_MEAN:.0%}: {verdict}\n", flush=True)
    return [{"model": name, "threads": args.threads, **document(result)} for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-num-tokens", type=int, default=512)
    parser.add_argument("--seconds", type=float, help="of steps a profile (default: what `jettison profile` takes)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, help="keep the models here")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="jettison-cost-") as scratch:
        for name in args.model or list(MODELS):
            rows += measure(name, args, args.folder or Path(scratch))
    if args.json is not None:
        setting = {"python": sys.version.split()[0], "machine": platform.platform(), "load": os.getloadavg()}
        write_result(args.json, {"benchmark": "cost_model", "setting": setting, "rows": rows}, "cost", "device")


if __name__ == "__main__":
    main()

"""How well the cost model predicts steps that it was not fitted to, beside two simpler models.

    python -m benchmarks predictor profile [--model demo qwen3-110m] [--repeats 1] [--json cost.json]

KunServe v3's Fig. 15 (Qwen-2.5-14B on A800) has under 5 % for its model, and up to 48 % and 74 % for one without
attention, read as maxima. Here: random models on this CPU. Fitted and held-out shapes run interleaved in an order drawn
anew each round, every shape counts with its median, and no held-out shape is fitted. `--repeats` profiles again with
other held-out shapes: the spread of the mean error over them is printed.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.engines.weights import QWEN3_110M, make_folder
from benchmarks.shared import Namespace, Row, keep, machine, parse, table, work_folder
from jettison.config import EngineConfig
from jettison.demo.burst import DemoModel
from jettison.device.model.create import create_model
from jettison.live.profile.command import document, error_rows, speed_rows, term_rows
from jettison.live.profile.measure import FULL_MODEL, ProfileResult, run_profile

TARGET_MEAN = 0.05
MODELS = ("demo", "qwen3-110m")
"""The demo's in float32, whose time is a quarter attention at the lengths profiled; and 107M parameters in bfloat16."""


def folder_of(name: str, folder: Path) -> Path:
    """The model, made where it is missing."""
    if name != "demo":
        return make_folder(folder, QWEN3_110M)
    path, model = folder / "demo", DemoModel()
    if not path.exists():
        create_model(path, arch="qwen3", layers=model.layers, hidden=model.hidden, heads=model.heads,
                     kv_heads=model.kv_heads, seed=0, max_position_embeddings=2048)  # fmt: skip
    return path


def measure(name: str, args: Namespace, folder: Path) -> list[Row]:
    config = EngineConfig.resolve(
        model=str(folder_of(name, folder)), num_threads=args.threads, max_num_batched_tokens=args.max_num_tokens
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
        for rows in (error_rows(result), term_rows(result), speed_rows(result)):
            print(table(rows[0], rows[1:]))
    means = [errors.mean for r in results if (errors := r.errors(FULL_MODEL)) is not None]
    verdict = "met" if max(means) <= TARGET_MEAN else "missed"
    print(f"{name}: mean error {min(means):.1%} to {max(means):.1%}, target {TARGET_MEAN:.0%}: {verdict}\n", flush=True)
    return [{"model": name, "threads": args.threads, **document(result)} for result in results]


def main() -> None:
    args = parse(
        __doc__, model=(None, "default: all", {"nargs": "+", "choices": MODELS}), threads=1,
        max_num_tokens=512, seconds=(float, "of steps a profile (default: what `jettison profile` takes)"), repeats=1,
        seed=0, quick=False, folder=(Path, "keep the models here"),
    )  # fmt: skip
    rows: list[Row] = []
    folder = work_folder(args.folder, "cost")
    for name in args.model or MODELS:
        rows += measure(name, args, folder)
    keep(args.json, {"setting": machine(), "rows": rows}, "cost", "device")

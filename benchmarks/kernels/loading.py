"""What it costs to know which weights were loaded: digests, and the look for NaN, while a folder is read.

    python -m benchmarks kernels loading [--hidden 1024] [--layers 8] [--rounds 5] [--json results.json]

Starts a device over a folder made for it, in each serving dtype, with and without hashing and checking, interleaved in
one process; the folder is in the page cache (a disk would hide the cost). Prints medians, and the ratio with its range
over the rounds.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from unittest import mock

import torch

from benchmarks.shared import Row, keep, milliseconds, parse, print_rows
from jettison.device.model import weights
from jettison.device.model.create import create_model
from jettison.device.model.hf_config import read_config
from jettison.device.model.identity import Digester
from jettison.device.model.shards import model_shape
from jettison.device.spec import DeviceSpec
from jettison.device.worker import make_device

DTYPES = ("bfloat16", "float32", "float64")


def start(folder: Path, dtype: str, budget_bytes: int) -> float:
    """Seconds to start a device: its memory is mapped and touched for the first time, as in any start."""
    spec = DeviceSpec(
        model_dir=folder, dtype=dtype, budget_bytes=budget_bytes, block_size=16, max_num_tokens=64, max_num_seqs=4
    )
    device = make_device(spec)
    took_ms = milliseconds(device.start)
    device.close()
    return took_ms / 1e3


def start_unchecked(folder: Path, dtype: str, budget_bytes: int) -> float:
    """The same without digests and checks."""
    with mock.patch.object(Digester, "update", return_value=None), \
         mock.patch.object(weights, "_is_finite", return_value=True):  # fmt: skip
        return start(folder, dtype, budget_bytes)


def measure(folder: Path, name: str, rounds: int) -> Row:
    """One row: both ways, interleaved."""
    shape = model_shape(read_config(folder), name)
    num_bytes = sum(shape.shard_bytes.values())
    budget_bytes = num_bytes + (256 << 20)
    start(folder, name, budget_bytes)
    pairs = [(start(folder, name, budget_bytes), start_unchecked(folder, name, budget_bytes)) for _ in range(rounds)]
    ratios = [checked / plain for checked, plain in pairs]
    return {
        "dtype": name, "bytes": num_bytes, "checked_s": statistics.median(checked for checked, _ in pairs),
        "plain_s": statistics.median(plain for _, plain in pairs), "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }  # fmt: skip


def main() -> None:
    args = parse(
        __doc__, hidden=1024, layers=8, stored=("bfloat16", "dtype of the files", {"choices": DTYPES}), rounds=5,
    )  # fmt: skip
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        create_model(Path(folder), arch="qwen3", layers=args.layers, hidden=args.hidden, heads=16, kv_heads=4,
                     vocab=32_000, dtype=args.stored)
        rows = [measure(Path(folder), name, args.rounds) for name in DTYPES]
    print_rows(rows, [*rows[0]], f"files in {args.stored}, one thread, {args.rounds} rounds")
    keep(args.json, {"stored": args.stored, "rows": rows}, "device")

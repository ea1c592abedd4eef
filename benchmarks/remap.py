"""How long it takes to turn layer shards into KV capacity and back, and what the first touch afterwards costs.

    PYTHONPATH=src python benchmarks/remap.py --mib 64 --repeats 7 --json remap.json

A device with ``--layers`` layers drops half of them (``--mib`` of layer shards). Columns: bytes moved; wall time in
``DeviceMemory.apply``, median and worst, planning included; its CPU time, what it takes when no other process wants
the core; the planning in it; pages; map and unmap calls. Then one pass over all bytes that KV gained (the page faults
that the next steps will meet), a second pass (the same work once the pages are there), and the mapping part of the
restore. All shards and all KV are resident before each drop, so that unmapping pays its full price; half of that KV
changes arenas too.

``--live`` instead starts a real server of two instances (the demo's model and memory), sends more requests at once than
they can hold, and prints for each drop: from its decision to the first step with a request that had waited for it, how
long the step in flight at the decision took, and how many steps of a group ended in between (one at most).

Absolute times belong to one machine on one day; the ratio of first to second touch travels better.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from evidence import SERVING, write_result

from jettison.demo.burst import make_setup
from jettison.device.devicebytes_host import HostBytes
from jettison.device.memory import DeviceMemory
from jettison.device.pages_host import PagePool
from jettison.live.experiments.overload import run_policy
from jettison.memory.layout import LayoutSpec
from jettison.report.failures import check_answered
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, layer_shard
from jettison.workload.traces import TraceRow, Workload

MIB = 1 << 20
BLOCK_SIZE = 16
TARGET_MS, TARGET_MIB = 10.0, 64
LIVE_PROMPT, LIVE_OUTPUT = 64, 192
"""Tokens of each request of ``--live``."""


def milliseconds(work: Callable[[], object]) -> float:
    start_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start_ns) / 1e6


def build(num_mib: int, num_layers: int, kv_mib: int, page_bytes: int) -> tuple[DeviceMemory, ModelShape]:
    """Layers of equal size, half of which are ``num_mib``; ``kv_mib`` of KV before any drop."""
    layer_bytes = num_mib * MIB // (num_layers // 2)
    shards = {layer_shard(i): layer_bytes for i in range(num_layers)} | {EMBED_SHARD: MIB, HEAD_SHARD: MIB}
    shape = ModelShape(num_layers, 512, 8, 4, 64, 1024, 4096, 2, False, shards)
    budget = sum(-(-n // page_bytes) * page_bytes for n in shards.values()) + (kv_mib + 1) * MIB
    memory = DeviceMemory(
        PagePool(budget, page_bytes), HostBytes(), budget_bytes=budget, shape=shape, dtype=torch.bfloat16,
        block_size=BLOCK_SIZE, workspace_bytes=MIB,
    )
    return memory, shape


def touch(memory: DeviceMemory, layers: LayerRange, first: int, end: int) -> None:
    """Write blocks ``first`` to ``end`` of each layer."""
    for layer in layers.layers():
        memory.kv_arena(layer)[first:end].fill_(1)
    memory.note_written(end)


def one_cycle(memory: DeviceMemory, shape: ModelShape, page_bytes: int) -> dict[str, float]:
    """Everything resident, drop the upper half, touch what was gained, map it back."""
    before = memory.capacity_blocks
    kept = LayerRange(0, shape.num_layers // 2)
    full = LayoutSpec(shape.all_shards, shape.all_layers)
    for shard in shape.shard_bytes:
        memory.shard_bytes(shard).fill_(2)
    touch(memory, shape.all_layers, 0, before)
    # Layer shards alone, so that the figure is about as many bytes as the table says.
    drop = LayoutSpec(shape.all_shards - {layer_shard(i) for i in range(kept.hi, shape.num_layers)}, kept)
    plan_ms = milliseconds(lambda: memory.offer(drop, before))
    cpu_before_ns = time.thread_time_ns()
    dropped = memory.apply(drop, before, memory.version, [])
    cpu_ms = (time.thread_time_ns() - cpu_before_ns) / 1e6
    first_ms = milliseconds(lambda: touch(memory, kept, before, dropped.capacity_blocks))
    second_ms = milliseconds(lambda: touch(memory, kept, before, dropped.capacity_blocks))
    restored = memory.apply(full, before, memory.version, [])
    if restored.capacity_blocks != before:
        raise SystemExit("the restore did not lead back to the same capacity")
    return {
        "bytes_to_kv": dropped.bytes_to_kv,
        "drop_ms": dropped.duration_ns / 1e6,
        "drop_cpu_ms": cpu_ms,
        "plan_ms": plan_ms,
        "num_pages": dropped.bytes_to_kv // page_bytes,
        "num_map_calls": dropped.num_map_calls,
        "gained_blocks": dropped.capacity_blocks - before,
        "first_touch_ms": first_ms,
        "second_touch_ms": second_ms,
        "restore_map_ms": restored.duration_ns / 1e6,
    }


def measure(num_mib: int, args: argparse.Namespace) -> dict[str, Any]:
    page_bytes = args.page_kib * 1024
    memory, shape = build(num_mib, args.layers, args.kv_mib, page_bytes)
    memory.start()
    try:
        one_cycle(memory, shape, page_bytes)  # the pool's pages get their memory
        cycles = [one_cycle(memory, shape, page_bytes) for _ in range(args.repeats)]
    finally:
        memory.close()
    medians = {key: statistics.median(cycle[key] for cycle in cycles) for key in cycles[0]}
    worst = max(cycle["drop_ms"] for cycle in cycles)
    return {"shard_mib": num_mib, "layers": args.layers, **medians, "drop_ms_worst": worst, "cycles": cycles}


def live_drops(seed: int) -> list[dict[str, Any]]:
    """The ``queue_served`` events of one server that has to drop. Raises SystemExit where it had not to."""
    with tempfile.TemporaryDirectory(prefix="jettison-remap-") as folder:
        setup = make_setup(Path(folder), seed)
        # Half again as much as both hold, in answers long enough to stay.
        num = round(1.5 * setup.capacity_tokens() / (LIVE_PROMPT + LIVE_OUTPUT))
        rows = tuple(TraceRow(0.004 * i, LIVE_PROMPT, LIVE_OUTPUT) for i in range(num))
        run = run_policy(setup, "drop", Workload(rows, "at once", "remap"), seed=seed)
        check_answered([run])
    served = [e for e in run.events["log"] if e["kind"] == "queue_served"]
    if not served:
        raise SystemExit("the server came through without a drop")
    return served


def print_live(rounds: int) -> list[dict[str, Any]]:
    columns = {
        "decision_to_first_queued_step_ms": "to 1st queued step ms", "step_in_flight_ms": "step in flight ms",
        "steps_between": "steps between", "queued": "queued",
    }  # fmt: skip
    print("  ".join(f"{name:>21}" for name in columns.values()))
    found = []
    for seed in range(rounds):
        for event in live_drops(seed):
            found.append(event)
            print("  ".join(f"{event[key]:>21.2f}" for key in columns), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 64, 128], help="layer shards to drop, MiB")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--kv-mib", type=int, default=64, help="KV before the drop, MiB")
    parser.add_argument("--page-kib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--live", type=int, nargs="?", const=1, metavar="ROUNDS", help="drops of a real server instead")
    parser.add_argument("--json", type=Path, help="write all cycles here")
    args = parser.parse_args()
    setting = {"python": sys.version.split()[0], "torch": torch.__version__, "machine": platform.platform()}
    if args.live is not None:
        drops = print_live(args.live)
        if args.json is not None:
            document = {"benchmark": "remap --live", "setting": setting, "drops": drops}
            write_result(args.json, document, *SERVING)
        return
    if args.layers < 2 or args.layers % 2:
        parser.error("--layers must be even")
    torch.set_num_threads(1)

    columns = ("MiB to KV", "drop ms", "worst", "CPU ms", "planning ms", "pages", "map calls")
    columns += ("1st touch ms", "2nd touch ms", "restore map ms")
    print("  ".join(f"{name:>14}" for name in columns))
    rows = []
    for num_mib in args.mib:
        row = measure(num_mib, args)
        rows.append(row)
        keys = ("drop_ms", "drop_ms_worst", "drop_cpu_ms", "plan_ms", "num_pages", "num_map_calls")
        keys += ("first_touch_ms", "second_touch_ms", "restore_map_ms")
        values = (row["bytes_to_kv"] / MIB, *(row[key] for key in keys))
        print("  ".join(f"{value:>14.2f}" for value in values), flush=True)
    for row in rows:
        if row["shard_mib"] == TARGET_MIB:
            verdict = "met" if row["drop_ms"] <= TARGET_MS else "missed"
            print(
                f"{TARGET_MIB} MiB of shards into KV: {row['drop_ms']:.2f} ms ({row['drop_cpu_ms']:.2f} ms of CPU), "
                f"target {TARGET_MS:.0f} ms: {verdict}"
            )
    if args.json is not None:
        write_result(args.json, {"benchmark": "remap", "setting": setting, "rows": rows}, "device", "memory")


if __name__ == "__main__":
    main()

"""How long it takes to turn layer shards into KV capacity and back, and what the first touch afterwards costs.

    python -m benchmarks moves remap --mib 64 --repeats 7 --json remap.json

A device with ``--layers`` layers drops half of them (``--mib`` of layer shards). Columns: bytes moved; wall time in
``DeviceMemory.apply``, median and worst, planning included; its CPU time, what it takes when no other process wants
the core; the planning in it; pages; map and unmap calls. Then one pass over all bytes that KV gained (the page faults
that the next steps will meet), a second pass (the same work once the pages are there), and the mapping part of the
restore. All shards and all KV are resident before each drop, so that unmapping pays its full price; half of that KV
changes arenas too.

Absolute times belong to one machine on one day; the ratio of first to second touch travels better.
"""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.shared import Namespace, Row, keep, machine, milliseconds, parse, print_block, print_verdicts
from jettison.device.devicebytes_host import HostBytes
from jettison.device.memory import DeviceMemory
from jettison.device.pages_host import PagePool
from jettison.memory.layout import LayoutSpec
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, layer_shard

MIB = 1 << 20
BLOCK_SIZE = 16
TARGET_MS, TARGET_MIB = 10.0, 64


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
        "bytes_to_kv": dropped.bytes_to_kv, "drop_ms": dropped.duration_ns / 1e6, "drop_cpu_ms": cpu_ms,
        "plan_ms": plan_ms, "num_pages": dropped.bytes_to_kv // page_bytes, "num_map_calls": dropped.num_map_calls,
        "gained_blocks": dropped.capacity_blocks - before, "first_touch_ms": first_ms, "second_touch_ms": second_ms,
        "restore_map_ms": restored.duration_ns / 1e6,
    }  # fmt: skip


def measure(num_mib: int, args: Namespace) -> Row:
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


def main() -> None:
    args = parse(
        __doc__, mib=([16, 64, 128], "layer shards to drop, MiB"), layers=24, kv_mib=(64, "KV before the drop, MiB"),
        page_kib=64, repeats=7,
    )  # fmt: skip
    if args.layers < 2 or args.layers % 2:
        raise SystemExit("--layers must be even")
    torch.set_num_threads(1)

    rows = [measure(num_mib, args) for num_mib in args.mib]
    print_block("remap", {"rows": rows})
    print_verdicts((row["drop_ms"] <= TARGET_MS, f"{TARGET_MIB} MiB of shards into KV: {row['drop_ms']:.2f} ms "
                    f"({row['drop_cpu_ms']:.2f} ms of CPU), target {TARGET_MS:.0f} ms")
                   for row in rows if row["shard_mib"] == TARGET_MIB)  # fmt: skip
    keep(args.json, {"setting": machine(), "rows": rows}, "device", "memory")

"""How fast a device remaps, loads from disk, and how fast this host copies: what drops and restores cost comes from it.

Measures on a started device that serves no request; links are ``link_probe``'s.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import numpy as np

from jettison.cost.fit import non_negative_least_squares
from jettison.device.worker import DeviceWorker
from jettison.memory.layout import LayoutSpec
from jettison.types import LayerRange

_COPY_BYTES = 32 << 20
_TOUCH_BLOCKS = 64
_TOUCH_BYTES = 1 << 20
_DISK_BYTES = 64 << 20
"""Enough of the folder to tell its speed by."""


class RemapSpeed(NamedTuple):
    """Least-squares line through the remaps that were measured."""

    fixed_s: float
    s_per_byte: float


def measure_remap(device: DeviceWorker, rounds: int = 3, *, is_touched: bool = True) -> RemapSpeed:
    """Drop layers from the top and map them again, in several sizes. Leaves the device as it was.

    ``is_touched``: all that is mapped is read before each drop, so that unmapping pays its full price. On a card no
    page comes into being by being read, and reading all of it through the host takes seconds.
    """
    shape = device.shape
    full = LayoutSpec(shape.all_shards, shape.all_layers)
    kept = sorted({max(1, round(shape.num_layers * share)) for share in (0.25, 0.5, 0.75)} - {shape.num_layers})
    points: list[tuple[int, float]] = []
    for index in range(rounds + 1 if kept else 0):
        for num_layers in kept:
            layers = LayerRange(0, num_layers)
            if is_touched:
                _touch(device)
            for spec in (LayoutSpec(shape.shards_for(layers), layers), full):
                result = device.apply_layout(spec, 0, device.layout_version, [])
                if index:  # the first round gives the pool's pages their memory
                    points.append((abs(result.bytes_to_kv), result.duration_ns / 1e9))
            for shard in sorted(result.missing_shards):
                device.load_shard_from_disk(shard)
    if not points:  # a model of one layer is never split
        return RemapSpeed(0.0, 0.0)
    medians = [(size, statistics.median(s for other, s in points if other == size)) for size, _ in points]
    matrix = np.array([[1.0, float(size)] for size, _ in medians])
    _, (fixed_s, s_per_byte) = non_negative_least_squares(matrix, np.array([seconds for _, seconds in medians]))
    return RemapSpeed(float(fixed_s), float(s_per_byte))


def _touch(device: DeviceWorker) -> None:
    """Read every mapped byte: parameters, and the KV of all layers."""
    piece = np.empty(_TOUCH_BYTES, dtype=np.uint8)
    for shard, num_bytes in device.shape.shard_bytes.items():
        for offset in range(0, num_bytes, _TOUCH_BYTES):
            device.read_shard(shard, offset, piece[: num_bytes - offset])
    block_bytes = device.kv_block_bytes * device.shape.num_layers
    out = np.empty(_TOUCH_BLOCKS * block_bytes, dtype=np.uint8)
    for first in range(0, device.capacity_blocks, _TOUCH_BLOCKS):
        ids = range(first, min(first + _TOUCH_BLOCKS, device.capacity_blocks))
        device.kv_gather(device.shape.all_layers, ids, out[: len(ids) * block_bytes])


def measure_host_copy(rounds: int = 7) -> float:
    """Bytes per second of one thread copying more than a cache holds."""
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    times = []
    for _ in range(rounds):
        start_ns = time.perf_counter_ns()
        np.copyto(target, source)
        times.append((time.perf_counter_ns() - start_ns) / 1e9)
    return _COPY_BYTES / statistics.median(times)


def measure_disk(device: DeviceWorker) -> float:
    """Bytes per second of loading shards, conversion included. The folder was read before: this is a warm cache."""
    num_bytes, start_ns = 0, time.perf_counter_ns()
    for shard, shard_bytes in sorted(device.shape.shard_bytes.items()):
        device.load_shard_from_disk(shard)
        num_bytes += shard_bytes
        if num_bytes >= _DISK_BYTES:
            break
    return num_bytes / ((time.perf_counter_ns() - start_ns) / 1e9)

"""Whole shards of a device, for tests: by the calls that transfers use."""

from __future__ import annotations

import numpy as np

from jettison.device.worker import DeviceWorker


def shard_of(worker: DeviceWorker, shard: str) -> np.ndarray:
    """A copy of a shard's bytes."""
    out = np.empty(worker.shard_num_bytes(shard), dtype=np.uint8)
    worker.read_shard(shard, 0, out)
    return out


def copy_shard(source: DeviceWorker, target: DeviceWorker, shard: str) -> None:
    """As a transfer does it, before the end."""
    target.write_shard(shard, 0, shard_of(source, shard))

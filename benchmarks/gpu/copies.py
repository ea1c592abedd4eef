"""How fast KV goes between a card, its host pool and a link's slots, alone and beside decoding, with targets beside.

    python3 -m benchmarks gpu copies --out gpu_copies.json      # the 7B shape with weights from a seed, half a minute

A copy beside steps runs on a thread of its own, as in a worker. Bytes are compared at the end. Without a GPU: a toy on
the CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import mmap
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.gpu.model import GPU
from benchmarks.gpu.results import Results
from benchmarks.gpu.steps import BATCHES, CONTEXT, NUM_STEPS, SHAPE, measured, opened, step
from jettison.device.worker import DeviceWorker
from jettison.types import LayerRange

ROWS = 64 if GPU else BATCHES[-1]
NUM_BLOCKS = 2048 if GPU else 8
"""Of a copy: 1.9 GB of the 7B shape."""
MOST_COPIES = 50
"""More than end beside the steps that are measured."""
SLOT_BYTES = 1 << 20
ALL = LayerRange(0, SHAPE["layers"])
RATE_TARGET = 20.0
"""GB/s, beside decoding; steps may take 5 % longer."""


class Beside(threading.Thread):
    """Copies the same blocks again and again until it is told to end."""

    def __init__(self, device: DeviceWorker, blocks: list[int], *, to_host: bool) -> None:
        super().__init__()
        self.copied_bytes = 0
        self._is_over = False
        slots = list(range(len(blocks)))
        self._works = [device.copy_beside(ALL, blocks, slots, to_host=to_host) for _ in range(MOST_COPIES)]

    def run(self) -> None:
        for work in self._works:
            work.run()
            self.copied_bytes += work.copied_bytes
            if self._is_over:
                return

    def end(self) -> None:
        """After the copy under way."""
        self._is_over = True
        self.join()


def gb_per_s(num_bytes: int, begun: float) -> float:
    return num_bytes / (time.perf_counter() - begun) / 1e9


def beside_steps(device: DeviceWorker, blocks: list[int], results: Results) -> None:
    """Both directions."""
    work = step([1] * ROWS, [CONTEXT] * ROWS, [])
    alone_ms, _ = measured(device, work, NUM_STEPS)
    results.tell(f"decode of {ROWS} alone, ms", alone_ms)
    for name in ("first copy, which pins", "second copy"):
        begun = time.perf_counter()
        num_bytes = device.copy_to_host(ALL, blocks, list(range(len(blocks))))
        results.tell(f"{name}, to the host, GB/s", gb_per_s(num_bytes, begun))
    for what, to_host in (("to the host", True), ("from the host", False)):
        copies, begun = Beside(device, blocks, to_host=to_host), time.perf_counter()
        copies.start()
        ms, _ = measured(device, work, 3 * NUM_STEPS)
        copies.end()
        rate = gb_per_s(copies.copied_bytes, begun)
        results.tell(f"{what} beside decoding, GB/s", rate, RATE_TARGET, rate >= RATE_TARGET)
        results.tell(f"decoding beside that, of alone ({what})", ms / alone_ms, 1.05, ms / alone_ms <= 1.05)


def links(device: DeviceWorker, blocks: list[int], results: Results) -> None:
    """Through a slot of a link, a layer at a time, as transfers do."""
    per_piece = max(1, SLOT_BYTES // device.kv_block_bytes)
    for what, is_pinned in (("a pinned slot", True), ("memory that is not pinned", False)):
        slot = np.frombuffer(mmap.mmap(-1, SLOT_BYTES), dtype=np.uint8)
        pin = device.pin if is_pinned else None
        release = (lambda: None) if pin is None else pin(slot)
        for direction, call in (("into", device.kv_gather), ("out of", device.kv_scatter)):
            begun, num_bytes = time.perf_counter(), 0
            for layer in ALL.layers():
                one = LayerRange(layer, layer + 1)
                for at in range(0, len(blocks), per_piece):
                    ids = blocks[at : at + per_piece]
                    call(one, ids, slot[: len(ids) * device.kv_block_bytes])
                    num_bytes += len(ids) * device.kv_block_bytes
            rate = gb_per_s(num_bytes, begun)
            target = RATE_TARGET if is_pinned else None
            results.tell(f"{direction} {what}, pieces of 1 MiB, GB/s", rate, target, target and rate >= target)
        release()


def same(device: DeviceWorker, results: Results) -> None:
    """What went out comes back."""
    unit, blocks, slots = device.kv_block_bytes, [5, 1, 7], [0, 3, 2]
    content = np.random.default_rng(0).integers(0, 256, len(ALL) * 3 * unit, dtype=np.uint8)
    out = np.zeros(len(content), dtype=np.uint8)
    device.kv_scatter(ALL, blocks, content)
    device.copy_beside(ALL, blocks, slots, to_host=True).run()
    device.copy_beside(ALL, [2, 9, 4], slots, to_host=False).run()
    device.kv_gather(ALL, [2, 9, 4], out)
    wrong = int((out != content).sum())
    results.tell("wrong bytes", wrong, 0, wrong == 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="gpu_copies.json")
    results = Results(parser.parse_args().out)
    with tempfile.TemporaryDirectory() as folder:
        device = opened(Path(folder), host_bytes=(4 << 30) if GPU else 4 << 20)
        first = device.capacity_blocks - NUM_BLOCKS  # behind those of steps
        blocks = np.random.default_rng(0).permutation(np.arange(first, first + NUM_BLOCKS)).tolist()
        beside_steps(device, blocks, results)
        links(device, blocks, results)
        same(device, results)
        device.close()
    return 0

"""How fast KV goes between a card, its host pool and a link's slots, alone and beside decoding, with targets beside.

    python3 -m benchmarks gpu copies --out gpu_copies.json      # the 7B shape with weights from a seed, half a minute
    python3 -m benchmarks gpu copies --every-way                # beside the ways that are chosen, all others, a minute

A copy beside steps runs on a thread of its own, and steps are started behind one another and waited for as a worker
does it. Each way to copy is measured beside decoding between two measurements of decoding alone. Bytes are compared at
the end of each way. Last comes what Python does in calls of links. Without a GPU: a toy on the CPU, to see that it
runs.
"""

from __future__ import annotations

import argparse
import cProfile
import mmap
import pstats
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

import numpy as np

from benchmarks.gpu.model import GPU
from benchmarks.gpu.results import Results
from benchmarks.gpu.steps import BATCHES, CONTEXT, NUM_STEPS, SHAPE, followed, opened, step
from jettison.device.cuda.pieces import LINKS, POOL, Copying, Way
from jettison.device.devicebytes import Bytes
from jettison.device.hostcopy import HostCopy
from jettison.device.step import StepInput
from jettison.device.worker import DeviceWorker
from jettison.types import LayerRange

ROWS = 64 if GPU else BATCHES[-1]
NUM_BLOCKS = 2048 if GPU else 8
"""Of a copy: 1.9 GB of the 7B shape."""
ALL = LayerRange(0, SHAPE["layers"])
RATE_TARGET, SLOWER_TARGET = 20.0, 1.05
"""GB/s, beside decoding; steps may take 5 % longer."""
MiB = 1 << 20
CHOSEN = "as chosen"
WAYS = {CHOSEN: POOL} | {
    f"{way.value} {piece} MiB {programs}": Copying(way, piece * MiB, programs)
    for way, piece, programs in (
        (Way.STAGED, 8, 32), (Way.STAGED, 2, 32), (Way.STAGED, 16, 32), (Way.STAGED, 8, 128),
        (Way.ENGINES, 8, 1),
        (Way.KERNEL, 8, 8), (Way.KERNEL, 8, 16), (Way.KERNEL, 8, 32),
    )
}  # fmt: skip
"""By name: way, bytes of a piece, programs of the kernel. They go as fast as they can; what is chosen keeps a pace."""
LINK_WAYS = {CHOSEN: LINKS} | {
    f"{way.value} {programs}": Copying(way, 8 * MiB, programs)
    for way, programs in ((Way.STAGED, 128), (Way.ENGINES, 1), (Way.KERNEL, 16), (Way.KERNEL, 64))
}


class Beside(threading.Thread):
    """Runs copies of the same blocks, one after the other, until it is told to end."""

    def __init__(self, works: list[HostCopy]) -> None:
        super().__init__()
        self._works = works
        self._is_over = False
        self._error: RuntimeError | None = None

    def run(self) -> None:
        try:
            for work in self._works:
                if self._is_over:
                    return
                work.run()
        except RuntimeError as error:
            self._error = error

    @property
    def copied_bytes(self) -> int:
        return sum(work.copied_bytes for work in self._works)

    def end(self) -> None:
        """In the copy under way."""
        self._is_over = True
        for work in self._works:
            work.stop()
        self.join()
        if self._error is not None:
            raise self._error


def decoding(device: DeviceWorker, work: StepInput, num_steps: int) -> float:
    """Median milliseconds of a step; behind one another where the device has that."""
    taken_ms = followed(device, len(work.query_lens), num_steps)
    if taken_ms is not None:
        return taken_ms
    whole = []
    for _ in range(num_steps):
        begun = time.perf_counter()
        device.start_step(work, None).result()
        whole.append(time.perf_counter() - begun)
    return statistics.median(whole) * 1e3


def gb_per_s(num_bytes: int, begun: float) -> float:
    return num_bytes / (time.perf_counter() - begun) / 1e9


def between_steps(device: DeviceWorker, blocks: list[int], results: Results) -> None:
    """Both directions, while nothing else runs."""
    slots = list(range(len(blocks)))
    for name in ("first copy, which pins", "second copy"):
        begun = time.perf_counter()
        num_bytes = device.copy_to_host(ALL, blocks, slots)
        results.tell(f"{name}, to the host, GB/s", gb_per_s(num_bytes, begun))
    begun = time.perf_counter()
    num_bytes = device.copy_from_host(ALL, blocks, slots)
    results.tell("copy from the host, GB/s", gb_per_s(num_bytes, begun))


def beside_steps(
    device: DeviceWorker, work: StepInput, blocks: list[int], slots: list[int], what: str, results: Results,
) -> None:
    """Both directions of one way, with decoding alone before, between and after."""
    alone = [decoding(device, work, NUM_STEPS)]
    for direction in ("to", "from"):
        copies = Beside([device.copy_beside(ALL, blocks, slots, to_host=direction == "to") for _ in range(20)])
        copies.start()
        begun, before = time.perf_counter(), copies.copied_bytes
        ms = decoding(device, work, 2 * NUM_STEPS)
        rate = gb_per_s(copies.copied_bytes - before, begun)
        copies.end()
        alone.append(decoding(device, work, NUM_STEPS))
        alone_ms = (alone[-2] + alone[-1]) / 2
        slower, is_target = ms / alone_ms, what == CHOSEN
        name = f"{what}, {direction} the host beside decoding"
        results.tell(f"{name}, GB/s", rate, RATE_TARGET if is_target else None, is_target and rate >= RATE_TARGET)
        results.tell(
            f"{name}: decoding, of alone ({alone_ms:.2f} ms)", slower, SLOWER_TARGET if is_target else None,
            is_target and slower <= SLOWER_TARGET,
        )


def linked(device: DeviceWorker, blocks: list[int], slot: Bytes, *, to_host: bool) -> Iterator[int]:
    """Through a slot of a link, a layer at a time, as transfers do: the bytes of each piece that has gone."""
    per_piece = max(1, len(slot) // device.kv_block_bytes)
    call = device.kv_gather if to_host else device.kv_scatter
    for layer in ALL.layers():
        one = LayerRange(layer, layer + 1)
        for at in range(0, len(blocks), per_piece):
            ids = blocks[at : at + per_piece]
            num_bytes = len(ids) * device.kv_block_bytes
            call(one, ids, slot[:num_bytes])
            yield num_bytes


def links(device: DeviceWorker, blocks: list[int], slot: Bytes, what: str, results: Results) -> None:
    """Both directions, while nothing else runs."""
    for direction in ("into", "out of"):
        begun = time.perf_counter()
        pieces = list(linked(device, blocks, slot, to_host=direction == "into"))
        rate, call_us = gb_per_s(sum(pieces), begun), (time.perf_counter() - begun) / len(pieces) * 1e6
        target = RATE_TARGET if what == CHOSEN else None
        name = f"{direction} a slot of {len(slot) / MiB:.3g} MiB, {what}, GB/s ({call_us:.0f} us a call)"
        results.tell(name, rate, target, None if target is None else rate >= target)


def links_beside_steps(
    device: DeviceWorker, work: StepInput, blocks: list[int], slot: Bytes, what: str, results: Results
) -> None:
    """Both directions, on the thread of steps while one runs, as a worker's links go."""
    alone_ms = decoding(device, work, NUM_STEPS)
    for direction in ("into", "out of"):
        to_host, num_bytes, whole = direction == "into", 0, []
        pieces = chain.from_iterable(linked(device, blocks, slot, to_host=to_host) for _ in count())
        first = time.perf_counter()
        for _ in range(NUM_STEPS):
            begun = time.perf_counter()
            running = device.start_step(work, None)
            while not running.poll():
                if running.is_launched:
                    num_bytes += next(pieces)
            running.result()
            whole.append(time.perf_counter() - begun)
        rate, slower = gb_per_s(num_bytes, first), statistics.median(whole) * 1e3 / alone_ms
        name = f"{direction} a slot of {len(slot) / MiB:.3g} MiB, {what}, beside decoding"
        results.tell(f"{name}, GB/s", rate)
        results.tell(f"{name}: decoding, of alone ({alone_ms:.2f} ms)", slower)


def all_links(
    device: DeviceWorker, work: StepInput, blocks: list[int], ways: dict[str, Copying], results: Results
) -> None:
    """Slots as large as a piece is on the CPU, and on a card."""
    for size in (1, 8):
        slot = np.frombuffer(mmap.mmap(-1, size * MiB), dtype=np.uint8)
        links(device, blocks, slot, "not pinned", results)
        release = (lambda: None) if device.pin is None else device.pin(slot)
        for what, copying in ways.items() if size > 1 else [(CHOSEN, LINKS)]:
            if GPU:
                device._bytes.copy_by(copying)
            try:
                links(device, blocks, slot, what if size > 1 else "pinned", results)
                links_beside_steps(device, work, blocks, slot, what, results)
            except RuntimeError as error:
                results.tell(f"{what} fails", str(error), None, False)
        if GPU:
            device._bytes.copy_by(LINKS)
        release()


def host_part(device: DeviceWorker, blocks: list[int]) -> None:
    """What Python does in calls of links, the longest first."""
    num_blocks = min(len(blocks), 4 * MiB // device.kv_block_bytes)
    slot = np.frombuffer(mmap.mmap(-1, num_blocks * device.kv_block_bytes), dtype=np.uint8)
    release = (lambda: None) if device.pin is None else device.pin(slot)
    with cProfile.Profile() as profile:
        for _ in range(200 if GPU else 2):
            device.kv_gather(LayerRange(0, 1), blocks[:num_blocks], slot)
            device.kv_scatter(LayerRange(0, 1), blocks[:num_blocks], slot)
    release()
    pstats.Stats(profile).sort_stats("tottime").print_stats(16)


def same(device: DeviceWorker, others: list[int], what: str, results: Results) -> None:
    """What went out comes back. ``others``: blocks that no step reads."""
    unit, blocks, slots = device.kv_block_bytes, others[:3], [0, 3, 2]
    content = np.random.default_rng(0).integers(0, 256, len(ALL) * 3 * unit, dtype=np.uint8)
    out = np.zeros(len(content), dtype=np.uint8)
    device.kv_scatter(ALL, blocks, content)
    device.copy_beside(ALL, blocks, slots, to_host=True).run()
    device.copy_beside(ALL, others[3:6], slots, to_host=False).run()
    device.kv_gather(ALL, others[3:6], out)
    wrong = int((out != content).sum())
    results.tell(f"wrong bytes, {what}", wrong, 0, wrong == 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="gpu_copies.json")
    parser.add_argument("--every-way", action="store_true")
    arguments = parser.parse_args()
    results = Results(arguments.out)
    is_all = GPU and arguments.every_way
    with tempfile.TemporaryDirectory() as folder:
        device = opened(Path(folder), host_bytes=(4 << 30) if GPU else 4 << 20)
        first = device.capacity_blocks - NUM_BLOCKS  # behind those of steps
        blocks = np.random.default_rng(0).permutation(np.arange(first, first + NUM_BLOCKS)).tolist()
        scattered = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()
        work = step([1] * ROWS, [CONTEXT] * ROWS, [])
        between_steps(device, blocks, results)
        decoding(device, work, 3)  # the first ones capture
        beside_steps(device, work, blocks, list(range(NUM_BLOCKS)), "slots in a row", results)
        for what, copying in WAYS.items() if is_all else [(CHOSEN, POOL)]:
            if GPU:
                device._open_host.copy_by(copying)
            try:
                beside_steps(device, work, blocks, scattered, what, results)
                same(device, blocks, what, results)
            except RuntimeError as error:
                results.tell(f"{what} fails", str(error), None, False)
        all_links(device, work, blocks, LINK_WAYS if is_all else {CHOSEN: LINKS}, results)
        host_part(device, blocks)
        device.close()
    return 0

"""What copies beside steps cost them: a device runs steps alone and beside a worker's copying thread, in turns.

Pairs of neighbours are compared, so that a machine that drifts moves both alike. On a started device with a host pool,
which serves no request; its KV cache counts as scratch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from jettison.core.controlstream import BesideCopy
from jettison.cost.model import ChunkShape, StepShape
from jettison.cost.shapes import ShapeLimits
from jettison.device.hostcopy import HostCopy
from jettison.device.worker import DeviceWorker
from jettison.live.profile.step_timer import StepTimer
from jettison.live.worker.copies import CopyThread, Job
from jettison.types import ModelShape

POOL_BYTES = 64 << 20
"""More than most caches hold, and little beside a model; a few slots at least, whatever they hold."""
MIN_SLOTS = 4
MAX_ROWS = 1 << 17
"""Copied beside one step at most, blocks of one layer: seconds of copying where blocks are of usual size."""
SPAN_S = 0.02
"""Shorter steps are repeated for so long: a thread gets its share of a busy core in slices of milliseconds."""
MIN_PAIRS = 3
POLL_S = 1e-4
PATIENCE_S = 10.0


class BesidePair(NamedTuple):
    """A step alone, and the same step beside copies; short ones several times over, and then a step's share."""

    alone_s: float
    beside_s: float
    num_bytes: float
    """Copied while the second one ran."""


class BesideSpeed(NamedTuple):
    """Medians over pairs."""

    bytes_per_s: float
    byte_s: float
    """What a byte adds to the step."""

    @classmethod
    def of(cls, pairs: Sequence[BesidePair]) -> BesideSpeed | None:
        """None where nothing was copied beside half of the steps: a machine too busy to be measured."""
        rate = statistics.median(pair.num_bytes / pair.beside_s for pair in pairs)
        if not rate:
            return None
        prices = [(pair.beside_s - pair.alone_s) / pair.num_bytes for pair in pairs if pair.num_bytes]
        return cls(rate, max(0.0, statistics.median(prices)))


def pool_bytes(shape: ModelShape, block_size: int) -> int:
    """Of the host pool of a device that is measured."""
    return max(POOL_BYTES, MIN_SLOTS * shape.num_layers * shape.block_bytes_per_layer(block_size))


def shapes_beside(limits: ShapeLimits) -> list[StepShape]:
    """A batch of decodes, which waits for memory, and a prompt, which computes."""
    context = max(1, min(limits.max_context // 4, limits.max_kv_tokens // limits.max_num_seqs))
    decodes = min(limits.max_num_seqs, 16, limits.max_num_tokens)
    prompt = max(1, min(limits.max_num_tokens, limits.max_context) // 2)
    return [
        StepShape((ChunkShape(context, 1),) * decodes, limits.num_layers, num_samples=decodes),
        StepShape((ChunkShape(0, prompt),), limits.num_layers, num_samples=1),
    ]


def measure_pairs(
    device: DeviceWorker, timer: StepTimer, shapes: Sequence[StepShape], *, budget_s: float, to_host: bool = True
) -> list[list[BesidePair]]:
    """Pairs of each shape, in rounds, for about so long; which of a pair comes first changes from round to round."""
    num_slots = min(device.num_host_slots, device.capacity_blocks)
    layers, ids = device.shape.all_layers, list(range(num_slots))
    device.copy_beside(layers, ids, ids, to_host=True).run()  # the pool's pages get their memory
    repeats = max(1, MAX_ROWS // (num_slots * len(layers)))
    found: list[list[BesidePair]] = [[] for _ in shapes]
    counts = [max(1, math.ceil(SPAN_S / max(timer.time_s(shape), 1e-6))) for shape in shapes]
    copier = CopyThread()
    try:
        ends_s = time.monotonic() + budget_s
        while len(found[-1]) < MIN_PAIRS or time.monotonic() < ends_s:
            for shape, repeated, pairs in zip(shapes, counts, found, strict=True):
                alone_s = _time_s(timer, shape, repeated) if len(pairs) % 2 else None
                work = device.copy_beside(layers, ids * repeats, ids * repeats, to_host=to_host)
                copier.put(Job(BesideCopy(0, layers, ids, ids, to_host), work))
                _wait_for_first_piece(work)
                before = work.copied_bytes
                beside_s = _time_s(timer, shape, repeated)
                num_bytes = (work.copied_bytes - before) / repeated
                copier.halt()
                copier.take_over()
                if alone_s is None:
                    alone_s = _time_s(timer, shape, repeated)
                pairs.append(BesidePair(alone_s, beside_s, num_bytes))
    finally:
        copier.close()
    return found


def measure_beside(
    device: DeviceWorker, timer: StepTimer, limits: ShapeLimits, *, budget_s: float
) -> BesideSpeed | None:
    """The price of a byte, and the rate reached, over both kinds of steps. None as ``BesideSpeed.of`` has it."""
    pairs = measure_pairs(device, timer, shapes_beside(limits), budget_s=budget_s)
    return BesideSpeed.of([pair for of_shape in pairs for pair in of_shape])


def _time_s(timer: StepTimer, shape: StepShape, repeated: int) -> float:
    """Of one, where so many follow each other."""
    return sum(timer.time_s(shape) for _ in range(repeated)) / repeated


def _wait_for_first_piece(work: HostCopy) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not work.copied_bytes and time.monotonic() < ends_s:
        time.sleep(POLL_S)

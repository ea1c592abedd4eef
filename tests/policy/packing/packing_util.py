"""Random lives of requests for the tests of packings."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from jettison.policy.packing.types import Arrive, Depart, Operation, Packer, Resize

CAPACITY = 2400
"""Divides by 2, 3, 4 and 8, so that class limits are sizes."""

MIXES: dict[str, tuple[tuple[float, float], ...]] = {
    "all": ((0.002, 1.0),),
    "even": ((0.002, 1 / 8), (1 / 8, 1 / 4), (1 / 4, 1 / 3), (1 / 3, 1 / 2), (1 / 2, 1)),
    "small": ((0.002, 1 / 8),),
    "large": ((0.5, 0.76), (1 / 4, 1 / 2), (1 / 8, 1 / 4)),
    "middles": ((1 / 4, 1 / 3), (1 / 3, 1 / 2), (1 / 8, 1 / 4)),
    "edges": ((1 / 8, 1 / 8 + 0.01), (1 / 4, 1 / 4 + 0.01), (1 / 3, 1 / 3 + 0.01), (0.5, 0.51), (0.24, 0.25)),
}
"""Ranges of sizes as shares of the capacity; each request draws a range, then a size in it."""


def draw_size(rng: random.Random, mix: str) -> int:
    low, high = rng.choice(MIXES[mix])
    return max(1, min(CAPACITY, round(rng.uniform(low, high) * CAPACITY)))


def random_operations(rng: random.Random, mix: str, num_operations: int, grows: bool = True) -> Iterator[Operation]:
    """Arrivals, growth and departures; the population swells, ebbs and swells again."""
    sizes: dict[str, int] = {}
    for step in range(num_operations):
        share_leaving = 0.75 if num_operations // 2 < step < 3 * num_operations // 4 else 0.3
        draw = rng.random()
        if sizes and draw < share_leaving:
            name = rng.choice(list(sizes))
            del sizes[name]
            yield Depart(name)
        elif sizes and grows and draw < share_leaving + 0.25:
            name = rng.choice(list(sizes))
            sizes[name] = min(CAPACITY, sizes[name] + rng.randint(1, CAPACITY // rng.choice((4, 10, 50))))
            yield Resize(name, sizes[name])
        else:
            name = f"r{step}"
            sizes[name] = draw_size(rng, mix)
            yield Arrive(name, sizes[name])


def placement(packer: Packer) -> dict[int, dict[str, int]]:
    return {device: packer.requests_on(device) for device in packer.active}


def sizes_of(packer: Packer) -> list[int]:
    return [size for on_it in placement(packer).values() for size in on_it.values()]


def in_batches(rng: random.Random, operations: Sequence[Operation], most: int) -> Iterator[list[Operation]]:
    """In their order, no request twice in a batch."""
    batch: list[Operation] = []
    names: set[str] = set()
    size = rng.randint(1, most)
    for operation in operations:
        if len(batch) >= size or operation.request_id in names:
            yield batch
            batch, names, size = [], set(), rng.randint(1, most)
        batch.append(operation)
        names.add(operation.request_id)
    yield batch

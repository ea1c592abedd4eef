"""Packings: time of an operation and of an epoch, devices against bounds, moves. Prints tables, writes JSON.

    python -m benchmarks packing time [--devices 125 1000 8000] [--sequences 100000] [--json OUT]

*Time*: devices of 100 requests each, then single operations (arrivals, departures, growth alike), then whole epochs: a
second's arrivals and departures at a stay of ``--stay-s``, and the growth of those whose reserve is used up then.
Processor time of the thread, which does nothing but plan: what else the machine does is not in it.
*Sequences*: random lives of small clusters, each judged after every operation (Theorem 1), at its end against L2 and,
where that is not enough, against the optimum (Theorem 2). *Planted*: devices cut into items, then growth and
departures.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator

from benchmarks.shared import REPOSITORY, Row, keep, milliseconds, parse, print_rows
from jettison.policy.packing.bounds import first_fit_decreasing, l2_bound, optimum
from jettison.policy.packing.mell import Packing
from jettison.policy.packing.named import PACKERS
from jettison.policy.packing.types import Arrive, Depart, Operation, Packer, PackingParams, Resize

sys.path.insert(0, str(REPOSITORY / "tests" / "policy" / "packing"))

from packing_properties import ALLOWED, count_exceptions

CAPACITY = 12_000
"""Blocks: 100 requests of 107 on average fill 90 %."""
RANGES = {
    "all": ((0.002, 1.0),), "even": ((0.002, 1 / 8), (1 / 8, 1 / 4), (1 / 4, 1 / 3), (1 / 3, 1 / 2), (1 / 2, 1)),
    "small": ((0.002, 1 / 8),), "large": ((0.5, 0.76), (1 / 4, 1 / 2), (1 / 8, 1 / 4)),
    "edges": ((1 / 8, 1 / 8 + 0.01), (1 / 4, 1 / 4 + 0.01), (1 / 3, 1 / 3 + 0.01), (0.5, 0.51), (0.24, 0.25)),
}  # fmt: skip
"""Sizes as shares of the capacity: a range is drawn, then a size in it."""


class Load:
    """A population that stays as large as it is."""

    def __init__(self, num_requests: int, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.sizes: dict[str, int] = {}
        self.names: list[str] = []
        self._count = 0
        self.first = [self.arrive() for _ in range(num_requests)]

    def arrive(self) -> Arrive:
        name = f"r{self._count}"
        self._count += 1
        self.sizes[name] = max(4, min(CAPACITY, round(self.rng.lognormvariate(4.2, 0.95))))
        self.names.append(name)
        return Arrive(name, self.sizes[name])

    def depart(self) -> Depart:
        at = self.rng.randrange(len(self.names))
        self.names[at], self.names[-1] = self.names[-1], self.names[at]
        name = self.names.pop()
        del self.sizes[name]
        return Depart(name)

    def grow(self) -> Resize:
        name = self.rng.choice(self.names)
        self.sizes[name] = min(CAPACITY, self.sizes[name] + self.rng.randint(1, 25))
        return Resize(name, self.sizes[name])


def figures(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(values), "mean_ms": statistics.fmean(values)}


def time_size(num_devices: int, num_operations: int, num_epochs: int, stay_s: float, reserve_s: float) -> Row:
    """Times at one size."""
    load = Load(100 * num_devices)
    packing = Packing(PackingParams(capacity=CAPACITY))
    for at in range(0, len(load.first), 1000):
        packing.apply(load.first[at : at + 1000])
    devices = len(packing.active)
    single: list[float] = []
    for _ in range(num_operations // 3):
        for operation in (load.depart(), load.arrive(), load.grow()):
            single.append(milliseconds(lambda o=operation: packing.apply([o]), time.thread_time))
    epochs: list[float] = []
    moves = 0
    counts = (round(100 * num_devices / stay_s), round(100 * num_devices / reserve_s))
    for _ in range(num_epochs):
        gone = [load.depart() for _ in range(counts[0])]
        grown = {resize.request_id: resize for resize in (load.grow() for _ in range(counts[1]))}
        batch = [*gone, *grown.values(), *(load.arrive() for _ in range(counts[0]))]
        begun = time.thread_time()
        plan = packing.apply(batch)
        epochs.append(1e3 * (time.thread_time() - begun))
        moves += len(plan.moves)
    per_epoch = sum(counts) + counts[0]
    return {
        "devices": devices, "requests": len(load.names), "operation": figures(single), "epoch_operations": per_epoch,
        "epoch_median_ms": statistics.median(epochs), "epoch_max_ms": max(epochs),
        "moves_per_epoch": moves / num_epochs, "moves_per_operation": moves / num_epochs / per_epoch,
    }  # fmt: skip


def sequence(rng: random.Random, ranges: tuple[tuple[float, float], ...], length: int) -> Iterator[Operation]:
    """Arrivals, growth and departures that swell and ebb."""
    sizes: dict[str, int] = {}
    for step in range(length):
        leaving = 0.75 if length // 2 < step < 3 * length // 4 else 0.3
        draw = rng.random()
        if sizes and draw < leaving:
            name = rng.choice(list(sizes))
            del sizes[name]
            yield Depart(name)
        elif sizes and draw < leaving + 0.25:
            name = rng.choice(list(sizes))
            sizes[name] = min(CAPACITY, sizes[name] + rng.randint(1, CAPACITY // rng.choice((4, 10, 50))))
            yield Resize(name, sizes[name])
        else:
            low, high = rng.choice(ranges)
            sizes[f"r{step}"] = max(1, min(CAPACITY, round(rng.uniform(low, high) * CAPACITY)))
            yield Arrive(f"r{step}", sizes[f"r{step}"])


def held(packing: Packer) -> dict[int, dict[str, int]]:
    return {device: packing.requests_on(device) for device in packing.active}


def judge_sequences(count: int, length: int) -> Row:
    """Theorems 1 to 3 over random lives; a broken one ends the run."""
    most: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    names = list(RANGES)
    for seed in range(count):
        packing = Packing(PackingParams(capacity=CAPACITY))
        for operation in sequence(random.Random(seed), RANGES[names[seed % len(names)]], length):
            plan = packing.apply([operation])
            kind = type(operation).__name__
            sums["operations"] += 1
            sums["moved_items"] += plan.num_item_moves
            sums["moved_requests"] += len(plan.moves)
            sums["moved_blocks"] += plan.num_moved_blocks
            most[f"items_{kind}"] = max(most[f"items_{kind}"], plan.num_item_moves)
            most[f"requests_{kind}"] = max(most[f"requests_{kind}"], len(plan.moves))
            found = count_exceptions(held(packing), CAPACITY)
            assert all(many <= few for many, few in zip(found, ALLOWED)), (seed, operation, found)
        sizes = [size for on_it in held(packing).values() for size in on_it.values()]
        excess = len(packing.active) - sum(ALLOWED)
        if 3 * excess > 4 * l2_bound(sizes, CAPACITY):
            sums["solved_exactly"] += 1
            best = optimum(sizes, CAPACITY)
            assert best is not None and 3 * excess <= 4 * best, seed
    return {"sequences": count, "operations_each": length, "sums": dict(sums), "most_in_one_operation": dict(most)}


def cut_devices(rng: random.Random, num_devices: int) -> list[int]:
    """Sizes that fill so many devices to the last block, in random order."""
    sizes: list[int] = []
    for _ in range(num_devices):
        cuts = sorted(rng.sample(range(1, CAPACITY), rng.choice((1, 2, 3, 5, 9))))
        sizes += [high - low for low, high in zip([0, *cuts], [*cuts, CAPACITY])]
    rng.shuffle(sizes)
    return sizes


def judge_planted(num_devices: int) -> list[Row]:
    """Devices that each packing takes for what fits on so many, and after growth and departures, against L2."""
    rows: list[Row] = []
    sizes = cut_devices(random.Random(num_devices), num_devices)
    order = list(range(len(sizes)))
    random.Random(1).shuffle(order)
    half = len(order) // 2
    later: list[Operation] = [Depart(f"r{i}") for i in order[:half]]
    later += [Resize(f"r{i}", min(CAPACITY, sizes[i] + CAPACITY // 12)) for i in order[half:]]
    for name, make in PACKERS.items():
        packing = make(PackingParams(capacity=CAPACITY), None)
        for i, size in enumerate(sizes):
            packing.apply([Arrive(f"r{i}", size)])
        planted = len(packing.active)
        moves = sum(len(packing.apply(later[at : at + 20]).moves) for at in range(0, len(later), 20))
        left = [size for on_it in held(packing).values() for size in on_it.values()]
        rows.append({
            "packing": name, "optimum": num_devices, "devices": planted, "devices_later": len(packing.active),
            "l2_later": l2_bound(left, CAPACITY), "repacked_later": first_fit_decreasing(left, CAPACITY),
            "moves_later": moves,
        })  # fmt: skip
    return rows


def main() -> None:
    many = {"nargs": "*", "type": int}
    args = parse(
        __doc__, devices=([125, 1000, 8000], many), operations=6000, epochs=10, stay_s=60.0, reserve_s=20.0,
        sequences=2000, length=100, planted=([100, 1000], many),
    )  # fmt: skip
    timed = [time_size(n, args.operations, args.epochs, args.stay_s, args.reserve_s) for n in args.devices]
    print_rows([{**row, **row["operation"]} for row in timed])
    planted = [row for num_devices in args.planted for row in judge_planted(num_devices)]
    print_rows(planted)
    result = {"capacity": CAPACITY, "stay_s": args.stay_s, "reserve_s": args.reserve_s, "times": timed,
              "planted": planted}  # fmt: skip
    if args.sequences:
        result["random"] = judge_sequences(args.sequences, args.length)
        print(result["random"])
    keep(args.json, result, "policy")

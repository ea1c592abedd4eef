"""Moves take time: a plan counts what a device still holds of requests that should live elsewhere, and devices that are
being emptied are used again before others."""

from __future__ import annotations

import random
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from packing_util import CAPACITY, MIXES, in_batches, placement, random_operations
from test_mell import check

from jettison.policy.packing.mell import Packing
from jettison.policy.packing.types import Arrive, Depart, Grip, Operation, PackingParams

PARAMS = PackingParams(capacity=CAPACITY)


class Slow:
    """Follows a packing with moves that take a while; newcomers live at once where they should."""

    def __init__(self) -> None:
        self.packer = Packing(PARAMS)
        self.here: dict[str, int] = {}
        self.size: dict[str, int] = {}

    def apply(self, batch: list[Operation]) -> None:
        for operation in batch:
            if isinstance(operation, Depart):
                del self.here[operation.request_id], self.size[operation.request_id]
            else:
                self.size[operation.request_id] = operation.num_blocks
        plan = self.packer.apply(batch)
        for request_id, device in plan.placed:
            self.arrive(request_id, device)

    def arrive(self, request_id: str, device: int) -> None:
        self.here[request_id] = device
        self.packer.live_at(request_id, device)

    def owed(self) -> list[str]:
        return [name for name, device in self.here.items() if self.packer.device_of(name) != device]

    def held(self) -> dict[int, int]:
        """By device: blocks of requests that live there."""
        found: defaultdict[int, int] = defaultdict(int)
        for name, device in self.here.items():
            found[device] += self.size[name]
        return found

    def check(self) -> None:
        leaving: defaultdict[int, int] = defaultdict(int)
        for name in self.owed():
            leaving[self.here[name]] += self.size[name]
        book = self.packer.book
        assert {b.device: b.leaving for b in book.bins.values() if b.leaving} == {
            device: num for device, num in leaving.items() if device in book.bins
        }
        assert set(book.closing()) == leaving.keys() - book.bins.keys()


@given(st.integers(0, 1 << 30), st.sampled_from(sorted(MIXES)), st.floats(0.0, 1.0))
@settings(max_examples=150)
def test_the_books_say_what_devices_still_hold_and_once_all_have_moved_theorem_1_holds(
    seed: int, mix: str, share: float
) -> None:
    rng, slow = random.Random(seed), Slow()
    for batch in in_batches(rng, list(random_operations(rng, mix, 80)), 6):
        slow.apply(batch)
        slow.check()
        for name in slow.owed():
            if rng.random() < share:
                slow.arrive(name, slow.packer.device_of(name))
            slow.packer.pin(name, rng.choice([Grip.FREE, Grip.PINNED]))
        slow.check()
    for name in slow.here:
        slow.packer.pin(name, Grip.FREE)
    for _ in range(len(slow.here) + 1):  # what is settled may leave something to be settled
        for name in slow.owed():
            slow.arrive(name, slow.packer.device_of(name))
        slow.apply([])
    assert not slow.owed()
    check(slow.packer)


@given(st.integers(0, 1 << 30), st.sampled_from(sorted(MIXES)))
@settings(max_examples=100)
def test_a_newcomer_goes_where_there_is_room_or_to_a_device_that_holds_requests(seed: int, mix: str) -> None:
    rng, slow = random.Random(seed), Slow()
    for operation in random_operations(rng, mix, 80, grows=False):
        held, in_use = slow.held(), {*slow.packer.active, *slow.packer.book.closing()}
        slow.apply([operation])
        if isinstance(operation, Arrive):
            device = slow.here[operation.request_id]
            was_free = CAPACITY - held.get(device, 0) >= operation.num_blocks
            assert was_free or device in in_use
        if rng.random() < 0.3:
            for name in slow.owed():
                slow.arrive(name, slow.packer.device_of(name))


def test_a_device_that_is_being_emptied_is_used_again_and_its_requests_are_called_back() -> None:
    slow = Slow()
    slow.apply([Arrive(f"t{i}", 550) for i in range(8)])
    first, second = slow.packer.active
    for name in [n for n, d in slow.here.items() if d == first][:3]:
        slow.apply([Depart(name)])
    left = [n for n, d in slow.here.items() if d == second][:3]
    for name in left:
        slow.apply([Depart(name)])
    (closing,) = slow.packer.book.closing()
    moving = [name for name in slow.owed() if slow.here[name] == closing]
    assert len(slow.packer.active) == 1 and moving
    slow.apply([Arrive("l", 1700)])
    assert set(slow.packer.active) == {first, second}, "no third"
    assert len(slow.held()) == 2


def test_a_request_on_its_way_is_not_called_back() -> None:
    slow = Slow()
    slow.apply([Arrive("a", 1300, device=0, here=0), Arrive("b", 1300, device=1, here=1)])
    slow.here |= {"a": 0, "b": 1}
    slow.apply([Arrive("t", 400, device=2, here=2)])
    slow.here["t"] = 2
    assert slow.packer.device_of("t") != 2, "it fits beside an L"
    slow.packer.pin("t", Grip.PINNED)
    slow.apply([Arrive("l", 2000)])
    assert slow.here["l"] == 2 and slow.packer.device_of("t") != 2


def test_in_a_plan_without_moves_under_way_nothing_is_different() -> None:
    """Where moves are told of as done at once, devices hold nothing of others."""
    for seed in range(20):
        told, untold = Packing(PARAMS), Packing(PARAMS)
        for operation in random_operations(random.Random(seed), "all", 120):
            plan = told.apply([operation])
            for request_id, device in plan.placed:
                told.live_at(request_id, device)
            for move in plan.moves:
                told.live_at(move.request_id, move.destination)
            untold.apply([operation])
            placed = {name: d for d, on_it in placement(told).items() for name in on_it}
            assert len(placed) == sum(len(on_it) for on_it in placement(untold).values())
        check(told)
        check(untold)

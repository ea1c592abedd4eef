"""MELL's packing: Theorem 1 after every operation, Theorem 2 against bounds and optima, moves within their bound."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_properties import ALLOWED, count_exceptions, num_owed
from packing_util import CAPACITY, MIXES, in_batches, placement, random_operations, sizes_of

from jettison.policy.packing.bounds import l2_bound, optimum
from jettison.policy.packing.mell import Packing
from jettison.policy.packing.types import (
    Arrive,
    Depart,
    Grip,
    Operation,
    Packer,
    PackingParams,
    Plan,
    Priorities,
    Resize,
    SizeClass,
    Work,
    num_multi_items,
    size_class,
)  # fmt: skip

PARAMS = PackingParams(capacity=CAPACITY)
EXTRA_DEVICES = sum(ALLOWED)
"""c of Theorem 2."""


class Follower:
    """Applies plans to a placement of its own, as those do who carry them out."""

    def __init__(self, packer: Packer) -> None:
        self.packer = packer
        self.where: dict[str, int] = {}
        self.active: set[int] = set()

    def apply(self, batch: Sequence[Operation]) -> Plan:
        before = dict(self.where)
        plan = self.packer.apply(batch)
        for operation in batch:
            if isinstance(operation, Depart):
                del self.where[operation.request_id]
        self.where.update(plan.placed)
        for move in plan.moves + plan.recomputed:
            assert self.where[move.request_id] == move.source == before[move.request_id] != move.destination
            self.where[move.request_id] = move.destination
        assert not set(plan.opened) & self.active and set(plan.closed) <= self.active
        self.active = (self.active | set(plan.opened)) - set(plan.closed)
        found = placement(self.packer)
        assert {name: device for device, on_it in found.items() for name in on_it} == self.where
        assert set(found) == self.active, "none is open that holds nobody"
        return plan


def check(packer: Packer) -> None:
    devices = placement(packer)
    assert all(sum(on_it.values()) <= CAPACITY for on_it in devices.values()), "equation 2"
    found = count_exceptions(devices, CAPACITY)
    assert all(many <= few for many, few in zip(found, ALLOWED)), found


def test_class_limits_are_inclusive_above() -> None:
    sizes = [300, 301, 600, 601, 800, 801, 1200, 1201, 2400]
    classes = [size_class(size, CAPACITY).name for size in sizes]
    assert classes == ["SMALL", "T", "T", "S", "S", "M", "M", "L", "L"]


@pytest.mark.parametrize("mix", MIXES)
def test_the_five_properties_hold_after_every_operation(mix: str) -> None:
    for seed in range(12):
        follower = Follower(Packing(PARAMS))
        for operation in random_operations(random.Random(seed), mix, 150):
            plan = follower.apply([operation])
            assert not plan.unplaced + plan.overfull
            check(follower.packer)


@pytest.mark.parametrize("mix", MIXES)
def test_they_hold_after_every_batch(mix: str) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        follower = Follower(Packing(PARAMS))
        for batch in in_batches(rng, list(random_operations(rng, mix, 200)), 25):
            follower.apply(batch)
            check(follower.packer)


def test_a_batch_moves_only_what_ends_elsewhere() -> None:
    follower = Follower(Packing(PARAMS))
    follower.apply([Arrive(f"m{i}", 1000) for i in range(4)])
    plan = follower.apply([Depart("m0"), Depart("m2"), Arrive("n0", 1100), Arrive("n1", 1100)])
    assert plan.moves == (), "the arrivals take the places of who has gone"
    first = follower.apply([Depart("m1")])
    second = follower.apply([Depart("m3")])
    assert len(first.moves) + len(second.moves) == 1, "one after the other, the two that are left come together"


@pytest.mark.parametrize("mix", MIXES)
def test_small_instances_stay_within_four_thirds_of_the_optimum(mix: str) -> None:
    # Six mixes: 2,040 sequences. `python -m benchmarks packing time` has 100,000.
    for seed in range(340):
        packing = Packing(PARAMS)
        for operation in random_operations(random.Random(seed), mix, 25):
            packing.apply([operation])
            within_bound(packing)


def within_bound(packing: Packing) -> None:
    """Theorem 2, against L2, and where that is not enough against the optimum."""
    sizes, used = sizes_of(packing), len(packing.active)
    if 3 * (used - EXTRA_DEVICES) > 4 * l2_bound(sizes, CAPACITY):
        best = optimum(sizes, CAPACITY)
        assert best is not None and 3 * (used - EXTRA_DEVICES) <= 4 * best


def cut_bins(rng: random.Random, num_bins: int) -> list[int]:
    """Sizes that fill so many devices to the last block, in random order."""
    sizes: list[int] = []
    for _ in range(num_bins):
        cuts = sorted(rng.sample(range(1, CAPACITY), rng.choice((1, 2, 3, 5, 9))))
        sizes += [high - low for low, high in zip([0, *cuts], [*cuts, CAPACITY])]
    rng.shuffle(sizes)
    return sizes


@pytest.mark.parametrize("num_bins", [10, 100, 300])
def test_planted_optima_then_growth_and_departures(num_bins: int) -> None:
    rng = random.Random(num_bins)
    sizes = cut_bins(rng, num_bins)
    packing = Packing(PARAMS)
    arrivals = [Arrive(f"r{i}", size) for i, size in enumerate(sizes)]
    for batch in in_batches(rng, arrivals, 40):
        packing.apply(batch)
    assert 3 * (len(packing.active) - EXTRA_DEVICES) <= 4 * num_bins
    check(packing)
    names = list(range(len(sizes)))
    rng.shuffle(names)
    half = len(names) // 2
    growth = [Resize(f"r{i}", min(CAPACITY, sizes[i] + rng.randint(1, 200))) for i in names[half:]]
    for batch in in_batches(rng, [*growth, *(Depart(f"r{i}") for i in names[:half])], 40):
        packing.apply(batch)
        assert 3 * (len(packing.active) - EXTRA_DEVICES) <= 4 * l2_bound(sizes_of(packing), CAPACITY)
    check(packing)


MOST_ITEMS = {Arrive: 24, Depart: 24, Resize: 37}
"""docs/policies.md has why."""


@pytest.mark.parametrize("mix", MIXES)
def test_an_operation_moves_no_more_items_than_proven(mix: str) -> None:
    for seed in range(20):
        packing = Packing(PARAMS)
        for operation in random_operations(random.Random(1000 + seed), mix, 200):
            plan = packing.apply([operation])
            assert plan.num_item_moves <= MOST_ITEMS[type(operation)]
            assert plan.num_item_moves <= len(plan.moves)


def test_same_operations_same_plans() -> None:
    def plans() -> list[Plan]:
        packing = Packing(PARAMS)
        return [packing.apply([operation]) for operation in random_operations(random.Random(5), "all", 300)]

    assert plans() == plans()


def test_who_is_pinned_stays_and_what_is_owed_is_told() -> None:
    packing = Packing(PARAMS)
    follower = Follower(packing)
    follower.apply([Arrive(f"m{i}", 1000) for i in range(4)])
    follower.packer.pin("m1", Grip.PINNED)
    follower.packer.pin("m3", Grip.PINNED)
    plan = follower.apply([Depart("m0"), Depart("m2")])
    assert (plan.moves, num_owed(packing)) == ((), 1), "two devices with one M each"
    follower.packer.pin("m1", Grip.FREE)
    plan = follower.apply([])
    assert [move.request_id for move in plan.moves] == ["m1"]
    assert num_owed(packing) == 0


def test_who_is_held_leaves_only_what_overflows() -> None:
    follower = Follower(Packing(PARAMS))
    follower.apply([Arrive("a", 1000), Arrive("b", 1000), Arrive("t", 350)])
    assert len(follower.active) == 1
    follower.packer.pin("t", Grip.HELD)
    plan = follower.apply([Resize("a", 1150)])
    assert [move.request_id for move in plan.moves] == ["t"]
    follower.packer.pin("a", Grip.PINNED)
    follower.packer.pin("b", Grip.PINNED)
    assert follower.apply([Resize("b", 1300), Resize("a", 1200)]).overfull == (follower.where["a"],)


def test_a_device_that_overflows_gives_the_smallest_request_that_leaves_the_others_room_to_grow() -> None:
    def given(growth: int) -> list[str]:
        follower = Follower(Packing(PARAMS))
        sizes = {"a": 1000, "b": 1000, "s": 90, "t": 180, "u": 130}
        follower.apply([Arrive(name, size, growth_blocks=growth) for name, size in sizes.items()])
        assert len(follower.active) == 1
        return [move.request_id for move in follower.apply([Resize("s", 100, growth)]).moves]

    assert given(0) == ["s"] and given(24) == ["u"] and given(32) == ["t"]
    assert given(500) == ["s"], "where none leaves so much, it gives as little as suffices"


@given(st.integers(0, 1 << 30), st.sampled_from(sorted(MIXES)), st.integers(0, CAPACITY))
@settings(max_examples=100)
def test_whatever_is_left_for_growth_the_theorems_hold_and_a_plan_moves_no_more(
    seed: int, mix: str, growth: int
) -> None:
    follower = Follower(Packing(PARAMS))
    for operation in random_operations(random.Random(seed), mix, 80):
        if not isinstance(operation, Depart):
            operation = operation._replace(growth_blocks=growth)
        plan = follower.apply([operation])
        assert plan.num_item_moves <= MOST_ITEMS[type(operation)]
        check(follower.packer)


def test_an_m_that_grew_out_of_three_s_stays_while_it_fits_and_no_device_is_opened_for_its_class() -> None:
    packing = Packing(PARAMS)
    follower = Follower(packing)
    follower.apply([Arrive(name, 750) for name in ("a", "b", "c")])
    assert follower.apply([Resize("a", 850)]) == Plan()
    check(packing)
    plan = follower.apply([Depart("b")])
    assert [move.request_id for move in plan.moves] == ["c"], "one M and one S weigh less than a device"
    check(packing)


@pytest.mark.parametrize("mix", MIXES)
def test_grips_are_kept_whatever_comes(mix: str) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        follower = Follower(Packing(PARAMS))
        pinned: dict[str, Grip] = {}
        for operation in random_operations(rng, mix, 120):
            plan = follower.apply([operation])
            assert not any(pinned.get(move.request_id) is Grip.PINNED for move in plan.moves)
            assert plan.overfull == tuple(d for d, on in sorted(placement(follower.packer).items())
                                          if sum(on.values()) > CAPACITY)  # fmt: skip
            pinned = {name: grip for name, grip in pinned.items() if name in follower.where}
            if follower.where and rng.random() < 0.5:
                name = rng.choice(list(follower.where))
                pinned[name] = rng.choice(list(Grip))
                follower.packer.pin(name, pinned[name])
        for name in pinned:
            follower.packer.pin(name, Grip.FREE)
        follower.apply([])
        check(follower.packer)


def test_devices_run_out_and_come_back() -> None:
    follower = Follower(Packing(PARAMS, devices=[7, 3]))
    assert follower.apply([Arrive("a", 2000), Arrive("b", 1900), Arrive("c", 1800)]).unplaced == ("c",)
    assert follower.where == {"a": 7, "b": 3}
    assert follower.apply([Resize("b", 2400), Arrive("d", 400)]).unplaced == ()
    assert follower.where["d"] == 7
    plan = follower.apply([Resize("a", 2200)])
    assert (plan.moves, plan.overfull, follower.packer.outgrown) == ((), (7,), (7,)), "nothing has room for d"
    follower.packer.set_taking(9, True)
    assert follower.packer.outgrown == (), "one can be opened"
    assert follower.apply([]).opened == (9,)


@pytest.mark.parametrize("mix", MIXES)
def test_a_few_devices_are_never_given_more_than_they_hold(mix: str) -> None:
    for seed in range(10):
        follower = Follower(Packing(PARAMS, devices=range(6)))
        gone: set[str] = set()
        for operation in random_operations(random.Random(seed), mix, 150, grows=False):
            if operation.request_id in gone:
                continue
            plan = follower.apply([operation])
            gone.update(plan.unplaced)
            assert not plan.overfull and len(follower.active) <= 6


@given(st.integers(0, 1 << 30), st.sampled_from(sorted(MIXES)), st.integers(1, 6))
@settings(max_examples=150)
def test_no_request_is_unplaced_while_some_device_has_room_for_it(seed: int, mix: str, num_devices: int) -> None:
    packing = Packing(PARAMS, devices=range(num_devices))
    follower = Follower(packing)
    gone: set[str] = set()
    for operation in random_operations(random.Random(seed), mix, 80):
        if operation.request_id in gone:
            continue
        free = {d: CAPACITY - sum(packing.requests_on(d).values()) for d in range(num_devices)}
        plan = follower.apply([operation])
        gone.update(plan.unplaced)
        if isinstance(operation, Arrive) and plan.unplaced:
            assert max(free.values()) < operation.num_blocks, (free, operation)
        was_over = isinstance(operation, Resize) or min(free.values()) < 0
        assert was_over or not plan.overfull, "only growth is more than a device holds"
    for device in range(num_devices, num_devices + 40):
        packing.set_taking(device, True)
    follower.apply([])
    check(packing)
    assert num_owed(packing) == 0, "with devices again, nothing is owed"


def test_what_only_a_wrong_device_has_room_for_goes_there_and_is_owed() -> None:
    packing = Packing(PARAMS, devices=[0])
    follower = Follower(packing)
    follower.apply([Arrive("s", 700)])
    assert follower.apply([Arrive("m", 1000)]).placed == ((("m", 0)),)
    assert num_owed(packing) == 1, "an M beside an S"
    assert follower.apply([]).moves == (), "it stays while there is no better place"
    packing.set_taking(1, True)
    assert len(follower.apply([]).moves) == 1
    assert num_owed(packing) == 0


def test_a_device_that_is_not_packed_takes_and_gives_nothing() -> None:
    follower = Follower(Packing(PARAMS))
    follower.apply([Arrive("a", 200)])
    follower.packer.set_taking(0, False)
    plan = follower.apply([Arrive("b", 200)])
    assert (plan.placed[0].device, plan.moves) == (1, ())
    follower.packer.set_taking(0, True)
    assert len(follower.apply([]).moves) == 1
    assert len(follower.active) == 1


def test_a_request_that_lives_somewhere_already_is_taken_over_there() -> None:
    follower = Follower(Packing(PARAMS))
    follower.where["a"] = 5
    follower.active.add(5)
    plan = follower.packer.apply([Arrive("a", 1700, device=5)])
    assert (plan.placed, plan.moves, plan.opened) == ((), (), (5,))
    follower.apply([Arrive("b", 300)])
    assert follower.where["b"] == 5
    plan = follower.packer.apply([Depart("b"), Arrive("b", 300, device=8)])
    assert [(move.source, move.destination) for move in plan.moves] == [(8, 5)], "a move that failed is tried again"


def test_requests_with_one_prefix_live_together_and_count_it_once() -> None:
    shared = Packing(PARAMS)
    for i in range(16):
        shared.apply([Arrive(f"r{i}", 500, share_key="p" if i % 2 else "q", shared_blocks=400)])
    alone = Packing(PARAMS)
    for i in range(16):
        alone.apply([Arrive(f"r{i}", 500)])
    assert (len(shared.active), len(alone.active)) == (1, 4)
    for i in range(0, 16, 2):
        shared.apply([Depart(f"r{i}")])
    assert shared.book.bins[shared.active[0]].used == 400 + 8 * 100


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ([Depart("x")], KeyError), ([Resize("x", 1)], KeyError), ([Arrive("a", 1)], ValueError),
        ([Arrive("b", 1), Arrive("b", 1)], ValueError), ([Arrive("b", CAPACITY + 1)], ValueError),
        ([Resize("a", 0)], ValueError), ([Depart("a"), Depart("a")], ValueError),
        ([Arrive("b", 5, share_key="k", shared_blocks=6)], ValueError),
    ],
)
def test_a_bad_batch_changes_nothing(batch: list[Operation], error: type[Exception]) -> None:
    packing = Packing(PARAMS)
    packing.apply([Arrive("a", 10)])
    with pytest.raises(error):
        packing.apply([Arrive("good", 5), *batch])
    assert placement(packing) == {0: {"a": 10}}


@pytest.mark.parametrize(
    ("weights", "device"),
    [
        (Priorities(load=1, free=0, distance=0), 2), (Priorities(load=0, free=1, distance=0), 0),
        (Priorities(load=0, free=0, distance=1), 1),
    ],
)
def test_destinations_are_chosen_by_weight(weights: Priorities, device: int) -> None:
    params = PackingParams(capacity=CAPACITY, priorities=weights)
    packing = Packing(params, machine_of={0: "a", 1: "b", 2: "a", 5: "b"})
    large = [Arrive("x", 1400, device=0), Arrive("x1", 100, device=0), Arrive("y", 1600, device=1),
             Arrive("y1", 100, device=1), Arrive("z", 1750, device=2)]  # fmt: skip
    packing.apply([*large, Arrive("source", 1800, device=5), Arrive("goes", 301, device=5)])
    plan = packing.apply([Resize("source", 2200)])
    assert [(move.request_id, move.destination) for move in plan.moves] == [("goes", device)]


def test_of_other_machines_the_nearer_one_is_chosen() -> None:
    def distance(src: object, dst: object) -> float:
        return 2.0 if "b" in (src, dst) else 1.0

    params = PackingParams(capacity=CAPACITY, priorities=Priorities(load=0, free=0, distance=1))
    packing = Packing(params, machine_of={0: "b", 1: "c", 2: "b", 5: "a"}, distance=distance)
    large = [Arrive("x", 1400, device=0), Arrive("x1", 100, device=0), Arrive("y", 1600, device=1),
             Arrive("y1", 100, device=1), Arrive("z", 1750, device=2)]  # fmt: skip
    packing.apply([*large, Arrive("source", 1800, device=5), Arrive("goes", 301, device=5)])
    plan = packing.apply([Resize("source", 2200)])
    assert [(move.request_id, move.destination) for move in plan.moves] == [("goes", 1)]


def test_no_device_stays_in_use_that_a_long_request_was_looked_for_on() -> None:
    packing = Packing(PackingParams(capacity=100), range(3))
    packing.bound_work(Work(1, 1, 61))
    packing.apply([Arrive("b", 10, device=0, here=1, grip=Grip.PINNED)])
    packing.apply([Arrive("c", 90)])
    assert all(packing.requests_on(device) for device in packing.active)
    assert not packing.apply([Arrive("d", 50)]).unplaced


def test_a_prefix_that_no_request_has_any_more_is_forgotten() -> None:
    packing = Packing(PackingParams(capacity=100), range(2))
    for number in range(20):
        names = [f"{number}-{each}" for each in range(2)]
        packing.apply([Arrive(name, 10, share_key=f"k{number}", shared_blocks=5) for name in names])
        packing.apply([Depart(name) for name in names])
    assert not packing.book.by_key


def test_multi_items_are_counted_full() -> None:
    assert num_multi_items([100] * 7, CAPACITY) == 2
    assert num_multi_items([], CAPACITY) == 0
    assert all(size_class(size, CAPACITY) is SizeClass.SMALL for size in (1, 300))

"""A card's pages: mappings that are kept, so that most changes call nothing; memory that really returns; failures."""

from __future__ import annotations

import numpy as np
import pytest
from fakecuda import MIB, POISON, FakeBindings, PoisonedPool
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.device.cuda.spans import runs
from jettison.errors import MappingError

SIZE = 2 * MIB
NUM_PAGES = 8


@pytest.fixture
def fake():
    fake = FakeBindings(64 * MIB)
    yield fake
    fake.close()


@pytest.fixture
def pool(fake):
    pool = PoisonedPool(NUM_PAGES * SIZE, SIZE, fake)
    pool.start()
    yield pool
    pool.close()
    assert not fake.size and not fake.reserved and not fake.contexts


def first_byte(arena, position: int) -> int:
    return int(arena.tensor()[position * arena._pool.page_bytes])


def fill(arena, position: int, count: int, value: int) -> None:
    for at in range(position, position + count):
        arena.tensor()[at * arena._pool.page_bytes] = value + at - position


def test_all_memory_is_taken_at_the_start_and_no_byte_more(fake, pool):
    assert fake.used_bytes == pool.held_bytes == NUM_PAGES * SIZE
    pool.reserve(4).map(0, 0, 4)
    assert fake.used_bytes == NUM_PAGES * SIZE


def test_cycles_call_nothing_from_the_second_time_on(fake, pool):
    slab, kv = pool.reserve(4), pool.reserve(NUM_PAGES)
    kv.map(0, 0, 4)
    slab.map(0, 4, 4)
    fill(slab, 0, 4, 10)
    for cycle in range(3):
        before = len(fake.log)
        slab.unmap(0, 4)
        kv.map(4, 4, 4)
        assert [first_byte(kv, 4 + i) for i in range(4)] == [10, 11, 12, 13]
        kv.unmap(4, 4)
        slab.map(0, 4, 4)
        assert [first_byte(slab, i) for i in range(4)] == [10, 11, 12, 13]
        assert (len(fake.log) == before) == (cycle > 0)
        pool.check()
    assert pool.num_calls == 3 * NUM_PAGES // 2 + 1 + 3 + NUM_PAGES  # a map a page and address, an access a run
    assert pool.num_calls_saved == 4 * 6 + 4 * 5, "every unmap, and all maps but the first of the arena"


def test_what_is_not_owned_shows_poison_though_it_is_mapped(fake, pool):
    slab, kv = pool.reserve(2), pool.reserve(4)
    slab.map(0, 0, 2)
    fill(slab, 0, 2, 1)
    assert kv.prepare(1, 0, 2) == 2
    assert first_byte(kv, 1) == POISON and first_byte(slab, 0) == 1
    assert kv.address + SIZE in fake.mapped
    slab.unmap(0, 1)
    kv.map(1, 0, 1)
    assert (first_byte(slab, 0), first_byte(kv, 1), first_byte(kv, 2)) == (POISON, 1, POISON)


def test_a_position_gets_another_page_and_never_two(fake, pool):
    arena = pool.reserve(2)
    arena.map(0, 0, 2)
    fill(arena, 0, 2, 1)
    arena.unmap(0, 2)
    arena.map(0, 4, 2)
    fill(arena, 0, 2, 7)
    assert first_byte(arena, 0) == 7
    assert len([at for at in fake.mapped if arena.address <= at < arena.address + 2 * SIZE]) == 2
    arena.map(0, 0, 1)
    assert first_byte(arena, 0) == 1 and first_byte(arena, 1) == 8
    pool.check()


def test_a_page_of_another_position_is_refused(pool):
    one, two = pool.reserve(2), pool.reserve(2)
    one.map(0, 3, 2)
    one.map(0, 3, 2)
    for arena, position in [(two, 0), (one, 1)]:
        with pytest.raises(ValueError, match="another position"):
            arena.map(position, 3, 1)
    pool.check()
    with pytest.raises(ValueError, match="owned"):
        pool.discard(2, 2)
    assert pool.held_bytes == NUM_PAGES * SIZE


def test_discarding_takes_a_page_away_from_every_address(fake, pool):
    arenas = [pool.reserve(NUM_PAGES) for _ in range(3)]
    for arena in arenas:
        arena.map(1, 2, 4)
        arena.unmap(1, 4)
    pool.discard(3, 2)
    assert fake.used_bytes == pool.held_bytes == (NUM_PAGES - 2) * SIZE
    assert [[int(page) for page in arena.span.there[1:5]] for arena in arenas] == [[2, -1, -1, 5]] * 3
    pool.check()
    fake.foreign_bytes = fake.total_bytes - fake.used_bytes - SIZE  # another process takes what was given back
    with pytest.raises(MappingError, match="are free"):
        arenas[0].map(1, 2, 4)
    pool.check()
    fake.foreign_bytes = 0
    arenas[0].map(1, 2, 4)
    pool.check()


CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemAddressReserve")


def test_a_start_that_fails_at_any_call_holds_nothing_and_can_be_tried_again(fake):
    for fail_at in range(100):
        seen = iter(range(1000))
        fake.fail = lambda name: name in CALLS[1:] and next(seen) == fail_at  # noqa: B023
        pool = PoisonedPool(4 * SIZE, SIZE, fake)
        try:
            pool.start()
        except MappingError:
            assert not fake.size and not fake.reserved and not fake.contexts
        else:
            pool.close()
            break
    assert fail_at == 4 + 2, "a view, a mapping each, one access"


@settings(max_examples=150)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["map", "unmap", "prepare", "discard"]), st.integers(0, 1), st.integers(0, 3),
                  st.integers(0, 3), st.integers(1, 3), st.integers(0, 6), st.integers(1, 4)),
        max_size=25,
    )
)  # fmt: skip
def test_after_any_failures_what_is_owned_is_there_and_the_rest_can_be_mapped(steps):
    """From its n-th call of the driver on a few calls of each step fail; it is tried until it works."""
    fake = FakeBindings(MIB, granularity=4096)
    pool = PoisonedPool(6 * 4096, 4096, fake)
    pool.start()
    arenas = [pool.reserve(6), pool.reserve(6)]
    marks = dict.fromkeys(range(6), 0)
    for number, (verb, which, position, page, count, fail_at, num_fails) in enumerate(steps, 1):
        arena, pages = arenas[which], range(page, page + count)
        if verb == "map":
            for other in arenas:
                for at in np.flatnonzero(np.isin(other.owned, list(pages))).tolist():
                    other.unmap(at, 1)
        elif verb == "discard" and any(pool._owner[p] != -1 for p in pages):
            continue
        arguments = {"discard": (page, count), "unmap": (position, count)}.get(verb, (position, page, count))
        call = getattr(pool if verb == "discard" else arena, verb)
        seen = iter(range(1000))
        fake.fail = lambda name: name in CALLS and fail_at <= next(seen) < fail_at + num_fails  # noqa: B023
        while True:
            try:
                call(*arguments)
                break
            except MappingError:
                pool.check()
        fake.fail = lambda name: False
        pool.check()
        if verb == "discard":
            marks.update(dict.fromkeys(pages, 0))
        for other in arenas:
            for at in np.flatnonzero(other.owned >= 0).tolist():
                mark = marks[int(other.owned[at])]
                assert not mark or first_byte(other, at) == mark
        if verb == "map":
            fill(arena, position, count, number)
            marks.update({p: number + p - page for p in pages})
    pool.close()
    assert not fake.size and not fake.reserved
    fake.close()


@given(st.lists(st.booleans(), max_size=40))
def test_runs_are_the_stretches_of_a_mask(mask):
    found = list(runs(np.array(mask, dtype=np.bool_)))
    rebuilt = [False] * len(mask)
    for first, count in found:
        rebuilt[first : first + count] = [True] * count
        assert count > 0 and (first == 0 or not mask[first - 1])
    assert rebuilt == mask

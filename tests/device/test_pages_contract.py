"""What ``device.pages`` promises, held against every pool there is: the host's, one on a fake card, one on a real card.

What only one back end promises stands in its own file (``test_pages_host``, ``cuda/test_pages``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from fakecuda import FakeBindings, PoisonedPool
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.device.cuda.pages import PagePool as CudaPagePool
from jettison.device.pages import Arena, PagePool
from jettison.device.pages_host import PagePool as HostPagePool
from jettison.errors import MappingError, OutOfPagesError

MIB = 1 << 20
NUM_PAGES = 8
EDGE = 64
"""Bytes at each end of a page that tests write and look at."""


@contextmanager
def host_pool() -> Iterator[PagePool]:
    yield HostPagePool(NUM_PAGES * 8192 + 100, 8192)


@contextmanager
def fake_pool() -> Iterator[PagePool]:
    fake = FakeBindings((NUM_PAGES + 1) * 2 * MIB)
    yield PoisonedPool(NUM_PAGES * 2 * MIB + 100, 2 * MIB, fake)
    assert not fake.size and not fake.reserved and not fake.mapped and not fake.contexts, "something stayed"
    fake.close()


@contextmanager
def cuda_pool() -> Iterator[PagePool]:
    yield CudaPagePool(NUM_PAGES * 4 * MIB + 100, 4 * MIB)
    torch.cuda.synchronize()


POOLS = {"host": host_pool, "fake": fake_pool, "cuda": cuda_pool}
needs_cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
every_pool = pytest.mark.parametrize("kind", ["host", "fake", pytest.param("cuda", marks=needs_cuda)])


@contextmanager
def started(kind: str) -> Iterator[PagePool]:
    with POOLS[kind]() as pool:
        pool.start()
        try:
            yield pool
        finally:
            pool.close()


def edges(pool: PagePool, arena: Arena, position: int) -> torch.Tensor:
    """Both ends of a position's bytes."""
    page = arena.tensor()[position * pool.page_bytes : (position + 1) * pool.page_bytes]
    return torch.stack([page[:EDGE], page[-EDGE:]])


def write(pool: PagePool, arena: Arena, position: int, value: int) -> None:
    page = arena.tensor()[position * pool.page_bytes : (position + 1) * pool.page_bytes]
    page[:EDGE] = value
    page[-EDGE:] = value


def holds(pool: PagePool, arena: Arena, position: int, value: int) -> bool:
    return bool(edges(pool, arena, position).eq(value).all())


def read(pool: PagePool, page: int, offset: int, num_bytes: int) -> list[int]:
    out = bytearray(num_bytes)
    pool.read(page, offset, memoryview(out))
    return list(out)


@every_pool
def test_bytes_follow_the_page_and_addresses_stay(kind):
    with started(kind) as pool:
        assert pool.num_pages == NUM_PAGES, "what is left below a page is not used"
        slab, kv = pool.reserve(3), pool.reserve(NUM_PAGES)
        address = kv.tensor().data_ptr()
        assert address == kv.address and kv.tensor().numel() == NUM_PAGES * pool.page_bytes == kv.tensor().nbytes
        slab.map(0, 4, 3)
        for position in range(3):
            write(pool, slab, position, 7 + position)
        slab.unmap(0, 3)
        kv.map(2, 4, 3)
        assert [holds(pool, kv, 2 + position, 7 + position) for position in range(3)] == [True] * 3
        write(pool, kv, 3, 99)
        kv.unmap(2, 3)
        slab.map(0, 4, 3)
        assert holds(pool, slab, 0, 7) and holds(pool, slab, 1, 99) and holds(pool, slab, 2, 9)
        assert kv.tensor().data_ptr() == address
        pool.check()


@every_pool
def test_a_page_can_be_read_and_copied_while_no_position_owns_it(kind):
    with started(kind) as pool:
        size, arena, other = pool.page_bytes, pool.reserve(2), pool.reserve(4)
        arena.map(0, 3, 2)
        arena.tensor()[size - 5 : size + 7] = torch.arange(1, 13, dtype=torch.uint8)
        pool.wait_idle()
        arena.unmap(0, 2)
        assert read(pool, 3, size - 5, 12) == list(range(1, 13)), "over the border of two pages"
        other.map(1, 6, 2)
        other.copy(3, size - 5, 2 * size - 6, 12)
        pool.finish_copies()
        assert other.tensor()[2 * size - 6 : 2 * size + 6].tolist() == list(range(1, 13))
        with pytest.raises(OutOfPagesError):
            read(pool, NUM_PAGES - 1, size - 5, 12)
        with pytest.raises(OutOfPagesError):
            other.copy(NUM_PAGES - 1, size - 5, size, 12)


@every_pool
def test_what_is_held_is_read_at_once_and_written_last(kind):
    with started(kind) as pool:
        arena = pool.reserve(2)
        arena.map(0, 0, 2)
        write(pool, arena, 0, 1)
        write(pool, arena, 1, 2)
        pool.wait_idle()
        arena.hold(0, 0, pool.page_bytes, EDGE)  # the two change places
        arena.hold(1, 0, 0, EDGE)
        assert holds(pool, arena, 0, 1) and holds(pool, arena, 1, 2)
        pool.finish_copies()
        assert arena.tensor()[:EDGE].eq(2).all() and arena.tensor()[pool.page_bytes :][:EDGE].eq(1).all()
        write(pool, arena, 0, 3)
        pool.wait_idle()
        pool.finish_copies()
        assert holds(pool, arena, 0, 3), "what was held is written once"


@every_pool
def test_a_copy_to_where_nothing_is_owned_is_refused(kind):
    with started(kind) as pool:
        arena = pool.reserve(3)
        arena.map(0, 0, 2)
        arena.unmap(1, 1)
        for at in (pool.page_bytes, pool.page_bytes - 4):
            with pytest.raises(MappingError):
                arena.copy(0, 0, at, 8)


@every_pool
def test_the_budget_is_a_hard_limit(kind):
    with started(kind) as pool:
        arena = pool.reserve(NUM_PAGES * 2)
        for page, num_pages in [(NUM_PAGES, 1), (NUM_PAGES - 1, 2), (-1, 1), (0, NUM_PAGES + 1)]:
            with pytest.raises(OutOfPagesError):
                arena.map(0, page, num_pages)
        for position, num_pages in [(2 * NUM_PAGES, 1), (2 * NUM_PAGES - 1, 2), (-1, 1), (0, 0)]:
            for call in (lambda p, n: arena.map(p, 0, n), arena.unmap, lambda p, n: arena.prepare(p, 0, n)):
                with pytest.raises(ValueError):
                    call(position, num_pages)
        arena.map(0, 0, NUM_PAGES)
        assert pool.held_bytes <= NUM_PAGES * pool.page_bytes
        pool.check()


@every_pool
def test_start_and_close_are_idempotent_and_a_pool_can_be_started_again(kind):
    with POOLS[kind]() as pool:
        pool.close()
        for _ in range(2):
            pool.start()
            pool.start()
            arena = pool.reserve(NUM_PAGES)
            arena.map(0, 0, NUM_PAGES)
            write(pool, arena, 5, 1)
            pool.wait_idle()
            pool.close()
            pool.close()
            assert pool.held_bytes == 0


@every_pool
def test_discarded_pages_hold_no_memory_and_can_be_used_again(kind):
    with started(kind) as pool:
        slab, kv = pool.reserve(NUM_PAGES), pool.reserve(NUM_PAGES)
        slab.map(0, 0, NUM_PAGES)
        slab.tensor().fill_(5)
        pool.wait_idle()
        slab.unmap(2, 4)
        kv.map(1, 2, 4)
        kv.unmap(1, 4)
        assert pool.held_bytes == NUM_PAGES * pool.page_bytes
        pool.discard(2, 4)
        assert pool.held_bytes == (NUM_PAGES - 4) * pool.page_bytes
        assert holds(pool, slab, 0, 5) and holds(pool, slab, NUM_PAGES - 1, 5)
        pool.check()
        kv.map(1, 2, 4)
        kv.tensor()[pool.page_bytes : 5 * pool.page_bytes].fill_(6)
        pool.wait_idle()
        assert holds(pool, kv, 4, 6) and pool.held_bytes == NUM_PAGES * pool.page_bytes
        pool.check()


@every_pool
def test_preparing_changes_no_owner_and_no_byte(kind):
    with started(kind) as pool:
        slab, kv = pool.reserve(4), pool.reserve(NUM_PAGES)
        slab.map(0, 4, 4)
        kv.map(0, 0, 2)
        write(pool, slab, 0, 3)
        write(pool, kv, 1, 4)
        first = kv.prepare(0, 2, 6)  # the first two positions own pages: only four are free
        assert first in (0, 4) and kv.prepare(0, 2, 6) == 0
        assert holds(pool, slab, 0, 3) and holds(pool, kv, 1, 4)
        pool.check()
        slab.unmap(0, 4)
        before = pool.num_calls
        kv.map(2, 4, 4)
        assert pool.num_calls == before or not first, "what was prepared needs no call"
        assert holds(pool, kv, 2, 3)
        pool.check()


def an_operation(draw) -> tuple:
    arena, position = draw(st.integers(0, 2)), draw(st.integers(0, NUM_PAGES - 1))
    count = draw(st.integers(1, NUM_PAGES - position))
    page = draw(st.integers(0, NUM_PAGES - count))
    verb = draw(st.sampled_from(["map", "map", "unmap", "prepare", "write", "discard", "copy", "hold", "finish"]))
    return verb, arena, position, page, count, draw(st.integers(1, 200))


operations = st.lists(st.composite(an_operation)(), min_size=5, max_size=40)


class Model:
    """What a pool of that many pages and three arenas should hold: the contract in its shortest form."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.arenas = [pool.reserve(NUM_PAGES) for _ in range(3)]
        self.owned: list[dict[int, int]] = [{}, {}, {}]
        self.bytes: dict[int, int | None] = dict.fromkeys(range(NUM_PAGES))
        """The value at both edges of a page, None where it is not known."""
        self.late: list[tuple[int, int, int | None]] = []

    def owner_of(self, page: int) -> tuple[int, int] | None:
        found = [(a, at) for a in range(3) for at, owned in self.owned[a].items() if owned == page]
        assert len(found) <= 1
        return found[0] if found else None

    def do(self, verb: str, arena: int, position: int, page: int, count: int, value: int) -> None:
        pool, span, owned = self.pool, self.arenas[arena], self.owned[arena]
        positions, pages = range(position, position + count), range(page, page + count)
        if verb == "map":
            for other in pages:  # as the caller must
                owner = self.owner_of(other)
                if owner is not None and owner != (arena, position + other - page):
                    self.arenas[owner[0]].unmap(owner[1], 1)
                    del self.owned[owner[0]][owner[1]]
            span.map(position, page, count)
            owned.update(zip(positions, pages))
        elif verb == "unmap":
            span.unmap(position, count)
            for at in positions:
                owned.pop(at, None)
        elif verb == "prepare":
            span.prepare(position, page, count)
        elif verb == "write" and position in owned:
            write(pool, span, position, value)
            self.bytes[owned[position]] = value
        elif verb == "discard" and all(self.owner_of(other) is None for other in pages) and not self.late:
            pool.discard(page, count)
            self.bytes.update(dict.fromkeys(pages))
        elif verb in ("copy", "hold") and position in owned and owned[position] != page and not self.late:
            self.copy(verb, arena, position, page)
        elif verb == "finish":
            self.finish()

    def copy(self, verb: str, arena: int, position: int, page: int) -> None:
        if self.bytes[page] is None:
            return  # its memory may have been given back
        size = self.pool.page_bytes
        for start in (0, size - EDGE):
            getattr(self.arenas[arena], verb)(page, start, position * size + start, EDGE)
        if verb == "hold":
            self.late.append((arena, position, self.bytes[page]))
            self.finish()
        else:
            self.pool.finish_copies()
            self.bytes[self.owned[arena][position]] = self.bytes[page]

    def finish(self) -> None:
        self.pool.finish_copies()
        for arena, position, value in self.late:
            self.bytes[self.owned[arena][position]] = value
        self.late.clear()

    def check(self) -> None:
        self.pool.check()
        for arena, owned in zip(self.arenas, self.owned):
            for position, page in owned.items():
                assert self.bytes[page] is None or holds(self.pool, arena, position, self.bytes[page]), (position, page)
        for page, value in self.bytes.items():
            if value is not None:
                assert read(self.pool, page, 0, EDGE) == [value] * EDGE


@every_pool
@settings(max_examples=30)
@given(operations=operations)
def test_any_sequence_of_calls_leaves_what_the_contract_says(kind, operations):
    with started(kind) as pool:
        model = Model(pool)
        for operation in operations:
            model.do(*operation)
            pool.wait_idle()
            model.check()

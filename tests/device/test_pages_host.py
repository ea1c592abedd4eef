"""Pages of a memory file under reserved addresses: bytes follow pages, addresses stay, failures leave no trace."""

from __future__ import annotations

import errno
import faulthandler
import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch

from jettison.device.pages_host import LinuxSyscalls, PagePool
from jettison.errors import MappingError, OutOfPagesError

PAGE = 8192


class FailingSyscalls(LinuxSyscalls):
    """The call with index ``fail_at`` fails; None lets all through."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.fail_at = fail_at
        self.num_calls = 0

    def _count(self) -> None:
        self.num_calls += 1
        if self.fail_at == self.num_calls - 1:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def create(self, name, num_bytes):
        self._count()
        return super().create(name, num_bytes)

    def mmap(self, *args):
        self._count()
        return super().mmap(*args)


def mapped_pages(arena, page_bytes=PAGE) -> dict[int, int]:
    """position -> page, as the kernel sees it."""
    found = {}
    start, end = arena.address, arena.address + arena.num_pages * page_bytes
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = re.match(r"(\w+)-(\w+) (\S+) (\w+) .*memfd:jettison-pages", line)
        if match and "w" in match[3]:
            lo, hi, offset = int(match[1], 16), int(match[2], 16), int(match[4], 16)
            for address in range(max(lo, start), min(hi, end), page_bytes):
                found[(address - start) // page_bytes] = (offset + address - lo) // page_bytes
    return found


@pytest.fixture
def pool():
    pool = PagePool(16 * PAGE + 100, PAGE)
    pool.start()
    yield pool
    pool.close()


def test_bytes_follow_the_page_and_addresses_stay(pool):
    assert pool.num_pages == 16
    parameters, kv = pool.reserve(4), pool.reserve(16)
    address = kv.tensor().data_ptr()
    parameters.map(0, 4, 4)
    parameters.tensor()[:] = 7
    parameters.unmap(0, 4)
    kv.map(10, 4, 4)
    assert kv.tensor()[10 * PAGE : 14 * PAGE].eq(7).all()
    kv.tensor()[10 * PAGE] = 9
    kv.unmap(10, 4)
    parameters.map(0, 4, 4)
    assert parameters.tensor()[0] == 9 and parameters.tensor()[1] == 7
    assert kv.tensor().data_ptr() == address and kv.tensor().numel() == 16 * PAGE
    assert pool.num_map_calls == 3 and pool.num_unmap_calls == 2


def test_the_kernel_agrees_about_what_is_where(pool):
    arena = pool.reserve(16)
    arena.map(2, 8, 3)
    arena.map(5, 0, 2, populate=True)
    assert mapped_pages(arena) == {2: 8, 3: 9, 4: 10, 5: 0, 6: 1}
    arena.unmap(3, 3)
    arena.map(2, 15, 1)
    assert mapped_pages(arena) == {2: 15, 6: 1}


def test_a_page_can_be_read_while_it_is_mapped_nowhere(pool):
    arena = pool.reserve(2)
    arena.map(0, 3, 2)
    arena.tensor()[:] = torch.arange(2 * PAGE, dtype=torch.int64).remainder(251).to(torch.uint8)
    expected = arena.tensor()[PAGE - 5 : PAGE + 7].tolist()
    arena.unmap(0, 2)
    out = bytearray(12)
    pool.read(3, PAGE - 5, memoryview(out))
    assert list(out) == expected
    with pytest.raises(OutOfPagesError):
        pool.read(15, PAGE - 5, memoryview(out))


def test_the_budget_is_a_hard_limit(pool):
    arena = pool.reserve(32)
    for page, num_pages in [(16, 1), (15, 2), (-1, 1), (0, 17)]:
        with pytest.raises(OutOfPagesError):
            arena.map(0, page, num_pages)
    for position, num_pages in [(32, 1), (31, 2), (-1, 1), (0, 0)]:
        with pytest.raises(ValueError):
            arena.map(position, 0, num_pages)
        with pytest.raises(ValueError):
            arena.unmap(position, num_pages)
    assert mapped_pages(arena) == {}
    with pytest.raises(ValueError, match="multiple"):
        PagePool(1 << 20, 1000)


def test_start_and_close_are_idempotent_and_leave_no_descriptor():
    before = set(os.listdir("/proc/self/fd"))
    pool = PagePool(4 * PAGE, PAGE)
    pool.close()
    pool.start()
    pool.start()
    pool.reserve(4).map(0, 0, 4)
    pool.close()
    pool.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert "jettison-pages" not in Path("/proc/self/maps").read_text()


def again(step, *args):
    """Call until it succeeds: its result, and how often it was refused."""
    for refusals in range(2):
        try:
            return step(*args), refusals
        except MappingError as error:
            message = str(error)
        assert "Cannot allocate memory" in message
    raise AssertionError("refused twice")


def test_every_call_that_fails_says_so_and_can_be_tried_again():
    for fail_at in range(100):
        pool = PagePool(4 * PAGE, PAGE, FailingSyscalls(fail_at))
        _, at_start = again(pool.start)
        arena, at_reserve = again(pool.reserve, 4)
        _, at_map = again(arena.map, 0, 0, 4)
        _, at_unmap = again(arena.unmap, 1, 2)
        assert mapped_pages(arena) == {0: 0, 3: 3}
        pool.close()
        if not at_start + at_reserve + at_map + at_unmap:
            break
    assert fail_at == 4, "one call a step"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_touching_what_is_not_mapped_ends_the_process(pool):
    arena = pool.reserve(4)
    arena.map(0, 0, 1)
    span = arena.view(0, 4 * PAGE)
    for offset, killed_by in [(0, None), (PAGE - 1, None), (PAGE, signal.SIGSEGV), (3 * PAGE, signal.SIGSEGV)]:
        child = os.fork()  # a child that only touches a byte: no thread, no lock, no cleanup
        if child == 0:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            span[offset] = 1
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert (os.WTERMSIG(status) if os.WIFSIGNALED(status) else None) == killed_by


def test_discarded_pages_hold_no_memory_and_are_zero(pool):
    arena = pool.reserve(8)
    arena.map(0, 0, 8)
    arena.tensor()[:] = 5
    assert pool.held_bytes == 8 * PAGE
    pool.discard(2, 4)
    assert pool.held_bytes == 4 * PAGE
    assert arena.tensor()[2 * PAGE : 6 * PAGE].eq(0).all() and arena.tensor()[: 2 * PAGE].eq(5).all()


def test_a_discard_that_fails_is_told(pool):
    with pytest.raises(MappingError, match="given back"):
        pool.discard(0, 0)

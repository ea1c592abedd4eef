"""The host's physical pages: a memory file as the device's memory, reserved spans as its address space.

    PagePool.start   memfd_create, ftruncate       the budget, as pages 0 .. num_pages - 1
    PagePool.reserve mmap(PROT_NONE, NORESERVE)    addresses, no memory; a stray access is a segmentation fault
    Arena.map        mmap(MAP_FIXED | MAP_SHARED)  pages of the file appear at addresses of the span
    Arena.unmap      mmap(MAP_FIXED, PROT_NONE)    the addresses are bare again; the pages keep their bytes
    PagePool.discard fallocate(PUNCH_HOLE)         the system has the pages' memory back; they read as zeros

A page keeps its bytes until it is written or discarded, through whatever addresses it is mapped at. ``memory.pages``
decides the places of pages, and nothing here knows of layers or blocks. ``device.pages`` is the interface with the
contract.

The file must not be inherited by ``fork``: parent and child would share one device. Spawn workers instead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from jettison.device.bytesview import as_tensor_uint8
from jettison.errors import MappingError, OutOfPagesError

if TYPE_CHECKING:
    import torch

HOST_PAGE_BYTES = 65536
"""Default page size. It is not 4 KiB, because each map call costs microseconds, and the kernel allows 65,530 separate
mappings."""

# Constants that Python's mmap module lacks (MAP_NORESERVE until 3.13); the same on Linux for x86-64 and arm64.
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PUNCH_HOLE = 0x03
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


class Syscalls(Protocol):
    """The system calls that can fail, as an interface, so that a test can make each of them fail. All raise OSError."""

    def create(self, name: str, num_bytes: int) -> int:
        """Create a memory file of that size; returns its descriptor."""
        ...

    def mmap(self, address: int | None, num_bytes: int, prot: int, flags: int, fd: int, offset: int) -> int:
        """Map; returns the address."""
        ...

    def munmap(self, address: int, num_bytes: int) -> None: ...

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        """Return the memory behind a part of the file to the system."""
        ...


class LinuxSyscalls:
    """The real system calls, through libc: Python's own ``mmap`` cannot map at a given address."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        size, integer, pointer = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        self._libc.mmap.argtypes = [pointer, size, integer, integer, integer, ctypes.c_int64]
        self._libc.mmap.restype = pointer
        self._libc.munmap.argtypes = [pointer, size]
        self._libc.fallocate.argtypes = [integer, integer, ctypes.c_int64, ctypes.c_int64]

    def create(self, name: str, num_bytes: int) -> int:
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
        except OSError:
            os.close(fd)
            raise
        return fd

    def mmap(self, address: int | None, num_bytes: int, prot: int, flags: int, fd: int, offset: int) -> int:
        mapped: int | None = self._libc.mmap(address, num_bytes, prot, flags, fd, offset)
        if mapped is None or mapped == ctypes.c_size_t(-1).value:
            errno = ctypes.get_errno()
            raise OSError(errno, os.strerror(errno))
        return mapped

    def munmap(self, address: int, num_bytes: int) -> None:
        if self._libc.munmap(address, num_bytes):
            errno = ctypes.get_errno()
            raise OSError(errno, os.strerror(errno))

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        if self._libc.fallocate(fd, _PUNCH_HOLE, offset, num_bytes):
            errno = ctypes.get_errno()
            raise OSError(errno, os.strerror(errno))


class PagePool:
    """``budget_bytes`` of physical memory in pages of ``page_bytes``. A rest smaller than a page is not used.

    ``start`` and ``close`` are idempotent; ``close`` also ends every arena, and tensors over them must not be
    touched afterwards.
    """

    def __init__(
        self, budget_bytes: int, page_bytes: int = HOST_PAGE_BYTES, syscalls: Syscalls | None = None
    ) -> None:
        if page_bytes <= 0 or page_bytes % mmap.PAGESIZE:
            raise ValueError(f"pages of {page_bytes} bytes: not a multiple of the system's {mmap.PAGESIZE}")
        self.page_bytes = page_bytes
        self.num_pages = budget_bytes // page_bytes
        self.num_map_calls = 0
        self.num_unmap_calls = 0
        self._syscalls = LinuxSyscalls() if syscalls is None else syscalls
        self._fd: int | None = None
        self._arenas: list[Arena] = []
        self._held: list[tuple[memoryview, bytearray]] = []

    prepares = False
    """A page is mapped where it is owned, and nowhere else."""

    num_calls_saved = 0
    """Always 0: every map and unmap is a call here."""

    @property
    def num_calls(self) -> int:
        """Map and unmap calls of all arenas."""
        return self.num_map_calls + self.num_unmap_calls

    def start(self) -> None:
        """Create the memory file. Raises MappingError."""
        if self._fd is None:
            try:
                self._fd = self._syscalls.create("jettison-pages", self.num_pages * self.page_bytes)
            except OSError as error:
                raise MappingError(f"no memory file of {self.num_pages * self.page_bytes} bytes: {error}") from error

    def close(self) -> None:
        """Give back all addresses and all memory."""
        self._held.clear()
        while self._arenas:
            arena = self._arenas.pop()
            with suppress(OSError):  # release the rest all the same
                self._syscalls.munmap(arena.address, arena.num_pages * self.page_bytes)
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def reserve(self, num_pages: int) -> Arena:
        """Reserve a span of addresses for ``num_pages`` pages, without memory. Raises MappingError."""
        size = max(num_pages, 1) * self.page_bytes
        if size > sys.maxsize:  # ctypes would truncate it to a word
            raise MappingError(f"no span of {size} bytes of addresses: more than there can be")
        try:
            address = self._syscalls.mmap(None, size, _PROT_NONE, _RESERVED, -1, 0)
        except OSError as error:
            raise MappingError(f"no span of {size} bytes of addresses: {error}") from error
        arena = Arena(self, address, max(num_pages, 1))
        self._arenas.append(arena)
        return arena

    @property
    def held_bytes(self) -> int:
        """Memory that backs pages of the pool: the pages that were written, and not discarded since."""
        return 0 if self._fd is None else os.fstat(self._fd).st_blocks * 512

    def discard(self, page: int, num_pages: int) -> None:
        """Return the memory of a run of pages to the system. Raises MappingError."""
        assert self._fd is not None, "the pool is not started"
        try:
            self._syscalls.punch(self._fd, page * self.page_bytes, num_pages * self.page_bytes)
        except OSError as error:
            raise MappingError(f"the memory of {num_pages} pages could not be given back: {error}") from error

    def read(self, page: int, offset: int, view: memoryview) -> None:
        """Fill ``view`` with bytes of the pool from ``offset`` of ``page`` on, mapped anywhere or not at all.

        Raises MappingError, with part of ``view`` written, where the kernel has no memory behind ``view``.
        """
        assert self._fd is not None, "the pool is not started"
        at = page * self.page_bytes + offset
        if at + len(view) > self.num_pages * self.page_bytes:
            raise OutOfPagesError(f"{len(view)} bytes at {at} are beyond the pool")
        try:
            while view:
                num_bytes = os.preadv(self._fd, [view], at)
                at, view = at + num_bytes, view[num_bytes:]
        except OSError as error:
            raise MappingError(f"{len(view)} bytes of the pool could not be read: {error}") from error

    def finish_copies(self) -> None:
        """Write the held copies of arenas; other copies are complete already."""
        for view, old in self._held:
            view[:] = old
        self._held.clear()

    def wait_idle(self) -> None:
        """Nothing to wait for: kernels of the host run on the caller's thread."""

    def check(self) -> None:
        """Nothing to check: the operating system's kernel keeps the mappings."""

    def _map(self, address: int, page: int, num_pages: int, populate: bool) -> None:
        assert self._fd is not None, "the pool is not started"
        if page < 0 or page + num_pages > self.num_pages:
            raise OutOfPagesError(f"pages {page} to {page + num_pages} of {self.num_pages}")
        flags = mmap.MAP_SHARED | _MAP_FIXED | (mmap.MAP_POPULATE if populate else 0)
        self.num_map_calls += 1
        self._fixed(address, num_pages, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._fd, page * self.page_bytes)

    def _unmap(self, address: int, num_pages: int) -> None:
        self.num_unmap_calls += 1
        self._fixed(address, num_pages, _PROT_NONE, _RESERVED | _MAP_FIXED, -1, 0)

    def _fixed(self, address: int, num_pages: int, prot: int, flags: int, fd: int, offset: int) -> None:
        try:
            self._syscalls.mmap(address, num_pages * self.page_bytes, prot, flags, fd, offset)
        except OSError as error:
            raise MappingError(f"{num_pages} pages at {address:#x}: {error}") from error


class Arena:
    """A reserved span of addresses, made by ``PagePool.reserve``. Its address and its tensor stay until ``close``.

    After a MappingError the addresses concerned are undefined (the kernel may have unmapped them first): map or
    unmap them again before anything else.
    """

    def __init__(self, pool: PagePool, address: int, num_pages: int) -> None:
        self._pool = pool
        self.address = address
        self.num_pages = num_pages
        # The ctypes array lives as long as what is made of it; none of that owns the memory.
        span = (ctypes.c_uint8 * (num_pages * pool.page_bytes)).from_address(address)
        self._view = memoryview(span).cast("B")

    def tensor(self) -> torch.Tensor:
        """uint8 ``[num_pages * page_bytes]`` over the span; only mapped positions may be touched."""
        return as_tensor_uint8(self._view)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Writable bytes of the span, for the kernel to copy into."""
        return self._view[offset : offset + num_bytes]

    def map(self, position: int, page: int, num_pages: int, populate: bool = False) -> None:
        """Put a run of physical pages at a run of positions, in one call, whatever was there.

        ``populate`` fills the page tables now (about 80 µs a MiB) instead of at the first touch.
        Raises MappingError; OutOfPagesError for pages beyond the budget.
        """
        self._pool._map(self._at(position, num_pages), page, num_pages, populate)

    def unmap(self, position: int, num_pages: int) -> None:
        """Unmap a run of positions, in one call; unmapped positions do not change.

        Raises MappingError.
        """
        self._pool._unmap(self._at(position, num_pages), num_pages)

    def prepare(self, position: int, page: int, num_pages: int) -> int:
        """Does nothing: with a page at two addresses a stray access would not end the process."""
        self._at(position, num_pages)
        return 0

    def mapped(self, position: int, num_pages: int) -> list[tuple[int, int, int]]:
        """Nothing is mapped that is not owned, and what is owned is known."""
        return []

    def copy(self, page: int, offset: int, at: int, num_bytes: int) -> None:
        """Copy from the file at once."""
        self._pool.read(page, offset, self.view(at, num_bytes))

    def hold(self, page: int, offset: int, at: int, num_bytes: int) -> None:
        """Read the bytes now, for ``PagePool.finish_copies`` to write."""
        old = bytearray(num_bytes)
        self._pool.read(page, offset, memoryview(old))
        self._pool._held.append((self.view(at, num_bytes), old))

    def _at(self, position: int, num_pages: int) -> int:
        if position < 0 or num_pages < 1 or position + num_pages > self.num_pages:
            raise ValueError(f"positions {position} to {position + num_pages} of a span of {self.num_pages} pages")
        return self.address + position * self._pool.page_bytes

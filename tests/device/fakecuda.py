"""The driver's rules for virtual memory, over real memory of the host: ``cuda.bindings.driver`` where there is no card.

What it is held to was measured on a card (docs/gpu.md): granularity of 2 MiB; whole handles only; one mapping
at an address; access over mappings that cover the span; a handle may be mapped at many addresses; its memory is free
once it is released and mapped nowhere. Bytes are real: a handle is a part of one memory file, mapped where the driver
would.

Reserved addresses that may not be touched (nothing mapped, no access, or hidden by ``hide``) show poison, and writing
there ends the process. ``PoisonedPool`` hides what a pool has mapped and no position owns.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import contextmanager
from enum import IntEnum
from types import SimpleNamespace

import torch

from jettison.device.cuda.driver import Driver
from jettison.device.cuda.pages import Arena, PagePool
from jettison.device.cuda.spans import UNSURE
from jettison.device.pages_host import LinuxSyscalls

MIB = 1 << 20
POISON = 0xDB
_MAP_FIXED, _RESERVED = 0x10, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801


class FakeBindings:
    """One card of ``total_bytes``, of which ``foreign_bytes`` belong to another process.

    ``fail``: called with a function's name before it does anything; True makes it fail. ``log``: names called, but
    for push and pop of contexts, which reach no card.
    """

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(
        CU_MEM_HANDLE_TYPE_NONE=0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1
    )
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, total_bytes: int = 256 * MIB, granularity: int = 2 * MIB, foreign_bytes: int = 0) -> None:
        self.total_bytes = total_bytes
        self.granularity = granularity
        self.foreign_bytes = foreign_bytes
        self.exports = True
        self.has_vmm = True
        self.num_cards = 1
        self.fail: Callable[[str], bool] = lambda name: False
        self.log: list[str] = []
        self.size: dict[int, int] = {}
        """Of every handle whose memory is not free."""
        self.released: set[int] = set()
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        """Address -> handle."""
        self.allowed: set[int] = set()
        self.contexts = 0
        self.current: list[str] = ["none"]
        """The thread's contexts; the last one is asked."""
        self.asked: list[tuple[str, str]] = []
        """(function, context) of calls that go to the current one."""
        self._start: dict[int, int] = {}
        """Where a handle's bytes begin in the file."""
        self._next, self._end = 1, 0
        self._largest = 0
        """Of all handles so far, in bytes."""
        self._calls = LinuxSyscalls()
        self._file = self._calls.create("fake-card", 1 << 44)
        self._poison = self._calls.create("fake-poison", granularity)
        os.pwrite(self._poison, bytes([POISON]) * granularity, 0)

    def close(self) -> None:
        os.close(self._file)
        os.close(self._poison)

    @property
    def used_bytes(self) -> int:
        return sum(self.size.values())

    # --- the driver's functions -----------------------------------------------------------------------------------

    def CUmemAllocationProp(self):
        return SimpleNamespace(type=0, location=SimpleNamespace(type=0, id=-1), requestedHandleTypes=0)

    def CUmemAccessDesc(self):
        return SimpleNamespace(location=SimpleNamespace(type=0, id=-1), flags=0)

    def _answer(self, name: str, problem: str | None, *values):
        self.log.append(name)
        code = CUresult["CUDA_ERROR_" + problem] if problem else CUresult.CUDA_SUCCESS
        return (code, *values)

    def _fails(self, name: str) -> str | None:
        return "INVALID_VALUE" if self.fail(name) else None

    def cuInit(self, flags):
        return self._answer("cuInit", None)

    def cuDeviceGetCount(self):
        return self._answer("cuDeviceGetCount", None, self.num_cards)

    def cuDeviceGet(self, ordinal):
        return self._answer("cuDeviceGet", None, ordinal)

    def cuDeviceGetAttribute(self, attribute, card):
        assert attribute == 102
        return self._answer("cuDeviceGetAttribute", None, int(self.has_vmm))

    def cuDevicePrimaryCtxRetain(self, card):
        self.contexts += 1
        return self._answer("cuDevicePrimaryCtxRetain", None, f"context {card}")

    def cuDevicePrimaryCtxRelease(self, card):
        self.contexts -= 1
        return self._answer("cuDevicePrimaryCtxRelease", None)

    def cuCtxSetCurrent(self, context):
        self.current[-1] = context
        return self._answer("cuCtxSetCurrent", None)

    def cuCtxPushCurrent(self, context):
        self.current.append(context)
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self):
        return (CUresult.CUDA_SUCCESS, self.current.pop())

    def _ask(self, name: str) -> None:
        self.asked.append((name, self.current[-1]))

    def cuCtxSynchronize(self):
        self._ask("cuCtxSynchronize")
        return self._answer("cuCtxSynchronize", self._fails("cuCtxSynchronize"))

    def cuMemGetInfo(self):
        self._ask("cuMemGetInfo")
        free = self.total_bytes - self.foreign_bytes - self.used_bytes
        return self._answer("cuMemGetInfo", None, free, self.total_bytes)

    def cuMemGetAllocationGranularity(self, prop, option):
        return self._answer("cuMemGetAllocationGranularity", None, self.granularity)

    def cuMemCreate(self, size, prop, flags):
        problem = self._fails("cuMemCreate")
        if size <= 0 or size % self.granularity or prop.type != 1 or prop.location.type != 1 or prop.location.id != 0:
            problem = "INVALID_VALUE"
        elif prop.requestedHandleTypes and not self.exports:
            problem = "NOT_PERMITTED"
        elif self.foreign_bytes + self.used_bytes + size > self.total_bytes:
            problem = "OUT_OF_MEMORY"
        if problem:
            return self._answer("cuMemCreate", problem, None)
        handle, self._next = self._next, self._next + 1
        self.size[handle], self._start[handle] = size, self._end
        self._largest = max(self._largest, size)
        self._end += size
        return self._answer("cuMemCreate", None, handle)

    def cuMemRelease(self, handle):
        problem = self._fails("cuMemRelease")
        if handle not in self.size or handle in self.released:
            problem = "INVALID_VALUE"
        if not problem:
            self.released.add(handle)
            self._free(handle)
        return self._answer("cuMemRelease", problem)

    def _free(self, handle: int) -> None:
        """Give a handle's memory back, once it is released and mapped nowhere."""
        if handle in self.released and handle not in self.mapped.values():
            self._calls.punch(self._file, self._start[handle], self.size.pop(handle))

    def cuMemAddressReserve(self, size, alignment, address, flags):
        problem = self._fails("cuMemAddressReserve")
        if size <= 0 or size % self.granularity:
            problem = "INVALID_VALUE"
        if problem:
            return self._answer("cuMemAddressReserve", problem, None)
        span = self._calls.mmap(None, size + self.granularity, 0, _RESERVED, -1, 0)
        start = -(-span // self.granularity) * self.granularity
        self.reserved[start] = size
        self._paint(start, size)
        return self._answer("cuMemAddressReserve", None, start)

    def cuMemAddressFree(self, address, size):
        problem = self._fails("cuMemAddressFree")
        if self.reserved.get(address) != size or any(address <= at < address + size for at in self.mapped):
            problem = "INVALID_VALUE"
        if not problem:
            del self.reserved[address]
            self._calls.munmap(address, size)
        return self._answer("cuMemAddressFree", problem)

    def cuMemMap(self, address, size, offset, handle, flags):
        problem = self._fails("cuMemMap")
        if handle not in self.size or handle in self.released or address % self.granularity:
            problem = "INVALID_VALUE"
        elif offset or size != self.size[handle]:
            problem = "NOT_SUPPORTED"
        elif self._inside(address, size) or not self._is_reserved(address, size):
            problem = "INVALID_VALUE"
        if not problem:
            self.mapped[address] = handle
        return self._answer("cuMemMap", problem)

    def cuMemSetAccess(self, address, size, descriptions, count):
        problem = self._fails("cuMemSetAccess")
        if not self._covers(address, size) or count != 1 or descriptions[0].flags != 3:
            problem = "INVALID_VALUE"
        if not problem:
            for at in self._inside(address, size):
                self.allowed.add(at)
                self.show(at)
        return self._answer("cuMemSetAccess", problem)

    def cuMemUnmap(self, address, size):
        problem = self._fails("cuMemUnmap")
        if not self._covers(address, size):
            problem = "INVALID_VALUE"
        if not problem:
            for at in self._inside(address, size):
                handle = self.mapped.pop(at)
                self.allowed.discard(at)
                self._paint(at, self.size[handle])
                self._free(handle)
        return self._answer("cuMemUnmap", problem)

    def cuMemcpyDtoDAsync(self, target, source, size, stream):
        self._ask("cuMemcpyDtoDAsync")
        problem = self._fails("cuMemcpyDtoDAsync")
        if not self._is_readable(target, size) or not self._is_readable(source, size):
            problem = "INVALID_VALUE"
        if not problem:
            ctypes.memmove(target, source, size)
        return self._answer("cuMemcpyDtoDAsync", problem)

    def cuMemcpyDtoH(self, target, source, size):
        self._ask("cuMemcpyDtoH")
        problem = self._fails("cuMemcpyDtoH") if self._is_readable(source, size) else "INVALID_VALUE"
        if not problem:
            ctypes.memmove(target, source, size)
        return self._answer("cuMemcpyDtoH", problem)

    def cuMemcpyHtoD(self, target, source, size):
        self._ask("cuMemcpyHtoD")
        problem = self._fails("cuMemcpyHtoD") if self._is_readable(target, size) else "INVALID_VALUE"
        if not problem:
            ctypes.memmove(target, source, size)
        return self._answer("cuMemcpyHtoD", problem)

    # --- what addresses show --------------------------------------------------------------------------------------

    def show(self, address: int) -> None:
        """Show the handle that is mapped at an address. AssertionError where none is, or it may not be touched."""
        assert address in self.allowed, f"{address:#x} may not be touched"
        handle = self.mapped[address]
        flags = mmap.MAP_SHARED | _MAP_FIXED
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        self._calls.mmap(address, self.size[handle], prot, flags, self._file, self._start[handle])

    def hide(self, address: int) -> None:
        """Show poison in place of what is mapped at an address."""
        self._paint(address, self.size[self.mapped[address]])

    def _paint(self, address: int, size: int) -> None:
        for at in range(address, address + size, self.granularity):
            self._calls.mmap(at, self.granularity, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, self._poison, 0)

    def _is_reserved(self, address: int, size: int) -> bool:
        spans = self.reserved.items()
        return any(start <= address and address + size <= start + num_bytes for start, num_bytes in spans)

    def _inside(self, address: int, size: int) -> list[int]:
        """Mappings with a byte in the span."""
        unit = self.granularity
        first = address // unit * unit - self._largest
        places = range(first, address + size, unit)
        found = (at for at in (places if len(places) < len(self.mapped) else self.mapped) if at in self.mapped)
        return sorted(at for at in found if at < address + size and address < at + self.size[self.mapped[at]])

    def _covers(self, address: int, size: int) -> bool:
        """Whole mappings, side by side, are exactly the span."""
        end = address
        for at in self._inside(address, size):
            if at != end:
                return False
            end = at + self.size[self.mapped[at]]
        return size > 0 and end == address + size

    def _is_readable(self, address: int, size: int) -> bool:
        inside = self._inside(address, size)
        ends = [at + self.size[self.mapped[at]] for at in inside]
        return bool(inside) and inside[0] <= address and ends[-1] >= address + size and ends[:-1] == inside[1:] and (
            self.allowed.issuperset(inside)
        )  # fmt: skip


class FakeDriver(Driver):
    """A ``Driver`` of a fake card, whose tensors are the host's."""

    def __init__(self, bindings: FakeBindings) -> None:
        super().__init__(0, bindings)
        self.device = torch.device("cpu")


class PoisonedArena(Arena):
    """An arena whose addresses show poison wherever they own nothing, though a page may be mapped there."""

    @contextmanager
    def _repainted(self, position: int, num_pages: int):
        try:
            yield
        finally:
            self._repaint(slice(max(position, 0), max(position + num_pages, 0)))

    def _repaint(self, at: slice) -> None:
        fake, size = self._pool._driver._given, self._pool.page_bytes
        for position in range(*at.indices(self.num_pages)):
            address = self.address + position * size
            if address in fake.mapped and self.owned[position] >= 0:
                fake.show(address)
            elif address in fake.mapped:
                fake.hide(address)
            else:
                assert self.owned[position] < 0, f"position {position} owns a page, and nothing is mapped there"

    def map(self, position, page, num_pages):
        with self._repainted(position, num_pages):
            super().map(position, page, num_pages)

    def unmap(self, position, num_pages):
        with self._repainted(position, num_pages):
            super().unmap(position, num_pages)

    def prepare(self, position, page, num_pages):
        with self._repainted(position, num_pages):
            return super().prepare(position, page, num_pages)


class PoisonedPool(PagePool):
    """A pool on a fake card, whose arenas are poisoned."""

    def __init__(self, budget_bytes: int, page_bytes: int, bindings: FakeBindings) -> None:
        super().__init__(budget_bytes, page_bytes, FakeDriver(bindings))

    def reserve(self, num_pages):
        arena = super().reserve(num_pages)
        arena.__class__ = PoisonedArena
        return arena

    def check(self) -> None:
        """And the driver has mapped what the books say, no more and no less."""
        super().check()
        fake, size = self._driver._given, self.page_bytes
        expected, unsure = {}, set()
        for span in [self._handles.view, *(arena.span for arena in self._arenas)]:
            for position, page in enumerate(span.there.tolist()):
                if page >= 0:
                    expected[span.address + position * size] = self._handles._handles[page]
                elif page == UNSURE:
                    unsure.add(span.address + position * size)
        own = [self._handles.view, *(arena.span for arena in self._arenas)]
        spans = [range(span.address, span.address + span.num_pages * size, size) for span in own]
        mapped = {at: handle for at, handle in fake.mapped.items() if any(at in span for span in spans)}
        assert {at: handle for at, handle in mapped.items() if at not in unsure} == expected
        assert fake.allowed >= expected.keys()
        assert self.held_bytes <= self.num_pages * size
        assert fake.contexts > 1 or fake.used_bytes == self.held_bytes, "memory that no page of the only pool has"

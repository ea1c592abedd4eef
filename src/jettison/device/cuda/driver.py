"""Typed calls of the CUDA driver for virtual memory, through ``cuda.bindings.driver``; errors in one line.

``Driver.start`` imports the bindings, so that this module loads without them. ``device.cuda.pages`` decides the
mappings. Failed calls raise MappingError with the driver's own name for the failure; faults that a user can correct (no
driver, no card, no virtual memory management) raise ConfigError.

No memory made here may be given to ``cudaIpc``, to NCCL's registration or to RDMA, which know allocations only.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from jettison.errors import ConfigError, MappingError

REFUSES_EXPORT = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED")
"""Answers of drivers on machines that grant no handles for import by other processes."""


class CardFullError(MappingError):
    """The card has too little memory left."""


class Driver:
    """One card. ``start`` and ``close`` are idempotent; between them all other methods may be called, by one thread.

    It shares PyTorch's context (the card's primary one), so PyTorch's kernels see these mappings. ``bindings`` stands
    in for ``cuda.bindings.driver`` in tests.
    """

    granularity = 0
    """Unit in bytes of handles, addresses and mappings. Known from ``start`` on."""
    is_exportable = False
    """Whether handles can be given to other processes as descriptors. Known from ``start`` on."""

    def __init__(self, ordinal: int = 0, bindings: Any = None) -> None:
        self.device = torch.device("cuda", ordinal)
        self.num_calls = 0
        """Number of calls so far that mapped, gave access or unmapped."""
        self._ordinal = ordinal
        self._given = bindings
        self._cuda: Any = None
        self._card: Any = None
        self._context: Any = None

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the card's context the thread's. Raises ConfigError."""
        if self._cuda is not None:
            return
        cuda = self._given if self._given is not None else _load_bindings()
        self._cuda = cuda
        try:
            self._open(cuda)
        except (ConfigError, MappingError):
            self.close()
            raise

    def close(self) -> None:
        """Give the context back. PyTorch keeps its own hold on it."""
        cuda, card = self._cuda, self._card
        self._cuda = self._card = None
        if card is not None:
            cuda.cuDevicePrimaryCtxRelease(card)

    def _open(self, cuda: Any) -> None:
        try:
            code = cuda.cuInit(0)[0]
        except RuntimeError as error:  # the bindings found no libcuda
            raise ConfigError(f"no NVIDIA driver on this machine: {error}") from error
        if int(code):
            raise ConfigError(f"the NVIDIA driver does not start: {code.name}")
        num_cards = self._call(cuda.cuDeviceGetCount)
        if self._ordinal >= num_cards:
            raise ConfigError(f"no CUDA device {self._ordinal}: the driver shows {num_cards}")
        card = self._call(cuda.cuDeviceGet, self._ordinal)
        attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call(cuda.cuDeviceGetAttribute, attribute, card):
            raise ConfigError(f"CUDA device {self._ordinal} has no virtual memory management, so no page can move")
        self._context = self._call(cuda.cuDevicePrimaryCtxRetain, card)
        self._card = card
        self._call(cuda.cuCtxSetCurrent, self._context)
        self._describe(cuda)

    def _describe(self, cuda: Any) -> None:
        """Make the two structures with which every page is created and made accessible."""
        prop = cuda.CUmemAllocationProp()
        prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self._ordinal
        prop.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._prop = prop
        access = cuda.CUmemAccessDesc()
        access.location.type = prop.location.type
        access.location.id = self._ordinal
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = access
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self._call(cuda.cuMemGetAllocationGranularity, prop, minimum))
        self.is_exportable = True

    # --- memory -------------------------------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        """``(free, total)`` bytes of the card, all processes counted."""
        with self._on_card():
            free, total = self._call(self._cuda.cuMemGetInfo)
        return int(free), int(total)

    def create(self, num_bytes: int) -> int:
        """A handle of physical memory; other processes can import it where ``is_exportable``.

        Raises CardFullError, MappingError.
        """
        code, handle = self._cuda.cuMemCreate(num_bytes, self._prop, 0)
        if self.is_exportable and int(code) and code.name in REFUSES_EXPORT:
            kinds = self._cuda.CUmemAllocationHandleType
            self._prop.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_NONE
            code, handle = self._cuda.cuMemCreate(num_bytes, self._prop, 0)
            if not int(code):  # the driver refused only the kind of handle
                self.is_exportable = False
            else:
                self._prop.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        if int(code) and code.name == "CUDA_ERROR_OUT_OF_MEMORY":
            free, total = self.memory()
            raise CardFullError(f"no {num_bytes} bytes on CUDA device {self._ordinal}: {free} of {total} are free")
        self._check("cuMemCreate", code)
        return int(handle)

    def release(self, handle: int) -> None:
        """Release a handle: its memory is free once it is mapped nowhere."""
        self._call(self._cuda.cuMemRelease, handle)

    # --- addresses ----------------------------------------------------------------------------------------------

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses without memory; returns the first."""
        return int(self._call(self._cuda.cuMemAddressReserve, num_bytes, 0, 0, 0))

    def free(self, address: int, num_bytes: int) -> None:
        """Free a reserved span without mappings."""
        self._call(self._cuda.cuMemAddressFree, address, num_bytes)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Map a whole handle at unmapped addresses. The memory is readable once ``allow`` has covered it."""
        self.num_calls += 1
        self._call(self._cuda.cuMemMap, address, num_bytes, 0, handle, 0)

    def allow(self, address: int, num_bytes: int) -> None:
        """Make a span readable and writable; mappings must cover it without a gap."""
        self.num_calls += 1
        self._call(self._cuda.cuMemSetAccess, address, num_bytes, [self._access], 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Remove whole, adjacent mappings."""
        self.num_calls += 1
        self._call(self._cuda.cuMemUnmap, address, num_bytes)

    # --- bytes --------------------------------------------------------------------------------------------------

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Start a copy on the card; it is complete when ``wait`` returns."""
        with self._on_card():
            self._call(self._cuda.cuMemcpyDtoDAsync, target, source, num_bytes, 0)

    def read(self, view: memoryview, source: int) -> None:
        """Copy from the card to memory of the host."""
        with self._on_card():
            self._call(self._cuda.cuMemcpyDtoH, _address_of(view), source, len(view))

    def write(self, target: int, view: memoryview) -> None:
        """The inverse of ``read``."""
        with self._on_card():
            self._call(self._cuda.cuMemcpyHtoD, target, _address_of(view), len(view))

    def wait(self) -> None:
        """Wait until all work that this process launched on the card has ended. Raises for a failure of any of it."""
        with self._on_card():
            self._call(self._cuda.cuCtxSynchronize)

    # --- private ------------------------------------------------------------------------------------------------

    @contextmanager
    def _on_card(self) -> Iterator[None]:
        """Make the card's context current for the calls inside, as PyTorch may have made another card's current."""
        self._call(self._cuda.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            self._call(self._cuda.cuCtxPopCurrent)

    def _call(self, function: Any, *arguments: Any) -> Any:
        code, *values = function(*arguments)
        self._check(function.__name__, code)
        return values[0] if len(values) == 1 else tuple(values)

    def _check(self, name: str, code: Any) -> None:
        if int(code):
            raise MappingError(f"CUDA device {self._ordinal}: {name}: {code.name}")


def _load_bindings() -> Any:
    try:
        bindings = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError("CUDA needs the package cuda-bindings: pip install 'jettison[cuda]'") from error
    if not torch.backends.cuda.is_built():
        raise ConfigError(f"PyTorch {torch.__version__} is built without CUDA: install one that has it")
    return bindings


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

"""One card through PyTorch: streams, events, graphs, pinned memory of the host, and copies that do not block.

Every call of ``torch.cuda`` that concerns these is here. Work goes to one of three streams: steps have one of high
priority, copies beside steps one of low priority (``beside`` chooses it for the calling thread), and bytes of links one
that waits for no step under way (``links``). Inside a stream all is in order; between streams an event makes order.

Nothing touches a card before ``start``. Triton is imported by the first copy of rows. A failure of the card, which
its later calls report, is a RuntimeError of PyTorch's.

Not here: virtual memory (``device.cuda.driver``) and the arithmetic of steps (``device.cuda.kernels``).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jettison.device.bytesview import as_tensor_uint8
from jettison.errors import ConfigError, MappingError

logger = logging.getLogger(__name__)

LINKS_PRIORITY, STEPS_PRIORITY, BESIDE_PRIORITY = -2, -1, 0
"""Of the streams: lower goes first. The default stream has 0."""
_PR_SET_TIMERSLACK = 29
_WARM_BYTES = 4096
"""Of a row, as KV blocks are: a multiple of 64."""


Addresses = npt.NDArray[np.int64]
"""Of the card's memory, or of pinned memory of the host: they are one space on x86-64."""


class Event(Protocol):
    """A point of a stream: what was launched there before."""

    def done(self) -> bool:
        """Whether the point is reached. Never waits."""
        ...

    def wait(self) -> None:
        """Let the calling thread's stream wait for it; the thread goes on."""
        ...

    def synchronize(self) -> None:
        """Let the thread wait for it, without the GIL."""
        ...


class Graph(Protocol):
    """Launches that were captured."""

    def replay(self) -> None:
        """Launch them again, on the calling thread's stream. One replay at a time."""
        ...


class Card:
    """The card of a worker. ``start`` and ``close`` are idempotent."""

    def __init__(self, ordinal: int = 0) -> None:
        self.device = torch.device("cuda", ordinal)
        self._steps: Any = None
        self._beside: Any = None
        self._links: Any = None
        self._before_steps: deque[Event] = deque()
        """Points before each of the steps under way."""
        self._graph_memory: Any = None
        self._movers: dict[bool, Any] = {}
        """Compiled kernels that move rows, by whether a row is a multiple of 64 bytes; None where it is interpreted."""
        self._has_batches = True
        """The driver launches many copies in one call."""

    def start(self) -> None:
        """Make the stream of steps the calling thread's: the thread that owns the device calls it once. Raises
        ConfigError."""
        if self._steps is not None:
            return
        if not torch.cuda.is_available():
            raise ConfigError(f"PyTorch {torch.__version__} finds no CUDA device")
        torch.cuda.set_device(self.device)
        _sleep_exactly()
        self._steps = torch.cuda.Stream(self.device, STEPS_PRIORITY)
        self._beside = torch.cuda.Stream(self.device, BESIDE_PRIORITY)
        self._links = torch.cuda.Stream(self.device, LINKS_PRIORITY)
        torch.cuda.set_stream(self._steps)

    def close(self) -> None:
        """Give the streams and the memory of graphs back."""
        if self._steps is not None:
            torch.cuda.set_stream(torch.cuda.default_stream(self.device))
        self._steps = self._beside = self._links = self._graph_memory = None
        self._before_steps.clear()

    # --- streams and events -----------------------------------------------------------------------------------------

    def beside(self) -> AbstractContextManager[Any]:
        """The calling thread, which may be any, launches on the stream of copies beside steps inside."""
        return torch.cuda.stream(self._beside)

    @contextmanager
    def links(self) -> Iterator[None]:
        """Launches inside come behind all but the steps under way, and before all launches after it: for memory that
        these steps do not touch. Without such steps the order of the calling thread's stream is enough."""
        if not self._before_steps:
            yield
            return
        before, end = self.before_steps(), None
        try:
            with self._on_links():
                before.wait()
                try:
                    yield
                finally:
                    end = self.record()
        finally:  # also of a call that has failed: copies that it launched go before what follows
            if end is not None:
                end.wait()

    def _on_links(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._links)

    def begin_step(self) -> None:
        """What is launched from now on, up to its ``end_step``, is a step; steps end in the order of their beginnings.
        """
        self._before_steps.append(self.record())

    def end_step(self) -> None:
        """The oldest step is over."""
        self._before_steps.popleft()

    def before_steps(self) -> Event:
        """The point before the steps under way; now, where there are none."""
        return self._before_steps[0] if self._before_steps else self.record()

    def record(self, *, sleeps: bool = False) -> Event:
        """The present point of the calling thread's stream. ``sleeps``: a thread that waits leaves its core to
        others."""
        event = torch.cuda.Event(blocking=sleeps)
        event.record(torch.cuda.current_stream(self.device))
        return _Event(event)

    def synchronize(self) -> None:
        """Wait for all that was launched on the calling thread's stream."""
        torch.cuda.current_stream(self.device).synchronize()

    # --- graphs -----------------------------------------------------------------------------------------------------

    def capture(self, launches: Callable[[], None]) -> Graph:
        """The launches of a function, on the stream of steps. The function runs twice: once for what may not be
        captured (compiling, cuBLAS's workspace), then captured, which computes nothing.

        It may neither wait for the card nor copy from memory that is not pinned; its results lie in memory that it was
        given, since all graphs share the memory that it takes.
        """
        launches()
        self.synchronize()
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with _no_collections():
            graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
            try:
                launches()
            finally:
                graph.capture_end()
        return graph

    def forget_graphs(self) -> None:
        """No graph is left: the memory that they shared is gone with the last one, and new ones share another."""
        self._graph_memory = None

    # --- memory of the host, and bytes ------------------------------------------------------------------------------

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 ``[num_bytes]`` on the host, which copies need not wait for. Raises MappingError."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise _not_pinned(num_bytes, str(error).splitlines()[0]) from error

    def pin(self, memory: Any) -> Callable[[], None]:
        """Pin memory of the host that is there already, a writable buffer; returns what undoes it, which comes before
        the memory goes. Raises MappingError."""
        there = as_tensor_uint8(memory)
        address, num_bytes, runtime = there.data_ptr(), there.numel(), torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if code:
            with suppress(RuntimeError):  # the next launch reports the refusal as its own failure: let it be this one
                self.empty(1).zero_()
            raise _not_pinned(num_bytes, f"cudaHostRegister: error {code}")
        return lambda: runtime.cudaHostUnregister(address)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether memory of the host is pinned, by ``pinned`` or ``pin``."""
        return tensor.is_pinned()

    def empty(self, num_bytes: int) -> Tensor:
        """uint8 ``[num_bytes]`` on the card, outside of all budgets: for staging."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def give_back(self) -> None:
        """Memory that was taken beside budgets, and is not in use, goes back to the card."""
        torch.cuda.empty_cache()

    def copy_in(self, pinned: Tensor, target: Tensor) -> None:
        """Launch a copy of pinned memory, which must not change before it is over, to the card; equal shapes and
        dtypes, both contiguous."""
        target.copy_(pinned, non_blocking=True)

    def copy_out(self, source: Tensor, pinned: Tensor) -> None:
        """Launch a copy from the card to pinned memory, which has it when the copy is over."""
        pinned.copy_(source, non_blocking=True)

    def move_rows(self, sources: Tensor, targets: Tensor, row_bytes: int, num_programs: int) -> None:
        """Launch a copy of rows from address to address: of the card's memory, or of pinned memory of the host.

        ``sources``, ``targets``: int64 [n], pinned or on the card, and unchanged until it is over. Their own addresses,
        those in them and ``row_bytes`` are multiples of 16. ``num_programs``: at most; each takes a part of a
        multiprocessor from steps beside it. Raises ValueError for other sizes.
        """
        from jettison.device.cuda import elementwise  # brings Triton

        num_rows, words, block = len(sources), row_bytes // 4, elementwise.MOVE_WORDS
        if row_bytes % 16 or not row_bytes or len(targets) != num_rows:
            raise ValueError(f"{num_rows} rows to {len(targets)}, of {row_bytes} bytes: not a multiple of 16")
        programs = min(num_programs, num_rows * -(-words // block))
        if not programs:
            return
        compiled = self._movers.get(words % 16 == 0)
        if compiled is not None:  # a third of the time that Triton takes to find it again
            compiled[(programs, 1, 1)](sources, targets, num_rows, words, block)
            return
        kernel = elementwise.move_rows_kernel[(programs,)]
        self._movers[words % 16 == 0] = kernel(sources, targets, num_rows, words, BLOCK=block, num_warps=8)

    def copy_many(self, sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
        """Launch copies between the card's memory and pinned memory by the card's copy engines, in any order.

        ``sizes``: in bytes. One call where the driver has one for it (12.8 on), so that the interpreter's lock is taken
        once. Raises RuntimeError.
        """
        driver = importlib.import_module("cuda.bindings.driver")
        to = driver.CUstream(self._stream_handle())
        there, here = ([*map(driver.CUdeviceptr, addresses.tolist())] for addresses in (targets, sources))
        if self._has_batches and len(there) > 1:
            how = driver.CUmemcpyAttributes()
            how.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            how.flags = int(driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
            try:
                code, *_ = driver.cuMemcpyBatchAsync(there, here, sizes.tolist(), len(there), [how], [0], 1, to)
            except RuntimeError as error:  # so the bindings say that the driver lacks a function
                logger.info("copies are launched one by one: %s", error)
                self._has_batches = False
            else:
                _check(code)
                return
        for target, source, size in zip(there, here, sizes.tolist(), strict=True):
            (code,) = driver.cuMemcpyAsync(target, source, size, to)
            _check(code)

    def _stream_handle(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def compile_copies(self) -> None:
        """Have copies of rows compiled, so that the first one is not late."""
        rows = self.empty(2 * _WARM_BYTES)
        first, second = self.address_of(rows), self.address_of(rows) + _WARM_BYTES
        places = torch.tensor([[first, 0], [second, 0]], device=self.device)  # lists begin at multiples of 16 bytes
        self.move_rows(places[0, :1], places[1, :1], _WARM_BYTES, 1)
        self.synchronize()

    def address_of(self, tensor: Tensor) -> int:
        """Of the first byte, for ``move_rows``."""
        return tensor.data_ptr()


@contextmanager
def _no_collections() -> Iterator[None]:
    """A graph that the garbage collector destroys meanwhile would spoil a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Event:
    """See ``Event``."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.wait()

    def synchronize(self) -> None:
        self._event.synchronize()


def _check(code: Any) -> None:
    if int(code):
        raise RuntimeError(f"a copy is refused: {code.name}")


def _sleep_exactly() -> None:
    """Linux lets a thread sleep 50 us longer than it asks for, a hundredth of a step: let it be 1 us."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def is_capturing() -> bool:
    """Whether launches of the calling thread go into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _not_pinned(num_bytes: int, why: str) -> MappingError:
    return MappingError(f"{num_bytes} bytes of host memory cannot be pinned: {why}")

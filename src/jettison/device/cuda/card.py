"""One card through PyTorch: streams, events, graphs, pinned memory of the host, and copies that do not block.

Every call of ``torch.cuda`` that concerns these is here. Work goes to one of three streams: steps have one of high
priority, copies beside steps one of low priority (``beside`` chooses it for the calling thread), and bytes of links one
that waits for no step under way (``links``). Inside a stream all is in order; between streams an event makes order.

Nothing touches a card before ``start``. Triton is imported by the first copy of rows. A failure of the card, which
its later calls report, is a RuntimeError of PyTorch's.

Not here: virtual memory (``device.cuda.driver``) and the arithmetic of steps (``device.cuda.kernels``).
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from jettison.device.bytesview import as_tensor_uint8
from jettison.errors import ConfigError, MappingError

LINKS_PRIORITY, STEPS_PRIORITY, BESIDE_PRIORITY = -2, -1, 0
"""Of the streams: lower goes first. The default stream has 0."""
_WARM_BYTES = 4096
"""Of a row, as KV blocks are: a multiple of 64."""


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

    def ns_since(self, earlier: Any) -> int:
        """Time on the card between two points that are reached; both must be timed."""
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

    def start(self) -> None:
        """Make the stream of steps the calling thread's: the thread that owns the device calls it once. Raises
        ConfigError."""
        if self._steps is not None:
            return
        if not torch.cuda.is_available():
            raise ConfigError(f"PyTorch {torch.__version__} finds no CUDA device")
        torch.cuda.set_device(self.device)
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
        these steps do not touch."""
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

    def record(self, *, is_timed: bool = False, sleeps: bool = False) -> Event:
        """The present point of the calling thread's stream. ``sleeps``: a thread that waits leaves its core to
        others."""
        event = torch.cuda.Event(enable_timing=is_timed, blocking=sleeps)
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

    def copy_in(self, pinned: Tensor, target: Tensor) -> None:
        """Launch a copy of pinned memory, which must not change before it is over, to the card; equal shapes and
        dtypes, both contiguous."""
        target.copy_(pinned, non_blocking=True)

    def copy_out(self, source: Tensor, pinned: Tensor) -> None:
        """Launch a copy from the card to pinned memory, which has it when the copy is over."""
        pinned.copy_(source, non_blocking=True)

    def gather_rows(self, addresses: Tensor, piece: Tensor) -> None:
        """Launch a copy of rows of the card's memory, one after the other, into ``piece``.

        ``addresses``: int64 [n] on the card, multiples of 16; ``piece``: uint8, n rows of a multiple of 16 bytes.
        Raises ValueError for other sizes.
        """
        self._copy_rows(addresses, piece, to_piece=True)

    def scatter_rows(self, addresses: Tensor, piece: Tensor) -> None:
        """The inverse of ``gather_rows``."""
        self._copy_rows(addresses, piece, to_piece=False)

    def compile_copies(self) -> None:
        """Have copies of rows compiled, so that the first one is not late."""
        rows, piece = self.empty(2 * _WARM_BYTES), self.empty(_WARM_BYTES)
        addresses = torch.tensor([self.address_of(rows)], dtype=torch.int64, device=self.device)
        self.gather_rows(addresses, piece)
        self.scatter_rows(addresses, piece)
        self.synchronize()

    def address_of(self, tensor: Tensor) -> int:
        """Of the first byte, for ``gather_rows``."""
        return tensor.data_ptr()

    def _copy_rows(self, addresses: Tensor, piece: Tensor, *, to_piece: bool) -> None:
        from jettison.device.cuda import elementwise  # brings Triton

        row_bytes, rest = divmod(piece.numel(), max(1, len(addresses)))
        if rest or row_bytes % 16 or piece.dtype != torch.uint8 or addresses.dtype != torch.int64:
            what = f"{len(addresses)} rows of a multiple of 16 bytes"
            raise ValueError(f"{what} are not {piece.numel()} of {piece.dtype}")
        words, block = row_bytes // 4, elementwise.COPY_WORDS
        elementwise.copy_rows_kernel[(len(addresses), -(-words // block))](
            addresses, piece.view(torch.int32), words, TO_PIECE=to_piece, BLOCK=block, num_warps=8
        )


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

    def ns_since(self, earlier: _Event) -> int:
        return int(earlier._event.elapsed_time(self._event) * 1e6)


def _not_pinned(num_bytes: int, why: str) -> MappingError:
    return MappingError(f"{num_bytes} bytes of host memory cannot be pinned: {why}")

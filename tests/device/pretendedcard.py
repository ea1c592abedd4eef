"""A card whose memory is the host's: ``device.cuda.card`` where there is none.

Kernels and indexing happen at once, in the order of their calls. Copies between pinned memory and the card do not: what
comes from the card is there once its stream has been waited for, and pinned memory that goes to the card must not
change before. An event is not reached when it is first asked. So code that does not wait is found.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager

import torch
from underway import StepsUnderWay

from jettison.device.cuda.card import Card
from jettison.errors import MappingError

STEPS, BESIDE, LINKS = "steps", "beside", "links"


class PretendedCard(Card):
    """``polls_an_event``: how often an event is asked before it is reached. ``most_pinned``: bytes that can be."""

    def __init__(self, polls_an_event: int = 1, most_pinned: int = 1 << 40) -> None:
        self.device = torch.device("cpu")
        self.polls_an_event = polls_an_event
        self.most_pinned = most_pinned
        self.is_started = False
        self.num_graphs = self.num_replays = 0
        self.pinned_bytes: dict[int, int] = {}
        """Address -> size, of all that is pinned."""
        self._kept: list[torch.Tensor] = []
        """What is pinned stays: else its addresses would be others' memory, which is not."""
        self.log: list[tuple[str, str, int]] = []
        """(what, stream, bytes) of every copy that was launched."""
        self.waits: list[str] = []
        """Streams that a thread has waited for."""
        self.steps = StepsUnderWay()
        """Those whose runner tells of them (``cardbackend``)."""
        self._before_steps = deque()
        self._movers = {}
        self._graph_memory = None
        self._pending: dict[str, list[_Copy]] = {STEPS: [], BESIDE: [], LINKS: []}
        self._thread = threading.local()
        self._lock = threading.RLock()

    def start(self) -> None:
        self.is_started = True

    def close(self) -> None:
        self.is_started = False

    @property
    def stream(self) -> str:
        """The calling thread's."""
        return getattr(self._thread, "stream", STEPS)

    def beside(self):
        return self._on(BESIDE)

    def _on_links(self):
        return self._on(LINKS)

    @contextmanager
    def _on(self, stream: str):
        before, self._thread.stream = self.stream, stream
        try:
            yield
        finally:
            self._thread.stream = before

    def end_step(self) -> None:
        super().end_step()
        self.steps.end()

    def record(self, *, sleeps: bool = False) -> PretendedEvent:
        return PretendedEvent(self, self.stream)

    def synchronize(self) -> None:
        self.waits.append(self.stream)
        self.settle(self.stream)

    def capture(self, launches: Callable[[], None]) -> PretendedGraph:
        launches()
        if self._graph_memory is None:
            self._graph_memory = weakref.WeakSet()
        elif not self._graph_memory:
            raise RuntimeError("the memory of graphs went with the last of them")  # as PyTorch's allocator has it
        self.num_graphs += 1
        graph = PretendedGraph(self, launches)
        self._graph_memory.add(graph)
        return graph

    def pinned(self, num_bytes: int) -> torch.Tensor:
        made = torch.full((num_bytes,), 0xA5, dtype=torch.uint8)
        self._note_pinned(made)
        self._kept.append(made)
        return made

    def pin(self, memory) -> Callable[[], None]:
        there = torch.frombuffer(memory, dtype=torch.uint8)
        self._note_pinned(there)
        return lambda: self.pinned_bytes.pop(there.data_ptr(), None)

    def _note_pinned(self, there: torch.Tensor) -> None:
        if sum(self.pinned_bytes.values()) + there.numel() > self.most_pinned:
            raise MappingError(f"{there.numel()} bytes of host memory cannot be pinned: out of memory")
        self.pinned_bytes[there.data_ptr()] = there.numel()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return not tensor.numel() or self._is_pinned_at(tensor.data_ptr(), tensor.nbytes)

    def _is_pinned_at(self, first: int, num_bytes: int) -> bool:
        return any(at <= first and first + num_bytes <= at + size for at, size in list(self.pinned_bytes.items()))

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0x5A, dtype=torch.uint8)

    def copy_in(self, pinned: torch.Tensor, target: torch.Tensor) -> None:
        self._copy(pinned, target, "in")

    def copy_out(self, source: torch.Tensor, pinned: torch.Tensor) -> None:
        self._copy(source, pinned, "out")

    def _copy(self, source: torch.Tensor, target: torch.Tensor, what: str) -> None:
        assert self.is_started, "the card is not started"
        assert self.is_pinned(source if what == "in" else target), f"a copy {what} waits: its memory is not pinned"
        assert source.shape == target.shape and source.dtype == target.dtype
        assert source.is_contiguous() and target.is_contiguous()
        self.log.append((what, self.stream, source.nbytes))
        copy = _Copy(source, target, source.clone(), what)
        if what == "in":
            with self.steps.writing([target.data_ptr()], target.nbytes):
                target.copy_(source)
        with self._lock:
            self._pending[self.stream].append(copy)

    def pending(self, stream: str) -> list[_Copy]:
        """Copies of a stream that are not over, in order."""
        with self._lock:
            return list(self._pending[stream])

    def settle(self, stream: str, copies: list[_Copy] | None = None) -> None:
        """Let copies of a stream be over; None: all."""
        with self._lock:
            for copy in self.pending(stream) if copies is None else copies:
                if copy in self._pending[stream]:
                    self._pending[stream].remove(copy)
                    copy.end()

    def move_rows(self, sources, targets, row_bytes: int, num_programs: int) -> None:
        assert self.is_started, "the card is not started"
        assert row_bytes % 16 == 0 and num_programs > 0 and len(sources) == len(targets)
        for addresses in (sources, targets):
            assert self.is_pinned(addresses), "a list of addresses that the card cannot read, or that may go"
            assert addresses.dtype == torch.int64 and addresses.data_ptr() % 16 == 0 and not (addresses % 16).any()
        with self._lock:
            self._pending[self.stream] += [_Copy(each, each, each.clone(), "in") for each in (sources, targets)]
        whats = self._move(sources.tolist(), targets.tolist(), [row_bytes] * len(sources))
        if whats := {what for what in whats if what}:
            self.log.append((*whats, self.stream, len(sources) * row_bytes))

    def copy_many(self, sources, targets, sizes) -> None:
        assert self.is_started, "the card is not started"
        whats = self._move(sources.tolist(), targets.tolist(), sizes.tolist())
        assert all(whats), "the copy engines go between the card and memory that is pinned"
        self.log += [(what, self.stream, size) for what, size in zip(whats, sizes.tolist())]

    def _move(self, sources: list[int], targets: list[int], sizes: list[int]) -> list[str]:
        """Returns for each copy where it goes: in, out, or nowhere."""
        whats = []
        for source, target, size in zip(sources, targets, sizes, strict=True):
            from_host, to_host = self._is_pinned_at(source, size), self._is_pinned_at(target, size)
            assert not (from_host and to_host)
            whats.append("in" if from_host else "out" if to_host else "")
            if not from_host:
                self.steps.read([source])
            here, there = _at(source, size), _at(target, size)
            if not to_host:
                with self.steps.writing([target], size):
                    there.copy_(here)
            if from_host or to_host:
                with self._lock:
                    self._pending[self.stream].append(_Copy(here, there, here.clone(), whats[-1]))
        return whats


def _at(address: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


class _Copy:
    def __init__(self, source, target, content, what: str) -> None:
        self.source, self.target, self.content, self.what = source, target, content, what

    def end(self) -> None:
        if self.what == "out":
            self.target.copy_(self.content)
        else:
            same = self.source.view(-1).view(torch.uint8).equal(self.content.view(-1).view(torch.uint8))
            assert same, "pinned memory has changed while a copy read it"


class PretendedEvent:
    """See ``Event``."""

    def __init__(self, card: PretendedCard, stream: str) -> None:
        self._card, self._stream, self._polls_left = card, stream, card.polls_an_event
        self._copies = card.pending(stream)

    def done(self) -> bool:
        self._polls_left -= 1
        if self._polls_left >= 0:
            return False
        self._card.settle(self._stream, self._copies)
        return True

    def wait(self) -> None:
        """All that runs on the card is over already."""

    def synchronize(self) -> None:
        self._card.waits.append(self._stream)
        self._polls_left = 0
        self._card.settle(self._stream, self._copies)


class PretendedGraph:
    """See ``Graph``."""

    def __init__(self, card: PretendedCard, launches: Callable[[], None]) -> None:
        self._card, self._launches = card, launches

    def replay(self) -> None:
        self._card.num_replays += 1
        self._launches()

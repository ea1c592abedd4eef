"""Copies beside steps of a modelled worker: rule 9 of ``core.controlstream``, which ``live.worker.copies`` obeys, too.

One copy after the other takes its bytes over the rate of the host link, whichever way they go. A step that begins while
copies are under way takes longer by what is copied beside it, at the profile's price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jettison.core.controlstream import BesideCopy, CopiesBeside
from jettison.core.ports import SendKV
from jettison.cost.hardware import HardwareProfile
from jettison.sim.links import LinkSpec
from jettison.sim.loop import EventLoop, Scheduled
from jettison.sim.memory import ModelledMemory
from jettison.types import NANOSECONDS, TransferId

Tell = Callable[[TransferId, bool, int, int], None]
"""The end of a copy: whether it is complete, its bytes, and nanoseconds from its first piece."""


class SimCopies:
    """Copies that have begun on a worker and not ended."""

    def __init__(
        self, loop: EventLoop, memory: Callable[[], ModelledMemory], profile: HardwareProfile, link: LinkSpec | None,
        tell: Tell,
    ) -> None:
        """``memory``: the memory of the worker's present life; ``link``: its copy engines' link to the host (None: as
        profiled)."""
        self._loop = loop
        self._memory = memory
        self._rate = (profile.copies_beside_bytes_per_s if link is None else link.bytes_per_s) / NANOSECONDS
        self._beside_byte_ns = profile.copies_beside_byte_s * NANOSECONDS
        self._tell = tell
        self._begun = CopiesBeside()
        self._num_bytes = 0.0
        """Bytes of the first copy that have been copied by ``_since_ns``."""
        self._since_ns = 0
        """Time from which the first copy goes on: in the future while a layout is being applied."""
        self._started_ns: int | None = None
        """When the first copy's first piece began."""
        self._end: Scheduled | None = None

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, command: SendKV) -> None:
        """A copy's turn has come in the control stream."""
        ends = command.src_blocks, command.dst_blocks
        blocks, slots = ends if command.to_host else reversed(ends)
        self._begun.begin(BesideCopy(command.transfer_id, command.layers, blocks, slots, command.to_host))
        self.follow_layout((), self._loop.now_ns)

    def cancel(self, transfer_id: TransferId) -> bool:
        """End a copy; returns whether there was one."""
        first = self._begun.first
        copy = self._begun.end(transfer_id)
        if copy is None:
            return False
        self._advance()
        self._tell_broken_off(copy, first)
        self._copy_first()
        return True

    def follow_layout(self, moved: Sequence[tuple[int, int]], until_ns: int) -> None:
        """A layout is being applied until ``until_ns``, and nothing is copied meanwhile. Copies whose layers or blocks
        are gone end."""
        if not self._begun:
            return
        self._advance()
        memory, first = self._memory(), self._begun.first
        for copy in self._begun.change_layout(memory.kv_layers, memory.capacity_blocks, moved):
            self._tell_broken_off(copy, first)
        for copy in self._begun:
            if not copy.to_host:
                memory.note_landed(copy.layers, copy.blocks)
        self._since_ns = max(self._since_ns, until_ns)
        self._copy_first()

    def slowed_ns(self, took_ns: int) -> int:
        """Nanoseconds that a step takes which begins now and would take ``took_ns`` alone."""
        if not self._begun:
            return took_ns
        self._advance()
        left = sum(map(self._bytes_of, self._begun)) - self._num_bytes
        share = self._rate * self._beside_byte_ns
        slowed = took_ns + left * self._beside_byte_ns
        return round(slowed if share >= 1.0 else min(slowed, took_ns / (1.0 - share)))

    def clear(self) -> None:
        """The worker is dead."""
        self._begun.clear()
        self._forget_first()
        self._since_ns = 0

    def _bytes_of(self, copy: BesideCopy) -> int:
        return len(copy.layers) * len(copy.blocks) * self._memory().sizes.kv_block_bytes

    def _advance(self) -> None:
        """Note the bytes copied by now."""
        elapsed_ns = self._loop.now_ns - self._since_ns
        if elapsed_ns > 0:
            self._since_ns = self._loop.now_ns
            if self._end is not None:
                self._num_bytes += elapsed_ns * self._rate

    def _copy_first(self) -> None:
        """Schedule the end of the first copy, when its last byte is copied."""
        if self._end is not None:
            self._end.cancel()
            self._end = None
        first = self._begun.first
        if first is not None:
            self._started_ns = self._since_ns if self._started_ns is None else self._started_ns
            left = max(0.0, self._bytes_of(first) - self._num_bytes)
            self._end = self._loop.at(self._since_ns + math.ceil(left / self._rate), self._complete_first)

    def _complete_first(self) -> None:
        first = self._begun.first
        assert first is not None and self._started_ns is not None
        self._begun.end(first.transfer_id)
        now_ns, started_ns = self._loop.now_ns, self._started_ns
        self._forget_first()
        self._since_ns = now_ns
        self._tell(first.transfer_id, True, self._bytes_of(first), now_ns - started_ns)
        self._copy_first()

    def _tell_broken_off(self, copy: BesideCopy, first: BesideCopy | None) -> None:
        if copy is not first or self._started_ns is None:
            self._tell(copy.transfer_id, False, 0, 0)
            return
        num_bytes, started_ns = min(int(self._num_bytes), self._bytes_of(copy)), self._started_ns
        self._forget_first()
        self._tell(copy.transfer_id, False, num_bytes, max(0, self._loop.now_ns - started_ns))

    def _forget_first(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None
        self._num_bytes, self._started_ns = 0.0, None

"""Two words in shared memory: one by which a controller has a worker give up the step that it computes.

The word holds the id of that step, so a word that is written too late names a step that is over, and stops no other; it
is never taken down. 0: none yet, since ids of steps begin at 1. The keeper writes it for the controller, eight aligned
bytes at once; a look costs the worker less than a microsecond and no system call.

The second word says until when the keeper's lease lasts, where it is on another host than the controller
(``wire.lease``); 0: for ever.
"""

from __future__ import annotations

import mmap
import os

_NUM_BYTES = 16
NO_STEP = -1
"""The id of none."""


class StepFlag:
    """One end of them. ``open`` and ``attach`` map a word that two processes share; the constructor makes one for ends
    that share an object."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = bytearray(_NUM_BYTES) if memory is None else memory
        self._words = memoryview(self._memory)[:_NUM_BYTES].cast("q")

    @classmethod
    def open(cls) -> tuple[StepFlag, int]:
        """A new word, and the descriptor of its memory for the process at the other end. Raises OSError."""
        fd = os.memfd_create("jettison-step", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            return cls(mmap.mmap(fd, mmap.PAGESIZE)), fd
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> StepFlag:
        """The word behind an inherited descriptor, which is closed. Raises OSError."""
        try:
            return cls(mmap.mmap(fd, mmap.PAGESIZE))
        finally:
            os.close(fd)

    def name(self, step_id: int) -> None:
        """Have the worker give this step up at its next look."""
        self._words[0] = step_id

    def names(self, step_id: int) -> bool:
        """Whether it is this step that is to be given up."""
        return self._words[0] == step_id

    def lease_until(self, ends_s: float) -> None:
        """The worker must not live longer than this, by ``lease.boot_clock_s``."""
        self._words[1] = int(ends_s * 1e9)

    def is_over(self, now_s: float) -> bool:
        """Whether the lease is over."""
        ends_ns = self._words[1]
        return ends_ns != 0 and now_s * 1e9 >= ends_ns

    def close(self) -> None:
        """Unmap the word. Idempotent."""
        self._words.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()

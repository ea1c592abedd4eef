"""The free block ids of one worker: lowest first, and taken and given back in runs.

Pure bookkeeping of integers, the part of ``memory.blocks`` that has to be cheap: a prompt takes a hundred blocks at
once, and an idle worker of a large cluster should not hold a list of all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

_LO_SHIFT = 32
_HI_MASK = (1 << _LO_SHIFT) - 1
_MIN_RUNS_TO_JOIN = 64


def runs_of(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Ids as runs ``lo <= id < hi`` of consecutive ones, in the order in which they are named."""
    runs: list[tuple[int, int]] = []
    if not block_ids:
        return runs
    lo = hi = block_ids[0]
    for block in block_ids:
        if block != hi:
            runs.append((lo, hi))
            lo = hi = block
        hi += 1
    runs.append((lo, hi))
    return runs


class FreeBlocks:
    """A set of ids as disjoint runs in a heap.

    Invariant: no id is in two runs, so all ids of the run that begins lowest are below all ids of the others. Runs that
    touch are joined now and then, not at once: that only makes the heap shorter.
    """

    __slots__ = ("num", "_runs", "_join_at")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """``runs``: ascending and disjoint ``(lo, hi)``."""
        # A run is one integer, lo << 32 | hi: a heap compares integers faster than pairs.
        self._runs = [lo << _LO_SHIFT | hi for lo, hi in runs if lo < hi]
        self.num = sum(hi - lo for lo, hi in self)
        """Free ids."""
        self._join_at = 2 * len(self._runs) + _MIN_RUNS_TO_JOIN

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The runs, in no order."""
        return ((run >> _LO_SHIFT, run & _HI_MASK) for run in self._runs)

    def take(self, num: int) -> list[int]:
        """The ``num`` lowest ids, ascending. There must be so many."""
        assert num <= self.num, f"{num} of {self.num} free blocks"
        self.num -= num
        runs = self._runs
        ids: list[int] = []
        while num:
            lo, hi = runs[0] >> _LO_SHIFT, runs[0] & _HI_MASK
            if hi - lo > num:
                # The rest of the lowest run is still below all other runs, so the list stays a heap.
                runs[0] += num << _LO_SHIFT
                ids += range(lo, lo + num)
                break
            heapq.heappop(runs)
            ids += range(lo, hi)
            num -= hi - lo
        return ids

    def give(self, lo: int, hi: int) -> None:
        """Add the ids ``lo <= id < hi``, none of which is free."""
        self.num += hi - lo
        heapq.heappush(self._runs, lo << _LO_SHIFT | hi)
        if len(self._runs) > self._join_at:
            self._join()

    def _join(self) -> None:
        """Make one run of each row of touching ones. A sorted list is a heap."""
        joined: list[tuple[int, int]] = []
        for lo, hi in sorted(self):
            if joined and joined[-1][1] == lo:
                joined[-1] = (joined[-1][0], hi)
            else:
                joined.append((lo, hi))
        self._runs = [lo << _LO_SHIFT | hi for lo, hi in joined]
        self._join_at = 2 * len(self._runs) + _MIN_RUNS_TO_JOIN

    def ids(self) -> list[int]:
        """All of them, ascending. O(free)."""
        return [block for lo, hi in sorted(self) for block in range(lo, hi)]

    def check(self) -> None:
        """Raise AssertionError on any broken invariant."""
        runs = self._runs
        # Children of entry i are entries 2i + 1 and 2i + 2.
        assert all(runs[(i - 1) // 2] <= runs[i] for i in range(1, len(runs))), "the free runs are not a heap"
        ids = self.ids()
        assert len(set(ids)) == len(ids), "a free id is listed twice"
        assert len(ids) == self.num and all(lo < hi for lo, hi in self), "the free ids are not counted right"

"""How long answers become, from those that have ended and from those that have not.

Pure. Ended answers alone say too little: after a quiet hour, or at the start of a burst, only short ones have ended.
So lengths are estimated as life times are (Kaplan and Meier): an answer under way counts among those that are at least
as long as it is. Beyond the longest ended answer the mean rate of ending goes on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

GOLDEN = 0.6180339887
"""Multiples of it, less whole numbers, fall evenly between 0 and 1, and so does every run of them."""

UNKNOWN_TOKENS = 64.0
"""Mean tokens of an answer while none has ended."""

ENOUGH = 32
"""Ended answers from which on they are a sample: before, they are all that there were."""

LEAST_SHARE = 1e-9
"""Of answers that are longer still: a logarithm is taken of it."""


class AnswerLengths:
    """The distribution of the lengths of answers, in tokens."""

    def __init__(self, ended: Sequence[int], under_way: Sequence[int]) -> None:
        """``ended``: tokens of the last answers that have ended; ``under_way``: tokens so far of others."""
        self._lengths: list[int] = []
        """Lengths at which answers have ended, ascending."""
        self._left: list[float] = []
        """Share of answers that are longer than each of them."""
        lasting = sorted(under_way)
        if ENOUGH <= len(ended) < len(lasting):
            # In a steady state as many answers end in a mean life as are under way: the last ended ones stand for all
            # of those, so as many of the others stand for all others.
            lasting = [lasting[(2 * i + 1) * len(lasting) // (2 * len(ended))] for i in range(len(ended))]
        at_risk, left = len(ended) + len(lasting), 1.0
        for index, length in enumerate(sorted(ended)):
            shorter = index + bisect_right(lasting, length - 1)
            left *= 1.0 - 1.0 / max(1, at_risk - shorter)
            self._lengths.append(length)
            self._left.append(left)
        total = sum(ended) + sum(lasting)
        if ended and total:
            self._mean_left = total / len(ended)
        else:
            self._mean_left = max(UNKNOWN_TOKENS, total / max(1, len(lasting)))

    def at(self, share: float, longer_than: int = 0) -> float:
        """The length that a share of the answers longer than ``longer_than`` do not exceed; above ``longer_than``.
        ``share``: from 0, below 1."""
        first = bisect_right(self._lengths, longer_than)
        at_least = self._left[first - 1] if first else 1.0
        wanted = (1.0 - share) * at_least
        low, high = first, len(self._left)
        while low < high:
            middle = (low + high) // 2
            if self._left[middle] <= wanted:
                high = middle
            else:
                low = middle + 1
        if low < len(self._left):
            return float(self._lengths[low])
        # Of those that are left the mean rate of ending goes on: an exponential.
        has_longer = first < len(self._left)
        beyond, left = (self._lengths[-1], wanted / self._left[-1]) if has_longer else (longer_than, 1.0 - share)
        return beyond + max(1.0, -math.log(max(LEAST_SHARE, left)) * self._mean_left)


def evenly(index: int) -> float:
    """A share from 0 to 1 for each index: any run of indices has them evenly."""
    return index * GOLDEN % 1.0

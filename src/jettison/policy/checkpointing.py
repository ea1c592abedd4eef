"""Which KV is copied to the host while its request runs, and what a step may copy beside it (ConServe 4.4, 4.5). Pure.

The paper's two calls: after a step ``checkpoint`` only marks candidates, before the next ``blocks_to_checkpoint``
decides. Copying begins when less than a given share of the blocks is free. The less is free, the more requests are
copied, the first victims first. The rate is such that all of them are copied before free memory runs out as it is being
consumed, so that every victim has its copy when its blocks are needed. What the link has no time for is deferred. A
victim that is deferred for too long is discarded and computed again: latency goes first.

A freed request comes back as a copy or is computed again, whichever costs its group fewer request-seconds. One that
would be computed again, whatever room steps have for copies, is not copied at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import ceil
from typing import NamedTuple

from jettison.types import RequestId

STEP_LONGER = 0.05
"""Share of its time by which copies may make a step longer."""

USUAL_BLOCKS = 8
"""Blocks copied beside a step while nothing is known of step times."""

LEARNING = 0.25
"""Weight of the last step in the moving average of blocks consumed a step."""


class CheckpointRow(NamedTuple):
    """A running request that may be copied."""

    request_id: RequestId
    num_sealed_blocks: int
    """Full blocks, which nothing writes any more."""
    num_copied_blocks: int
    """Of these, copied or on their way."""
    num_foreseen_blocks: int = 0
    """Blocks that it has once its prompt is computed: what would come back."""

    @property
    def lag_blocks(self) -> int:
        """Sealed blocks that are not copied yet."""
        return self.num_sealed_blocks - self.num_copied_blocks


class Checkpointing:
    """The policy for one group. It remembers what was marked, and how fast free blocks have become fewer."""

    def __init__(self) -> None:
        self._marked: Mapping[RequestId, CheckpointRow] = {}
        self._num_free: int | None = None
        self._consumed_blocks = 0.0
        """Blocks a step, as a moving average."""

    @property
    def lag_blocks(self) -> int:
        """Sealed blocks of the candidates that have not been copied."""
        return sum(row.lag_blocks for row in self._marked.values())

    def checkpoint(self, requests: Iterable[CheckpointRow]) -> None:
        """Mark candidates, the first victims first: offline ones, newest first, then online ones likewise."""
        self._marked = {row.request_id: row for row in requests}

    def blocks_to_checkpoint(
        self, num_free_blocks: int, num_blocks: int, below_free: float, budget_blocks: Callable[[], int],
        is_too_slow: Callable[[int], bool] = lambda num_blocks: False,
    ) -> tuple[tuple[RequestId, int], ...]:
        """How many further blocks of which requests to copy beside the next step, the first victims first.

        ``budget_blocks``: what the link and the objectives allow; ``is_too_slow``: whether the link takes longer for so
        many blocks than computing them again does. Both are asked only where there is something to copy.
        """
        # Only a net loss of free blocks counts: a step after which more are free counts as 0.
        before, self._num_free = self._num_free, num_free_blocks
        if before is not None:
            self._consumed_blocks += LEARNING * (max(0, before - num_free_blocks) - self._consumed_blocks)
        marked, self._marked = self._marked, {}
        pressure = _pressure(num_free_blocks, num_blocks, below_free)
        chosen = [
            row for row in list(marked.values())[: ceil(pressure * len(marked))]
            if row.lag_blocks > 0 and not is_too_slow(max(row.num_foreseen_blocks, row.num_sealed_blocks))
        ]
        lag = sum(row.lag_blocks for row in chosen)
        if not lag:
            return ()
        self._marked = {row.request_id: row for row in chosen}
        left = min(ceil(_rate(lag, self._consumed_blocks, num_free_blocks)), budget_blocks())
        decided: list[tuple[RequestId, int]] = []
        for row in chosen:
            num_blocks = min(left, row.lag_blocks)
            if num_blocks <= 0:
                break
            decided.append((row.request_id, num_blocks))
            left -= num_blocks
        return tuple(decided)


def _pressure(num_free_blocks: int, num_blocks: int, below_free: float) -> float:
    """0 where enough is free, 1 where nothing is."""
    if below_free <= 0.0 or num_blocks <= 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - num_free_blocks / (num_blocks * below_free)))


def _rate(lag_blocks: int, consumed_blocks: float, num_free_blocks: int) -> float:
    """Blocks to copy a step: the whole lag before memory runs out, and at least the blocks consumed meanwhile."""
    steps_left = num_free_blocks / consumed_blocks if consumed_blocks > 0.0 else float(lag_blocks)
    return max(1.0, consumed_blocks, lag_blocks / max(1.0, steps_left))


def copy_bound_s(step_s: float, tpot_s: float | None) -> float:
    """How long a step may take with copies beside it. ``tpot_s``: of an online decode that is in it, else None."""
    bound_s = (1.0 + STEP_LONGER) * step_s
    return bound_s if tpot_s is None else min(bound_s, tpot_s)


class CopyBack(NamedTuple):
    """A request's blocks on their way back from the host, and what that does to the other requests of its group."""

    num_blocks: int
    """Its own, behind all that is on its way already."""
    budget_blocks: int
    """Blocks that are copied with each step."""
    step_s: float | None
    """Seconds of such a step; None: not known."""
    link_s: float = 0.0
    """Seconds that the link takes for all of the blocks, whatever steps there are."""
    stall_s: float | None = 0.0
    """Seconds by which its own blocks make steps longer, all together: steps wait for copies between them, and are
    slowed a little by copies beside them. None: not known."""


def is_cheaper_recomputed(copy: CopyBack, recompute_s: float | None, num_others: int) -> bool:
    """Whether it costs fewer request-seconds to compute a request's blocks again than to copy them back.

    The request itself is away until the last block is there, whichever way. ``num_others`` requests of its group
    progress later by what the copies add to steps, or by all the time that steps spend on computing the blocks again:
    so a copy that takes long for the request, few blocks a step, may still cost the group far less. Both take a step at
    least. Where no step has room for a copy just now, none has room to compute the blocks, either. False while too
    little is known.
    """
    if copy.budget_blocks <= 0 or copy.step_s is None or copy.stall_s is None or recompute_s is None:
        return False
    copied_s = max(ceil(copy.num_blocks / copy.budget_blocks) * copy.step_s, copy.link_s)
    copy_request_s = copied_s + num_others * copy.stall_s
    return copy_request_s > max(copy.step_s, recompute_s) + num_others * recompute_s

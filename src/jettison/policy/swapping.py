"""Which requests to swap out, which to bring back, and how many blocks a step may carry (the ``swap`` baseline;
InferCept). Pure.

InferCept (ICML 2024) hides swaps behind the forward pass: an iteration copies at most as many blocks as the link
carries meanwhile, and a context that needs more is spread over several. Victims leave before their blocks are needed,
so that no step waits for the link. A request that does not fit the host pool is left to the batching policy, which
recomputes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jettison.types import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapParams:
    """Bounds of swapping."""

    num_host_slots: int = 0
    """Blocks that each worker's host pool holds."""
    budget_blocks: int | None = None
    """Blocks a step may carry, both directions together; None = as many as fit into ``time_share`` of a step."""
    time_share: float = 0.25
    """Share of a step's time that its copies may take. A host device copies on the thread that computes, so a whole
    step's time (InferCept's bound, with a DMA engine beside the compute) would double every step here. Simulated GPUs
    have such engines, and 1.0 (``simulate.machines``)."""
    ahead_steps: int = 2
    """Victims leave when blocks will be short within so many decode steps: the copy is over in time."""


class SwapRow(NamedTuple):
    """A running request that may be swapped out."""

    request_id: RequestId
    num_reclaimable_blocks: int
    """Blocks that come free in every stage when it has left (shared ones do not count)."""
    num_slots: int
    """Blocks with content, which have to be copied. 0 = not begun, there is nothing to save."""
    num_growth_blocks: int
    """Blocks that it will take within the steps looked ahead."""


class StoredRow(NamedTuple):
    """A request with KV in the host pool."""

    request_id: RequestId
    num_blocks: int
    """Blocks that it needs on the device to run on."""


def choose_swap_outs(
    rows: Sequence[SwapRow], *, growth_blocks: int, num_free_blocks: int, num_leaving_blocks: int, num_free_slots: int
) -> tuple[RequestId, ...]:
    """Victims, youngest first, until the growth of all running requests fits; ``rows`` are youngest first.

    ``num_leaving_blocks``: blocks of victims already on their way out. One running request always stays. The choice
    ends at a victim that cannot be saved (no slots, or nothing computed yet): recomputing it is cheaper than taking an
    older one.
    """
    missing = growth_blocks - num_free_blocks - num_leaving_blocks
    chosen: list[RequestId] = []
    for row in rows[:-1]:
        if missing <= 0 or not 0 < row.num_slots <= num_free_slots:
            break
        chosen.append(row.request_id)
        num_free_slots -= row.num_slots
        missing -= row.num_reclaimable_blocks + row.num_growth_blocks
    return tuple(chosen)


def choose_swap_ins(
    rows: Sequence[StoredRow], *, growth_blocks: int, num_free_blocks: int, watermark_blocks: int, num_running: int,
    max_num_seqs: int,
) -> tuple[RequestId, ...]:
    """The stored requests that come back, oldest first, strictly in order; ``rows`` are oldest first.

    A request returns when its blocks are free beside the growth of the running ones, with one more block for its own
    growth and the watermark to spare: otherwise it would be the next to leave. Where nothing runs, all that fit return.
    """
    room = num_free_blocks - growth_blocks
    chosen: list[RequestId] = []
    for row in rows:
        spare = watermark_blocks + 1 if num_running else 0
        if num_running >= max_num_seqs or row.num_blocks + spare > room:
            break
        chosen.append(row.request_id)
        room -= row.num_blocks
        num_running += 1
    return tuple(chosen)


def swap_budget(params: SwapParams, blocks_within: Callable[[float], int | None]) -> int:
    """Blocks that the next step may carry: at least one, or nothing would ever move.

    ``blocks_within(share)``: how many blocks add at most this share of its time to a step; a first guess of 8 is used
    while that is not known (None).
    """
    if params.budget_blocks is not None:
        return params.budget_blocks
    num_blocks = blocks_within(params.time_share)
    return 8 if num_blocks is None else max(1, num_blocks)

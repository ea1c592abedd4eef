"""The size that a request has for the packing: the blocks that it holds, and will hold before it can be moved again.
Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jettison.policy.packing.types import Resize
from jettison.types import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveParams:
    """How far a reserve looks ahead."""

    epoch_s: float = 1.0
    """Seconds between two plans: a request is resized now if its reserve does not last so long."""
    ahead_s: float = 4.0
    """Seconds that a new reserve covers: an epoch, its moves, and some more, so that not every epoch resizes every
    request."""


class Growing(NamedTuple):
    """A running request."""

    request_id: RequestId
    num_blocks: int
    """Blocks that it holds."""
    reserved_blocks: int
    """Its size in the packing."""
    blocks_per_s: float
    """Its growth."""
    most_blocks: int | None = None
    """The most that it may ever hold; None: as much as there is."""


def reserved_blocks(
    num_blocks: int, blocks_per_s: float, capacity: int, params: ReserveParams, most_blocks: int | None = None
) -> int:
    """The size to pack with, in blocks: at least what the request holds, at most the capacity and the most that it may
    ever hold."""
    most = capacity if most_blocks is None else min(capacity, most_blocks)
    return max(num_blocks, min(most, math.ceil(num_blocks + blocks_per_s * params.ahead_s)))


def growth_blocks(blocks_per_s: float, params: ReserveParams) -> int:
    """Blocks by which a request grows while its next reserve is used up: what a device that overflows should have left
    for it, so that it does not overflow again at once. (Twice as much saves no more moves where they take time.)"""
    return math.ceil(blocks_per_s * params.ahead_s)


def plan_resizes(rows: Iterable[Growing], capacity: int, params: ReserveParams) -> list[Resize]:
    """Resizes for requests that use their reserve up before the next epoch is over: so the packing crosses a class
    limit before the request does. No size shrinks: a request only grows."""
    resizes, epoch_s = list[Resize](), params.epoch_s
    for request_id, num_blocks, reserved, blocks_per_s, most_blocks in rows:
        if num_blocks + blocks_per_s * epoch_s > reserved:
            size = reserved_blocks(num_blocks, blocks_per_s, capacity, params, most_blocks)
            if size > reserved:
                resizes.append(Resize(request_id, size, growth_blocks(blocks_per_s, params)))
    return resizes

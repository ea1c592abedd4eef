"""How large a request counts for the packing: what it holds, and what it will before it can be moved again. Pure."""

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
    """Between two plans: a request whose reserve does not last so long is resized now."""
    ahead_s: float = 4.0
    """For what a new reserve is: an epoch, the moves of it, and some, so that not every epoch resizes everybody."""


class Growing(NamedTuple):
    """A running request."""

    request_id: RequestId
    num_blocks: int
    """That it holds."""
    reserved_blocks: int
    """Its size in the packing."""
    blocks_per_s: float
    """By which it grows."""


def reserved_blocks(
    num_blocks: int, blocks_per_s: float, capacity: int, params: ReserveParams, most_blocks: int | None = None
) -> int:
    """The size to pack with: at least what it holds, at most the capacity and what the request may ever hold."""
    most = capacity if most_blocks is None else min(capacity, most_blocks)
    return max(num_blocks, min(most, math.ceil(num_blocks + blocks_per_s * params.ahead_s)))


def plan_resizes(rows: Iterable[Growing], capacity: int, params: ReserveParams) -> list[Resize]:
    """Whose reserve is used up before the next epoch is over: so a class limit is crossed in the packing before the
    request crosses it. Nothing shrinks: a request only grows."""
    resizes, epoch_s = list[Resize](), params.epoch_s
    for request_id, num_blocks, reserved, blocks_per_s in rows:
        if num_blocks + blocks_per_s * epoch_s > reserved:
            size = reserved_blocks(num_blocks, blocks_per_s, capacity, params)
            if size > reserved:
                resizes.append(Resize(request_id, size))
    return resizes

"""When and how devices are packed, and how much of each is left free. Pure.

Head-room is the memory that a packed device keeps free for requests to come: beyond MELL, whose devices are filled up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.packing.reserve import ReserveParams
from jettison.policy.packing.types import Priorities
from jettison.policy.slo import AHEAD_SHARE

LEAST_HEAD_ROOM, MOST_HEAD_ROOM = 0.05, 0.25
"""Bounds of the head-room, as shares of a device's KV memory, where no flag sets it: at least what chance brings at
once, and never so much that the memory left free in packed devices outweighs the devices that packing empties."""

STEPS = 20
"""Steps of head-room in a whole device. A head-room that follows the load changes by whole steps: each change of
capacity classes all sizes anew."""


class Gather(StrEnum):
    """What requests move for besides a device that overflows."""

    SETTLE = "settle"
    """To keep MELL's properties after every epoch: the fewest devices."""
    CLOSE = "close"
    """Only to close a device (``policy.packing.closing``): a quarter to a third fewer moves, for as many devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackParams:
    """How running requests are packed."""

    packer: str = "mell"
    """A name of ``policy.packing.named``."""
    epoch_s: float = 1.0
    """Seconds between two plans (MELL section IV)."""
    head_room: float | None = None
    """Share of a device's KV memory that is left free; None: room for what arrives within the objective for first
    tokens."""
    kinds: frozenset[MigrationKind] = frozenset(MigrationKind)
    """Kinds in which requests may go; with both, each goes as is best for it and for the others."""
    fill: float = 0.75
    """Of ``PackingParams``."""
    gather: Gather = Gather.SETTLE
    saves_idle: bool = False
    """An emptied device counts as saved even where it stays awake: it is given back (MELL terminates idle devices)."""
    priorities: Priorities = field(default_factory=Priorities)
    retry_s: float = 1.0
    """Seconds from a failed move to the next try of that request."""

    @property
    def reserve(self) -> ReserveParams:
        """Reserves that last for an epoch and for its moves."""
        return ReserveParams(epoch_s=self.epoch_s, ahead_s=4 * self.epoch_s)


def head_room_blocks(
    params: PackParams, capacity: int, present: int | None, arriving_blocks_per_s: float, ttft_s: float | None
) -> int:
    """Blocks that a device of ``capacity`` blocks keeps free.

    Where no flag says how many: if all that arrives at the cluster within the objective for first tokens came to one
    device, it would have room. ``present``: the last answer, which is kept while it is about right.
    """
    if params.head_room is not None:
        return math.ceil(params.head_room * capacity)
    wanted = min(max(LEAST_HEAD_ROOM, arriving_blocks_per_s * (ttft_s or 0.0) / capacity), MOST_HEAD_ROOM)
    if present is not None and abs(present - wanted * capacity) <= capacity / STEPS:
        return present
    return -(-math.ceil(wanted * STEPS) * capacity // STEPS)


def devices_needed(num_active: int, unplaced_blocks: int, capacity: int) -> int:
    """Devices of a pool that its requests take; of the requests that no device has room for, the volume bound."""
    return num_active + -(-unplaced_blocks // capacity)


def breaks_ttft(ahead_tokens: float, prompt_tokens: float, tokens_per_s: float | None, ttft_s: float | None) -> bool:
    """Whether the prompts ahead of a newcomer and its own take more than ``AHEAD_SHARE`` of the objective or, with none
    ahead, its own takes more than all of it: beside decodes a long prompt may. False while rates or objectives are not
    known."""
    if tokens_per_s is None or ttft_s is None:
        return False
    share = AHEAD_SHARE if ahead_tokens else 1.0
    return ahead_tokens + prompt_tokens > tokens_per_s * ttft_s * share


def goes_on(*, destination_lacks: bool, is_landing: bool) -> bool:
    """While memory is short: whether a move under way should go on rather than be called off. Going on frees its source
    at its end; calling it off frees its destination at once. It goes on where it is in its last round (``is_landing``)
    or its destination lacks no memory."""
    return is_landing or not destination_lacks

"""When and how devices are packed, and how much of each is left free. Pure.

Head-room is what a packed device keeps for those who have not come yet: beyond MELL, whose devices are filled up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.moveprices import PriceParams
from jettison.policy.packing.reserve import ReserveParams
from jettison.policy.packing.types import Priorities
from jettison.policy.slo import AHEAD_SHARE

LEAST_HEAD_ROOM, MOST_HEAD_ROOM = 0.05, 0.25
"""Of a device's KV memory, where nobody has said how much: at least what chance brings at once, and never so much that
the devices which packing empties are outweighed by what it leaves free in the others."""

STEPS = 20
"""That a whole device has. A head-room that follows the load changes by one of them: another capacity has all sizes
classed anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackParams:
    """How running requests are packed."""

    packer: str = "mell"
    """A name of ``policy.packing.named``."""
    epoch_s: float = 1.0
    """Between two plans (MELL section IV)."""
    head_room: float | None = None
    """Part of a device's KV memory that is left free; None: what arrives within the objective for first tokens."""
    kinds: frozenset[MigrationKind] = frozenset(MigrationKind)
    """Ways in which requests may go: with both, each goes as suits it and the others best."""
    priorities: Priorities = field(default_factory=Priorities)
    prices: PriceParams = field(default_factory=PriceParams)
    retry_s: float = 1.0
    """From a move that failed to the next try of that request."""
    held_s: float = 10.0
    """How long a request stays whose move costs more than it saves, before its price is asked for again."""

    @property
    def reserve(self) -> ReserveParams:
        """Sizes last for an epoch and for the moves of it."""
        return ReserveParams(epoch_s=self.epoch_s, ahead_s=4 * self.epoch_s)


def head_room_blocks(
    params: PackParams, capacity: int, present: int | None, arriving_blocks_per_s: float, ttft_s: float | None
) -> int:
    """Blocks that a device of so many keeps free.

    Where nobody has said how many: if all that arrives at the cluster within the objective for first tokens came to
    one device, it would have room. ``present``: what was answered last; it is kept while it is about right.
    """
    if params.head_room is not None:
        return math.ceil(params.head_room * capacity)
    wanted = min(max(LEAST_HEAD_ROOM, arriving_blocks_per_s * (ttft_s or 0.0) / capacity), MOST_HEAD_ROOM)
    if present is not None and abs(present - wanted * capacity) <= capacity / STEPS:
        return present
    return -(-math.ceil(wanted * STEPS) * capacity // STEPS)


def devices_needed(num_active: int, unplaced_blocks: int, capacity: int) -> int:
    """Devices of a pool that its requests take, those included that no device has room for: the volume bound."""
    return num_active + -(-unplaced_blocks // capacity)


def breaks_ttft(ahead_tokens: int, prompt_tokens: int, tokens_per_s: float | None, ttft_s: float | None) -> bool:
    """Whether the prompts ahead of a newcomer and its own take more than ``AHEAD_SHARE`` of the objective. With none
    ahead it is no better off anywhere else; nothing is known to break it while rates or objectives are not known."""
    if not ahead_tokens or tokens_per_s is None or ttft_s is None:
        return False
    return ahead_tokens + prompt_tokens > tokens_per_s * ttft_s * AHEAD_SHARE


def goes_on(*, destination_lacks: bool, is_landing: bool) -> bool:
    """Whether a move under way frees memory sooner by going on than by being called off, while memory is short: going
    on frees its source at its end, calling it off frees its destination at once."""
    return is_landing or not destination_lacks

"""Inputs and outputs of a packing: operations, parameters, plans. Values only.

Sizes are blocks of KV, and integers, so that *fits* is exact. A size may be larger than what a request holds now: the
caller reserves for the growth of an epoch and of a move (``policy.packing.reserve``). Capacity is a device's memory for
KV less head-room. Devices of unlike capacity belong to packings of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeAlias

from jettison.types import GroupId, RequestId

ShareKey: TypeAlias = str | int
"""A name that requests with the same prefix have in common."""


class SizeClass(IntEnum):
    """A request's class by its share of the capacity C (MELL, section VI.C). Small requests travel in multi-items."""

    SMALL = 0
    """Up to C/8."""
    T = 1
    """Above C/8, up to C/4."""
    S = 2
    """Above C/4, up to C/3."""
    M = 3
    """Above C/3, up to C/2."""
    L = 4
    """Above C/2."""


class Grip(IntEnum):
    """How firmly a request is bound to its device: whether the packing may move it."""

    FREE = 0
    HELD = 1
    """Its move costs more than it saves: it goes only where its device overflows."""
    PINNED = 2
    """It cannot go at all: it prefills, or a move of it is under way."""


class Arrive(NamedTuple):
    """A request joins."""

    request_id: RequestId
    num_blocks: int
    device: GroupId | None = None
    """The device where it lives already; None: the packing chooses one."""
    share_key: ShareKey | None = None
    """Requests of one key share their first ``shared_blocks``, which count once a device."""
    shared_blocks: int = 0
    grip: Grip = Grip.FREE
    """Whether it may be moved, from the beginning."""
    here: GroupId | None = None
    """The device that holds its KV, which may be another than ``device`` while its move is owed; None: not told, and
    moves are taken to be done at once."""
    growth_blocks: int = 0
    """Blocks by which it grows in the time for which a device that gives requests away should have room afterwards."""


class Depart(NamedTuple):
    """A request is over, or is no longer packed."""

    request_id: RequestId


class Resize(NamedTuple):
    """A request's size changes (MELL's Update, and growth that changes no class)."""

    request_id: RequestId
    num_blocks: int
    growth_blocks: int = 0
    """As of ``Arrive``."""


Operation: TypeAlias = Arrive | Depart | Resize


class PackMove(NamedTuple):
    """A request lives elsewhere from now on."""

    request_id: RequestId
    source: GroupId
    destination: GroupId
    num_blocks: int


class Placement(NamedTuple):
    """The device that an arrival goes to."""

    request_id: RequestId
    device: GroupId


@dataclass(frozen=True, slots=True)
class Plan:
    """The net changes of a batch: a request that went to and fro within it has not moved."""

    placed: tuple[Placement, ...] = ()
    moves: tuple[PackMove, ...] = ()
    """Moves of running requests, to be migrated."""
    recomputed: tuple[PackMove, ...] = ()
    """Moves of requests that outgrew their device and are computed again elsewhere (baselines only)."""
    opened: tuple[GroupId, ...] = ()
    closed: tuple[GroupId, ...] = ()
    unplaced: tuple[RequestId, ...] = ()
    """Arrivals that no device has room for; the packing has forgotten them."""
    overfull: tuple[GroupId, ...] = ()
    """Devices that hold more than their capacity, because no request may leave or no other device has room."""
    num_item_moves: int = 0
    """Moves of items in the paper's sense: a multi-item that goes between two devices counts as one."""

    @property
    def num_moved_blocks(self) -> int:
        """Blocks that the moves carry."""
        return sum(move.num_blocks for move in self.moves)


class Work(NamedTuple):
    """The second dimension of a device: what its requests add to the time of a step, in nanoseconds (beyond MELL, whose
    devices have memory alone)."""

    per_request: int
    per_block: int
    most: int
    """What all of them may add together."""

    def room(self, num_requests: int, num_blocks: int, most: int) -> int:
        """Blocks that one more request may have beside so many requests with so many blocks, at most ``most``; below 1:
        none fits."""
        left = self.most - self.per_request * (num_requests + 1) - self.per_block * num_blocks
        if left < 0:
            return min(0, most)
        return min(most, left // self.per_block) if self.per_block else most

    def is_about(self, other: Work | None) -> bool:
        """Whether the other is the same to a tenth, so that no device has to be looked at anew."""
        return other is not None and all(10 * abs(a - b) <= max(a, b) for a, b in zip(self, other, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Priorities:
    """Weights of the qualities that make a device a better destination (MELL, section VI.C). For an arrival there is no
    distance.

    Each factor lies between 0 and 1; the highest sum wins, then the smaller device id.
    """

    load: float = 1.0
    """Weight of holding few requests."""
    free: float = 1.0
    """Weight of having much free memory."""
    distance: float = 1.0
    """Weight of being on the machine of the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingParams:
    """One pool of like devices."""

    capacity: int
    """C, in blocks: a device's memory for KV less head-room."""
    priorities: Priorities = field(default_factory=Priorities)
    shares_prefixes: bool = True
    """Count the shared blocks of a key once a device, and put its requests together where they fit. Theorems 1 to 3 are
    about packings without sharing."""
    candidates: int = 8
    """Devices with room that are compared by priority: this many of the fullest and as many of the emptiest ones."""
    fill: float = 0.75
    """Share of the capacity below which a device takes from another. Theorem 1's is 3/4; more means fewer devices and
    more moves."""

    def __post_init__(self) -> None:
        if self.capacity < 1 or not 0.75 <= self.fill <= 1:
            raise ValueError(f"a packing of {self.capacity} blocks a device, filled to {self.fill}")

    @property
    def slack_blocks(self) -> int:
        """A device with more free blocks than these is below ``fill``; any T fits it."""
        return math.floor(self.capacity * (1 - self.fill))


class Packer(Protocol):
    """A placement of requests on devices, kept up to date as requests come, grow and go."""

    def apply(self, batch: Sequence[Operation]) -> Plan:
        """Take the operations in and return the changes. Mutates; deterministic.

        Raises KeyError for a request that is not known and ValueError for a size that no device can hold or a request
        that is there already; nothing has changed then.
        """

    def pin(self, request_id: RequestId, grip: Grip) -> None:
        """Say whether a request may be moved from now on. Raises KeyError."""

    def live_at(self, request_id: RequestId, device: GroupId) -> None:
        """Say which device holds a request's KV from now on. Raises KeyError."""

    def set_taking(self, device: GroupId, is_taking: bool) -> None:
        """Say whether a device is packed: a merged group, a sleeping or draining device takes and gives nothing."""

    def device_of(self, request_id: RequestId) -> GroupId:
        """Where a request should live. Raises KeyError."""

    def requests_on(self, device: GroupId) -> dict[RequestId, int]:
        """The requests that should live there, with sizes in blocks; empty for a device that is not in use."""

    @property
    def active(self) -> tuple[GroupId, ...]:
        """Devices in use, in the order in which they were opened."""

    @property
    def outgrown(self) -> tuple[GroupId, ...]:
        """Devices whose requests have outgrown them, sizes with reserves counted, while no other device can be opened
        for these."""


def size_class(num_blocks: int, capacity: int) -> SizeClass:
    """The class of a size; the upper ends are inclusive."""
    if 8 * num_blocks <= capacity:
        return SizeClass.SMALL
    if 4 * num_blocks <= capacity:
        return SizeClass.T
    if 3 * num_blocks <= capacity:
        return SizeClass.S
    return SizeClass.M if 2 * num_blocks <= capacity else SizeClass.L


def num_multi_items(sizes: Sequence[int], capacity: int) -> int:
    """Multi-items that carry so many small requests together: filled one after the other, all but one above C/8."""
    count = filled = 0
    for size in sizes:
        count += filled == 0
        filled += size
        if 8 * filled > capacity:
            filled = 0
    return count

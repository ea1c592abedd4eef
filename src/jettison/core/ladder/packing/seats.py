"""Seats: the requests of a packing, the pools of groups that they are in, and which of them have to be looked at again.
``core.ladder.packing.desired`` and ``policy.packing`` decide about them.

A pass looks at a request only if something may be different for it:

    stirred     it has changed queues, it is ending, or something has begun or ended to move it (``core.changes``)
    restless    at its last look it could not move, or was held: nothing tells when that is over
    due         it may have outgrown what is reserved for it (``core.ladder.packing.growing``)

All others are as they were: they decode where they should, and what they hold is reserved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from jettison.core.ladder.packing.prefixes import Prefixes
from jettison.policy.packing.types import Arrive, Depart, Grip, Operation, Packer, Resize
from jettison.types import GroupId, RequestId


@dataclass(slots=True, eq=False)
class Pool:
    """Groups with the same number of KV blocks, their packer, and operations that the packer has not taken in yet."""

    packer: Packer
    full: int
    """Blocks of each group."""
    head_room: int
    """Blocks of each group that packing leaves free."""
    closes: bool = False
    """Whether requests move only to empty a group, or out of one that overflows: else they are all held."""
    devices: set[GroupId] = field(default_factory=set)
    batch: list[Operation] = field(default_factory=list)
    """Operations for the next plan."""
    prefixes: Prefixes = field(default_factory=Prefixes)
    num_reserved: int = 0
    """Sizes of all seats in this pool together, in blocks."""
    fastest_per_s: float | None = None
    """Blocks a second by which one request grows in the fastest of the groups in use; None: to be asked again."""
    is_saturated: bool = False
    """Whether, at the last look, what its requests reserve took all groups, so that packing them could empty none."""

    capacity: int = field(init=False)
    """Blocks of each group that may be packed: ``full`` less ``head_room``, at least 1."""

    def __post_init__(self) -> None:
        """Set ``capacity``."""
        self.capacity = max(1, self.full - self.head_room)

    @property
    def migrates(self) -> bool:
        """Whether the pool's packer lets running requests migrate, as KV or as tokens. False, for best-fit and
        worst-fit: they are preempted, and computed again elsewhere."""
        return bool(getattr(self.packer, "migrates", True))

    @property
    def gathers(self) -> bool:
        """Whether the pool's packer is after few groups in use, rather than after even ones."""
        return bool(getattr(self.packer, "gathers", True))


@dataclass(slots=True, eq=False)
class Seat:
    """A request's entry in the packing of a pool: where it is, its size in blocks, and whether it may be moved."""

    request_id: RequestId
    pool: Pool
    group_id: GroupId
    """The group where the request was when it was looked at last."""
    num_blocks: int
    """Its size in the packing: with a reserve."""
    number: int
    """Its place in the order in which requests came to the packings."""
    growth_blocks: int = 0
    """As of ``Arrive``."""
    grip: Grip = Grip.FREE
    held_at: GroupId | None = None
    """Where it is held, as its move away costs more than it saves; None: nowhere."""
    armed: int = 0
    """The number of the heap entry by which it is found when it may have grown; 0: by none."""


class Seats:
    """All seats of one cluster, with the sets of those that have to be looked at again."""

    def __init__(self) -> None:
        self.by_id: dict[RequestId, Seat] = {}
        self.here: defaultdict[GroupId, set[RequestId]] = defaultdict(set)
        """By group: the requests whose ``Seat.group_id`` it is."""
        self.held: set[RequestId] = set()
        """The requests that are held because their move costs more than it saves."""
        self.restless: set[RequestId] = set()
        """These, and the requests that cannot move now: nothing tells when that is over."""
        self.astray: set[RequestId] = set()
        """The requests that may live elsewhere than they should; some have arrived since."""
        self._next_number = 0

    def __len__(self) -> int:
        """How many requests have a seat."""
        return len(self.by_id)

    def get(self, request_id: RequestId) -> Seat | None:
        """The seat of a request; None: it has none."""
        return self.by_id.get(request_id)

    def take(self, arrive: Arrive, pool: Pool, group_id: GroupId) -> Seat:
        """Give a request that arrives in a pool a new seat there, and return it. The packer is not told."""
        request_id = arrive.request_id
        self._next_number += 1
        seat = self.by_id[request_id] = Seat(
            request_id, pool, group_id, arrive.num_blocks, self._next_number, arrive.growth_blocks
        )
        pool.num_reserved += arrive.num_blocks
        self.here[group_id].add(request_id)
        self.astray.add(request_id)
        return seat

    def leave(self, request_id: RequestId) -> None:
        """Remove a request's seat; its packer hears of it with the next plan. Raises KeyError where it has none."""
        seat = self.by_id.pop(request_id)
        seat.armed = 0
        seat.pool.num_reserved -= seat.num_blocks
        seat.pool.batch.append(Depart(request_id))
        seat.pool.prefixes.leave(request_id)
        self.here[seat.group_id].discard(request_id)
        for some in (self.held, self.restless, self.astray):
            some.discard(request_id)

    def note_here(self, seat: Seat, group_id: GroupId) -> None:
        """Note that the request of this seat is in this group now."""
        if seat.group_id != group_id:
            self.here[seat.group_id].discard(seat.request_id)
            self.here[group_id].add(seat.request_id)
            seat.group_id = group_id
            seat.pool.packer.live_at(seat.request_id, group_id)

    def grip(self, seat: Seat, grip: Grip, *, lasts: bool = False) -> None:
        """Note whether the packing may move the request of this seat from now on. The packer is not told. ``lasts``: it
        need not be looked at again for that, and is not held for the price of its move."""
        seat.grip, is_held = grip, grip is Grip.HELD and not lasts
        for some, belongs in ((self.held, is_held), (self.restless, is_held or grip is Grip.PINNED)):
            (some.add if belongs else some.discard)(seat.request_id)

    def resize(self, seat: Seat, resize: Resize) -> None:
        """Set the size of a seat. The packer is not told."""
        seat.pool.num_reserved += resize.num_blocks - seat.num_blocks
        seat.num_blocks, seat.growth_blocks = resize.num_blocks, resize.growth_blocks

    def in_order(self, request_ids: Iterable[RequestId]) -> list[Seat]:
        """The seats of those of these requests that have one, in the order in which they came to the packings."""
        found = [seat for r in request_ids if (seat := self.by_id.get(r)) is not None]
        return sorted(found, key=lambda seat: seat.number)

    def apply(self, pool: Pool) -> tuple[RequestId, ...]:
        """Have a pool's packer take in all pending operations, and note which requests may live elsewhere than they
        should now. Returns the arrivals for which no group has room; empty: none."""
        batch, pool.batch = pool.batch, []
        if not batch:
            return ()
        plan = pool.packer.apply(batch)
        if plan.opened or plan.closed:
            pool.fastest_per_s = None
        self.astray.update(operation.request_id for operation in batch if isinstance(operation, Arrive))
        self.astray.update(move.request_id for move in (*plan.moves, *plan.recomputed))
        return plan.unplaced

    def check(self) -> None:
        """The sets agree with the seats. Raises AssertionError otherwise."""
        for request_id, seat in self.by_id.items():
            assert seat.request_id == request_id and request_id in self.here[seat.group_id], seat
        assert self.held <= {r for r, seat in self.by_id.items() if seat.grip is Grip.HELD}, "held"
        pinned = {r for r, seat in self.by_id.items() if seat.grip is Grip.PINNED}
        assert self.restless == self.held | pinned, "restless"


def arrival(pool: Pool, size: Resize, device: GroupId | None = None) -> Arrive:
    """The operation by which a request of this size comes to a pool's packing, with the prefix that it shares.
    ``device``: the group where it lives already; None: the packing chooses one."""
    request_id, num_blocks, growth = size
    arrive = Arrive(request_id, num_blocks, device, here=device, growth_blocks=growth)
    if (shared := pool.prefixes.shared(request_id)) is None:
        return arrive
    return arrive._replace(share_key=shared.key, shared_blocks=min(shared.num_blocks, num_blocks))


def arrival_again(seat: Seat, device: GroupId) -> Arrive:
    """The operation by which a request that has a seat comes to its packing once more, to live in the given group, with
    its present grip."""
    again = arrival(seat.pool, Resize(seat.request_id, seat.num_blocks, seat.growth_blocks), device)
    return again._replace(grip=seat.grip, here=seat.group_id)

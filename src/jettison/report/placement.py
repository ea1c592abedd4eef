"""The devices that requests would need under each packing: their sizes, replayed epoch by epoch through pure policies.

A fluid model for sweeps and bills: every request arrives, grows and ends at given times, the same under every policy; a
move takes no time; and there are as many devices as needed. The cost of moves and the effect of queues need a
simulation. Nothing here draws or prints.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jettison.policy.packing.bounds import first_fit_decreasing, l2_bound, volume_bound
from jettison.policy.packing.closing import plan_closing
from jettison.policy.packing.named import PACKERS, PackerMaker
from jettison.policy.packing.reserve import ReserveParams, growth_blocks, reserved_blocks
from jettison.policy.packing.types import Arrive, Depart, Grip, Operation, Packer, PackingParams, PackMove, Resize
from jettison.types import RequestId

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


LEAST_LIFE_S = 1e-9
"""A shorter time is none on a clock of nanoseconds."""


class Life(NamedTuple):
    """The KV of a request over time. Seconds since the start."""

    arrival_s: float
    first_s: float
    """Time of its first token, from which on it grows."""
    end_s: float
    input_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    """Most output tokens that it may write, as known to the packer; None: not known."""

    @property
    def tokens_per_s(self) -> float:
        """Rate of its growth; 0 of one that ended as it began."""
        lasted_s = self.end_s - self.first_s
        return self.output_tokens / lasted_s if lasted_s >= LEAST_LIFE_S else 0.0

    def tokens_at(self, at_s: float) -> float:
        """KV tokens at a time: its prompt from its arrival on, and all of its tokens at its end."""
        if at_s >= self.end_s:
            return self.input_tokens + self.output_tokens
        return self.input_tokens + max(0.0, at_s - self.first_s) * self.tokens_per_s


@dataclass(frozen=True, slots=True)
class Demand:
    """The operations of each epoch, the same for every packing, and the sizes of the requests."""

    capacity: int
    """Blocks of a device."""
    epoch_s: float
    batches: list[list[Operation]] = field(default_factory=list)
    """Operations of each epoch, in their order."""
    sizes: list[list[int]] = field(default_factory=list)
    """Reserved blocks of each request, in each epoch."""
    held_blocks: list[int] = field(default_factory=list)
    """Blocks that all requests hold in the middle of each epoch."""
    num_cut: int = 0
    """Requests larger than a device: each counts as one that fills it."""

    @property
    def times_s(self) -> Floats:
        """Begin of each epoch."""
        return np.asarray(np.arange(len(self.batches)) * self.epoch_s, dtype=np.float64)

    def volume(self) -> Counts:
        """The volume bound of each epoch, on reserved blocks."""
        return np.array([volume_bound(sizes, self.capacity) for sizes in self.sizes], dtype=np.int64)

    def l2(self) -> Counts:
        """Martello and Toth's bound of each epoch, on reserved blocks."""
        return np.array([l2_bound(sizes, self.capacity) for sizes in self.sizes], dtype=np.int64)

    def repacked(self, every: int = 1) -> Counts:
        """Devices of a full repack by first-fit decreasing, in every ``every``-th epoch: the result of an oracle with
        free moves."""
        return np.array([first_fit_decreasing(sizes, self.capacity) for sizes in self.sizes[::every]], dtype=np.int64)


def demand_of(
    lives: Sequence[Life], capacity_tokens: int, *, block_size: int = 16, epoch_s: float = 1.0,
    until_s: float | None = None, ahead_s: float | None = None,
) -> Demand:
    """The operations of requests by epoch, up to ``until_s`` (None: until all have ended).

    A request counts in every epoch of its life, at no less than its size at the end of the epoch. A new reserve covers
    its growth in ``ahead_s`` more (None: four epochs). Raises ValueError where a device holds no block, or ``epoch_s``
    is not above 0.
    """
    capacity = capacity_tokens // block_size
    demand = Demand(capacity, epoch_s, num_cut=sum(_blocks(life, math.inf, block_size) > capacity for life in lives))
    if capacity < 1 or epoch_s <= 0.0:
        raise ValueError(f"devices of {capacity_tokens} tokens in blocks of {block_size}, epochs of {epoch_s} s")
    params = ReserveParams(epoch_s=epoch_s, ahead_s=4.0 * epoch_s if ahead_s is None else ahead_s)
    ends_s = max((life.end_s for life in lives), default=0.0) if until_s is None else until_s
    coming = sorted(range(len(lives)), key=lambda i: (lives[i].arrival_s, i))
    alive: dict[int, int] = {}
    at = 0
    for epoch in range(math.floor(ends_s / epoch_s) + 1):
        start_s, end_s = epoch * epoch_s, (epoch + 1) * epoch_s
        timed: list[tuple[float, int, Operation]] = []
        for i in [i for i in alive if lives[i].end_s < start_s]:
            del alive[i]
            timed.append((lives[i].end_s, i, Depart(str(i))))
        for i, reserved in alive.items():
            if (needed := min(capacity, _blocks(lives[i], end_s, block_size))) > reserved:
                alive[i] = _reserved(lives[i], needed, block_size, capacity, params)
                timed.append((start_s, i, Resize(str(i), alive[i], _growth(lives[i], block_size, params))))
        while at < len(coming) and lives[coming[at]].arrival_s < end_s:
            i = coming[at]
            at += 1
            needed = min(capacity, _blocks(lives[i], end_s, block_size))
            alive[i] = _reserved(lives[i], needed, block_size, capacity, params)
            growth = _growth(lives[i], block_size, params)
            timed.append((lives[i].arrival_s, i, Arrive(str(i), alive[i], growth_blocks=growth)))
        demand.batches.append([operation for _, _, operation in sorted(timed, key=lambda entry: entry[:2])])
        demand.sizes.append(list(alive.values()))
        middle_s = (start_s + end_s) / 2.0
        demand.held_blocks.append(sum(
            min(capacity, _blocks(lives[i], middle_s, block_size))
            for i in alive if lives[i].arrival_s <= middle_s < lives[i].end_s
        ))  # fmt: skip
    return demand


def _reserved(life: Life, needed: int, block_size: int, capacity: int, params: ReserveParams) -> int:
    most = None if life.max_tokens is None else math.ceil((life.input_tokens + life.max_tokens) / block_size)
    return reserved_blocks(needed, life.tokens_per_s / block_size, capacity, params, most)


def _growth(life: Life, block_size: int, params: ReserveParams) -> int:
    return growth_blocks(life.tokens_per_s / block_size, params)


def _blocks(life: Life, at_s: float, block_size: int) -> int:
    return max(1, math.ceil(life.tokens_at(at_s) / block_size))


@dataclass(frozen=True, slots=True)
class Placed:
    """The result of a packing, epoch by epoch."""

    demand: Demand
    devices: Counts
    """Devices in use in each epoch."""
    moves: list[tuple[PackMove, ...]]
    """Moves of running requests in each epoch."""
    num_items: int
    """Items in all moves, as the paper counts them: a multi-item is one."""
    num_recomputed: int
    """Requests that outgrew their device and were recomputed elsewhere."""
    num_overfull: int
    """Device-epochs over capacity: a request would have been preempted there."""

    @property
    def num_moves(self) -> int:
        """Of requests."""
        return sum(map(len, self.moves))

    @property
    def moves_per_s(self) -> float:
        """Of requests."""
        return self.num_moves / (len(self.devices) * self.demand.epoch_s)

    @property
    def mean_devices(self) -> float:
        """Mean over time of the devices in use."""
        return float(self.devices.mean()) if self.devices.size else 0.0

    @property
    def peak_devices(self) -> int:
        """Most devices in use at one time (eq. 3)."""
        return int(self.devices.max(initial=0))

    @property
    def device_s(self) -> float:
        """Device-seconds in use."""
        return float(self.devices.sum()) * self.demand.epoch_s

    @property
    def utilisation(self) -> float | None:
        """Share of the KV memory of the devices in use that requests hold, over time; None where no device was in
        use."""
        blocks = int(self.devices.sum()) * self.demand.capacity
        return sum(self.demand.held_blocks) / blocks if blocks else None


def packer_for(
    demand: Demand, name: str, *, fill: float | None = None, num_devices: int | None = None,
    makers: Mapping[str, PackerMaker] = PACKERS,
) -> Packer:
    """The packing of this name on ``num_devices`` (None: as many as needed), without shared prefixes.

    ``makers``: the packings by name. ``fill``: as in ``PackingParams``; None: its default. Raises KeyError for an
    unknown name.
    """
    params = PackingParams(capacity=demand.capacity, shares_prefixes=False)
    if fill is not None:
        params = replace(params, fill=fill)
    return makers[name](params, None if num_devices is None else range(num_devices))


def place(demand: Demand, packer: Packer, *, holds: bool = False, closes_every: int | None = None) -> Placed:
    """Replay the epochs. ``holds``: a running request is moved only where its device overflows, never to pack better.
    ``closes_every``: after every so many epochs requests are also moved where that closes a device
    (``--packing-gather close``)."""
    devices: list[int] = []
    moves: list[tuple[PackMove, ...]] = []
    num_items = num_recomputed = num_overfull = 0
    for batch in demand.batches:
        plan = packer.apply(batch)
        moves.append(plan.moves)
        num_items += plan.num_item_moves
        num_recomputed += len(plan.recomputed)
        num_overfull += len(plan.overfull)
        for operation in batch if holds else ():
            if isinstance(operation, Arrive):
                packer.pin(operation.request_id, Grip.HELD)
        if closes_every is not None and len(moves) % closes_every == 0:
            moves[-1] += _close(packer, demand.capacity)
        devices.append(len(packer.active))
    return Placed(demand, np.array(devices, dtype=np.int64), moves, num_items, num_recomputed, num_overfull)


def _close(packer: Packer, capacity: int) -> tuple[PackMove, ...]:
    """Close devices for as long as one can be closed."""
    made: list[PackMove] = []
    while moves := plan_closing({device: packer.requests_on(device) for device in packer.active}, capacity):
        batch = [Depart(move.request_id) for move in moves]
        packer.apply([*batch, *(Arrive(m.request_id, m.num_blocks, m.destination, grip=Grip.HELD) for m in moves)])
        made += moves
    return tuple(made)


def num_kept(demand: Demand, packer: Packer) -> int:
    """Number of requests that the packer's fixed devices serve with their KV in memory from begin to end.

    A request that finds no room is turned away. A device that overflows, and can move no request elsewhere, gives up
    its newest requests. A request that outgrows its device is given up, too, where running requests do not move.
    """
    gone: set[RequestId] = set()
    for batch in demand.batches:
        plan = packer.apply([operation for operation in batch if operation.request_id not in gone])
        gone.update(plan.unplaced)
        lost = {move.request_id for move in plan.recomputed}
        for device in plan.overfull:
            on_it = packer.requests_on(device)
            over = sum(on_it.values()) - demand.capacity
            for request_id in sorted(on_it.keys() - lost, key=int, reverse=True):
                if over > 0:
                    lost.add(request_id)
                    over -= on_it[request_id]
        packer.apply([Depart(request_id) for request_id in sorted(lost, key=int)])
        gone |= lost
    return len({operation.request_id for batch in demand.batches for operation in batch} - gone)


def late_share(placed: Placed, block_bytes: int, devices_per_machine: int, bytes_per_s: float, tokens: int) -> float:
    """Share of the moves that the boundaries of their epoch (MELL, section V) would delay, each epoch taken by itself.

    Between machines a move goes as KV while the links of both ends have bytes left, else as tokens while the
    destination has prefill tokens left (``tokens``: that budget of an epoch, in blocks). Moves inside a machine are
    never late.
    """
    late = 0
    for moves in placed.moves:
        sent: defaultdict[int, float] = defaultdict(float)
        computed: defaultdict[int, int] = defaultdict(int)
        for move in sorted(moves, key=lambda m: m.num_blocks):
            ends = {move.source // devices_per_machine, move.destination // devices_per_machine}
            if len(ends) == 1:
                continue
            num_bytes = move.num_blocks * block_bytes
            if all(sent[end] + num_bytes <= bytes_per_s * placed.demand.epoch_s for end in ends):
                for end in ends:
                    sent[end] += num_bytes
            elif computed[move.destination] + move.num_blocks <= tokens:
                computed[move.destination] += move.num_blocks
            else:
                late += 1
    return late / placed.num_moves if placed.num_moves else 0.0


def gap_closed(worse: float, better: float, bound: float) -> float | None:
    """Share of the gap from ``worse`` to ``bound`` that ``better`` closes; None where there is no gap."""
    return (worse - better) / (worse - bound) if worse > bound else None

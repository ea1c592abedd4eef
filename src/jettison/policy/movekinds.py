"""How each of an epoch's moves goes: as KV, through ports, or as tokens, which its destination computes (MELL section
V). Pure.

Two kinds of bins: a port (a worker's own, or the network card of a machine) carries so many bytes an epoch without
disturbing those who decode at its ends, a destination prefills so many tokens beside its batch (*boundaries*; measured
by ``jettison profile``). All moves of the cluster are divided at once, each into the bins of one kind, so that what
moves share is not overrun (Fig. 9: two sources behind one card); what fits neither waits. A move has another size in
either kind of bin, and grows while it goes: its request decodes on.

    order         what has waited longest first, then as given
    fits          its bins have room for all of it. What is larger than a bin's whole bound would never go: it may
                  where what the bin has left is less than an epoch's, and nothing else begins there until that is so
                  again
    keeps place   what has waited and fits nowhere: who comes behind it takes no room in the bins that it waits for
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.links import PortId
from jettison.types import GroupId, RequestId

SOONER = 1.5
"""How many times as long as its rest would take as KV a move under way must still take as tokens, to go on as KV: both
are estimates."""

MAX_FINAL_BLOCKS = 16
"""Sent while a request stands still, at most (MELL section V, after Llumnix)."""

BinId = PortId | GroupId
"""A port, which takes bytes, or a destination, which takes tokens."""


class Fit(StrEnum):
    """Which kind a move takes where both have room for it."""

    FIRST = "first-fit"
    """KV: ports are asked first."""
    BEST = "best-fit"
    """The one whose bins it fills up most. Bins as they are in textbooks: a wide move goes where it is widest."""
    SOONEST = "soonest"
    """The one in which it is done first, behind what goes and waits before it, be it later than the other's beginning:
    our own. The other two begin what they can, though it take ten epochs one way and one the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveParams:
    """How moves are divided."""

    fit: Fit = Fit.SOONEST
    epoch_s: float = 1.0
    slowdown: float = 0.5
    """By which part of its time a step may last longer for moves: what TPOT may lose while requests move."""
    stop_s: float = 0.2
    """How long a request may stand still while its last blocks travel: about what a reader notices."""


class Move(NamedTuple):
    """A running request that is to go to another group."""

    request_id: RequestId
    destination: GroupId
    num_blocks: int
    """Of its KV."""
    port_bytes: Mapping[PortId, int]
    """Its KV by the ports that it goes through; > 0."""
    num_tokens: int
    """That its destination would have to compute."""
    growth: float = 0.0
    """By which part of this it grows in an epoch."""
    num_waited: int = 0
    """Epochs in which it fitted nowhere."""
    may_kv: bool = True
    may_tokens: bool = True


class LinkBin(NamedTuple):
    """What a port or a destination takes."""

    bound: float | None
    """Bytes or tokens an epoch; 0: none. None: not known, so it takes one move, which measures it."""
    queued: float = 0.0
    """Left of what has begun in earlier epochs."""
    per_s: float | None = None
    """Of a port: bytes a second as they go while nothing else does; None: not known."""


class Choice(NamedTuple):
    """One move begins."""

    request_id: RequestId
    kind: MigrationKind
    num_final_blocks: int = MAX_FINAL_BLOCKS
    """``kv``: the most that its last round may have."""


class Division(NamedTuple):
    """An epoch's moves: every one is in one of the two."""

    chosen: tuple[Choice, ...]
    waiting: tuple[RequestId, ...]
    """For the next epoch, in the order in which they will be looked at."""


class _Way(NamedTuple):
    """One kind of going, as it stands for one move."""

    kind: MigrationKind
    needs: Mapping[BinId, float]
    num_final_blocks: int = MAX_FINAL_BLOCKS


def final_blocks(move: Move, ports: Mapping[PortId, LinkBin], params: MoveParams) -> int:
    """Blocks that may travel while the request stands still: what its slowest port carries in ``stop_s``, at most
    ``MAX_FINAL_BLOCKS``; 0 where not even one block does. One of unknown rate is taken to carry them."""
    most = MAX_FINAL_BLOCKS
    for port, num_bytes in move.port_bytes.items():
        per_s = ports[port].per_s
        if per_s is not None:
            most = min(most, int(params.stop_s * per_s * move.num_blocks / num_bytes))
    return most


def divide_moves(
    moves: Iterable[Move], ports: Mapping[PortId, LinkBin], destinations: Mapping[GroupId, LinkBin], params: MoveParams
) -> Division:
    """Which moves begin in this epoch, and how. ``ports`` and ``destinations``: at least those that moves name.

    No bin is given more than its bound, but by one move that is larger than that, or, with ``soonest``, by the last.
    All that could arrive at all begins at last, as long as what has begun is done at the rate of the bounds.
    """
    bins: list[tuple[BinId, LinkBin]] = [*ports.items(), *destinations.items()]
    rooms = _Rooms(dict(bins))
    chosen: list[Choice] = []
    waiting: list[RequestId] = []
    for move in sorted(moves, key=lambda m: -m.num_waited):
        ways = list(_ways(move, rooms, final_blocks(move, ports, params)))
        preferred = _preferred(ways, rooms, params.fit)
        way = next((way for way in preferred if rooms.take(way.needs, params.fit is Fit.SOONEST)), None)
        if way is not None:
            rooms.add(way.needs)
            chosen.append(Choice(move.request_id, way.kind, way.num_final_blocks))
            continue
        waiting.append(move.request_id)
        if ways and (move.num_waited or params.fit is Fit.SOONEST):
            rooms.keep(min(ways, key=lambda way: rooms.fill(way.needs)).needs)
    return Division(tuple(chosen), tuple(waiting))


def rest_as_kv(
    move: Move, ports: Mapping[PortId, LinkBin], destinations: Mapping[GroupId, LinkBin], params: MoveParams
) -> int:
    """The last round of a move that is under way as tokens, were what is missing to go as KV; 0: it goes on as tokens.

    ``move``: what is missing; ``destinations``: without it. It changes over where its ports have room, and would bring
    it ``SOONER``: as it began the other moves had the ports, or its destination's batch was smaller.
    """
    rooms = _Rooms(dict([*ports.items(), *destinations.items()]))
    ways = {way.kind: way for way in _ways(move, rooms, final_blocks(move, ports, params))}
    kv, tokens = ways.get(MigrationKind.KV), ways.get(MigrationKind.TOKENS)
    if kv is None or any(ports[port].bound is None for port in move.port_bytes) or not rooms.take(kv.needs, True):
        return 0
    if tokens is not None and rooms.fill(tokens.needs) < SOONER * rooms.fill(kv.needs):
        return 0
    return kv.num_final_blocks


def _ways(move: Move, rooms: _Rooms, num_final_blocks: int) -> Iterator[_Way]:
    """The kinds in which it would ever arrive."""
    if move.may_kv and num_final_blocks:
        needs = rooms.grown({port: float(n) for port, n in move.port_bytes.items()}, move.growth)
        if needs is not None:
            yield _Way(MigrationKind.KV, needs, num_final_blocks)
    if move.may_tokens:
        needs = rooms.grown({move.destination: float(move.num_tokens)}, move.growth)
        if needs is not None:
            yield _Way(MigrationKind.TOKENS, needs)


def _preferred(ways: Sequence[_Way], rooms: _Rooms, fit: Fit) -> Sequence[_Way]:
    """Those that may be taken, the best first; KV before tokens where they are alike."""
    match fit:
        case Fit.FIRST:
            return ways
        case Fit.BEST:
            return sorted(ways, key=lambda way: -rooms.fill(way.needs))
        case Fit.SOONEST:
            return sorted(ways, key=lambda way: rooms.fill(way.needs))[:1]


class _Rooms:
    """What the bins have been given so far."""

    def __init__(self, bins: Mapping[BinId, LinkBin]) -> None:
        self._bins = bins
        self._given: dict[BinId, float] = {name: found.queued for name, found in bins.items()}
        self._kept: set[BinId] = set()
        """For those who wait."""

    def grown(self, needs: Mapping[BinId, float], growth: float) -> Mapping[BinId, float] | None:
        """With what is added while it goes; None where some bin takes nothing, or takes less than is added.

        Of a need n that grows by g n an epoch a bin takes b an epoch: all of it takes n / (b - g n) epochs.
        """
        result: dict[BinId, float] = {}
        for name, need in needs.items():
            bound = self._bins[name].bound
            if bound is None:
                result[name] = need
            elif growth * need >= bound:
                return None
            else:
                result[name] = need / (1.0 - growth * need / bound)
        return result

    def take(self, needs: Mapping[BinId, float], may_overrun: bool) -> bool:
        """Whether there is room in all of them. ``may_overrun``: for any where less than an epoch's has been given."""
        return self._kept.isdisjoint(needs) and all(
            self._takes(name, need, may_overrun) for name, need in needs.items()
        )

    def _takes(self, name: BinId, need: float, may_overrun: bool) -> bool:
        bound, given = self._bins[name].bound, self._given[name]
        if bound is None:
            return given <= 0.0
        return given + need <= bound or ((may_overrun or need > bound) and given < bound)

    def fill(self, needs: Mapping[BinId, float]) -> float:
        """Epochs until the fullest of them has taken this and all before it; an unknown one counts as done at once: the
        first move through a port measures it."""
        return max((self._epochs(name, need) for name, need in needs.items()), default=0.0)

    def _epochs(self, name: BinId, need: float) -> float:
        bound = self._bins[name].bound
        if bound is None:
            return math.inf if self._given[name] > 0.0 else 0.0
        return (self._given[name] + need) / bound

    def add(self, needs: Mapping[BinId, float]) -> None:
        """It begins."""
        for name, need in needs.items():
            self._given[name] += need

    def keep(self, needs: Mapping[BinId, float]) -> None:
        """It waits for these: nothing else begins there, and all that comes later is done later."""
        self._kept |= needs.keys()
        self.add(needs)

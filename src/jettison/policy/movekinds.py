"""How each of an epoch's moves goes: as KV, through ports, or as tokens, which its destination computes (MELL section
V). Pure.

There are two kinds of bins. A port (a worker's own, or the network card of a machine) carries a number of bytes an
epoch without disturbing the decodes at its ends. A destination prefills a number of tokens an epoch beside its batch.
Both bounds (*boundaries*) are measured by ``jettison profile``. All moves of the cluster are divided at once, each into
the bins of one kind, so that no port that several moves share is overrun (Fig. 9: two sources behind one card). A move
that fits neither kind waits. A move's size differs between the two kinds, and grows while it goes: its request decodes
on.

    order         the move that has waited longest first, then as given
    fits          its bins have room for all of it. A move larger than a bin's whole bound would never fit: it may go
                  where the bin has been given less than an epoch's bound, and nothing else begins there until that is
                  so again
    keeps place   a move that has waited and fits nowhere: later moves take no room in the bins that it waits for
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
"""A move under way as tokens changes to KV only where its rest takes so many times as long as tokens: both times are
estimates."""

MAX_FINAL_BLOCKS = 16
"""Most blocks sent while a request stands still (MELL section V, after Llumnix)."""

BinId = PortId | GroupId
"""A port, which takes bytes, or a destination, which takes tokens."""


class Fit(StrEnum):
    """Which kind a move takes where both have room for it."""

    FIRST = "first-fit"
    """KV: ports are asked first."""
    BEST = "best-fit"
    """The kind whose bins the move fills up most. Bins as they are in textbooks: a wide move goes where it is
    widest."""
    SOONEST = "soonest"
    """The kind in which the move ends first, behind the moves that go or wait before it, even where the other kind
    could begin sooner: our own. The other two begin what they can, even where it takes ten epochs one way and one the
    other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveParams:
    """How moves are divided."""

    fit: Fit = Fit.SOONEST
    epoch_s: float = 1.0
    slowdown: float = 0.5
    """Share of its time by which moves may make a step longer: what TPOT may lose while requests move."""
    stop_s: float = 0.2
    """How long a request may stand still while its last blocks travel: about the shortest pause that a reader
    notices."""


class Move(NamedTuple):
    """A running request that is to go to another group."""

    request_id: RequestId
    destination: GroupId
    num_blocks: int
    """Of its KV."""
    port_bytes: Mapping[PortId, int]
    """Bytes of its KV, by the ports that it goes through; > 0."""
    num_tokens: int
    """Tokens that its destination would have to compute."""
    growth: float = 0.0
    """Share of its size by which it grows in an epoch."""
    num_waited: int = 0
    """Epochs in which it fitted nowhere."""
    may_kv: bool = True
    may_tokens: bool = True


class LinkBin(NamedTuple):
    """What a port or a destination takes."""

    bound: float | None
    """Bytes or tokens an epoch; 0: none. None: not known, so the bin takes one move, which measures it."""
    queued: float = 0.0
    """Bytes or tokens left of moves that have begun in earlier epochs."""
    per_s: float | None = None
    """Of a port: bytes a second that it carries while no other transfer does; None: not known."""


class Choice(NamedTuple):
    """One move begins."""

    request_id: RequestId
    kind: MigrationKind
    num_final_blocks: int = MAX_FINAL_BLOCKS
    """As KV: most blocks of its last round."""


class Division(NamedTuple):
    """An epoch's moves: every one is in one of the two."""

    chosen: tuple[Choice, ...]
    waiting: tuple[RequestId, ...]
    """Requests for the next epoch, in the order in which they will be looked at."""


class _Way(NamedTuple):
    """One kind in which a move could go, and what it needs of which bins."""

    kind: MigrationKind
    needs: Mapping[BinId, float]
    num_final_blocks: int = MAX_FINAL_BLOCKS


def final_blocks(move: Move, ports: Mapping[PortId, LinkBin], params: MoveParams) -> int:
    """Blocks that may travel while the request stands still: what its slowest port carries in ``stop_s``, at most
    ``MAX_FINAL_BLOCKS``; 0 where it carries not even one. A port of unknown rate is assumed to carry all of them."""
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

    A bin is given more than its bound only by one move that is larger than the bound or, with ``soonest``, by its last
    move. Every move that could ever arrive begins in some epoch, as long as moves under way progress at the rate of the
    bounds.
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
    """For a move under way as tokens: most blocks of its last round if its rest changes over to KV; 0: it goes on as
    tokens.

    ``move``: the rest; ``destinations``: bins without it. It changes over where its ports have room and KV is faster by
    the factor ``SOONER``. When it began, other moves may have had the ports, or its destination's batch was smaller.
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
    """The kinds in which the move would ever arrive."""
    if move.may_kv and num_final_blocks:
        needs = rooms.grown({port: float(n) for port, n in move.port_bytes.items()}, move.growth)
        if needs is not None:
            yield _Way(MigrationKind.KV, needs, num_final_blocks)
    if move.may_tokens:
        needs = rooms.grown({move.destination: float(move.num_tokens)}, move.growth)
        if needs is not None:
            yield _Way(MigrationKind.TOKENS, needs)


def _preferred(ways: Sequence[_Way], rooms: _Rooms, fit: Fit) -> Sequence[_Way]:
    """The kinds that may be taken, the best first; KV before tokens where they are alike."""
    match fit:
        case Fit.FIRST:
            return ways
        case Fit.BEST:
            return sorted(ways, key=lambda way: -rooms.fill(way.needs))
        case Fit.SOONEST:
            return sorted(ways, key=lambda way: rooms.fill(way.needs))[:1]


class _Rooms:
    """Bins, and the bytes or tokens that each has been given so far."""

    def __init__(self, bins: Mapping[BinId, LinkBin]) -> None:
        self._bins = bins
        self._given: dict[BinId, float] = {name: found.queued for name, found in bins.items()}
        self._kept: set[BinId] = set()
        """Bins kept for moves that wait."""

    def grown(self, needs: Mapping[BinId, float], growth: float) -> Mapping[BinId, float] | None:
        """The needs, with what the move grows by while it goes; None where some bin takes nothing, or takes less than
        is added.

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
        """Whether all of these bins have room. ``may_overrun``: a bin has room as long as it has been given less than
        its bound."""
        return self._kept.isdisjoint(needs) and all(
            self._takes(name, need, may_overrun) for name, need in needs.items()
        )

    def _takes(self, name: BinId, need: float, may_overrun: bool) -> bool:
        bound, given = self._bins[name].bound, self._given[name]
        if bound is None:
            return given <= 0.0
        return given + need <= bound or ((may_overrun or need > bound) and given < bound)

    def fill(self, needs: Mapping[BinId, float]) -> float:
        """Epochs until the fullest of these bins has taken this need and all before it. The first move through a bin of
        unknown bound counts as done at once, as it measures the bin; any further one as never done."""
        return max((self._epochs(name, need) for name, need in needs.items()), default=0.0)

    def _epochs(self, name: BinId, need: float) -> float:
        bound = self._bins[name].bound
        if bound is None:
            return math.inf if self._given[name] > 0.0 else 0.0
        return (self._given[name] + need) / bound

    def add(self, needs: Mapping[BinId, float]) -> None:
        """A move begins: count its needs."""
        for name, need in needs.items():
            self._given[name] += need

    def keep(self, needs: Mapping[BinId, float]) -> None:
        """A move waits for these bins: no other begins there, and its needs count as ahead of all later moves."""
        self._kept |= needs.keys()
        self.add(needs)

"""In which order the moves of a plan can be made, when every destination must have room before its source is freed.

*Desired* and *actual* placement are two things: a packing says where requests should live, and this module says how to
get there from where they live. Pure.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from jettison.policy.packing.types import PackMove
from jettison.types import GroupId, RequestId


class MoveMode(Enum):
    """How a step is made."""

    LIVE = "live"
    """Both ends hold the blocks until it ends."""
    OUT = "out"
    """Out of a cycle for which no device has room: its source gives the blocks up (they go to the host, or the request
    is computed again from its tokens), and no device holds them until IN."""
    IN = "in"
    """Back from the host, or from tokens, to its destination."""


@dataclass(frozen=True, slots=True)
class Step:
    """One transfer. The transfers of a wave may all be under way at once; a wave begins when the one before has
    ended."""

    wave: int
    move: PackMove
    """OUT: its destination is not touched; IN: nor its source."""
    way: MoveMode = MoveMode.LIVE


@dataclass(frozen=True, slots=True)
class Order:
    """Steps by wave, and the moves whose destinations have no room even when all other moves are made."""

    steps: tuple[Step, ...]
    waiting: tuple[PackMove, ...]


class _Rooms:
    """Free blocks, and the moves that wait for each device, the smallest first."""

    def __init__(self, moves: Sequence[PackMove], free: Mapping[GroupId, int]) -> None:
        self.free = defaultdict(int, free)
        self.queues: defaultdict[GroupId, list[tuple[int, int, PackMove, MoveMode]]] = defaultdict(list)
        self._count = 0
        for move in moves:
            self.add(move, MoveMode.LIVE)

    def add(self, move: PackMove, way: MoveMode) -> None:
        self._count += 1
        heapq.heappush(self.queues[move.destination], (move.num_blocks, self._count, move, way))

    def next_wave(self, wave: int) -> list[Step]:
        """All moves that fit now; the blocks that they free count from the next wave on."""
        steps = []
        freed: defaultdict[GroupId, int] = defaultdict(int)
        for device in sorted(self.queues):
            queue = self.queues[device]
            while queue and queue[0][0] <= self.free[device]:
                num_blocks, _, move, way = heapq.heappop(queue)
                self.free[device] -= num_blocks
                if way is MoveMode.LIVE:
                    freed[move.source] += num_blocks
                steps.append(Step(wave, move, way))
        for device, num_blocks in freed.items():
            self.free[device] += num_blocks
        return steps

    def stuck(self) -> PackMove:
        """A move that lets another in: the smallest one out of a device that another move waits for."""
        wanted = {device for device, queue in self.queues.items() if queue}
        queued = (entry for queue in self.queues.values() for entry in queue)
        return min((e for e in queued if e[3] is MoveMode.LIVE and e[2].source in wanted), key=lambda e: e[:2])[2]

    def replace(self, move: PackMove, by: PackMove, way: MoveMode) -> None:
        """A waiting move goes on as another: from elsewhere, or the other way."""
        queue = self.queues[move.destination]
        queue[:] = [entry for entry in queue if entry[2] is not move]
        heapq.heapify(queue)
        self.add(by, way)


def order_moves(moves: Sequence[PackMove], free: Mapping[GroupId, int], spares: Sequence[GroupId] = ()) -> Order:
    """Steps that never exceed any device's free blocks, and make every move for which there is room in the end.

    A cycle is broken at its smallest request: by way of one of ``spares`` with room (idle devices, say, with their
    free blocks in ``free``), once, else OUT and IN. Raises ValueError where a request moves twice.
    """
    if len({move.request_id for move in moves}) < len(moves):
        raise ValueError("a request moves twice")
    possible, waiting = _split_possible(moves, free)
    rooms = _Rooms(possible, free)
    steps: list[Step] = []
    aside: set[RequestId] = set()
    wave = 0
    while any(rooms.queues.values()):
        made = rooms.next_wave(wave)
        if not made:
            # Every move has room once all sources are free, so some move waits for blocks that a waiting request holds.
            move = rooms.stuck()
            made = [_step_aside(rooms, move, () if move.request_id in aside else spares, wave)]
            aside.add(move.request_id)
        steps += made
        wave += 1
    return Order(tuple(steps), tuple(waiting))


def _split_possible(moves: Sequence[PackMove], free: Mapping[GroupId, int]) -> tuple[list[PackMove], list[PackMove]]:
    """Moves with room once all of them are made; and the moves that a full destination leaves out, the largest
    first."""
    left = defaultdict(int, free)
    into: defaultdict[GroupId, list[PackMove]] = defaultdict(list)
    for move in sorted(moves, key=lambda m: m.num_blocks):
        left[move.destination] -= move.num_blocks
        left[move.source] += move.num_blocks
        into[move.destination].append(move)
    dropped: list[PackMove] = []
    short = [device for device in sorted(left) if left[device] < 0]
    while short:
        device = short.pop()
        while left[device] < 0 and into[device]:
            move = into[device].pop()
            dropped.append(move)
            left[device] += move.num_blocks
            left[move.source] -= move.num_blocks
            if left[move.source] < 0:
                short.append(move.source)
    gone = {move.request_id for move in dropped}
    return [move for move in moves if move.request_id not in gone], dropped


def _step_aside(rooms: _Rooms, move: PackMove, spares: Sequence[GroupId], wave: int) -> Step:
    rooms.free[move.source] += move.num_blocks
    for spare in spares:
        if rooms.free[spare] >= move.num_blocks and spare not in (move.source, move.destination):
            rooms.free[spare] -= move.num_blocks
            rooms.replace(move, move._replace(source=spare), MoveMode.LIVE)
            return Step(wave, move._replace(destination=spare))
    rooms.replace(move, move, MoveMode.IN)
    return Step(wave, move, MoveMode.OUT)

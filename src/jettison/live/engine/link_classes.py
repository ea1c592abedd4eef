"""What networks between hosts carry, measured at the start, when nothing else is on the way: pairs of hosts one after
the other, and those that have no host in common at one time.

A probe is KV that one worker sends to another, as a move sends it, into blocks that no request has yet. It is sent
again and twice as large until it has taken ``SPAN_S``, so that neither the opening of the link nor its first round
trips, with small windows, count. The last one is sent once more, and the faster of the two counts: what disturbs a
probe only ever makes it slower.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jettison.core import ports
from jettison.errors import WorkerLostError
from jettison.live.wire import messages as m
from jettison.memory.stages import StagePlan
from jettison.policy.links import MachineId
from jettison.types import NANOSECONDS, LayerRange, WorkerId

log = logging.getLogger(__name__)

SPAN_S = 0.1
"""A probe of ten round trips at 10 ms."""
MAX_BLOCKS = 4096
"""Of a probe: their ids go in one message."""
PATIENCE_S = 10.0
"""For one probe of a pair; without an answer, the pair is as any whose network is not known."""
END_PATIENCE_S = 60.0
"""For the end of a probe that was called off."""
_FIRST_TRANSFER_ID = 1 << 60
"""Far above any id that the core gives."""

Pair = tuple[MachineId, MachineId]


class LinkMeter:
    """Between the workers' first steps and the first request."""

    def __init__(self, send: Callable[[WorkerId, m.Command], None]) -> None:
        self._send = send
        self._next_id = _FIRST_TRANSFER_ID
        self._waiting: dict[int, _Probe] = {}
        self._parted: set[tuple[WorkerId, WorkerId]] = set()
        """Which workers have told that their link to which peer is lost: when both ends have, what is on it is over."""

    async def measure(
        self, machine_of: Mapping[WorkerId, MachineId], stages: Sequence[StagePlan], capacity: Mapping[WorkerId, int]
    ) -> dict[Pair, float]:
        """Bytes per second from each machine to each other one. ``stages``: of workers that hold layers; a machine
        without one, and a pair without a layer in common, is left out. Raises WorkerLostError."""
        of = {machine_of[stage.worker_id]: stage for stage in reversed(stages)}
        found: dict[Pair, float] = {}
        for pairs in rounds(sorted(of)):
            for ways in (pairs, [(dst, src) for src, dst in pairs]):
                rates = await asyncio.gather(*(self._rate(of[src], of[dst], capacity) for src, dst in ways))
                found |= {pair: rate for pair, rate in zip(ways, rates, strict=True) if rate is not None}
        told = ", ".join(f"{src} to {dst} {8e-6 * rate:.0f} Mbit/s" for (src, dst), rate in sorted(found.items()))
        log.info("networks between hosts: %s", told)
        return found

    async def _rate(self, src: StagePlan, dst: StagePlan, capacity: Mapping[WorkerId, int]) -> float | None:
        layers = LayerRange(max(src.layers.lo, dst.layers.lo), min(src.layers.hi, dst.layers.hi))
        if layers.lo >= layers.hi:
            return None
        most, num_blocks = min(capacity[src.worker_id], capacity[dst.worker_id]), 1
        before: float | None = None
        while True:
            blocks = tuple(block % most for block in range(num_blocks))
            ended = await self._probe(src.worker_id, dst.worker_id, layers, blocks)
            if ended is None:
                if before is None:
                    log.warning("the network from worker %d to worker %d is not measured", src.worker_id, dst.worker_id)
                return before
            took_s = ended.duration_ns / NANOSECONDS
            if not ended.complete or not took_s:
                return before
            rate = ended.num_bytes / took_s
            if before is not None:
                return max(before, rate)
            if took_s >= SPAN_S or num_blocks >= MAX_BLOCKS:
                before = rate
            else:
                num_blocks = min(MAX_BLOCKS, 2 * num_blocks)

    async def _probe(
        self, src: WorkerId, dst: WorkerId, layers: LayerRange, blocks: tuple[int, ...]
    ) -> ports.TransferEnded | None:
        """A probe's end; None: it took too long, and was called off. It has an end in any case: one that went on would
        write into blocks that requests have by then."""
        transfer_id = self._next_id
        self._next_id += 1
        probe = self._waiting[transfer_id] = _Probe(src, dst, asyncio.get_running_loop().create_future())
        self._send(src, ports.SendKV(transfer_id, src, dst, layers, blocks, blocks, is_settled=True))
        try:
            await asyncio.wait([probe.ended], timeout=PATIENCE_S)
            if probe.ended.done():
                return probe.ended.result()
            self._send(src, ports.CancelTransfer(src, transfer_id))
            await asyncio.wait([probe.ended], timeout=END_PATIENCE_S)
            if not probe.ended.done():
                raise WorkerLostError(
                    f"the network from worker {src} to worker {dst} holds what was sent there for a minute and longer")
            probe.ended.result()  # raises where a worker is gone
            return None
        finally:
            del self._waiting[transfer_id]

    def on_event(self, event: m.Event) -> None:
        """A worker's answer."""
        if isinstance(event, ports.TransferEnded) and (probe := self._waiting.get(event.transfer_id)) is not None:
            probe.end(event)
        elif isinstance(event, ports.LinkLost):
            self._parted.add((event.worker_id, event.peer))
            for transfer_id, probe in self._waiting.items():
                if {(probe.src, probe.dst), (probe.dst, probe.src)} <= self._parted:
                    probe.end(ports.TransferEnded(transfer_id, False, 0, 0))

    def fail(self, reason: str) -> None:
        """A worker is gone."""
        for probe in self._waiting.values():
            if not probe.ended.done():
                probe.ended.set_exception(WorkerLostError(reason))


class _Probe(NamedTuple):
    """One under way."""

    src: WorkerId
    dst: WorkerId
    ended: asyncio.Future[ports.TransferEnded]

    def end(self, event: ports.TransferEnded) -> None:
        if not self.ended.done():
            self.ended.set_result(event)


def rounds(machines: Sequence[MachineId]) -> Iterator[list[Pair]]:
    """Every pair once; those of one round have no machine in common (the circle method of tournaments)."""
    circle: list[MachineId | None] = [*machines, *([None] if len(machines) % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        drawn = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in drawn if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]

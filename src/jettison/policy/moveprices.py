"""The cost of moves, and whether they are worth the devices that they save. Pure; beyond MELL, whose moves are free.

Costs are in request-seconds, as in ``policy.forecast``: the request stands still for its last round, decodes at either
end are slowed meanwhile, and what is on its way through the same ports comes later. Each second of each of these
requests counts once; the seconds by which a decode that is slower than its objective is slowed count by as much as it
is slower. On an idle link a move keeps no other transfer waiting.

A device-second serves as many request-seconds as a device has requests: this is the rate of exchange between the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

from jettison.cost.predictor import StepTimePredictor
from jettison.cost.stepwork import StepWork, step_of
from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.links import PortId


class MovePrice(NamedTuple):
    """The price of one move, in seconds."""

    stall_s: float
    """Seconds that the request stands still."""
    slowed_s: float
    """Request-seconds by which decodes of others are slowed, weighted by their objective."""
    waits_s: float
    """Request-seconds by which other transfers end later."""
    takes_s: float
    """Seconds that the move takes: only then is its source rid of the request."""

    @property
    def request_s(self) -> float:
        """What it costs all requests together."""
        return self.stall_s + self.slowed_s + self.waits_s


class End(NamedTuple):
    """A group that a move leaves, or comes to."""

    decodes: StepWork
    """One of its steps, without the move."""
    num_stages: int = 1


class PricedMove(NamedTuple):
    """A move as it would be made."""

    source: End
    destination: End
    port_bytes: Mapping[PortId, int]
    """As KV: bytes through each port."""
    num_tokens: int
    """As tokens: how many."""
    final_share: float
    """Share of its KV or tokens that goes while the request stands still, in 0 to 1."""
    step_tokens: int
    """As tokens: how many go into one step of the destination; >= 1."""


Queue = Mapping[Hashable, float]
"""Bytes at a port, by the request that waits for them, or the move of parameters."""


class MovePrices(NamedTuple):
    """The sources of prices."""

    predictor: StepTimePredictor
    port_bytes_per_s: Callable[[PortId], float | None]
    link_byte_s: float = 0.0
    """Seconds that a byte adds to a step at each end of its link."""
    queued_at: Callable[[PortId], Queue] = lambda port: {}
    """What other transfers send through a port now, or will in this epoch."""
    tpot_s: float | None = None
    """The objective for decodes; None: not known."""

    def weight(self, end: End) -> float:
        """Of a second by which a decode there is slowed: 1, or by how much it is slower than its objective."""
        step_s = self.predictor.predict_s(end.decodes, step_of(end.num_stages)) if end.decodes.num_rows else None
        return max(1.0, step_s / self.tpot_s) if step_s and self.tpot_s else 1.0


def price_move(move: PricedMove, kind: MigrationKind, prices: MovePrices) -> MovePrice | None:
    """The price of a move as this kind; None while too little is known of steps, or of its links."""
    return _price_kv(move, prices) if kind is MigrationKind.KV else _price_tokens(move, prices)


def _price_kv(move: PricedMove, prices: MovePrices) -> MovePrice | None:
    rates: dict[PortId, float] = {}
    for port in move.port_bytes:
        rate = prices.port_bytes_per_s(port)
        if rate is None:
            return None
        rates[port] = rate
    num_bytes = sum(amount for port, amount in move.port_bytes.items() if port.is_out)
    takes_s = max((amount / rates[port] for port, amount in move.port_bytes.items()), default=0.0)
    num_beside = max(0, move.source.decodes.num_rows - 1) * prices.weight(move.source)
    num_beside += move.destination.decodes.num_rows * prices.weight(move.destination)
    slowed_s = num_beside * prices.link_byte_s * num_bytes
    return MovePrice(move.final_share * takes_s, slowed_s, _waits_s(move, rates, prices), takes_s)


def _waits_s(move: PricedMove, rates: Mapping[PortId, float], prices: MovePrices) -> float:
    """Seconds by which others end later, together. Transfers share a port evenly: so one with b bytes ends later by
    what b bytes of this move take there, or all of it if it is shorter."""
    later: dict[Hashable, float] = {}
    for port, num_bytes in move.port_bytes.items():
        for waiting, num_queued in prices.queued_at(port).items():
            later[waiting] = max(later.get(waiting, 0.0), min(num_queued, num_bytes) / rates[port])
    return sum(later.values())


def _price_tokens(move: PricedMove, prices: MovePrices) -> MovePrice | None:
    """The destination's decodes wait for the chunks beside them; its source is not disturbed."""
    end = move.destination
    chunk_s = _added_s(end, min(move.step_tokens, move.num_tokens), move.num_tokens // 2, prices)
    final_s = _added_s(end, math.ceil(move.final_share * move.num_tokens), move.num_tokens, prices)
    step_s = prices.predictor.predict_s(end.decodes, step_of(end.num_stages)) if end.decodes.num_rows else 0.0
    if chunk_s is None or final_s is None or step_s is None:
        return None
    num_chunks = math.ceil(move.num_tokens / move.step_tokens)
    added_s = num_chunks * chunk_s + final_s
    slowed_s = end.decodes.num_rows * prices.weight(end) * added_s
    return MovePrice(final_s, slowed_s, 0.0, added_s + (num_chunks + 1) * step_s)


def _added_s(end: End, num_tokens: int, num_context: int, prices: MovePrices) -> float | None:
    """Seconds that a chunk adds to a step there: the whole step where no request decodes."""
    part, predictor = step_of(end.num_stages), prices.predictor
    with_it = predictor.predict_s(end.decodes.with_prompt(num_tokens, num_context), part)
    without = predictor.predict_s(end.decodes, part)
    return None if with_it is None or without is None else max(0.0, with_it - without)


def cost_device_s(prices: Iterable[MovePrice], num_requests: float) -> float:
    """Device-seconds that moves cost together. ``num_requests``: how many a device serves at a time."""
    return sum(price.request_s for price in prices) / max(1.0, num_requests)


def saved_device_s(prices: Iterable[MovePrice], stay_s: float, share: float) -> float:
    """Device-seconds that are saved where requests that would stay for ``stay_s`` leave a device, one after the other,
    and so free this ``share`` of it from the end of their moves on."""
    return share * max(0.0, stay_s - sum(price.takes_s for price in prices))

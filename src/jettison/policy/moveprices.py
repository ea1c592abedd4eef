"""The cost of moves, and whether they are worth the devices that they save. Pure; beyond MELL, whose moves are free.

Costs are in request-seconds: the request stands still for its last round, and decodes at either end are slowed
meanwhile. A device-second serves as many request-seconds as a device has requests: this is the rate of exchange between
the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jettison.cost.predictor import StepTimePredictor
from jettison.cost.stepwork import StepWork, step_of
from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.links import PortId


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceParams:
    """How dear moves are."""

    harm: float = 1.0
    """Weight of a request-second of waiting or slowness against a request-second of service: more where objectives are
    tight."""
    link_device_s: float = 0.1
    """Device-seconds that a second of a link counts as: an assumption, as it is not known what else the link would
    carry."""


class MovePrice(NamedTuple):
    """The price of one move, in seconds."""

    stall_s: float
    """Seconds that the request stands still."""
    slowed_s: float
    """Request-seconds that others lose."""
    link_s: float
    """Link-seconds, of all links together."""


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


class MovePrices(NamedTuple):
    """The sources of prices."""

    predictor: StepTimePredictor
    port_bytes_per_s: Callable[[PortId], float | None]
    link_byte_s: float = 0.0
    """Seconds that a byte adds to a step at each end of its link."""


def price_move(move: PricedMove, kind: MigrationKind, prices: MovePrices) -> MovePrice | None:
    """The price of a move as this kind; None while too little is known of steps, or of its links."""
    return _price_kv(move, prices) if kind is MigrationKind.KV else _price_tokens(move, prices)


def _price_kv(move: PricedMove, prices: MovePrices) -> MovePrice | None:
    seconds: dict[PortId, float] = {}
    for port, num_bytes in move.port_bytes.items():
        rate = prices.port_bytes_per_s(port)
        if rate is None:
            return None
        seconds[port] = num_bytes / rate
    num_bytes = sum(amount for port, amount in move.port_bytes.items() if port.is_out)
    num_others = max(0, move.source.decodes.num_rows - 1) + move.destination.decodes.num_rows
    link_s = max(sum(s for p, s in seconds.items() if p.is_out is is_out) for is_out in (True, False))
    slowest_s = max(seconds.values(), default=0.0)
    return MovePrice(move.final_share * slowest_s, num_others * prices.link_byte_s * num_bytes, link_s)


def _price_tokens(move: PricedMove, prices: MovePrices) -> MovePrice | None:
    """The destination's decodes wait for the chunks beside them; its source is not disturbed."""
    chunk_s = _added_s(move.destination, min(move.step_tokens, move.num_tokens), move.num_tokens // 2, prices)
    final_s = _added_s(move.destination, math.ceil(move.final_share * move.num_tokens), move.num_tokens, prices)
    if chunk_s is None or final_s is None:
        return None
    added_s = math.ceil(move.num_tokens / move.step_tokens) * chunk_s + final_s
    return MovePrice(final_s, move.destination.decodes.num_rows * added_s, 0.0)


def _added_s(end: End, num_tokens: int, num_context: int, prices: MovePrices) -> float | None:
    """Seconds that a chunk adds to a step there: the whole step where no request decodes."""
    part, predictor = step_of(end.num_stages), prices.predictor
    with_it = predictor.predict_s(end.decodes.with_prompt(num_tokens, num_context), part)
    without = predictor.predict_s(end.decodes, part)
    return None if with_it is None or without is None else max(0.0, with_it - without)


def cost_device_s(prices: Iterable[MovePrice], num_requests: float, params: PriceParams) -> float:
    """Device-seconds that moves cost together. ``num_requests``: how many a device serves at a time."""
    found = list(prices)
    request_s = sum(price.stall_s + price.slowed_s for price in found)
    link_s = sum(price.link_s for price in found)
    return params.harm * request_s / max(1.0, num_requests) + params.link_device_s * link_s


def is_worth(
    prices: Iterable[MovePrice | None], saved_device_s: float, num_requests: float, params: PriceParams
) -> bool:
    """Whether moves that belong together (all that empty one device) cost no more than the device-seconds that they
    save. A move without a price yet counts as free: the saving was asked for, and moves teach the prices."""
    return cost_device_s((p for p in prices if p is not None), num_requests, params) <= saved_device_s

"""Prices of the moves that packing wants, in device-seconds: what they cost, and what they save. ``policy.moveprices``
has the formulas; here are its views of groups and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jettison.core.ladder.packing.desired import Owed
from jettison.core.ladder.prompts import decodes_of
from jettison.core.load.portrates import PortRates
from jettison.core.load.views import Loads
from jettison.core.residence import in_arenas
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.memory.kvtransfers import MigrationKind, plan_kv_transfers
from jettison.policy.exchange import LinkId
from jettison.policy.links import PortId
from jettison.policy.movekinds import MAX_FINAL_BLOCKS
from jettison.policy.moveprices import End, MovePrice, MovePrices, PricedMove, cost_device_s, is_worth, price_move


class Worth(NamedTuple):
    """What moves that leave one group together cost and save, in device-seconds, and whether they are worth it."""

    cost_s: float
    saved_s: float
    is_worth: bool


def worth_of(
    cluster: ClusterState, loads: Loads, moves: Sequence[Owed], capacity: int, *, empties: bool, saves: bool
) -> Worth | None:
    """What it costs and saves to have these requests leave their group, each in the kind that costs less; None while it
    is not known how long requests stay. ``capacity``: blocks of a group that are packed. Raises AssertionError where
    nothing is packed.

    A group that is emptied (``empties``) is saved for as long as its requests would have stayed. Requests that leave
    another one make room in it, and save that share of it. ``saves`` False: nothing is saved (``saves_any``).
    """
    params, stay_s = cluster.params.packing, loads.traffic.mean_stay_s
    assert params is not None
    if stay_s is None:
        return None
    parts = {owed.state.request_id: _link_bytes(cluster, owed) for owed in moves}
    rates, profile = PortRates(cluster, (link for part in parts.values() for link in part)), cluster.params.profile
    byte_s = None if profile is None else profile.link_beside_byte_s
    prices = MovePrices(cluster.predictor, rates.of, byte_s or 0.0)
    source = moves[0].source
    num_requests = max(1, len(source.queues.running))
    cheapest: list[MovePrice | None] = []
    for owed in moves:
        port_bytes = rates.by_port(parts[owed.state.request_id])
        asked = (price_move(_priced(cluster, owed, kind, port_bytes), kind, prices) for kind in sorted(params.kinds))
        known = [price for price in asked if price is not None]
        cheapest.append(min(known, key=lambda p: cost_device_s([p], num_requests, params.prices), default=None))
    num_blocks = sum(source.limits.blocks_for(owed.state.num_tokens) for owed in moves)
    share = 1.0 if empties else num_blocks / capacity
    saved_s = stay_s * share if saves else 0.0
    cost_s = cost_device_s([price for price in cheapest if price is not None], num_requests, params.prices)
    return Worth(cost_s, saved_s, is_worth(cheapest, saved_s, num_requests, params.prices))


def saves_any(cluster: ClusterState) -> bool:
    """Whether one group less in use saves anything: an instance would fall asleep (they do so by themselves, and more
    of them are in use than have to be awake), or idle ones are given back. Raises AssertionError where nothing is
    packed."""
    params, awake = cluster.params.packing, cluster.params.awake
    assert params is not None
    if params.saves_idle or not awake.falls_asleep:
        return params.saves_idle
    return sum(len(group.stages) for group in cluster.groups.values() if group.queues.serves_online) > awake.min_awake


def _link_bytes(cluster: ClusterState, owed: Owed) -> dict[LinkId, int]:
    """Bytes of a request's KV that each link carries if it moves as it should."""
    state, limits = owed.state, owed.source.limits
    layer_bytes, found = cluster.shape.block_bytes_per_layer(limits.block_size), dict[LinkId, int]()
    for part in plan_kv_transfers(in_arenas(state.residences).places, owed.destination.stages):
        link = part.src, part.dst
        found[link] = found.get(link, 0) + len(part.layers) * limits.blocks_for(state.num_tokens) * layer_bytes
    return found


def _priced(
    cluster: ClusterState, owed: Owed, kind: MigrationKind, port_bytes: Mapping[PortId, int]
) -> PricedMove:
    """A move as ``policy.moveprices`` sees it, in the given kind."""
    state, limits = owed.state, owed.source.limits
    num_blocks = limits.blocks_for(state.num_tokens)
    final = MAX_FINAL_BLOCKS / num_blocks if kind is MigrationKind.KV else MAX_FINAL_BLOCKS / state.num_tokens
    return PricedMove(
        _end(owed.source), _end(owed.destination), port_bytes, state.num_tokens, min(1.0, final),
        cluster.params.migration.max_step_tokens or limits.max_num_batched_tokens,
    )


def _end(group: Group) -> End:
    """A group as one end of a move: the work of its decodes in a step, and its stages."""
    return End(decodes_of(group), len(group.stages))

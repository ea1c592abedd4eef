"""Prices of the moves that packing wants, in device-seconds: what they cost, and what they save. ``policy.moveprices``
has the formulas; here are its views of groups and links. What is refused is ``core.ladder.packing.refusals``'."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
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
from jettison.policy.moveprices import (
    End,
    MovePrice,
    MovePrices,
    PricedMove,
    Queue,
    cost_device_s,
    price_move,
    saved_device_s,
)
from jettison.policy.packing.refused import Grounds, Refused
from jettison.policy.slo import objectives


class Planned:
    """What waits at ports: transfers under way, and moves of this epoch that were found worth it."""

    def __init__(self, cluster: ClusterState) -> None:
        self._book = cluster.book
        self._planned: defaultdict[PortId, dict[Hashable, float]] = defaultdict(dict)

    def at(self, port: PortId) -> Queue:
        """What is queued at a port."""
        return self._book.waiting_at(port) | self._planned.get(port, {})

    def add(self, name: Hashable, port_bytes: Mapping[PortId, int]) -> None:
        """Moves are to begin; ``name``: of all of them together."""
        for port, num_bytes in port_bytes.items():
            self._planned[port][name] = num_bytes


class Worth(NamedTuple):
    """What moves that leave one group together cost and save, in device-seconds."""

    cost_s: float
    saved_s: float
    refused: Refused
    """The same as a refusal, with what it would rest on."""
    port_bytes: Mapping[PortId, int]
    """Bytes that those of them which are cheaper as KV send through each port."""

    @property
    def is_worth(self) -> bool:
        """Whether they cost no more than they save."""
        return self.cost_s <= self.saved_s


def worth_of(
    cluster: ClusterState, loads: Loads, moves: Sequence[Owed], share: float, planned: Planned
) -> Worth | None:
    """What it costs and saves to have these requests leave their group, each in the kind that costs less; None while it
    is not known how long requests stay. ``share``: of the group that they free and that is saved (``share_saved``).
    Raises AssertionError where nothing is packed."""
    params, stay_s = cluster.params.packing, loads.traffic.mean_stay_s
    assert params is not None
    if stay_s is None:
        return None
    parts = {owed.state.request_id: _link_bytes(cluster, owed) for owed in moves}
    rates, profile = PortRates(cluster, (link for part in parts.values() for link in part)), cluster.params.profile
    byte_s = None if profile is None else profile.link_beside_byte_s
    tpot_s = objectives(cluster.params.offline.slo, cluster.predictor).tpot_s
    prices = MovePrices(cluster.predictor, rates.of, byte_s or 0.0, planned.at, tpot_s)
    # A move without a price yet counts as free: the saving was asked for, and moves teach the prices.
    cheapest: list[MovePrice] = []
    sent: Counter[PortId] = Counter()
    for owed in moves:
        port_bytes = rates.by_port(parts[owed.state.request_id])
        asked = [(k, price_move(_priced(cluster, owed, k, port_bytes), k, prices)) for k in sorted(params.kinds)]
        known = [(price.request_s, kind, price) for kind, price in asked if price is not None]
        if known:
            _, kind, price = min(known)
            cheapest.append(price)
            sent.update(port_bytes if kind is MigrationKind.KV else {})
    num_requests = max(1, len(moves[0].source.queues.running))
    cost_s = cost_device_s(cheapest, num_requests)
    grounds = Grounds(
        sum(num_blocks_of(owed.source, owed.state.num_tokens) for owed in moves), num_requests, stay_s, share,
        queued_bytes(planned, sent),
    )
    waits_s, takes_s = (sum(seconds) for seconds in ((p.waits_s for p in cheapest), (p.takes_s for p in cheapest)))
    refused = Refused(cost_s, waits_s / num_requests, takes_s, grounds)
    return Worth(cost_s, saved_device_s(cheapest, stay_s, share), refused, sent)


def share_saved(num_blocks: int, capacity: int, *, empties: bool, saves: bool) -> float:
    """The share of a group that is saved if requests with so many blocks leave it: all of it if it is emptied, else the
    room that they make for others. ``capacity``: its blocks that are packed. ``saves`` False: none (``saves_any``)."""
    if not saves:
        return 0.0
    return 1.0 if empties else num_blocks / capacity


def num_blocks_of(group: Group, num_tokens: int) -> int:
    """Blocks of a request with so many tokens."""
    return group.limits.blocks_for(num_tokens)


def queued_bytes(planned: Planned, ports: Collection[PortId]) -> float:
    """What is queued at these ports together."""
    return sum(sum(planned.at(port).values()) for port in ports)


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

"""The kinds of moves that rungs have decided on: each request goes as KV or as tokens, now or in a later epoch. Every
rung that moves requests asks here, for all its moves of an epoch at once.

``policy.movekinds`` decides. Here are its inputs: boundaries from the profile and the predictor, rates of links as they
are known, and what moves under way have not sent or computed yet. On every tick, requests on their way as tokens are
looked at again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jettison.core.advice import Going, WantedMove
from jettison.core.ladder.prompts import decodes_of
from jettison.core.load.portrates import PortRates
from jettison.core.moving.astokens import TokenRelocation
from jettison.core.moving.migrations import Migrations
from jettison.core.ports import Action
from jettison.core.residence import in_arenas
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.cost.boundaries import PrefillBoundary, link_boundary, prefill_boundary
from jettison.cost.stepwork import step_of
from jettison.memory.kvtransfers import MigrationKind, plan_kv_transfers
from jettison.policy.exchange import LinkId
from jettison.policy.links import PortId
from jettison.policy.movekinds import LinkBin, Move, divide_moves, rest_as_kv
from jettison.types import GroupId, RequestId


def choose_kinds(cluster: ClusterState, wanted: Iterable[WantedMove]) -> dict[RequestId, Going]:
    """How each of these moves goes that may begin now, by request; a request that is left out waits for the next epoch.
    Empty for no moves. Changes nothing."""
    moves = {w.state.request_id: w for w in wanted}
    if not moves:
        return {}
    params = cluster.params.moves
    boundaries = {w.destination.group_id: prefill_boundary_of(cluster, w.destination) for w in moves.values()}
    parts = {r: _link_bytes(cluster, w, _num_cached(w)) for r, w in moves.items()}
    rates = PortRates(cluster, (link for link_bytes in parts.values() for link in link_bytes))
    made = [_move(cluster, w, _num_cached(w), rates.by_port(parts[r])) for r, w in moves.items()]
    ports = {port: _port(cluster, rates, port) for move in made for port in move.port_bytes}
    destinations: dict[GroupId, LinkBin] = {}
    for w in moves.values():
        found = boundaries[w.destination.group_id]
        bound = None if found is None else found.tokens_per_s * params.epoch_s
        destinations[w.destination.group_id] = LinkBin(bound, w.destination.guests.num_missing_tokens)
    division = divide_moves(made, ports, destinations, params)
    going: dict[RequestId, Going] = {}
    for choice in division.chosen:
        found = boundaries[moves[choice.request_id].destination.group_id]
        step_tokens = None if found is None else found.step_tokens
        kinds = moves[choice.request_id].kinds
        going[choice.request_id] = Going(choice.kind, step_tokens, choice.num_final_blocks, kinds)
    return going


def reconsider(cluster: ClusterState, migrations: Migrations, now_ns: int) -> list[Action]:
    """Look again at requests on their way as tokens: each is computed as fast as its destination takes it now, and goes
    on as KV where a link has become free that brings the rest much sooner. Returns the actions of requests that change
    to KV."""
    open_ones = [m for m in migrations.under_way if isinstance(m, TokenRelocation) and m.may_change]
    if not open_ones:
        return []
    params, actions = cluster.params.moves, list[Action]()
    for passage in open_ones:
        destination = passage.destination
        found = prefill_boundary_of(cluster, destination)
        if found is None:
            continue
        passage.pace(max(1, found.step_tokens))
        if not passage.may_go_as_kv:
            continue
        rest = WantedMove(passage.state, destination)
        link_bytes = _link_bytes(cluster, rest, passage.num_computed)
        rates = PortRates(cluster, link_bytes)
        move = _move(cluster, rest, passage.num_computed, rates.by_port(link_bytes))
        ports = {port: _port(cluster, rates, port) for port in move.port_bytes}
        ahead = destination.guests.num_missing_before(passage.state)
        bins = {destination.group_id: LinkBin(found.tokens_per_s * params.epoch_s, ahead)}
        num_final_blocks = rest_as_kv(move, ports, bins, params)
        if num_final_blocks:
            actions += passage.go_on_as_kv(num_final_blocks, now_ns)
    return actions


def prefill_boundary_of(cluster: ClusterState, group: Group) -> PrefillBoundary | None:
    """Tokens of prompts that a group's steps, and a second of them, take beside its running requests; None while too
    little is known."""
    params = cluster.params
    decodes = decodes_of(group)
    return prefill_boundary(
        decodes, cluster.predictor, params.profile, params.moves.slowdown,
        most=group.limits.max_num_batched_tokens - decodes.num_rows, num_stages=len(group.stages),
        tpot_s=params.offline.slo.tpot_s,
    )


def _port(cluster: ClusterState, rates: PortRates, port: PortId) -> LinkBin:
    """A port as the policy sees it: bytes that moves may send through it in an epoch (None: its rate is not known), and
    bytes queued at it."""
    params, rate = cluster.params, rates.of(port)
    queued = cluster.book.bytes_at(port)
    if rate is None:
        return LinkBin(None, queued)
    bound = link_boundary(rate, params.profile, params.moves.slowdown) * params.moves.epoch_s
    return LinkBin(bound, queued, rate)


def _num_cached(wanted: WantedMove) -> int:
    """Leading tokens of a request that the destination has in its prefix cache, and that are neither sent nor computed;
    0: none."""
    return wanted.destination.blocks.cached_prefix(wanted.state, wanted.state.num_computed)[0]


def _num_blocks(wanted: WantedMove, num_there: int) -> int:
    """Blocks of KV that a request takes along, at least 1; ``num_there``: leading tokens that the destination has
    already."""
    limits = wanted.destination.limits
    return max(1, limits.blocks_for(wanted.state.num_tokens) - num_there // limits.block_size)


def _move(cluster: ClusterState, wanted: WantedMove, num_there: int, port_bytes: Mapping[PortId, int]) -> Move:
    """A wanted move as the policy sees it; ``num_there``: leading tokens that the destination has already."""
    state, destination = wanted.state, wanted.destination
    source = cluster.groups[state.group_id]
    num_tokens = max(1, state.num_tokens - num_there)
    step_s = cluster.predictor.predict_s(decodes_of(source), step_of(len(source.stages)))
    made_tokens = cluster.params.moves.epoch_s / step_s if step_s else 0.0
    return Move(
        state.request_id, destination.group_id, _num_blocks(wanted, num_there), port_bytes,
        num_tokens, made_tokens / num_tokens, wanted.num_waited, MigrationKind.KV in wanted.kinds,
        MigrationKind.TOKENS in wanted.kinds and not state.on_trial,
    )


def _link_bytes(cluster: ClusterState, wanted: WantedMove, num_there: int) -> Mapping[LinkId, int]:
    """Bytes of a request's KV that each link would carry to the destination; ``num_there``: leading tokens that it has
    already."""
    layer_bytes = cluster.shape.block_bytes_per_layer(cluster.limits.block_size)
    num_blocks, found = _num_blocks(wanted, num_there), dict[LinkId, int]()
    for part in plan_kv_transfers(in_arenas(wanted.state.residences).places, wanted.destination.stages):
        link = part.src, part.dst
        found[link] = found.get(link, 0) + len(part.layers) * num_blocks * layer_bytes
    return found

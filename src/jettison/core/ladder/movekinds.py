"""How moves go that rungs have decided on: as KV or as tokens, now or in a later epoch. All rungs that move requests
ask here, each for all its moves of an epoch at once.

Decisions are ``policy.movekinds``'; here is what it goes by: boundaries from the profile and the predictor, rates of
links as they are known, and what moves under way have not sent or computed yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from jettison.core.load.pullrates import PullRates
from jettison.core.requests import RequestState
from jettison.core.residence import in_arenas
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.cost.boundaries import PrefillBoundary, link_boundary, prefill_boundary
from jettison.cost.stepwork import NOTHING, StepWork, step_of
from jettison.memory.kvtransfers import MigrationKind, plan_kv_transfers
from jettison.policy.exchange import LinkId
from jettison.policy.movekinds import MAX_FINAL_BLOCKS, Bin, Move, divide_moves
from jettison.policy.slo import Pace, prompt_tokens_per_s
from jettison.types import GroupId, RequestId


class Wanted(NamedTuple):
    """A running request that may move (``core.moving.migrations``), and where to."""

    state: RequestState
    destination: Group
    num_waited: int = 0
    """Epochs in which it was told to wait."""
    kinds: Collection[MigrationKind] = tuple(MigrationKind)
    """In which it may go."""


class Going(NamedTuple):
    """How it goes: what ``Migrations.start`` is told."""

    kind: MigrationKind
    max_step_tokens: int | None
    """As tokens; None: as many as steps have room for."""
    max_final_blocks: int = MAX_FINAL_BLOCKS
    """As KV: sent while it stands still."""


def choose_kinds(cluster: ClusterState, wanted: Iterable[Wanted]) -> dict[RequestId, Going]:
    """Of those that begin now; the others wait for the next epoch. Changes nothing."""
    moves = {w.state.request_id: w for w in wanted}
    if not moves:
        return {}
    rates, params = PullRates(cluster), cluster.params.moves
    boundaries = {w.destination.group_id: prefill_boundary_of(cluster, w.destination) for w in moves.values()}
    made = [_move(cluster, w) for w in moves.values()]
    links = {link: _link(cluster, rates, link) for move in made for link in move.link_bytes}
    destinations: dict[GroupId, Bin] = {}
    for w in moves.values():
        found = boundaries[w.destination.group_id]
        bound = None if found is None else found.tokens_per_s * params.epoch_s
        destinations[w.destination.group_id] = Bin(bound, w.destination.guests.num_missing_tokens)
    division = divide_moves(made, links, destinations, params)
    going: dict[RequestId, Going] = {}
    for choice in division.chosen:
        found = boundaries[moves[choice.request_id].destination.group_id]
        step_tokens = None if found is None else found.step_tokens
        going[choice.request_id] = Going(choice.kind, step_tokens, choice.num_final_blocks)
    return going


def decodes_of(group: Group) -> StepWork:
    """One of its steps, were all its requests to decode; nothing without any."""
    num_stages, num_running = len(group.stages), len(group.queues.running)
    if not num_running:
        return NOTHING
    num_kv_tokens = group.blocks.num_used * group.limits.block_size
    return StepWork.decodes(max(1, num_running // num_stages), num_kv_tokens // num_stages)


def prompt_rate_of(cluster: ClusterState, group: Group) -> float | None:
    """Tokens of prompts a second that its steps compute beside its requests, were all of them to decode."""
    most, decodes, num_stages = group.limits.max_num_batched_tokens, decodes_of(group), len(group.stages)
    if group.limits.prefill_first:  # its steps keep to no objective
        return cluster.predictor.prefill_tokens_per_s(most, decodes, num_stages)
    return prompt_tokens_per_s(Pace(cluster.params.offline, cluster.predictor), most, decodes, num_stages)


def prefill_boundary_of(cluster: ClusterState, group: Group) -> PrefillBoundary | None:
    """What its steps take beside its requests; None while too little is known."""
    params = cluster.params
    decodes = decodes_of(group)
    return prefill_boundary(
        decodes, cluster.predictor, params.profile, params.moves.slowdown,
        most=group.limits.max_num_batched_tokens - decodes.num_rows, num_stages=len(group.stages),
        tpot_s=params.offline.slo.tpot_s,
    )


def _link(cluster: ClusterState, rates: PullRates, link: LinkId) -> Bin:
    params, rate = cluster.params, rates.of(link)
    queued = cluster.book.bytes_between(*link)
    if rate is None:
        return Bin(None, queued)
    bound = link_boundary(rate, params.profile, params.moves.slowdown) * params.moves.epoch_s
    return Bin(bound, queued, rate)


def _move(cluster: ClusterState, wanted: Wanted) -> Move:
    """What the destination has in its prefix cache neither travels nor is computed."""
    state, destination = wanted.state, wanted.destination
    source = cluster.groups[state.group_id]
    limits = source.limits
    num_cached, _ = destination.blocks.cached_prefix(state, state.num_computed)
    num_tokens = max(1, state.num_tokens - num_cached)
    num_blocks = max(1, limits.blocks_for(state.num_tokens) - num_cached // limits.block_size)
    step_s = cluster.predictor.predict_s(decodes_of(source), step_of(len(source.stages)))
    made_tokens = cluster.params.moves.epoch_s / step_s if step_s else 0.0
    return Move(
        state.request_id, destination.group_id, num_blocks, _link_bytes(cluster, state, destination, num_blocks),
        num_tokens, made_tokens / num_tokens, wanted.num_waited, MigrationKind.KV in wanted.kinds,
        MigrationKind.TOKENS in wanted.kinds and not state.on_trial,
    )


def _link_bytes(
    cluster: ClusterState, state: RequestState, destination: Group, num_blocks: int
) -> Mapping[LinkId, int]:
    layer_bytes = cluster.shape.block_bytes_per_layer(cluster.limits.block_size)
    found: dict[LinkId, int] = {}
    for part in plan_kv_transfers(in_arenas(state.residences).places, destination.stages):
        link = part.src, part.dst
        found[link] = found.get(link, 0) + len(part.layers) * num_blocks * layer_bytes
    return found

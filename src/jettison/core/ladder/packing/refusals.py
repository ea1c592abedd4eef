"""Moves that packing wants and that cost more than they save: they are refused, and their requests held, until what the
refusal rested on has changed. ``policy.packing.refused`` says when; here are its views."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from jettison.core.ladder.packing.desired import Owed
from jettison.core.ladder.packing.packprices import (
    Planned,
    Worth,
    num_blocks_of,
    queued_bytes,
    saves_any,
    share_saved,
    worth_of,
)
from jettison.core.load.views import Loads
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.policy.links import PortId
from jettison.policy.packing.refused import Grounds, Refused
from jettison.types import GroupId, RequestId


class Sifted(NamedTuple):
    """Moves that packing wants, judged."""

    worthy: list[Owed]
    refused: dict[RequestId, tuple[float, float]]
    """By request whose move is refused: what the moves out of its group cost and save, device-seconds."""


class Refusals:
    """Judges moves, and remembers those that were refused by the group that they were to leave: one refusal for
    each."""

    def __init__(self, cluster: ClusterState, loads: Loads) -> None:
        self._cluster, self._loads = cluster, loads
        self._by_group: dict[GroupId, tuple[Refused, set[RequestId], frozenset[PortId]]] = {}

    def sift(
        self, owed: Sequence[Owed], lacks_room: Callable[[Group], bool], empties: Callable[[GroupId], bool],
        capacity_of: Mapping[GroupId, int],
    ) -> Sifted:
        """The moves that are worth it, judged together for each group that they leave, and all moves out of a group
        that lacks room; the others are refused from now on. ``empties``: whether no request is to stay in a group."""
        by_source: defaultdict[GroupId, list[Owed]] = defaultdict(list)
        for o in owed:
            by_source[o.source.group_id].append(o)
        found = Sifted([], {})
        saves, planned = bool(owed) and saves_any(self._cluster), Planned(self._cluster)
        for group_id, moves in by_source.items():
            num_blocks = sum(num_blocks_of(o.source, o.state.num_tokens) for o in moves)
            share = share_saved(num_blocks, capacity_of[group_id], empties=empties(group_id), saves=saves)
            worth = worth_of(self._cluster, self._loads, moves, share, planned)
            if worth is None or worth.is_worth or lacks_room(moves[0].source):
                found.worthy.extend(moves)
                planned.add(group_id, {} if worth is None else worth.port_bytes)
                continue
            self._note(moves, worth, capacity_of[group_id], saves=saves)
            found.refused.update({o.state.request_id: (worth.cost_s, worth.saved_s) for o in moves})
        return found

    def _note(self, moves: Sequence[Owed], worth: Worth, capacity: int, *, saves: bool) -> None:
        """These moves out of one group have just been refused."""
        group, ids, refused = moves[0].source, {o.state.request_id for o in moves}, worth.refused
        ports = frozenset(worth.port_bytes)
        if (before := self._by_group.get(group.group_id)) is not None:
            ids, ports = ids | before[1], ports | before[2]
            both = self._grounds(group, ids, ports, capacity, saves)
            refused = refused if both is None else before[0].beside(refused, both)
        self._by_group[group.group_id] = refused, ids, ports

    def take_due(self, capacity_of: Mapping[GroupId, int]) -> Iterator[RequestId]:
        """Take out the refusals that are to be asked about again, and those of groups and requests that are gone; yield
        the requests of the former. ``capacity_of``: blocks of each group that are packed."""
        saves = bool(self._by_group) and saves_any(self._cluster)
        for group_id, (refused, ids, ports) in list(self._by_group.items()):
            group, capacity = self._cluster.groups.get(group_id), capacity_of.get(group_id)
            if group is None or capacity is None:
                del self._by_group[group_id]
                continue
            there = {s.request_id for s in group.queues.served() if s.request_id in ids}
            grounds = self._grounds(group, there, ports, capacity, saves)
            if not there or grounds is None or refused.is_due(grounds):
                del self._by_group[group_id]
                yield from sorted(there)
            else:
                self._by_group[group_id] = refused, there, ports

    def _grounds(
        self, group: Group, ids: Set[RequestId], ports: Collection[PortId], capacity: int, saves: bool
    ) -> Grounds | None:
        """The present grounds of moves of these requests out of the group; None: it is not known how long requests
        stay."""
        stay_s, requests = self._loads.traffic.mean_stay_s, self._cluster.requests
        num_blocks = sum(num_blocks_of(group, requests[r].num_tokens) for r in ids if r in requests)
        empties = all(s.request_id in ids for s in group.queues.online_requests())
        share = share_saved(num_blocks, capacity, empties=empties, saves=saves)
        queued = queued_bytes(Planned(self._cluster), ports)
        return None if stay_s is None else Grounds(num_blocks, len(group.queues.running), stay_s, share, queued)

"""Migrate: every so often the fullest instances give a running request to the emptiest (Llumnix).

``policy.migration`` decides which requests go, and ``core.moving.relocate`` moves one; here is when to look, and
between which groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from jettison.core.advice import Going, WantedMove
from jettison.core.ladder.hooks import Calm
from jettison.core.ladder.movekinds import choose_kinds
from jettison.core.ladder.rung import Means, Moment, Offer, Rung, register
from jettison.core.load.distances import machine_distance
from jettison.core.moving.migrations import may_go
from jettison.core.moving.passage import Passage
from jettison.core.ports import Action
from jettison.core.serving.group import Group
from jettison.policy.migration import (
    InstanceLoad,
    MigrationRow,
    Pair,
    choose_request,
    may_give,
    plan_pairs,
)
from jettison.types import NANOSECONDS, GroupId, RequestId, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationOffer(Offer):
    """One running request is to go from one group to another, in the given way."""

    request_id: RequestId
    source: GroupId
    destination: GroupId
    going: Going


@register
class MigrateRung(Rung):
    """Moves running requests between instances, from those with the least room to those with the most."""

    name = "migrate"
    rank = 50
    moments = frozenset({Moment.BEFORE_STEPS})
    spreads = True

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._looked_ns: int | None = None
        self._ended: list[Passage] = []
        """Migrations that have ended since the rung looked last."""
        self._stale: set[GroupId] = set()
        """Groups that were touched since ``_loads`` was made from them."""
        self._loads: dict[GroupId, InstanceLoad] = {}
        self._low: set[GroupId] = set()
        """Groups that would give a request away: while there is none, the others need not be looked at."""
        self._num_dissolved = 0
        """The cluster's count of dissolved groups when these were last dropped from ``_loads``."""
        self._num_waited: Counter[RequestId] = Counter()
        """By request that was told to wait at the last look: looks in a row at which it was."""
        self._avoided_until_ns: dict[Pair, int] = {}
        """By pair of groups between which a transfer failed, either way round: the time until which none migrates
        there."""

    def decides_nothing_before(self, moment: Moment) -> Calm:
        """No calm on ticks, while any request migrates, and before the first look; else calm until the next look at all
        instances."""
        if moment is Moment.TICK or not self.means.migrations.is_idle or self._looked_ns is None:
            return Calm(0)
        return Calm(self._looked_ns + math.ceil(self.means.state.params.migration.period_s * NANOSECONDS))

    def worker_ids(self) -> Collection[WorkerId]:
        """The workers of groups that take part in a migration under way, whichever rung began it."""
        return self.means.migrations.worker_ids

    def note_touched(self, group_ids: Collection[GroupId]) -> None:
        """Note that these groups' loads have to be read again."""
        self._stale.update(group_ids)

    # --- deciding ---------------------------------------------------------------------------------------------

    def look(self, moment: Moment, now_ns: int) -> Iterator[Offer]:
        """Yield offers of migrations, when a period has passed since the last look or when a migration has ended; else
        nothing. Pairs of groups between which a transfer was lost are avoided for a while."""
        self._stale |= {g.group_id for g in self.means.state.changed_groups()}
        ended, self._ended = self._ended, []
        self._note_lost(ended, now_ns)
        period_ns = self.means.state.params.migration.period_s * NANOSECONDS
        if ended or self._looked_ns is None or now_ns - self._looked_ns >= period_ns:
            self._looked_ns = now_ns
            yield from self._pairs(now_ns)

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Start the migration of an offer; return its actions."""
        assert isinstance(offer, MigrationOffer), offer
        groups = self.means.state.groups
        source, destination = groups[offer.source], groups[offer.destination]
        state = source.queues.running[offer.request_id]
        return self.means.migrations.start(
            state, source, destination, now_ns, lambda m: self._ended.append(m), offer.going
        )

    def _note_lost(self, ended: Sequence[Passage], now_ns: int) -> None:
        """Avoid pairs of groups, either way round, for a while after a migration between them has lost a transfer."""
        until_ns = now_ns + round(self.means.state.params.migration.retry_s * NANOSECONDS)
        for migration in ended:
            if migration.lost_transfer:
                ends = migration.source.group_id, migration.destination.group_id
                self._avoided_until_ns |= {Pair(*ends): until_ns, Pair(*ends[::-1]): until_ns}

    def _avoided(self, now_ns: int) -> Set[Pair]:
        """The pairs of groups between which no request may migrate now."""
        if self._avoided_until_ns:
            self._avoided_until_ns = {p: end for p, end in self._avoided_until_ns.items() if end > now_ns}
        return self._avoided_until_ns.keys()

    def _pairs(self, now_ns: int) -> Iterator[Offer]:
        """Yield offers for the pairs that ``policy.migration`` chooses among groups that no move or migration touches;
        nothing where no such group has a request to give."""
        self._refresh_loads()
        if not self._low:
            return
        taken = {*self.means.moves.moving_workers(), *self.worker_ids()}
        groups, params = self.means.state.groups, self.means.state.params.migration
        if not any(_is_idle(groups[g], taken) for g in self._low):
            return
        idle = {i: g for i, g in groups.items() if _is_idle(g, taken)}
        loads = self._loads
        chosen_pairs: dict[RequestId, Pair] = {}
        for pair in plan_pairs([loads[i] for i in idle], params, self._avoided(now_ns), self._distance()):
            chosen = choose_request(_rows(idle[pair.source]), loads[pair.source], loads[pair.destination], params)
            if chosen is not None:
                chosen_pairs[chosen] = pair
        for request_id, going in self._kinds(chosen_pairs).items():
            pair = chosen_pairs[request_id]
            yield MigrationOffer(
                groups=(pair.source, pair.destination), why="one is full and the other is not",
                request_id=request_id, source=pair.source, destination=pair.destination, going=going,
            )

    def _distance(self) -> Callable[[GroupId, GroupId], float] | None:
        """Between groups, where networks between hosts are known."""
        state = self.means.state
        if not state.params.networks:
            return None
        away, machine = machine_distance(state), state.params.machine_of
        at = {group_id: machine.get(g.worker_ids[0]) for group_id, g in state.groups.items()}
        return lambda source, destination: away(at[source], at[destination])

    def _kinds(self, pairs: Mapping[RequestId, Pair]) -> Mapping[RequestId, Going]:
        """How each of these requests goes between its pair of groups; one that has to wait is left out, and looked at
        again in the next period."""
        state, params = self.means.state, self.means.state.params.migration
        if params.kind is not None:
            return dict.fromkeys(pairs, Going(params.kind, params.max_step_tokens))
        groups = state.groups
        wanted = [
            WantedMove(groups[p.source].queues.running[r], groups[p.destination], self._num_waited[r])
            for r, p in pairs.items()
        ]
        chosen = choose_kinds(state, wanted)
        self._num_waited = Counter({r: 1 + self._num_waited[r] for r in pairs if r not in chosen})
        return chosen

    def _refresh_loads(self) -> None:
        """Read the loads of touched groups anew, and drop those of dissolved groups; other groups' loads stay as they
        are. Groups that may give a request away are noted with it."""
        state = self.means.state
        if self._num_dissolved != state.num_dissolved:
            self._num_dissolved = state.num_dissolved
            self._loads = {g: load for g, load in self._loads.items() if g in state.groups}
            self._low &= self._loads.keys()
        for group_id in self._stale & state.groups.keys():
            self._loads[group_id] = load = _load(state.groups[group_id])
            if may_give(load, state.params.migration):
                self._low.add(group_id)
            else:
                self._low.discard(group_id)
        self._stale.clear()


def _is_idle(group: Group, taken: Set[WorkerId]) -> bool:
    """Whether the group is not paused and none of its workers is among those ``taken``."""
    return not group.paused and taken.isdisjoint(group.worker_ids)


def _load(group: Group) -> InstanceLoad:
    """A group's load as ``policy.migration`` sees it: blocks in all, used, and needed by the first waiting request;
    requests in its batch, and whether it takes others."""
    head = group.queues.waiting.head
    head_blocks = 0 if head is None else group.limits.blocks_for(head.num_tokens)
    batch = len(group.queues.running) + (1 if group.queues.waiting else 0)
    takes = len(group.queues.running) < group.max_running and group.blocks.admission_cap is None
    return InstanceLoad(group.group_id, group.blocks.capacity, group.blocks.num_used, head_blocks, batch, takes)


def _rows(group: Group) -> list[MigrationRow]:
    """The running requests of a group that may migrate now, with priorities and blocks."""
    return [
        MigrationRow(s.request_id, s.request.priority, group.blocks.ledgers[0].num_blocks_of(s.request_id))
        for s in group.queues.running.values() if may_go(s)
    ]

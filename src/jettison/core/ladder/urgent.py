"""Offline work that is due sooner takes the places of what is due later, where it would be late otherwise.

A queue goes by deadlines, but what runs stays: of a batch that has time, and has been left to few instances for that,
a whole instance may be full when one comes that has none. Then those of the same tenant that are due later wait again,
where most of their work is ahead. And what is urgent waits at all groups alike: else one would be through with it, and
take on what is due later, while it waits at another. Tenants keep their shares. The rung ``wake`` asks after steps and
on ticks, where workers sleep by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from jettison.core.ladder.rung import Means, Offer
from jettison.core.ports import Action, Record
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.serving.virtualtokens import BatchKey, key_of
from jettison.types import GroupId, RequestId

LEAST_DIFFERENCE = 2
"""Of the numbers that wait at two groups, from which on one goes from the one to the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UrgentOffer(Offer):
    """These requests of one group wait again, or elsewhere."""

    request_ids: tuple[RequestId, ...] = ()
    going: tuple[tuple[RequestId, GroupId], ...] = ()
    """Which requests wait elsewhere, and where."""


class Urgent:
    """Knows what would be late."""

    def __init__(self, means: Means, loses_little: Callable[[RequestState], bool]) -> None:
        """``loses_little``: a running request could begin anew without losing much."""
        self._state, self._moves = means.state, means.moves
        self._loses_little = loses_little
        self._keys: frozenset[BatchKey] = frozenset()

    def note(self, urgent: Iterable[BatchKey] = (), giving_way: Iterable[BatchKey] = ()) -> None:
        """What is urgent now, and gives it its turns (``policy.lending``)."""
        self._keys, gives_way, tokens = frozenset(urgent), frozenset(giving_way), self._state.offline_tokens
        if gives_way == tokens.gives_way:
            return
        tokens.gives_way = gives_way
        for group in self._state.groups.values():
            if group.queues.waiting_offline:
                group.queues.note_change()

    def look(self) -> Iterator[UrgentOffer]:
        """After a step, of the groups that have none under way."""
        if not self._keys:
            return
        for group in list(self._state.groups.values()):
            waiting = group.queues.waiting_offline
            if group.in_flight or not waiting or self._moves.is_moving(group) or self._moves.is_emptying(group):
                continue
            if chosen := self._victims(group):
                why = "what is due sooner would be late"
                yield UrgentOffer(groups=(group.group_id,), why=why, request_ids=chosen)

    def balance(self) -> Iterator[UrgentOffer]:
        """On ticks: the same number of urgent ones waits at each group, and those that are next stand in front."""
        if not self._keys:
            return
        waiting = {
            g.group_id: [s for s in g.queues.waiting_offline if self._is_urgent(s)]
            for g in self._state.groups.values() if not (g.paused or self._moves.is_moving(g))
        }  # fmt: skip
        self._spread_fronts(waiting)
        self._level(waiting)
        going: dict[GroupId, list[tuple[RequestId, GroupId]]] = {}
        for to, states in waiting.items():
            for state in states:
                if state.group_id != to:
                    going.setdefault(state.group_id, []).append((state.request_id, to))
        for group_id, those in going.items():
            why = "what is due sooner waits at all alike"
            yield UrgentOffer(groups=(group_id,), why=why, going=tuple(those))

    def _spread_fronts(self, waiting: Mapping[GroupId, list[RequestState]]) -> None:
        """Of the requests that are next by deadline and arrival, as many as there are groups, each has one in front:
        else the last of a slow group would begin long after all others have ended."""
        first = sorted((s for states in waiting.values() for s in states), key=lambda s: s.order)[: len(waiting)]
        num_first = Counter(s.group_id for s in first)
        lacking = [group_id for group_id in waiting if not num_first[group_id]]
        for state in first:
            if num_first[state.group_id] > 1 and lacking and not self._is_too_large(state, lacking[-1]):
                num_first[state.group_id] -= 1
                waiting[state.group_id].remove(state)
                waiting[lacking.pop()].insert(0, state)

    def _level(self, waiting: Mapping[GroupId, list[RequestState]]) -> None:
        """The last of long queues go to short ones."""
        for states in waiting.values():
            while states:
                to = min(waiting, key=lambda g: (len(waiting[g]), g))
                if len(states) - len(waiting[to]) < LEAST_DIFFERENCE or self._is_too_large(states[-1], to):
                    break
                waiting[to].append(states.pop())

    def _is_urgent(self, state: RequestState) -> bool:
        return key_of(state) in self._keys

    def _is_too_large(self, state: RequestState, group_id: GroupId) -> bool:
        return self._state.groups[group_id].blocks.is_oversized(state)

    def _victims(self, group: Group) -> tuple[RequestId, ...]:
        """As many as there are urgent ones without a place."""
        urgent = [s for s in group.queues.waiting_offline if self._is_urgent(s)]
        num_places = max(0, group.max_running - len(group.queues.running))
        num_wanted = len(urgent) - (num_places if group.blocks.num_free > group.blocks.watermark else 0)
        if num_wanted <= 0:
            return ()
        gives_way = self._state.offline_tokens.gives_way
        later = [s for s in group.queues.running_offline() if key_of(s) in gives_way and self._loses_little(s)]
        later.sort(key=lambda s: (-_due(s), s.num_computed, s.order))
        return tuple(s.request_id for s in later[:num_wanted])

    def begin(self, offer: UrgentOffer, now_ns: int) -> list[Action]:
        """They give their places up, or wait elsewhere."""
        group, num_tokens = self._state.groups[offer.groups[0]], 0
        for request_id, group_id in offer.going:
            state = self._state.requests[request_id]
            group.queues.take_out(state)
            self._state.groups[group_id].queues.enqueue(state)
        if offer.going:
            self._state.counters.num_rebalanced += len(offer.going)
            to = sorted({group_id for _, group_id in offer.going})
            return [Record("rebalanced", now_ns, {"requests": len(offer.going), "to": to})]
        for request_id in offer.request_ids:
            state = self._state.requests[request_id]
            num_tokens += state.num_computed
            group.preempt(state)
        return [Record("offline_yields", now_ns, {
            "group": group.group_id, "requests": len(offer.request_ids), "tokens": num_tokens, "reason": offer.why,
        })]  # fmt: skip


def _due(state: RequestState) -> float:
    """One that is due at no time is waited for, and goes first."""
    deadline_ns = state.request.deadline_ns
    return -inf if deadline_ns is None else deadline_ns

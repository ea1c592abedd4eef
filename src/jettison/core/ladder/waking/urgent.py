"""Offline work that would be late takes the places of what gives way to it (``policy.lending``), wherever it waits.

A queue goes by what gives way, but what runs stays: of a batch that has time, and has been left to few instances for
that, a whole instance may be full when one comes that has none. Then those that give way wait again, where most of
their work is ahead. And what is urgent and next begins where there is a place, whichever group it waits at: else one
would be through with it, and take on what is due later, while the last of it begins elsewhere when all others have
ended. The rung ``wake`` asks after steps, where workers sleep by themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile

from jettison.core.ladder.rung import Means, Offer
from jettison.core.ports import Action, Record
from jettison.core.preemption import Preemption
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.serving.virtualtokens import BatchKey, key_of
from jettison.types import GroupId, RequestId


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

    @property
    def is_there(self) -> bool:
        """Something is urgent."""
        return bool(self._keys)

    def note(self, urgent: Iterable[BatchKey] = (), giving_way: Iterable[BatchKey] = ()) -> None:
        """What is urgent now, and gives it its turns (``policy.lending``)."""
        self._keys, gives_way, tokens = frozenset(urgent), frozenset(giving_way), self._state.offline_tokens
        if gives_way == tokens.gives_way:
            return
        tokens.gives_way = gives_way
        for group in self._state.groups.values():
            group.queues.note_lending()

    def look(self) -> Iterator[UrgentOffer]:
        """After a step, of the groups that have none under way."""
        if not self._keys:
            return
        serving = [
            g for g in self._state.groups.values()
            if not (g.paused or self._moves.is_moving(g) or self._moves.is_emptying(g))
        ]
        following = deque(sorted(chain.from_iterable(map(self._waiting, serving)), key=lambda s: s.order))
        share = -(-len(following) // len(serving)) if serving else 0
        for group in serving:
            if not following:
                return
            if group.in_flight or not group.queues.admits_offline:
                continue
            if chosen := self._victims(group, list(islice(following, share))):
                why = "what is due sooner would be late"
                yield UrgentOffer(groups=(group.group_id,), why=why, request_ids=chosen)
            why = "what is due sooner goes where there is a place"
            for source, going in _taken(group, following).items():
                yield UrgentOffer(groups=(source,), why=why, going=tuple((i, group.group_id) for i in going))

    def _waiting(self, group: Group) -> Iterator[RequestState]:
        """What is urgent there, as much as the group could run. What gives way is behind it, and may be very much."""
        gives_way = self._state.offline_tokens.gives_way
        ahead = takewhile(lambda s: key_of(s) not in gives_way, group.queues.waiting_offline)
        return islice((s for s in ahead if key_of(s) in self._keys), group.max_running)

    def _victims(self, group: Group, wanted: Sequence[RequestState]) -> tuple[RequestId, ...]:
        """Of those that give way, the last that are due: as many as make place and room for these, one after the other,
        and none that would give up what it has for nothing."""
        gives_way = self._state.offline_tokens.gives_way
        later = [s for s in group.queues.running_offline() if key_of(s) in gives_way and self._loses_little(s)]
        later.sort(key=lambda s: (-(s.request.deadline_ns or 0), s.num_computed, s.order))
        num_places, room, num, num_chosen = _num_places(group), _room(group), 0, 0
        for state in wanted:
            num_places, room = num_places - 1, room - group.limits.blocks_for(state.num_tokens)
            while (num_places < 0 or room < 0) and num < len(later):
                num_places, room, num = num_places + 1, room + group.blocks.num_exclusive(later[num]), num + 1
            if num_places < 0 or room < 0:
                break
            num_chosen = num
        return tuple(s.request_id for s in later[:num_chosen])

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
            group.preempt(state, Preemption.DEADLINE)
        return [Record("offline_yields", now_ns, {
            "group": group.group_id, "requests": len(offer.request_ids), "tokens": num_tokens, "reason": offer.why,
        })]  # fmt: skip


def _num_places(group: Group) -> int:
    return max(0, group.max_running - len(group.queues.running))


def _room(group: Group) -> int:
    return group.blocks.num_free - group.blocks.watermark


def _taken(group: Group, following: deque[RequestState]) -> dict[GroupId, list[RequestId]]:
    """As many of those that follow as a group has places and room for, by where they wait now, if that is elsewhere."""
    found: dict[GroupId, list[RequestId]] = {}
    num_places, room = _num_places(group), _room(group)
    while following and num_places > 0 and (room := room - group.limits.blocks_for(following[0].num_tokens)) >= 0:
        state, num_places = following.popleft(), num_places - 1
        if state.group_id != group.group_id:
            found.setdefault(state.group_id, []).append(state.request_id)
    return found

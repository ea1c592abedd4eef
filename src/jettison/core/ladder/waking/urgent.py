"""Urgent work: offline requests that would be late take the places of those that give way to them (``policy.lending``),
wherever they wait.

A queue goes by what gives way, but what runs stays: a batch that has time, and was left to few instances for that, may
fill an instance when one comes that has none. Then its requests wait again, where most of their work is ahead. And
urgent requests that are next begin where there is a place, whichever group they wait in: else one group would be
through with them, and take on what is due later, while the last of them begin elsewhere when all others have ended. The
rung ``wake`` asks after steps, where workers sleep by themselves.
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
    """Offline requests of one group that wait again (``request_ids``), or that wait in another group (``going``)."""

    request_ids: tuple[RequestId, ...] = ()
    going: tuple[tuple[RequestId, GroupId], ...] = ()
    """Which requests wait elsewhere, and where."""


class Urgent:
    """Has running offline requests give their places to urgent ones. It remembers which batches are urgent."""

    def __init__(self, means: Means, loses_little: Callable[[RequestState], bool]) -> None:
        """``loses_little``: whether a running request could begin anew without losing much."""
        self._state, self._moves = means.state, means.moves
        self._loses_little = loses_little
        self._keys: frozenset[BatchKey] = frozenset()

    @property
    def is_there(self) -> bool:
        """Whether some batch is urgent."""
        return bool(self._keys)

    def note(self, urgent: Iterable[BatchKey] = (), giving_way: Iterable[BatchKey] = ()) -> None:
        """Note which batches are urgent now and which give way to them (``policy.lending``), and have every queue go by
        that. Without arguments: none."""
        self._keys, gives_way, tokens = frozenset(urgent), frozenset(giving_way), self._state.offline_tokens
        if gives_way == tokens.gives_way:
            return
        tokens.gives_way = gives_way
        for group in self._state.groups.values():
            group.queues.note_lending()

    def look(self) -> Iterator[UrgentOffer]:
        """Yield, after a step, offers for each group without one under way: running requests that give way to urgent
        ones, and urgent requests of other groups that wait here from now on. Nothing while no work is urgent."""
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
        """Iterate over the urgent requests at the head of a group's offline queue, at most as many as the group may
        run. Requests that give way come behind them, and may be very many."""
        gives_way = self._state.offline_tokens.gives_way
        ahead = takewhile(lambda s: key_of(s) not in gives_way, group.queues.waiting_offline)
        return islice((s for s in ahead if key_of(s) in self._keys), group.max_running)

    def _victims(self, group: Group, wanted: Sequence[RequestState]) -> tuple[RequestId, ...]:
        """The running requests of a group that make place and room for the ``wanted`` ones, taken one after the other:
        of those that give way and lose little, the ones due last. Empty where no wanted request could be let in so."""
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
        """Preempt the offer's requests, or move them to other groups' queues; return the record of that."""
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
    """How many more requests the group may run; 0: none."""
    return max(0, group.max_running - len(group.queues.running))


def _room(group: Group) -> int:
    """The group's free blocks above the watermark; below 0: it lacks some."""
    return group.blocks.num_free - group.blocks.watermark


def _taken(group: Group, following: deque[RequestState]) -> dict[GroupId, list[RequestId]]:
    """Take as many requests off ``following`` as the group has places and room for; return those that wait in other
    groups, by group."""
    found: dict[GroupId, list[RequestId]] = {}
    num_places, room = _num_places(group), _room(group)
    while following and num_places > 0 and (room := room - group.limits.blocks_for(following[0].num_tokens)) >= 0:
        state, num_places = following.popleft(), num_places - 1
        if state.group_id != group.group_id:
            found.setdefault(state.group_id, []).append(state.request_id)
    return found

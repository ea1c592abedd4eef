"""Spreading: offline requests that one instance has taken on are shared with instances that were woken for them.

What waits is dealt out again when a worker serves (``core.driving.unplaced``). But a batch that one instance could take
on whole runs there, and would gain nothing from others that wake for it: so the requests that have computed least begin
anew elsewhere, where that is sooner than staying among so many. The rung ``wake`` asks after steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from jettison.core.ladder.free import is_checkpointed, is_preemptible
from jettison.core.ladder.rung import Means, Offer
from jettison.core.ports import Action, Record
from jettison.core.preemption import Preemption
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.group import Group
from jettison.types import NANOSECONDS, GroupId, RequestId, WorkerId

PATIENCE_S = 5.0
"""Seconds after it began to serve for which a woken instance is given what others run."""

MOST_AGAIN = 0.25
"""Most time that computing a request's tokens again may take, as part of the time of what it has yet to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadOffer(Offer):
    """Running offline requests of one group that are to begin anew in others."""

    going: tuple[tuple[RequestId, GroupId], ...]
    """Which requests go, and where to."""


class Spreading:
    """Shares running offline requests with workers that have been woken for offline work. It remembers these
    workers."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._state = means.state
        self._woken: dict[WorkerId, int | None] = {}
        """By worker woken for offline work: since when it serves; None: it does not yet."""
        self._have_given: set[GroupId] = set()
        """Groups that have shared what they run since the last wake."""

    def note_woken(self, worker_ids: Collection[WorkerId]) -> None:
        """Note that these workers are being woken for offline work."""
        self._have_given.clear()
        self._woken |= dict.fromkeys(worker_ids, None)

    def look(self, now_ns: int) -> Iterator[SpreadOffer]:
        """Yield, after a step, an offer for each group with more than an even share of offline requests and no step
        under way: those that go to groups just woken. Each group offers once a wake."""
        if not self._woken:
            return
        takers = self._takers(now_ns)
        if not takers:
            return
        serving = self._means.moves.serving_groups()
        num_each = {g.group_id: _num_offline(g) for g in serving}
        fair = -(-sum(num_each.values()) // len(serving))
        for group in serving:
            is_done = group in takers or group.group_id in self._have_given
            if is_done or group.in_flight or self._means.moves.is_moving(group):
                continue
            self._have_given.add(group.group_id)
            ready = [s for s in group.queues.running_offline() if self.loses_little(s)]
            ready.sort(key=lambda s: (s.num_computed, s.order))
            going: list[tuple[RequestId, GroupId]] = []
            for state in ready[: num_each[group.group_id] - fair] if num_each[group.group_id] > fair else ():
                to = min(takers, key=lambda g: (num_each[g.group_id], g.group_id))
                if num_each[to.group_id] < fair and not to.blocks.is_oversized(state):
                    num_each[to.group_id] += 1
                    going.append((state.request_id, to.group_id))
            if going:
                why = "others were woken for offline work"
                yield SpreadOffer(groups=(group.group_id,), why=why, going=tuple(going))

    def _takers(self, now_ns: int) -> list[Group]:
        """The groups of workers that were woken for offline work and began to serve a moment ago; workers that have
        served for longer are forgotten."""
        waking, found = self._means.sleepers.waking, list[Group]()
        for worker_id, since_ns in list(self._woken.items()):
            groups = self._state.groups_of[worker_id]
            if since_ns is None and worker_id in waking:
                continue
            if since_ns is None:
                since_ns = self._woken[worker_id] = now_ns
            if not groups or now_ns - since_ns > PATIENCE_S * NANOSECONDS:
                del self._woken[worker_id]
            elif not self._means.moves.is_moving(groups[0]):
                found.append(groups[0])
        return found

    def loses_little(self, state: RequestState) -> bool:
        """Whether a running request could begin anew elsewhere at little loss: nothing holds it, no copy of it is in a
        host pool, and most of its work is ahead."""
        if not is_preemptible(state) or is_checkpointed(state):
            return False
        answers = self._means.loads.offline_answers
        num_more = max(1.0, answers.usual_tokens(state.request.params.max_tokens) - state.num_output)
        prefill = self._state.predictor.prefill_tokens_per_s(self._state.limits.max_num_batched_tokens)
        prices = self._state.predictor.chunk_prices(1)
        again_s = state.num_computed / prefill if prefill else 0.0
        return again_s <= MOST_AGAIN * num_more * (prices.fixed_cost + prices.row + prices.token)

    def begin(self, offer: SpreadOffer, now_ns: int) -> list[Action]:
        """Preempt the offer's requests, and queue them in the groups chosen for them; return the record. One with a
        copy in a host pool meanwhile stays with its group."""
        groups, num_tokens = self._state.groups, 0
        source = groups[offer.groups[0]]
        for request_id, group_id in offer.going:
            state = self._state.requests[request_id]
            num_tokens += state.num_computed
            source.preempt(state, Preemption.SPREAD)
            if state.phase is not Phase.WAITING:  # a copy of it was written meanwhile, and stays with its group
                continue
            source.queues.take_out(state)
            groups[group_id].queues.enqueue(state)
        return [Record("offline_spread", now_ns, {
            "group": source.group_id, "to": sorted({group_id for _, group_id in offer.going}),
            "requests": len(offer.going), "tokens": num_tokens, "reason": offer.why,
        })]  # fmt: skip


def _num_offline(group: Group) -> int:
    """Running and waiting offline requests of a group."""
    return group.queues.num_running_offline + len(group.queues.waiting_offline)

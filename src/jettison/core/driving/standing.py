"""Offline work that stands still, and why: looked at on every tick and written to the event log; nothing is decided
here.

A group's offline work *stands* (makes no progress) while no step computes tokens of it for the first time. A step under
way that would do so counts as progress, unless such steps are given up again and again. ``offline_stands`` is recorded
when the work has stood for ``LEAST_NS``, and again when the reason changes; ``offline_goes_on`` when it has made
progress, or has ended. Where a group makes progress, one key's requests may stand all the same: then the record names
the next of them (``request``). ``policy.standing`` says what keeps the work out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from jettison.core.moving.hostedkv import HostedPhase
from jettison.core.moving.moves import Moves
from jettison.core.moving.store import CheckpointStore
from jettison.core.ports import Record, StepRow
from jettison.core.requests import RequestState
from jettison.core.residence import hosted_tokens
from jettison.core.serving.group import Group
from jettison.core.serving.sharedsteps import room_of_last_step
from jettison.core.serving.virtualtokens import key_of
from jettison.core.state import ClusterState
from jettison.policy.standing import StandingView, Standstill, why_standing
from jettison.types import NANOSECONDS, GroupId, RequestId

LEAST_NS = NANOSECONDS // 5
"""Shorter standstills are normal between steps and copies, and are not recorded."""

Subject = tuple[GroupId | None, RequestId | None]
"""A group's offline work, or one request that waits there while others make progress; without a group: the requests
that no worker can take."""

Reason = Callable[[int], tuple[Standstill, dict[str, Any]]]
"""Called with the time (ns): why the work stands, and by which numbers."""


@dataclass(slots=True)
class _Told:
    why: Standstill
    since_ns: int


class StandingWatch:
    """Watches the offline work of all groups: ``look``, on every tick, says where it begins to stand and where it goes
    on."""

    def __init__(self, state: ClusterState, moves: Moves, store: CheckpointStore) -> None:
        self._state = state
        self._moves = moves
        self._store = store
        self._told: dict[Subject, _Told] = {}
        self._formed_ns: dict[GroupId, int] = {}
        """When each group was first seen; 0 where the cluster had no offline work before. A new group's work may have
        made progress elsewhere until then."""
        self._was_idle = True
        self._waiting_ns: dict[Subject, int] = {}
        """Since when keys' next requests, and requests without a group, have been seen to wait."""

    @property
    def awaits_tick(self) -> bool:
        """Whether the next tick may yield a record: a recorded standstill may be over, or admitted offline work may
        stand. (Where offline work waits, a tick is awaited anyway.)"""
        groups, harvesting = self._state.groups, self._state.changes.harvesting
        return bool(self._told) or any(g in groups and _may_stand(groups[g]) for g in harvesting)

    def look(self, now_ns: int) -> list[Record]:
        """The records of this tick: ``offline_stands`` of work that has stood for ``LEAST_NS`` and was not recorded
        yet, or has another reason now; ``offline_goes_on`` of recorded work that has made progress or has ended. The
        next tick compares with what is recorded here."""
        if not self._told and not self._has_work():
            self._was_idle = True
            return []
        records: list[Record] = []
        standing: set[Subject] = set()
        for subject, since_ns, ask in self._standing(now_ns):
            told = self._told.get(subject)
            if told is not None and told.since_ns != since_ns:
                continue
            standing.add(subject)
            if now_ns - since_ns < LEAST_NS:
                continue
            why, inputs = ask(now_ns)
            if told is None or told.why is not why:
                self._told[subject] = _Told(why, since_ns)
                stood_ms = (now_ns - since_ns) / 1e6
                fields = _named(subject) | {"reason": str(why), "stood_ms": stood_ms}
                records.append(Record("offline_stands", now_ns, fields | inputs))
        for subject in [s for s in self._told if s not in standing]:
            told = self._told[subject]
            if self._is_over(subject, told.since_ns):
                del self._told[subject]
                fields = _named(subject) | {"ms": (now_ns - told.since_ns) / 1e6}
                records.append(Record("offline_goes_on", now_ns, fields))
        return records

    def _has_work(self) -> bool:
        """Whether some offline request may exist: one runs, is stored, waits or is unplaced, or workers are in a
        move."""
        state = self._state
        if state.changes.harvesting or self._moves.moving_workers():
            return True
        if any(s.is_offline for s in state.unplaced.values()):
            return True
        return any(state.groups[group_id].queues.waiting_offline for group_id in state.changes.queued)

    def _is_over(self, subject: Subject, since_ns: int) -> bool:
        """Whether a recorded standstill, which is not among those of this tick, is over. A group's offline work must
        have computed a token for the first time since, as a step under way may still be given up; the group is caught
        up for that. All else is over at once: of a single request, of requests without a group, of a group that is gone
        or has no offline requests."""
        group_id, request_id = subject
        group = None if group_id is None else self._state.groups.get(group_id)
        if group is None or request_id is not None or not _has_offline(group):
            return True
        self._state.catch_up(group.group_id)
        return group.counters.fresh.offline_ns > since_ns

    def _standing(self, now_ns: int) -> Iterator[tuple[Subject, int, Reason]]:
        """Yield all that stands: (subject, since when in ns, function that names the reason). Offline requests without
        a group stand together, and so does all offline work of a group without progress; that group is caught up. In a
        group with progress, the next request of each key without one in service stands by itself.

        The times at which groups and waiting requests were first seen are kept for the next tick.
        """
        state, before = self._state, self._waiting_ns
        self._waiting_ns = {}
        if num_unplaced := len(state.unplaced) - len(state.unplaced_online()):
            since_ns = self._waiting_ns[None, None] = before.get((None, None), now_ns)
            yield (None, None), since_ns, lambda _: (Standstill.NO_WORKER, {"waiting": num_unplaced})
        first_ns, self._was_idle = 0 if self._was_idle else now_ns, False
        self._formed_ns = {group_id: self._formed_ns.get(group_id, first_ns) for group_id in state.groups}
        changing = {g.group_id for w in self._moves.moving_workers() for g in state.groups_of[w]}
        for group_id in sorted(state.changes.harvesting | state.changes.queued | changing):
            group = state.groups.get(group_id)
            if group is None or not _has_offline(group):
                continue
            if _may_stand(group):
                state.catch_up(group_id)
                yield (group_id, None), self._since_ns(group), partial(self._why, group)
                continue
            for head in _kept_waiting(group):
                subject = (group_id, head.request_id)
                self._waiting_ns[subject] = before.get(subject, now_ns)
                yield subject, self._waiting_ns[subject], partial(self._why_key, group, head)

    def _since_ns(self, group: Group) -> int:
        queues = group.queues
        offline = (s for s in chain(queues.served(), queues.waiting_offline.heads().values()) if s.is_offline)
        return max(
            group.counters.fresh.offline_ns, self._formed_ns[group.group_id], min(s.request.arrival_ns for s in offline)
        )

    # --- views ------------------------------------------------------------------------------------------------

    def _why(self, group: Group, now_ns: int) -> tuple[Standstill, dict[str, Any]]:
        queues, head = group.queues, group.queues.waiting_offline.head
        running = queues.running_offline()
        coming = [s for s in queues.moving.values() if s.is_offline and hosted_tokens(s.residences)]
        stored = [e for e in self._store.of(group, HostedPhase.STORED) if e.state.is_offline]
        if running:
            needed = int(_lacks_block(group, running[-1]))
        elif stored:
            needed = self._store.blocks_to_return(stored[0]) + 1 + group.blocks.watermark
        else:
            needed = 0 if head is None else self._needed(group, head)
        view = StandingView(
            len(running), len(queues.waiting_offline), len(stored), len(coming), len(queues.waiting),
            changes_layout=self._changes_layout(group), pauses=bool(queues.offline_holders),
            computes_again=_in_step(group), num_abandoned_steps=group.counters.fresh.num_abandoned_steps,
            step=room_of_last_step(group, group.planner.limits(), running[-1] if running else head, now_ns),
            is_too_large=not stored and head is not None and group.blocks.is_oversized(head),
            num_places=_num_places(group), num_blocks_needed=needed, num_blocks_free=_num_free(group),
        )
        why, inputs = why_standing(view)
        counts = {"running": view.running, "waiting": view.waiting, "hosted": view.stored + view.coming}
        return why, counts | {"online_running": len(queues.running) - view.running} | inputs

    def _why_key(self, group: Group, head: RequestState, now_ns: int) -> tuple[Standstill, dict[str, Any]]:
        queues = group.queues
        following = queues.waiting_offline.head
        if following is not None and following is not head:
            gives_way = key_of(head) in self._state.offline_tokens.gives_way
            return Standstill.GIVES_WAY if gives_way else Standstill.OTHERS, {
                "own_virtual_tokens": self._state.offline_tokens.of(head.tenant),
                "next_virtual_tokens": self._state.offline_tokens.of(following.tenant),
                "next_request": following.request_id,
                "waiting": len(queues.waiting_offline),
            }
        view = StandingView(
            0, len(queues.waiting_offline), 0, 0, len(queues.waiting), pauses=bool(queues.offline_holders),
            step=room_of_last_step(group, group.planner.limits(), head, now_ns),
            is_too_large=group.blocks.is_oversized(head),
            num_places=_num_places(group), num_blocks_needed=self._needed(group, head),
            num_blocks_free=_num_free(group),
        )
        why, inputs = why_standing(view)
        return why, {"waiting": view.waiting} | inputs

    def _needed(self, group: Group, head: RequestState) -> int:
        if group.blocks.is_oversized(head):
            return group.limits.blocks_for(head.num_tokens)
        return group.blocks.cached_prefix(head)[1] + (group.blocks.watermark if group.queues.running else 0)

    def _changes_layout(self, group: Group) -> bool:
        """Whether a move keeps the group's offline work out. Its steps are held; or its workers move, and none of its
        offline requests can run or come back before they have settled."""
        if group.paused:
            return True
        if self._moves.moving_workers().isdisjoint(group.worker_ids):
            return False
        queues, running = group.queues, group.queues.running_offline()
        if running:
            return all(s.paused or s.recompute for s in running)
        return bool(queues.stored) or any(not hosted_tokens(s.residences) for s in queues.moving.values())


def _has_offline(group: Group) -> bool:
    queues = group.queues
    return queues.has_offline or any(s.is_offline for s in (*queues.stored.values(), *queues.moving.values()))


def _may_stand(group: Group) -> bool:
    """Whether the group has offline requests, and no step under way computes something of one for the first time, or
    the last such step was given up."""
    return _has_offline(group) and (group.counters.fresh.num_abandoned_steps > 0 or not any(
        _is_fresh(row) for flight in group.in_flight.values() for row in reversed(flight.step.rows)
    ))


def _kept_waiting(group: Group) -> list[RequestState]:
    """The next waiting offline request of each key (tenant) that has no offline request in service; empty: none."""
    heads = group.queues.waiting_offline.heads()
    if not heads:
        return []
    served = {s.tenant for s in group.queues.served() if s.is_offline}
    return [head for tenant, head in heads.items() if tenant not in served]


def _is_fresh(row: StepRow) -> bool:
    state = row.state
    reached = min(row.context_len + row.num_tokens, state.num_prompt)
    return state.is_offline and (row.samples or reached > state.num_prompt_seen)


def _in_step(group: Group) -> bool:
    """Whether a step under way has an offline request in it: offline rows come last."""
    return any(flight.step.rows[-1].state.is_offline for flight in group.in_flight.values())


def _lacks_block(group: Group, state: RequestState) -> bool:
    """Whether the request's next token needs a block, and none can be allocated."""
    ledger = group.blocks.ledgers[0]
    held = ledger.num_blocks_of(state.request_id) * group.limits.block_size
    return state.num_computed + state.num_pending >= held and not group.blocks.num_allocatable


def _num_places(group: Group) -> int:
    return group.max_running - len(group.queues.running) - len(group.queues.moving)


def _num_free(group: Group) -> int:
    """Free blocks for a request that comes back or is admitted; 0 where reservations or the cap on admission leave
    none."""
    return max(0, group.blocks.num_free)


def _named(subject: Subject) -> dict[str, Any]:
    group_id, request_id = subject
    return {"group": group_id} | ({} if request_id is None else {"request": request_id})

"""The requests that wait, run, move and are stored in one group, their order, and their sums.

Every change is noted (``core.changes``). ``core.serving.blocks`` has the blocks; ``core.serving.group`` chooses the
requests of a step and commits it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, takewhile

from jettison.core.changes import Changes
from jettison.core.requests import Phase, RequestState
from jettison.core.residence import Residence, hosted_only
from jettison.core.serving.holds import Holder
from jettison.core.serving.limits import SchedulerLimits
from jettison.core.serving.virtualtokens import TenantId, VirtualTokens, key_of
from jettison.core.serving.waiting import WaitingQueue
from jettison.policy.order import OUTPUT_WEIGHT, PROMPT_WEIGHT, OwnKey, counts_priority, in_service_order
from jettison.types import NANOSECONDS, GroupId, RequestId


class Queues:
    """The requests of one group, by what they do: wait, run, move, or are stored."""

    def __init__(
        self,
        group_id: GroupId,
        residence: Residence,
        limits: SchedulerLimits,
        changes: Changes,
        tokens: VirtualTokens | None = None,
        offline_tokens: VirtualTokens | None = None,
    ) -> None:
        """``residence``: the one in which its requests run; all of them share it. ``tokens``, ``offline_tokens``:
        counts of tenants by class, shared by all groups of a cluster; None: its own."""
        self._tokens = tokens or VirtualTokens()
        self._offline_tokens = offline_tokens or VirtualTokens()
        self.waiting = WaitingQueue(self._tokens, limits.scheduling_policy)
        """Waiting online requests: overload, restores and dispatch look at these."""
        self.waiting_offline = WaitingQueue(self._offline_tokens, limits.scheduling_policy)
        """Waiting offline requests: admitted after online ones, and no reason for overload or moves."""
        self._offline_ids: set[RequestId] = set()
        """Ids in ``waiting_offline``."""
        self.running: dict[RequestId, RequestState] = {}
        """In the order of ``in_order``, as of when the last one came, or other batches began to give way."""
        self._tenants: set[str] = set()
        """Tenants with requests that have run here since the running set was last empty."""
        self._newest_turns = [0, 0]
        """Newest turn of the requests that have run here: online, offline."""
        self.moving: dict[RequestId, RequestState] = {}
        self.stored: dict[RequestId, RequestState] = {}
        """Requests with KV in host pools only: they hold no blocks and wait to be brought back."""
        self.suspects: dict[RequestId, RequestState] = {}
        """Suspects: waiting and running requests that may be what kills workers."""
        self.version = 0
        """Grows with every change: plans made before are stale."""
        self._group_id = group_id
        self._only_here = (residence,)
        self._limits = limits
        self._touched, self._freer = changes.touched, changes.freer
        self._queued, self._queued_online = changes.queued, changes.queued_online
        self._harvesting = changes.harvesting
        self._came = changes.came
        self._stir = changes.stir
        self.offline_holders: set[Holder] = set()
        """Owners that keep offline requests from being admitted and from coming back from host pools. ``Group.hold``
        sets it."""
        # Sums are kept, as dispatch and the monitor would cost O(queue) each time; ``check`` compares.
        self._num_queued_blocks = 0
        self._num_queued_tokens = 0
        self.queued_squares = 0
        """The squares of the waiting online requests' tokens, added up: by these their attention goes."""
        self.largest_queued_tokens = 0
        """No waiting request has more tokens; lowered only when the queue is empty."""
        self.prefilling: dict[RequestId, RequestState] = {}
        """All running requests with more than one token to compute (and perhaps some with fewer). Read it;
        ``note_tokens`` takes requests out."""
        self._sum_scheduled_ns = 0
        """When the running requests were first scheduled, summed."""
        self._num_offline = 0
        """Running offline requests."""
        self._sum_offline_ns = 0
        """The same sum for running offline requests alone."""
        self._counts_priority = counts_priority(limits.scheduling_policy)

    def note_change(self) -> None:
        """Note that the queues, or the progress of their requests, have changed: plans made before are stale, the group
        has to be planned again, and it may be freer."""
        self.version += 1
        self._touched.add(self._group_id)
        self._freer.add(self._group_id)

    # --- read by other modules --------------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """Whether requests of some class wait."""
        return bool(self.waiting) or bool(self.waiting_offline)

    @property
    def has_offline(self) -> bool:
        """Whether some offline request runs or waits; moving and stored ones do not count."""
        return self._num_offline > 0 or bool(self._offline_ids)

    @property
    def serves_online(self) -> bool:
        """Whether some online request has been admitted: it runs, moves or is stored."""
        if len(self.running) > self._num_offline:
            return True
        if not (self.moving or self.stored):
            return False
        return any(not s.is_offline for s in chain(self.moving.values(), self.stored.values()))

    @property
    def has_both_classes(self) -> bool:
        """Whether offline requests run or wait here, and online ones have been admitted or wait."""
        return self.has_offline and (bool(self.waiting) or self.serves_online)

    @property
    def num_running_offline(self) -> int:
        """How many offline requests run."""
        return self._num_offline

    def queue_of(self, state: RequestState) -> WaitingQueue:
        """The waiting queue of a request's class."""
        return self.waiting_offline if state.is_offline else self.waiting

    def all_requests(self) -> list[RequestState]:
        """Requests that wait, run, move or are stored, in this order; a new list."""
        return [*self.waiting, *self.waiting_offline, *self.served()]

    def online_requests(self) -> list[RequestState]:
        """All online requests of the group, waiting ones first; a new list."""
        return [*self.waiting, *(s for s in self.served() if not s.is_offline)]

    def served(self) -> Iterator[RequestState]:
        """Admitted requests: running, moving and stored."""
        return chain(self.running.values(), self.moving.values(), self.stored.values())

    def running_offline(self) -> list[RequestState]:
        """Running offline requests, the last in order first: O(their number), as they come after all online ones."""
        return list(takewhile(lambda s: s.is_offline, reversed(self.running.values())))

    def holding_offline(self) -> list[RequestState]:
        """Offline requests that have blocks: running ones, and moving ones."""
        return [*self.running_offline(), *(s for s in self.moving.values() if s.is_offline)]

    @property
    def admits_offline(self) -> bool:
        """Whether waiting offline requests may be admitted: offline work is not paused, and no stored offline request
        waits to come back."""
        return not (self.offline_holders or any(s.is_offline for s in self.stored.values()))

    def newcomers(self) -> Iterator[RequestState]:
        """Waiting requests that may be admitted, in the order of service: online ones, then offline ones unless
        ``admits_offline`` is False."""
        return chain(self.waiting, self.waiting_offline) if self.admits_offline else iter(self.waiting)

    @property
    def num_served(self) -> int:
        """How many requests have been admitted: running, moving, or stored."""
        return len(self.running) + len(self.moving) + len(self.stored)

    @property
    def num_served_online(self) -> int:
        """How many online requests have been admitted: running, moving, or stored."""
        if not (self._num_offline or self.moving or self.stored):
            return len(self.running)
        others = chain(self.moving.values(), self.stored.values())
        return len(self.running) - self._num_offline + sum(not s.is_offline for s in others)

    def queued_blocks(self) -> int:
        """Blocks that all waiting online requests need, whatever the prefix cache knows."""
        return self._num_queued_blocks

    def queued_tokens(self) -> int:
        """Tokens that all waiting online requests have to compute, whatever the prefix cache knows."""
        return self._num_queued_tokens

    def unfinished_tokens(self) -> int:
        """Tokens that running online requests have to compute, of those with more than one left: they do not decode
        yet."""
        return sum(
            ready for s in self.prefilling.values()
            if (ready := s.num_tokens - s.num_computed) > 1 and not s.is_offline
        )

    def mean_age_s(self, now_ns: int, *, is_offline: bool = False) -> float | None:
        """How long ago, in seconds, the running requests of a class were first scheduled, on average; None where none
        runs."""
        num, sum_ns = self._num_offline, self._sum_offline_ns
        if not is_offline:
            num, sum_ns = len(self.running) - num, self._sum_scheduled_ns - sum_ns
        return (num * now_ns - sum_ns) / NANOSECONDS / num if num else None

    def in_order(self, states: Iterable[RequestState]) -> list[RequestState]:
        """These requests in the group's order of service (``policy.order``), except that batches that give way
        (``policy.lending``) go last, as in a queue."""
        in_order = in_service_order(states, self._limits.scheduling_policy)
        return sorted(in_order, key=self._gives_way) if self._offline_tokens.gives_way else in_order

    def _gives_way(self, state: RequestState) -> bool:
        return state.is_offline and key_of(state) in self._offline_tokens.gives_way

    # --- changing ------------------------------------------------------------------------------------------------

    def enqueue(self, state: RequestState) -> None:
        """Put a request that is in none of its queues into the group's waiting queue of its class. It belongs to this
        group from now on, which has to be planned again but counts as no freer. A request on trial is noted as a
        suspect."""
        self.version += 1
        self._touched.add(self._group_id)
        self._queued.add(self._group_id)
        self._stir(state.request_id)
        if not state.is_offline and state.group_id != self._group_id:
            self._came.append(state.request_id)
        state.group_id = self._group_id
        state.phase = Phase.WAITING
        self.note_suspect(state)
        self._count_queued(state, 1)
        if not self.has_waiting:
            self.largest_queued_tokens = 0
        self.largest_queued_tokens = max(self.largest_queued_tokens, state.num_tokens)
        self.queue_of(state).add(state)
        if state.is_offline:
            self._offline_ids.add(state.request_id)
        else:
            self._queued_online.add(self._group_id)

    def note_suspect(self, state: RequestState) -> None:
        """Note a request of the group as a suspect, if it is on trial; else nothing."""
        if state.on_trial:
            self.suspects[state.request_id] = state

    def _count_queued(self, state: RequestState, sign: int) -> None:
        if state.is_offline:
            return
        self._num_queued_blocks += sign * self._limits.blocks_for(state.num_tokens)
        self._num_queued_tokens += sign * state.num_tokens
        self.queued_squares += sign * state.num_tokens**2

    def _note_unqueued(self) -> None:
        if not self.waiting:
            self._queued_online.discard(self._group_id)
            if not self.waiting_offline:
                self._queued.discard(self._group_id)

    def take_waiting(
        self, request_ids: Sequence[RequestId], steps_aside: Callable[[RequestState], bool]
    ) -> list[RequestState]:
        """Take these requests out of the waiting queues and return them, in the order of service, which ids must come
        in. Waiting requests before them stay; those for which ``steps_aside`` is true have had their turn."""
        online = [r for r in request_ids if r not in self._offline_ids] if self._offline_ids else request_ids
        offline = request_ids[len(online) :]
        taken = self.waiting.take(online, steps_aside) if online else []
        taken += self.waiting_offline.take(offline, steps_aside) if offline else []
        self._offline_ids.difference_update(offline)
        for state in taken:
            self._count_queued(state, -1)
        self._note_unqueued()
        return taken

    def resume(self, state: RequestState) -> None:
        """Take a request with complete KV in every stage into the running set, in the order of service: it was admitted
        just now, or was moving here. It belongs to this group from now on, which is planned again, and its KV is at the
        group's workers and, if some was, in host pools."""
        assert state.first_scheduled_ns is not None, f"{state} has never been admitted"
        self.note_change()
        self._stir(state.request_id)
        self.moving.pop(state.request_id, None)
        state.group_id = self._group_id
        state.phase = Phase.RUNNING
        self.note_suspect(state)
        hosted = hosted_only(state.residences)
        state.residences = (*self._only_here, *hosted) if hosted else self._only_here
        goes_last = self._goes_last(state)
        self.running[state.request_id] = state
        self._count_running(state, 1)
        if state.num_tokens - state.num_computed > 1:
            self.prefilling[state.request_id] = state
        if not goes_last:
            self.running = {s.request_id: s for s in self.in_order(self.running.values())}

    def _count_running(self, state: RequestState, sign: int) -> None:
        scheduled_ns = sign * (state.first_scheduled_ns or 0)
        self._sum_scheduled_ns += scheduled_ns
        if state.is_offline:
            self._num_offline += sign
            self._sum_offline_ns += scheduled_ns
            self._harvesting.add(self._group_id)

    def _goes_last(self, state: RequestState) -> bool:
        """Whether a request is certainly the last of the running ones in service order; False: sort them. Its tenant
        and turn are noted for later calls. Hardly ever more than O(1)."""
        last = next(reversed(self.running.values()), None)
        if last is None:
            self._tenants.clear()
        self._tenants.add(state.tenant)
        turn, newest = state.turn or 0, self._newest_turns[state.is_offline]
        self._newest_turns[state.is_offline] = max(turn, newest)
        is_newest = turn > newest
        if last is None:
            return True
        if last.is_offline != state.is_offline:
            return state.is_offline
        if self._offline_tokens.gives_way and (self._gives_way(last) or self._gives_way(state)):
            return not self._gives_way(last)  # a request that gives way hardly ever begins: sort then
        if len(self._tenants) == 1:
            return last.order <= state.order
        if not is_newest or (self._counts_priority and state.order[0] < last.order[0]):
            return False
        own = next((s for s in reversed(self.running.values()) if s.tenant == state.tenant), None)
        return own is None or own.order <= state.order

    def note_lending(self) -> None:
        """Put the running requests in order again, as other batches give way than before. Nothing in a group where no
        offline request runs or waits; else it has to be planned again."""
        if self.has_offline:
            self.note_change()
        if self._num_offline:
            self.running = {s.request_id: s for s in self.in_order(self.running.values())}

    def note_tokens(self, states: Iterable[RequestState]) -> None:
        """Note that each of these has got a token: its prompt is computed, so it leaves ``prefilling``."""
        for state in states:
            self.prefilling.pop(state.request_id, None)

    @property
    def are_charged(self) -> bool:
        """Whether tenants are charged for tokens: of some class, several are known, so that their counts matter."""
        return self._tokens.are_shared or self._offline_tokens.are_shared

    def charge(self, state: RequestState, num_prompt: int, num_output: int = 0) -> None:
        """Charge a request's tenant, in the request's class, for tokens that have been computed for the first time, or
        will be from now on. A lone tenant is not charged."""
        tokens = self._offline_tokens if state.is_offline else self._tokens
        tokens.charge(state.tenant, PROMPT_WEIGHT * num_prompt + OUTPUT_WEIGHT * num_output)

    def note_trusted(self, state: RequestState) -> None:
        """Note that a suspect has shown that it kills no worker: it is a suspect no more."""
        self.suspects.pop(state.request_id, None)

    def keep_stored(self, state: RequestState) -> None:
        """Take a request with KV in host pools only, which is in no other queue but perhaps moving here, among the
        stored ones. It belongs to this group from now on, which has to be planned again."""
        self.note_change()
        self._stir(state.request_id)
        self.moving.pop(state.request_id, None)
        state.group_id = self._group_id
        state.phase = Phase.STORED
        self.stored[state.request_id] = state
        self._harvesting.add(self._group_id)

    def take_all(self) -> list[RequestState]:
        """Empty all queues and return their requests: the group is about to be dissolved. The requests' blocks, phases
        and places in line for a turn stay as they are."""
        self.note_change()
        states = self.all_requests()
        for state in states:
            self._stir(state.request_id)
        self.waiting.clear()
        self.waiting_offline.clear()
        self._offline_ids.clear()
        self.running.clear()
        self.moving.clear()
        self.stored.clear()
        self.suspects.clear()
        self.prefilling.clear()
        self._num_queued_blocks = self._num_queued_tokens = self.queued_squares = 0
        self._sum_scheduled_ns = self._sum_offline_ns = self._num_offline = 0
        self._note_unqueued()
        return states

    def take_out(self, state: RequestState) -> None:
        """Remove a request from the queue that it is in, and have the group planned again; the request's blocks stay
        where they are. A suspect is no longer noted here."""
        self.note_change()
        self._stir(state.request_id)
        self.suspects.pop(state.request_id, None)
        if state.phase is Phase.WAITING:
            self.queue_of(state).remove(state)
            self._offline_ids.discard(state.request_id)
            self._count_queued(state, -1)
            self._note_unqueued()
            return
        self.moving.pop(state.request_id, None)
        self.stored.pop(state.request_id, None)
        if self.running.pop(state.request_id, None) is not None:
            self.prefilling.pop(state.request_id, None)
            self._count_running(state, -1)

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the queues' invariants, for tests and idle moments. Raises AssertionError."""
        for state in self.running.values():
            assert state.phase is Phase.RUNNING and state.group_id == self._group_id, state
            num_unknown = self._limits.steps_ahead if state.num_pending else 0
            assert state.num_computed <= state.num_tokens, state
            assert 0 <= state.num_computed + state.num_pending <= state.num_tokens + num_unknown, state
            assert state.num_tokens == state.num_prompt + len(state.output), state
        online, offline = list(self.waiting), list(self.waiting_offline)
        for state in (*online, *offline):
            assert state.phase is Phase.WAITING and state.num_pending == 0, state
            assert state.num_tokens <= self.largest_queued_tokens, state
        assert not any(s.is_offline for s in online) and all(s.is_offline for s in offline)
        assert self._num_queued_blocks == sum(self._limits.blocks_for(s.num_tokens) for s in online)
        assert self._num_queued_tokens == sum(s.num_tokens for s in online)
        assert self.queued_squares == sum(s.num_tokens**2 for s in online)
        assert self._offline_ids == {s.request_id for s in offline}
        assert self.has_waiting == (self._group_id in self._queued)
        assert bool(online) == (self._group_id in self._queued_online)
        classes = [s.is_offline for s in self.running.values()]
        assert classes == sorted(classes), "an offline request runs before an online one"
        unfinished = {r for r, s in self.running.items() if s.num_tokens - s.num_computed > 1}
        assert unfinished <= self.prefilling.keys() <= self.running.keys()
        assert self._sum_scheduled_ns == sum(s.first_scheduled_ns or 0 for s in self.running.values())
        sum_offline_ns = sum(s.first_scheduled_ns or 0 for s in self.running_offline())
        assert (self._num_offline, self._sum_offline_ns) == (sum(classes), sum_offline_ns)
        self.waiting.check()
        self.waiting_offline.check()
        by_tenant: dict[tuple[TenantId, bool], list[tuple[bool, OwnKey]]] = {}
        for state in self.running.values():
            own = by_tenant.setdefault((state.tenant, state.is_offline), [])
            own.append((self._gives_way(state), state.order))
        for (tenant, _), own in by_tenant.items():
            assert own == sorted(own), f"running requests of {tenant!r} are out of order"
        ways = [self._gives_way(s) for s in self.running_offline()]
        assert ways == sorted(ways, reverse=True), "what gives way is the first to be evicted"

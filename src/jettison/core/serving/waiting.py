"""The waiting queue of one group: a line of requests for each tenant, and the request that is next.

It keeps the order that ``policy.order`` decides; ``policy.batching`` decides whether a request is admitted. A pick
costs O(log tenants), and as much for each tenant that was served meanwhile; with one tenant the queue is that tenant's
line and nothing else.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from jettison.core.requests import RequestState
from jettison.core.serving.virtualtokens import TenantId, VirtualTokens, key_of
from jettison.policy.order import PROMPT_WEIGHT, LineKey, OwnKey, SchedulingPolicy, goes_before, line_key
from jettison.types import RequestId


class WaitingQueue:
    """Waiting requests of one class in one group; iterating gives them in the order of service. They must not change
    meanwhile."""

    def __init__(self, tokens: VirtualTokens | None = None, policy: SchedulingPolicy = "fcfs") -> None:
        """``tokens``: the counts of tenants, shared by all groups of a cluster; None: its own."""
        self._tokens = tokens or VirtualTokens()
        self._policy: SchedulingPolicy = policy
        self._lines: dict[TenantId, deque[RequestState]] = {}
        """Lines of tenants with waiting requests, none empty: in the tenant's own order, batches that give way behind
        the rest."""
        self._keys: dict[TenantId, LineKey] = {}
        """Keys of these tenants as ranked: ``line_key``, or a smaller key where they have been served since."""
        self._ranked: list[tuple[LineKey, TenantId]] = []
        """Tenants sorted by ``_keys``. Empty (and ``_keys``, too) while fewer than two tenants wait."""
        self._gave_way = self._tokens.gives_way
        """The batches that gave way when it was last put in order."""
        self._num = 0

    # --- reading ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._num

    def __contains__(self, state: RequestState) -> bool:
        return state in self._lines.get(state.tenant, ())

    def __iter__(self) -> Iterator[RequestState]:
        if self._gave_way is not self._tokens.gives_way:
            self._refresh()
        if len(self._lines) > 1:
            return self._by_tokens()
        return iter(next(iter(self._lines.values()), ()))

    def num_by_tenant(self) -> dict[TenantId, int]:
        """How many requests wait, by tenant; tenants without any are left out."""
        return {tenant: len(line) for tenant, line in self._lines.items()}

    def heads(self) -> dict[TenantId, RequestState]:
        """The next request of each tenant, by tenant; tenants without any are left out."""
        if self._gave_way is not self._tokens.gives_way:
            self._refresh()
        return {tenant: line[0] for tenant, line in self._lines.items()}

    @property
    def head(self) -> RequestState | None:
        """The request that is next; None where none waits. Where several tenants wait, all groups commit the steps that
        have ended first, and tenants that were served meanwhile are ranked again."""
        if self._gave_way is not self._tokens.gives_way:
            self._refresh()
        if not self._ranked:
            return next(iter(self._lines.values()))[0] if self._lines else None
        self._tokens.catch_up()
        while self._key(tenant := self._ranked[0][1]) != self._ranked[0][0]:
            self._rank(tenant)
        return self._lines[tenant][0]

    def ahead_of(self, served: RequestState) -> list[RequestState]:
        """The requests that would go before a request that has been served, if that had to wait again. O(length)."""
        return [s for line in self._lines.values() for s in line if goes_before(s, served, self._policy)]

    def _by_tokens(self) -> Iterator[RequestState]:
        """Yield the requests of several tenants in the order in which ``take`` would serve them, each tenant charged
        for each prompt as it comes."""
        self._tokens.catch_up()
        heap = self._ranked.copy()  # sorted, so a heap
        lines: dict[TenantId, Iterator[RequestState]] = {}
        """For tenants reached so far: the rest of their lines, behind their heads in the heap."""
        heads: dict[TenantId, RequestState] = {}
        tokens: dict[TenantId, int] = {}
        while heap:
            ranked, tenant = heap[0]
            if tenant not in lines:
                if (key := self._key(tenant)) != ranked:
                    heapq.heapreplace(heap, (key, tenant))
                    continue
                lines[tenant] = iter(self._lines[tenant])
                heads[tenant], tokens[tenant] = next(lines[tenant]), self._tokens.of(tenant)
            state = heads[tenant]
            yield state
            if state.first_scheduled_ns is None:
                tokens[tenant] += PROMPT_WEIGHT * state.num_prompt
            following = next(lines[tenant], None)
            if following is None:
                heapq.heappop(heap)
            else:
                heads[tenant] = following
                gives_way = key_of(following) in self._gave_way if self._gave_way else False
                key = line_key(following, tokens[tenant], self._policy, gives_way=gives_way)
                heapq.heapreplace(heap, (key, tenant))

    # --- changing ---------------------------------------------------------------------------------------------

    def add(self, state: RequestState) -> None:
        """Put a request among its tenant's own, in the tenant's order. It is in line for a turn
        (``core.serving.virtualtokens``), unless it has had one."""
        if self._gave_way is not self._tokens.gives_way:
            self._refresh()
        tenant = state.tenant
        self._tokens.queue(state)
        self._num += 1
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = deque()
        if not line or (not self._gave_way and line[-1].order <= state.order):
            line.append(state)
        else:
            line.insert(bisect_right(line, self._own_key(state), key=self._own_key), state)
        if line[0] is state:
            self._rank(tenant)

    def remove(self, state: RequestState) -> None:
        """Take a request out that was not served: its turn, or its place in line for one, stays as it is. Raises
        ValueError where it does not wait here."""
        if self._gave_way is not self._tokens.gives_way:
            self._refresh()
        line = self._lines.get(state.tenant, deque())
        if line and line[0] is state:
            line.popleft()
        else:
            line.remove(state)
        self._num -= 1
        self._rank(state.tenant)

    def clear(self) -> list[RequestState]:
        """Empty the queue and return its requests, in the order of service."""
        states = list(self)
        for part in (self._lines, self._keys, self._ranked):
            part.clear()
        self._num = 0
        return states

    def take(
        self, request_ids: Sequence[RequestId], steps_aside: Callable[[RequestState], bool]
    ) -> list[RequestState]:
        """Serve these requests, which come in the order of service: take them out, give each its turn, and return them.

        A request that is passed over stays. A request that steps aside has thereby had its turn, and is first again as
        soon as the group can hold it. Raises AssertionError for ids in another order.
        """
        taken: list[RequestState] = []
        seen: list[RequestState] = []
        for state in self:
            seen.append(state)
            if state.request_id == request_ids[len(taken)]:
                taken.append(state)
                if len(taken) == len(request_ids):
                    break
        assert len(taken) == len(request_ids), "not in the order of service"
        remaining = iter(taken)
        following = next(remaining, None)
        for state in seen:
            if state is following:
                following = next(remaining, None)
                self._note_turn(state)
                self.remove(state)
            elif steps_aside(state) and state.turn is None:
                self._note_turn(state)
                self._rank(state.tenant)
        return taken

    def _note_turn(self, state: RequestState) -> None:
        if state.turn is None:
            self._tokens.take_turn(state)

    def _rank(self, tenant: TenantId) -> None:
        """Rank a tenant again: its next request may have changed or had its turn, or the tenant has been served. A
        tenant without waiting requests is dropped; below two tenants there are no ranks."""
        if not self._lines[tenant]:
            del self._lines[tenant]
        if len(self._lines) < 2:
            self._keys.clear()
            self._ranked.clear()
            return
        if not self._ranked:
            self._keys = {name: self._key(name) for name in self._lines}
            self._ranked = sorted((key, name) for name, key in self._keys.items())
            return
        if (before := self._keys.pop(tenant, None)) is not None:
            del self._ranked[bisect_left(self._ranked, (before, tenant))]
        if tenant in self._lines:
            key = self._keys[tenant] = self._key(tenant)
            insort(self._ranked, (key, tenant))

    def _key(self, tenant: TenantId) -> LineKey:
        head = self._lines[tenant][0]
        gives_way = key_of(head) in self._gave_way if self._gave_way else False
        return line_key(head, self._tokens.of(tenant), self._policy, gives_way=gives_way)

    def _own_key(self, state: RequestState) -> tuple[bool, OwnKey]:
        return key_of(state) in self._gave_way, state.order

    def _refresh(self) -> None:
        """Put all lines and ranks in order again: other batches give way than before."""
        self._gave_way = self._tokens.gives_way
        self._lines = {tenant: deque(sorted(line, key=self._own_key)) for tenant, line in self._lines.items()}
        if len(self._lines) > 1:
            self._keys = {name: self._key(name) for name in self._lines}
            self._ranked = sorted((key, name) for name, key in self._keys.items())

    def check(self) -> None:
        """Check the queue's invariants, for tests and idle moments. Raises AssertionError."""
        if self._gave_way is not self._tokens.gives_way:
            self._refresh()
        assert self._num == sum(map(len, self._lines.values())) and all(self._lines.values())
        for tenant, line in self._lines.items():
            orders = [self._own_key(s) for s in line]
            assert orders == sorted(orders) and {s.tenant for s in line} == {tenant}, f"the line of {tenant!r}"
        assert self._keys.keys() == (self._lines.keys() if len(self._lines) > 1 else set())
        assert self._ranked == sorted((key, name) for name, key in self._keys.items())
        assert all(key <= self._key(name) for name, key in self._keys.items()), "ranked behind its place"

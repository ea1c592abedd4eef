"""How much each tenant has been served, in virtual tokens (``policy.order``), counted over all groups.

There is one set of counts a class. Counts survive when requests change groups. ``policy.order`` turns counts into the
order of service; ``core.serving.waiting`` has the queues of groups.

Rule 1. A request is *in line* from when it first waits in a group until it has its turn, or ends before; dealing it out
        again changes nothing.
Rule 2. A tenant without a request in line, when one comes, is lifted to the least count of the tenants with requests in
        line or, without such tenants, to the count of the tenant that left the line last: idleness earns no credit
        (Sheng et al., OSDI 2024, algorithm 2).
Rule 3. The count of a tenant without requests is forgotten if its return would lift it anyway: it makes no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from jettison.core.requests import RequestState

TenantId = str

BatchKey = tuple[TenantId, int | None]
"""(tenant, deadline in ns): lines of one batch have the same key. None: requests without a deadline."""

LEAST_SWEEP = 64
"""Tenants beyond those kept last time, before any tenant is forgotten."""


def key_of(state: RequestState) -> BatchKey:
    """Key of the batch that an offline request belongs to: its tenant and its deadline."""
    return state.tenant, state.request.deadline_ns


class VirtualTokens:
    """Counts of all tenants. While a tenant has requests its count only grows: a rank that is out of date is too early,
    never too late."""

    __slots__ = ("_catch_up", "_counts", "_in_line", "_last", "_living", "_num_kept", "gives_way", "num_turns")

    def __init__(
        self, living: Callable[[], Iterable[TenantId]] = tuple, catch_up: Callable[[], None] = lambda: None
    ) -> None:
        """``living``: tenants that have requests; ``catch_up``: has all groups commit the steps that have ended."""
        self.num_turns = 0
        """Turns so far: a request takes one when it is first served, or steps aside."""
        self.gives_way: frozenset[BatchKey] = frozenset()
        """Batches that lend others their turns (``policy.lending``): counts include lent turns."""
        self._counts: dict[TenantId, int] = {}
        self._in_line: dict[TenantId, int] = {}
        """Requests in line of each tenant that has any."""
        self._last: TenantId | None = None
        """The tenant that left the line last."""
        self._num_kept = 0
        self._living, self._catch_up = living, catch_up

    # --- reading ----------------------------------------------------------------------------------------------

    def of(self, tenant: TenantId) -> int:
        """A tenant's count of virtual tokens; 0 for a tenant that is not known."""
        return self._counts.get(tenant, 0)

    @property
    def are_shared(self) -> bool:
        """Whether several tenants are known. A single one is not charged: the next tenant is lifted to its count,
        whatever that is."""
        return len(self._counts) > 1

    def catch_up(self) -> None:
        """Have all groups commit the steps that have ended: counts are about to be compared."""
        self._catch_up()

    # --- changing ---------------------------------------------------------------------------------------------

    def queue(self, state: RequestState) -> None:
        """Put a request that waits in a group in line. If it is its tenant's first there, the tenant's count is lifted
        (rule 2), and tenants may be forgotten (rule 3). Nothing where it is in line, or has had its turn."""
        if state.is_in_line or state.turn is not None:
            return
        state.is_in_line = True
        num = self._in_line.get(state.tenant, 0)
        if not num:
            self._lift(state.tenant)
        self._in_line[state.tenant] = num + 1

    def take_turn(self, state: RequestState) -> None:
        """Take a request that is served for the first time, or steps aside, out of the line, and give it the next
        turn."""
        self.leave(state)
        self.num_turns += 1
        state.turn = self.num_turns

    def leave(self, state: RequestState) -> None:
        """Take a request out of the line, if it is in it. Where its tenant has no other request there, remember that
        this tenant left the line last."""
        if not state.is_in_line:
            return
        state.is_in_line = False
        tenant = state.tenant
        self._in_line[tenant] -= 1
        if not self._in_line[tenant]:
            del self._in_line[tenant]
            self._last = tenant

    def charge(self, tenant: TenantId, num_virtual: int) -> None:
        """Add ``num_virtual`` virtual tokens to a tenant's count; nothing while fewer than two tenants are known."""
        if self.are_shared:
            self._counts[tenant] += num_virtual

    def _lift(self, tenant: TenantId) -> None:
        counts = self._counts
        if len(counts) + (tenant not in counts) < 2:
            counts.setdefault(tenant, 0)
            return
        self._catch_up()  # before the new tenant counts: until then a lone tenant was charged nothing
        least = self._least()
        if tenant not in counts and len(counts) >= 2 * self._num_kept + LEAST_SWEEP:
            kept = {self._last, *self._living()}
            self._counts = counts = {name: n for name, n in counts.items() if n > least or name in kept}
            self._num_kept = len(counts)
        counts[tenant] = max(counts.get(tenant, 0), least)

    def _least(self) -> int:
        """The least count of the tenants in line; without any, the count of the tenant that left the line last, or
        0."""
        if self._in_line:
            return min(map(self._counts.__getitem__, self._in_line))
        return 0 if self._last is None else self._counts[self._last]

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self, requests: Iterable[RequestState]) -> None:
        """Check the line against ``requests``, all requests of the class; for tests and idle moments. Raises
        AssertionError."""
        in_line = [s for s in requests if s.is_in_line]
        assert self._in_line == Counter(s.tenant for s in in_line) and all(s.turn is None for s in in_line)
        assert self._in_line.keys() <= self._counts.keys()
        assert self._last is None or self._last in self._counts

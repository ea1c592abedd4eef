"""In what order requests are served: those of one tenant among themselves, and tenants among each other.

Pure, and the only place that says so: an order is a policy. ``core.serving.waiting`` keeps queues by these keys, and
everything else that has to put requests into order asks ``in_service_order``. Another order is other keys here and
nothing else.

- Online requests go before offline ones; what follows holds within a class.
- Among a tenant's own requests the lower ``priority`` goes first, then the earlier arrival.
- A tenant whose next request has had its turn already (it was preempted, or stepped aside because its group could not
  hold it) goes before all others: the earliest turn first.
- Other tenants take turns (round robin): of those that wait, the one whose last turn is longest ago. So between two of
  its turns none is passed over by another more than once.
- With the policy ``priority`` the priorities of all tenants count against each other before all that.

With one tenant all of this is the first rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol, TypeVar

SchedulingPolicy = Literal["fcfs", "priority"]

OwnKey = tuple[int, int]
"""(priority, number of the arrival), lower first; no two requests have the same."""

LineKey = tuple[int, bool, int]
"""(priority that counts against all tenants, whether it still has to get a turn, turn), lower first."""


class Ordered(Protocol):
    """What an order looks at in a request."""

    @property
    def tenant(self) -> str: ...

    @property
    def order(self) -> OwnKey:
        """Its place among its tenant's own."""
        ...

    @property
    def is_offline(self) -> bool:
        """Its class is the one that waits for the other."""
        ...

    @property
    def turn(self) -> int | None:
        """The turn that it got; None while it has not been served."""
        ...


def counts_priority(policy: SchedulingPolicy) -> bool:
    """Whether the priorities of all tenants count against each other."""
    return policy == "priority"


def line_key(head: Ordered, last_turn: int, policy: SchedulingPolicy) -> LineKey:
    """Where a tenant stands among the others: ``head`` is its next request, ``last_turn`` when it was last served.

    Distinct for distinct tenants, as turns are.
    """
    priority = head.order[0] if counts_priority(policy) else 0
    return (priority, True, last_turn) if head.turn is None else (priority, False, head.turn)


R = TypeVar("R", bound=Ordered)


def in_service_order(requests: Iterable[R], policy: SchedulingPolicy) -> list[R]:
    """Requests of any phase: who has the older claim to memory and to a place goes first. O(n log n).

    Tenants by their turns, those without one last, by arrival; on the places that its requests have among all, a
    tenant's own stand in its own order. Offline requests after all online ones, likewise among themselves.
    """
    online: list[R] = []
    offline: list[R] = []
    for request in requests:
        (offline if request.is_offline else online).append(request)
    return _of_one_class(online, policy) + _of_one_class(offline, policy) if offline else _of_one_class(online, policy)


def _of_one_class(requests: Iterable[R], policy: SchedulingPolicy) -> list[R]:
    own: dict[str, list[R]] = {}
    for request in requests:
        own.setdefault(request.tenant, []).append(request)
    for line in own.values():
        line.sort(key=lambda r: r.order)
    if len(own) < 2:
        return next(iter(own.values()), [])
    places = sorted((r for line in own.values() for r in line), key=lambda r: _place(r, policy))
    lines: dict[str, Iterator[R]] = {tenant: iter(line) for tenant, line in own.items()}
    return [next(lines[place.tenant]) for place in places]


def _place(request: Ordered, policy: SchedulingPolicy) -> tuple[int, bool, int, int]:
    priority, arrival = request.order
    return priority if counts_priority(policy) else 0, request.turn is None, request.turn or 0, arrival


def goes_before(waiting: Ordered, served: Ordered, policy: SchedulingPolicy) -> bool:
    """Whether a waiting request goes before one that has had its turn and were to wait again."""
    if waiting.is_offline != served.is_offline:
        return served.is_offline
    if waiting.tenant == served.tenant:
        return waiting.order < served.order
    if counts_priority(policy) and waiting.order[0] != served.order[0]:
        return waiting.order[0] < served.order[0]
    return waiting.turn is not None and served.turn is not None and waiting.turn < served.turn

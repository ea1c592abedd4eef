"""In what order requests are served: the requests of one tenant, and tenants among each other.

Pure, and the only place that says so: an order is a policy. ``core.serving.waiting`` keeps queues by these keys, and
everything else that has to put requests into order asks ``in_service_order``. Another order is other keys here and
nothing else.

- Online requests go before offline ones; what follows holds within a class.
- Among a tenant's own requests the earlier deadline goes first, then the lower ``priority``, then the earlier arrival.
  One without a deadline is due at once: a client waits for it, while the lines of a batch have hours.
- A request that gives way (``policy.lending``) goes behind its tenant's other requests, and behind other tenants'
  requests that do not give way.
- A tenant whose next request has had its turn already (it was preempted, or stepped aside because its group could not
  hold it) goes before all others: the earliest turn first.
- Of the other tenants the one that has been served least goes first, in virtual tokens (VTC: Sheng et al., "Fairness in
  Serving Large Language Models", OSDI 2024); of equal ones the one whose next request came first. A prompt is charged
  when it is first served, so that the next choice counts it; output as it comes; computing anything again, or taking it
  from the prefix cache, costs nothing.
- With the policy ``priority`` the priorities of all tenants count against each other before all that, also deadlines.

With one tenant all of this is the second rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol, TypeVar

SchedulingPolicy = Literal["fcfs", "priority"]

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
"""Virtual tokens that a token costs, as in the paper: a token of an answer takes a step of its own."""

OwnKey = tuple[int, int, int]
"""(deadline, priority, number of the arrival), or with the policy ``priority`` that first; lower first. No two requests
have the same."""

LineKey = tuple[int, bool, bool, int, int]
"""(priority that counts against all tenants, whether its next request gives way, whether that still has to get a turn,
that turn or else virtual tokens, number of that request's arrival), lower first."""


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
        """It is of the class that waits for the other."""
        ...

    @property
    def turn(self) -> int | None:
        """The turn that it got; None while it has not been served."""
        ...


def counts_priority(policy: SchedulingPolicy) -> bool:
    """Whether the priorities of all tenants count against each other."""
    return policy == "priority"


def own_key(deadline_ns: int | None, priority: int, arrival: int, policy: SchedulingPolicy) -> OwnKey:
    """A request's place among its tenant's own; ``arrival`` numbers them all."""
    due_ns = 0 if deadline_ns is None else deadline_ns
    return (priority, due_ns, arrival) if counts_priority(policy) else (due_ns, priority, arrival)


def line_key(head: Ordered, num_virtual: int, policy: SchedulingPolicy, *, gives_way: bool = False) -> LineKey:
    """Where a tenant stands among the others: ``head`` is its next request, ``num_virtual`` what it has been served.

    Distinct for distinct tenants, as arrivals are.
    """
    first, _, arrival = head.order
    priority = first if counts_priority(policy) else 0
    if head.turn is None:
        return priority, gives_way, True, num_virtual, arrival
    return priority, gives_way, False, head.turn, arrival


R = TypeVar("R", bound=Ordered)


def in_service_order(requests: Iterable[R], policy: SchedulingPolicy) -> list[R]:
    """Requests of any phase, the one with the oldest claim to memory and to a place first. O(n log n).

    Requests take places by their turns, those without a turn last, by arrival. A tenant's requests then share the
    places of that tenant in the tenant's own order. Offline requests come after all online ones, ordered likewise.
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
    first, _, arrival = request.order
    return first if counts_priority(policy) else 0, request.turn is None, request.turn or 0, arrival


def goes_before(waiting: Ordered, served: Ordered, policy: SchedulingPolicy) -> bool:
    """Whether a waiting request goes before one that has had its turn and would have to wait again."""
    if waiting.is_offline != served.is_offline:
        return served.is_offline
    if waiting.tenant == served.tenant:
        return waiting.order < served.order
    if counts_priority(policy) and waiting.order[0] != served.order[0]:
        return waiting.order[0] < served.order[0]
    return waiting.turn is not None and served.turn is not None and waiting.turn < served.turn

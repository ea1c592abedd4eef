"""Which batches lend their turns to offline work that would be late: slack is lent, and paid back. Pure.

Tenants share alike (``policy.order``), so a batch may be late although another tenant's has hours. Where a batch would
be late by its tenant's share on all that serves and is being woken, what is due after it gives way, of any tenant: it
waits behind the rest. Only what is in time all the same, were everything served earliest deadline first, lends to
another tenant. Nothing else does: neither what is due at no time, as a client waits for it, nor what is late already.

What is lent counts (``core.serving.virtualtokens``): the lender has been served less, and is next where tenants share
alike again. It lends while what it has left fits before its deadline by the whole supply; what it has lent is less
than that, or it would have been done by its share. So it is paid back before its deadline, also where whatever comes
meanwhile ends the lending. (Several lenders share what is paid back: then the one that is due first may be urgent.)

A batch that cannot be met any more, even first of all, gives way to others of its own tenant alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from jettison.policy.deadlines import SLEEP_MARGIN, WAKE_MARGIN, Demand, Supply, end_of, lateness

LEND_MARGIN = SLEEP_MARGIN
"""Times what is predicted, for which there has to be time: more than for wakes, as predictions leave out that what runs
stays until its last token, or until it has to give its place up. Turns lent too soon cost no tenant anything."""


class Lending(NamedTuple):
    """Numbers of demands."""

    urgent: tuple[int, ...] = ()
    """Due until the first that would be late, itself among them."""
    giving_way: tuple[int, ...] = ()


NO_LENDING = Lending()


def in_turn(demands: Sequence[Demand], supply: Supply) -> tuple[list[float], set[int]]:
    """When each of those that are due at some time ends by this supply, were all served earliest deadline first, and
    which are lost: late already, or late even so although work takes less than is predicted, by as much as wakes reckon
    with more. No other waits for what is lost, and of other tenants' work that is due at no time each waits for as much
    as its own tenant is served."""
    free_of: defaultdict[str, float] = defaultdict(float)
    own_of: defaultdict[str, float] = defaultdict(float)
    for demand in demands:
        if demand.due_s is None:
            free_of[demand.tenant] += demand.work_s
    found, is_lost, total_s = [0.0] * len(demands), set[int](), 0.0
    for due_s, at in sorted((each.due_s, i) for i, each in enumerate(demands) if each.due_s is not None):
        each = demands[at]
        own_s = free_of.get(each.tenant, 0.0) + own_of[each.tenant] + each.work_s
        free_s = sum(work_s if tenant == each.tenant else min(work_s, own_s) for tenant, work_s in free_of.items())
        work_s = total_s + each.work_s + free_s
        found[at] = end_of(each, work_s, supply)
        if due_s <= 0.0 or (found[at] > due_s and end_of(each, work_s, supply, 1.0 / WAKE_MARGIN) > due_s):
            is_lost.add(at)
        else:
            total_s += each.work_s
            own_of[each.tenant] += each.work_s
    return found, is_lost


def lend(demands: Sequence[Demand], supply: Supply, waits: Sequence[bool]) -> Lending:
    """Which of these give way now. ``supply``: with what is being woken. ``waits``: some request of it has no place."""
    late = lateness(demands, supply, LEND_MARGIN)
    if not any(late):
        return NO_LENDING
    ends_s, lost = in_turn(demands, supply)
    due = {i: each.due_s for i, each in enumerate(demands) if each.due_s is not None}
    can_be_met = [i for i in due if late[i] > 0.0 and waits[i] and i not in lost]
    if not can_be_met:
        return NO_LENDING
    first = min(can_be_met, key=due.__getitem__)
    giving_way = [
        i for i, due_s in due.items()
        if (i in lost or due_s > due[first])
        and (demands[i].tenant == demands[first].tenant or (i not in lost and ends_s[i] <= due_s))
    ]
    urgent = [i for i, due_s in due.items() if due_s <= due[first] and i not in lost]
    return Lending(tuple(urgent), tuple(giving_way))

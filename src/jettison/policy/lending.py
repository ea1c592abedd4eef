"""Which batches lend their turns to offline work that would be late: a batch with slack lends, and is paid back. Pure.

Tenants get equal shares (``policy.order``), so a batch may be late although another tenant's batch has hours. Where a
batch would be late by its tenant's share of all instances that serve or are being woken, work that is due after it
gives way, of any tenant: it waits behind the rest. Only work that would still be in time if everything were served
earliest deadline first lends to another tenant. Work without a deadline does not lend, as a client waits for it; nor
does work that is late already.

Lent turns count (``core.serving.virtualtokens``): the lender has been served less, so it is next once tenants get equal
shares again. A batch lends while its remaining work fits before its deadline on the whole supply. It has lent less than
that, or its own share would have finished it. So it is paid back before its deadline, whatever ends the lending.
(Several lenders share what is paid back: then the lender with the earliest deadline may become urgent.)

A batch whose deadline cannot be met any more, even if it were served first of all, gives way to others of its own
tenant alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from jettison.policy.deadlines import SLEEP_MARGIN, WAKE_MARGIN, Demand, Supply, end_of, lateness

LEND_MARGIN = SLEEP_MARGIN
"""Factor on predicted times that a deadline must leave room for. Larger than for wakes: predictions leave out that a
running request keeps its place until its last token, or until it is made to give it up. Turns lent too soon cost no
tenant anything."""


class Lending(NamedTuple):
    """Indices of demands."""

    urgent: tuple[int, ...] = ()
    """Demands due no later than the first one that would be late, that one included; no lost ones."""
    giving_way: tuple[int, ...] = ()


NO_LENDING = Lending()


def in_turn(demands: Sequence[Demand], supply: Supply) -> tuple[list[float], set[int]]:
    """For each demand with a deadline, seconds until it ends on this supply if all were served earliest deadline first
    (0 for the others); and the indices of lost demands. A demand is lost if its deadline has passed, or if it would be
    late even where work takes less time than predicted, by the factor of ``WAKE_MARGIN``. No demand waits for a lost
    one. Of another tenant's work without a deadline, a demand waits for as much as its own tenant is served."""
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
    """Which demands give way now. ``supply``: sleepers that are being woken included. ``waits``: for each demand,
    whether some request of it has no place."""
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

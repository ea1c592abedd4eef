"""Whose turns go to offline work that would be late: slack is lent, and paid back. Pure.

Tenants share alike (``policy.order``), so a batch may be late although another tenant's has hours. Where a batch would
be late by its tenant's share on all that serves and is being woken, what is due after it gives way, whose ever it is:
it waits behind the rest. Only what is in time all the same, were everything served earliest deadline first, lends to
another tenant. Nothing else does: neither what is due at no time, as a client waits for it, nor what is late already.

What is lent counts (``core.serving.virtualtokens``): the lender has been served less, and is next where tenants share
alike again. It lends while what it has left fits before its deadline by the whole supply; what it has lent is less
than that, or it would have been done by its share. So it is paid back before its deadline, also where whatever comes
meanwhile ends the lending: sharing alike would have served it no sooner.

What cannot be met any more, even first of all, gives way to its own tenant's others, and to nobody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jettison.policy.deadlines import WAKE_MARGIN, Demand, Supply, ends, lateness, work_in_turn


class Lending(NamedTuple):
    """Numbers of demands."""

    urgent: tuple[int, ...] = ()
    """Due until the first that would be late, itself among them."""
    giving_way: tuple[int, ...] = ()


NO_LENDING = Lending()


def lost(demands: Sequence[Demand], supply: Supply) -> set[int]:
    """What is late already, or will be, although nothing that is due later is served before it and work takes less
    than is predicted by as much as wakes reckon with more."""
    found = {i for i, each in enumerate(demands) if each.due_s is not None and each.due_s <= 0.0}
    for at in sorted(range(len(demands)), key=lambda i: demands[i].due_s or 0.0):
        due_s = demands[at].due_s
        if due_s is not None and at not in found:
            end_s = ends(demands, supply, 1.0 / WAKE_MARGIN, work_in_turn(demands, found))[at]
            if end_s > due_s:
                found.add(at)
    return found


def lend(demands: Sequence[Demand], supply: Supply, waits: Sequence[bool]) -> Lending:
    """Which of these give way now. ``supply``: with what will be woken. ``waits``: requests of it have no place."""
    late = lateness(demands, supply, WAKE_MARGIN)
    if not any(late):
        return NO_LENDING
    hopeless = lost(demands, supply)
    first = min(
        (i for i, late_s in enumerate(late) if late_s > 0.0 and waits[i] and i not in hopeless),
        key=lambda i: demands[i].due_s or 0.0, default=None,
    )
    if first is None:
        return NO_LENDING
    due_s, tenant = demands[first].due_s or 0.0, demands[first].tenant
    in_turn = ends(demands, supply, 1.0, work_in_turn(demands, hopeless))
    giving: list[int] = []
    urgent: list[int] = []
    for i, each in enumerate(demands):
        if each.due_s is None:
            continue
        if i in hopeless:
            gives = each.tenant == tenant
        else:
            gives = each.due_s > due_s and (each.tenant == tenant or in_turn[i] <= each.due_s)
        if gives:
            giving.append(i)
        elif i not in hopeless and each.due_s <= due_s:
            urgent.append(i)
    return Lending(tuple(urgent), tuple(giving))

"""The order of service: with one tenant priority and arrival, between tenants turns."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.order import SchedulingPolicy, goes_before, in_service_order, line_key


class Asked(NamedTuple):
    tenant: str
    order: tuple[int, int]
    turn: int | None = None
    is_offline: bool = False


POLICIES = st.sampled_from(["fcfs", "priority"])


@st.composite
def several(draw: st.DrawFn, tenants: str = "ab") -> list[Asked]:
    """Requests in any order, some of which have had a turn."""
    num = draw(st.integers(0, 12))
    turns = draw(st.permutations(range(1, num + 1)))
    requests = [
        Asked(draw(st.sampled_from(tenants)), (draw(st.integers(-1, 1)), i), draw(st.sampled_from([None, turns[i]])))
        for i in range(num)
    ]
    return draw(st.permutations(requests))


@given(several("a"), POLICIES)
def test_with_one_tenant_it_is_priority_and_arrival(requests: list[Asked], policy: SchedulingPolicy) -> None:
    assert in_service_order(requests, policy) == sorted(requests, key=lambda r: r.order)


@given(several("abc"), POLICIES)
def test_everybody_is_there_once_and_a_tenants_own_keep_their_order(
    requests: list[Asked], policy: SchedulingPolicy
) -> None:
    ordered = in_service_order(requests, policy)
    assert sorted(ordered) == sorted(requests)
    for tenant in "abc":
        own = [r for r in ordered if r.tenant == tenant]
        assert own == sorted(own, key=lambda r: r.order)


@given(several("abc"))
def test_the_policy_priority_puts_priorities_first(requests: list[Asked]) -> None:
    priorities = [r.order[0] for r in in_service_order(requests, "priority")]
    assert priorities == sorted(priorities)


def test_among_tenants_the_earlier_turn_is_older() -> None:
    early, late, never = Asked("a", (0, 5), 1), Asked("b", (-9, 0), 2), Asked("c", (-9, 1))
    assert in_service_order([never, late, early], "fcfs") == [early, late, never]
    assert in_service_order([never, late, early], "priority") == [late, never, early]


def test_a_line_whose_head_has_had_its_turn_goes_first() -> None:
    again, longest, lately = Asked("a", (5, 9), 7), Asked("b", (0, 1)), Asked("c", (0, 0))
    keys = [line_key(again, 8, "fcfs"), line_key(longest, 2, "fcfs"), line_key(lately, 6, "fcfs")]
    assert keys == sorted(keys)
    keys = [line_key(longest, 2, "priority"), line_key(lately, 6, "priority"), line_key(again, 8, "priority")]
    assert keys == sorted(keys), "but not before a higher priority, where that counts"


def test_who_goes_before_a_request_that_was_served() -> None:
    served = Asked("a", (0, 3), 5)
    assert goes_before(Asked("a", (0, 1)), served, "fcfs") and not goes_before(Asked("a", (0, 4)), served, "fcfs")
    assert goes_before(Asked("b", (0, 9), 4), served, "fcfs") and not goes_before(Asked("b", (0, 1), 6), served, "fcfs")
    assert not goes_before(Asked("b", (-1, 1)), served, "fcfs") and goes_before(Asked("b", (-1, 1)), served, "priority")

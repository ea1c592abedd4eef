"""The order of service: with one tenant deadline, priority and arrival, between tenants virtual tokens."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.order import SchedulingPolicy, goes_before, in_service_order, line_key, own_key


class Asked(NamedTuple):
    tenant: str
    order: tuple[int, int, int]
    turn: int | None = None
    is_offline: bool = False


POLICIES = st.sampled_from(["fcfs", "priority"])


@st.composite
def several(draw: st.DrawFn, tenants: str = "ab") -> list[Asked]:
    """Requests in any order, some of which have had a turn."""
    num = draw(st.integers(0, 12))
    turns = draw(st.permutations(range(1, num + 1)))
    requests = [
        Asked(draw(st.sampled_from(tenants)), (draw(st.integers(-1, 1)), draw(st.integers(0, 2)), i),
              draw(st.sampled_from([None, turns[i]])))
        for i in range(num)
    ]
    return draw(st.permutations(requests))


@given(several("a"), POLICIES)
def test_with_one_tenant_it_is_its_own_order(requests: list[Asked], policy: SchedulingPolicy) -> None:
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


def test_a_tenants_own_go_by_deadline_then_priority_then_arrival() -> None:
    """But where priorities count against all, they go before deadlines, too."""
    asked = {"late": (9, 0, 0), "soon": (5, 1, 1), "soon, sooner": (5, 0, 2), "now": (None, 3, 3), "urgent": (9, -1, 4)}
    by = {policy: sorted(asked, key=lambda name: own_key(*asked[name], policy)) for policy in ("fcfs", "priority")}
    assert by["fcfs"] == ["now", "soon, sooner", "soon", "urgent", "late"]
    assert by["priority"] == ["urgent", "soon, sooner", "late", "soon", "now"]


@given(st.lists(st.integers(-2, 2), max_size=8), POLICIES)
def test_without_deadlines_a_tenants_own_go_by_priority_and_arrival(
    priorities: list[int], policy: SchedulingPolicy
) -> None:
    keys = [own_key(None, priority, i, policy) for i, priority in enumerate(priorities)]
    assert sorted(keys) == [keys[i] for _, i in sorted(zip(priorities, range(len(keys)), strict=True))]


def test_among_tenants_the_earlier_turn_is_older() -> None:
    early, late, never = Asked("a", (0, 0, 5), 1), Asked("b", (-9, 0, 0), 2), Asked("c", (-9, 0, 1))
    assert in_service_order([never, late, early], "fcfs") == [early, late, never]
    assert in_service_order([never, late, early], "priority") == [late, never, early]


def test_a_line_whose_head_has_had_its_turn_goes_first_then_who_has_been_served_least() -> None:
    again, least, newer, most = Asked("a", (5, 0, 9), 7), *(Asked("bcd"[i], (0, 0, i)) for i in range(3))
    served = ((again, 80), (least, 2), (newer, 2), (most, 6))
    keys = [line_key(head, num_virtual, "fcfs") for head, num_virtual in served]
    assert keys == sorted(keys)
    keys = [line_key(least, 2, "priority"), line_key(most, 6, "priority"), line_key(again, 8, "priority")]
    assert keys == sorted(keys), "but not before a higher priority, where that counts"


def test_who_goes_before_a_request_that_was_served() -> None:
    served = Asked("a", (0, 0, 3), 5)
    own = [goes_before(Asked("a", (0, 0, i)), served, "fcfs") for i in (1, 4)]
    others = [goes_before(Asked("b", (0, 0, i), turn), served, "fcfs") for i, turn in ((9, 4), (1, 6))]
    assert own == others == [True, False]
    first = Asked("b", (-1, 0, 1))
    assert not goes_before(first, served, "fcfs") and goes_before(first, served, "priority")

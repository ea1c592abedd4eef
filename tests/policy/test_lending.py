"""Lending: what gives way to work that would be late by its tenant's share, and that it is paid back."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.deadlines import Demand, Supply, ends, lateness
from jettison.policy.lending import LEND_MARGIN, NO_LENDING, in_turn, lend

TENANTS = st.sampled_from(["a", "b", "c"])
DUE = st.none() | st.floats(-5.0, 60.0)
DEMANDS = st.lists(
    st.builds(lambda due_s, work_s, tenant: Demand(due_s, work_s, tenant=tenant), DUE, st.floats(0.1, 20.0), TENANTS),
    min_size=1, max_size=6,
)  # fmt: skip
ONE = Supply(1)
SLOT_S = 0.05


def lending(demands: list[Demand], supply: Supply = ONE) -> tuple[set[int], set[int]]:
    found = lend(demands, supply, [True] * len(demands))
    return set(found.urgent), set(found.giving_way)


def test_a_batch_that_its_share_would_make_late_is_lent_the_turns_of_one_that_has_time() -> None:
    demands = [Demand(10.0, 8.0, tenant="a"), Demand(60.0, 30.0, tenant="b")]
    assert lending(demands) == ({0}, {1})


def test_what_is_in_time_by_its_share_is_lent_nothing() -> None:
    demands = [Demand(30.0, 8.0, tenant="a"), Demand(60.0, 20.0, tenant="b")]
    assert lend(demands, ONE, [True, True]) is NO_LENDING


def test_what_would_be_late_for_it_lends_nothing() -> None:
    demands = [Demand(10.0, 8.0, tenant="a"), Demand(20.0, 15.0, tenant="b")]
    assert lending(demands) == ({0}, set())


def test_what_is_due_at_no_time_lends_nothing_and_takes_its_share() -> None:
    demands = [Demand(10.0, 6.0, tenant="a"), Demand(None, 3.0, tenant="b"), Demand(60.0, 30.0, tenant="c")]
    assert lending(demands) == ({0}, {2})
    assert in_turn(demands, ONE)[0][0] == 9.0
    assert lending([demands[0], demands[1]._replace(work_s=100.0)])[1] == set()


def test_a_lost_one_gives_way_to_its_own_tenants_others_and_to_nobody_else() -> None:
    demands = [
        Demand(5.0, 50.0, tenant="a"), Demand(12.0, 9.0, tenant="a"), Demand(6.0, 50.0, tenant="b"),
        Demand(-1.0, 4.0, tenant="a"), Demand(-1.0, 4.0, tenant="b"),
    ]  # fmt: skip
    assert lending(demands) == ({1}, {0, 3})


def test_who_has_places_for_all_of_it_is_lent_no_more() -> None:
    demands = [
        Demand(10.0, 8.0, tenant="a"), Demand(20.0, 9.0, tenant="b"), Demand(80.0, 30.0, tenant="c"),
    ]  # fmt: skip
    assert lend(demands, ONE, [True, True, True]).giving_way == (1, 2)
    assert lend(demands, ONE, [False, True, True]).giving_way == (2,)
    assert lend(demands, ONE, [False, False, True]) is NO_LENDING


@given(DEMANDS, st.integers(1, 4))
def test_who_lends_is_due_later_and_in_time_and_what_is_urgent_can_be_met(demands: list[Demand], num: int) -> None:
    supply = Supply(num)
    urgent, giving = lending(demands, supply)
    ends_s, lost = in_turn(demands, supply)
    assert not urgent & giving and not urgent & lost
    if not urgent:
        assert not giving
        return
    first = max(urgent, key=lambda i: demands[i].due_s or 0.0)
    tenants = {demands[i].tenant for i in urgent if demands[i].due_s == demands[first].due_s}
    assert any(lateness(demands, supply, LEND_MARGIN)[i] for i in urgent)
    for i in giving:
        due_s = demands[i].due_s
        assert due_s is not None
        assert demands[i].tenant in tenants or (due_s > (demands[first].due_s or 0.0) and ends_s[i] <= due_s)


def served(demands: list[Demand], *, lends: bool) -> list[float]:
    """When each ends, where slots of time go to the tenant that has been served least, and, with lending, what gives
    way goes behind."""
    left, tokens, found = [d.work_s for d in demands], {"a": 0.0, "b": 0.0, "c": 0.0}, [0.0] * len(demands)
    for slot in count():
        now_s = slot * SLOT_S
        there = [i for i, work_s in enumerate(left) if work_s > 0.0]
        if not there:
            return found
        giving: set[int] = set()
        if lends:
            views = [demands[i]._replace(work_s=left[i], due_s=None if (d := demands[i].due_s) is None else d - now_s)
                     for i in there]  # fmt: skip
            giving = {there[i] for i in lend(views, ONE, [True] * len(views)).giving_way}
        at = min(there, key=lambda i: (i in giving, tokens[demands[i].tenant], demands[i].due_s or 0.0, i))
        tokens[demands[at].tenant] += SLOT_S
        left[at] -= SLOT_S
        found[at] = now_s + SLOT_S
    raise AssertionError


@given(DEMANDS)
def test_no_tenants_batch_that_sharing_alike_serves_in_time_is_late_for_what_it_has_lent(demands: list[Demand]) -> None:
    """Those without a deadline keep their shares, and with one batch a tenant the lender is in time or as before."""
    one_each = list({d.tenant: d for d in demands}.values())
    alike, lent = served(one_each, lends=False), served(one_each, lends=True)
    slack_s = 2.0 * SLOT_S * len(one_each)
    for demand, alike_s, lent_s in zip(one_each, alike, lent, strict=True):
        if demand.due_s is not None and alike_s + slack_s <= demand.due_s:
            assert lent_s <= demand.due_s + slack_s
        if demand.due_s is None:
            assert lent_s <= alike_s + slack_s


@given(DEMANDS)
def test_of_one_tenant_turns_are_its_own_order(demands: list[Demand]) -> None:
    own = [d._replace(tenant="a") for d in demands if d.due_s is None or d.due_s > 0.0]
    found, lost = in_turn(own, ONE)
    if not lost:
        for demand, end_s, own_s in zip(own, found, ends(own, ONE), strict=True):
            if demand.due_s is not None and [d.due_s for d in own].count(demand.due_s) == 1:
                assert abs(end_s - own_s) < 1e-6

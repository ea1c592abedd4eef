"""The heap of groups in an order of dispatch, against asking every group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jettison.core.driving.grouporder import GroupOrder
from jettison.policy.dispatch import ORDERS, DispatchOrder, GroupFreeness, choose_group, freeness, steps_ahead

VIEWS = st.builds(
    GroupFreeness, st.just(0), st.sampled_from([10, 20, 40]), st.integers(0, 40), st.sampled_from([0, 0, 5, 30]),
    st.integers(0, 4), st.sampled_from([1, 1, 2]), st.sampled_from([0, 0, 100, 300]), st.sampled_from([64, 400]),
    st.none(), st.integers(0, 4),
)
STEPS = st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), VIEWS), st.integers(1, 45)), max_size=50)


def got_freer(before: GroupFreeness, view: GroupFreeness) -> bool:
    return (
        freeness(view) > freeness(before) or view.batch_size < before.batch_size
        or steps_ahead(view) < steps_ahead(before) or view.num_unfinished < before.num_unfinished
        or view.num_instances > before.num_instances
    )  # fmt: skip


@given(STEPS, st.lists(st.sampled_from(sorted(ORDERS)), min_size=1))
def test_the_choice_is_that_of_the_policy_over_all_groups(
    steps: list[tuple[int, GroupFreeness | None, int]], orders: list[str]
) -> None:
    """Also where the order is another from some step on."""
    views: dict[int, GroupFreeness] = {}
    groups = GroupOrder(views.get)
    order: DispatchOrder | None = None
    for number, (group_id, view, needed) in enumerate(steps):
        before = views.pop(group_id, None)
        if view is not None:
            views[group_id] = view._replace(group_id=group_id)
        # Groups that only got fuller need not be named.
        if before is None or view is None or got_freer(before, view):
            groups.refresh(group_id)
        before_order, order = order, ORDERS[orders[number // 5 % len(orders)]]
        if order is not before_order:
            groups.reorder(order, views)
        assert groups.choose(needed) == choose_group(list(views.values()), needed, order)
    assert len(groups._heap) <= len(steps) + len(views)

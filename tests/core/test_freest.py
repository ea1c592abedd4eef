"""The heap of groups by freeness, against asking every group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jettison.core.serving.freest import FreestGroups
from jettison.policy.dispatch import GroupFreeness, choose_group, freeness, steps_ahead

VIEWS = st.builds(
    GroupFreeness, st.just(0), st.sampled_from([10, 20, 40]), st.integers(0, 40), st.sampled_from([0, 0, 5, 30]),
    st.integers(0, 4), st.sampled_from([1, 1, 2]), st.sampled_from([0, 0, 100, 300]), st.sampled_from([64, 400]),
)
STEPS = st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), VIEWS), st.integers(1, 45)), max_size=50)


def got_freer(before: GroupFreeness, view: GroupFreeness) -> bool:
    return (
        freeness(view) > freeness(before) or view.batch_size < before.batch_size
        or steps_ahead(view) < steps_ahead(before)
    )  # fmt: skip


@given(STEPS)
def test_the_choice_is_that_of_the_policy_over_all_groups(steps: list[tuple[int, GroupFreeness | None, int]]) -> None:
    views: dict[int, GroupFreeness] = {}
    freest = FreestGroups(views.get)
    for group_id, view, needed in steps:
        before = views.pop(group_id, None)
        if view is not None:
            views[group_id] = view._replace(group_id=group_id)
        # Groups that only got fuller need not be named.
        if before is None or view is None or got_freer(before, view):
            freest.refresh(group_id)
        assert freest.choose(needed) == choose_group(list(views.values()), needed)
    assert len(freest._heap) <= len(steps) + len(views)

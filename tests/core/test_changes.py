"""What nobody has touched has nothing to do: asking only touched groups decides what asking all of them decides.

Each schedule runs as it is, once, and again with something that must make no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from fakes import MS, FakeCluster
from test_golden_schedules import GOLDEN, POLICIES, schedule

from jettison.core import ports
from jettison.core.driving.grouporder import GroupOrder
from jettison.core.moving.moves import Moves
from jettison.policy.dispatch import ORDERS, choose_group
from longrun import part_of

pytestmark = pytest.mark.slow  # whole schedules, each several times

ODD = [(policy, seed) for policy, seed in GOLDEN if seed % 2]
SEEDS = part_of(ODD, [next(key for key in ODD if key[0] == policy) for policy in POLICIES])
"""Schedules of every policy; in the long run each one that is odd."""
QUIET = ("recompute", 2001)
"""A schedule with ticks on which nothing is to be looked at."""


def recorded(policy: str, seed: int) -> FakeCluster:
    """A schedule that keeps what is answered."""
    cluster = schedule(policy, seed)
    cluster.recording = []
    return cluster


def actions_of(cluster: FakeCluster) -> list[tuple[int, str]]:
    """What was answered and when; ticks that nothing came of are left out."""
    assert cluster.recording is not None
    return [
        (now, f"{event} {actions}") for event, now, actions in cluster.recording
        if actions or not isinstance(event, ports.Tick)
    ]


@cache
def plain_actions(policy: str, seed: int) -> list[tuple[int, str]]:
    """Of the schedule as it is."""
    plain = recorded(policy, seed)
    plain.run()
    return actions_of(plain)


def before_each_event(cluster: FakeCluster, what: Callable[[], None]) -> None:
    handle = cluster.core.handle

    def handle_then(event: ports.Event, now_ns: int) -> list[ports.Action]:
        what()
        return handle(event, now_ns)

    cluster.core.handle = handle_then  # type: ignore[method-assign]


@pytest.mark.parametrize(("policy", "seed"), SEEDS)
def test_touching_every_group_and_every_move_at_every_event_changes_nothing(policy: str, seed: int) -> None:
    touched = recorded(policy, seed)

    def touch_all() -> None:
        for group in touched.core.groups.values():
            group.touch()

    before_each_event(touched, touch_all)
    touched.run()
    assert plain_actions(policy, seed) == actions_of(touched)


@pytest.mark.parametrize(("policy", "seed"), [*SEEDS, QUIET])
def test_ticks_that_nobody_awaits_can_be_skipped(policy: str, seed: int) -> None:
    skipping = recorded(policy, seed)
    core, skipped, num_skipped = skipping.core, list[int](), 0
    process, order = skipping._process, skipping.order

    def skip() -> None:
        nonlocal num_skipped
        if skipped:
            num_skipped += len(skipped)
            core.skip_ticks(skipped)
            skipped.clear()

    def process_later(event: object) -> None:
        if isinstance(event, ports.Tick) and not core.awaits_tick:
            skipped.append(skipping.now)
            skipping.at(skipping.now + 100 * MS, event)
        else:
            process(event)

    def order_after_skipping(what: str) -> None:
        skip()
        order(what)

    before_each_event(skipping, skip)
    skipping._process = process_later  # type: ignore[method-assign]
    skipping.order = order_after_skipping  # type: ignore[method-assign]
    skipping.run()
    assert plain_actions(policy, seed) == actions_of(skipping)
    assert num_skipped > 0 or (policy, seed) != QUIET, "in others there may always be something to look at"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("policy", "seed"), SEEDS)
def test_the_first_group_is_the_one_that_asking_all_finds(
    policy: str, seed: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = schedule(policy, seed)
    cluster.core.reconfigure(replace(cluster.core.params, dispatch=ORDERS[order]))
    choose, chosen = GroupOrder.choose, 0

    def choose_and_compare(groups: GroupOrder, needed_blocks: int) -> int | None:
        nonlocal chosen
        views = [groups._view_of(g) for g in cluster.core.groups]
        expected = choose_group([v for v in views if v is not None], needed_blocks, ORDERS[order])
        found = choose(groups, needed_blocks)
        assert found == expected
        chosen += 1
        return found

    monkeypatch.setattr(GroupOrder, "choose", choose_and_compare)
    cluster.run()
    assert chosen >= len(cluster.requests)


def test_a_restore_under_way_makes_ticks_matter_and_an_idle_cluster_does_not() -> None:
    cluster = FakeCluster(num_workers=4, auto_restore=False)
    core = cluster.core
    assert core.awaits_tick, "nobody has looked at the first groups yet"
    core.handle(ports.Tick(), 1)
    assert not core.awaits_tick
    core.request_drop(2)
    assert core.awaits_tick and isinstance(core.moves, Moves)
    with pytest.raises(AssertionError):
        core.skip_ticks([3])

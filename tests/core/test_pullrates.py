"""What pulls are priced at, and that none is planned over a link of which nothing is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fakes import FakeCluster
from test_loads import PROFILE
from test_pulls import RESIDENCIES, arranged

from jettison.core.ladder.dropplans import DropPlanner
from jettison.core.load.pullrates import PullRates
from jettison.cost.hardware import HardwareProfile
from jettison.policy.merge import DropPlan

TWO_MACHINES = {0: 0, 1: 0, 2: 1, 3: 1}
UNKNOWN = {0: 0, 1: 1, 2: 2, 3: 3}


def placed(cluster: FakeCluster, **params: object) -> FakeCluster:
    cluster.core.reconfigure(replace(cluster.core.params, **params))  # type: ignore[arg-type]
    return cluster


def rates_of(cluster: FakeCluster) -> PullRates:
    return PullRates(cluster.core.state)


def plan(cluster: FakeCluster, max_pull_s: float) -> DropPlan:
    groups = list(cluster.core.groups.values())
    return DropPlanner(cluster.core.state, cluster.core.loads).plan(groups, 1, groups[0].group_id, max_pull_s)


def num_pulls(found: DropPlan) -> int:
    return sum(len(m.pulls) for m in found.merges)


def test_links_of_the_kind_that_was_profiled_are_as_profiled_whatever_was_measured() -> None:
    cluster = FakeCluster(num_workers=4, profile=PROFILE)
    cluster.core.state.link_rate((0, 1)).observe(1000, 1.0)
    rates = rates_of(cluster)
    assert rates.of((0, 1)) == rates.of((2, 3)) == rates.slowest(range(4)) == PROFILE.link_bytes_per_s


def test_one_machine_without_a_profile_is_as_assumed_until_it_was_measured() -> None:
    cluster = placed(FakeCluster(num_workers=4), machine_of=dict.fromkeys(range(4), 0))
    assert rates_of(cluster).of((0, 1)) == rates_of(cluster).slowest(range(4)) == 1e9
    cluster.core.state.link_rate((0, 1)).observe(3000, 1.0)
    cluster.core.state.link_rate((1, 0)).observe(2000, 1.0)
    rates = rates_of(cluster)
    assert (rates.of((0, 1)), rates.of((2, 3)), rates.slowest(range(4))) == (3000.0, 1e9, 2000.0)
    assert rates.slowest([2, 3]) == 1e9


@pytest.mark.parametrize("profile", [None, PROFILE])
def test_between_machines_only_what_was_measured_is_known(profile: HardwareProfile | None) -> None:
    cluster = placed(
        FakeCluster(num_workers=4, profile=profile), machine_of=TWO_MACHINES, has_profiled_links=False
    )
    inside = 1e9 if profile is None else PROFILE.link_bytes_per_s
    rates = rates_of(cluster)
    assert rates.of((0, 1)) == rates.of((3, 2)) == inside and rates.of((0, 2)) is None
    cluster.core.state.link_rate((0, 2)).observe(500, 1.0)
    rates = rates_of(cluster)
    assert rates.of((0, 2)) == rates.of((1, 3)) == 500.0, "the same network"
    assert rates.of((2, 0)) is None and rates.slowest(range(4)) == 500.0


def test_no_pull_is_planned_over_what_nobody_knows() -> None:
    cluster = placed(arranged(RESIDENCIES[4]), machine_of=UNKNOWN, has_profiled_links=False)
    assert not plan(cluster, 1e6).merges, "these groups merge by pulling only"
    assert num_pulls(plan(cluster, math.inf)) > 0, "an administrator may"
    for src in range(4):
        for dst in range(4):
            cluster.core.state.link_rate((src, dst)).observe(1000, 1.0)
    shard_s = max(cluster.shape.shard_bytes.values()) / 1000
    assert num_pulls(plan(cluster, 10 * shard_s)) > 0
    assert not plan(cluster, 0.1 * shard_s).merges, "as slow as measured"


def test_one_machine_pulls_without_a_profile() -> None:
    cluster = placed(arranged(RESIDENCIES[4]), machine_of=dict.fromkeys(range(4), 0))
    assert num_pulls(plan(cluster, 0.1)) > 0


def test_requests_move_by_the_links_inside_a_machine_where_these_are_known() -> None:
    cluster = placed(FakeCluster(num_workers=4, profile=PROFILE), machine_of=TWO_MACHINES, near_bytes_per_s=7e9)
    rates = rates_of(cluster)
    assert (rates.of_kv((0, 1)), rates.of_kv((1, 2))) == (7e9, PROFILE.link_bytes_per_s)
    assert rates.of((0, 1)) == PROFILE.link_bytes_per_s, "a plan may come to the slowest one"

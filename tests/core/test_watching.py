"""What is begun when groups are overloaded: who merges, into how long pipelines, and when more instances are wanted."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from fakes import MS, FakeCluster

from jettison.core import ports
from jettison.core.ladder import drop
from jettison.core.ladder import dropplans as dropping
from jettison.core.ladder.scale import ScaleRung
from jettison.core.load.monitor import GroupMonitor
from jettison.core.load.samples import TickTimes
from jettison.policy.merge import DropPlan, plan_drop

DROPS_UNTIL_MS = 450.0
"""Before any group has dwelled long enough for its next drop."""


class Planned:
    """Plans, and requests for more instances, with the time of each."""

    def __init__(self, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[tuple[int, DropPlan]] = []
        self.asked_ns: list[int] = []
        ask = cluster.core.ladder.rung("scale").on_unmet

        def counted_plan(*args: object, **kwargs: object) -> DropPlan:
            plan = plan_drop(*args, **kwargs)  # type: ignore[arg-type]
            self.plans.append((cluster.now, plan))
            return plan

        def counted_ask(group_id: int, missing_bytes: int, reason: str, now_ns: int) -> list[ports.Action]:
            self.asked_ns.append(now_ns)
            return ask(group_id, missing_bytes, reason, now_ns)

        monkeypatch.setattr(dropping, "plan_drop", counted_plan)
        monkeypatch.setattr(ScaleRung, "on_unmet", lambda _, *args: counted_ask(*args))

    def num_ticks(self, times_ns: list[int]) -> int:
        return len({now // (100 * MS) for now in times_ns})


def crowded(
    monkeypatch: pytest.MonkeyPatch, loads: Mapping[int, float], *, num_workers: int = 4, num_requests: int = 160,
    **options: object,
) -> tuple[FakeCluster, Planned]:
    """Instances, all with far more in their queues than dropping frees; merged groups need so much compute."""
    cluster = FakeCluster(
        num_workers=num_workers, full_blocks=16, shard_bytes=256, auto_restore=False, **options  # type: ignore[arg-type]
    )
    monkeypatch.setattr(cluster.core.loads.compute, "load", lambda num_stages: loads[min(num_stages, 4)])
    rng = random.Random(1)
    for i in range(num_requests):
        cluster.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(14)], 30, i * 0.2)
    return cluster, Planned(cluster, monkeypatch)


def sizes(cluster: FakeCluster) -> list[int]:
    return sorted(len(g.stages) for g in cluster.core.groups.values())


def of_kind(cluster: FakeCluster, kind: str) -> list[ports.Record]:
    return [r for r in cluster.records if r.kind == kind]


def test_a_pipeline_that_keeps_up_takes_in_all_that_the_plan_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, _ = crowded(monkeypatch, {1: 0.5, 2: 0.6, 3: 0.6, 4: 0.6})
    cluster.run(until_ms=DROPS_UNTIL_MS)
    assert sizes(cluster) == [4]


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ({1: 0.5, 2: 0.6, 3: 1.5, 4: 1.5}, [2, 2]),
        ({1: 0.5, 2: 0.6, 3: 0.6, 4: 1.5}, [2, 2]),  # two pairs, and then nobody is left for a third stage
    ],
)
def test_where_four_could_not_keep_up_pairs_are_made_and_the_rest_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, loads: dict[int, float], expected: list[int]
) -> None:
    cluster, planned = crowded(monkeypatch, loads)
    cluster.run(until_ms=DROPS_UNTIL_MS)
    assert sizes(cluster) == expected
    (decided,) = of_kind(cluster, "drop_decided")
    copy = cluster.shape.parameter_bytes
    assert decided.fields["freed_bytes"] == 2 * copy and not decided.fields["sufficient"]
    assert decided.fields["merged_compute_load"] == 0.6, "the verdict on what is made, not on what was wanted"
    (asked,) = of_kind(cluster, "scale_out")
    assert asked.fields["missing_bytes"] == decided.fields["required_bytes"] - 2 * copy  # type: ignore[operator]
    assert "keeps up" in str(asked.fields["reason"])
    first = [plan for now, plan in planned.plans if now == planned.plans[0][0]]
    assert len(first) == 2, "one that is declined and one that is made"
    cluster.run()
    cluster.expect_outputs()


def test_every_merge_is_judged_by_its_own_length_not_only_that_of_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five instances the plan makes a pair and a pipeline of three, whoever is in which."""
    loads = {1: 0.5, 2: 0.6, 3: 1.5, 4: 1.5}
    cluster, planned = crowded(monkeypatch, loads, num_workers=5, num_requests=200)
    copy = cluster.shape.parameter_bytes
    monkeypatch.setattr(drop, "required_bytes", lambda *_: 3 * copy)
    cluster.run(until_ms=DROPS_UNTIL_MS)
    assert sorted(len(m.stages) for m in planned.plans[0][1].merges) == [2, 3]
    assert sizes(cluster) == [1, 2, 2]
    (asked,) = of_kind(cluster, "scale_out")
    assert asked.fields["missing_bytes"] == copy


def test_one_group_that_grows_is_as_long_as_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, _ = crowded(monkeypatch, {1: 0.5, 2: 0.6, 3: 0.6, 4: 1.5})
    object.__setattr__(cluster.core.params, "planner", "memory")
    cluster.run(until_ms=DROPS_UNTIL_MS)
    assert sizes(cluster) == [1, 3]


def test_where_no_length_is_accepted_more_is_asked_for_and_plans_wait_for_the_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first look takes a pair for granted; that no pair is to be had shows in the plan."""
    cluster, planned = crowded(monkeypatch, {1: 0.5, 2: 0.6, 3: 1.5, 4: 1.5}, eager=True)
    cluster.run(until_ms=DROPS_UNTIL_MS)
    assert sizes(cluster) == [2, 2]
    planned.plans.clear()
    planned.asked_ns.clear()
    monkeypatch.setattr(cluster.core.loads, "_least_partner", lambda group: -1)  # what was there has just gone
    num_steps = cluster.num_steps
    cluster.run(until_ms=DROPS_UNTIL_MS + 600)
    assert sizes(cluster) == [2, 2] and cluster.num_steps - num_steps > 100
    assert planned.asked_ns
    planned_ns = [now for now, _ in planned.plans]
    assert len(planned_ns) <= 2 * 2 * planned.num_ticks(planned_ns), "of either group two plans a tick"
    assert len(planned.asked_ns) <= 2 * planned.num_ticks(planned.asked_ns)
    assert len(of_kind(cluster, "scale_out")) == 1
    cluster.run()
    cluster.expect_outputs()


def test_others_do_not_merge_for_a_group_that_they_do_not_relieve(monkeypatch: pytest.MonkeyPatch) -> None:
    """One instance of four is overloaded, by more than a pair frees: the others stay as they are."""
    cluster = FakeCluster(num_workers=4, full_blocks=16, shard_bytes=256, auto_restore=False)
    monkeypatch.setattr(cluster.core.loads.compute, "load", {1: 0.5, 2: 0.6, 3: 0.6, 4: 0.6}.__getitem__)
    hot = cluster.core.groups[0]
    monkeypatch.setattr(cluster.core.loads, "may_be_overloaded", lambda group, now_ns: group is hot)
    wanted = 3 * cluster.shape.parameter_bytes // 2
    monkeypatch.setattr(drop, "required_bytes", lambda *_: wanted)
    rng = random.Random(1)
    for i in range(160):
        cluster.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(14)], 30, i * 0.2)
    planned = Planned(cluster, monkeypatch)
    cluster.run(until_ms=DROPS_UNTIL_MS)
    monkeypatch.setattr(cluster.core.loads, "may_be_overloaded", lambda group, now_ns: False)
    (decided,) = of_kind(cluster, "drop_decided")
    copy = cluster.shape.parameter_bytes
    assert decided.fields["overloaded_groups"] == [hot.group_id] and decided.fields["freed_bytes"] == copy
    assert planned.plans[0][1].freed_bytes == 2 * copy, "the paper's plan makes two pairs"
    pair = next(g for g in cluster.core.groups.values() if len(g.stages) == 2)
    (merge,) = decided.fields["merges"]  # type: ignore[attr-defined]
    assert hot.group_id in merge["groups"] and merge["stages"] == [
        {"worker": s.worker_id, "layers": [s.layers.lo, s.layers.hi]} for s in pair.stages
    ]
    assert sizes(cluster) == [1, 1, 2] and planned.asked_ns == []
    cluster.run()
    cluster.expect_outputs()


def test_a_group_that_no_plan_relieves_waits_for_the_next_tick() -> None:
    ticks = TickTimes()
    monitor = GroupMonitor(ticks)
    assert not monitor.awaits_tick
    ticks.add(0)
    monitor.note_unrelieved()
    assert monitor.awaits_tick
    ticks.add(100 * MS)
    assert not monitor.awaits_tick

"""What is begun when groups are overloaded: who merges, into how long pipelines, and when more instances are wanted."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping

import pytest
from fakes import MS, FakeCluster

from jettison.core import ports
from jettison.core.ladder import drop
from jettison.core.ladder import dropplans as dropping
from jettison.core.ladder.forecasts import Saving
from jettison.core.ladder.rung import Means, Worth
from jettison.core.ladder.scale import ScaleRung
from jettison.core.load.monitor import GroupMonitor
from jettison.core.load.samples import TickTimes
from jettison.policy.forecast import Forecast
from jettison.policy.merge import DropPlan, plan_drop
from jettison.policy.overload import Trigger

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


NOTHING = Forecast(0.0, 0.0, 0.0)


class Foreseen:
    """A question whose answer is set: what a merged group saves, by its length, of 10 request-seconds that are
    possible for each of its members."""

    def __init__(self, saves: Mapping[int, float], lengths: Mapping[int, int]) -> None:
        self._saves, self._lengths = saves, lengths

    def merging(self, merges: Iterable[Collection[int]]) -> Saving:
        made = [sum(self._lengths[g] for g in each) for each in merges]
        worth = Worth(sum(self._saves[n] for n in made))
        return Saving(worth, 10.0 * sum(made), NOTHING, NOTHING, worth)


def foresees(monkeypatch: pytest.MonkeyPatch, saves: Mapping[int, float]) -> None:
    """All forecasts of merges say this from now on."""

    def of(means: Means, now_ns: int, apart: Collection[int] = ()) -> Foreseen:
        return Foreseen(saves, {g.group_id: len(g.stages) for g in means.state.groups.values()})

    monkeypatch.setattr(drop.Question, "of", of)


def crowded(
    monkeypatch: pytest.MonkeyPatch, saves: Mapping[int, float], *, num_workers: int = 4, num_requests: int = 160,
    **options: object,
) -> tuple[FakeCluster, Planned]:
    """Instances, all with far more in their queues than dropping frees; merged groups save so much."""
    cluster = FakeCluster(
        num_workers=num_workers, full_blocks=16, shard_bytes=256, auto_restore=False, trigger=Trigger.FORECAST,
        **options,  # type: ignore[arg-type]
    )
    foresees(monkeypatch, saves)
    rng = random.Random(1)
    for i in range(num_requests):
        cluster.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(14)], 30, i * 0.2)
    return cluster, Planned(cluster, monkeypatch)


def sizes(cluster: FakeCluster) -> list[int]:
    return sorted(len(g.stages) for g in cluster.core.groups.values())


def of_kind(cluster: FakeCluster, kind: str) -> list[ports.Record]:
    return [r for r in cluster.records if r.kind == kind]


def test_a_pipeline_that_keeps_up_takes_in_all_that_the_plan_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, _ = crowded(monkeypatch, {2: 12.0, 3: 20.0, 4: 40.0})
    cluster.run(until_ms=DROPS_UNTIL_MS)
    assert sizes(cluster) == [4]


@pytest.mark.parametrize("of_four", [-5.0, 8.0])
def test_where_four_save_less_pairs_are_made_and_the_rest_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, of_four: float
) -> None:
    cluster, planned = crowded(monkeypatch, {2: 12.0, 3: 2.0, 4: of_four})
    cluster.run(until_ms=DROPS_UNTIL_MS)
    assert sizes(cluster) == [2, 2]
    (decided,) = of_kind(cluster, "drop_decided")
    copy = cluster.shape.parameter_bytes
    assert decided.fields["freed_bytes"] == 2 * copy and not decided.fields["sufficient"]
    assert decided.fields["possible_request_s"] == 40.0, "told of what is made, not of what was wanted"
    (asked,) = of_kind(cluster, "scale_out")
    assert asked.fields["missing_bytes"] == decided.fields["required_bytes"] - 2 * copy  # type: ignore[operator]
    assert "worth it" in str(asked.fields["reason"])
    first = [max(len(m.stages) for m in plan.merges) for now, plan in planned.plans if now == planned.plans[0][0]]
    assert first[0] == 4 and first[-1] == 2 and first == sorted(first, reverse=True), "each shorter than the one before"
    cluster.run()
    cluster.expect_outputs()


def test_every_merge_is_judged_by_its_own_length_not_only_that_of_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five instances the plan makes a pair and a pipeline of three, whoever is in which."""
    cluster, planned = crowded(monkeypatch, {2: 12.0, 3: -1.0, 4: -1.0, 5: -1.0}, num_workers=5, num_requests=200)
    copy = cluster.shape.parameter_bytes
    monkeypatch.setattr(drop, "required_bytes", lambda *_: 3 * copy)
    cluster.run(until_ms=DROPS_UNTIL_MS)
    assert sorted(len(m.stages) for m in planned.plans[0][1].merges) == [2, 3]
    assert sizes(cluster) == [1, 2, 2]
    (asked,) = of_kind(cluster, "scale_out")
    assert asked.fields["missing_bytes"] == copy


def test_one_group_that_grows_is_as_long_as_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, _ = crowded(monkeypatch, {2: 12.0, 3: 20.0, 4: 1.0})
    object.__setattr__(cluster.core.params, "planner", "memory")
    cluster.run(until_ms=DROPS_UNTIL_MS)
    assert sizes(cluster) == [1, 3]


def test_where_no_length_is_accepted_more_is_asked_for_and_plans_wait_for_the_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, planned = crowded(monkeypatch, {2: 12.0, 3: 1.0, 4: 1.0}, eager=True)
    cluster.run(until_ms=DROPS_UNTIL_MS)
    assert sizes(cluster) == [2, 2]
    planned.plans.clear()
    planned.asked_ns.clear()
    num_steps = cluster.num_steps
    cluster.run(until_ms=DROPS_UNTIL_MS + 600)
    assert sizes(cluster) == [2, 2] and cluster.num_steps - num_steps > 100
    assert planned.asked_ns
    planned_ns = [now for now, _ in planned.plans]
    assert len(planned_ns) <= drop.MOST_PLANS * planned.num_ticks(planned_ns), "forecasts wait for the next tick"
    assert len(planned.asked_ns) <= 2 * planned.num_ticks(planned.asked_ns)
    assert len(of_kind(cluster, "scale_out")) == 1
    cluster.run()
    cluster.expect_outputs()


def test_others_do_not_merge_for_a_group_that_they_do_not_relieve(monkeypatch: pytest.MonkeyPatch) -> None:
    """One instance of four is overloaded, by more than a pair frees: the others stay as they are."""
    cluster = FakeCluster(
        num_workers=4, full_blocks=16, shard_bytes=256, auto_restore=False, trigger=Trigger.FORECAST
    )
    foresees(monkeypatch, {2: 12.0, 3: 20.0, 4: 30.0})
    hot = cluster.core.groups[0]
    monkeypatch.setattr(cluster.core.loads, "memory_binds", lambda group, now_ns: group is hot)
    wanted = 3 * cluster.shape.parameter_bytes // 2
    monkeypatch.setattr(drop, "required_bytes", lambda *_: wanted)
    rng = random.Random(1)
    for i in range(160):
        cluster.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(14)], 30, i * 0.2)
    planned = Planned(cluster, monkeypatch)
    cluster.run(until_ms=DROPS_UNTIL_MS)
    monkeypatch.setattr(cluster.core.loads, "memory_binds", lambda group, now_ns: False)
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

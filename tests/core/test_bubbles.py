"""Bubble accounts: what counts as standing still."""

from __future__ import annotations

from jettison.core.load.bubbles import BubbleMeter
from jettison.core.ports import RunStep
from jettison.memory.stages import StagePlan
from jettison.types import LayerRange


def step(step_id: int, num_stages: int = 2) -> RunStep:
    stages = tuple(StagePlan(10 + i, LayerRange(i, i + 1)) for i in range(num_stages))
    return RunStep(step_id, 0, 0, stages, ())


def totals(meter: BubbleMeter) -> dict[int, tuple[int, int]]:
    return {w: (t.busy_ns, t.bubble_ns) for w, t in meter.totals.items()}


def test_one_step_alone_fills_and_drains() -> None:
    meter = BubbleMeter()
    meter.issued(step(1))
    meter.stage_done(10, 1, 100, 140)
    meter.stage_done(11, 1, 5_000, 5_030)
    meter.ended(1)
    assert totals(meter) == {10: (40, 30), 11: (30, 40)}


def test_gaps_between_steps_that_follow_each_other_count_on_the_workers_own_clock() -> None:
    meter = BubbleMeter()
    meter.issued(step(1))
    meter.issued(step(2))
    meter.stage_done(10, 1, 0, 50)
    meter.stage_done(10, 2, 53, 63)
    meter.stage_done(11, 1, 1_000_050, 1_000_100)
    meter.ended(1)
    meter.issued(step(3))
    meter.stage_done(10, 3, 103, 113)
    meter.stage_done(11, 2, 1_000_101, 1_000_111)
    meter.ended(2)
    # Stage 0: 3 before step 2 and 40 before step 3; stage 1: filled for 50, then 1 before step 2.
    assert totals(meter) == {10: (70, 43), 11: (60, 51)}


def test_rest_while_the_pipeline_is_empty_is_no_bubble() -> None:
    meter = BubbleMeter()
    for step_id, at in ((1, 0), (2, 1_000_000)):
        meter.issued(step(step_id))
        meter.stage_done(10, step_id, at, at + 10)
        meter.stage_done(11, step_id, at + 10, at + 20)
        meter.ended(step_id)
    assert totals(meter) == {10: (20, 20), 11: (20, 20)}


def test_groups_of_one_are_not_counted_and_a_failed_step_is_forgotten() -> None:
    meter = BubbleMeter()
    meter.issued(step(1, num_stages=1))
    meter.stage_done(10, 1, 0, 50)
    meter.ended(1)
    assert totals(meter) == {}
    meter.issued(step(2))
    meter.ended(2)
    meter.stage_done(10, 2, 0, 50)
    assert all(busy == 0 for busy, _ in totals(meter).values())


def test_steps_of_groups_that_are_no_more_are_forgotten() -> None:
    meter = BubbleMeter()
    meter.issued(step(1))
    meter.issued(step(2))
    meter.stage_done(10, 1, 0, 50)
    meter.issued(step(3)._replace(group_id=7))
    meter.keep_groups({7})
    before = totals(meter)
    meter.stage_done(11, 1, 60, 90)  # a survivor that had it already
    meter.ended(1)
    assert totals(meter) == before
    meter.ended(3)
    assert not meter._open and not meter._num_open and not meter._last_end_ns

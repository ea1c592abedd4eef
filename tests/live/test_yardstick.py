"""What a yardstick comes to. Laying one takes servers: a little validation does it (simulate/test_validate_live)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jettison.cost.hostcosts import HostCosts, Shape
from jettison.live.host_costs import as_laid
from jettison.live.wake_probe import NUM_WAKES, _num_on_the_wakers_core, wakes_pack
from jettison.live.yardstick import (
    LONG_PROMPT,
    NUM_REQUESTS,
    OUTPUTS,
    PROMPTS,
    Reading,
    Tally,
    Yardstick,
    reading_of,
    yardstick_load,
)

SHAPE = ((1, 0.9), (16, 1.1))
CROWDED = ((1, 1.2), (64, 0.9))
SHAPES = HostCosts(step_shape=SHAPE, crowded_shape=CROWDED)
ONE = Tally(0.8, 0.5, 2.0, 1.0, ((0.0, 1.0),))
ALL = Tally(0.6, 1.0, 3.0, 2.0, ((1.0, 2.0),))


def test_the_load_is_the_same_each_time_and_grows_with_the_instances() -> None:
    assert yardstick_load(2, 1024) == yardstick_load(2, 1024)
    assert max(row.input_tokens + row.output_tokens for row in yardstick_load(2, 100).rows) <= 100
    for number in (1, 4):
        rows = yardstick_load(number, 1024).rows
        assert len(rows) == number * NUM_REQUESTS and list(rows) == sorted(rows, key=lambda row: row.arrival_s)
        assert all(PROMPTS[0] <= row.input_tokens <= PROMPTS[1] or row.input_tokens == LONG_PROMPT for row in rows)
        assert sum(row.input_tokens == LONG_PROMPT for row in rows) == number * NUM_REQUESTS // 3
        assert all(OUTPUTS[0] <= row.output_tokens <= OUTPUTS[1] for row in rows)


def test_a_reading_tells_how_fast_a_core_is_alone_and_while_all_serve() -> None:
    reading = reading_of(ONE, ALL, SHAPES, 2)
    # Half of its time it went at 0.6, so the other half at 1.2: 1 / 0.8 = 0.5 / 1.2 + 0.5 / 0.6.
    assert reading.alone == pytest.approx(1.2) and reading.crowded == 0.6
    assert reading.controller_factor == pytest.approx((2.0 * 0.8 + 3.0 * 0.6) / 3.0)
    assert reading.alone_spans == ONE.spans and reading.crowded_spans == ALL.spans
    assert reading.step_shape == SHAPE and reading.crowded_shape == CROWDED


def test_of_a_single_instance_alone_is_all_there_is() -> None:
    reading = reading_of(ONE, None, SHAPES, 1)
    assert reading.alone == reading.crowded == ONE.speed
    assert reading.crowded_spans == ONE.spans


def test_constants_are_those_of_the_time_of_the_yardstick() -> None:
    costs = HostCosts(
        num_cores=2, core_speeds=(1.0, 0.95), step_factor=1.1, controller_step_s=2e-4, client_token_s=1e-5,
        worker_step_s=1e-4,
    )  # fmt: skip
    readings = [Reading(alone, 0.8 * alone, 1.2 * alone, (), (), SHAPE, CROWDED) for alone in (0.9, 1.0, 3.0)]
    laid = as_laid(costs, readings)
    assert laid.core_speeds == pytest.approx((1.0, 0.8)) and laid.step_factor == pytest.approx(1.1)
    assert laid.controller_step_s == pytest.approx(2.4e-4) and laid.client_token_s == pytest.approx(1.2e-5)
    assert laid.worker_step_s == 1e-4 and laid.step_shape == SHAPE
    assert laid.crowded_shape == CROWDED
    slower = as_laid(costs, [Reading(0.5, 0.4, 0.6, (), (), SHAPE, CROWDED)])
    assert slower.step_factor == pytest.approx(2.2), "as if steps had been profiled on the machine as it was then"
    assert slower.worker_step_s == pytest.approx(2e-4)
    assert slower.controller_step_s == pytest.approx(2.4e-4), "and the controller's work is the same on that core"


class FakeCrew:
    """What it was asked to bend, and by which factors steps were predicted."""

    def __init__(self, shape: Shape, tally: Tally) -> None:
        self._shape, self._tally = shape, tally
        self.bent: list[tuple[Shape, float]] = []
        self.tallied: list[tuple[HostCosts, bool]] = []

    def shape(self, index: int, usual: Shape, factor_of: Callable[[int], float]) -> Shape:
        self.bent.append((usual, factor_of(1)))
        return self._shape

    def tally(self, index: int, costs: HostCosts, *, is_crowded: bool) -> Tally:
        self.tallied.append((costs, is_crowded))
        return self._tally


@pytest.mark.parametrize("tells", [True, False])
def test_shapes_are_told_alone_first_and_then_among_all(tells: bool) -> None:
    """Not among all where only some cores are busy, or where a step's time has waiting for a core in it."""
    usual = HostCosts(
        num_cores=2, core_speeds=(1.0, 0.9), step_factor=2.0, step_shape=((1, 1.5),), crowded_shape=((1, 1.1),)
    )
    one, all_ = FakeCrew(SHAPE, ONE), FakeCrew(CROWDED, ALL)
    yardstick = Yardstick.__new__(Yardstick)
    yardstick.__dict__ |= {
        "_crews": [one, all_], "_costs": usual, "_num_busy": 2, "_tells_crowded_shape": tells,
    }  # fmt: skip
    reading = yardstick._reading(0)
    crowded = CROWDED if tells else usual.crowded_shape
    assert (reading.step_shape, reading.crowded_shape) == (SHAPE, crowded)
    assert one.bent == [(((1, 1.5),), 3.0)]
    assert all_.bent == ([(((1, 1.1),), pytest.approx(2.0 * 0.9 * 1.1))] if tells else [])
    assert [is_crowded for _, is_crowded in one.tallied + all_.tallied] == [False, True]
    assert [costs.step_shape for costs, _ in one.tallied + all_.tallied] == [SHAPE, SHAPE]
    assert all_.tallied[0][0].crowded_shape == crowded


def test_one_core_never_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jettison.live.wake_probe.usable_cores", lambda: 1)
    assert wakes_pack() is False


@pytest.mark.parametrize(("num_same", "packs"), [(NUM_WAKES, True), (NUM_WAKES // 2, False), (None, False)])
def test_most_wakes_decide(num_same: int | None, packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(where: object) -> int:
        if num_same is None:
            raise ValueError("the sleeper is gone")
        return num_same

    monkeypatch.setattr("jettison.live.wake_probe.usable_cores", lambda: 2)
    monkeypatch.setattr("jettison.live.wake_probe._num_on_the_wakers_core", count)
    assert wakes_pack() is packs


@pytest.mark.live
def test_a_sleeper_is_woken_and_tells_where() -> None:
    """Told that the waker is nowhere, nothing is on its core; at most all wakes are."""
    assert _num_on_the_wakers_core(lambda: -1) == 0
    assert 0 <= _num_on_the_wakers_core(lambda: 0) <= NUM_WAKES

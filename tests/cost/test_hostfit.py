"""Host costs come back out of phases that were made with them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.hostcosts import HostCosts, shape_at
from jettison.cost.hostfit import (
    LEAST_STEPS,
    Phase,
    Scrapes,
    TimedStep,
    alone_speed,
    bent_shape,
    crowded_speeds,
    fit_host_costs,
    mean_shape,
    serving_speed,
)

TRUE = HostCosts(
    num_cores=2, core_speeds=(1.0, 0.8), threads_per_worker=1, step_factor=1.0, step_shape=((1, 0.8), (8, 1.25)),
    worker_step_s=100e-6, worker_row_s=5e-6,
    worker_stage_s=70e-6, controller_stage_s=150e-6, client_wake_s=50e-6,
    controller_step_s=300e-6, controller_row_s=10e-6, controller_request_s=1500e-6, controller_prompt_token_s=0.5e-6,
    controller_token_s=90e-6, controller_tick_s=200e-6, controller_scrape_s=4e-3, client_request_s=600e-6,
    client_token_s=70e-6, client_scrape_s=2e-3, hop_s=40e-6,
)  # fmt: skip


def phase(
    num_requests: int, prompt: int, output: int, batch: int, later: int = 0, noise: float = 0.0, seed: int = 0
) -> Phase:
    """``later``: stages of a pipeline after the first."""
    rng = random.Random(seed)
    tokens = num_requests * output
    steps = max(1, tokens // batch)
    stages = 1 + later
    wall_s, steps_s = 2.0, steps * stages * 0.005

    def off(seconds: float) -> float:
        return seconds * (1.0 + rng.uniform(-noise, noise))

    controller = (
        steps * (TRUE.controller_step_s + later * TRUE.controller_stage_s)
        + tokens * (TRUE.controller_row_s + TRUE.controller_token_s)
        + num_requests * TRUE.controller_request_s + num_requests * prompt * TRUE.controller_prompt_token_s
    )  # fmt: skip
    return Phase(
        wall_s, steps, tokens * stages, tokens, num_requests, num_requests * prompt,
        off(controller) + wall_s / 0.1 * TRUE.controller_tick_s,
        off(steps * stages * (TRUE.worker_step_s + (TRUE.worker_stage_s if later else 0.0))
            + tokens * stages * TRUE.worker_row_s) + steps_s, steps_s,
        off(num_requests * TRUE.client_request_s + tokens * TRUE.client_token_s + steps * TRUE.client_wake_s),
        later * steps,
    )  # fmt: skip


def fitted(noise: float) -> HostCosts:
    phases = [
        phase(*load, noise=noise, seed=seed) for seed in range(3)
        for load in ((1, 16, 96, 1), (8, 16, 96, 8), (32, 16, 96, 32), (120, 16, 1, 1), (10, 500, 1, 1))
    ]
    phases += [phase(*load, later=1, noise=noise, seed=7) for load in ((1, 16, 96, 1), (8, 16, 96, 4))]
    # Steps of several microbatches are timed with waiting for cores in it, which tells nothing of what is beside them.
    phases[-1] = replace(phases[-1], steps_s=2 * phases[-1].steps_s, computes_in_turn=False)
    idle = Phase(4.0, 0, 0, 0, 0, 0, 40 * TRUE.controller_tick_s, 0.0, 0.0, 0.0)
    row_s = TRUE.worker_row_s + TRUE.controller_row_s
    gap_s = TRUE.worker_step_s + TRUE.controller_step_s + 2 * TRUE.hop_s
    gaps = {size: [gap_s + size * row_s] * 5 + [9.0] for size in (1, 8, 32)}
    return fit_host_costs(
        phases, idle, Scrapes(30, 30 * 4e-3, 30 * 2e-3), gaps, tick_interval_s=0.1, core_speeds=[1.0, 0.8],
        threads_per_worker=1, step_factors={8: 1.25, 1: 0.8},
    )


def test_without_noise_every_constant_comes_back() -> None:
    found = fitted(0.0)
    for name in TRUE.__dataclass_fields__:
        expected, got = getattr(TRUE, name), getattr(found, name)
        if name == "step_shape":
            assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
            expected, got = ([factor for _, factor in shape] for shape in (expected, got))
        assert got == pytest.approx(expected, rel=1e-3, abs=2e-8), name


def test_with_noise_the_large_ones_do() -> None:
    found = fitted(0.05)
    for name in ("controller_request_s", "controller_token_s", "client_request_s", "client_token_s", "worker_step_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.25), name


@pytest.mark.parametrize("bad", [
    {"num_cores": 2}, {"core_speeds": (1.0,)}, {"num_cores": 1, "core_speeds": (0.0,)}, {"hop_s": -1.0},
    {"client_token_s": 2.0}, {"threads_per_worker": 0}, {"step_factor": 9.0},
    {"step_shape": ((4, 1.0), (2, 1.0))}, {"step_shape": ((4, 9.0),)},
])  # fmt: skip
def test_costs_that_are_none(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        HostCosts(**bad)  # type: ignore[arg-type]


def test_what_steps_take_by_their_tokens() -> None:
    assert TRUE.step_factor_of(1) == 0.8 and TRUE.step_factor_of(8) == 1.25 and TRUE.step_factor_of(500) == 1.25
    assert TRUE.step_factor_of(2) == pytest.approx(0.95) and TRUE.step_factor_of(4) == pytest.approx(1.1)
    assert replace(TRUE, step_factor=2.0).step_factor_of(2) == pytest.approx(1.9)
    assert HostCosts().step_factor_of(7) == 1.0
    assert shape_at(((4, 1.5),), 1) == shape_at(((4, 1.5),), 9) == 1.5


def test_by_default_nobody_shares() -> None:
    assert not HostCosts().is_shared and TRUE.is_shared


def test_speeds_while_serving() -> None:
    assert serving_speed(5.0, 4.5, 1) == pytest.approx(0.9)
    assert serving_speed(10.0, 4.5, 2) == pytest.approx(0.9), "two threads of each worker are busy"
    assert serving_speed(0.0, 1.0, 1) == 1.5 and serving_speed(1.0, 0.0, 1) == 0.3


@given(st.floats(0.6, 1.2), st.floats(0.5, 1.0), st.floats(0.0, 0.85))
def test_speed_alone_comes_back_out_of_a_time_that_was_partly_shared(alone: float, ratio: float, beside: float) -> None:
    crowded = alone * ratio
    mixed = 1.0 / ((1.0 - beside) / alone + beside / crowded)
    assert alone_speed(mixed, crowded, beside) == pytest.approx(alone)


def test_beside_one_of_many_cores_is_less_than_beside_all() -> None:
    assert alone_speed(0.98, 0.6, 0.3, num_busy=8) == pytest.approx(1.01, abs=0.02)
    assert alone_speed(0.98, 0.6, 0.3) == pytest.approx(1.34, abs=0.03)


def test_who_was_never_alone_tells_nothing_of_it() -> None:
    assert alone_speed(0.7, 0.6, 0.95) == 0.7
    assert alone_speed(0.9, 0.3, 0.8) == 1.5, "nonsense stays between bounds"


def test_speeds_of_busy_cores_are_bent() -> None:
    assert crowded_speeds([1.0], 0.5, 1) == (1.0,), "one core is never crowded by another"
    assert crowded_speeds([1.0, 1.0], 0.9, 2) == pytest.approx((1.0, 0.9))
    assert crowded_speeds([1.0, 0.9, 0.8], 0.4, 3) == pytest.approx((1.0, 0.9 * 0.5**0.5, 0.4))
    assert crowded_speeds([1.0, 0.9, 0.8], 0.45, 2) == pytest.approx((1.0, 0.45, 0.4)), "more are slowed as well"
    assert crowded_speeds([1.0, 0.9], 0.4, 1) == (1.0, 0.9), "nobody was crowded"


# --- the shape of step times

TRUE_SHAPE = ((1, 0.8), (8, 1.1), (64, 1.0), (256, 0.9))


@given(st.lists(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256]), min_size=4, unique=True), st.floats(0.5, 2.0))
def test_a_shape_comes_back_out_of_steps_that_have_it_whatever_the_speed(sizes: list[int], speed: float) -> None:
    usual = ((1, 1.0), (16, 1.2))
    steps = [
        TimedStep(size, 1e-3 * shape_at(usual, size), 1e-3 * speed * shape_at(TRUE_SHAPE, size))
        for size in sizes for _ in range(LEAST_STEPS)
    ]  # fmt: skip
    found = bent_shape(usual, steps)
    assert set(sizes) <= {tokens for tokens, _ in found} <= {*sizes, 1, 16} and list(found) == sorted(found)
    ratios = [shape_at(found, size) / shape_at(TRUE_SHAPE, size) for size in sizes]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
    bent = sum(shape_at(found, step.num_tokens) / shape_at(usual, step.num_tokens) * step.predicted_s for step in steps)
    assert bent == pytest.approx(sum(step.predicted_s for step in steps)), "how long all are is not the shape's"


def test_points_beyond_what_was_seen_change_as_the_nearest_does() -> None:
    steps = [TimedStep(size, 1e-3, took_s) for size, took_s in ((8, 1e-3), (64, 2e-3)) for _ in range(LEAST_STEPS)]
    found = dict(bent_shape(((1, 0.8), (8, 1.0), (64, 1.0), (511, 0.7)), steps))
    assert found == pytest.approx({1: 0.8 / 1.5, 8: 1 / 1.5, 64: 2 / 1.5, 511: 1.4 / 1.5})


def test_few_steps_bend_nothing() -> None:
    steps = [TimedStep(size, 1e-3, 2e-3 / size) for size in (1, 8)]
    assert bent_shape(TRUE_SHAPE, steps * (LEAST_STEPS - 1)) == TRUE_SHAPE
    assert bent_shape(TRUE_SHAPE, [steps[0]] * 100 + [steps[1]]) == TRUE_SHAPE, "of one size only"
    assert bent_shape((), []) == ()


def test_one_long_step_of_a_size_is_no_shape() -> None:
    steps = [TimedStep(size, 1e-3, 1e-3) for size in (1, 16) for _ in range(9)]
    assert dict(bent_shape((), [*steps, TimedStep(16, 1e-3, 1.0)])) == pytest.approx({1: 1.0, 16: 1.0})


def test_shapes_are_averaged_where_any_has_a_point() -> None:
    found = mean_shape([((1, 1.0), (16, 2.0)), ((4, 1.0),)])
    assert dict(found) == pytest.approx({1: 1.0, 4: 1.25, 16: 1.5}) and list(found) == sorted(found)
    assert mean_shape([(), ()]) == ()

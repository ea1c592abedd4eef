from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.errors import ConfigError
from jettison.workload.calibrate import OverloadSetting, calibrate, choose_setting
from jettison.workload.probe import Deployment, MachineSpeed, predict
from jettison.workload.shaping import scale_time
from jettison.workload.synthetic import Burst, Lengths, SyntheticSpec, generate
from jettison.workload.traces import TraceRow, Workload

SPEED = MachineSpeed(prefill_tokens_per_s=5000, decode_base_s=0.01, decode_per_request_s=0.0005)
SMALL = SyntheticSpec("small", 2.0, 20.0, Lengths(32, 0.3, 128), Lengths(40, 0.3, 128), bursts=(Burst(8.0, 1.0, 15.0),))
SETTING = OverloadSetting(capacity_tokens=600, merged_capacity_tokens=1300)


def one_request(input_tokens: int, output_tokens: int) -> Workload:
    return Workload((TraceRow(0.0, input_tokens, output_tokens),), "one", "made up")


def test_one_request_takes_its_prefill_and_its_decodes() -> None:
    found = predict(one_request(500, 11), SPEED, Deployment(10_000, token_budget=256))
    prefill_s = 2 * SPEED.decode_base_s + 500 / 5000  # two chunks
    assert found.p99_ttft_s == pytest.approx(prefill_s)
    assert found.p50_tpot_s == pytest.approx(0.0105)
    assert found.end_s == pytest.approx(prefill_s + 10 * 0.0105)
    assert found.peak_demand_tokens == 510  # the last token's step is the last one seen before it


def test_a_short_memory_makes_requests_wait_and_recompute() -> None:
    rows = tuple(TraceRow(0.0, 100, 100) for _ in range(8))
    workload = Workload(rows, "eight", "made up")
    roomy = predict(workload, SPEED, Deployment(10_000))
    tight = predict(workload, SPEED, Deployment(500))
    assert roomy.num_preemptions == 0 < tight.num_preemptions
    assert tight.p99_ttft_s > 5 * roomy.p99_ttft_s


def test_a_request_beyond_a_group_is_refused_and_counted() -> None:
    found = predict(one_request(300, 300), SPEED, Deployment(500))
    assert (found.num_refused, found.end_s, found.p99_ttft_s) == (1, 0.0, 0.0)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.floats(0, 5), st.integers(1, 120), st.integers(1, 60)).map(lambda row: TraceRow(*row)), max_size=15
    ),
    capacity=st.integers(200, 600),
    groups=st.integers(1, 3),
)
def test_every_request_ends_and_time_is_scale_free(rows: list[TraceRow], capacity: int, groups: int) -> None:
    workload = Workload(tuple(sorted(rows)), "w", "made up")
    deployment = Deployment(capacity, num_groups=groups)
    found = predict(workload, SPEED, deployment)
    assert found.num_refused == 0 and (found.end_s > 0) == bool(rows)
    # A machine half as fast, with arrivals half as fast, does the same in twice the time.
    slow = MachineSpeed(2500, 0.02, 0.001)
    again = predict(scale_time(workload, 0.5), slow, deployment)
    assert again.peak_demand_tokens == found.peak_demand_tokens
    assert again.p99_ttft_s == pytest.approx(2 * found.p99_ttft_s)
    assert again.num_preemptions == found.num_preemptions


@pytest.mark.parametrize("share", [0.6, 0.75])
@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_calibration_puts_the_peak_where_it_was_asked(share: float, slower: float) -> None:
    machine = MachineSpeed(5000 / slower, 0.01 * slower, 0.0005 * slower)
    workload = generate(SMALL, 0)
    rate_scale = calibrate(workload, machine, SETTING, target_share=share)
    peak = predict(scale_time(workload, rate_scale), machine, SETTING.unlimited).peak_demand_tokens
    assert peak == pytest.approx(share * 1300, rel=0.05)


def test_a_slower_machine_gets_slower_arrivals() -> None:
    workload = generate(SMALL, 0)
    fast = calibrate(workload, SPEED, SETTING)
    slow = calibrate(workload, MachineSpeed(2500, 0.02, 0.001), SETTING)
    assert slow == pytest.approx(fast / 2, rel=0.1)


def test_the_chosen_speed_favours_the_merged_group_on_every_seed() -> None:
    chosen = choose_setting([generate(SMALL, seed) for seed in range(2)], SPEED, SETTING, num_candidates=2)
    assert chosen.worst_gain > 2
    assert chosen.predicted_p99_ttft_separate_s > chosen.predicted_p99_ttft_merged_s
    assert chosen.peak_over_capacity > 1 > chosen.peak_over_merged
    assert chosen.replay_s > 0


def test_targets_that_cannot_be_met_are_said() -> None:
    with pytest.raises(ConfigError, match="nothing to relieve"):
        calibrate(generate(SMALL, 0), SPEED, SETTING, target_share=0.4)
    with pytest.raises(ConfigError, match="no replay speed"):
        calibrate(one_request(10, 10), SPEED, SETTING)
    with pytest.raises(ConfigError, match="at least one workload"):
        choose_setting([], SPEED, SETTING)
    one_long = generate(SMALL, 0).with_rows([*generate(SMALL, 0).rows, TraceRow(19.0, 301, 1)], "and a long one")
    with pytest.raises(ConfigError, match="can never fit one instance"):
        choose_setting([one_long], SPEED, SETTING)
    with pytest.raises(ConfigError, match="merged capacity"):
        OverloadSetting(500, 400)


def test_speed_from_measured_steps() -> None:
    line = MachineSpeed.from_points(4000, [(1, 0.0105), (16, 0.018), (64, 0.042)])
    assert (line.decode_base_s, line.decode_per_request_s) == pytest.approx((0.01, 0.0005))
    assert line.step_s(10, 400) == pytest.approx(0.01 + 0.005 + 0.1)
    assert MachineSpeed.from_points(4000, [(8, 0.02), (8, 0.03)]).decode_base_s == pytest.approx(0.025)
    noisy = MachineSpeed.from_points(4000, [(1, 0.02), (64, 0.019)])
    assert noisy.decode_per_request_s == 0.0 and noisy.decode_base_s == pytest.approx(0.0195)
    with pytest.raises(ConfigError):
        MachineSpeed.from_points(4000, [])
    with pytest.raises(ConfigError):
        MachineSpeed(0, 0.01)


def test_unlimited_means_unlimited() -> None:
    assert math.isinf(SETTING.unlimited.capacity_tokens)
    assert predict(generate(SMALL, 0), SPEED, SETTING.unlimited).num_preemptions == 0

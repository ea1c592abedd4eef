from __future__ import annotations

import pytest

from jettison.cost.speed import MachineSpeed
from jettison.errors import ConfigError


def test_speed_from_measured_steps() -> None:
    line = MachineSpeed.from_points(4000, [(1, 0.0105), (16, 0.018), (64, 0.042)])
    assert (line.decode_base_s, line.decode_per_request_s) == pytest.approx((0.01, 0.0005))
    assert line.step_s(10, 400) == pytest.approx(0.01 + 0.005 + 0.1)
    assert line.slowed(3).step_s(10, 400) == pytest.approx(3 * line.step_s(10, 400))
    assert MachineSpeed.from_points(4000, [(8, 0.02), (8, 0.03)]).decode_base_s == pytest.approx(0.025)
    noisy = MachineSpeed.from_points(4000, [(1, 0.02), (64, 0.019)])
    assert noisy.decode_per_request_s == 0.0 and noisy.decode_base_s == pytest.approx(0.0195)


def test_a_speed_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError):
        MachineSpeed.from_points(4000, [])
    with pytest.raises(ConfigError):
        MachineSpeed(0, 0.01)

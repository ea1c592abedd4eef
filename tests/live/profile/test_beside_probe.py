"""What pairs of steps, alone and beside copies, say of the price of a byte."""

from __future__ import annotations

import pytest

from jettison.cost.shapes import ShapeLimits
from jettison.live.profile.beside_probe import BesidePair, BesideSpeed, shapes_beside


def test_the_price_is_what_a_step_takes_longer_by_the_byte_and_never_below_nothing() -> None:
    pairs = [BesidePair(0.010, 0.012, 4e6), BesidePair(0.020, 0.022, 4e6), BesidePair(0.010, 0.050, 4e6)]
    speed = BesideSpeed.of(pairs)
    assert speed is not None and speed.byte_s == pytest.approx(0.002 / 4e6)
    assert speed.bytes_per_s == pytest.approx(4e6 / 0.022)
    assert BesideSpeed.of([BesidePair(0.012, 0.010, 4e6)]) == BesideSpeed(4e8, 0.0)


def test_where_hardly_anything_was_copied_nothing_is_known() -> None:
    busy = BesidePair(0.010, 0.030, 0)
    assert BesideSpeed.of([busy, busy, BesidePair(0.010, 0.012, 4e6)]) is None


@pytest.mark.parametrize("limits", [
    ShapeLimits(4, 512, 64, 2048, 16384), ShapeLimits(1, 1, 1, 2, 16, block_size=16), ShapeLimits(2, 8, 300, 64, 512),
])  # fmt: skip
def test_the_steps_can_be_run(limits: ShapeLimits) -> None:
    assert all(limits.allow(shape) for shape in shapes_beside(limits))

"""Pieces follow what the link carries and what a stage takes."""

from __future__ import annotations

import pytest

from jettison.live.worker.pieces import MIN_PIECE_BYTES, START_PIECE_BYTES, PieceSizer, SpareTime

MS = 1_000_000


def drive(sizer: PieceSizer, bytes_per_s: float, stage_ms: float, *, refuses: bool, seconds: float = 2.0) -> int:
    """Send one piece after the other over a link of this rate."""
    now, end = 0.0, seconds * 1e9
    while now < end:
        now += sizer.piece_bytes / bytes_per_s * 1e9
        if refuses:
            sizer.refused(int(now))
        sizer.sent(sizer.piece_bytes, int(now), int(stage_ms * MS))
    return sizer.piece_bytes


@pytest.mark.parametrize(("rate", "stage_ms"), [(25e6, 4.0), (5e6, 8.0), (100e6, 2.0)])
def test_a_piece_takes_about_a_stage(rate: float, stage_ms: float) -> None:
    size = drive(PieceSizer(1 << 20, adapt=True), rate, stage_ms, refuses=True)
    assert size / rate * 1e3 == pytest.approx(stage_ms, rel=0.2)


def test_bounds_hold_on_any_link() -> None:
    assert drive(PieceSizer(1 << 20, adapt=True), 1e5, 1.0, refuses=True, seconds=30) == MIN_PIECE_BYTES
    assert drive(PieceSizer(1 << 20, adapt=True), 1e10, 1e6, refuses=True) == 1 << 20


def test_a_link_that_never_refuses_gets_the_largest_pieces() -> None:
    sizer = PieceSizer(1 << 20, adapt=True)
    assert sizer.piece_bytes == START_PIECE_BYTES
    assert drive(sizer, 1e9, 1.0, refuses=False) == 1 << 20


def test_a_fixed_size_stays() -> None:
    assert drive(PieceSizer(12_345, adapt=False), 1e6, 1.0, refuses=True) == 12_345


def test_spare_time_is_a_share_of_what_layers_take_and_no_step_inherits_it():
    spare = SpareTime(share=4, max_ns=100)
    spare.begin(0)
    spare.earn(200)
    assert spare
    spare.spend(260)
    assert not spare, "a piece took more than the fifty there were"
    spare.begin(300)
    spare.earn(336)
    assert not spare
    spare.earn(10_000)
    assert spare
    spare.spend(10_101)
    assert not spare, "no more is saved up than the bound"
    spare.begin(11_000)
    spare.earn(11_040)
    spare.begin(12_000)
    assert not spare

"""Replays of sizes against packings: what an epoch holds, who fits, and that no policy beats the bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.policy.packing.types import Arrive, Depart, Resize
from jettison.report.placement import Life, demand_of, gap_closed, late_share, num_kept, packer_for, place


def test_a_request_holds_its_prompt_and_grows_from_its_first_token_on() -> None:
    life = Life(1.0, 2.0, 4.0, 100, 40)
    assert [life.tokens_at(t) for t in (1.0, 2.0, 3.0, 4.0, 9.0)] == [100, 100, 120, 140, 140]
    assert Life(0.0, 1.0, 1.0, 7, 1).tokens_at(1.0) == 8


def test_operations_stand_in_the_epoch_in_which_they_happen() -> None:
    lives = [Life(0.2, 0.5, 2.5, 10, 20), Life(1.5, 1.6, 1.7, 5, 1)]
    demand = demand_of(lives, 100, block_size=1, ahead_s=0.0)
    assert demand.batches == [
        [Arrive("0", 15)], [Resize("0", 25), Arrive("1", 6)], [Depart("1"), Resize("0", 30)],
    ]  # fmt: skip
    assert demand.sizes == [[15], [25, 6], [30]]
    assert demand.held_blocks == [10, 25, 0], "in the middle of each"


def test_what_is_larger_than_a_device_fills_one_and_is_counted() -> None:
    demand = demand_of([Life(0.0, 0.1, 3.0, 50, 90)], 100, block_size=1)
    assert demand.num_cut == 1 and max(map(max, demand.sizes)) == 100
    assert place(demand, packer_for(demand, "mell")).peak_devices == 1
    with pytest.raises(ValueError, match="devices of 10 tokens"):
        demand_of([], 10, block_size=16)


def test_a_reserve_is_no_larger_than_what_may_be_written() -> None:
    known, unknown = (
        demand_of([Life(0.0, 0.1, 0.6, 10, 20, max_tokens)], 1000, block_size=1) for max_tokens in (20, None)
    )
    assert known.sizes == [[30]], "it may write no more than it did"
    assert unknown.sizes == [[30 + 4 * 40]], "four seconds at its rate"


def test_it_ends_where_it_is_told_to() -> None:
    lives = [Life(float(at), at + 0.5, at + 9.0, 10, 9) for at in range(8)]
    assert len(demand_of(lives, 100, until_s=4.5).batches) == 5
    assert len(demand_of(lives, 100).batches) == 17


@st.composite
def lives(draw: st.DrawFn) -> list[Life]:
    found = []
    for _ in range(draw(st.integers(1, 25))):
        at, wait, stay = (draw(st.floats(0.0, 6.0)) for _ in range(3))
        found.append(Life(at, at + wait, at + wait + stay, draw(st.integers(1, 90)), draw(st.integers(1, 40))))
    return found


@settings(max_examples=60, deadline=None)
@given(lives(), st.sampled_from(["mell", "best-fit", "worst-fit", "load-balance"]))
def test_everybody_fits_everywhere_and_nobody_beats_the_bounds(found: list[Life], name: str) -> None:
    demand = demand_of(found, 100, block_size=1)
    placed = place(demand, packer_for(demand, name))
    assert not placed.num_overfull
    assert all(placed.devices >= demand.l2()) and all(demand.l2() >= demand.volume())
    assert all(demand.repacked() >= demand.l2())
    assert name in ("mell", "load-balance") or not placed.num_moves
    assert (placed.utilisation or 0.0) <= 1.0
    assert placed.device_s == pytest.approx(placed.mean_devices * len(demand.batches))


def test_moves_between_machines_wait_for_links_and_then_for_prefills() -> None:
    # Ten requests fill five devices of two; one of each two ends, and the others come together.
    stay = [Life(0.0, 0.0, 4.0 + 3.0 * (i % 2), 45, 1) for i in range(10)]
    demand = demand_of(stay, 100, block_size=1, ahead_s=0.0)
    placed = place(demand, packer_for(demand, "mell"))
    assert placed.num_moves > 0 and placed.moves_per_s == placed.num_moves / len(demand.batches)
    assert late_share(placed, 1, 8, 0.0, 0) == 0.0, "all on one machine"
    assert late_share(placed, 1, 1, 0.0, 0) == 1.0
    assert late_share(placed, 1, 1, 1e9, 0) == 0.0
    assert late_share(placed, 1, 1, 0.0, 1000) == 0.0


def test_who_is_held_moves_only_where_a_device_overflows() -> None:
    stay = [Life(0.0, 0.0, 4.0 + 3.0 * (i % 2), 45, 1) for i in range(10)]
    demand = demand_of(stay, 100, block_size=1, ahead_s=0.0)
    assert place(demand, packer_for(demand, "mell")).num_moves > 0
    assert place(demand, packer_for(demand, "mell"), holds=True).num_moves == 0
    growing = demand_of([Life(0.0, 0.0, 9.0, 45, 20)] * 2, 100, block_size=1, ahead_s=0.0)
    assert place(growing, packer_for(growing, "mell"), holds=True).num_moves == 1


def test_who_is_held_moves_to_close_a_device_where_that_is_asked_for() -> None:
    stay = [Life(0.0, 0.0, 4.0 + 3.0 * (i % 2), 45, 1) for i in range(10)]
    demand = demand_of(stay, 100, block_size=1, ahead_s=0.0)
    held = place(demand, packer_for(demand, "mell"), holds=True)
    closing = place(demand, packer_for(demand, "mell"), holds=True, closes_every=1)
    assert closing.num_moves == 2 and closing.devices.sum() < held.devices.sum()
    assert (closing.devices >= demand.l2()).all()


def test_the_gap_that_is_closed() -> None:
    assert gap_closed(10.0, 8.5, 8.0) == 0.75
    assert gap_closed(8.0, 8.0, 8.0) is None


def test_who_outgrows_a_cluster_loses_its_kv_unless_it_can_move() -> None:
    lives = [Life(0.0, 0.0, 4.0, 40, 40), Life(0.1, 0.1, 4.0, 40, 1), Life(0.2, 0.2, 4.0, 20, 1)]
    demand = demand_of(lives, 100, block_size=1, ahead_s=0.0)
    assert num_kept(demand, packer_for(demand, "mell", num_devices=2)) == 3
    # Best-fit puts the two larger ones together, and the newer of them has to go.
    assert num_kept(demand, packer_for(demand, "best-fit", num_devices=2)) == 2
    assert num_kept(demand, packer_for(demand, "best-fit", num_devices=1)) == 1

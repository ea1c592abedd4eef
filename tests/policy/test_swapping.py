"""Who is swapped out and in, and how much a step carries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.swapping import StoredRow, SwapParams, SwapRow, choose_swap_ins, choose_swap_outs, swap_budget

COUNT = st.integers(0, 40)
ROWS = st.lists(st.builds(SwapRow, st.just(""), COUNT, COUNT, st.integers(0, 2)), max_size=8).map(
    lambda rows: [row._replace(request_id=f"r{i}") for i, row in enumerate(rows)]
)


@given(ROWS, COUNT, COUNT, COUNT, COUNT)
def test_no_more_leave_than_are_needed_and_all_fit_the_pool(
    rows: list[SwapRow], growth: int, free: int, leaving: int, slots: int
) -> None:
    chosen = choose_swap_outs(
        rows, growth_blocks=growth, num_free_blocks=free, num_leaving_blocks=leaving, num_free_slots=slots
    )
    assert chosen == tuple(r.request_id for r in rows[: len(chosen)]), "youngest first, without a gap"
    assert len(chosen) < max(1, len(rows)), "one stays"
    assert sum(r.num_slots for r in rows[: len(chosen)]) <= slots
    missing = growth - free - leaving
    before_last = sum(r.num_reclaimable_blocks + r.num_growth_blocks for r in rows[: max(0, len(chosen) - 1)])
    assert not chosen or missing > before_last, "the last one was needed, too"


def test_who_has_computed_nothing_is_left_to_be_recomputed() -> None:
    rows = [SwapRow("young", 5, 0, 1), SwapRow("middle", 5, 5, 1), SwapRow("old", 5, 5, 1)]
    assert choose_swap_outs(rows, growth_blocks=3, num_free_blocks=0, num_leaving_blocks=0, num_free_slots=99) == ()


STORED = st.lists(st.integers(1, 20), max_size=6).map(lambda n: [StoredRow(f"r{i}", b) for i, b in enumerate(n)])


@given(STORED, COUNT, st.integers(0, 80), st.integers(0, 3), st.integers(0, 6), st.integers(1, 8))
def test_who_returns_fits_beside_what_the_others_will_take(
    rows: list[StoredRow], growth: int, free: int, watermark: int, running: int, most: int
) -> None:
    chosen = choose_swap_ins(
        rows, growth_blocks=growth, num_free_blocks=free, watermark_blocks=watermark, num_running=running,
        max_num_seqs=most,
    )
    assert chosen == tuple(r.request_id for r in rows[: len(chosen)]), "oldest first, without a gap"
    assert sum(r.num_blocks for r in rows[: len(chosen)]) + growth <= free or not chosen
    assert not chosen or running + len(chosen) <= most


def test_where_nothing_runs_whoever_fits_returns() -> None:
    rows = [StoredRow("a", 10), StoredRow("b", 10)]
    alone = {"growth_blocks": 0, "watermark_blocks": 2, "max_num_seqs": 8}
    assert choose_swap_ins(rows, num_free_blocks=10, num_running=0, **alone) == ("a",)
    assert choose_swap_ins(rows, num_free_blocks=12, num_running=1, **alone) == ()


@pytest.mark.parametrize(
    ("params", "num_blocks", "expected"),
    [(SwapParams(budget_blocks=5), 50, 5), (SwapParams(), None, 8), (SwapParams(), 50, 50), (SwapParams(), 0, 1)],
)
def test_the_budget_is_what_adds_a_share_of_its_time_to_a_step(
    params: SwapParams, num_blocks: int | None, expected: int
) -> None:
    shares: list[float] = []

    def blocks_within(share: float) -> int | None:
        shares.append(share)
        return num_blocks

    assert swap_budget(params, blocks_within) == expected
    assert all(share == params.time_share for share in shares)

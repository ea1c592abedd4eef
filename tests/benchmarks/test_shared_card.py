"""MELL's Fig. 9 in virtual time: what shares a card is not overrun, by the same code that divides moves live."""

from __future__ import annotations

from benchmarks.packing.card import run


def test_two_sources_behind_one_card_do_not_overrun_it() -> None:
    by_cards, by_pairs = run(knows_cards=True, num_each=4), run(knows_cards=False, num_each=4)
    assert not any(epoch.is_overrun for epoch in by_cards.epochs)
    assert by_pairs.epochs[0].is_overrun and by_pairs.epochs[0].load > 1.5 * by_cards.epochs[0].load
    assert by_cards.stop_max_ms < by_pairs.stop_max_ms

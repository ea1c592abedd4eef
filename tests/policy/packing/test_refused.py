"""Refused moves are asked about again when what the refusal rested on has changed by as much as was missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.packing.refused import Grounds, Refused

GROUNDS = Grounds(100, 4, 2.0, 0.5, 1000.0)
REFUSED = Refused(4.0, 1.0, 0.0, GROUNDS)
"""They save 1 of the 4 device-seconds that they cost."""


def test_unchanged_they_stay_refused() -> None:
    assert not REFUSED.is_due(GROUNDS)


@pytest.mark.parametrize(("enough", "short"), [
    (GROUNDS._replace(stay_s=8.0), GROUNDS._replace(stay_s=7.9)),
    (GROUNDS._replace(share=1.0, stay_s=4.0), GROUNDS._replace(share=1.0)),
    (GROUNDS._replace(num_requests=16), GROUNDS._replace(num_requests=15)),
    (GROUNDS._replace(num_blocks=0, queued_bytes=0.0), GROUNDS._replace(num_blocks=50, queued_bytes=0.0)),
])
def test_they_are_due_once_as_much_has_changed_as_was_missing(enough: Grounds, short: Grounds) -> None:
    assert REFUSED.is_due(enough) and not REFUSED.is_due(short)


def test_what_was_refused_for_a_busy_link_is_due_once_the_link_is_free() -> None:
    busy = Refused(4.0, 3.5, 0.0, GROUNDS)
    assert not busy.is_due(GROUNDS) and busy.is_due(GROUNDS._replace(queued_bytes=100.0))
    assert not busy.is_due(GROUNDS._replace(queued_bytes=9000.0)), "no other transfer makes it due"


def test_where_nothing_is_saved_they_are_due_once_something_is() -> None:
    nothing = Refused(0.5, 0.0, 0.0, GROUNDS._replace(share=0.0))
    assert not nothing.is_due(nothing.grounds) and nothing.is_due(GROUNDS)


def test_the_next_refusal_out_of_the_same_device_is_weighed_with_the_first() -> None:
    both = GROUNDS._replace(num_blocks=150)
    merged = REFUSED.beside(Refused(2.0, 0.0, 0.5, GROUNDS._replace(num_blocks=50)), both)
    assert merged.cost_s == pytest.approx(6.0) and merged.grounds == both and not merged.is_due(both)


@given(
    cost_s=st.floats(0.0, 100.0), waited=st.floats(0.0, 1.0), takes_s=st.floats(0.0, 10.0),
    blocks=st.integers(1, 1000), requests=st.integers(1, 64), stay_s=st.floats(0.0, 100.0),
    share=st.floats(0.0, 1.0), queued=st.floats(0.0, 1e6), fewer=st.integers(0, 1000), longer=st.floats(0.0, 10.0),
)
def test_fewer_blocks_and_longer_stays_never_make_them_less_due(
    cost_s: float, waited: float, takes_s: float, blocks: int, requests: int, stay_s: float, share: float,
    queued: float, fewer: int, longer: float,
) -> None:
    grounds = Grounds(blocks, requests, stay_s, share, queued)
    refused = Refused(cost_s, waited * cost_s, takes_s, grounds)
    better = grounds._replace(num_blocks=max(0, blocks - fewer), stay_s=stay_s + longer)
    assert refused.is_due(better) or not refused.is_due(grounds)

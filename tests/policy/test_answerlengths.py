"""Lengths of answers, from those that have ended and those that have not."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.answerlengths import UNKNOWN_TOKENS, AnswerLengths, evenly

SHARES = [(i + 0.5) / 100 for i in range(100)]


def test_where_all_have_ended_lengths_are_theirs() -> None:
    lengths = AnswerLengths([40, 10, 30, 20], [])
    assert [lengths.at(share) for share in (0.0, 0.3, 0.6, 0.9)] == [10, 20, 30, 40]
    assert [lengths.at(share, longer_than=20) for share in (0.0, 0.6)] == [30, 40]


def test_those_under_way_count_as_longer() -> None:
    ended = AnswerLengths([10, 20], [])
    assert AnswerLengths([10, 20], [50, 50, 50]).at(0.9) > 50 > ended.at(0.9)
    assert AnswerLengths([10, 20], [1, 2]).at(0.5) == ended.at(0.5), "those that have just begun say nothing yet"


def test_while_nothing_is_known_lengths_are_spread_about_a_usual_one() -> None:
    lengths = AnswerLengths([], [])
    assert statistics.mean(lengths.at(share) for share in SHARES) == pytest.approx(UNKNOWN_TOKENS, rel=0.05)


def test_a_quiet_start_does_not_make_answers_short() -> None:
    """Answers of 10 to 400 tokens begin at one time; when 100 tokens have come, only the short ones have ended."""
    rng = random.Random(0)
    true = [rng.randint(10, 400) for _ in range(200)]
    ended = [length for length in true if length <= 100]
    lengths = AnswerLengths(ended, [100] * (len(true) - len(ended)))
    assert statistics.mean(ended) < 70
    assert statistics.mean(lengths.at(share) for share in SHARES) > 150


@given(
    st.lists(st.integers(1, 500), max_size=40), st.lists(st.integers(0, 500), max_size=40), st.floats(0, 0.999),
    st.integers(0, 600),
)
def test_a_length_is_longer_than_what_is_there_and_grows_with_the_share(
    ended: list[int], under_way: list[int], share: float, longer_than: int
) -> None:
    lengths = AnswerLengths(ended, under_way)
    found = lengths.at(share, longer_than)
    assert found > longer_than and lengths.at(0.9999, longer_than) >= found


@given(st.integers(0, 10_000), st.integers(10, 60))
def test_any_run_of_indices_is_spread_evenly(first: int, count: int) -> None:
    shares = sorted(evenly(index) for index in range(first, first + count))
    gaps = [b - a for a, b in zip([shares[-1] - 1.0, *shares], shares, strict=False)]
    assert max(gaps) < 3.0 / count


@pytest.mark.parametrize("num_under_way", [64, 200, 1000, 5000])
def test_many_under_way_do_not_make_answers_long(num_under_way: int) -> None:
    """Answers of 100 to 300 tokens in a steady state; the last 64 ended ones are known."""
    rng = random.Random(1)
    ended = [rng.randint(100, 300) for _ in range(64)]
    under_way = [int(rng.random() * rng.randint(100, 300)) for _ in range(num_under_way)]
    lengths = AnswerLengths(ended, under_way)
    assert statistics.mean(lengths.at(share) for share in SHARES) == pytest.approx(200, rel=0.2)


def test_long_ones_under_way_are_seen_before_any_has_ended() -> None:
    assert statistics.mean(AnswerLengths([], [300] * 50).at(share, 300) for share in SHARES) > 500

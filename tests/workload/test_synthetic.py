from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.errors import ConfigError
from jettison.workload.prompts import PromptMaker
from jettison.workload.synthetic import PRESETS, Burst, Lengths, SyntheticSpec, generate, preset

LONG = SyntheticSpec("long", 20.0, 1000.0, Lengths(64, 0.5, 10_000), Lengths(200, 0.5, 10_000))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_functions_of_their_seed(name: str) -> None:
    assert generate(preset(name), 3) == generate(preset(name), 3)
    assert generate(preset(name), 3).rows != generate(preset(name), 4).rows


def test_the_first_requests_of_a_seed_are_pinned() -> None:
    """A seed that is quoted in a report must mean the same workload later."""
    rows = generate(preset("burst"), 0).rows
    assert len(rows) == 223
    assert [row[1:3] for row in rows[:4]] == [(96, 320), (25, 141), (11, 443), (102, 323)]
    assert [row.arrival_s for row in rows[:4]] == pytest.approx([1.64676390, 2.02832926, 2.65451283, 2.76748757])


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_arrivals_have_the_rate_and_variability_asked_for(cv: float) -> None:
    arrivals = np.array([row.arrival_s for row in generate(replace(LONG, cv=cv), 5).rows])
    gaps = np.diff(arrivals)
    assert len(arrivals) / 1000 == pytest.approx(20, rel=4 * cv / np.sqrt(20_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)


@pytest.mark.parametrize("cv", [0.5, 1.5])
def test_bursts_multiply_the_rate_where_they_stand(cv: float) -> None:
    spec = replace(LONG, cv=cv, bursts=(Burst(200, 100, 5.0), Burst(950, 500, 2.0)))
    arrivals = np.array([row.arrival_s for row in generate(spec, 6).rows])

    def rate(start_s: float, end_s: float) -> float:
        return ((arrivals >= start_s) & (arrivals < end_s)).sum() / (end_s - start_s)

    assert rate(200, 300) == pytest.approx(100, rel=0.08)
    assert rate(950, 1000) == pytest.approx(40, rel=0.2)
    assert rate(0, 200) == pytest.approx(20, rel=0.12)
    assert arrivals.max() < 1000


def test_lengths_have_their_median_spread_and_bounds() -> None:
    spec = replace(LONG, output=Lengths(200, 0.5, cap=400, floor=100))
    rows = np.array(generate(spec, 7).rows)
    assert np.median(rows[:, 1]) == pytest.approx(64, rel=0.03)
    assert np.log(rows[:, 1]).std() == pytest.approx(0.5, rel=0.03)
    assert rows[:, 2].min() == 100 and rows[:, 2].max() == 400


def test_a_log_normal_from_median_and_mean_has_both() -> None:
    rows = np.array(generate(replace(LONG, prompt=Lengths.from_mean(1020, 1154.7, 14050)), 8).rows)
    assert np.median(rows[:, 1]) == pytest.approx(1020, rel=0.03)
    assert rows[:, 1].mean() == pytest.approx(1154.7, rel=0.03)


def test_more_users_keep_the_shape() -> None:
    assert preset("burst").scaled(3.0).rate_per_s == 6.0
    assert preset("burst").scaled(3.0).bursts == preset("burst").bursts


@pytest.mark.parametrize(
    "change",
    [
        {"rate_per_s": 0.0},
        {"cv": -1.0},
        {"duration_s": float("inf")},
        {"bursts": (Burst(-1, 1, 2),)},
        {"bursts": (Burst(1, 0, 2),)},
        {"prompt": Lengths(0, 1, 10)},
        {"output": Lengths(5, 1, cap=3, floor=4)},
    ],
)
def test_specs_that_make_no_sense_are_refused(change) -> None:
    with pytest.raises(ConfigError, match="workload long"):
        generate(replace(LONG, **change), 0)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="azure-conv-like, burst, burstgpt-like"):
        preset("bursty")


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), index=st.integers(0, 10**6), length=st.integers(0, 300))
def test_prompts_are_functions_of_seed_and_index(seed: int, index: int, length: int) -> None:
    maker = PromptMaker(seed=seed, low_token_id=5, high_token_id=300)
    ids = maker.token_ids(index, length)
    assert len(ids) == length and all(5 <= token < 300 for token in ids)
    assert ids == PromptMaker(seed=seed, low_token_id=5, high_token_id=300).token_ids(index, length)
    assert len(maker.text(index, length)) == length


def test_no_two_prompts_share_a_block() -> None:
    maker = PromptMaker()
    blocks = [tuple(maker.token_ids(index, 64)[at : at + 16]) for index in range(500) for at in range(0, 64, 16)]
    assert len(set(blocks)) == len(blocks)


def test_shared_prefixes_are_shared_by_their_family_only() -> None:
    maker = PromptMaker(shared_prefix_tokens=32, num_shared_prefixes=2)
    first, second, third = (maker.token_ids(index, 40) for index in range(3))
    assert first[:32] == third[:32] != second[:32]
    assert first[32:] != third[32:]
    assert len(maker.token_ids(0, 20)) == 20  # a short prompt keeps a token of its own
    assert maker.token_ids(0, 20)[:19] == first[:19]
    assert maker.text(0, 40)[:32] == maker.text(2, 40)[:32]


@pytest.mark.parametrize("options", [{"low_token_id": 9, "high_token_id": 9}, {"num_shared_prefixes": 0}])
def test_prompt_options_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        PromptMaker(**options)

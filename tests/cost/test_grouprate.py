"""Throughput of groups between and beyond the sizes that were measured, with prompts and bubbles; v1's cost of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.grouprate import TokenMix, prefill_token_s, rate_between, with_bubbles_s
from jettison.cost.presets import CLUSTERS, cluster_preset
from jettison.policy.merge import throughput_cost

RATES = st.dictionaries(st.integers(1, 12), st.floats(1.0, 1e5), min_size=1, max_size=5)
"""Whatever a profile may come to, noise included."""


def goes_one_way(values: list[float]) -> bool:
    """Up or down, but for what rounding does."""
    pairs = list(pairwise(values))
    return all(b >= a * (1 - 1e-9) for a, b in pairs) or all(b <= a * (1 + 1e-9) for a, b in pairs)


PROFILE = cluster_preset("kunserve-a").profile()


def cost_of(sizes: list[int], rates: dict[int, float]) -> float:
    cost = throughput_cost(sizes, lambda num_stages: rate_between(rates, num_stages))
    assert cost is not None
    return cost


@given(rates=RATES)
def test_measured_sizes_keep_their_rates_and_others_lie_between(rates: dict[int, float]) -> None:
    for size, rate in rates.items():
        assert rate_between(rates, size) == rate
    sizes = sorted(rates)
    for low, high in pairwise(sizes):
        inner = [rate_between(rates, size) for size in range(low, high + 1)]
        assert goes_one_way(inner), "neither above nor below its neighbours"
        assert goes_one_way([rate / size for size, rate in enumerate(inner, low)])
    assert rate_between(rates, sizes[0] - 1) is None


@given(rates=RATES)
def test_beyond_the_largest_a_member_gains_nothing(rates: dict[int, float]) -> None:
    last = max(rates)
    beyond = [rate_between(rates, size) for size in range(last, last + 20)]
    assert all(rate is not None and rate > 0.0 for rate in beyond)
    per_member = [rate / size for size, rate in enumerate(beyond, last)]
    assert all(b <= a * (1 + 1e-9) for a, b in pairwise(per_member))


@given(rates=RATES, alone=st.floats(1.0, 1e5))
def test_the_cost_never_falls_as_groups_grow_or_merge(rates: dict[int, float], alone: float) -> None:
    """Also where the profile's noise makes a longer pipeline look better than a shorter one."""
    rates = {**rates, 1: alone}
    costs = [cost_of([size], rates) for size in range(1, 20)]
    assert costs[0] == pytest.approx(1.0)
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(costs))
    assert cost_of([2, 2, 3], rates) <= cost_of([4, 3], rates) * (1 + 1e-9)
    assert cost_of([4, 3], rates) <= cost_of([7], rates) * (1 + 1e-9)


def test_the_cost_of_three_lies_between_those_of_two_and_four() -> None:
    """It was 1.58 between 1.05 and 1.16, and that of eight 2.33: the next smaller measured size answered."""
    costs = [throughput_cost([size], PROFILE.group_tokens_per_s) for size in range(1, 9)]
    assert costs == pytest.approx([1.0, 1.055, 1.109, 1.164, 1.219, 1.274, 1.328, 1.383], abs=0.005)


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_presets_cost_more_the_longer_the_pipeline(name: str) -> None:
    profile = cluster_preset(name).profile()
    for mix in (TokenMix(), TokenMix(2.0, 2048), TokenMix(50.0, 512)):
        rates = profile.serving_rates(mix)
        costs = [cost_of([size], rates) for size in (1, *sorted(rates), 6, 8)]
        assert costs == sorted(costs)


def test_prompts_and_bubbles_are_counted() -> None:
    profile = PROFILE
    bare, mixed = profile.serving_rates(TokenMix()), profile.serving_rates(TokenMix(2.0, 2048))
    assert all(mixed[size] < bare[size] <= profile.group_tokens_per_s(size) * (1 + 1e-9) for size in bare)  # type: ignore[operator]
    for size in bare:
        prompt_s = 2.0 * prefill_token_s(profile.cost, size, 2048)
        assert 1.0 / mixed[size] >= prompt_s
    # A pipeline over a slow link stands still between its rounds, an instance alone does not.
    far = replace(profile, link_latency_s=0.05).serving_rates(TokenMix())
    assert far[1] == bare[1] and far[2] < 0.9 * bare[2] and far[4] < 0.9 * bare[4]


def test_a_round_that_takes_longer_than_its_stages_is_a_bubble() -> None:
    cost = PROFILE.cost
    stage_s = 0.02
    period_s = with_bubbles_s(cost, 2, 8, 256, stage_s, hop_s=0.03)
    assert period_s > stage_s + 0.01, "two microbatches in flight, each 30 ms under way twice"
    assert with_bubbles_s(cost, 2, 8, 256, stage_s, hop_s=0.0) == stage_s
    assert with_bubbles_s(cost, 1, 8, 256, stage_s, hop_s=0.03) == stage_s

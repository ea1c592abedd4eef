"""Where a newcomer's prompt is computed: a long one on an empty device, a short one where packing puts it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.packing.placing import DevicePrice, Host, goes_elsewhere, place_cost

PRICE = DevicePrice(30, 1.0)
PACKED = Host(0, 4_000.0, 30, 0.8, 2.0)
"""Thirty decodes, which prompts make five times as long; two requests come each second."""
EMPTY = Host(0, 7_000.0, is_extra=True)

rates = st.floats(10.0, 1e5)
hosts = st.builds(
    Host, st.integers(0, 10**5), rates, st.integers(0, 256), st.floats(0.0, 1.0), st.floats(0.0, 50.0),
    st.integers(0, 100), st.just(0.0), st.just(False),
)
prompts = st.floats(1.0, 1e6)
prices = st.builds(DevicePrice, st.floats(0.0, 256.0), st.floats(0.0, 5.0))


@pytest.mark.parametrize(("prompt_tokens", "goes"), [(200, False), (2_000, False), (20_000, True)])
def test_a_long_prompt_goes_to_an_empty_device_and_a_short_one_stays(prompt_tokens: int, goes: bool) -> None:
    assert goes_elsewhere(PACKED, EMPTY, prompt_tokens, PRICE) == goes


def test_what_a_place_costs() -> None:
    """4,000 tokens behind 2,000: it waits for 1.5 s; of the 4 requests that come in that time ..."""
    host = PACKED._replace(ahead_tokens=2_000)
    behind_s = 2.0 * 0.5 * 1.0 + 2.0 * 1.0 * 0.5  # ... one waits for all of its second, and two for half of it
    assert place_cost(host, 4_000, PRICE) == pytest.approx(2.0 * (1.5 + behind_s) + (30 + 30) * 0.8)
    cost = place_cost(host, 4_000, PRICE)
    assert place_cost(host._replace(num_behind=3), 4_000, PRICE) == cost + 2.0 * 3
    assert place_cost(EMPTY, 7_000, PRICE) == pytest.approx(2.0 + 30 * 2.0)


def test_a_sleeper_is_woken_only_where_it_serves_before_the_turn_has_come() -> None:
    behind = PACKED._replace(ahead_tokens=12_000)  # for 3 s
    assert goes_elsewhere(behind, EMPTY._replace(opens_s=2.9), 20_000, PRICE)
    assert not goes_elsewhere(behind, EMPTY._replace(opens_s=3.1), 20_000, PRICE)
    assert not goes_elsewhere(behind, EMPTY._replace(opens_s=2.9), 200, PRICE), "it is too dear"


def test_where_decodes_leave_no_time_any_other_place_is_better() -> None:
    full = PACKED._replace(tokens_per_s=0.0)
    assert place_cost(full, 1, PRICE) == math.inf and full._replace(ahead_tokens=1).ahead_s == math.inf
    for empty in (EMPTY, EMPTY._replace(opens_s=9.0)):
        assert goes_elsewhere(full, empty, 1, PRICE)
    assert not goes_elsewhere(EMPTY, full, 1, PRICE)


@given(host=hosts, prompt=prompts, price=prices, more=st.integers(1, 1000))
def test_more_of_anything_costs_no_less(host: Host, prompt: float, price: DevicePrice, more: int) -> None:
    cost = place_cost(host, prompt, price)
    worse = [
        host._replace(ahead_tokens=host.ahead_tokens + more), host._replace(num_decoding=host.num_decoding + more),
        host._replace(coming_per_s=host.coming_per_s + more), host._replace(num_behind=host.num_behind + more),
        host._replace(opens_s=float(more)), host._replace(tokens_per_s=host.tokens_per_s / 2),
        host._replace(is_extra=True),
    ]
    assert all(place_cost(other, prompt, price) >= cost >= 0.0 for other in worse)
    assert place_cost(host, prompt + more, price) >= cost


@given(host=hosts, prompt=prompts, price=prices, opens_s=st.floats(0.0, 30.0))
def test_no_request_goes_where_it_costs_more_or_comes_late(
    host: Host, prompt: float, price: DevicePrice, opens_s: float
) -> None:
    empty = Host(tokens_per_s=host.tokens_per_s, opens_s=opens_s, is_extra=True)
    if goes_elsewhere(host, empty, prompt, price):
        assert place_cost(empty, prompt, price) < place_cost(host, prompt, price)
        assert not opens_s or opens_s < host.ahead_s
        dearer = price._replace(kept_s=1e15)
        assert not goes_elsewhere(host, empty, prompt, dearer), "too dear at some price"

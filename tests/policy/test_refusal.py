"""What is refused, in which words, and when to come again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.refusal import (
    PROCESSES_START_S,
    predicted_end_s,
    predicted_loading_s,
    predicted_wait_s,
    retry_after_ms,
    why_never_in_share,
    why_over_share,
    why_queue_full,
    why_too_long,
)

TOKENS = st.integers(0, 1000)


@given(TOKENS, TOKENS, TOKENS, TOKENS)
def test_too_long_says_both_numbers(prompt: int, more: int, context: int, memory: int) -> None:
    why = why_too_long(prompt, more, context, memory)
    assert (why is None) == (prompt + more <= min(context, memory))
    if why is not None:
        assert why.startswith(f"This model's maximum context length is {min(context, memory)} tokens. ")
        assert f"requested {prompt + more} tokens ({prompt} in the prompt, {more} in the completion)." in why
        assert "Please reduce the length of the prompt or completion." in why
        assert (f"memory here holds {memory} " in why) == (memory < context)


def test_a_number_of_any_size_is_told_in_a_few_characters() -> None:
    assert len(why_too_long(1, 1 << 100_000, 10, 10) or "") < 250


@given(st.lists(st.integers(0, 5), max_size=300), st.integers(1, 40))
def test_no_tenant_can_keep_another_out_of_a_full_queue(arrivals: list[int], limit: int) -> None:
    """None is served meanwhile; each tenant that asks gets at least its equal share, and the queue stays bounded."""
    waiting: dict[int, int] = {}
    for tenant in arrivals:
        own, num_tenants = waiting.get(tenant, 0), len(waiting.keys() | {tenant})
        if why_queue_full(sum(waiting.values()), limit, own, num_tenants) is None:
            waiting[tenant] = own + 1
        else:
            assert own >= max(1, limit // num_tenants) or num_tenants == 1
    most = sum(max(1, limit // k) for k in range(1, len(waiting) + 1))
    assert sum(waiting.values()) <= max(most, limit)


@pytest.mark.parametrize(("waiting", "limit", "is_full"), [(9, None, False), (1, 2, False), (2, 2, True), (3, 2, True)])
def test_the_queue_is_full_at_its_limit(waiting: int, limit: int | None, is_full: bool) -> None:
    why = why_queue_full(waiting, limit)
    assert (why is not None) == is_full
    assert why is None or (f"{waiting} requests wait" in why and f"{limit} may" in why)


@given(st.integers(0, 20), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 20)))
def test_a_key_has_as_many_choices_as_it_may(active: int, asked: int, limit: int | None) -> None:
    over, never = why_over_share(active, asked, limit), why_never_in_share(asked, limit)
    assert (over is not None) == (limit is not None and active + asked > limit)
    assert (never is not None) == (limit is not None and asked > limit)
    assert over is None or f"{active} of {limit}" in over
    assert never is None or (f"{asked} choices" in never and f"{limit} under way" in never)


def test_a_queue_takes_as_long_as_it_moves() -> None:
    assert predicted_wait_s(600, 20.0, 3.0) == 30.0
    assert predicted_wait_s(600, 0.0, 7.0) == 7.0, "nothing moves: at least as long again"
    assert predicted_wait_s(600, -1.0, 7.0) == 7.0, "more was preempted than let in"


def test_a_request_ends_when_its_like_did() -> None:
    assert predicted_end_s(4.0, 10.0) == 6.0
    assert predicted_end_s(14.0, 10.0) == 0.0
    assert predicted_end_s(4.0, None) == 0.0


@given(st.floats(0, 1e9))
def test_the_hint_has_bounds(predicted_s: float) -> None:
    assert 1000 <= retry_after_ms(predicted_s) <= 60_000
    if 1.0 <= predicted_s <= 60.0:
        assert math.isclose(retry_after_ms(predicted_s), 1000 * predicted_s, abs_tol=1.0)


GIB = 1 << 30


def test_a_start_goes_on_as_fast_as_it_has_gone() -> None:
    assert predicted_loading_s(10.0, 2 * GIB, 8 * GIB, None) == 30.0
    assert predicted_loading_s(40.0, 8 * GIB, 8 * GIB, None) == 0.0
    assert predicted_loading_s(41.0, 0, 8 * GIB, 3.0) == 3.0, "the last phase takes as long again"
    assert predicted_loading_s(41.0, 0, 8 * GIB, 3.0, 0.75) == 1.0, "or what is left of its steps"


def test_a_start_of_which_nothing_has_been_seen_is_guessed() -> None:
    first, later = (predicted_loading_s(elapsed_s, 0, 10 * GIB, None) for elapsed_s in (0.0, 100.0))
    assert first == later + PROCESSES_START_S
    assert 5.0 < later < 30.0


@given(st.floats(0, 1e6), st.integers(0, 1 << 50), st.integers(1, 1 << 50), st.none() | st.floats(0, 1e6))
def test_the_hint_of_a_loading_server_has_bounds(
    elapsed_s: float, num_read: int, num_bytes: int, since_read_s: float | None
) -> None:
    predicted_s = predicted_loading_s(elapsed_s, min(num_read, num_bytes), num_bytes, since_read_s)
    assert predicted_s >= 0.0
    assert 1000 <= retry_after_ms(predicted_s) <= 60_000

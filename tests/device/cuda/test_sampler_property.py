"""The card's draws against the host's: equal logits in float32 give equal tokens and log-probabilities.

Kernels against PyTorch: the same token whatever the logits are. The host's exponential is rounded otherwise, so against
it weights are equal or far apart.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from cardsampling import KERNELS, PLAIN, VOCAB, draw
from hypothesis import given, settings

from jettison.device.sampler import Sampler
from jettison.device.step import SamplingRow, pack_ints, pack_token_set

WIDE = 9000
"""More than a block of the kernels, and no whole number of them."""

WAYS = pytest.mark.parametrize("way", [PLAIN, KERNELS])

ids = st.lists(st.integers(0, VOCAB - 1), max_size=6, unique=True)


@st.composite
def sampling_rows(draw_, number: int) -> SamplingRow:
    output = draw_(ids)
    counts = [draw_(st.integers(1, 5)) for _ in output]
    return SamplingRow(
        row=number,
        position=draw_(st.integers(0, 10_000)),
        seed=draw_(st.integers(0, 2**63)),
        temperature=draw_(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.7])),
        top_p=draw_(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.01])),
        top_k=draw_(st.sampled_from([0, 0, 1, 7, 50, VOCAB - 1, VOCAB, 10 * VOCAB])),
        min_p=draw_(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        presence_penalty=draw_(st.sampled_from([0.0, 0.7])),
        frequency_penalty=draw_(st.sampled_from([0.0, -0.4])),
        repetition_penalty=draw_(st.sampled_from([1.0, 1.3])),
        logprobs=draw_(st.sampled_from([-1, -1, 0, 3])),
        banned_token_ids=tuple(range(VOCAB) if draw_(st.integers(0, 9)) == 0 else draw_(ids)),
        logit_bias=tuple((token, draw_(st.sampled_from([-100.0, 2.5]))) for token in draw_(ids)),
        prompt_ids=pack_ints(draw_(ids)),
        output_ids=pack_ints(output),
        output_counts=pack_ints(counts),
        allowed_token_ids=pack_token_set([17, *draw_(ids)]) if draw_(st.integers(0, 5)) == 0 else b"",
        logprob_token_ids=tuple(draw_(ids)),
    )


def check_tokens_and_logprobs(data, way: str) -> None:
    num_rows = data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = torch.randn(num_rows, VOCAB, generator=generator) * data.draw(st.sampled_from([0.5, 4.0]))
    if data.draw(st.booleans()):  # many ties
        logits = (logits * 2).round() / 2
    asked = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True))
    rows = [10 * number for number in range(num_rows)]
    sampling = [data.draw(sampling_rows(10 * number)) for number in asked]
    expected = Sampler(VOCAB).sample(logits, rows, sampling)
    actual = draw(logits, rows, sampling, way)
    assert [token.token_id for token in actual] == [token.token_id for token in expected]
    for mine, theirs in zip(actual, expected):
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        if mine.logprobs is not None and theirs.logprobs is not None:
            assert mine.logprobs.rank == theirs.logprobs.rank
            assert mine.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-9)
            assert [token for token, _ in mine.logprobs.top] == [token for token, _ in theirs.logprobs.top]
            assert [v for _, v in mine.logprobs.top] == pytest.approx([v for _, v in theirs.logprobs.top], abs=1e-9)


@settings(max_examples=100)
@given(st.data())
def test_tokens_and_logprobs_are_the_hosts(data) -> None:
    check_tokens_and_logprobs(data, PLAIN)


@pytest.mark.parametrize("way", [KERNELS])
@settings(max_examples=25)
@given(st.data())
def test_tokens_and_logprobs_of_the_kernels_are_the_hosts(way, data) -> None:
    check_tokens_and_logprobs(data, way)


@st.composite
def wide_rows(draw_, hottest: float) -> SamplingRow:
    """What cuts a wide row."""
    return SamplingRow(
        row=0, position=draw_(st.integers(0, 10_000)), seed=draw_(st.integers(0, 2**63)),
        temperature=draw_(st.sampled_from([2e-5, 0.1, 0.7, 1.0, 2.0, hottest])),
        top_p=draw_(st.sampled_from([1.0, 1.0 - 2.0**-53, 0.9999, 0.9, 0.5, 1e-9, 0.0])),
        top_k=draw_(st.sampled_from([0, 0, 1, 50, 1024, 1025, 8192, WIDE - 1, WIDE, 10 * WIDE])),
        min_p=draw_(st.sampled_from([0.0, 0.0, 1e-12, 0.05, 1.0])),
    )  # fmt: skip


def wide_logits(data, steps: list[float]) -> torch.Tensor:
    """One row, flat or peaked, in whole steps (0: none)."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = torch.randn(1, WIDE, generator=generator) * data.draw(st.sampled_from([0.0, 0.3, 2.0, 12.0]))
    step = data.draw(st.sampled_from(steps))
    return (logits / step).round() * step if step else logits


@WAYS
@settings(max_examples=40)
@given(st.data())
def test_a_wide_row_gives_the_hosts_token(way, data) -> None:
    logits, asks = wide_logits(data, [0.125, 1.0]), data.draw(wide_rows(hottest=5.0))
    assert draw(logits, [0], [asks], way, WIDE) == Sampler(WIDE).sample(logits, [0], [asks])


@pytest.mark.parametrize("way", [KERNELS])
@settings(max_examples=40)
@given(st.data())
def test_kernels_draw_what_pytorch_draws(way, data) -> None:
    logits, asks = wide_logits(data, [0.0, 1e-6, 0.125]), data.draw(wide_rows(hottest=1e6))
    if data.draw(st.booleans()):
        logits = logits.bfloat16()
    assert draw(logits, [0], [asks], way, WIDE) == draw(logits, [0], [asks], PLAIN, WIDE)

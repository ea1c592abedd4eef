"""The card's draws against the host's: equal logits in float32 give equal tokens and log-probabilities."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from cardsampling import VOCAB, draw
from hypothesis import given, settings

from jettison.device.sampler import Sampler
from jettison.device.step import SamplingRow, pack_ints, pack_token_set

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
        banned_token_ids=tuple(draw_(ids)),
        logit_bias=tuple((token, draw_(st.sampled_from([-100.0, 2.5]))) for token in draw_(ids)),
        prompt_ids=pack_ints(draw_(ids)),
        output_ids=pack_ints(output),
        output_counts=pack_ints(counts),
        allowed_token_ids=pack_token_set([17, *draw_(ids)]) if draw_(st.integers(0, 5)) == 0 else b"",
        logprob_token_ids=tuple(draw_(ids)),
    )


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_tokens_and_logprobs_are_the_hosts(data) -> None:
    num_rows = data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = torch.randn(num_rows, VOCAB, generator=generator) * data.draw(st.sampled_from([0.5, 4.0]))
    if data.draw(st.booleans()):  # many ties
        logits = (logits * 2).round() / 2
    asked = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True))
    rows = [10 * number for number in range(num_rows)]
    sampling = [data.draw(sampling_rows(10 * number)) for number in asked]
    expected = Sampler(VOCAB).sample(logits, rows, sampling)
    actual = draw(logits, rows, sampling)
    assert [token.token_id for token in actual] == [token.token_id for token in expected]
    for mine, theirs in zip(actual, expected):
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        if mine.logprobs is not None and theirs.logprobs is not None:
            assert mine.logprobs.rank == theirs.logprobs.rank
            assert mine.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-9)
            assert [token for token, _ in mine.logprobs.top] == [token for token, _ in theirs.logprobs.top]
            assert [v for _, v in mine.logprobs.top] == pytest.approx([v for _, v in theirs.logprobs.top], abs=1e-9)

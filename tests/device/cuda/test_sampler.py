"""The card's draws against the host's: equal logits in float32 give equal tokens, whatever the batch."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from jettison.device.cuda import sampler as module
from jettison.device.cuda.sampler import CudaSampler, prompt_logprobs
from jettison.device.sampler import Sampler
from jettison.device.step import SamplingRow, pack_ints, pack_token_set
from jettison.types import FAILED_TOKEN_ID

VOCAB = 300
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=[
    pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
])]  # fmt: skip


def draw(logits: torch.Tensor, rows: list[int], sampling: list[SamplingRow], device="cpu", vocab_size=VOCAB):
    """What a runner does, without its staging."""
    sampler = CudaSampler(vocab_size)
    plan = sampler.plan(rows, sampling)
    there = logits.to(device)
    likeliest = torch.from_numpy(
        np.where(np.isfinite(logits.float().numpy()).all(1), logits[:, :vocab_size].float().numpy().argmax(1), -1)
    )
    arrays = {name: torch.from_numpy(array).to(device) for name, array in plan.arrays.items()}
    results = sampler.launch(there, likeliest.to(device), plan, arrays)
    on_host = {name: tensor.cpu().numpy() for name, tensor in results.items()}
    return sampler.finish(plan, on_host, lambda slot: logits[slot : slot + 1])


def row(number: int, **fields) -> SamplingRow:
    defaults = {"position": 7, "seed": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return SamplingRow(row=number, **(defaults | fields))


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_gives_the_hosts_tokens_in_any_batch(device, dtype) -> None:
    vocab_size, num_rows = 20_000, 12
    logits = (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    shapes = [{}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 900, "top_p": 0.95}, {"min_p": 0.02}, {"temperature": 1.9}]
    sampling = [row(i, position=i, seed=i, **shapes[i % len(shapes)], logprobs=5) for i in range(num_rows)]
    expected = Sampler(vocab_size).sample(logits, range(num_rows), sampling)
    actual = draw(logits, list(range(num_rows)), sampling, device, vocab_size)
    alone = [draw(logits[i : i + 1], [i], [sampling[i]], device, vocab_size)[0] for i in range(num_rows)]
    assert [t.token_id for t in actual] == [t.token_id for t in expected] == [t.token_id for t in alone]
    assert [[i for i, _ in t.logprobs.top] for t in actual] == [[i for i, _ in t.logprobs.top] for t in expected]


def test_a_nucleus_wider_than_the_candidates_is_drawn_by_the_host() -> None:
    logits = torch.zeros(2, 5000)
    sampling = [row(0, top_p=0.9), row(1, top_p=0.1)]
    plan = CudaSampler(5000).plan([0, 1], sampling)
    arrays = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    drawn = CudaSampler(5000).launch(logits, torch.zeros(2, dtype=torch.int64), plan, arrays)["tokens"].tolist()
    assert drawn[0] == module.NOT_HERE and 0 <= drawn[1] < 500
    assert draw(logits, [0, 1], sampling, vocab_size=5000) == Sampler(5000).sample(logits, [0, 1], sampling)


def test_what_the_card_does_not_do_goes_to_the_host_alone() -> None:
    wide = CudaSampler(5000).plan([0], [row(0, top_k=module.CANDIDATES + 1)])
    grammar = row(1, allowed_token_ids=pack_token_set([4, 5]))
    plan = CudaSampler(VOCAB).plan([0, 1, 2], [row(0), grammar, row(2, banned_token_ids=(VOCAB,))])
    assert list(wide.on_host) == [0] and list(plan.on_host) == [1, 2] and [p.slots for p in plan.parts] == [[0]]


def test_a_row_that_cannot_be_sampled_fails_alone(monkeypatch) -> None:
    monkeypatch.setattr(module, "_PART_ELEMENTS", 2 * VOCAB)  # and parts are many
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(5))
    logits[1, 4] = math.nan
    logits[6, 4] = math.inf
    spoilt = row(5, repetition_penalty=2.0, prompt_ids=pack_ints([10**6]))
    sampling = [row(i, top_p=0.8, logprobs=2) for i in (0, 1, 3, 4)] + [spoilt, row(6)]
    tokens = [token.token_id for token in draw(logits, list(range(7)), sampling)]
    assert [tokens[i] for i in (1, 5, 6)] == [FAILED_TOKEN_ID] * 3
    healthy = [0, 2, 3, 4]
    alone = Sampler(VOCAB).sample(logits[healthy], healthy, [s for s in sampling if s.row in healthy])
    assert [tokens[i] for i in healthy] == [token.token_id for token in alone]
    with pytest.raises(ValueError, match="row 9 is not among"):
        CudaSampler(VOCAB).plan([0], [row(9)])


@pytest.mark.parametrize("device", DEVICES)
def test_log_probabilities_of_a_prompt_are_the_hosts(device) -> None:
    logits = torch.randn(9, VOCAB + 20, generator=torch.Generator().manual_seed(2)).round()
    targets = list(range(9))
    expected = Sampler(VOCAB).prompt_logprobs(logits, targets, 4)
    results = CudaSampler(VOCAB).describe(logits.to(device), torch.tensor(targets, device=device), 4)
    actual = prompt_logprobs(targets, 4, {name: tensor.cpu().numpy() for name, tensor in results.items()})
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine[::2] == theirs[::2] and mine.logprob == pytest.approx(theirs.logprob, abs=1e-12)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]

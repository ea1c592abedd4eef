"""The card's sampler: large vocabularies in any batch, what goes to the host, rows that fail alone, prompts."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("msgspec", reason="msgspec is not installed")

from cardsampling import VOCAB, draw, row

from jettison.device.cuda import draws
from jettison.device.cuda.sampler import CudaSampler, prompt_logprobs
from jettison.device.sampler import Sampler
from jettison.device.step import pack_ints, pack_token_set
from jettison.types import FAILED_TOKEN_ID

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=[
    pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
])]  # fmt: skip


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
    assert drawn[0] == draws.NOT_HERE and 0 <= drawn[1] < 500
    assert draw(logits, [0, 1], sampling, vocab_size=5000) == Sampler(5000).sample(logits, [0, 1], sampling)


def test_what_the_card_does_not_do_goes_to_the_host_alone() -> None:
    wide = CudaSampler(5000).plan([0], [row(0, top_k=draws.CANDIDATES + 1)])
    grammar = row(1, allowed_token_ids=pack_token_set([4, 5]))
    plan = CudaSampler(VOCAB).plan([0, 1, 2], [row(0), grammar, row(2, banned_token_ids=(VOCAB,))])
    assert list(wide.on_host) == [0] and list(plan.on_host) == [1, 2] and plan.arrays["part0.slots"].tolist() == [0]


def test_a_row_that_cannot_be_sampled_fails_alone(monkeypatch) -> None:
    monkeypatch.setattr(draws, "_PART_ELEMENTS", 2 * VOCAB)  # and parts are many
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
    results = draws.describe(logits[:, :VOCAB].to(device), torch.tensor(targets, device=device), 4)
    actual = prompt_logprobs(targets, 4, {name: tensor.cpu().numpy() for name, tensor in results.items()})
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine[::2] == theirs[::2] and mine.logprob == pytest.approx(theirs.logprob, abs=1e-12)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]

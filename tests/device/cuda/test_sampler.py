"""The card's sampler: large vocabularies in any batch, what goes to the host, rows that fail alone, prompts."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("msgspec", reason="msgspec is not installed")

from cardsampling import KERNELS, PLAIN, VOCAB, device_of, draw, going, row
from msgspec import structs

from jettison.device.cuda import draws
from jettison.device.cuda.sampler import CudaSampler, prompt_logprobs
from jettison.device.cuda.warmup import ADJUSTED, PLAIN_DRAW
from jettison.device.sampler import Sampler, uniform_draws
from jettison.device.step import pack_ints, pack_token_set
from jettison.types import FAILED_TOKEN_ID, GRAMMAR_FAILED_TOKEN_ID

WAYS = pytest.mark.parametrize("way", [PLAIN, KERNELS])


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_gives_the_hosts_tokens_in_any_batch(way, dtype) -> None:
    vocab_size, num_rows = 9000, 6
    logits = (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    shapes = [
        {}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 1900, "top_p": 0.95}, {"min_p": 0.02},
        {"temperature": 1.9, "top_p": 0.9},
    ]  # fmt: skip
    sampling = [row(i, position=i, seed=i, **shapes[i % len(shapes)], logprobs=5) for i in range(num_rows)]
    expected = Sampler(vocab_size).sample(logits, range(num_rows), sampling)
    actual = draw(logits, list(range(num_rows)), sampling, way, vocab_size)
    alone = [draw(logits[i : i + 1], [i], [sampling[i]], way, vocab_size)[0] for i in range(num_rows)]
    assert [t.token_id for t in actual] == [t.token_id for t in expected]
    assert actual == alone, "bits do not depend on the batch"
    assert [[i for i, _ in t.logprobs.top] for t in actual] == [[i for i, _ in t.logprobs.top] for t in expected]


@WAYS
def test_a_nucleus_of_any_width_is_drawn_on_the_card(way) -> None:
    logits = torch.zeros(4, 9000)
    logits[2:] = torch.arange(9000) % 3
    sampling = [row(i, position=position, top_p=share, top_k=limit) for i, (position, share, limit) in enumerate(
        [(1, 0.9, 0), (2, 0.1, 8999), (3, 0.9999, 5000), (4, 0.3, 0)])]  # fmt: skip
    plan = CudaSampler(9000).plan([0, 1, 2, 3], sampling)
    assert not plan.on_host
    assert draw(logits, [0, 1, 2, 3], sampling, way, 9000) == Sampler(9000).sample(logits, range(4), sampling)


@WAYS
def test_a_share_is_reached_to_the_last_bit(way) -> None:
    """A hair more than the half of 300 equal tokens takes 151."""
    position = next(i for i in range(10_000) if uniform_draws([3], [i])[0] > 150.5 / 151)
    for share, expected in ((0.5, 149), (0.5 + 2.0**-50, 150)):
        asks = row(0, position=position, top_p=share)
        assert draw(torch.zeros(1, VOCAB), [0], [asks], way)[0].token_id == expected


def test_what_the_card_does_not_do_goes_to_the_host_alone() -> None:
    beyond = row(1, allowed_token_ids=pack_token_set([4, VOCAB]))
    plan = CudaSampler(VOCAB).plan([0, 1, 2], [row(0), beyond, row(2, banned_token_ids=(VOCAB,))])
    assert list(plan.on_host) == [1, 2] and plan.arrays["part0.slots"].tolist() == [0]


class Given:
    """Masks that are there: a list of allowed tokens for row 0, row 2 fails."""

    def applied(self, sampling, vocab_size):
        allowed = pack_token_set([5, 7, 11, VOCAB - 1])
        return [structs.replace(sampling[0], allowed_token_ids=allowed), *sampling[1:]], {2: GRAMMAR_FAILED_TOKEN_ID}


def test_grammars_bind_rows_on_the_card() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    sampler, odd = CudaSampler(VOCAB), pack_token_set(range(1, VOCAB, 2))
    plan = sampler.plan([0, 1, 2, 3], [row(0), row(1, allowed_token_ids=odd), row(2)], Given())
    assert not plan.on_host
    tokens = logits.argmax(1)
    made = sampler.launch(logits, tokens, plan, {name: torch.from_numpy(a) for name, a in plan.arrays.items()})
    found = [t.token_id for t in sampler.finish(plan, {"tokens": made["tokens"].numpy()})]
    assert found[0] in (5, 7, 11, VOCAB - 1) and found[1] % 2 == 1 and found[2] == GRAMMAR_FAILED_TOKEN_ID
    assert found[3] == int(logits[3].argmax())


@WAYS
def test_a_row_that_cannot_be_sampled_fails_alone(way, monkeypatch) -> None:
    monkeypatch.setattr(draws, "_SCRATCH_BYTES", 8 * VOCAB)  # and parts are many
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(5))
    logits[1, 4] = math.nan
    logits[6, 4] = math.inf
    logits[7, 4] = -math.inf
    spoilt = row(5, repetition_penalty=2.0, prompt_ids=pack_ints([10**6]))
    sampling = [row(i, top_p=0.8, logprobs=2) for i in (0, 1, 3, 4)] + [spoilt, row(6), row(7, logit_bias=((1, 2.0),))]
    sampling.append(row(8, repetition_penalty=1e-45, prompt_ids=pack_ints(range(VOCAB)), top_p=0.5, top_k=9))
    tokens = [token.token_id for token in draw(logits, list(range(9)), sampling, way)]
    assert [tokens[i] for i in (1, 5, 6, 7, 8)] == [FAILED_TOKEN_ID] * 5
    healthy = [0, 2, 3, 4]
    alone = Sampler(VOCAB).sample(logits[healthy], healthy, [s for s in sampling if s.row in healthy])
    assert [tokens[i] for i in healthy] == [token.token_id for token in alone]
    with pytest.raises(ValueError, match="row 9 is not among"):
        CudaSampler(VOCAB).plan([0], [row(9)])


@WAYS
@pytest.mark.parametrize("num_top", [0, 4, 40])
def test_log_probabilities_of_a_prompt_are_the_hosts(way, num_top) -> None:
    logits = torch.randn(9, VOCAB + 20, generator=torch.Generator().manual_seed(2)).round()
    logits[3, :VOCAB] = 0.0
    logits[3, 1] = -0.0  # ties with the others
    targets = list(range(9))
    expected = Sampler(VOCAB).prompt_logprobs(logits, targets, num_top)
    device = device_of(way)
    with going(way):
        results = draws.describe(logits.to(device)[:, :VOCAB], torch.tensor(targets, device=device), num_top)
    actual = prompt_logprobs(targets, num_top, {name: tensor.cpu().numpy() for name, tensor in results.items()})
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine[::2] == theirs[::2] and mine.logprob == pytest.approx(theirs.logprob, abs=1e-12)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-12)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_card_computes_at_its_start_compiles_all_that_sampling_launches() -> None:
    import triton

    vocab_size, compiled = 5008, []
    logits = torch.randn(70, vocab_size, device="cuda")

    def drawn(sampling, first=0) -> None:
        rows = [asks.row for asks in sampling]
        plan = CudaSampler(vocab_size).plan(rows, sampling)
        arrays = {name: torch.from_numpy(array).cuda() for name, array in plan.arrays.items()}
        part = logits[first : first + len(rows)]
        CudaSampler(vocab_size).launch(part, part.argmax(1), plan, arrays)

    for asks in (PLAIN_DRAW, ADJUSTED):
        drawn([asks])
    triton.knobs.runtime.jit_cache_hook = lambda *, repr, **_: compiled.append(repr)
    try:
        drawn([row(i, position=i, top_p=0.5, logprobs=i % 21) for i in range(70)])
        drawn([row(i, top_k=i, logprobs=1) for i in range(33)], first=3)
        drawn([row(0, temperature=0.0, logit_bias=((3, 1.0),), logprobs=20)], first=1)
        draws.describe(logits[5:], torch.zeros(65, dtype=torch.int64, device="cuda"), 16)
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    assert not compiled

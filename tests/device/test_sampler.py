"""The sampler against straightforward references, and its promise that a draw depends on nothing but its key."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from jettison.device.sampler import Sampler, uniform_draws
from jettison.device.step import SamplingRow, is_in_token_set, pack_ints, pack_token_set, unpack_token_set

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def spec(row: int = 0, **fields: Any) -> SamplingRow:
    defaults: dict[str, Any] = {
        "position": 7, "seed": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    }  # fmt: skip
    return SamplingRow(row=row, **(defaults | fields))


def penalty_fields(output: Sequence[int], prompt: Sequence[int] = ()) -> dict[str, bytes]:
    """The fields that penalties read."""
    ids, counts = np.unique(np.array(output), return_counts=True)
    return {"prompt_ids": pack_ints(sorted(set(prompt))), "output_ids": pack_ints(ids),
            "output_counts": pack_ints(counts)}


def logits_of(rows: int, vocab_size: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64) * scale


def draw_many(logits: torch.Tensor, count: int, **fields: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tokens of ``count`` draws at consecutive positions from one row of logits."""
    specs = [spec(row, position=row, **fields) for row in range(count)]
    tokens = Sampler(logits.shape[0]).sample(logits.expand(count, -1), range(count), specs)
    return np.array([token.token_id for token in tokens])


def reference_distribution(
    logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What a row is drawn from, the slow and obvious way."""
    probs = torch.softmax(logits.double() / temperature, 0).numpy()
    kept = np.where(probs >= min_p * probs.max() * (1 - 1e-12), probs, 0.0)
    if top_k:
        kept[probs < np.sort(probs)[-min(top_k, len(probs))]] = 0.0
    ranked = np.argsort(-kept, kind="stable")
    mass_before = kept[ranked].cumsum() - kept[ranked]
    outside = ranked[1:][mass_before[1:] >= top_p * kept.sum() * (1 - 1e-12)]
    kept[outside] = 0.0
    return np.asarray(kept / kept.sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_an_entry_are_argmax_with_ties_to_the_lowest_id(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 300, dtype=dtype)
    logits[0, [17, 200]] = 2.0
    logits[1, 299] = 1.0
    logits[3] = -math.inf
    logits[3, 5] = -3.0
    sampler = Sampler(300)
    assert [t.token_id for t in sampler.sample(logits, [2, 5, 6, 9], [])] == [17, 299, 0, 5]
    mixed = sampler.sample(logits, [2, 5, 6, 9], [spec(9, temperature=0.0), spec(5, temperature=1e-9)])
    assert [t.token_id for t in mixed] == [17, 299, 0, 5]
    assert all(t.logprobs is None for t in mixed)


def test_padding_of_the_head_is_never_chosen() -> None:
    logits = torch.zeros(2, 320)
    logits[:, 300:] = 50.0
    tokens = Sampler(300).sample(logits, [0, 1], [spec(1, position=p) for p in (1,)])
    assert all(token.token_id < 300 for token in tokens)


def test_uniform_draws_look_uniform_and_independent() -> None:
    from scipy import stats

    draws = uniform_draws([5] * 20_000, range(20_000))
    assert stats.kstest(draws, "uniform").pvalue > 1e-3
    assert stats.kstest(uniform_draws(range(20_000), [11] * 20_000), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
    assert len(set(uniform_draws([0, 0, 1, 1, -1, 2**64 - 2], [0, 1, 0, 1, 0, 0]).tolist())) == 6
    assert 0.0 <= draws.min() <= draws.max() < 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    ],
)
def test_draws_follow_the_distribution(dtype: torch.dtype, fields: dict[str, float]) -> None:
    from scipy import stats

    logits = logits_of(1, 40, seed=4)[0].to(dtype)
    count = 8000
    expected = reference_distribution(logits, **fields) * count  # type: ignore[arg-type]
    observed = np.bincount(draw_many(logits, count, **fields), minlength=40)
    assert observed[expected == 0].sum() == 0
    likely = expected >= 5
    rest = [observed[~likely].sum()], [expected[~likely].sum()]
    if rest[1][0] < 5:
        rest = [], []
    statistic = stats.chisquare(
        np.append(observed[likely], rest[0]), np.append(expected[likely], rest[1]), sum_check=False
    )
    assert statistic.pvalue > 1e-4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    vocab_size=st.sampled_from([3, 17, 128, 129, 1500, 6000]),
    top_k=st.sampled_from([0, 1, 2, 40, 2000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.001, 0.2, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    ties=st.booleans(),
    seed=st.integers(0, 10),
)
def test_only_tokens_of_the_reference_are_drawn_and_the_draw_inverts_its_distribution(
    vocab_size: int, top_k: int, top_p: float, min_p: float, temperature: float, ties: bool, seed: int
) -> None:
    logits = logits_of(1, vocab_size, seed)[0]
    if ties:
        logits = logits.round()
    fields = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    distribution = reference_distribution(logits, **fields)  # type: ignore[arg-type]
    cumulative = distribution.cumsum()
    tokens = draw_many(logits, 30, seed=seed, **fields)
    uniforms = uniform_draws([seed] * 30, range(30))
    for token, uniform in zip(tokens.tolist(), uniforms.tolist(), strict=True):
        assert distribution[token] > 0
        assert cumulative[token] - distribution[token] - 1e-9 <= uniform <= cumulative[token] + 1e-9


def test_top_p_keeps_the_lowest_ids_among_equals() -> None:
    logits = torch.zeros(1000)
    assert set(draw_many(logits, 3000, top_p=0.004).tolist()) == {0, 1, 2, 3}
    assert draw_many(logits, 200, top_k=1).max() > 500, "top-k keeps every token that ties with the k-th"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_draw_depends_on_nothing_but_its_own_row_and_key(dtype: torch.dtype, threads: int) -> None:
    rng = np.random.default_rng(0)
    count, vocab_size = 24, 5000
    logits = logits_of(count, vocab_size, seed=1, scale=1.0).to(dtype)
    specs = [
        spec(
            row, position=int(rng.integers(500)), seed=int(rng.integers(2**40)), temperature=float(rng.uniform(0.5, 2)),
            top_k=int(rng.choice([0, 1, 20, 3000])), top_p=float(rng.choice([1.0, 0.95, 0.5])),
            min_p=float(rng.choice([0.0, 0.05])), frequency_penalty=float(row % 2), **penalty_fields((row, 7)),
            logprobs=int(rng.choice([-1, 0, 4])),
        )
        for row in range(count)
    ]  # fmt: skip
    sampler = Sampler(vocab_size)
    alone = [sampler.sample(logits[row : row + 1], [row], [specs[row]])[0] for row in range(count)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for size in (2, 7, count):
            order = rng.permutation(count)[:size]
            shuffled = [specs[row] for row in rng.permutation(order)]
            together = sampler.sample(logits[order], order.tolist(), shuffled)
            assert together == [alone[row] for row in order]
    finally:
        torch.set_num_threads(before)


def test_penalties_bias_and_bans_are_applied_in_order() -> None:
    logits = logits_of(1, 12, seed=2)
    prompt, output = (1, 1, 4), (4, 5, 5, 5)
    wanted = logits[0].clone()
    wanted[3] += 1.5
    wanted[5] += 4.0
    wanted[9] = -math.inf
    for token in {1, 4, 5}:
        wanted[token] = wanted[token] / 1.4 if wanted[token] > 0 else wanted[token] * 1.4
    wanted[4] -= 0.7 * 1 + 0.25
    wanted[5] -= 0.7 * 3 + 0.25
    fields: dict[str, Any] = {
        "logit_bias": ((3, 1.5), (5, 4.0)), "banned_token_ids": (9,), "repetition_penalty": 1.4,
        "frequency_penalty": 0.7, "presence_penalty": 0.25, **penalty_fields(output, prompt),
    }  # fmt: skip
    count = 4000
    penalized = draw_many(logits[0], count, **fields)
    plain = draw_many(wanted, count)
    assert penalized.tolist() == plain.tolist()
    greedy = Sampler(12).sample(logits, [0], [spec(temperature=0.0, **fields)])
    assert greedy[0].token_id == int(wanted.argmax())
    assert 9 not in penalized


def test_sampling_leaves_the_logits_alone() -> None:
    logits = logits_of(3, 50)
    before = logits.clone()
    Sampler(50).sample(
        logits, [0, 1, 2], [spec(1, logit_bias=((3, 5.0),), top_k=2, logprobs=3), spec(2, banned_token_ids=(1,))]
    )
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_of_the_raw_distribution(dtype: torch.dtype) -> None:
    logits = logits_of(5, 90, seed=3).to(dtype)
    logits[0, 10:20] = logits[0].max() + 1  # ties at the top
    reference = torch.log_softmax(logits.double(), dim=-1)
    specs = [spec(row, position=row, temperature=2.0, top_k=8, logprobs=num) for row, num in enumerate((3, 0, 90, 200))]
    specs[3].logit_bias = ((11, 100.0),)
    tokens = Sampler(90).sample(logits, range(5), specs)
    assert tokens[4].logprobs is None
    for row, num in enumerate((3, 0, 90, 200)):
        logprobs = tokens[row].logprobs
        assert logprobs is not None
        assert logprobs.token_id == tokens[row].token_id
        assert logprobs.logprob == pytest.approx(float(reference[row, logprobs.token_id]), abs=1e-12)
        assert logprobs.rank == 1 + int((reference[row] > reference[row, logprobs.token_id]).sum())
        ranked = sorted(range(90), key=lambda i, row=row: (-reference[row, i].item(), i))[:num]  # type: ignore[misc]
        assert [token for token, _ in logprobs.top] == ranked
        assert [value for _, value in logprobs.top] == pytest.approx(reference[row, ranked].tolist(), abs=1e-12)
    assert tokens[0].logprobs is not None
    assert [token for token, _ in tokens[0].logprobs.top] == [10, 11, 12]
    assert tokens[3].token_id == 11


def test_prompt_logprobs() -> None:
    logits = logits_of(7, 40, seed=5)
    targets = [3, 0, 39, 3, 8, 9, 1]
    reference = torch.log_softmax(logits, dim=-1)
    result = Sampler(40).prompt_logprobs(logits, targets, 2)
    assert [entry.token_id for entry in result] == targets
    for row, entry in enumerate(result):
        assert entry.logprob == pytest.approx(float(reference[row, targets[row]]), abs=1e-12)
        assert entry.rank == 1 + int((reference[row] > reference[row, targets[row]]).sum())
        assert [token for token, _ in entry.top] == reference[row].topk(2).indices.tolist()
    assert Sampler(40).prompt_logprobs(logits[:0], [], 2) == []
    assert all(entry.top == () for entry in Sampler(40).prompt_logprobs(logits, targets, 0))


def test_extreme_rows_give_a_token_of_the_vocabulary() -> None:
    sampler = Sampler(130)
    logits = torch.full((4, 130), -math.inf)
    logits[0, 129] = 0.0
    logits[1] = 1e30
    logits[2, 3] = -1e30
    logits[3] = 0.0
    specs = [spec(0), spec(1, temperature=1e-4), spec(2, temperature=1e-4, top_p=0.5), spec(3, min_p=5.0, top_p=0.0)]
    tokens = [token.token_id for token in sampler.sample(logits, range(4), specs)]
    assert tokens[0] == 129
    assert 0 <= tokens[1] < 130
    assert tokens[2:] == [3, 0]


def test_inconsistent_arguments_are_refused() -> None:
    sampler = Sampler(10)
    with pytest.raises(ValueError, match="2 rows"):
        sampler.sample(torch.zeros(3, 10), [0, 1], [])
    with pytest.raises(ValueError, match="not among"):
        sampler.sample(torch.zeros(2, 10), [0, 1], [spec(5)])
    with pytest.raises(ValueError, match="1 targets"):
        sampler.prompt_logprobs(torch.zeros(3, 10), [1], 0)


def test_a_row_without_numbers_fails_alone(tiny_models, new_runner) -> None:
    """One request's broken logits must not end its neighbours: the runner marks that row only."""
    from jettison.device.kernels.loading import load_kernels
    from jettison.types import FAILED_TOKEN_ID

    runner = new_runner(next(iter(tiny_models.values())), kernels=load_kernels("torch"))
    logits = torch.zeros(3, runner.config.vocab_size)
    logits[0, 7], logits[2, 9] = 1.0, 1.0
    logits[1] = float("nan")
    sampling = [SamplingRow(1, 5, 0, 1.0, 1.0, 0, 0.0, logprobs=2)]
    tokens = runner._sample(logits, [0, 1, 2], sampling)
    assert [t.token_id for t in tokens] == [7, FAILED_TOKEN_ID, 9]


# --- allowed tokens, bans, tokens whose logprobs are asked for


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=200) | st.integers(1, 3000).map(lambda n: list(range(n))))
def test_a_set_of_tokens_comes_back_and_weighs_a_bit_for_each_id_at_most(ids: list[int]) -> None:
    packed = pack_token_set(ids)
    assert unpack_token_set(packed).tolist() == sorted(set(ids))
    assert len(packed) <= max(ids, default=0) // 8 + 2


def test_what_is_no_set_of_tokens_is_refused() -> None:
    for data in (b"", b"\2abc", b"\0abc"):
        with pytest.raises(ValueError):
            unpack_token_set(data)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("allowed", [[3], [0, 5, 199], list(range(0, 200, 3))])
def test_only_allowed_tokens_are_drawn_in_their_proportions(dtype: torch.dtype, allowed: list[int]) -> None:
    logits = logits_of(1, 200)[0].to(dtype)
    rows = [spec(row, position=row, allowed_token_ids=pack_token_set(allowed)) for row in range(2000)]
    drawn = [t.token_id for t in Sampler(200).sample(logits.expand(2000, -1), range(2000), rows)]
    assert set(drawn) <= set(allowed)
    weights = torch.softmax(logits.double()[allowed], 0).numpy()
    found = np.array([drawn.count(token) for token in allowed]) / len(drawn)
    assert np.abs(found - weights).max() < 0.05
    [greedy] = Sampler(200).sample(
        logits[None], [0], [spec(temperature=0.0, allowed_token_ids=pack_token_set(allowed))])
    assert greedy.token_id == max(allowed, key=lambda token: (float(logits[token]), -token))


def test_allowed_tokens_with_truncation_bias_and_penalties() -> None:
    """Top-k counts among the allowed ones; bias and penalties choose among them."""
    logits = torch.arange(8, dtype=torch.float64)[None]
    def greedy(**fields: Any) -> int:
        row = spec(temperature=0.0, allowed_token_ids=pack_token_set([1, 2, 5]), **fields)
        return Sampler(8).sample(logits, [0], [row])[0].token_id

    assert greedy() == 5
    assert greedy(banned_token_ids=(5,)) == 2
    assert greedy(logit_bias=((1, 50.0), (7, 100.0))) == 1
    assert greedy(frequency_penalty=2.0, **penalty_fields([5, 5])) == 2
    rows = [spec(row, position=row, top_k=2, allowed_token_ids=pack_token_set([1, 2, 5])) for row in range(200)]
    assert {t.token_id for t in Sampler(8).sample(logits.expand(200, -1), range(200), rows)} == {2, 5}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_greedy_row_whose_likeliest_token_is_known_gets_what_it_gets_without(dtype: torch.dtype) -> None:
    """Whether or not its set has that token, equal logits, and whatever else the row has."""
    draws = random.Random(5)
    logits = (logits_of(300, 60, scale=3.0).round() / 2).to(dtype)
    likeliest = [row.index(max(row)) for row in logits.tolist()]
    rows, found = [], Counter[bool]()
    for row, best in enumerate(likeliest):
        few = draws.sample(range(60), draws.choice((1, 3, 40)))
        fields = draws.choice((
            {}, {"logit_bias": ((few[0], 9.0),)}, {"banned_token_ids": (best,)},
            {"frequency_penalty": 3.0, **penalty_fields([best, few[0]])},
            {"repetition_penalty": 2.0, **penalty_fields([best])}, {"temperature": 0.7}, {"logprobs": 2},
        ))  # fmt: skip
        allowed = draws.choice((b"", pack_token_set(few), pack_token_set(sorted({*few, best}))))
        rows.append(spec(row, **{"temperature": 0.0, "allowed_token_ids": allowed} | fields))
        found[not allowed or is_in_token_set(allowed, best)] += 1
    assert min(found.values()) > 50
    sampler = Sampler(60)
    assert sampler.sample(logits, range(300), rows, likeliest) == sampler.sample(logits, range(300), rows)


@pytest.mark.parametrize("ids", [[0], [7, 8, 63, 64], list(range(1, 500, 2))])
def test_a_set_says_of_each_token_whether_it_has_it(ids: list[int]) -> None:
    data = pack_token_set(ids)
    assert [token for token in range(600) if is_in_token_set(data, token)] == ids


def test_a_ban_that_would_leave_no_token_is_lifted() -> None:
    logits = torch.arange(4, dtype=torch.float32)[None]
    allowed = pack_token_set([1, 2])
    for row in (spec(allowed_token_ids=allowed, banned_token_ids=(1, 2)), spec(banned_token_ids=(0, 1, 2, 3))):
        for temperature in (0.0, 1.0):
            row.temperature = temperature
            [token] = Sampler(4).sample(logits, [0], [row])
            assert token.token_id in ((1, 2) if row.allowed_token_ids else range(4))


def test_logprobs_of_tokens_that_were_named() -> None:
    logits = logits_of(3, 300)
    rows = [spec(0, temperature=0.0, logprobs=5), spec(1, temperature=0.0, logprobs=0, logprob_token_ids=(299, 0, 7)),
            spec(2, temperature=0.0, logprobs=9, logprob_token_ids=(4,))]  # fmt: skip
    described = [t.logprobs for t in Sampler(300).sample(logits, [0, 1, 2], rows)]
    raw = logits.log_softmax(-1).numpy()
    assert [None if d is None else len(d.top) for d in described] == [5, 3, 1]
    for row, (entry, ids) in enumerate(zip(described[1:], ((299, 0, 7), (4,)), strict=True), start=1):
        assert entry is not None
        assert [token for token, _ in entry.top] == list(ids)
        assert [value for _, value in entry.top] == pytest.approx(raw[row, list(ids)].tolist())
        assert entry.rank == 1 and entry.logprob == pytest.approx(raw[row].max())

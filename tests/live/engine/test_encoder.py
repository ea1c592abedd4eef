"""Steps as they are sent: penalties in compact form, and a size that no request can push over the limit."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.config import EngineConfig
from jettison.core.ports import RunStep, StepRow, TokenSources
from jettison.core.requests import RequestState
from jettison.device.model.create import create_model
from jettison.device.step import pack_token_set, unpack_ints
from jettison.errors import ConfigError
from jettison.live.engine import encoder as encoder_module
from jettison.live.engine.assembly import assemble
from jettison.live.engine.encoder import (
    MAX_FIXED_BYTES,
    MAX_SAMPLING_BYTES,
    StepEncoder,
    _sampling_bytes,
    ends_of_bad_words,
    fixed_step_bytes,
)
from jettison.live.engine.local_cluster import LocalCluster
from jettison.live.wire import codec
from jettison.live.wire.channel import MAX_MESSAGE_BYTES
from jettison.memory.blocks import BlockLedger
from jettison.memory.stages import StagePlan
from jettison.types import LATER_TOKEN_ID, FinishReason, Grammar, LayerRange, Request, SamplingParams

TOKENS = st.lists(st.integers(0, 40), max_size=60)


def encoder_of(states: list[RequestState]) -> StepEncoder:
    ledger = BlockLedger(64 * max(1, len(states)), 16)
    for state in states:
        ledger.adopt_prefix(state.request_id, [])
        ledger.allocate(state.request_id, 8)
    return StepEncoder({0: ledger}, 16, frozenset({2}))


def step_of(step_id: int, states: list[RequestState]) -> RunStep:
    rows = tuple(StepRow(state, len(state.tokens) - 1, 1, True) for state in states)
    return RunStep(step_id, 0, 0, (StagePlan(0, LayerRange(0, 2)),), rows)


def state_of(name: str, prompt: list[int], **params: object) -> RequestState:
    return RequestState(Request(name, tuple(prompt), SamplingParams(**params), 0), 0)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(TOKENS.filter(bool), st.lists(TOKENS, max_size=4), st.sampled_from(["repetition_penalty", "presence_penalty"]))
def test_what_penalties_need_is_sent_once_a_token(prompt: list[int], parts: list[list[int]], name: str) -> None:
    state = state_of("a", prompt, **{name: 1.5})
    encoder = encoder_of([state])
    for step_id, part in enumerate([[], *parts]):
        for token in part:
            state.add_token(token)
        [(_, step)] = encoder.encode(step_of(step_id, [state]))
        [row] = step.sampling
        output = Counter(state.tokens[len(prompt) :])
        ids, counts = unpack_ints(row.output_ids), unpack_ints(row.output_counts)
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == output
        wanted = sorted(set(prompt)) if name == "repetition_penalty" else []
        assert unpack_ints(row.prompt_ids).tolist() == wanted
    encoder.forget("a")
    assert not encoder._seen


def test_a_step_ahead_has_names_for_tokens_and_draws_at_their_places() -> None:
    """The token that is not known counts for the least length, and for the position that a draw is keyed by."""
    states = [state_of(n, [3, 4, 5], temperature=0.5, stop_token_ids=(9,), min_tokens=2) for n in ("a", "b", "new")]
    for state in states[:2]:
        state.add_token(7)
    encoder = encoder_of(states)
    before = RunStep(1, 0, 0, (StagePlan(0, LayerRange(0, 2)),), tuple(StepRow(s, 3, 1, True) for s in states[:2]))
    rows = (StepRow(states[1], 4, 1, True), StepRow(states[2], 0, 3, True), StepRow(states[0], 4, 1, True))
    behind = before._replace(step_id=2, rows=rows, follows=TokenSources(1, {0: 1, 2: 0}))
    [(_, first)], [(_, second)] = encoder.encode(before), encoder.encode(behind)
    assert first.follows_step is None and first.token_ids.tolist() == [7, 7]
    assert second.follows_step == 1 and second.token_ids.tolist() == [-2, 3, 4, 5, -1]
    assert [(row.position, row.banned_token_ids) for row in first.sampling] == [(4, (9, 2))] * 2
    assert [(row.position, row.banned_token_ids) for row in second.sampling] == [(5, ()), (3, (9, 2)), (5, ())]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({
        "temperature": st.sampled_from([0.0, 0.7]), "min_tokens": st.integers(0, 3),
        "stop_token_ids": st.sampled_from([(), (9,)]), "repetition_penalty": st.sampled_from([1.0, 1.2]),
        "bad_words": st.sampled_from([(), ((7, 8),)]), "logprobs": st.sampled_from([None, 2]),
        "prompt_logprobs": st.sampled_from([None, 1]),
    }), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(7, 9), st.randoms(use_true_random=False)), max_size=6),
)  # fmt: skip
def test_a_step_is_what_it_were_without_the_steps_before_it(
    requests: list[dict], steps: list[tuple[int, random.Random]]
) -> None:
    """What is remembered of requests changes no byte."""
    states = [state_of(f"r{i}", [3, 4], **fields) for i, fields in enumerate(requests)]
    encoder = encoder_of(states)
    for step_id, (token, draw) in enumerate(steps):
        rows = draw.sample(states, draw.randint(1, len(states)))
        [(_, told)] = encoder.encode(step_of(step_id, rows))
        [(_, anew)] = StepEncoder(encoder._ledgers, 16, frozenset({2})).encode(step_of(step_id, rows))
        assert codec.encode_step(told) == codec.encode_step(anew)
        for state in rows:
            state.add_token(token)
    for state in states:
        encoder.forget(state.request_id)
    assert not encoder._unchanging


def test_a_row_without_penalties_carries_no_tokens() -> None:
    state = state_of("a", list(range(30)), temperature=0.5)
    [(_, step)] = encoder_of([state]).encode(step_of(1, [state]))
    assert step.sampling[0].prompt_ids == step.sampling[0].output_ids == step.sampling[0].output_counts == b""


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.builds(
        dict, prompt=TOKENS.filter(bool), repetition_penalty=st.sampled_from([1.0, 1.2]),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple), min_tokens=st.integers(0, 9),
        logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-9, 9)), max_size=20).map(tuple),
        seed=st.integers(0, 2**63 - 1), grammar=st.sampled_from([None, Grammar("x", "é" * 400)]),
    ), min_size=1, max_size=8),
    st.integers(0, 2000),
)  # fmt: skip
def test_no_step_is_larger_than_it_may_be(requests: list[dict], limit: int) -> None:
    states = [state_of(f"r{i}", fields.pop("prompt"), **fields) for i, fields in enumerate(requests)]
    encoder = encoder_of(states)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_module, "MAX_SAMPLING_BYTES", limit)
        [(_, step)] = encoder.encode(step_of(5, states))
    sizes = [len(msgspec.msgpack.encode(row)) for row in step.sampling]
    assert all(size <= _sampling_bytes(row) for size, row in zip(sizes, step.sampling, strict=True))
    assert sum(sizes) <= limit
    refused = encoder.take_refused(5)
    assert sorted([*refused, *(row.row for row in step.sampling)]) == list(range(len(states)))
    assert encoder.take_refused(5) == {}


def test_a_grammar_without_room_in_a_step_is_sent_with_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [state_of(name, [1], grammar=Grammar("x" * 500)) for name in "abc"]
    encoder = encoder_of(states)
    [(_, alone)] = encoder_of(states[:1]).encode(step_of(1, states[:1]))
    few = _sampling_bytes(alone.sampling[0]) - 500  # of a row without its text
    monkeypatch.setattr(encoder_module, "MAX_SAMPLING_BYTES", 500 + 3 * few)
    sent: list[str] = []
    for step_id, waiting in enumerate(({1: LATER_TOKEN_ID, 2: LATER_TOKEN_ID}, {2: LATER_TOKEN_ID}, {}), start=1):
        [(_, step)] = encoder.encode(step_of(step_id, states))
        assert encoder.take_refused(step_id) == waiting
        sent += [row.grammar.request_id for row in step.sampling if row.grammar.text]
    assert sent == ["a", "b", "c"]
    encoder.forget_places()
    [(_, step)] = encoder.encode(step_of(4, states))
    assert [bool(row.grammar.text) for row in step.sampling] == [True]


def test_a_grammar_is_sent_again_where_it_may_have_been_given_up() -> None:
    state = state_of("a", [1], grammar=Grammar("x"))
    encoder = encoder_of([state])
    for step_id, has_text in ((1, True), (2, False), (100, False), (1000, True), (1001, False)):
        [(_, step)] = encoder.encode(step_of(step_id, [state]))
        assert bool(step.sampling[0].grammar.text) is has_text


def test_the_ends_of_bad_words_are_banned_behind_their_beginnings() -> None:
    words = ((5,), (1, 2), (1, 3), (9, 1, 4), (7, 7), (7, 7, 7))
    for output, banned in (([], {5}), ([1], {5, 2, 3}), ([9, 1], {5, 2, 3, 4}), ([1, 9], {5}), ([7], {5, 7}),
                           ([7, 7], {5, 7}), ([2, 1, 1], {5, 2, 3})):  # fmt: skip
        assert set(ends_of_bad_words(words, output)) == banned
        assert len(ends_of_bad_words(words, output)) == len(banned), "each once"
    state = state_of("a", [9, 1], temperature=0.0, bad_words=words, max_tokens=8)
    encoder = encoder_of([state])
    for token, banned in ((9, {5}), (1, {5}), (4, {5, 2, 3, 4})):  # the prompt is no part of a bad word
        [(_, step)] = encoder.encode(step_of(1, [state]))
        assert set(step.sampling[0].banned_token_ids) == banned
        state.add_token(token)


def test_what_the_sampler_is_told_beside_numbers_counts_for_the_size() -> None:
    fields: dict[str, object] = {
        "temperature": 0.0, "allowed_token_ids": pack_token_set(range(0, 40_000, 3)), "logprobs": 0,
        "logprob_token_ids": tuple(range(2**31 - 129, 2**31 - 1)), "bad_words": tuple((at,) for at in range(128)),
    }
    state = state_of("a", [1], **fields)
    [(_, step)] = encoder_of([state]).encode(step_of(1, [state]))
    assert len(msgspec.msgpack.encode(step.sampling[0])) <= _sampling_bytes(step.sampling[0]) < 7000


def test_the_parts_of_a_step_fit_into_a_message_together() -> None:
    assert MAX_FIXED_BYTES + MAX_SAMPLING_BYTES + (1 << 20) <= MAX_MESSAGE_BYTES
    rows, blocks, tokens = 7, 9, 50
    arrays = 4 * (tokens + 3 * rows + rows * blocks)
    targets = len(msgspec.msgpack.encode([(2**31, 20, tuple(np.full(tokens // 5, 2**31 - 1).tolist()))] * 5))
    assert arrays + targets <= fixed_step_bytes(tokens, rows, blocks)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "model"
    create_model(folder, arch="llama", layers=2, hidden=16, heads=2, kv_heads=1, seed=1, max_position_embeddings=256)
    return folder


def config_of(model_dir: Path, **flags: object) -> EngineConfig:
    return EngineConfig.resolve(
        **{"model": str(model_dir), "memory": "8MiB", "page_size": 4096, "num_threads": 1, "dtype": "float64"} | flags
    )  # type: ignore[arg-type]


def test_a_request_whose_penalties_do_not_fit_fails_alone(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(
        max_tokens=8, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, ignore_eos=True)
    prompts = [list(range(start, start + 40)) for start in (0, 40, 80)]

    def run(limit: int | None) -> list[tuple[FinishReason | None, list[int]]]:
        with LocalCluster(config_of(model_dir)) as cluster, monkeypatch.context() as patch:
            if limit is not None:
                patch.setattr(encoder_module, "MAX_SAMPLING_BYTES", limit)
            for i, prompt in enumerate(prompts):
                cluster.submit(f"r{i}", prompt, params)
            cluster.run()
            cluster.core.check()
            return [(c.finish_reason, c.token_ids) for c in cluster.completions.values()]

    whole = run(None)
    assert [reason for reason, _ in whole] == [FinishReason.LENGTH] * 3
    some = run(900)  # a row takes 320 bytes at first: two requests of three fit
    assert [reason for reason, _ in some] == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ERROR]
    assert some[:2] == whole[:2]


def test_a_configuration_whose_steps_could_not_be_sent_is_refused(model_dir: Path) -> None:
    # With memory for the whole context: a block table is no longer than what memory holds.
    flags = {"max_num_seqs": 100_000, "max_num_batched_tokens": 100_000, "block_size": 1, "memory": "1GiB"}
    with pytest.raises(ConfigError, match="--max-num-seqs") as caught:
        assemble(config_of(model_dir, **flags))
    assert "\n" not in str(caught.value)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["grow", "release", "again", "end"]), st.integers(0, 25), st.integers(1, 40)),
                max_size=60))
def test_tables_are_what_the_ledger_holds(steps: list[tuple[str, int, int]]) -> None:
    """Whatever happened between two steps, a step's tables are the ledger's, padded with zeros."""
    ledger = BlockLedger(400, 16)
    matrix = encoder_module._TableMatrix()
    states: dict[str, RequestState] = {}
    for event, number, num_blocks in steps:
        name = f"r{number}"
        if name not in states:
            states[name] = state_of(name, [1])
            ledger.adopt_prefix(name, [])
        if event == "grow" and ledger.can_allocate(num_blocks):
            ledger.allocate(name, num_blocks)
        elif event in ("release", "again"):
            ledger.release(name)
            ledger.adopt_prefix(name, [])
            if event == "again" and ledger.can_allocate(num_blocks):
                ledger.allocate(name, num_blocks)
        elif event == "end":
            ledger.release(name)
            matrix.forget(name)
            del states[name]
            assert states or matrix._ids.shape == matrix._INITIAL_SHAPE, "small again when no request is left"
        longest = max((len(ledger.table(n).ids) for n in states), default=0)
        for width in (longest, longest // 2, longest + 3):
            tables = matrix.gather(ledger.tables, list(states), width).tolist()
            assert tables == [(ledger.table(n).ids + [0] * width)[:width] for n in states]
    for name in states:
        matrix.forget(name)
    assert matrix.gather({}, [], 3).shape == (0, 3)
    assert not states or matrix._ids.shape == matrix._INITIAL_SHAPE

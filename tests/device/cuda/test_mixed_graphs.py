"""Steps of any mix of prompts, chunks and decodes run by graphs of a padded number of tokens: with the bits of
launches, and with no word of the cache written by padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cardbackend import RowKernels, card_runner
from hypothesis import given, settings
from hypothesis import strategies as st
from test_remote_attention import OldHome

from jettison.device.model.samples import NAMED, make_sample
from jettison.device.step import RemoteKV, StepInput
from jettison.types import LayerRange

BLOCK_SIZE, WIDTH, MOST_TOKENS, MOST_ROWS = 4, 12, 64, 8
SPARSE, GENERAL, NORMED = "Qwen3-MoE", "Gemma 3", "OLMo 2"


@pytest.fixture(scope="module")
def models(tiny_models, tmp_path_factory) -> dict:
    made = dict(tiny_models)
    for name in (SPARSE, GENERAL, NORMED):
        made[name] = make_sample(NAMED[name], tmp_path_factory.mktemp("made") / "model", 3, dtype="float64")
    return made


@st.composite
def mixes(draw) -> list[list[tuple[int, int, int]]]:
    """Steps, each of rows (place of the request, context, tokens): requests go on where they were, or begin again."""
    done = [0] * MOST_ROWS
    steps = []
    for _ in range(draw(st.integers(2, 5))):
        room, rows = MOST_TOKENS, []
        for place in draw(st.lists(st.integers(0, MOST_ROWS - 1), min_size=1, max_size=MOST_ROWS, unique=True)):
            size = draw(st.one_of(st.just(1), st.integers(1, 20)))
            if size > room:
                break
            if done[place] + size > WIDTH * BLOCK_SIZE:
                done[place] = 0
            rows.append((place, done[place], size))
            done[place] += size
            room -= size
        steps.append(rows)
    return steps


def as_step(number: int, rows: list[tuple[int, int, int]], layers: LayerRange, num_layers: int) -> StepInput:
    chosen = np.random.default_rng(number)
    is_last = layers.hi == num_layers
    return StepInput(
        step_id=number, layer_lo=layers.lo, layer_hi=layers.hi,
        token_ids=chosen.integers(0, 250, 0 if layers.lo else sum(size for *_, size in rows)).astype(np.int32),
        query_lens=np.array([size for *_, size in rows], dtype=np.int32),
        context_lens=np.array([context for _, context, _ in rows], dtype=np.int32),
        block_tables=np.array([[WIDTH * place + i for i in range(WIDTH)] for place, *_ in rows], dtype=np.int32),
        sample_rows=np.arange(len(rows) if is_last else 0, dtype=np.int32),
    )  # fmt: skip


def ran(runner, step: StepInput, hidden: torch.Tensor | None):
    """(the stage's hidden states or its logits, its tokens)"""
    made = runner.start_step(step, hidden).result()
    if step.layer_hi < runner.config.num_layers:
        return made, []
    return runner._workspace.logits[: len(step.query_lens)].clone(), [token.token_id for token in made.tokens]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", SPARSE, GENERAL])
def test_graphs_give_the_bits_of_launches_for_any_mix(models, new_runner, name: str) -> None:
    by_graphs, by_launches = (
        new_runner(models[name], kernels=RowKernels("pretended"), num_blocks=WIDTH * MOST_ROWS,
                   max_num_tokens=MOST_TOKENS, max_num_seqs=MOST_ROWS, build=card_runner)
        for _ in range(2)
    )  # fmt: skip
    by_launches._bucket_sizes = []
    num_layers = by_graphs.config.num_layers
    number = 0

    @settings(max_examples=12, deadline=None)
    @given(mixes(), st.integers(1, num_layers - 1), st.booleans())
    def check(steps, cut: int, is_split: bool) -> None:
        nonlocal number
        for runner in (by_graphs, by_launches):
            for arena in runner._memory.arenas:
                arena.fill_(torch.nan)
        stages = [LayerRange(0, cut), LayerRange(cut, num_layers)] if is_split else [LayerRange(0, num_layers)]
        for rows in steps:
            hidden = [None, None]
            for stage in stages:
                step = as_step(number, rows, stage, num_layers)
                number += 1
                made = [ran(runner, step, hidden[i]) for i, runner in enumerate((by_graphs, by_launches))]
                assert torch.equal(made[0][0], made[1][0]) and made[0][1] == made[1][1]
                hidden = [result for result, _ in made]
            for mine, theirs in zip(by_graphs._memory.arenas, by_launches._memory.arenas, strict=True):
                assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)), "padding has written"

    check()
    card = by_graphs._card
    assert card.num_replays > card.num_graphs and card.num_graphs <= by_graphs._graphs._most
    assert by_launches._card.num_graphs == 0


def test_a_step_of_more_tokens_than_graphs_have_is_launched(tiny_models, new_runner) -> None:
    runner = new_runner(
        tiny_models["qwen2"], kernels=RowKernels("pretended"), max_num_tokens=MOST_TOKENS, build=card_runner
    )
    runner._bucket_sizes = [1, 2, 4, 8, 16]
    for number, size in enumerate((17, 16, 17, 15)):
        ran(runner, as_step(number, [(0, 0, size)], LayerRange(0, 4), 4), None)
    assert runner._card.num_graphs == 4 and runner._card.num_replays == 4


def test_a_chunk_may_be_given_up_between_graphs(tiny_models, new_runner) -> None:
    """Asked before each layer, whichever way that is launched."""
    runner = new_runner(
        tiny_models["qwen2"], kernels=RowKernels("pretended"), max_num_tokens=MOST_TOKENS, build=card_runner
    )
    step = as_step(0, [(0, 0, 9), (1, 0, 1)], LayerRange(0, 4), 4)
    ran(runner, step, None)
    step.safepoint_layers = 1
    replays, asked = runner._card.num_replays, []
    assert runner.start_step(step, None, None, lambda: asked.append(1) or len(asked) > 2).result() is None
    assert len(asked) == 3 and runner._card.num_replays - replays == 2


def test_a_padded_step_asks_for_kv_elsewhere_without_its_padding(models, new_runner) -> None:
    """Of a model whose layers go in single operations: three rows, one of them a chunk, are padded to eight tokens."""
    old, new = (
        new_runner(models[NORMED], kernels=RowKernels("pretended"), num_blocks=WIDTH * 3, max_num_tokens=MOST_TOKENS,
                   max_num_seqs=MOST_ROWS, build=card_runner) for _ in range(2)
    )  # fmt: skip
    num_layers = old.config.num_layers
    whole = LayerRange(0, num_layers)
    ran(old, as_step(0, [(0, 0, 23), (1, 0, 9), (2, 0, 5)], whole, num_layers), None)
    for layer in range(num_layers):
        there, here = old._memory.kv_arena(layer), new._memory.kv_arena(layer)
        first = 5 if layer else 0  # of the first layer all blocks are here, of the others the first five are not
        here[first:] = there[first:]
    for number in range(1, 3):
        step = as_step(number, [(0, 22 + number, 1), (1, 8 + number, 1), (2, 5, 3)], whole, num_layers)
        expected = ran(old, step, None)
        step.remote = [RemoteKV(0, 9, 1, num_layers, 20, [0, 1, 2, 3, 4])]
        port = OldHome(old)
        port.begin(step)
        made = new.start_step(step, None, port).result()
        assert [token.token_id for token in made.tokens] == expected[1]
        assert port.num_asked == num_layers - 1
    assert new._card.num_replays == 1, "of the layer whose KV is all here"

"""Attention in parts: two disjoint sets of positions give what one gives; a stage may leave its context elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_batch import VARIANTS, Batch, batches
from cardbackend import RowKernels, card_runner
from hypothesis import given, settings

from jettison.device.devicebytes_host import HostBytes
from jettison.device.kernels.base import apply_sinks, merge_parts, sum_dtype
from jettison.device.kernels.loading import load_kernels
from jettison.device.remote import Attending, RemoteParts, attend_for_peer, unpack_answer
from jettison.device.step import RemoteKV, StepInput

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def in_parts(kernels, batch: Batch) -> torch.Tensor:
    """Attention with the first half of each row's whole context blocks at another worker."""
    remote_blocks = batch.context_lens // batch.block_size // 2
    tables = batch.block_tables.copy()
    for row, count in enumerate(remote_blocks):
        tables[row, : tables.shape[1] - count] = batch.block_tables[row, count:]
    contexts = (batch.context_lens - remote_blocks * batch.block_size).astype(np.int32)
    out = torch.full_like(batch.q, torch.nan)
    lse = torch.full(batch.q.shape[:2], torch.nan, dtype=sum_dtype(batch.dtype))
    kernels.attention(batch.q, batch.arena, tables, batch.query_lens, contexts, out, batch.scale, lse)
    rows = np.repeat(np.arange(len(batch.lens), dtype=np.int32), batch.query_lens)
    chosen = np.flatnonzero(remote_blocks[rows] > 0)
    if len(chosen):
        ids = [table[:count] for table, count in zip(batch.block_tables, remote_blocks, strict=True)]
        q = batch.q[torch.from_numpy(chosen)].contiguous()
        answer = attend_for_peer(
            kernels, HostBytes(), batch.arena, ids, rows[chosen], q.view(-1).view(torch.uint8).numpy(),
            Attending(q.shape[1], batch.scale),
        )
        there, there_lse = unpack_answer(answer, len(chosen), q.shape[1], batch.dtype, HostBytes())
        index = torch.from_numpy(chosen)
        out[index] = merge_parts(out[index], lse[index], there, there_lse)
    return out


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", VARIANTS)
def test_two_parts_merge_into_the_whole(name: str, dtype: torch.dtype) -> None:
    kernels = load_kernels(name)

    @settings(max_examples=12, deadline=None)
    @given(batches())
    def check(options: dict[str, object]) -> None:
        batch = Batch(**options, dtype=dtype)  # type: ignore[arg-type]
        batch.write(kernels)
        torch.testing.assert_close(
            in_parts(kernels, batch).double(), batch.expected(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )

    check()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_sum_is_the_log_of_all_weights(name: str) -> None:
    kernels = load_kernels(name)
    batch = Batch([(70, 3), (0, 5)], seed=4)
    batch.write(kernels)
    out, lse = torch.empty_like(batch.q), torch.empty(batch.q.shape[:2], dtype=torch.float64)
    rows = (batch.block_tables, batch.query_lens, batch.context_lens)
    kernels.attention(batch.q, batch.arena, *rows, out, batch.scale, lse)
    keys = torch.cat((batch.past[0, 0, :70], batch.k[:3]))
    for head in range(4):
        scores = keys[:72, head // 2] @ batch.q[1, head] * batch.scale
        assert lse[1, head] == pytest.approx(float(scores.logsumexp(0)), abs=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_far_apart_parts_stay_finite(name: str) -> None:
    """A part whose weights vanish beside the other's must vanish, not become NaN."""
    del name
    one, other = torch.ones(1, 2, 4, dtype=torch.float64), torch.full((1, 2, 4), 3.0, dtype=torch.float64)
    low, high = torch.full((1, 2), -900.0, dtype=torch.float64), torch.full((1, 2), 900.0, dtype=torch.float64)
    assert torch.equal(merge_parts(one, low, other, high), other)
    assert torch.equal(merge_parts(one, high, other, low), one)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_that_sees_only_its_context_needs_one(name: str) -> None:
    kernels = load_kernels(name)
    batch = Batch([(0, 2)])
    with pytest.raises(ValueError, match=r"lengths|context"):
        kernels.attention(
            batch.q, batch.arena, batch.block_tables, batch.query_lens, batch.context_lens, batch.q.clone(), 1.0,
            None, True,
        )


class Holder:
    """An ``AttentionPort`` that answers from the same arena, a few queries at a time."""

    def __init__(self, kernels, arena: torch.Tensor, how: Attending) -> None:
        self.kernels, self.arena, self.how = kernels, arena, how
        self.num_asked = 0
        self.answers: list[list[tuple[int, np.ndarray]]] = []

    def begin(self, step: StepInput) -> None:
        self.ids = [np.array(entry.block_ids, dtype=np.int32) for entry in step.remote]

    def ask(self, layer, worker, entries, q, positions=None) -> None:
        self.num_asked += len(entries)
        size, pieces = len(q) // len(entries), []
        for first in range(0, len(entries), 3):
            part = slice(first, first + 3)
            placed = None if positions is None else positions[part]
            answer = attend_for_peer(
                self.kernels, HostBytes(), self.arena, self.ids, entries[part], q[size * first : size * (first + 3)],
                self.how, placed,
            )
            pieces.append((len(entries[part]), answer))
        self.answers.append(pieces)

    def collect(self):
        answers, self.answers = self.answers, []
        return answers

    def poll(self) -> None:
        pass


@pytest.mark.parametrize(("window", "softcap"), [(0, 5.0), (1, 0.0), (8, 0.0), (30, 5.0), (60, 0.0), (500, 2.0)])
@pytest.mark.parametrize("name", VARIANTS)
def test_windows_softcaps_and_sinks_over_kv_elsewhere(name: str, window: int, softcap: float) -> None:
    kernels = load_kernels(name)
    batch = Batch([(70, 7), (40, 1), (9, 3), (64, 20)])
    batch.write(kernels)
    how = Attending(batch.q.shape[1], batch.scale, window, softcap)
    remote = [
        RemoteKV(row, 1 + row % 2, 0, 4, 8 * count, batch.block_tables[row, :count].tolist())
        for row, count in ((0, 5), (1, 4), (3, 8))
    ]
    step = StepInput(
        step_id=1, layer_lo=0, layer_hi=4, token_ids=np.zeros(31, dtype=np.int32), query_lens=batch.query_lens,
        context_lens=batch.context_lens, block_tables=batch.block_tables, sample_rows=np.zeros(0, dtype=np.int32),
        remote=remote,
    )
    port = Holder(kernels, batch.arena, how)
    port.begin(step)
    parts = RemoteParts(step, port, kernels, HostBytes(), how.num_heads, 8, how.scale)
    at = parts.at(2, window, softcap)
    assert at is not None
    parts.ask(2, at, batch.q)
    out = torch.full_like(batch.q, torch.nan)
    lse = parts.attend_here(at, batch.q, batch.arena, out)
    parts.merge(at, out, lse)
    torch.testing.assert_close(out, batch.expected(window, softcap), rtol=1e-12, atol=1e-12)
    sinks = torch.linspace(-2, 2, how.num_heads, dtype=torch.float64)
    apply_sinks(out, lse, sinks)
    torch.testing.assert_close(out, batch.expected(window, softcap, sinks), rtol=1e-12, atol=1e-12)
    ends = {0: (70, 7, 40), 1: (40, 1, 32), 3: (64, 20, 64)}
    seeing = [p + 1 - window < end for first, count, end in ends.values() for p in range(first, first + count)]
    assert port.num_asked == (sum(seeing) if window else 28), "a query that sees nothing there is not sent"


def test_queries_of_a_layer_with_a_window_need_positions() -> None:
    batch = Batch([(16, 1)])
    q = batch.q.contiguous().view(-1).view(torch.uint8).numpy()
    with pytest.raises(ValueError, match="positions"):
        attend_for_peer(
            load_kernels("torch"), HostBytes(), batch.arena, [batch.block_tables[0, :2]], np.zeros(1, dtype=np.int32),
            q, Attending(batch.q.shape[1], 1.0, window=4),
        )


class OldHome:
    """An ``AttentionPort`` that answers at once from another runner."""

    def __init__(self, runner) -> None:
        self.runner = runner
        self.num_asked = 0
        self.answers: list[list[tuple[int, np.ndarray]]] = []

    def begin(self, step: StepInput) -> None:
        self.ids = [np.array(entry.block_ids, dtype=np.int32) for entry in step.remote]

    def ask(self, layer: int, worker: int, entries, q, positions=None) -> None:
        assert worker == 9 and positions is None
        self.num_asked += 1
        half = len(q) // len(entries) // 8 * 8 * (len(entries) // 2)
        pieces = [(entries[: len(entries) // 2], q[:half]), (entries[len(entries) // 2 :], q[half:])]
        self.answers.append([(len(e), self.runner.attend(layer, self.ids, e, part)) for e, part in pieces if len(e)])

    def collect(self):
        answers, self.answers = self.answers, []
        return answers

    def poll(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["host", "card"])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_tokens_are_the_same_while_kv_lies_elsewhere(tiny_models, new_runner, model: str, kind: str) -> None:
    """Two requests decode at a new stage; the context of one lies at the old home, fewer layers at each step."""
    made = {
        "host": {"kernels": load_kernels("auto")},
        "card": {"kernels": RowKernels("cuda"), "build": card_runner},
    }[kind]
    old = new_runner(tiny_models[model], **made)
    new = new_runner(tiny_models[model], **made)
    layers = old.config.num_layers
    random = np.random.default_rng(3)
    prompts = [random.integers(1, 200, 23), random.integers(1, 200, 9)]
    tables = np.array([list(range(20, 30)), list(range(40, 50))], dtype=np.int32)

    def run(runner, step_id, tokens, contexts, remote=None, port=None):
        lens = np.array([len(t) for t in tokens], dtype=np.int32)
        step = StepInput(
            step_id=step_id, layer_lo=0, layer_hi=layers, token_ids=np.concatenate(tokens).astype(np.int32),
            query_lens=lens, context_lens=np.array(contexts, dtype=np.int32), block_tables=tables,
            sample_rows=np.arange(2, dtype=np.int32), remote=remote or [],
        )
        return [t.token_id for t in runner.start_step(step, None, port).result().tokens]

    first = run(old, 1, prompts, [0, 0])
    # The second request is wholly at the new stage; of the first one only the block that was not full (and nothing
    # of the rest) is.
    for layer in range(layers):
        there, here = old._memory.kv_arena(layer), new._memory.kv_arena(layer)
        here[40:50] = there[40:50]
        here[25] = there[25]
    port = OldHome(old)
    expected, got = first, first
    for i in range(6):
        tokens = [np.array([t]) for t in expected]
        contexts = [23 + i, 9 + i]
        remote = [RemoteKV(0, 9, min(i // 2, layers), layers, 20, tables[0, :5].tolist())] if i // 2 < layers else []
        for layer in range(min(i // 2, layers)):
            new._memory.kv_arena(layer)[20:25] = old._memory.kv_arena(layer)[20:25]
        got = run(new, 10 + i, tokens, contexts, remote, port)
        expected = run(old, 20 + i, tokens, contexts)
        assert got == expected
    assert port.num_asked == sum(layers - min(i // 2, layers) for i in range(6))
    if kind == "card":
        assert new._card.num_replays > 0, "layers whose KV is all here keep their graphs"

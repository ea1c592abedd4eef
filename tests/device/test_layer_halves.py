"""A half of a layer in one call has the bits of the kernels that it is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jettison.device.dtypes import name_of
from jettison.device.kernels import layer
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.library import supported_variants
from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.operands import IntegerMatrix, LayerConstants, LayerWeights, PackedMatrix, Weight
from jettison.device.model.integers import IntegerForm

NAMES = (*(("native", "native+torch-linear") if supported_variants() else ()), "torch")
HEADS, KV_HEADS, DIM, INNER, BLOCK = 4, 2, 16, 96, 4
QUERY_LENS = [7, 1, 40, 1]
CONTEXT_LENS = [0, 9, 3, 21]


@dataclasses.dataclass
class Buffers:
    residual: Tensor
    x: Tensor
    qkv: Tensor
    attention_flat: Tensor
    gate_up: Tensor
    activated: Tensor
    bound: Any = None

    def __post_init__(self) -> None:
        tokens, q_end = self.x.shape[0], HEADS * DIM
        self.q = self.qkv[:, :q_end].view(tokens, HEADS, DIM)
        self.k = self.qkv[:, q_end : q_end + KV_HEADS * DIM].view(tokens, KV_HEADS, DIM)
        self.v = self.qkv[:, q_end + KV_HEADS * DIM :].view(tokens, KV_HEADS, DIM)
        self.attention = self.attention_flat.view(tokens, HEADS, DIM)


def some(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


FORM = IntegerForm(4, 32, "float16", "min")


def integers(kernels: Kernels, rows: int, cols: int) -> Weight:
    data = torch.empty(FORM.num_bytes(rows, cols), dtype=torch.uint8)
    scales, offsets = (some(rows, cols // FORM.group_size, dtype=torch.float16, scale=0.03) for _ in range(2))
    whole = torch.randint(-8, 8, (rows, cols), dtype=torch.int8)
    kernels.pack_integers(whole, scales, offsets, 0, IntegerMatrix(data, rows, cols, FORM))
    return IntegerMatrix(data, rows, cols, FORM)


def matrix(kernels: Kernels, rows: int, cols: int, dtype: torch.dtype, is_integer: bool = False) -> Weight:
    if is_integer and kernels.keeps(FORM, (rows, cols), dtype):
        return integers(kernels, rows, cols)
    plain = some(rows, cols, dtype=dtype, scale=0.1)
    if not kernels.packs((rows, cols), dtype):
        return plain
    packed = PackedMatrix(torch.empty_like(plain))
    kernels.pack_rows(plain, 0, packed)
    return packed


def make(
    kernels: Kernels, dtype: torch.dtype, hidden: int, has_norms: bool, is_integer: bool = False
) -> tuple[LayerWeights, Buffers, LayerConstants]:
    qkv_size = (HEADS + 2 * KV_HEADS) * DIM
    tensors: dict[str, Any] = {
        "input_norm": some(hidden, dtype=dtype), "post_norm": some(hidden, dtype=dtype),
        "qkv_weight": matrix(kernels, qkv_size, hidden, dtype, is_integer), "qkv_bias": some(qkv_size, dtype=dtype),
        "o_weight": matrix(kernels, hidden, HEADS * DIM, dtype),
        "gate_up_weight": matrix(kernels, 2 * INNER, hidden, dtype, is_integer),
        "down_weight": matrix(kernels, hidden, INNER, dtype, is_integer), "down_bias": some(hidden, dtype=dtype),
    }  # fmt: skip
    if has_norms:
        tensors |= {"q_norm": some(DIM, dtype=dtype), "k_norm": some(DIM, dtype=dtype)}
    arena = torch.full((64, 2, KV_HEADS, BLOCK, DIM), torch.nan, dtype=dtype)
    tokens = sum(QUERY_LENS)
    context = torch.arange(64 * KV_HEADS * BLOCK * DIM, dtype=torch.float64).sin().view(64, KV_HEADS, BLOCK, DIM)
    for row, length in enumerate(CONTEXT_LENS):
        for position in range(length):
            arena[row * 16 + position // BLOCK, :, :, position % BLOCK] = context[position, :, 0].to(dtype)
    buffers = Buffers(
        some(tokens, hidden, dtype=dtype), some(tokens, hidden, dtype=dtype), some(tokens, qkv_size, dtype=dtype),
        some(tokens, HEADS * DIM, dtype=dtype), some(tokens, 2 * INNER, dtype=dtype), some(tokens, INNER, dtype=dtype),
    )  # fmt: skip
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.outer(torch.arange(64, dtype=torch.float64), torch.arange(DIM, dtype=torch.float64))
    constants = LayerConstants(angles.cos().to(wide), angles.sin().to(wide), 1e-6, DIM**-0.5)
    return LayerWeights(tensors, arena), buffers, constants


def rows() -> tuple[Any, ...]:
    tables = np.arange(64, dtype=np.int32).reshape(4, 16)
    lens, contexts = np.array(QUERY_LENS, dtype=np.int32), np.array(CONTEXT_LENS, dtype=np.int32)
    positions = np.concatenate([np.arange(c, c + n) for n, c in zip(QUERY_LENS, CONTEXT_LENS, strict=True)])
    return tables, lens, contexts, positions.astype(np.int32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_windows_caps_and_norms_of_heads_have_the_bits_of_their_kernels(name: str, dtype: torch.dtype) -> None:
    kernels = load_kernels(name, name_of(dtype))
    made = []
    for window, softcap, norm in (
        (0, 0.0, "rms"), (3, 0.0, "rms"), (0, 0.5, "rms"), (2, 0.5, "rms_plus_one"), (5, 0.0, "rms_once"),
    ):
        found = []
        for half in (kernels.attend_layer, lambda *a: layer.attend_layer(kernels, *a)):
            torch.manual_seed(3)
            weights, buffers, constants = make(kernels, dtype, 64, True)
            how = dataclasses.replace(constants, window=window, softcap=softcap, norm=norm)
            half(weights, buffers, how, *rows())
            found.append(buffers.x)
        assert torch.equal(*found)
        assert not any(torch.equal(found[0], other) for other in made), "it changes nothing"
        made.append(found[0])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("hidden", "is_integer"), [(64, False), (48, False), (64, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_halves_have_the_bits_of_their_kernels(
    name: str, dtype: torch.dtype, hidden: int, is_integer: bool, has_norms: bool, threads: int
) -> None:
    kernels = load_kernels(name, name_of(dtype))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = []
        for half in (kernels.attend_layer, lambda *a: layer.attend_layer(kernels, *a)):
            torch.manual_seed(3)
            weights, buffers, constants = make(kernels, dtype, hidden, has_norms, is_integer)
            half(weights, buffers, constants, *rows())
            assert bool(torch.isfinite(buffers.x).all())
            kv = [weights.arena[r * 16 : r * 16 + (c + n) // BLOCK] for r, (n, c) in
                  enumerate(zip(QUERY_LENS, CONTEXT_LENS, strict=True))]
            found.append((buffers.x.clone(), torch.cat(kv)))
            if half == kernels.attend_layer:
                kernels.feed_forward(weights, buffers, constants)
            else:
                layer.feed_forward(kernels, weights, buffers, constants)
            found[-1] += (buffers.x, buffers.residual)
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)
    finally:
        torch.set_num_threads(before)


def likeliest(kernels: Kernels, logits: Tensor) -> list[int]:
    out = torch.full((len(logits) + 2,), -7)
    kernels.argmax(logits, out[1:-1])
    assert out[0] == out[-1] == -7, "it writes what it names"
    for wrong in (out, out.int()[1:-1], out[::2]):
        with pytest.raises(ValueError):
            kernels.argmax(logits, wrong)
    return out[1:-1].tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_the_likeliest_token_is_the_lowest_of_the_largest(name: str, dtype: torch.dtype) -> None:
    kernels = load_kernels(name, name_of(dtype))
    for cols in (1, 7, 1000, 40_000):
        logits = some(5, cols + 3, dtype=dtype)[:, :cols]
        expected = [row.index(max(row)) for row in logits.tolist()]
        assert likeliest(kernels, logits) == expected
        logits[1, cols // 2], logits[3, -1], logits[4, 0] = torch.nan, torch.inf, -torch.inf
        assert likeliest(kernels, logits) == [expected[0], -1, expected[2], -1, -1]


@pytest.mark.skipif(not supported_variants(), reason="no native kernels built")
def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    kernels = load_kernels("native", "float64")
    torch.manual_seed(3)
    weights, buffers, constants = make(kernels, torch.float64, 64, True)
    tables, lens, contexts, positions = rows()
    kept = weights.arena.clone()
    for wrong in (
        (np.full_like(tables, 64), lens, contexts, positions),
        (tables, lens, contexts, positions + 64),
        (tables, lens + np.int32(1), contexts, positions),
        (tables, lens + np.int32(1), contexts, np.append(positions, np.zeros(4, np.int32))),
    ):
        with pytest.raises((IndexError, ValueError)):
            kernels.attend_layer(weights, buffers, constants, *wrong)
    assert torch.equal(weights.arena.nan_to_num(7.0), kept.nan_to_num(7.0))
    buffers.activated = some(sum(QUERY_LENS), INNER + 1, dtype=torch.float64)
    buffers.bound = None
    with pytest.raises(ValueError, match=r"gate_up|activated|down"):
        kernels.attend_layer(weights, buffers, constants, tables, lens, contexts, positions)

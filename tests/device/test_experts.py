"""A layer's experts: in one call of C or as single products, row by row the same bits, and as in plain double."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.device.kernels import library, native
from jettison.device.kernels.experts import pass_experts
from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.operands import ExpertWeights, PackedMatrix, RoutedBuffers, WeightStack
from jettison.device.model.arithmetic import Experts
from jettison.device.model.routing import route

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.04}


def kernels_of(name: str, emulated):
    if name == "emulated":
        return emulated
    return load_kernels("torch") if name == "torch" else native.load_native(name)


NAMES = ["torch", "emulated", *library.supported_variants()]


def stack(kernels, plain: torch.Tensor) -> WeightStack:
    """As a slab has it."""
    if not kernels.packs(tuple(plain.shape[1:]), plain.dtype):
        return WeightStack(plain, False)
    packed = torch.empty_like(plain)
    for rows, matrix in zip(plain, packed, strict=True):
        kernels.pack_rows(rows, 0, PackedMatrix(matrix))
    return WeightStack(packed, True)


class Layer:
    """Random experts, and tokens with their routes."""

    def __init__(self, kernels, dtype, tokens, number=6, num_chosen=3, hidden=64, inner=96, bias=False, seed=0):
        drawn = torch.Generator().manual_seed(seed)

        def normal(*shape, scale=1.0):
            return torch.randn(*shape, generator=drawn, dtype=torch.float64).mul_(scale).to(dtype)

        self.up, self.down = normal(number, 2 * inner, hidden, scale=0.1), normal(number, hidden, inner, scale=0.1)
        self.up_bias, self.down_bias = (normal(number, 2 * inner), normal(number, hidden)) if bias else (None, None)
        self.weights = ExpertWeights(
            normal(number, hidden), None, None, stack(kernels, self.up), self.up_bias, stack(kernels, self.down),
            self.down_bias,
        )
        self.x = normal(tokens, hidden, scale=2.0)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        logits = torch.randn(tokens, number, generator=drawn).to(wide)
        self.chosen, self.shares = route(Experts(number, num_chosen, inner, is_normed=True), logits, None)

    def buffers(self, tokens: int) -> RoutedBuffers:
        pairs, dtype = tokens * self.chosen.shape[1], self.x.dtype
        sizes = self.up.shape[1], self.down.shape[2], self.x.shape[1]
        return RoutedBuffers(*(torch.full((pairs, size), torch.nan, dtype=dtype) for size in sizes))

    def run(self, compute, activation="silu", rows=slice(None)):
        """(out, buffers) of some tokens."""
        x = self.x[rows]
        buffers, out = self.buffers(len(x)), torch.full_like(x, torch.nan)
        chosen, shares = self.chosen[rows].contiguous(), self.shares[rows].contiguous()
        compute(x, chosen, shares, self.weights, activation, buffers, out)
        return out, buffers

    def expected(self, activation: str) -> torch.Tensor:
        """In double, a token and an expert at a time."""
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        for t, (experts, shares) in enumerate(zip(self.chosen.tolist(), self.shares.tolist(), strict=True)):
            for expert, share in zip(experts, shares, strict=True):
                up = self.up[expert].double() @ self.x[t].double()
                up += 0 if self.up_bias is None else self.up_bias[expert].double()
                if activation == "silu":
                    gate, linear = up.chunk(2)
                    made = torch.nn.functional.silu(gate) * linear
                else:
                    gate, linear = up[::2].clamp(max=7), up[1::2].clamp(-7, 7)
                    made = (linear + 1) * gate * torch.sigmoid(1.702 * gate)
                made = self.down[expert].double() @ made
                out[t] += share * (made + (0 if self.down_bias is None else self.down_bias[expert].double()))
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activation", ["silu", "swiglu_clamped"])
def test_experts_are_their_products(name, dtype, activation, emulated):
    kernels = kernels_of(name, emulated)
    layer = Layer(kernels, dtype, tokens=21, bias=activation != "silu")
    out, buffers = layer.run(kernels.experts, activation)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), layer.expected(activation), rtol=tolerance, atol=tolerance)
    alone, each = layer.run(lambda *call: pass_experts(kernels, *call), activation)
    assert torch.equal(buffers.gate_up, each.gate_up)
    assert activation != "silu" or torch.equal(buffers.each, each.each)
    torch.testing.assert_close(out, alone, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_token_depends_on_no_other(name, dtype, emulated):
    kernels = kernels_of(name, emulated)
    layer = Layer(kernels, dtype, tokens=70, hidden=96, inner=64)
    together, _ = layer.run(kernels.experts)
    for rows in (slice(0, 1), slice(3, 20), slice(20, 70)):
        assert torch.equal(layer.run(kernels.experts, rows=rows)[0], together[rows])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    assert torch.equal(layer.run(kernels.experts, rows=order)[0], together[order])
    layer.x = layer.x.clone()
    buffers = layer.buffers(70)
    kernels.experts(layer.x, layer.chosen, layer.shares, layer.weights, "silu", buffers, layer.x)
    assert torch.equal(layer.x, together), "out may be x"


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 40), number=st.integers(1, 9), chosen=st.integers(1, 9), hidden=st.sampled_from([32, 64, 40]),
    inner=st.sampled_from([32, 96, 24]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape(tokens, number, chosen, hidden, inner, seed):
    kernels = load_kernels("native" if library.supported_variants() else "torch")
    layer = Layer(kernels, torch.float32, tokens, number, min(chosen, number), hidden, inner, seed=seed)
    out, _ = layer.run(kernels.experts)
    torch.testing.assert_close(out.double(), layer.expected("silu"), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("expert", [-1, 6])
def test_an_unknown_expert_is_refused(name, expert, emulated):
    kernels = kernels_of(name, emulated)
    layer = Layer(kernels, torch.float32, tokens=4)
    layer.chosen[2, 1] = expert
    with pytest.raises((IndexError, RuntimeError)):
        layer.run(kernels.experts)


def test_shapes_that_do_not_go_together_are_refused():
    kernels = load_kernels("torch")
    layer = Layer(kernels, torch.float32, tokens=4)
    layer.shares = layer.shares.double()
    with pytest.raises(ValueError, match="shares"):
        layer.run(kernels.experts)

"""A layer's experts as a composition of single kernels: what ``Kernels.experts`` has to compute, in its order.

Pairs of a token and an expert are sorted by expert, and by token within one: each expert multiplies its tokens at once.
A token's sum is in the order of its choice, so its bits depend on no other token.

Not here: routing (``device.model.routing``), and which activation a model has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from jettison.device.kernels.base import check_activation, fail, sum_dtype
from jettison.device.kernels.operands import ExpertWeights, RoutedBuffers
from jettison.device.model.arithmetic import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation

if TYPE_CHECKING:
    from jettison.device.kernels.base import Kernels

def pass_experts(
    kernels: Kernels, x: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertWeights, activation: Activation,
    buffers: RoutedBuffers, out: Tensor,
) -> None:
    """``Kernels.experts``: a loop over the experts that are chosen."""
    check_weights(weights)
    check_experts(x, chosen, shares, weights, buffers, out)
    tokens, num_chosen = chosen.shape
    if tokens == 0:
        return
    of_pair = chosen.reshape(-1)
    order = of_pair.argsort(stable=True)
    ends = torch.bincount(of_pair, minlength=weights.gate_up.shape[0]).cumsum(0).tolist()
    if len(ends) != weights.gate_up.shape[0]:
        raise IndexError(f"a token's expert is none of the {weights.gate_up.shape[0]}")
    parts = [(i, start, end) for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if start < end]
    sorted_x = x.index_select(0, order // num_chosen)
    for expert, start, end in parts:
        bias = None if weights.gate_up_bias is None else weights.gate_up_bias[expert]
        kernels.linear(sorted_x[start:end], weights.gate_up.matrix(expert), bias, buffers.gate_up[start:end])
    kernels.activate(activation, buffers.gate_up, buffers.activated)
    for expert, start, end in parts:
        bias = None if weights.down_bias is None else weights.down_bias[expert]
        kernels.linear(buffers.activated[start:end], weights.down.matrix(expert), bias, buffers.each[start:end])
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    total = shares.new_zeros(tokens, x.shape[1])
    for column in range(num_chosen):
        made = buffers.each.index_select(0, places[column::num_chosen])
        total += shares[:, column : column + 1] * made.to(total.dtype)
    out.copy_(total)


def activate(kernels: Kernels, activation: Activation, up: Tensor, out: Tensor) -> None:
    """``Kernels.activate`` in single operations of torch, but for SiLU with gates, which has a kernel."""
    is_gated = check_activation(activation, up, out)
    if activation == "silu" and is_gated:
        kernels.silu_mul(up, out)
        return
    wide = up.to(sum_dtype(up.dtype))
    if activation == "swiglu_clamped":
        gate, value = wide[:, ::2].clamp(max=SWIGLU_LIMIT), wide[:, 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        out.copy_((value + 1.0) * gate * torch.sigmoid(gate * SWIGLU_ALPHA))
    elif is_gated:
        gate, value = wide.chunk(2, dim=-1)
        out.copy_(_ACTIVATIONS[activation](gate) * value)
    else:
        out.copy_(_ACTIVATIONS[activation](wide))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


def check_experts(
    x: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertWeights, buffers: RoutedBuffers, out: Tensor
) -> None:
    """Raise ValueError unless the arguments of ``Kernels.experts`` go together; ``weights`` among themselves do."""
    number, up, hidden = weights.gate_up.shape
    tokens, num_chosen = chosen.shape
    dtype, pairs = x.dtype, tokens * num_chosen
    if weights.dtype not in (None, dtype) or number < num_chosen:
        fail(f"x {dtype} and {num_chosen} of {number} experts do not go with {weights.dtype}")
    _check("x", x, (tokens, hidden), dtype)
    _check("out", out, (tokens, hidden), dtype)
    _check("chosen", chosen, (tokens, num_chosen), torch.int64)
    _check("shares", shares, (tokens, num_chosen), sum_dtype(dtype))
    _check("buffers.gate_up", buffers.gate_up, (pairs, up), dtype)
    _check("buffers.activated", buffers.activated, (pairs, up // 2), dtype)
    _check("buffers.each", buffers.each, (pairs, hidden), dtype)


def check_weights(weights: ExpertWeights) -> None:
    """Raise ValueError unless a layer's experts are alike."""
    number, up, hidden = weights.gate_up.shape
    dtype = weights.dtype
    for name, stack, rows, columns in (
        ("gate_up", weights.gate_up, up // 2 * 2, hidden), ("down", weights.down, hidden, up // 2),
    ):
        if stack.form is not None:
            if stack.shape != (number, rows, columns) or not stack.form.fits(rows, columns):
                fail(f"{name}: {stack.shape} as {stack.form} does not go with {(number, rows, columns)}")
            _check(name, stack.data, (number, stack.form.num_bytes(rows, columns)), torch.uint8)
        elif dtype is not None:
            _check(name, stack.data, (number, rows, columns), dtype)
    for name, bias, size in (("gate_up", weights.gate_up_bias, up), ("down", weights.down_bias, hidden)):
        if bias is not None:
            _check(f"bias of {name}", bias, (number, size), dtype or bias.dtype)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        fail(f"{name}: expected contiguous {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")

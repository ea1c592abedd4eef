"""A layer's parameters and a step's buffers as the C structs of ``csrc/kernels.c``: checked once, then passed as
addresses.

Every field of those structs has 64 bits, so that each is an array of integers here.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch

from jettison.device.dtypes import torch_dtype
from jettison.device.kernels.abi import CODES, RMS_NORM_CODES, form_fields, int64s
from jettison.device.kernels.base import (
    check_arena,
    check_matrix,
    check_rotary_tables,
    check_vector,
    check_window,
    fail,
)
from jettison.device.kernels.experts import check_weights
from jettison.device.kernels.integers import check_integer_matrix
from jettison.device.kernels.operands import (
    Activations,
    ExpertWeights,
    IntegerMatrix,
    LayerConstants,
    LayerWeights,
    PackedMatrix,
    matrix_shape,
)

DTYPE_CODES = {torch_dtype(name): code for name, code in CODES.items()}
"""``CODES`` of tensors."""

_MATRIX_FIELDS = 7


class BoundLayer(NamedTuple):
    """``LayerWeights`` of kernels.c: addresses never change while memory is open."""

    dtype: int
    addresses: ctypes.Array[ctypes.c_int64]


def bind_layer(weights: LayerWeights) -> BoundLayer:
    """Check a layer's parameters against each other, and note where they are."""
    assert weights.input_norm is not None and weights.post_norm is not None
    dtype, hidden = weights.input_norm.dtype, weights.input_norm.shape[0]
    check_arena(weights.arena, dtype)
    num_blocks, _, _, _, head_dim = weights.arena.shape
    numbers: list[int] = []
    of_mlp = [(weights.gate_up_weight, weights.gate_up_bias), (weights.down_weight, weights.down_bias)]
    of_attention = [(weights.qkv_weight, weights.qkv_bias), (weights.o_weight, weights.o_bias)]
    for weight, bias in of_attention + (of_mlp if weights.has_mlp else []):
        form = None
        if isinstance(weight, IntegerMatrix):
            check_integer_matrix(weight)
            data, rows, form = weight.data, weight.rows, weight.form
            if dtype == torch.float64:
                fail("there are no products of float64 with integers")
        else:
            data = weight.data if isinstance(weight, PackedMatrix) else weight
            rows = data.shape[0]
            check_matrix("weight", data, rows, data.shape[1], dtype)
            if not data.is_contiguous():
                fail("weight: must be contiguous")
        if bias is not None:
            check_vector("bias", bias, rows, dtype)
        address = 0 if bias is None else bias.data_ptr()
        numbers += [data.data_ptr(), address, isinstance(weight, PackedMatrix), *form_fields(form)]
    numbers += [0] * (4 * _MATRIX_FIELDS - len(numbers))
    for norm, size in ((weights.q_norm, head_dim), (weights.k_norm, head_dim), (weights.post_norm, hidden)):
        if norm is not None:
            check_vector("norm", norm, size, dtype)
        numbers.append(0 if norm is None else norm.data_ptr())
    weights.bound = BoundLayer(DTYPE_CODES[dtype], int64s(*numbers, weights.arena.data_ptr(), num_blocks))
    return weights.bound


class BoundExperts(NamedTuple):
    """Of ``ExpertShape`` of kernels.c what a layer's experts are."""

    addresses: tuple[int, int, int, int]
    """Weights and biases of the first product, and of the second; 0: there is no bias."""
    sizes: tuple[int, int, int]
    """Experts, hidden size, intermediate size."""
    forms: tuple[int, ...]
    """Of both weights."""


def bind_experts(weights: ExpertWeights) -> BoundExperts:
    """Check a layer's experts, and note where they are."""
    check_weights(weights)
    tensors = weights.gate_up.data, weights.gate_up_bias, weights.down.data, weights.down_bias
    first, first_bias, second, second_bias = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    number, hidden, inner = weights.down.shape
    forms = (*form_fields(weights.gate_up.form), *form_fields(weights.down.form))
    weights.bound = BoundExperts((first, first_bias, second, second_bias), (number, hidden, inner), forms)
    return weights.bound


def bind_constants(constants: LayerConstants, weights: LayerWeights) -> ctypes.Array[ctypes.c_int64]:
    """``LayerConstants`` of kernels.c; ``weights``: of one of the layers that have them."""
    check_rotary_tables(constants.cos, constants.sin, weights.arena.dtype, weights.arena.shape[4])
    check_window(constants.window, constants.softcap)
    max_positions, rotary_dim = constants.cos.shape
    constants.bound = int64s(
        constants.cos.data_ptr(), constants.sin.data_ptr(), rotary_dim, max_positions, constants.window,
        RMS_NORM_CODES[constants.norm],
        *np.array([constants.eps, constants.scale, constants.softcap]).view(np.int64).tolist(),
    )  # fmt: skip
    return constants.bound


def bind_buffers(buffers: Activations, weights: LayerWeights) -> ctypes.Array[ctypes.c_int64]:
    """``LayerShape`` of kernels.c; checks the buffers, which ``bind_layer`` could not."""
    assert weights.input_norm is not None
    dtype, hidden = weights.input_norm.dtype, weights.input_norm.shape[0]
    _, _, num_kv_heads, block_size, head_dim = weights.arena.shape
    tokens, num_heads, inner = buffers.x.shape[0], buffers.q.shape[1], buffers.activated.shape[1]
    q_size, qkv_size = num_heads * head_dim, (num_heads + 2 * num_kv_heads) * head_dim
    if num_heads % num_kv_heads:
        fail(f"{num_heads} heads do not go with {num_kv_heads} KV heads")
    for name, tensor, cols in (
        ("residual", buffers.residual, hidden), ("x", buffers.x, hidden), ("qkv", buffers.qkv, qkv_size),
        ("attention", buffers.attention_flat, q_size), ("gate_up", buffers.gate_up, 2 * inner),
        ("activated", buffers.activated, inner),
    ):
        check_matrix(name, tensor, tokens, cols, dtype)
        if not tensor.is_contiguous():
            fail(f"{name}: must be contiguous")
    shapes = {"qkv": (weights.qkv_weight, (qkv_size, hidden)), "o": (weights.o_weight, (hidden, q_size))}
    if weights.has_mlp and weights.experts is None:
        shapes["gate_up"] = weights.gate_up_weight, (2 * inner, hidden)
        shapes["down"] = weights.down_weight, (hidden, inner)
    for name, (weight, shape) in shapes.items():
        found = matrix_shape(weight)
        if found != shape:
            fail(f"{name}: shape is {found}, expected {shape}")
    pointers = [
        t.data_ptr() for t in (
            buffers.residual, buffers.x, buffers.qkv, buffers.attention_flat, buffers.gate_up, buffers.activated,
        )
    ]  # fmt: skip
    buffers.bound = int64s(*pointers, hidden, num_heads, num_kv_heads, head_dim, inner, block_size)
    return buffers.bound

"""Operands of kernels besides plain tensors: lengths on the host, forms of matrices, a layer's parameters and buffers.

Not here: the operations (``base``, ``layer``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jettison.device.model.arithmetic import RmsNorm
from jettison.device.model.integers import IntegerForm

Int32Array: TypeAlias = Tensor | npt.NDArray[np.int32]
"""Host int32 array, torch or numpy. Not to be resized in place between calls."""


class PackedMatrix(NamedTuple):
    """A weight matrix [N, K] in the form that a back end multiplies fastest (``csrc/packed.h``).

    It has as many bytes as the plain matrix, so slabs of parameters are moved the same way in either form. Workers of
    one cluster have the same kernels, and so the same forms.
    """

    data: Tensor
    """[N, K], contiguous. Its elements are permuted: use ``gather_rows`` to read rows."""


class IntegerMatrix(NamedTuple):
    """A weight matrix [N, K] that is kept as small integers and scales (``csrc/integers.h``)."""

    data: Tensor
    """uint8 [form.num_bytes(N, K)], contiguous."""
    rows: int
    """N"""
    columns: int
    """K"""
    form: IntegerForm


Weight: TypeAlias = Tensor | PackedMatrix | IntegerMatrix


def matrix_shape(weight: Weight) -> tuple[int, int]:
    """N and K."""
    if isinstance(weight, IntegerMatrix):
        return weight.rows, weight.columns
    rows, columns = (weight.data if isinstance(weight, PackedMatrix) else weight).shape
    return rows, columns


class WeightStack(NamedTuple):
    """The same matrix of every expert of a layer, each packed by itself where kernels pack."""

    data: Tensor
    """[experts, N, K], contiguous; of integers uint8 [experts, bytes]."""
    is_packed: bool
    form: IntegerForm | None = None
    sizes: tuple[int, int] | None = None
    """N and K, where there is a form."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, N, K."""
        rows, columns = self.data.shape[1:] if self.sizes is None else self.sizes
        return self.data.shape[0], rows, columns

    def matrix(self, expert: int) -> Weight:
        """Of one expert."""
        if self.form is not None:
            return IntegerMatrix(self.data[expert], *self.shape[1:], self.form)
        return PackedMatrix(self.data[expert]) if self.is_packed else self.data[expert]


@dataclass(slots=True)
class ExpertWeights:
    """The experts of a layer, and what chooses them: like ``LayerWeights``. E experts."""

    router: Weight
    """[E, hidden], of the layer's type or of ``sum_dtype``."""
    router_bias: Tensor | None
    correction: Tensor | None
    """[E] of ``sum_dtype``: added to scores for the choice alone."""
    gate_up: WeightStack
    """[E, 2 * inner, hidden]"""
    gate_up_bias: Tensor | None
    """[E, 2 * inner]"""
    down: WeightStack
    """[E, hidden, inner]"""
    down_bias: Tensor | None
    """[E, hidden]"""
    bound: Any = None
    """A back end's form of the addresses."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Of activations; None: every matrix is kept as integers, and no bias says it."""
        plain = [stack.data for stack in (self.gate_up, self.down) if stack.form is None]
        biases = [bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None]
        return next((tensor.dtype for tensor in (*plain, *biases)), None)

    @classmethod
    def of(cls, tensors: dict[str, Any]) -> ExpertWeights | None:
        """Of a layer's tensors by name; None: it has no experts."""
        if "router_weight" not in tensors:
            return None
        return cls(
            tensors["router_weight"], tensors.get("router_bias"), tensors.get("router_correction"),
            tensors["experts_gate_up_weight"], tensors.get("experts_gate_up_bias"),
            tensors["experts_down_weight"], tensors.get("experts_down_bias"),
        )  # fmt: skip


class RoutedBuffers(NamedTuple):
    """Space for T tokens that pass k experts each; a row for each pair of a token and an expert."""

    gate_up: Tensor
    """[T * k, 2 * inner]"""
    activated: Tensor
    """[T * k, inner]"""
    each: Tensor
    """[T * k, hidden]: what experts make; it may share memory with ``gate_up``."""


class LayerWeights:
    """One layer's parameters and KV: views of its slab, made once, valid whenever the slab is mapped and filled."""

    __slots__ = (
        "arena", "attention_out_norm", "bound", "down_bias", "down_weight", "experts", "gate_up_bias",
        "gate_up_weight", "has_mlp", "input_norm", "input_norm_bias", "k_norm", "mlp_out_norm", "o_bias", "o_weight",
        "post_norm", "post_norm_bias", "q_norm", "qkv_bias", "qkv_weight", "sinks",
    )  # fmt: skip

    def __init__(self, tensors: dict[str, Any], arena: Tensor) -> None:
        self.input_norm: Tensor | None = tensors.get("input_norm")
        """None: the architecture has none there; so for all norms, and biases."""
        self.input_norm_bias: Tensor | None = tensors.get("input_norm_bias")
        self.qkv_weight: Weight = tensors["qkv_weight"]
        self.qkv_bias: Tensor | None = tensors.get("qkv_bias")
        self.q_norm: Tensor | None = tensors.get("q_norm")
        self.k_norm: Tensor | None = tensors.get("k_norm")
        self.sinks: Tensor | None = tensors.get("sinks")
        """[num_heads]: see ``base.apply_sinks``."""
        self.o_weight: Weight = tensors["o_weight"]
        self.o_bias: Tensor | None = tensors.get("o_bias")
        self.attention_out_norm: Tensor | None = tensors.get("attention_out_norm")
        self.post_norm: Tensor | None = tensors.get("post_norm")
        """After attention, before the MLP."""
        self.post_norm_bias: Tensor | None = tensors.get("post_norm_bias")
        self.mlp_out_norm: Tensor | None = tensors.get("mlp_out_norm")
        self.experts = ExpertWeights.of(tensors)
        self.has_mlp = "gate_up_weight" in tensors
        """Whether there is an MLP that all tokens pass: else its weights are None, and not asked for."""
        self.gate_up_weight: Weight = tensors.get("gate_up_weight")
        self.gate_up_bias: Tensor | None = tensors.get("gate_up_bias")
        self.down_weight: Weight = tensors.get("down_weight")
        self.down_bias: Tensor | None = tensors.get("down_bias")
        self.arena = arena
        """[blocks, 2, kv_heads, block_size, head_dim]"""
        self.bound: Any = None
        """A back end's form of the addresses."""


class Activations(Protocol):
    """Buffers of a step of T tokens, all contiguous, none overlapping another that is alive at the same time."""

    residual: Tensor
    """[T, hidden]: the sum so far."""
    x: Tensor
    """[T, hidden]"""
    qkv: Tensor
    """[T, (num_heads + 2 * num_kv_heads) * head_dim]; ``q``, ``k``, ``v`` are views of it: [T, heads, head_dim]."""
    q: Tensor
    k: Tensor
    v: Tensor
    attention: Tensor
    """[T, num_heads, head_dim], and the same as [T, num_heads * head_dim]"""
    attention_flat: Tensor
    gate_up: Tensor
    """[T, 2 * inner]"""
    activated: Tensor
    """[T, inner]"""
    bound: Any


@dataclass(slots=True, eq=False)
class LayerConstants:
    """Constants of a layer besides its parameters, the same for all layers of a kind and all steps; never changed."""

    cos: Tensor
    """[max_positions, rotary_dim]"""
    sin: Tensor
    eps: float
    """Epsilon of all norms."""
    scale: float
    """Scale of attention scores; for this and what follows see ``Kernels.attention``."""
    window: int = 0
    softcap: float = 0.0
    norm: RmsNorm = "rms"
    """Of heads, where the layer has such norms."""
    bound: Any = None
    """A back end's form of them."""

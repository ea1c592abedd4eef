"""A decoder layer of any architecture in the table, from single operations: what is not Llama's in two calls.

    residual += x;  x = norm(residual);  x = attention(x);  x = norm'(x)
    residual += x;  x = norm(residual);  x = mlp(x);        x = norm'(x)

Which norms there are is the architecture's: before each half (Llama), after it (OLMo 2), both (Gemma), or one for both
halves at once (Cohere). What the last half adds stays in ``buffers.x``, as ``decoder`` has it, so a split changes no
bit. Operations that kernels lack are torch's, row by row: no row depends on another.

Not here: which layers there are, embedding and head (``decoder``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from jettison.device.kernels import Kernels
from jettison.device.kernels.base import sum_dtype
from jettison.device.kernels.operands import LayerConstants, LayerWeights
from jettison.device.model.arithmetic import LayerKind, Norm, QueryGrowth
from jettison.device.model.batch import Batch, HostRowOperations
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.model.workspace import StepBuffers


class GeneralLayers:
    """The layers of one model."""

    def __init__(self, config: DecoderConfig, kernels: Kernels, constants: list[LayerConstants]) -> None:
        """``constants``: of each of ``config.ropes``."""
        self._config = config
        self._kernels = kernels
        self._constants = constants
        self._arithmetic = config.arithmetic
        self._eps = config.norm_eps

    def run(
        self, kind: LayerKind, layer: int, weights: LayerWeights, batch: Batch, buffers: StepBuffers, is_first: bool,
        between_halves: Callable[[], None] | None,
    ) -> None:
        """See ``Decoder.run_layer``."""
        x, residual = buffers.x, buffers.residual
        if not is_first:
            residual.add_(x)
        self._norm(residual, weights.input_norm, weights.input_norm_bias, x)
        read = x.clone() if self._arithmetic.is_parallel else None
        self._attention(kind, layer, weights, batch, buffers)
        self._leave(x, weights.attention_out_norm)
        if between_halves is not None:
            between_halves()
        if read is not None:
            attended = x.clone()
            x.copy_(read)
            self._mlp(weights, buffers)
            self._leave(x, None)
            x.add_(attended)
            return
        residual.add_(x)
        self._norm(residual, weights.post_norm, weights.post_norm_bias, x)
        self._mlp(weights, buffers)
        self._leave(x, weights.mlp_out_norm)

    def end(self, buffers: StepBuffers, final_norm: Tensor | None) -> None:
        """See ``Decoder.end_layers``; ``final_norm``: after the model's last layer."""
        buffers.residual.add_(buffers.x)
        if final_norm is not None:
            weight, *bias = final_norm.view(-1, self._config.hidden_size)
            self._norm(buffers.residual, weight, bias[0] if bias else None, buffers.x)

    def _norm(self, source: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
        """Into ``out``; a copy where the architecture has no norm."""
        if weight is None:
            out.copy_(source)
        elif self._arithmetic.norm == "rms":
            self._kernels.rms_norm(source, weight, self._eps, out)
        else:
            normalize(self._arithmetic.norm, source, weight, bias, self._eps, out)

    def _leave(self, x: Tensor, norm: Tensor | None) -> None:
        """What a half of a layer adds, before it is added."""
        if norm is not None:
            self._norm(x, norm, None, x)
        if self._arithmetic.residual_scale != 1.0:
            x.mul_(self._arithmetic.residual_scale)

    # --------------------------------------------------------------------------------------------------- attention

    def _attention(
        self, kind: LayerKind, layer: int, weights: LayerWeights, batch: Batch, buffers: StepBuffers
    ) -> None:
        rows = batch.rows or HostRowOperations(self._kernels, batch)
        q, k, kernels, a = buffers.q, buffers.k, self._kernels, self._arithmetic
        kernels.linear(buffers.x, weights.qkv_weight, weights.qkv_bias, buffers.qkv)
        if weights.q_norm is not None and weights.k_norm is not None:
            self._norm_heads(q, weights.q_norm)
            self._norm_heads(k, weights.k_norm)
        if kind.rope is not None:
            constants = self._constants[kind.rope]
            rows.rotate(q, k, constants.cos, constants.sin)
        if a.query_growth is not None:
            q.mul_(_growth(a.query_growth, rows.positions(), q.dtype))
        remote = None if batch.remote is None else batch.remote.at(layer, kind.window, a.attention_softcap)
        scale = self._config.attention_scale
        if batch.remote is None or remote is None:
            rows.store(k, buffers.v, weights.arena)
            rows.attend(q, weights.arena, buffers.attention, scale, None, kind.window, a.attention_softcap)
        else:
            batch.remote.ask(layer, remote, q)
            rows.store(k, buffers.v, weights.arena)
            lse = batch.remote.attend_here(remote, q, weights.arena, buffers.attention)
            batch.remote.merge(remote, buffers.attention, lse)
        kernels.linear(buffers.attention_flat, weights.o_weight, weights.o_bias, buffers.x)

    def _norm_heads(self, x: Tensor, weight: Tensor) -> None:
        """Of queries or keys [T, heads, D], in place; a weight as wide as all of them norms them together."""
        if weight.shape[0] == x.shape[2] and self._arithmetic.qk_norm == "head":
            if self._arithmetic.norm == "rms":
                self._kernels.head_rms_norm(x, weight, self._eps)
            else:
                normalize(self._arithmetic.norm, x, weight, None, self._eps, x)
            return
        flat = x.reshape(x.shape[0], -1)
        normalize(self._arithmetic.norm, flat, weight, None, self._eps, flat)
        x.copy_(flat.view(x.shape))

    # --------------------------------------------------------------------------------------------------------- MLP

    def _mlp(self, weights: LayerWeights, buffers: StepBuffers) -> None:
        kernels, activation = self._kernels, self._arithmetic.activation
        kernels.linear(buffers.x, weights.gate_up_weight, weights.gate_up_bias, buffers.gate_up)
        if activation == "silu" and self._arithmetic.is_gated:
            kernels.silu_mul(buffers.gate_up, buffers.activated)
        else:
            wide = buffers.gate_up.to(sum_dtype(buffers.gate_up.dtype))
            gate, *up = wide.chunk(2, dim=-1) if self._arithmetic.is_gated else (wide,)
            made = _ACTIVATIONS[activation](gate)
            buffers.activated.copy_(made * up[0] if up else made)
        kernels.linear(buffers.activated, weights.down_weight, weights.down_bias, buffers.x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


def normalize(kind: Norm, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
    """A norm over the last dimension of ``x``, which may be ``out``, in the precision of sums. Plain RMS is rounded
    before its gain, as ``Kernels.rms_norm`` has it, the others once, after it."""
    wide = x.to(sum_dtype(x.dtype))
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if kind == "rms":
        out.copy_(weight * scaled.to(x.dtype))
        return
    gain = weight.to(scaled.dtype)
    made = scaled * (gain + 1.0 if kind == "rms_plus_one" else gain)
    out.copy_(made if bias is None else made + bias.to(scaled.dtype))


def _growth(growth: QueryGrowth, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, 1, 1], in ``dtype``."""
    turns = (positions.to(torch.float64) / growth.period).floor()
    return (1.0 + growth.beta * torch.log1p(turns)).to(dtype).view(-1, 1, 1)

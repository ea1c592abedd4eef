"""A decoder layer of any architecture in the table, from single operations: what is not Llama's in two calls.

    residual += x;  x = norm(residual);  x = attention(x);  x = norm'(x)
    residual += x;  x = norm(residual);  x = mlp(x);        x = norm'(x)

Which norms there are is the architecture's: before each half (Llama), after it (OLMo 2), both (Gemma), or one for both
halves at once (Cohere). What the last half adds stays in ``buffers.x``, as ``decoder`` has it, so a split changes no
bit. Operations that kernels lack are torch's, element by element: no row depends on another.

Not here: which layers there are, embedding and head (``decoder``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jettison.device.kernels.base import Kernels, apply_sinks, sum_dtype
from jettison.device.kernels.operands import IntegerMatrix, LayerConstants, LayerWeights, PackedMatrix
from jettison.device.model.arithmetic import LayerKind, QueryGrowth
from jettison.device.model.batch import Batch, HostRowOperations
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.model.norms import Norms
from jettison.device.model.routing import RoutingCounts, route
from jettison.device.model.workspace import StepBuffers


class GeneralLayers:
    """The layers of one model."""

    def __init__(self, config: DecoderConfig, kernels: Kernels, constants: list[LayerConstants]) -> None:
        """``constants``: of each layer."""
        self._config = config
        self._kernels = kernels
        self._constants = constants
        self._arithmetic = config.arithmetic
        self._norms = Norms(config.arithmetic.norm, config.norm_eps, kernels)
        self._in_one_call = [config.attends_in_one_call(kind) for kind in config.layers]
        self.routing = RoutingCounts(config.num_layers, config.arithmetic.experts)

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
            self._mlp(layer, weights, buffers)
            self._leave(x, None)
            x.add_(attended)
            return
        residual.add_(x)
        self._norm(residual, weights.post_norm, weights.post_norm_bias, x)
        self._mlp(layer, weights, buffers)
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
        else:
            self._norms.rows(source, weight, bias, out)

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
        constants = self._constants[layer]
        if batch.remote is None and self._in_one_call[layer]:
            attend_in_one_call(self._kernels, constants, weights, batch, buffers)
            return
        rows = batch.rows or HostRowOperations(self._kernels, batch)
        q, k, kernels, a = buffers.q, buffers.k, self._kernels, self._arithmetic
        kernels.linear(buffers.x, weights.qkv_weight, weights.qkv_bias, buffers.qkv)
        if weights.q_norm is not None and weights.k_norm is not None:
            self._norm_heads(q, weights.q_norm)
            self._norm_heads(k, weights.k_norm)
        if kind.rope is not None:
            rows.rotate(q, k, constants.cos, constants.sin)
        if a.query_growth is not None:
            q.mul_(_growth(a.query_growth, rows.positions(), q.dtype))
        remote = None if batch.remote is None else batch.remote.at(layer, kind.window, a.attention_softcap)
        scale = self._config.attention_scale
        if batch.remote is None or remote is None:
            rows.store(k, buffers.v, weights.arena)
            lse = None
            if weights.sinks is not None:
                lse = q.new_empty(q.shape[:2], dtype=sum_dtype(q.dtype))
            rows.attend(q, weights.arena, buffers.attention, scale, lse, kind.window, a.attention_softcap)
        else:
            batch.remote.ask(layer, remote, q)
            rows.store(k, buffers.v, weights.arena)
            lse = batch.remote.attend_here(remote, q, weights.arena, buffers.attention)
            batch.remote.merge(remote, buffers.attention, lse)
        if weights.sinks is not None and lse is not None:  # once, over all positions, wherever they lie
            apply_sinks(buffers.attention, lse, weights.sinks)
        kernels.linear(buffers.attention_flat, weights.o_weight, weights.o_bias, buffers.x)

    def _norm_heads(self, x: Tensor, weight: Tensor) -> None:
        """Of queries or keys [T, heads, D], in place: each head by itself, or all of a token together."""
        if self._arithmetic.qk_norm == "width":
            flat = x.view(x.shape[0], -1)
            self._norms.rows(flat, weight, None, flat)
        else:
            self._norms.heads(x, weight)

    # --------------------------------------------------------------------------------------------------------- MLP

    def _mlp(self, layer: int, weights: LayerWeights, buffers: StepBuffers) -> None:
        """From the norm in ``buffers.x`` to what the layer's second half adds, there."""
        experts = self._arithmetic.experts
        if weights.experts is None or experts is None:
            self._dense(weights, buffers.x, buffers.gate_up, buffers.activated)
            return
        x, wide = buffers.x, sum_dtype(buffers.x.dtype)
        logits = x.new_empty((x.shape[0], experts.number), dtype=wide)
        router = weights.experts.router
        kept = x if isinstance(router, IntegerMatrix) else router.data if isinstance(router, PackedMatrix) else router
        self._kernels.linear(x.to(kept.dtype), router, weights.experts.router_bias, logits)
        chosen, shares = route(experts, logits, weights.experts.correction)
        self.routing.note(layer, chosen)
        assert buffers.routed is not None
        made = buffers.routed_sum if weights.has_mlp else x
        activation = self._arithmetic.activation
        self._kernels.experts(x, chosen, shares, weights.experts, activation, buffers.routed, made)
        if weights.has_mlp:
            self._dense(weights, x, buffers.shared_gate_up, buffers.shared_activated)
            x.add_(made)

    def _dense(self, weights: LayerWeights, x: Tensor, up: Tensor, activated: Tensor) -> None:
        kernels = self._kernels
        kernels.linear(x, weights.gate_up_weight, weights.gate_up_bias, up)
        kernels.activate(self._arithmetic.activation, up, activated)
        kernels.linear(activated, weights.down_weight, weights.down_bias, x)


def attend_in_one_call(
    kernels: Kernels, constants: LayerConstants, weights: LayerWeights, batch: Batch, buffers: StepBuffers
) -> None:
    """The attention of a layer without remote parts, with the bits of the single operations."""
    if batch.attend is not None:
        batch.attend(weights, buffers, constants)
        return
    rows = batch.block_tables, batch.query_lens, batch.context_lens
    kernels.attend_layer(weights, buffers, constants, *rows, batch.positions)


def _growth(growth: QueryGrowth, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, 1, 1], in ``dtype``."""
    turns = (positions.to(torch.float64) / growth.period).floor()
    return (1.0 + growth.beta * torch.log1p(turns)).to(dtype).view(-1, 1, 1)

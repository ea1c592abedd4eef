"""A worker's memory besides parameters and KV: the activations of one step, and the buffers that are never dropped.

One flat run of bytes, sized before the first step and counted against the budget. Never dropped: the final norm
and the rotary tables. Activations that are never alive together share their bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jettison.device.kernels.base import sum_dtype
from jettison.device.kernels.operands import RoutedBuffers
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.model.shards import align


class StepBuffers:
    """The activations of one step of T tokens: views of the workspace, contents undefined until written.

    ``qkv`` and ``attention`` share bytes with ``gate_up`` and ``activated``, with what experts need, and with the
    workspace's ``rows`` and ``logits``: each is used up before the next is written.
    """

    __slots__ = (
        "activated", "attention", "attention_flat", "bound", "gate_up", "k", "q", "qkv", "residual", "routed",
        "routed_sum", "shared_activated", "shared_gate_up", "v", "x",
    )  # fmt: skip

    def __init__(self, workspace: Workspace, config: DecoderConfig, num_tokens: int) -> None:
        self.bound: Any = None
        """See ``kernels.operands.Activations``."""
        self.residual = workspace.residual[:num_tokens]
        """[T, hidden]: the sum so far, which is sent between stages."""
        self.x = workspace.x[:num_tokens]
        """[T, hidden]: input of the next projection, or output of the last."""
        self.qkv = workspace.qkv[:num_tokens]
        q_end, k_end = config.q_size, config.q_size + config.kv_size
        self.q = self.qkv[:, :q_end].view(num_tokens, config.num_heads, config.head_dim)
        self.k = self.qkv[:, q_end:k_end].view(num_tokens, config.num_kv_heads, config.head_dim)
        self.v = self.qkv[:, k_end:].view(num_tokens, config.num_kv_heads, config.head_dim)
        self.attention_flat = workspace.attention[:num_tokens]
        self.attention = self.attention_flat.view(num_tokens, config.num_heads, config.head_dim)
        self.gate_up = workspace.gate_up[:num_tokens]
        """[T, up_size]: see ``DecoderConfig.up_size``."""
        self.activated = workspace.activated[:num_tokens]
        self.routed: RoutedBuffers | None = workspace.routed(num_tokens)
        """None: there are no experts."""
        self.routed_sum = workspace.routed_sum[:num_tokens]
        """[T, hidden], where all tokens pass an MLP beside experts: what experts make."""
        self.shared_gate_up = workspace.shared_gate_up[:num_tokens]
        """[T, 2 * shared_size]: of that MLP, and so ``shared_activated``."""
        self.shared_activated = workspace.shared_activated[:num_tokens]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Name -> (offset, shape) of every buffer, and the bytes they take together."""

    places: dict[str, tuple[int, tuple[int, ...], torch.dtype]]
    num_bytes: int


class Workspace:
    """The workspace's bytes cut into tensors."""

    def __init__(
        self, memory: Tensor, config: DecoderConfig, dtype: torch.dtype, max_num_tokens: int, max_num_seqs: int,
        *, keeps_rows: bool = False,
    ) -> None:
        """``memory``: flat uint8, at least ``num_bytes`` of the same arguments long, 64-byte aligned."""
        plan = _plan(config, dtype, max_num_tokens, max_num_seqs, keeps_rows=keeps_rows)
        tensors = {
            name: memory[offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(shape)
            for name, (offset, shape, kind) in plan.places.items()
        }
        self.final_norm = tensors["final_norm"]
        """[hidden], and where norms have biases as many of these behind it. Permanent."""
        self.cos = tensors["cos"]
        """[ropes, max_model_len, rotary_dim], of ``sum_dtype``. Permanent."""
        self.sin = tensors["sin"]
        self.kept = tensors.get("kept", memory[:0].view(dtype).view(0, config.hidden_size))
        """[max_num_tokens, hidden], for rows that steps shed; none without ``keeps_rows``."""
        self.residual = tensors["residual"]
        self.x = tensors["x"]
        self.qkv = tensors["qkv"]
        self.attention = tensors["attention"]
        self.gate_up = tensors["gate_up"]
        self.activated = tensors["activated"]
        self._num_chosen = 0 if config.arithmetic.experts is None else config.arithmetic.experts.num_chosen
        self._routed = [tensors.get(name) for name in ("routed_gate_up", "routed_activated", "routed_each")]
        nothing = memory[:0].view(dtype)
        self.routed_sum = tensors.get("routed_sum", nothing)
        self.shared_gate_up = tensors.get("shared_gate_up", nothing)
        self.shared_activated = tensors.get("shared_activated", nothing)
        self.rows = tensors["rows"]
        """[max_num_seqs, hidden]: final hidden states of the rows that need logits."""
        self.logits = tensors["logits"]
        """[max_num_seqs, vocab], of ``sum_dtype``: rounded to bfloat16, the largest two would often be equal."""

    def routed(self, num_tokens: int) -> RoutedBuffers | None:
        """For the experts of so many tokens."""
        views = [tensor[: num_tokens * self._num_chosen] for tensor in self._routed if tensor is not None]
        return RoutedBuffers(*views) if views else None

    @staticmethod
    def num_bytes(
        config: DecoderConfig, dtype: torch.dtype, max_num_tokens: int, max_num_seqs: int, *, keeps_rows: bool = False
    ) -> int:
        """Bytes that a workspace for steps of these sizes takes. ``keeps_rows``: with room for rows that a step sheds,
        as many as it may have."""
        return _plan(config, dtype, max_num_tokens, max_num_seqs, keeps_rows=keeps_rows).num_bytes

    @staticmethod
    def position_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
        """Bytes of these that each position of ``config.max_model_len`` adds at most: a row of all rotary tables."""
        return 2 * len(config.ropes) * config.rotary_dim * sum_dtype(dtype).itemsize


def _plan(
    config: DecoderConfig, dtype: torch.dtype, max_num_tokens: int, max_num_seqs: int, *, keeps_rows: bool
) -> _Plan:
    places: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}

    def place(offset: int, kind: torch.dtype, **shapes: tuple[int, ...]) -> int:
        for name, shape in shapes.items():
            places[name] = (offset, shape, kind)
            offset += align(math.prod(shape) * kind.itemsize)
        return offset

    tokens, hidden = max_num_tokens, config.hidden_size
    table = len(config.ropes), config.max_model_len, config.rotary_dim
    shared = place(0, dtype, final_norm=(hidden * (2 if config.has_norm_bias else 1),))
    shared = place(shared, sum_dtype(dtype), cos=table, sin=table)
    if keeps_rows:
        shared = place(shared, dtype, kept=(tokens, hidden))
    shared = place(shared, dtype, residual=(tokens, hidden), x=(tokens, hidden))
    inner, rows = config.intermediate_size, (max_num_seqs, hidden)
    experts, routed_bytes = config.arithmetic.experts, 0
    if experts is not None:
        pairs, wide = tokens * experts.num_chosen, 2 * experts.shared_size
        start = place(shared, dtype, routed_sum=(tokens, hidden)) if wide else shared
        first = place(start, dtype, routed_activated=(pairs, experts.intermediate_size))
        routed_bytes = max(  # what experts make takes the place of what their first products made
            place(first, dtype, routed_gate_up=(pairs, 2 * experts.intermediate_size)),
            place(first, dtype, routed_each=(pairs, hidden)),
            place(start, dtype, shared_gate_up=(tokens, wide), shared_activated=(tokens, experts.shared_size)),
        )
    num_bytes = max(
        routed_bytes,
        place(shared, dtype, qkv=(tokens, config.qkv_size), attention=(tokens, config.q_size)),
        place(shared, dtype, gate_up=(tokens, config.up_size), activated=(tokens, inner)),
        place(place(shared, dtype, rows=rows), sum_dtype(dtype), logits=(max_num_seqs, config.vocab_size)),
    )
    return _Plan(places, num_bytes)

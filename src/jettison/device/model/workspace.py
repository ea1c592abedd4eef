"""A worker's workspace as tensors: the activations of one step, and the buffers that are never dropped.

Not here: how large it is, and which buffers share their bytes (``workspaceplan``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jettison.device.dtypes import ITEM_BYTES, name_of, torch_dtype
from jettison.device.kernels.operands import RoutedBuffers
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.model.workspaceplan import plan_workspace


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


class Workspace:
    """The workspace's bytes cut into tensors."""

    def __init__(
        self, memory: Tensor, config: DecoderConfig, dtype: torch.dtype, max_num_tokens: int, max_num_seqs: int,
        *, keeps_rows: bool = False,
    ) -> None:
        """``memory``: flat uint8, 64-byte aligned, of the plan's bytes for the same arguments, or more."""
        plan = plan_workspace(config, name_of(dtype), max_num_tokens, max_num_seqs, keeps_rows=keeps_rows)
        tensors = {
            name: memory[offset : offset + math.prod(shape) * ITEM_BYTES[kind]].view(torch_dtype(kind)).view(shape)
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

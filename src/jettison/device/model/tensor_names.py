"""Where an architecture's checkpoint keeps what a layer needs: names below ``model.layers.<i>.``.

Not here: how the tensors lie in a slab (``shards``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names without ``.weight``. None: the architecture has no such norm."""

    input_norm: str | None = "input_layernorm"
    """Before attention."""
    attention_out_norm: str | None = None
    """Of what attention adds."""
    mlp_norm: str | None = "post_attention_layernorm"
    """Before the MLP."""
    mlp_out_norm: str | None = None
    """Of what the MLP adds."""
    qkv: str | None = None
    """Queries, keys and values in one tensor, in this order; None: ``q_proj``, ``k_proj``, ``v_proj``."""
    gate_up: str | None = None
    """Likewise for ``gate_proj`` and ``up_proj``."""
    up: str = "up_proj"
    down: str = "down_proj"


LLAMA = TensorNames()

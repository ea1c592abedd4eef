"""Where an architecture's checkpoint keeps what a layer needs: names below ``model.layers.<i>.``.

Not here: how the tensors lie in a slab (``shards``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Of a sparse layer. Biases, where there are any, end in ``_bias`` beside stacked matrices."""

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    each: str | None = "mlp.experts"
    """One by one: ``<each>.<n>.<gate>.weight``; None: there is no such form."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: str = "mlp.experts"
    """All in one tensor ``[experts, rows, columns]``: ``<stacked>.gate_up_proj`` and ``<stacked>.down_proj``."""
    stacked_router: str = "mlp.gate"
    """The router's name where experts are stacked."""
    is_transposed: bool = False
    """Whether stacked matrices are ``[experts, columns, rows]``."""
    shared: str = "mlp.shared_experts"


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
    sinks: str | None = None
    """Of attention, one for each head."""
    experts: ExpertNames = ExpertNames()


LLAMA = TensorNames()

"""The architectures that can be imported from GGUF, a row each: their names there and here, and their tensors' names.

To add one: a row of ``ARCHITECTURES``, once ``device.model.hf_config`` serves it. Not here: numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
"""Fields below the architecture's name that are one whole number -> key of ``config.json``."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,), "expert_used_count": (0,), "pooling_type": (0,), "attention.causal": (True,),
    "use_parallel_residual": (False,), "tensor_data_layout": ("Meta AI original pth", "reference"),
}  # fmt: skip
"""Fields that may be there with these values, which change nothing; the second layout is another name of the first."""

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_QKV_BIAS = {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
_OUTPUT_BIAS = {"attn_output.bias": "self_attn.o_proj.bias"}
_MLP_BIAS = {f"ffn_{part}.bias": f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")}
_QK_NORM = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture: what differs from Llama's plain form."""

    name: str
    """In ``architectures`` of ``config.json``."""
    model_type: str
    turns_neighbours: bool = False
    """Whether the file's rotary embedding turns neighbouring dimensions, where a folder's turns those half a head
    apart: rows of the query and key projections are in another order then."""
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    """Tensors of a layer, below ``blk.N.`` and below ``model.layers.N.``."""
    switches: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Key of ``config.json`` -> tensors of a layer that are there where it is true."""
    whole: Mapping[str, str] = field(default_factory=lambda: _WHOLE)
    keys: Mapping[str, str] = field(default_factory=lambda: _KEYS)
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: _NEUTRAL)


# Names as llama.cpp writes them; Mistral's dense models are written as llama, of which they are a case.
ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM", "llama", turns_neighbours=True,
        switches={"attention_bias": _QKV_BIAS | _OUTPUT_BIAS, "mlp_bias": _MLP_BIAS},
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", layer=_LAYER | _QKV_BIAS),
    "qwen3": Architecture(
        "Qwen3ForCausalLM", "qwen3", layer=_LAYER | _QK_NORM, switches={"attention_bias": _QKV_BIAS | _OUTPUT_BIAS},
    ),
}  # fmt: skip

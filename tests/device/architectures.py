"""Tiny models of every architecture that is served, as arguments of ``create_model``."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "std": 0.15, "max_position_embeddings": 512,
    "dtype": "float64",
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
_NO_ROPE = {"rope_theta": None, "rope_scaling": None}
_WINDOW = {"sliding_window": 9}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama gelu": {"arch": "llama", "extra": {"hidden_act": "gelu"}},
    "llama yarn": {"arch": "llama", "extra": {"rope_scaling": _YARN}},
    "mistral": {"extra": _WINDOW},
    "ministral3": {"extra": {**_NO_ROPE, "rope_parameters": {
        **_YARN, "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }}},
    "qwen2": {"extra": {**_WINDOW, "use_sliding_window": True, "max_window_layers": 2}},
    "qwen3": {"head_dim": 24},
    "gemma2": {"tied": True, "head_dim": 24, "extra": {**_WINDOW, "query_pre_attn_scalar": 20}},
    "gemma2 free": {"arch": "gemma2", "tied": True, "extra": {
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    }},
    "gemma3_text": {"tied": True, "extra": {
        **_WINDOW, "sliding_window_pattern": 3, "query_pre_attn_scalar": 20, "rope_theta": 1e5,
        "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }},
    "gemma3_text new": {"arch": "gemma3_text", "tied": True, "extra": {
        **_WINDOW, **_NO_ROPE, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        }, "layer_types": ["sliding_attention", "full_attention"] * 2,
    }},
    "phi3 short": {"arch": "phi3", "extra": {
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 512, "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0] * 6,
        },
    }},
    "phi3 long": {"arch": "phi3", "extra": {**_WINDOW, "original_max_position_embeddings": 2, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0, 2.1, 3.2, 3.3, 4.4, 4.5, 5.1, 5.2],
    }}},
    "olmo2": {},
    "olmo3": {"extra": {**_WINDOW, "rope_theta": 5e5, "rope_scaling": {**_YARN, "attention_factor": 1.2}}},
    "granite": {"extra": {
        "embedding_multiplier": 12.0, "attention_multiplier": 0.11, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    }},
    "glm": {},
    "glm4": {},
    "smollm3": {"extra": {"no_rope_layers": [1, 0, 1, 0]}},
    "smollm3 windows": {"arch": "smollm3", "extra": {**_WINDOW, "use_sliding_window": True}},
    "exaone4": {"extra": {"sliding_window": None, "layer_types": ["full_attention"] * 4}},
    "exaone4 windows": {"arch": "exaone4", "extra": {**_WINDOW, "sliding_window_pattern": 4}},
    "starcoder2": {"std": 0.4, "extra": _WINDOW},
    "cohere2": {"tied": True, "extra": {**_WINDOW, "sliding_window_pattern": 4}},
    "seed_oss": {"extra": {"attention_bias": True, "attention_out_bias": True}},
}  # fmt: skip
"""Name, the model type first -> what is not ``BASE``'s."""


def options_of(name: str) -> dict[str, Any]:
    """Arguments of ``create_model`` besides the folder."""
    return {**BASE, "arch": name.split()[0], "seed": 1, **ARCHITECTURES[name]}

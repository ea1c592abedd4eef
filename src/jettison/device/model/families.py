"""The architectures that are served: a row each, with what sets it apart.

Defaults of absent keys are those of transformers 5.23 (``models/<type>/configuration_<type>.py``). A row is enough for
an architecture whose switches are all in ``arithmetic``.

Not here: how a row and a ``config.json`` become a ``DecoderConfig`` (``hf_config``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from jettison.device.model.arithmetic import PLAIN, SWIGLU_ALPHA, SWIGLU_LIMIT, Arithmetic
from jettison.device.model.tensor_names import LLAMA, ExpertNames, TensorNames


@dataclass(frozen=True, slots=True)
class Biases:
    """Which projections have a bias. Where a key decides, it is named, with its default."""

    qkv: bool = False
    """Queries, keys and values always have one."""
    qkv_key: str | None = None
    """Where this key is true they have one."""
    o_key: str | None = None
    """Where this key is true the output projection has one."""
    mlp_key: str | None = None
    norm: bool = False
    """Norms have one, too."""
    default: bool = False
    """Of absent keys."""


@dataclass(frozen=True, slots=True)
class Windows:
    """When and where ``sliding_window`` counts."""

    rule: Literal["never", "always", "flagged", "all_flagged", "typed"] = "never"
    """Never; in all layers; in those that ``use_sliding_window`` and ``max_window_layers`` or ``layer_types`` say; in
    all layers where ``use_sliding_window`` says so; or in those that ``layer_types`` says, which has a default."""
    default: int | None = 4096
    """Where the key is absent."""
    full_every: int = 0
    """Of the layers' default types: every so-many-th sees all positions."""
    pattern_key: str = "sliding_window_pattern"
    """Which says another number."""


@dataclass(frozen=True, slots=True)
class Positions:
    """How layers are told positions."""

    default_theta: float = 10_000.0
    local_theta: float | None = None
    """Of layers with a window, where they have angles of their own: the default of ``rope_local_base_freq``."""
    scales_local: bool = True
    """Whether the scaling of frequencies counts in layers with a window, too."""
    partial: float | None = None
    """Default of ``partial_rotary_factor``; None: all dimensions of a head are rotated."""
    without: Literal["none", "full", "listed"] = "none"
    """Layers that are told none: none; those without a window where others have one; or as ``no_rope_layers`` lists."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of keys that differ, and defaults of absent ones."""

    activation: str | None = "hidden_act"
    """None: it is the family's, whatever the file says."""
    eps: str = "rms_norm_eps"
    default_eps: float = 1e-6
    scales: tuple[str, ...] = ()
    """Multipliers and softcaps that are read (``hf_config.SCALES``), where the key is there."""
    tied: bool = False
    """Default of ``tie_word_embeddings``."""
    qk_norm: str | None = None
    """Norms of heads are there where this key is true, and only there."""
    fixed: dict[str, object] = field(default_factory=dict)
    """Keys that would change the arithmetic: one that is there, and is not null, must have this value."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Which keys tell an architecture's experts, with the defaults of absent ones."""

    score: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    number: tuple[str, int] = ("num_experts", 128)
    also: tuple[str, ...] = ("num_local_experts", "n_routed_experts", "num_experts")
    """Other names of that key."""
    num_chosen: int = 8
    size: tuple[str, int | None] = ("moe_intermediate_size", None)
    is_normed: bool | None = False
    """Default of ``norm_topk_prob``; None: always, whatever the key says."""
    num_shared: int = 0
    """Default of ``n_shared_experts``, in experts' sizes; 0: there are none."""
    num_dense: int | None = None
    """Default of ``first_k_dense_replace``; None: ``decoder_sparse_step`` and ``mlp_only_layers`` say which layers are
    dense."""
    has_bias: bool = False
    has_spare_layers: bool = False
    """See ``DecoderConfig.has_spare_layers``."""


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture."""

    model_type: str
    default_context: int
    """``max_position_embeddings`` where the key is absent."""
    biases: Biases = Biases()
    arithmetic: Arithmetic = PLAIN
    names: TensorNames = LLAMA
    windows: Windows = Windows()
    positions: Positions = Positions()
    keys: Keys = Keys()
    default_head_dim: int | None = None
    """None = hidden size / heads."""
    default_kv_heads: int | None = None
    """KV heads where the key is absent; None, and null in the file, = heads."""
    defaults: dict[str, object] = field(default_factory=dict)
    """Of other keys that are absent."""
    text_sizes: dict[str, int] = field(default_factory=dict)
    """Of a text part that leaves sizes out, as published ones do. The text model alone has to say them."""
    mixture: Mixture | None = None
    """None: all layers are dense."""
    text_types: tuple[str, ...] = ()
    """Of a model with images, too: its text part alone is served. ``text_config`` has this part, and its
    ``model_type`` is one of these."""


def _text_sizes(layers: int, hidden: int, intermediate: int, vocab: int, heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocab,
        "num_attention_heads": heads,
    }  # fmt: skip


_LLAMA_BIASES = Biases(qkv_key="attention_bias", o_key="attention_bias", mlp_key="mlp_bias")
_QKVO_BIASES = Biases(qkv_key="attention_bias", o_key="attention_bias")
_GEMMA = Arithmetic(norm="rms_plus_one", activation="gelu_tanh")
_SANDWICH = TensorNames(
    attention_out_norm="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)  # fmt: skip
_AFTER = TensorNames(
    input_norm=None, attention_out_norm="post_attention_layernorm", mlp_norm=None,
    mlp_out_norm="post_feedforward_layernorm",
)  # fmt: skip
_MIXTRAL = ExpertNames(
    router="block_sparse_moe.gate", each="block_sparse_moe.experts", gate="w1", up="w3", down="w2",
)
_GPT_OSS = ExpertNames(router="mlp.router", each=None, stacked_router="mlp.router", is_transposed=True)
_GLM_NAMES = TensorNames(gate_up="mlp.gate_up_proj")
_GEMMA_KEYS = Keys(
    activation="hidden_activation", tied=True,
    scales=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    fixed={"use_bidirectional_attention": False},
)  # fmt: skip
_MINISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

FAMILIES = {
    "LlamaForCausalLM": Family("llama", 2048, _LLAMA_BIASES, text_sizes=_text_sizes(32, 4096, 11_008, 32_000, 32)),
    "MistralForCausalLM": Family(
        "mistral", 131_072, default_kv_heads=8, windows=Windows("always"),
        text_sizes=_text_sizes(32, 4096, 14_336, 32_000, 32),
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3", 262_144, default_kv_heads=8, default_head_dim=128, windows=Windows("always", default=None),
        positions=Positions(default_theta=1_000_000.0), keys=Keys(default_eps=1e-5),
        defaults={"rope_parameters": _MINISTRAL_ROPE},
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", 32_768, Biases(qkv=True), default_kv_heads=32, windows=Windows("flagged")
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", 32_768, _QKVO_BIASES, Arithmetic(qk_norm="head"), default_head_dim=128, default_kv_heads=32,
        windows=Windows("flagged"),
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2", 8192, _QKVO_BIASES, _GEMMA, _SANDWICH, Windows("typed", full_every=2), keys=_GEMMA_KEYS,
        default_head_dim=256, default_kv_heads=4,
        defaults={
            "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text", 131_072, _QKVO_BIASES, Arithmetic("rms_plus_one", "head", "gelu_tanh"), _SANDWICH,
        Windows("typed", full_every=6), Positions(1_000_000.0, 10_000.0, scales_local=False), _GEMMA_KEYS,
        default_head_dim=256, default_kv_heads=4,
        defaults={"query_pre_attn_scalar": 256}, text_sizes=_text_sizes(26, 2304, 9216, 262_208, 8),
    ),
    "Phi3ForCausalLM": Family(
        "phi3", 4096, names=TensorNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
        windows=Windows("always", default=None), positions=Positions(partial=1.0), keys=Keys(default_eps=1e-5),
        defaults={"original_max_position_embeddings": 4096},
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2", 2048, _QKVO_BIASES, Arithmetic("rms_once", "width"), _AFTER, keys=Keys(default_eps=1e-5),
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3", 2048, _QKVO_BIASES, Arithmetic("rms_once", "width"), _AFTER, Windows("typed", full_every=4),
        Positions(500_000.0, scales_local=False), Keys(default_eps=1e-5),
    ),
    "GraniteForCausalLM": Family(
        "granite", 2048, _LLAMA_BIASES,
        keys=Keys(scales=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")),
        defaults={"attention_multiplier": 1.0},
    ),
    "GlmForCausalLM": Family(
        "glm", 131_072, Biases(qkv_key="attention_bias", default=True), Arithmetic(is_interleaved=True), _GLM_NAMES,
        positions=Positions(partial=0.5), keys=Keys(default_eps=1.5625e-07), default_head_dim=128, default_kv_heads=2,
    ),
    "Glm4ForCausalLM": Family(
        "glm4", 131_072, Biases(qkv_key="attention_bias", default=True), Arithmetic(is_interleaved=True),
        TensorNames(
            attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm",
            gate_up="mlp.gate_up_proj",
        ),
        positions=Positions(partial=0.5), keys=Keys(default_eps=1.5625e-07), default_head_dim=128, default_kv_heads=2,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3", 32_768, _LLAMA_BIASES, default_kv_heads=4, windows=Windows("flagged"),
        positions=Positions(2_000_000.0, without="listed"), keys=Keys(tied=True),
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4", 2048, arithmetic=Arithmetic(qk_norm="head"), names=_AFTER, windows=Windows("typed", full_every=4),
        positions=Positions(without="full"), keys=Keys(default_eps=1e-5), default_kv_heads=32,
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2", 4096,
        Biases(qkv_key="use_bias", o_key="use_bias", mlp_key="use_bias", norm=True, default=True),
        Arithmetic(norm="layer", activation="gelu_tanh", is_gated=False), TensorNames(up="c_fc", down="c_proj"),
        Windows("always", default=None), keys=Keys(eps="norm_epsilon", default_eps=1e-5, tied=True),
        default_kv_heads=2,
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2", 8192, _QKVO_BIASES, Arithmetic(norm="layer", is_parallel=True, is_interleaved=True),
        TensorNames(mlp_norm=None), Windows("typed", full_every=4), Positions(without="full"),
        Keys(eps="layer_norm_eps", default_eps=1e-5, tied=True, scales=("logit_scale",)),
        defaults={"logit_scale": 0.0625}, text_sizes=_text_sizes(40, 8192, 22_528, 256_000, 64),
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss", 524_288, Biases(qkv_key="attention_bias", o_key="attention_out_bias", mlp_key="mlp_bias"),
        default_head_dim=128, default_kv_heads=8, defaults={"attention_bias": True},
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", 32_768, _QKVO_BIASES, Arithmetic(qk_norm="head"), windows=Windows("all_flagged"),
        default_kv_heads=4, mixture=Mixture(size=("moe_intermediate_size", 768)),
    ),
    "MixtralForCausalLM": Family(
        "mixtral", 131_072, names=TensorNames(experts=_MIXTRAL), windows=Windows("always", default=None),
        positions=Positions(1_000_000.0), keys=Keys(default_eps=1e-5), default_kv_heads=8,
        mixture=Mixture(
            number=("num_local_experts", 8), num_chosen=2, size=("intermediate_size", None), is_normed=None,
        ),
    ),
    "OlmoeForCausalLM": Family(
        "olmoe", 4096, _QKVO_BIASES, Arithmetic(qk_norm="width"), keys=Keys(default_eps=1e-5, fixed={"clip_qkv": None}),
        mixture=Mixture(number=("num_experts", 64), size=("intermediate_size", None)),
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe", 131_072, Biases(qkv_key="attention_bias"), positions=Positions(partial=0.5),
        keys=Keys(default_eps=1e-5, qk_norm="use_qk_norm"), default_kv_heads=8,
        mixture=Mixture(
            "sigmoid", ("n_routed_experts", 128), size=("moe_intermediate_size", 1408), is_normed=True, num_shared=1,
            num_dense=1, has_spare_layers=True,
        ),
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss", 131_072, Biases(qkv_key="attention_bias", o_key="attention_bias", default=True),
        Arithmetic("rms_once", activation="swiglu_clamped"), TensorNames(sinks="self_attn.sinks", experts=_GPT_OSS),
        Windows("typed", default=128, full_every=2), Positions(150_000.0),
        Keys(activation=None, default_eps=1e-5, fixed={
            "swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT, "hidden_act": "silu",
        }),
        default_head_dim=64, default_kv_heads=8,
        defaults={"rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096,
        }},
        mixture=Mixture(
            "softmax_of_chosen", ("num_local_experts", 128), num_chosen=4, size=("intermediate_size", None),
            is_normed=None, has_bias=True,
        ),
    ),
}  # fmt: skip
_TEXTS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "granite", "gpt_oss")
FAMILIES |= {
    "Gemma3ForConditionalGeneration": replace(
        FAMILIES["Gemma3ForCausalLM"], model_type="gemma3", text_types=("gemma3_text",)
    ),
    "Mistral3ForConditionalGeneration": replace(
        FAMILIES["MistralForCausalLM"], model_type="mistral3", text_types=("mistral", "ministral3")
    ),
    "LlavaForConditionalGeneration": replace(FAMILIES["LlamaForCausalLM"], model_type="llava", text_types=_TEXTS),
    "LlavaNextForConditionalGeneration": replace(
        FAMILIES["LlamaForCausalLM"], model_type="llava_next", text_types=_TEXTS
    ),
    "LlavaOnevisionForConditionalGeneration": replace(
        FAMILIES["Qwen2ForCausalLM"], model_type="llava_onevision", text_types=_TEXTS
    ),
    "InternVLForConditionalGeneration": replace(FAMILIES["Qwen2ForCausalLM"], model_type="internvl", text_types=_TEXTS),
    "Qwen3VLForConditionalGeneration": replace(
        FAMILIES["Qwen3ForCausalLM"], model_type="qwen3_vl", text_types=("qwen3_vl_text",)
    ),
    "AyaVisionForConditionalGeneration": replace(
        FAMILIES["Cohere2ForCausalLM"], model_type="aya_vision", text_types=("cohere2",)
    ),
    "Cohere2VisionForConditionalGeneration": replace(
        FAMILIES["Cohere2ForCausalLM"], model_type="cohere2_vision", text_types=("cohere2",)
    ),
}
"""Models with images: rows of their text parts. What ``text_config`` names decides the family; the row's own counts
only where it names none."""

TEXTS_ALIKE = {
    "qwen3_vl_text": ("Qwen3ForCausalLM", replace(
        FAMILIES["Qwen3ForCausalLM"], model_type="qwen3_vl_text", default_context=128_000,
        positions=Positions(500_000.0),
    )),
}  # fmt: skip
"""Text parts with a type of their own that compute what an architecture above does: a token of text has the same
position in time, height and width (``mrope_section``)."""

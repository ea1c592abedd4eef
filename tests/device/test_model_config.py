"""Which configs are understood, and the one line that each of the others is refused with."""

from __future__ import annotations

import json

import pytest

from jettison.device.dtypes import resolve_dtype
from jettison.device.model.arithmetic import Arithmetic, LayerKind, Rope, RopeScaling
from jettison.device.model.families import FAMILIES
from jettison.device.model.hf_config import read_config
from jettison.errors import ConfigError, ModelError

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **BASE}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **BASE, "sliding_window": None}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **BASE}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **BASE}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **BASE}
OLMO3 = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **BASE}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", **BASE}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **BASE}
PHI3 = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **BASE, "original_max_position_embeddings": 512,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}  # fmt: skip
LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip


def _with_divisors(divisors):
    return {**PHI3, "rope_scaling": {**PHI3["rope_scaling"], "long_factor": divisors}}


def _without(values, key):
    return {name: value for name, value in values.items() if name != key}


@pytest.fixture
def read(tmp_path):
    def read(values, max_model_len=None):
        (tmp_path / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
        return read_config(tmp_path, max_model_len)

    return read


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (LLAMA, {"head_dim": 16, "qkv_bias": False, "o_bias": False, "mlp_bias": False}),
        ({**LLAMA, "attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
        ({**LLAMA, "num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({**LLAMA, "head_dim": 32}, {"head_dim": 32}),
        ({**LLAMA, "head_dim": None}, {"head_dim": 16}),
        ({**LLAMA, "architectures": None}, {"architecture": "LlamaForCausalLM"}),
        ({**LLAMA, "auto_map": {"AutoModel": "evil.Model"}}, {"architecture": "LlamaForCausalLM"}),
        ({**LLAMA, "sliding_window": 16}, {"max_model_len": 1024}),
        ({**MISTRAL, "attention_bias": True}, {"qkv_bias": False, "o_bias": False}),
        ({**MISTRAL, "sliding_window": 1024}, {"max_model_len": 1024}),
        (QWEN2, {"qkv_bias": True, "o_bias": False, "norm_eps": 1e-6}),
        ({**GEMMA3, "use_bidirectional_attention": None}, {"norm_eps": 1e-6}),
        ({**QWEN2, "head_dim": 24}, {"head_dim": 24}),
        ({**QWEN2, "head_dim": None}, {"head_dim": 16}),
        ({**QWEN2, "num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({**_without(LLAMA, "num_key_value_heads")}, {"num_kv_heads": 4}),
        ({**_without(MISTRAL, "num_key_value_heads"), "num_attention_heads": 16}, {"num_kv_heads": 8}),
        ({**_without(QWEN3, "num_key_value_heads"), "num_attention_heads": 32}, {"num_kv_heads": 32}),
        (_without(LLAMA, "max_position_embeddings"), {"max_position_embeddings": 2048, "max_model_len": 2048}),
        (_without(MISTRAL, "max_position_embeddings"), {"max_position_embeddings": 131_072}),
        (_without(QWEN2, "max_position_embeddings"), {"max_position_embeddings": 32_768}),
        (_without(QWEN3, "max_position_embeddings"), {"max_position_embeddings": 32_768}),
        ({**LLAMA, "architectures": []}, {"architecture": "LlamaForCausalLM"}),
        ({**QWEN2, "sliding_window": 16}, {"max_model_len": 1024}),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, {}),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention"] * 2}, {}),
        (QWEN3, {"head_dim": 128, "arithmetic": Arithmetic(qk_norm="head"), "qkv_bias": False}),
        ({**QWEN3, "attention_bias": True, "head_dim": 8}, {"head_dim": 8, "qkv_bias": True, "o_bias": True}),
        ({**QWEN3, "tie_word_embeddings": True}, {"tied_embeddings": True}),
        ({**LLAMA, "rms_norm_eps": 1e-5}, {"norm_eps": 1e-5, "stored_dtype": None}),
        ({**LLAMA, "torch_dtype": "bfloat16"}, {"stored_dtype": "bfloat16"}),
        ({**LLAMA, "dtype": "torch.float32"}, {"stored_dtype": "float32"}),
    ],
)
def test_what_architectures_mean(read, values, expected):
    config = read(values)
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("values", "theta", "scaling"),
    [
        ({}, 10_000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_scaling": None, "rope_theta": 1e6}, 1e6, None),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 10_000.0, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}, 5e5, RopeScaling("linear", 4.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}}, 5e5,
         RopeScaling("llama3", 8.0, 1.0, 4.0, 128)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}}, 5e5,
         RopeScaling("llama3", 8.0, 1.0, 4.0, 128)),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "partial_rotary_factor": 1.0},
         1e4, RopeScaling("linear", 2.0)),
    ],
)  # fmt: skip
def test_both_spellings_of_rotary_parameters(read, values, theta, scaling):
    config = read({**LLAMA, **values})
    assert config.ropes == (Rope(theta, scaling, 16),) and set(config.layers) == {LayerKind()} and config.is_plain


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ({**LLAMA, "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: Llama"),
        ({"model_type": "gpt2"}, "model_type gpt2"),
        *(({**LLAMA, "architectures": [name], "model_type": None}, f"{name} is not supported: {why}") for name, why in (
            ("Qwen3NextForCausalLM", "some of its layers keep a recurrent state"),
            ("Qwen3_5MoeForConditionalGeneration", "some of its layers keep a recurrent state"),
            ("GraniteMoeHybridForCausalLM", "some of its layers keep a recurrent state"),
            ("NemotronHForCausalLM", "some of its layers keep a recurrent state"),
            ("Mamba2ForCausalLM", "some of its layers keep a recurrent state"),
            ("RwkvForCausalLM", "some of its layers keep a recurrent state"),
            ("Lfm2MoeForCausalLM", "some of its layers keep a recurrent state"),
            ("JambaForCausalLM", "some of its layers keep a recurrent state"),
            ("Gemma4ForConditionalGeneration", "its layers share KV"),
            ("DeepseekV3ForCausalLM", "its KV is latent"),
        )),
        ({"model_type": "qwen3_next"}, "qwen3_next.* some of its layers keep a recurrent state"),
        ({"architectures": ["Gemma2ForCausalLM"], **BASE, "use_bidirectional_attention": True}, "use_bidirectional"),
        ({"architectures": ["OlmoeForCausalLM"], **BASE, "clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ({}, "is not supported"),
        ({**LLAMA, "architectures": [], "model_type": "gpt2"}, "is not supported"),
        ({**LLAMA, "architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', expected a list"),
        ({**LLAMA, "architectures": ["X"], "auto_map": {"AutoModel": "x.X"}}, "auto_map, is never run"),
        ({**LLAMA, "model_type": "mistral"}, "contradicts"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantized"),
        ({**LLAMA, "hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: silu"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size is '64', expected an integer"),
        ({**LLAMA, "hidden_size": True}, "hidden_size is True"),
        ({**LLAMA, "hidden_size": 0}, "hidden_size is 0"),
        ({**LLAMA, "vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({**LLAMA, "num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({**LLAMA, "num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        ({**LLAMA, "num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({**_without(QWEN2, "num_key_value_heads")}, "not a multiple of num_key_value_heads 32"),
        ({**LLAMA, "hidden_size": 66}, "not a multiple of num_attention_heads"),
        ({**LLAMA, "head_dim": 15}, "odd"),
        ({**LLAMA, "rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({**LLAMA, "attention_bias": "yes"}, "attention_bias is 'yes', expected true or false"),
        ({**LLAMA, "rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({**LLAMA, "rope_theta": 10**400}, "rope_theta is 1000"),
        ({**LLAMA, "torch_dtype": 32}, "torch_dtype is 32, expected a string"),
        ({**LLAMA, "rope_scaling": {"type": "proportional", "factor": 2.0}}, "rope scaling 'proportional'"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({**QWEN2, "dual_chunk_attention_config": {"chunk_size": 600}}, "original_max_position_embeddings is missing"),
        ({**QWEN2, "dual_chunk_attention_config": 600}, "dual_chunk_attention_config is 600, expected an object"),
        ({**LLAMA, "rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE, "low_freq_factor": 4}}, "low_freq_factor"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between layers"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "rope_theta": -1}, "rope_theta is -1"),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention"]}, "layer_types"),
        ({**QWEN3, "use_sliding_window": True, "layer_types": ["full_attention", "chunked"]}, "layer_types must name"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers"),
        ({**GEMMA3, "layer_types": ["full_attention", {}]}, "layer_types must name"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ({**SMOLLM3, "no_rope_layers": ["1", "0"]}, "no_rope_layers must have 0 or 1"),
        ({**LLAMA, "rope_theta": 1}, "rope_theta 1 must be above 1"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 5e-324}}, "factor is 5e-324, expected a positive"),
        ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1e308}}, r"beta_fast is 1e\+308"),
        ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 1e9, "original_max_position_embeddings": 1024}},
         r"factor times original_max_position_embeddings is 1\.024e\+12 tokens"),
        ({**PHI3, "partial_rotary_factor": 1e308}, r"partial_rotary_factor is 1e\+308"),
        ({**PHI3, "partial_rotary_factor": 1e30}, "leaves 16"),
        ({**PHI3, "original_max_position_embeddings": 1}, "original_max_position_embeddings must be above 1"),
        ({**_with_divisors([True] * 8)}, "long_factor must have 8 positive numbers"),
        ({**_with_divisors([1.0] * 7 + [float("inf")])}, "long_factor must have 8 positive numbers"),
        ({**MIXTRAL, "num_hidden_layers": 4096, "num_local_experts": 16384}, "16384 experts in each of 4096 layers"),
    ],
)  # fmt: skip
def test_refused_with_one_line_that_names_the_file(read, tmp_path, values, message):
    with pytest.raises(ModelError, match=message) as caught:
        read(values)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(caught.value)


def test_an_absent_context_is_that_of_transformers():
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING
    for family in (family for family in FAMILIES.values() if not family.text_types):
        assert mapping[family.model_type]().max_position_embeddings == family.default_context


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json: not found"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="no such folder"):
        read_config(tmp_path / "missing")


@pytest.mark.parametrize(
    "name", ["BertModel", "Qwen3Model", "XLMRobertaForSequenceClassification", "ModernBertForMaskedLM"],
)  # fmt: skip
def test_what_generates_no_text_is_named(name, read):
    with pytest.raises(ModelError, match=f"architecture {name} is an encoder, an embedding model, a classifier"):
        read({**QWEN3, "architectures": [name]})


@pytest.mark.parametrize(
    ("file", "told"),
    [("modules.json", "an embedding model"), ("adapter_config.json", r"an adapter \(LoRA\), which would be left out")],
)
def test_a_folder_of_another_kind_is_named(file, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / file).write_text("[]")
    with pytest.raises(ModelError, match=rf"{file}: says that .*{told}") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_adapter_alone_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"not found; adapter_config.json says that this is an adapter \(LoRA\)"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({**MISTRAL, "sliding_window": 512}, [512, 512]),
        (_without(MISTRAL, "sliding_window") | {"max_position_embeddings": 8192}, [4096, 4096]),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, [0, 16]),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": 16,
          "layer_types": ["sliding_attention", "full_attention"]}, [16, 0]),
    ],
)  # fmt: skip
def test_windows_of_layers(read, values, windows):
    config = read(values)
    assert [kind.window for kind in config.layers] == windows and config.is_plain


def test_a_shorter_context_makes_a_window_irrelevant(read):
    short, long = (read({**MISTRAL, "sliding_window": 512}, max_model_len=length) for length in (512, 513))
    assert (short.layers[0].window, long.layers[0].window) == (0, 512)


@pytest.mark.parametrize("max_model_len", [0, 1025])
def test_a_context_beyond_the_model_is_refused(read, max_model_len):
    with pytest.raises(ConfigError, match="1024"):
        read(LLAMA, max_model_len=max_model_len)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(("values", "context"), [
    ({**QWEN3, "rope_scaling": YARN}, 4096),
    ({**QWEN3, "rope_scaling": YARN, "max_position_embeddings": 1280}, 4096),
    ({**QWEN3, "rope_scaling": YARN, "max_position_embeddings": 4096}, 4096),
    ({**QWEN3, "rope_scaling": YARN, "max_position_embeddings": 5000}, 5000),
    ({**QWEN3, "rope_scaling": {**YARN, "factor": 1.5}}, 1536),
    ({**QWEN3, "rope_scaling": {**YARN, "factor": 0.5}}, 1024),
    ({**QWEN3, "rope_scaling": {**YARN, "factor": None}}, 1024),
    ({**QWEN3, "rope_scaling": {**YARN, "original_max_position_embeddings": None}}, 1024),
    ({**QWEN3, "rope_scaling": _without(YARN, "original_max_position_embeddings"),
      "original_max_position_embeddings": 512}, 2048),
    ({**QWEN3, "rope_parameters": YARN}, 4096),
    ({**OLMO3, "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}}, 4096),
    ({**QWEN3, "rope_scaling": {**YARN, "rope_type": "llama3", **LLAMA3_ROPE}}, 1024),
    ({**QWEN3, "rope_scaling": {**YARN, "rope_type": "dynamic"}}, 1024),
    (PHI3, 1024),
    ({**PHI3, "rope_scaling": {**PHI3["rope_scaling"], "type": "yarn", "factor": 8.0}}, 1024),
])  # fmt: skip
def test_yarn_reaches_as_far_as_its_factor_says(read, values, context):
    """And never less far than ``max_position_embeddings``."""
    config = read(values)
    assert (config.max_position_embeddings, config.max_model_len) == (context, context)
    assert read(values, max_model_len=context).max_model_len == context
    with pytest.raises(ConfigError, match=f"from 1 to the model's context, {context} "):
        read(values, max_model_len=context + 1)


def test_the_scaling_that_qwen3_s_card_prints(read):
    """``--max-model-len 131072``, as in the line of docs/from-vllm.md."""
    printed = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = read({**QWEN3, "max_position_embeddings": 40960, "rope_scaling": printed}, max_model_len=131_072)
    assert config.max_model_len == 131_072
    assert config.ropes[0].scaling.original_max_position_embeddings == 32768


CHUNKED = {"chunk_size": 600, "local_size": 20, "original_max_position_embeddings": 600}


@pytest.mark.parametrize(("chunked", "context"), [
    (CHUNKED, 600), (None, 1024), ({}, 1024), ({**CHUNKED, "original_max_position_embeddings": 1024}, 1024),
])  # fmt: skip
def test_the_context_ends_where_attention_would_be_in_chunks(read, caplog, tmp_path, chunked, context):
    values = {**QWEN2, "dual_chunk_attention_config": chunked}
    config = read(values)
    assert (config.max_position_embeddings, config.max_model_len) == (context, context)
    told = f"{tmp_path / 'config.json'}: dual_chunk_attention_config is not supported; the context ends where it "
    assert caplog.messages == ([f"{told}begins to matter, at 600 of 1024 tokens"] if context == 600 else [])
    with pytest.raises(ConfigError, match=f"{context} .*{'dual_chunk' if context == 600 else 'max_position'}"):
        read(values, max_model_len=context + 1)


@pytest.mark.parametrize(
    ("stored", "name", "expected"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "float32"),
        (None, "auto", "float32"),
        ("bfloat16", "float64", "float64"),
    ],
)
def test_dtype_names(read, stored, name, expected):
    assert resolve_dtype(name, read({**LLAMA, "torch_dtype": stored})) == expected


def test_unknown_dtype_is_refused(read):
    with pytest.raises(ConfigError, match="float8"):
        resolve_dtype("float8", read(LLAMA))

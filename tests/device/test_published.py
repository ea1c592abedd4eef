"""Configs of models that people run: small models of them are transformers' in double, and their folders are read."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest
from published import LEAVING_SIZES_OUT, PUBLISHED, Values

from jettison.device.kernels.loading import load_kernels
from jettison.device.model.create import write_random_weights
from jettison.device.model.families import FAMILIES
from jettison.device.model.hf_config import DecoderConfig, parse_config, read_config
from jettison.device.model.jsonfile import JsonObject
from jettison.device.reference import TransformersReference, transformers_available
from jettison.errors import ModelError
from jettison.types import LayerRange

CONTEXT = 64
"""Tokens that are served: longer than windows, shorter than every original context."""
PARTS = (11, 25, 4)
WINDOW = 9
MOST_HEADS, MOST_EXPERTS, MOST_LAYERS = 4, 12, 4
"""Of a small one; Gemma 3's pattern takes seven layers to come round."""
REACHED = {"Qwen2.5-7B with yarn": 131_072}
"""Contexts where YaRN's factor counts, as in vLLM, and transformers keeps to ``max_position_embeddings``."""

needs_transformers = pytest.mark.skipif(not transformers_available(), reason="needs transformers")


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


def parsed(values: dict[str, object]) -> DecoderConfig:
    return parse_config(JsonObject(Path("config.json"), values), CONTEXT)


def text_folder(values: dict[str, object], folder: Path) -> DecoderConfig:
    """Write the text model of a config, which is all of it where it sees no images; both are read alike."""
    config = parsed(values)
    text = values.get("text_config")
    if text is not None:
        values = {**text, "architectures": [config.architecture]}
        assert parsed(values) == config
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    write_random_weights(folder, config, seed=1, dtype="float64", std=0.15)
    return config


@needs_transformers
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_small_one_has_the_log_probabilities_of_transformers(name, tmp_path, new_runner, new_driver):
    config = text_folder(small(PUBLISHED[name]), tmp_path / "model")
    ids = random.Random(5).choices(range(300), k=sum(PARTS))
    wanted = TransformersReference(tmp_path / "model", "float64").logits(ids).log_softmax(-1)
    runner = new_runner(tmp_path / "model", kernels=load_kernels("auto"), num_blocks=32, max_model_len=CONTEXT)
    driver = new_driver([(runner.run, LayerRange(0, config.num_layers))], 32, with_logprobs=True)
    driver.add("a", ids)
    for part in PARTS:
        driver.step({"a": part})
    found = driver.requests["a"].prompt_logprobs + driver.requests["a"].logprobs
    assert len(found) == len(ids)
    for described, row in zip(found, wanted, strict=True):
        likeliest = dict(described.top)
        assert list(likeliest.values()) == pytest.approx(row[list(likeliest)].tolist(), abs=1e-9)


@needs_transformers
@pytest.mark.parametrize("name", {**PUBLISHED, **LEAVING_SIZES_OUT})
def test_all_of_it_is_read(name):
    """At the sizes that it has, or that transformers takes where it leaves them out."""
    from transformers import CONFIG_MAPPING

    values = {**PUBLISHED, **LEAVING_SIZES_OUT}[name]
    config = parsed(values)
    wanted = CONFIG_MAPPING[values["model_type"]](**values).get_text_config()
    assert (config.num_layers, config.hidden_size, config.num_heads) == (
        wanted.num_hidden_layers, wanted.hidden_size, wanted.num_attention_heads,
    )  # fmt: skip
    assert (config.num_kv_heads, config.head_dim) == (
        wanted.num_key_value_heads,
        getattr(wanted, "head_dim", None) or wanted.hidden_size // wanted.num_attention_heads,
    )
    context = REACHED.get(name, wanted.max_position_embeddings)
    assert (config.intermediate_size, config.vocab_size, config.max_position_embeddings) == (
        wanted.intermediate_size, wanted.vocab_size, context,
    )  # fmt: skip
    assert config.ropes[0].theta == _theta(wanted.rope_parameters)


def _theta(parameters: Values) -> float:
    """Of the layers that see all positions."""
    return parameters.get("full_attention", parameters)["rope_theta"]


@needs_transformers
@pytest.mark.parametrize("architecture", [name for name, family in FAMILIES.items() if not family.text_types])
def test_absent_keys_are_those_of_transformers(architecture):
    """What is missing has the value that transformers takes, or is refused by its name."""
    from transformers import CONFIG_MAPPING

    model_type = FAMILIES[architecture].model_type
    always = {"architectures": [architecture]}
    if model_type == "glm4_moe":  # by default its width is no multiple of its heads
        always["head_dim"] = 128
    full = {**CONFIG_MAPPING[model_type]().to_dict(), **always}
    required = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
    sizes = FAMILIES[architecture].text_sizes
    assert not sizes or sizes == {key: full[key] for key in required}
    with pytest.raises(ModelError, match=f"{required[0]} is missing"):
        parsed(always)
    found = parsed({**always, **{key: full[key] for key in required}})
    wanted = parsed(full)
    assert found == wanted


def test_read_from_a_folder_with_images(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Gemma-3-4B"]))
    config = read_config(tmp_path)
    assert (config.architecture, config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (
        "Gemma3ForCausalLM", 8, 4, 256, 262_208,
    )  # fmt: skip
    assert [kind.window for kind in config.layers[:6]] == [1024] * 5 + [0]

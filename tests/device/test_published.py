"""Configs of models that people run: small models of them are transformers' in double, and their folders are read."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from published import PUBLISHED, small

from jettison.device.kernels import load_kernels
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

needs_transformers = pytest.mark.skipif(not transformers_available(), reason="needs transformers")


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_of_it_is_read(name):
    """At the sizes that it has."""
    values = PUBLISHED[name]
    text = values.get("text_config", values)
    config = parsed(values)
    assert (config.num_layers, config.hidden_size) == (text["num_hidden_layers"], text["hidden_size"])
    assert (config.num_heads, config.num_kv_heads) == (
        text.get("num_attention_heads", 8), text.get("num_key_value_heads", 4)
    )  # fmt: skip


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
    if architecture == "Gemma3ForCausalLM":
        required = required[:3]
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

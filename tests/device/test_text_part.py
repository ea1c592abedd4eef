"""The text part of a model with images is served as the text model that it is."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from jettison.device.kernels.loading import load_kernels
from jettison.device.model.hf_config import read_config
from jettison.device.model.samples import NAMED, make_sample
from jettison.errors import ModelError
from jettison.types import LayerRange

NAMINGS = {
    "of old": lambda name: "language_model." + name,
    "of today": lambda name: name.replace("model.", "model.language_model.", 1),
}
IMAGES = {"vision_tower.patch.weight": torch.zeros(3), "multi_modal_projector.weight": torch.zeros(2, 2)}


def output_of(folder, new_runner, new_driver) -> list[int]:
    runner = new_runner(folder, kernels=load_kernels("auto"), num_blocks=64)
    driver = new_driver([(runner.run, LayerRange(0, 4))], 64)
    driver.add("a", random.Random(3).choices(range(256), k=20))
    driver.step({"a": 20})
    driver.decode(["a"], 8)
    return driver.requests["a"].output


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize(
    ("text", "architecture", "model_type"),
    [("Gemma 3", "Gemma3ForConditionalGeneration", "gemma3"),
     ("Ministral 3", "Mistral3ForConditionalGeneration", "mistral3"),
     ("Llama 2", "LlavaForConditionalGeneration", "llava"),
     ("Qwen2", "LlavaOnevisionForConditionalGeneration", "llava_onevision"),
     ("Qwen3", "InternVLForConditionalGeneration", "internvl"),
     ("Cohere 2", "AyaVisionForConditionalGeneration", "aya_vision")],
)  # fmt: skip
def test_a_text_part_is_the_text_model(text, architecture, model_type, naming, tmp_path, new_runner, new_driver):
    own, whole = tmp_path / "text", tmp_path / "whole"
    make_sample(NAMED[text], own, 1, dtype="float64")
    shutil.copytree(own, whole)
    values = json.loads((own / "config.json").read_text())
    tied = values.pop("tie_word_embeddings")
    (whole / "config.json").write_text(json.dumps({
        "architectures": [architecture], "model_type": model_type, "text_config": values, "vision_config": {},
        "tie_word_embeddings": tied,
    }))  # fmt: skip
    tensors = load_file(own / "model.safetensors")
    renamed = {NAMINGS[naming](name): tensor for name, tensor in tensors.items()}
    if naming == "of today" and "lm_head.weight" in tensors:
        renamed["lm_head.weight"] = renamed.pop(NAMINGS[naming]("lm_head.weight"), tensors["lm_head.weight"])
    save_file(renamed | IMAGES, whole / "model.safetensors", metadata={"format": "pt"})
    assert output_of(whole, new_runner, new_driver) == output_of(own, new_runner, new_driver)


def test_a_text_part_of_another_kind_is_named(tmp_path):
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "gemma4_text"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="text_config has model_type 'gemma4_text'; its layers share KV"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**values, "text_config": {"model_type": "llama"}}))
    with pytest.raises(ModelError, match="text_config has model_type 'llama'; supported: gemma3_text"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**values, "text_config": None}))
    with pytest.raises(ModelError, match="text_config is missing"):
        read_config(tmp_path)


def test_qwen3_vl_says_what_transformers_says_of_text(tmp_path, new_runner, new_driver):
    """Its rotary embedding turns by three positions, which are the same in a text."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_heads": 2, "depth": 1, "intermediate_size": 32, "out_hidden_size": 64}
    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2],
                                "mrope_interleaved": True},
        },
        vision_config={**sizes, "deepstack_visual_indexes": [0]}, image_token_id=256, video_token_id=257,
        vision_start_token_id=258, vision_end_token_id=259,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(config).double().eval()
    model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["Qwen3VLForConditionalGeneration"]
    prompt = random.Random(3).choices(range(256), k=20)
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)[0, 20:].tolist()
    assert len(set(ids)) > 3 and output_of(tmp_path, new_runner, new_driver) == ids

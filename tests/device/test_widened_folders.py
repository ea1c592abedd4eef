"""A quantized folder is served as the same folder that was widened before: to the bit, also where a shard is read from
it again."""

from __future__ import annotations

import pytest
from answers import answers
from quantizers import WAYS, quantize


def told(folder, new_driver):
    """Tokens and logprobs, and the digest of the weights."""
    requests, identity = answers(folder, new_driver, dtype="float32")
    return {name: (each.output, each.logprobs) for name, each in requests.items()}, identity.summary


@pytest.mark.parametrize(("model", "way"), [*(("llama", way) for way in WAYS), ("qwen2", "gptq"), ("qwen2", "fp8")])
def test_it_says_what_the_widened_folder_says(way, model, tiny_models, new_driver, tmp_path):
    quantize(tiny_models[model], way, tmp_path / "quantized", tmp_path / "widened")
    expected = told(tmp_path / "widened", new_driver)
    assert told(tmp_path / "quantized", new_driver) == expected
    if (model, way) == ("llama", "awq"):
        assert told(tiny_models[model], new_driver)[1] != expected[1], "a model in two formats is two models"

"""A quantized folder is served as the same folder that was widened before: to the bit, also where a shard is read from
it again."""

from __future__ import annotations

import random

import pytest
from quantizers import WAYS, quantize

from jettison.device.spec import DeviceSpec
from jettison.device.worker import make_device
from jettison.types import layer_shard

PROMPTS = {name: random.Random(i).choices(range(256), k=9 + 7 * i) for i, name in enumerate("abc")}


def told(folder, new_driver):
    """Tokens and logprobs, and the digest of the weights."""
    worker = make_device(DeviceSpec(
        model_dir=folder, dtype="float32", budget_bytes=4 << 20, block_size=4, max_num_tokens=64, max_num_seqs=4,
        page_bytes=4096))  # fmt: skip
    worker.start()
    try:
        driver = new_driver([(worker.run_step, worker.shape.all_layers)], 72, with_logprobs=True)
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt)
        driver.step({name: len(prompt) for name, prompt in PROMPTS.items()})
        worker.load_shard_from_disk(layer_shard(1))  # as a restore may: ModelError unless it is what was read first
        driver.decode([*PROMPTS], 3)
        return {name: (each.output, each.logprobs) for name, each in driver.requests.items()}, worker._identity.summary
    finally:
        worker.close()


@pytest.mark.parametrize(("model", "way"), [*(("llama", way) for way in WAYS), ("qwen2", "gptq"), ("qwen2", "fp8")])
def test_it_says_what_the_widened_folder_says(way, model, tiny_models, new_driver, tmp_path):
    quantize(tiny_models[model], way, tmp_path / "quantized", tmp_path / "widened")
    expected = told(tmp_path / "widened", new_driver)
    assert told(tmp_path / "quantized", new_driver) == expected
    if (model, way) == ("llama", "awq"):
        assert told(tiny_models[model], new_driver)[1] != expected[1], "a model in two formats is two models"

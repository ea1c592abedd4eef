"""What one device answers of a model folder, for tests of folders that are to say the same."""

from __future__ import annotations

import random

from jettison.device.spec import DeviceSpec
from jettison.device.worker import make_device
from jettison.types import layer_shard

PROMPTS = {name: random.Random(i).choices(range(256), k=9 + 7 * i) for i, name in enumerate("abc")}


def answers(folder, new_driver, prompts=PROMPTS, *, dtype="float64", kernels="auto", config=None):
    """The requests with tokens and logprobs, and the identity of the weights; a shard is read again on the way."""
    worker = make_device(DeviceSpec(
        model_dir=folder, dtype=dtype, budget_bytes=4 << 20, block_size=4, max_num_tokens=64, max_num_seqs=4,
        page_bytes=4096, kernels=kernels, config=config))  # fmt: skip
    worker.start()
    try:
        driver = new_driver([(worker.run_step, worker.shape.all_layers)], 72, with_logprobs=True)
        for name, prompt in prompts.items():
            driver.add(name, prompt)
        driver.step({name: len(prompt) for name, prompt in prompts.items()})
        worker.load_shard_from_disk(layer_shard(1))  # as a restore may: ModelError unless it is what was read first
        driver.decode([*prompts], 3)
        return driver.requests, worker._identity
    finally:
        worker.close()

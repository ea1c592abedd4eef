"""A worker's device on a card, through its port alone: the CPU's tokens through drops, stages and copies."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("msgspec", reason="msgspec is not installed")

from jettison.device.spec import DeviceSpec
from jettison.device.worker import DeviceWorker, make_device
from jettison.memory.layout import LayoutSpec
from jettison.memory.pagemap import shard_owner
from jettison.types import LayerRange

pytestmark = [
    pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]  # fmt: skip

PAGE = 2 << 20
ALL, LOW, HIGH = LayerRange(0, 4), LayerRange(0, 1), LayerRange(1, 4)
NUM_BLOCKS = 72
PROMPTS = {name: random.Random(i).choices(range(256), k=9 + 7 * i) for i, name in enumerate("abc")}


@pytest.fixture
def start(tiny_models):
    """Starts devices of the qwen2 model in float32, on the card or (``back_end="host"``) on the CPU."""
    workers = []

    def make(**changes) -> DeviceWorker:
        options = {
            "model_dir": tiny_models["qwen2"], "dtype": "float32", "budget_bytes": 24 * PAGE, "block_size": 4,
            "max_num_tokens": 64, "max_num_seqs": 8, "page_bytes": PAGE, "back_end": "cuda", **changes,
        }  # fmt: skip
        workers.append(make_device(DeviceSpec(**options)))
        workers[-1].start()
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture
def expected(start, new_driver) -> dict[str, list[int]]:
    """What the CPU says."""
    return run(new_driver, [(start(back_end="host", kernels="torch").run_step, ALL)])


def run(new_driver, stages, **more) -> dict[str, list[int]]:
    """Prefill in uneven chunks, then decode together."""
    driver = new_driver(stages, NUM_BLOCKS, **more)
    for name, token_ids in PROMPTS.items():
        driver.add(name, token_ids)
    driver.step({"a": 9, "b": 5})
    driver.step({"a": 1, "b": 11, "c": 3})
    driver.step({"a": 1, "b": 1, "c": 20})
    driver.decode(["c", "a", "b"], 20)
    return {name: request.output for name, request in driver.requests.items()}


def change_layout(worker: DeviceWorker, layers: LayerRange) -> frozenset[str]:
    """Returns what is missing."""
    spec = LayoutSpec(worker.shape.shards_for(layers), layers)
    return worker.apply_layout(spec, 0, worker.offer_layout(spec, 0).version, []).missing_shards


def test_tokens_are_the_cpus(start, new_driver, expected) -> None:
    assert start().kernels_name == "cuda-invariant"
    for kernels in ("cuda", "cuda-invariant"):
        assert run(new_driver, [(start(kernels=kernels).run_step, ALL)]) == expected


def test_two_stages_on_one_card_say_the_same(start, new_driver, expected) -> None:
    low, high = start(layers=LOW), start(layers=HIGH)

    def wire(hidden, stage):
        return high.hidden_from_bytes(low.hidden_to_bytes(hidden), hidden.shape[0])

    assert run(new_driver, [(low.run_step, LOW), (high.run_step, HIGH)], wire=wire) == expected


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_graphs_replay_after_twenty_remaps(start, new_driver, expected, is_overwritten: bool) -> None:
    worker = start()
    assert run(new_driver, [(worker.run_step, ALL)]) == expected
    graphs = {key[:3] for key in worker._runner._graphs._graphs}
    buckets = (1, 64, 16, 32, 4)  # of the start; of chunks of 14, 15 and 22 tokens together; of decodes of three rows
    assert graphs == {(layer, layer == 0, bucket) for layer in ALL.layers() for bucket in buckets}
    addresses = {shard: worker._memory._arenas[shard_owner(shard)].address for shard in worker.shape.all_shards}
    for _ in range(20):
        assert change_layout(worker, LOW) == frozenset()
        if is_overwritten:
            unit = len(LOW) * worker.kv_block_bytes
            for first in range(0, worker.capacity_blocks, 4096):
                ids = list(range(first, min(first + 4096, worker.capacity_blocks)))
                worker.kv_scatter(LOW, ids, np.full(len(ids) * unit, 0xFF, dtype=np.uint8))
        missing = change_layout(worker, ALL)
        assert bool(missing) == is_overwritten
        for shard in sorted(missing):
            worker.load_shard_from_disk(shard)
        assert run(new_driver, [(worker.run_step, ALL)]) == expected
    assert graphs == {key[:3] for key in worker._runner._graphs._graphs}
    assert addresses == {shard: worker._memory._slabs[shard].data_ptr() for shard in addresses}
    worker._memory.check()


def test_blocks_go_to_the_host_and_back_between_steps(start, new_driver, expected) -> None:
    worker = start(host_bytes=8 << 20)
    driver = new_driver([(worker.run_step, ALL)], NUM_BLOCKS)
    driver.add("a", PROMPTS["a"])
    driver.step({"a": 9})
    driver.decode(["a"], 5)
    request = driver.requests["a"]
    old, slots = request.tables[0], list(range(len(request.tables[0])))
    new = [NUM_BLOCKS + slot for slot in slots]
    worker.copy_to_host(ALL, old, slots)
    unit = worker.kv_block_bytes
    worker.kv_scatter(ALL, old, np.full(len(ALL) * len(old) * unit, 0xFF, dtype=np.uint8))
    worker.copy_from_host(ALL, new, slots)
    request.tables[0] = new
    driver.decode(["a"], 10)
    assert request.output == expected["a"][: len(request.output)]

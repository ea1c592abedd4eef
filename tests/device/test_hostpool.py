"""KV blocks to host slots and back: bytes, layers, bounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from jettison.device.devicebytes_host import HostBytes
from jettison.device.hostpool import HostBuffers
from jettison.device.memory import DeviceMemory
from jettison.device.pages_host import PagePool
from jettison.memory.layout import LayoutSpec
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, layer_shard

PAGE, BLOCK_SIZE = 4096, 4
SHARDS = {layer_shard(i): 2 * PAGE for i in range(4)} | {EMBED_SHARD: PAGE, HEAD_SHARD: PAGE}
SHAPE = ModelShape(4, 64, 4, 2, 24, 64, 64, 4, False, SHARDS)
BLOCK_BYTES = SHAPE.block_bytes_per_layer(BLOCK_SIZE)


@pytest.fixture
def memory() -> Iterator[DeviceMemory]:
    device = DeviceMemory(
        PagePool(60 * PAGE, PAGE), HostBytes(), budget_bytes=60 * PAGE, shape=SHAPE, dtype=torch.float32,
        block_size=BLOCK_SIZE, workspace_bytes=PAGE,
    )
    device.start(LayoutSpec(SHAPE.all_shards, SHAPE.all_layers))
    for layer in range(4):
        device.kv_arena(layer)[: device.capacity_blocks].normal_()
    yield device
    device.close()


def test_what_went_out_comes_back_in_any_block(memory: DeviceMemory) -> None:
    host = HostBuffers(8, 4, BLOCK_BYTES)
    before = [memory.kv_arena(layer)[[3, 1]].clone() for layer in range(4)]
    assert host.copy_out(memory, SHAPE.all_layers, [3, 1], [7, 0]) == 4 * 2 * BLOCK_BYTES
    for layer in range(4):
        memory.kv_arena(layer)[:6] = 0
    host.copy_in(memory, SHAPE.all_layers, [2, 5], [7, 0])
    for layer in range(4):
        assert torch.equal(memory.kv_arena(layer)[[2, 5]], before[layer])
        assert not memory.kv_arena(layer)[[0, 1, 3, 4]].any()


def test_only_the_layers_asked_for_are_touched(memory: DeviceMemory) -> None:
    host = HostBuffers(2, 4, BLOCK_BYTES)
    host.copy_out(memory, SHAPE.all_layers, [0], [1])
    before = [memory.kv_arena(layer)[0].clone() for layer in range(4)]
    for layer in range(4):
        memory.kv_arena(layer)[0] = 0
    host.copy_in(memory, LayerRange(1, 3), [0], [1])
    assert [torch.equal(memory.kv_arena(layer)[0], before[layer]) for layer in range(4)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("blocks", "slots", "layers", "error"),
    [([0], [2], (0, 4), IndexError), ([0], [-1], (0, 4), IndexError), ([0, 1], [0], (0, 4), ValueError),
     ([10_000], [0], (0, 4), IndexError), ([0], [0], (0, 5), IndexError)],
)
def test_what_is_not_there_is_refused(
    memory: DeviceMemory, blocks: list[int], slots: list[int], layers: tuple[int, int], error: type[Exception]
) -> None:
    with pytest.raises(error):
        HostBuffers(2, 4, BLOCK_BYTES).copy_out(memory, LayerRange(*layers), blocks, slots)


def test_memory_is_taken_at_the_first_copy(memory: DeviceMemory) -> None:
    host = HostBuffers(1 << 40, 4, BLOCK_BYTES)
    assert host.copy_out(memory, SHAPE.all_layers, [], []) == 0


def test_a_copy_beside_steps_copies_the_same_and_nothing_before_it_runs(memory: DeviceMemory) -> None:
    host = HostBuffers(8, 4, BLOCK_BYTES)
    before = [memory.kv_arena(layer)[[3, 1]].clone() for layer in range(1, 4)]
    out = host.beside(memory, LayerRange(1, 4), [3, 1], [7, 0], to_host=True)
    out.run()
    assert out.num_bytes == 3 * 2 * BLOCK_BYTES and out.is_complete
    for layer in range(4):
        memory.kv_arena(layer)[:6] = 0
    back = host.beside(memory, LayerRange(1, 4), [2, 5], [7, 0], to_host=False)
    assert not any(memory.kv_arena(layer)[:6].any() for layer in range(4))
    back.run()
    assert not memory.kv_arena(0)[:6].any()
    for layer, content in zip(range(1, 4), before, strict=True):
        assert torch.equal(memory.kv_arena(layer)[[2, 5]], content)
        assert not memory.kv_arena(layer)[[0, 1, 3, 4]].any()


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize(
    ("blocks", "slots", "layers", "error"),
    [([0], [2], (0, 4), IndexError), ([0, 1], [0], (0, 4), ValueError), ([10_000], [0], (0, 4), IndexError)],
)
def test_a_copy_beside_steps_is_refused_before_it_runs(
    memory: DeviceMemory, blocks: list[int], slots: list[int], layers: tuple[int, int], error: type[Exception],
    to_host: bool,
) -> None:
    with pytest.raises(error):
        HostBuffers(2, 4, BLOCK_BYTES).beside(memory, LayerRange(*layers), blocks, slots, to_host=to_host)


def test_blocks_that_a_copy_will_write_spoil_dropped_shards_from_its_beginning(memory: DeviceMemory) -> None:
    """Pages of dropped layers hold KV now: what a copy may have written is not read as parameters again."""
    kept = LayerRange(0, 2)
    memory.apply(LayoutSpec(SHAPE.shards_for(kept), kept), 0, memory.version, [])
    full = LayoutSpec(SHAPE.all_shards, SHAPE.all_layers)
    high = memory.capacity_blocks - 1
    host = HostBuffers(2, 4, BLOCK_BYTES)
    host.beside(memory, kept, [high], [0], to_host=True)
    assert layer_shard(3) in memory.apply(full, 0, memory.version, []).intact_shards
    memory.apply(LayoutSpec(SHAPE.shards_for(kept), kept), 0, memory.version, [])
    host.beside(memory, kept, [high], [0], to_host=False)
    assert memory.apply(full, 0, memory.version, []).missing_shards

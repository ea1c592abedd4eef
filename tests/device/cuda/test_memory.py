"""A device's memory on a card: prepared drops call nothing, sleep gives bytes back, failures leave no trace."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from fakecuda import FakeBindings, PoisonedPool

from jettison.device.cuda.pages import PagePool
from jettison.device.devicebytes_host import HostBytes
from jettison.device.memory import DeviceMemory
from jettison.device.pages_host import PagePool as HostPagePool
from jettison.errors import BudgetError, MappingError
from jettison.memory.layout import LayoutSpec
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, layer_shard

PAGE = 4096
SHARDS = {layer_shard(i): 5 * PAGE - 10 for i in range(4)} | {EMBED_SHARD: PAGE, HEAD_SHARD: 2 * PAGE}
SHAPE = ModelShape(4, 64, 4, 2, 16, 64, 64, 2, False, SHARDS)
BLOCK_BYTES = SHAPE.block_bytes_per_layer(4)
FULL = LayoutSpec(SHAPE.all_shards, SHAPE.all_layers)
LOW, HIGH = LayerRange(0, 2), LayerRange(2, 4)
DROPS = {"low": LayoutSpec(SHAPE.shards_for(LOW), LOW), "high": LayoutSpec(SHAPE.shards_for(HIGH), HIGH)}
NUM_PAGES = 60


@pytest.fixture
def fake():
    fake = FakeBindings(100 * PAGE, granularity=PAGE)
    yield fake
    fake.close()


def open_memory(fake: FakeBindings, num_pages: int = NUM_PAGES, first: LayoutSpec | None = None) -> DeviceMemory:
    budget_bytes = num_pages * PAGE + 7
    memory = DeviceMemory(
        PoisonedPool(budget_bytes, PAGE, bindings=fake), HostBytes(), budget_bytes=budget_bytes, shape=SHAPE,
        dtype=torch.bfloat16, block_size=4, workspace_bytes=PAGE,
    )
    memory.start(first)
    return memory


@pytest.fixture
def memory(fake):
    memory = open_memory(fake)
    yield memory
    memory.close()
    assert not fake.size and not fake.reserved


def fill(memory: DeviceMemory) -> None:
    for number, shard in enumerate(SHARDS):
        if memory.is_mapped(shard):
            memory.shard_bytes(shard).fill_(number + 1)


def is_right(memory: DeviceMemory) -> bool:
    return all(
        memory.shard_bytes(shard).eq(number + 1).all() for number, shard in enumerate(SHARDS) if memory.is_mapped(shard)
    )


def mark_blocks(memory: DeviceMemory, layers: LayerRange, num_blocks: int) -> None:
    for layer in layers.layers():
        for block in range(num_blocks):
            memory.kv_arena(layer)[block].fill_(layer * 100 + block)


def has_blocks(memory: DeviceMemory, layers: LayerRange, num_blocks: int) -> bool:
    arenas = {layer: memory.kv_arena(layer) for layer in layers.layers()}
    return all(arenas[i][block].eq(i * 100 + block).all() for i in arenas for block in range(num_blocks))


@pytest.mark.parametrize("half", DROPS)
def test_a_prepared_drop_calls_nothing_and_neither_do_later_cycles(memory, fake, half):
    fill(memory)
    before = memory.capacity_blocks
    mark_blocks(memory, DROPS[half].kv_layers, before)
    version, calls, used = memory.version, memory.report()["map_calls"], fake.used_bytes
    num_prepared = memory.prepare(DROPS[half])
    assert num_prepared > 0 and memory.prepare(DROPS[half]) == 0
    assert (memory.version, memory.capacity_blocks, fake.used_bytes) == (version, before, used)
    assert memory.report()["map_calls"] > calls and is_right(memory)
    memory.check()
    for _ in range(3):
        log = len(fake.log)
        drop = memory.apply(DROPS[half], before, memory.version, [])
        assert drop.num_map_calls == 0 and fake.log[log:] == ["cuCtxSynchronize"], "kernels are waited for"
        assert drop.capacity_blocks > before and has_blocks(memory, DROPS[half].kv_layers, before)
        memory.check()
        back = memory.apply(FULL, before, memory.version, [])
        assert back.num_map_calls == 0 and not back.missing_shards and is_right(memory)
        memory.check()
    assert memory.report()["map_calls_saved"] >= 6 * num_prepared


def test_a_drop_that_was_not_prepared_is_free_the_second_time(memory):
    fill(memory)
    calls = []
    for _ in range(3):
        drop = memory.apply(DROPS["low"], 0, memory.version, [])
        calls += [drop.num_map_calls, memory.apply(FULL, 0, memory.version, []).num_map_calls]
    assert calls[0] > 0 and calls[1:] == [0] * 5 and is_right(memory)


def test_preparing_can_be_done_a_few_pages_at_a_time(memory):
    fill(memory)
    portions = []
    while portions[-1:] != [0]:
        portions.append(memory.prepare(DROPS["low"], max_pages=3))
    assert len(portions) > 3 and max(portions) <= 3
    assert memory.apply(DROPS["low"], 0, memory.version, []).num_map_calls == 0


def test_a_host_s_pages_gain_nothing_by_preparing():
    memory = DeviceMemory(
        HostPagePool(NUM_PAGES * PAGE, PAGE), HostBytes(), budget_bytes=NUM_PAGES * PAGE, shape=SHAPE,
        dtype=torch.bfloat16, block_size=4, workspace_bytes=PAGE,
    )
    memory.start()
    assert memory.prepare(DROPS["low"]) == 0
    memory.close()


def test_sleep_gives_the_card_every_byte_back_and_waking_takes_them_again(memory, fake):
    fill(memory)
    for half in DROPS.values():  # pages are mapped at many addresses
        memory.prepare(half)
        memory.apply(half, 0, memory.version, [])
        memory.apply(FULL, 0, memory.version, [])
    memory.workspace().fill_(9)
    assert fake.used_bytes == memory.held_bytes == NUM_PAGES * PAGE
    memory.apply(LayoutSpec(frozenset(), LayerRange(0, 0)), 0, memory.version, [])
    assert fake.used_bytes == memory.held_bytes == PAGE and memory.workspace().eq(9).all()
    memory.check()
    assert memory.apply(FULL, 0, memory.version, []).missing_shards == SHAPE.all_shards
    assert fake.used_bytes <= NUM_PAGES * PAGE
    fill(memory)
    assert is_right(memory)
    memory.check()


def test_a_sleeper_that_cannot_have_its_memory_back_stays_asleep(memory, fake):
    memory.apply(LayoutSpec(frozenset(), LayerRange(0, 0)), 0, memory.version, [])
    fake.foreign_bytes = 60 * PAGE
    with pytest.raises(MappingError, match="are free"):
        memory.apply(FULL, 0, memory.version, [])
    assert fake.used_bytes == memory.held_bytes == PAGE, "what it got until then is the card's again"
    memory.check()
    assert memory.capacity_blocks == 0
    fake.foreign_bytes = 0
    assert memory.apply(FULL, 0, memory.version, []).capacity_blocks > 0
    memory.check()


def test_a_card_with_too_little_memory_is_refused_and_nothing_is_held(fake):
    with pytest.raises(BudgetError, match="has 409600"):
        open_memory(fake, num_pages=120)
    assert not fake.size and not fake.reserved and fake.contexts == 0


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess", "cuMemUnmap"])
def test_a_remap_that_fails_at_any_call_leaves_everything_as_it_was(fake, call):
    num_failures = 0
    for fail_at in range(200):
        memory = open_memory(fake, first=DROPS["high"])
        fill(memory)
        memory.apply(LayoutSpec(DROPS["low"].shards, LOW), 0, memory.version, [])
        blocks = memory.capacity_blocks
        mark_blocks(memory, LOW, blocks)
        seen = iter(range(1000))
        fake.fail = lambda name: name == call and next(seen) == fail_at  # noqa: B023
        copies = [(blocks - 1, 0), (blocks - 3, 2)]
        try:
            memory.apply(FULL, 5, memory.version, copies)
        except MappingError:
            num_failures += 1
            fake.fail = lambda name: False
            memory.check()
            assert memory.capacity_blocks == blocks and has_blocks(memory, LOW, blocks)
            memory.apply(FULL, 5, memory.version, copies)
        finally:
            fake.fail = lambda name: False
        memory.check()
        for layer in LOW.layers():
            assert memory.kv_arena(layer)[0].eq(layer * 100 + blocks - 1).all()
            assert memory.kv_arena(layer)[2].eq(layer * 100 + blocks - 3).all()
            assert memory.kv_arena(layer)[1].eq(layer * 100 + 1).all()
        memory.close()
        if next(seen) <= fail_at:
            break
    assert num_failures == fail_at > 0, "every call was made to fail once"


ABSENT = ("msgspec", "starlette", "uvicorn", "httptools", "multipart", "aiohttp", "tokenizers", "safetensors", "cuda")


def test_a_card_s_memory_needs_torch_and_numpy_alone():
    """A machine with a GPU has few packages, and no way to fetch more."""
    script = (
        "import sys\n"
        f"for name in {ABSENT!r}: sys.modules[name] = None\n"
        "import jettison.device.cuda.pages, jettison.device.memory, jettison.device.pages\n"
        "import jettison.memory.pagechoice, jettison.memory.blocks, jettison.memory.hostpool\n"
        "third = {name.partition('.')[0] for name in sys.modules} & {'xxhash', 'sortedcontainers', 'scipy', 'yaml'}\n"
        "print(*sorted(third))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


MIB = 1 << 20


def on_card(shape: ModelShape, budget_bytes: int) -> DeviceMemory:
    memory = DeviceMemory(
        PagePool(budget_bytes, 2 * MIB), HostBytes(), budget_bytes=budget_bytes, shape=shape, dtype=torch.bfloat16,
        block_size=16, workspace_bytes=4 * MIB,
    )
    memory.start()
    return memory


@pytest.mark.cuda
@pytest.mark.whole_card
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_card_bytes_are_right_through_cycles_and_sleep_gives_them_back():
    shards = {layer_shard(i): 7 * MIB + 512 for i in range(4)} | {EMBED_SHARD: 3 * MIB, HEAD_SHARD: 5 * MIB}
    shape = ModelShape(4, 64, 4, 8, 128, 64, 64, 2, False, shards)
    full, low = LayoutSpec(shape.all_shards, shape.all_layers), LayerRange(0, 2)
    drop = LayoutSpec(shape.shards_for(low), low)
    torch.zeros(1, device="cuda")
    free_before = torch.cuda.mem_get_info()[0]
    memory = on_card(shape, 128 * MIB)
    for number, shard in enumerate(shards):
        memory.shard_bytes(shard).fill_(number + 1)
    blocks = memory.capacity_blocks
    memory.kv_arena(1)[: blocks - 1].fill_(3)
    assert memory.prepare(drop) > 0
    for _ in range(50):
        dropped = memory.apply(drop, blocks, memory.version, [])
        assert dropped.num_map_calls == 0 and memory.kv_arena(1)[: blocks - 1].eq(3).all()
        assert memory.apply(full, blocks, memory.version, []).num_map_calls == 0
    assert all(memory.shard_bytes(shard).eq(number + 1).all() for number, shard in enumerate(shards))
    memory.check()
    torch.cuda.synchronize()
    held = free_before - torch.cuda.mem_get_info()[0]
    memory.apply(LayoutSpec(frozenset(), LayerRange(0, 0)), 0, memory.version, [])
    given_back = held - (free_before - torch.cuda.mem_get_info()[0])
    assert 120 * MIB <= given_back <= 128 * MIB, "all but the workspace"
    memory.close()
    assert free_before - torch.cuda.mem_get_info()[0] <= 64 * MIB, "but for PyTorch's own kernels"

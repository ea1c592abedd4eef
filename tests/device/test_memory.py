"""A device's memory through drops, restores and failures: bytes, addresses, budget and what the kernel has mapped."""

from __future__ import annotations

import errno
import os
import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fakecuda import FakeBindings, PoisonedPool

from jettison.device.addresses import check_addresses
from jettison.device.devicebytes_host import HostBytes
from jettison.device.memory import DeviceMemory
from jettison.device.pages_host import LinuxSyscalls, PagePool
from jettison.errors import BudgetError, MappingError, NotReadyError, OutOfPagesError, StalePlanError, WorkerLostError
from jettison.memory.layout import LayoutSpec, RetainedKV
from jettison.memory.pagemap import PageSizes
from jettison.memory.pages import plan_layout
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, layer_shard

PAGE = 4096
BLOCK_SIZE = 4
NUM_LAYERS = 4
WORKSPACE = 3 * PAGE + 17

SHARDS = {layer_shard(i): 7 * PAGE - 100 for i in range(NUM_LAYERS)} | {EMBED_SHARD: 2 * PAGE, HEAD_SHARD: 4 * PAGE - 1}
SHAPE = ModelShape(NUM_LAYERS, 64, 4, 2, 24, 64, 64, 4, False, SHARDS)
BLOCK_BYTES = SHAPE.block_bytes_per_layer(BLOCK_SIZE)  # 1536: blocks straddle pages
FULL = LayoutSpec(SHAPE.all_shards, SHAPE.all_layers)
LOW, HIGH = LayerRange(0, 2), LayerRange(2, 4)
DROPPED = LayoutSpec(SHAPE.shards_for(LOW), LOW)
MAPPED_AGAIN = LayoutSpec(SHAPE.all_shards, LOW)


class FailingSyscalls(LinuxSyscalls):
    """Calls with an index in ``fail_at`` fail."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_at: frozenset[int] = frozenset()
        self.num_calls = 0

    def _count(self) -> None:
        self.num_calls += 1
        if self.num_calls - 1 in self.fail_at:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def create(self, name, num_bytes):
        self._count()
        return super().create(name, num_bytes)

    def mmap(self, *args):
        self._count()
        return super().mmap(*args)


def make_memory(num_pages=90, page_bytes=PAGE, make_pool=PagePool) -> DeviceMemory:
    budget_bytes = num_pages * PAGE + 123
    return DeviceMemory(
        make_pool(budget_bytes, page_bytes), HostBytes(), budget_bytes=budget_bytes, shape=SHAPE, dtype=torch.float32,
        block_size=BLOCK_SIZE, workspace_bytes=WORKSPACE,
    )


@pytest.fixture
def on_host():
    memory = make_memory()
    memory.start()
    yield memory
    memory.close()


@pytest.fixture(params=["host", "card"])
def memory(request):
    """On the host's pages, and on those of a fake card that poisons what is not owned (``fakecuda``)."""
    if request.param == "host":
        yield request.getfixturevalue("on_host")
        return
    fake = FakeBindings(100 * PAGE, granularity=PAGE)
    memory = make_memory(make_pool=partial(PoisonedPool, bindings=fake))
    memory.start()
    yield memory
    memory.close()
    assert not fake.size and not fake.reserved and not fake.contexts
    fake.close()


def pattern(key: object, num_bytes: int) -> torch.Tensor:
    """Bytes that no other key has."""
    rng = np.random.default_rng(list(repr(key).encode()))
    return torch.from_numpy(rng.integers(0, 256, num_bytes, dtype=np.uint8))


def fill_shard(memory, shard):
    memory.shard_bytes(shard).copy_(pattern(shard, SHARDS[shard]))


def holds_shard(memory, shard) -> bool:
    return torch.equal(memory.shard_bytes(shard), pattern(shard, SHARDS[shard]))


def write_blocks(memory, layers, names: dict[int, object]) -> None:
    """Content by block id, through the tensor that kernels write to."""
    for layer in layers.layers():
        for block, name in names.items():
            memory.kv_arena(layer)[block].view(-1).view(torch.uint8).copy_(pattern((layer, name), BLOCK_BYTES))
    memory.note_written(max(names, default=-1) + 1)


def expect_blocks(memory, layers, names: dict[int, object]) -> None:
    out = torch.empty(len(layers) * len(names) * BLOCK_BYTES, dtype=torch.uint8)
    assert memory.kv_gather(layers, list(names), out) == out.numel()
    expected = [pattern((layer, name), BLOCK_BYTES) for layer in layers.layers() for name in names.values()]
    assert torch.equal(out, torch.cat(expected) if expected else out)


def change(memory, spec, live_blocks=0, copies=()):
    result = memory.apply(spec, live_blocks, memory.offer(spec, live_blocks).version, copies)
    expect_sound(memory)
    assert result.version == memory.version and result.capacity_blocks == memory.capacity_blocks
    return result


def expect_sound(memory) -> None:
    """Budget and conservation, and the kernel maps what the page map says: no more, no less."""
    memory.check()
    report = memory.report()
    uses = ("parameter_bytes", "kv_bytes", "workspace_bytes", "free_bytes")
    assert sum(report[use] for use in uses) == report["budget_bytes"] and min(report.values()) >= 0
    if not isinstance(memory._pool, PagePool):
        return  # a fake card's check has compared them
    planned = {
        (memory._arenas[owner].address + (e.position + i) * PAGE, e.page + i)
        for owner, extents in memory._map.contents.items()
        for e in extents
        for i in range(e.num_pages)
    }
    assert planned == kernel_view()


def kernel_view() -> set[tuple[int, int]]:
    """(address, page) of every mapped page, from the kernel."""
    mapped = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = re.match(r"(\w+)-(\w+) rw\S+ (\w+) .*memfd:jettison-pages", line)
        if match:
            start, end, offset = (int(field, 16) for field in match.groups())
            mapped |= {(address, (offset + address - start) // PAGE) for address in range(start, end, PAGE)}
    return mapped


# --- start -----------------------------------------------------------------------------------------------------------


def test_start_maps_everything_within_the_budget(memory):
    expect_sound(memory)
    report = memory.report()
    assert report["budget_bytes"] == 90 * PAGE + 123
    assert report["parameter_bytes"] == (4 * 7 + 2 + 4) * PAGE and report["dropped_parameter_bytes"] == 0
    assert report["workspace_bytes"] == 4 * PAGE
    assert memory.capacity_blocks == 13 * PAGE // BLOCK_BYTES == 34
    assert memory.kv_arena(0).shape == (90 * PAGE // BLOCK_BYTES, 2, 2, BLOCK_SIZE, 24)
    assert memory.kv_arena(0).dtype == torch.float32 and memory.kv_arena(0).is_contiguous()
    assert memory.workspace().shape == (WORKSPACE,)
    memory.workspace().fill_(1)
    for shard in SHARDS:
        assert memory.is_mapped(shard) and memory.shard_bytes(shard).shape == (SHARDS[shard],)
        fill_shard(memory, shard)
    write_blocks(memory, SHAPE.all_layers, {0: "a", 33: "b"})
    expect_blocks(memory, SHAPE.all_layers, {0: "a", 33: "b"})
    assert all(holds_shard(memory, shard) for shard in SHARDS) and memory.workspace().eq(1).all()


def test_start_with_one_stage_only():
    memory = make_memory()
    memory.start(DROPPED)
    assert not memory.is_mapped(HEAD_SHARD) and memory.is_mapped(EMBED_SHARD)
    assert memory.report()["dropped_parameter_bytes"] == (2 * 7 + 4) * PAGE
    expect_sound(memory)
    assert change(memory, FULL).missing_shards == SHAPE.all_shards - DROPPED.shards
    memory.close()


def test_a_small_budget_says_how_many_bytes_are_needed():
    with pytest.raises(BudgetError) as refusal:
        make_memory(num_pages=20).start()
    needed = int(re.search(r"(\d+) bytes are needed", str(refusal.value))[1])
    assert str(20 * PAGE + 123) in str(refusal.value)
    exact = make_memory(num_pages=needed // PAGE)
    exact.start()
    assert exact.capacity_blocks >= 4
    exact.close()
    with pytest.raises(BudgetError):
        make_memory(num_pages=needed // PAGE - 1).start()


@pytest.mark.parametrize("budget_bytes", [1 << 60, 1 << 80])
def test_a_budget_that_has_no_addresses_is_refused_with_its_size(budget_bytes):
    before = kernel_view()
    with pytest.raises(BudgetError, match=rf"no addresses for a memory budget of {budget_bytes} bytes"):
        check_addresses(PagePool(budget_bytes, PAGE), WORKSPACE, SHAPE, PageSizes.of(SHAPE, BLOCK_SIZE, PAGE))
    assert kernel_view() == before
    check_addresses(PagePool(1 << 30, PAGE), WORKSPACE, SHAPE, PageSizes.of(SHAPE, BLOCK_SIZE, PAGE))


def test_start_and_close_are_idempotent():
    memory = make_memory()
    memory.close()
    for _ in range(2):
        memory.start()
        memory.start()
        assert memory.capacity_blocks == 34
        memory.close()
        memory.close()
        assert kernel_view() == set() and memory.capacity_blocks == 0
        with pytest.raises(NotReadyError):
            memory.workspace()
        with pytest.raises(NotReadyError):
            memory.shard_bytes(EMBED_SHARD)
        with pytest.raises(NotReadyError):
            memory.offer(FULL, 0)


# --- drop and restore ------------------------------------------------------------------------------------------------


def test_a_drop_grows_kv_and_disturbs_no_block(memory):
    names = {0: "a", 5: "b", 33: "c"}
    write_blocks(memory, LOW, names)
    fill_shard(memory, layer_shard(1))
    offer = memory.offer(DROPPED, memory.capacity_blocks)
    assert memory.capacity_blocks == 34, "an offer changes nothing"
    result = change(memory, DROPPED, 34)
    assert (result.capacity_blocks, offer.evacuate_from_block) == (offer.capacity_blocks, offer.capacity_blocks)
    assert result.capacity_blocks == (13 * 4 + 18) // 2 * PAGE // BLOCK_BYTES
    assert result.bytes_to_kv == 18 * PAGE and result.num_map_calls > 0 and result.duration_ns > 0
    assert holds_shard(memory, layer_shard(1)) and not memory.is_mapped(layer_shard(2))
    with pytest.raises(NotReadyError, match="layer:2"):
        memory.shard_bytes(layer_shard(2))
    write_blocks(memory, LOW, {result.capacity_blocks - 1: "top"})
    expect_blocks(memory, LOW, names | {result.capacity_blocks - 1: "top"})


def test_untouched_shards_come_back_by_mapping_alone(memory):
    for shard in SHARDS:
        fill_shard(memory, shard)
    gone = FULL.shards - DROPPED.shards
    change(memory, DROPPED, 34)
    write_blocks(memory, LOW, {33: "below the shards' pages"})
    result = change(memory, MAPPED_AGAIN, 34)
    assert result.intact_shards == gone and not result.missing_shards
    assert all(holds_shard(memory, shard) for shard in SHARDS)
    expect_blocks(memory, LOW, {33: "below the shards' pages"})
    assert change(memory, FULL, 34).capacity_blocks == 34


@pytest.mark.parametrize("writer", ["note", "scatter", "copy", "other shard"])
def test_a_written_shard_is_never_called_intact(memory, writer):
    for shard in SHARDS:
        fill_shard(memory, shard)
    top = change(memory, DROPPED, 34).capacity_blocks - 1
    if writer == "note":
        write_blocks(memory, LOW, {top: "x"})
    elif writer == "scatter":
        memory.kv_scatter(LayerRange(1, 2), [top], pattern("x", BLOCK_BYTES))
    elif writer == "copy":
        change(memory, DROPPED, 34, [(0, top)])
    else:
        change(memory, LayoutSpec(frozenset({layer_shard(2)}), LOW), 34)
        change(memory, LayoutSpec(FULL.shards - {layer_shard(3)}, LOW), 0)
        fill_shard(memory, HEAD_SHARD)
    result = change(memory, FULL, 0)
    changed = {shard for shard in result.intact_shards if not holds_shard(memory, shard)}
    assert not changed
    if writer != "other shard":
        assert result.missing_shards


@pytest.mark.parametrize("seed", range(6))
def test_intact_is_the_truth_after_any_moves(memory, seed):
    """What is called intact has all its bytes, whatever was dropped, written and mapped in between."""
    rng = random.Random(seed)
    for shard in SHARDS:
        fill_shard(memory, shard)
    num_intact = 0
    for _ in range(25):
        lo, hi = sorted(rng.sample(range(NUM_LAYERS + 1), 2))
        layers = LayerRange(lo, hi)
        shards = frozenset(rng.sample(sorted(SHARDS), rng.randrange(len(SHARDS) + 1)))
        spec = rng.choice([FULL, LayoutSpec(SHAPE.shards_for(layers), layers), LayoutSpec(shards, layers)])
        result = change(memory, spec, rng.choice([0, 10, memory.capacity_blocks]))
        num_intact += len(result.intact_shards)
        for shard in result.intact_shards:
            assert holds_shard(memory, shard)
        for shard in result.missing_shards:
            fill_shard(memory, shard)
        assert all(holds_shard(memory, shard) for shard in spec.shards)
        if rng.random() < 0.6:
            blocks = rng.sample(range(memory.capacity_blocks), 2)
            if rng.random() < 0.5:
                write_blocks(memory, spec.kv_layers, dict.fromkeys(blocks, "x"))
            else:
                data = pattern("y", len(spec.kv_layers) * 2 * BLOCK_BYTES)
                memory.kv_scatter(spec.kv_layers, blocks, data)
    assert num_intact > 0


def test_an_offer_is_planned_anew_only_where_something_has_changed_since(memory, monkeypatch):
    plans = []
    monkeypatch.setattr("jettison.device.memory.plan_layout", lambda *given: plans.append(given) or plan_layout(*given))
    memory.apply(DROPPED, 0, memory.offer(DROPPED, 0).version, [])
    assert len(plans) == 1
    offer = memory.offer(FULL, 0)
    memory.note_written(memory.capacity_blocks)
    assert memory.apply(FULL, 0, offer.version, []).missing_shards and len(plans) == 3, "shards were overwritten"


def test_a_shrink_moves_live_blocks_down_first(memory):
    top = change(memory, DROPPED, 34).capacity_blocks
    names = {3: "low", top - 1: "u", top - 2: "v", top - 9: "w"}
    write_blocks(memory, LOW, names)
    offer = memory.offer(FULL, 4)
    assert offer.evacuate_from_block == offer.capacity_blocks == 34
    change(memory, FULL, 4, [(top - 1, 0), (top - 2, 33), (top - 9, 20)])
    expect_blocks(memory, LOW, {3: "low", 0: "u", 33: "v", 20: "w"})


def test_neighbours_that_move_together_arrive_in_order(memory):
    top = change(memory, DROPPED, 34).capacity_blocks
    names = {top - 6 + i: i for i in range(6)}
    write_blocks(memory, LOW, names)
    change(memory, FULL, 6, [(top - 6 + i, 4 + i) for i in range(6)])
    expect_blocks(memory, LOW, {4 + i: i for i in range(6)})


@pytest.mark.parametrize(
    "copies", [[(50, 3), (51, 3)], [(50, 3), (3, 4)], [(50, 34)], [(999, 3)], [(-1, 3)], [(50, -1)]]
)
def test_copies_out_of_bounds_are_refused(memory, copies):
    change(memory, DROPPED, 34)
    write_blocks(memory, LOW, {3: "x"})
    with pytest.raises(ValueError):
        memory.apply(FULL, 0, memory.version, copies)
    expect_sound(memory)
    expect_blocks(memory, LOW, {3: "x"})


def test_a_device_that_does_not_come_to_rest_has_failed_for_good(memory, monkeypatch):
    def never():
        raise MappingError("the card has failed")

    offer = memory.offer(DROPPED, 34)
    with monkeypatch.context() as patch:
        patch.setattr(memory._pool, "wait_idle", never)
        with pytest.raises(WorkerLostError, match="does not come to rest"):
            memory.apply(DROPPED, 34, offer.version, [])


def test_stale_and_impossible_layouts_are_refused(memory):
    offer = memory.offer(DROPPED, 34)
    change(memory, DROPPED, 34)
    with pytest.raises(StalePlanError, match="version"):
        memory.apply(DROPPED, 34, offer.version, [])
    with pytest.raises(StalePlanError, match="retained"):
        memory.offer(LayoutSpec(DROPPED.shards, LOW, (RetainedKV(HIGH, (0,)),)), 0)
    whole = RetainedKV(LOW, tuple(range(memory.capacity_blocks)))
    with pytest.raises(OutOfPagesError):
        memory.apply(LayoutSpec(FULL.shards, HIGH, (whole,)), 0, memory.version, [])
    expect_sound(memory)


def test_addresses_stay_over_a_thousand_cycles(memory):
    views = {shard: memory.shard_bytes(shard) for shard in SHARDS}
    arenas = [memory.kv_arena(layer) for layer in range(NUM_LAYERS)]
    addresses = [t.data_ptr() for t in [*views.values(), *arenas, memory.workspace()]]
    for shard in SHARDS:
        fill_shard(memory, shard)
    write_blocks(memory, LOW, {0: "stays", 33: "too"})
    calls = set()
    for cycle in range(1000 if isinstance(memory._pool, PagePool) else 100):  # repainting a fake card takes its time
        stage = DROPPED if cycle % 2 else LayoutSpec(DROPPED.shards - {EMBED_SHARD}, LOW)
        down = memory.apply(stage, 34, memory.version, [])
        up = memory.apply(FULL, 34, memory.version, [])
        assert not up.missing_shards and up.capacity_blocks == 34
        calls.add((down.num_map_calls, up.num_map_calls))
    assert addresses == [t.data_ptr() for t in [*views.values(), *arenas, memory.workspace()]]
    assert len(calls) <= 4, "as many map calls at the end as at the beginning"
    expect_sound(memory)
    assert all(torch.equal(views[shard], pattern(shard, SHARDS[shard])) for shard in SHARDS)
    expect_blocks(memory, LOW, {0: "stays", 33: "too"})


# --- retained KV and exchange ----------------------------------------------------------------------------------------


def test_retained_kv_stays_readable_until_given_up(memory):
    names = {1: "a", 7: "b", 8: "c", 30: "d"}
    write_blocks(memory, SHAPE.all_layers, names)
    spec = LayoutSpec(DROPPED.shards, LOW, (RetainedKV(HIGH, tuple(names)),))
    with_retained = change(memory, spec, 34)
    write_blocks(memory, LOW, {with_retained.capacity_blocks - 1: "new"})
    expect_blocks(memory, HIGH, names)
    expect_blocks(memory, LOW, names)
    with pytest.raises(IndexError):
        memory.kv_gather(HIGH, [15], torch.empty(2 * BLOCK_BYTES, dtype=torch.uint8))
    fewer = change(memory, LayoutSpec(DROPPED.shards, LOW, (RetainedKV(HIGH, (7,)),)), with_retained.capacity_blocks)
    expect_blocks(memory, HIGH, {7: "b"})
    none = change(memory, DROPPED, fewer.capacity_blocks)
    assert with_retained.capacity_blocks < fewer.capacity_blocks < none.capacity_blocks
    assert fewer.bytes_to_kv > 0 and none.bytes_to_kv > 0
    with pytest.raises(IndexError):
        memory.kv_gather(HIGH, [7], torch.empty(2 * BLOCK_BYTES, dtype=torch.uint8))
    expect_blocks(memory, LOW, names | {with_retained.capacity_blocks - 1: "new"})


def test_a_drop_taken_back_has_all_retained_kv(memory):
    names = {1: "a", 7: "b", 33: "d"}
    for shard in SHARDS:
        fill_shard(memory, shard)
    write_blocks(memory, SHAPE.all_layers, names)
    change(memory, LayoutSpec(DROPPED.shards, LOW, (RetainedKV(HIGH, tuple(names)),)), 34)
    assert not change(memory, FULL, 34).missing_shards
    expect_blocks(memory, SHAPE.all_layers, names)
    assert all(holds_shard(memory, shard) for shard in SHARDS)


def test_retained_blocks_move_with_the_others_when_their_layer_comes_back(memory):
    """Arenas with holes are filled with pages that may hold blocks still to be copied."""
    names = {i: f"block {i}" for i in range(20, 34)}
    write_blocks(memory, SHAPE.all_layers, names)
    change(memory, LayoutSpec(DROPPED.shards, LOW, (RetainedKV(HIGH, tuple(names)),)), 34)
    change(memory, FULL, 14, [(block, block - 20) for block in names])
    expect_blocks(memory, SHAPE.all_layers, {block - 20: name for block, name in names.items()})


@pytest.mark.parametrize("seed", range(8))
def test_blocks_arrive_even_where_pages_change_places_between_arenas(memory, seed):
    """Retained pages above the new line go to fill holes of the other arenas, before their bytes were copied."""
    change(memory, LayoutSpec(SHAPE.shards_for(HIGH), HIGH), 0)
    names = {i: f"block {i}" for i in range(34, 48)}
    write_blocks(memory, HIGH, names)
    change(memory, LayoutSpec(DROPPED.shards, LOW, (RetainedKV(HIGH, tuple(names)),)), 0)
    assert memory.capacity_blocks > max(names)
    write_blocks(memory, LOW, names)
    targets = random.Random(seed).sample(range(34), len(names))
    change(memory, FULL, 0, list(zip(names, targets)))
    expect_blocks(memory, SHAPE.all_layers, dict(zip(targets, names.values())))


def test_scatter_is_the_inverse_of_gather(memory):
    data = pattern("payload", 2 * 3 * BLOCK_BYTES)
    memory.kv_scatter(LayerRange(1, 3), [5, 0, 33], data.numpy())
    out = np.zeros(data.numel() + 10, dtype=np.uint8)
    assert memory.kv_gather(LayerRange(1, 3), np.array([5, 0, 33]), out) == data.numel()
    assert torch.equal(torch.from_numpy(out[: data.numel()]), data)
    block = memory.kv_arena(1)[5].reshape(-1).view(torch.uint8)
    assert torch.equal(block, data[:BLOCK_BYTES])
    assert memory.kv_gather(LayerRange(1, 3), [], out) == 0
    memory.kv_scatter(LayerRange(1, 3), [], np.zeros(0, dtype=np.uint8))


def test_blocks_that_are_not_there_are_refused_and_not_touched(memory):
    out = torch.empty(8 * BLOCK_BYTES, dtype=torch.uint8)
    for layers, blocks in [(LOW, [34]), (LOW, [-1]), (LayerRange(3, 5), [0]), (LOW, [0, 10**9])]:
        with pytest.raises(IndexError):
            memory.kv_gather(layers, blocks, out)
        with pytest.raises(IndexError):
            memory.kv_scatter(layers, blocks, out[: len(layers) * len(blocks) * BLOCK_BYTES])
    with pytest.raises(ValueError):
        memory.kv_gather(LOW, [0, 1], out[: 4 * BLOCK_BYTES - 1])
    with pytest.raises(ValueError):
        memory.kv_scatter(LOW, [0], out[: 2 * BLOCK_BYTES + 1])


# --- failures --------------------------------------------------------------------------------------------------------

RETAINED = {2: "a", 9: "b", 31: "c"}
WAYS = {
    "drop": (FULL, DROPPED, 34, []),
    "drop and retain": (FULL, LayoutSpec(DROPPED.shards, LOW, (RetainedKV(HIGH, tuple(RETAINED)),)), 34, []),
    "map again": (DROPPED, MAPPED_AGAIN, 10, [(60, 5)]),
    "restore": (DROPPED, FULL, 10, [(60, 5), (61, 6), (50, 33)]),
}


def snapshot(memory):
    """Everything a failure must leave: map, mappings, report, and the bytes of all that is mapped."""
    shards = {shard: memory.shard_bytes(shard).clone() for shard in sorted(memory._mapped)}
    layers = memory._map.kv_layers
    kv = torch.stack([memory.kv_arena(layer)[: memory.capacity_blocks] for layer in layers.layers()]).clone()
    state = (dict(memory._map.contents), dict(memory._map.homes), memory.version, memory.capacity_blocks)
    report = {use: number for use, number in memory.report().items() if use.endswith("_bytes")}
    return state, report, kernel_view(), shards, kv, memory.workspace().clone()


def expect_same(before, after):
    assert before[:3] == after[:3]
    assert before[3].keys() == after[3].keys()
    assert all(torch.equal(before[3][shard], after[3][shard]) for shard in before[3])
    assert torch.equal(before[4].view(torch.uint8), after[4].view(torch.uint8)) and torch.equal(before[5], after[5])


@pytest.mark.parametrize("way", WAYS)
def test_a_remap_that_fails_at_any_call_leaves_everything_as_it_was(way):
    origin, target, live_blocks, copies = WAYS[way]
    syscalls = FailingSyscalls()
    memory = make_memory(make_pool=partial(PagePool, syscalls=syscalls))
    memory.start()
    memory.workspace().fill_(3)
    for shard in SHARDS:
        fill_shard(memory, shard)
    if origin is not FULL:
        change(memory, origin, 34)
    names = {i: f"block {i}" for i in range(memory.capacity_blocks)}
    write_blocks(memory, memory._map.kv_layers, names)
    memory.offer(target, live_blocks)
    before = snapshot(memory)
    for index in range(1000):
        syscalls.fail_at = frozenset({syscalls.num_calls + index})
        try:
            result = memory.apply(target, live_blocks, memory.version, copies)
        except MappingError:
            expect_same(before, snapshot(memory))
            expect_sound(memory)
        else:
            break
    assert index == result.num_map_calls > 4, "every call was made to fail once"
    expect_sound(memory)
    kept = {dst: names[src] for src, dst in copies} or {0: names[0], 33: names[33]}
    expect_blocks(memory, LOW, kept)
    if target.retained:
        expect_blocks(memory, HIGH, {block: names[block] for block in RETAINED})
    assert all(holds_shard(memory, shard) for shard in target.shards - result.missing_shards)
    memory.close()


def test_a_start_that_fails_at_any_call_leaves_nothing_and_can_be_repeated():
    syscalls = FailingSyscalls()
    memory = make_memory(make_pool=partial(PagePool, syscalls=syscalls))
    descriptors = len(os.listdir("/proc/self/fd"))
    refused: list[bool] = []
    for index in range(1000):
        syscalls.num_calls, syscalls.fail_at = 0, frozenset({index})
        try:
            memory.start()
        except (BudgetError, MappingError) as error:
            refused.append(isinstance(error, BudgetError))
            assert kernel_view() == set() and len(os.listdir("/proc/self/fd")) == descriptors
            assert memory.capacity_blocks == 0
        else:
            break
    assert index > 2 * (len(SHARDS) + NUM_LAYERS)
    # A memory file, addresses (the budget is too large for them), mappings.
    num_spans = 1 + len(SHARDS) + NUM_LAYERS
    assert refused == [1 <= call <= num_spans for call in range(index)]
    assert memory.capacity_blocks == 34
    expect_sound(memory)
    memory.close()


def test_a_remap_that_cannot_be_undone_stops_the_device():
    syscalls = FailingSyscalls()
    memory = make_memory(make_pool=partial(PagePool, syscalls=syscalls))
    memory.start()
    syscalls.fail_at = frozenset(range(syscalls.num_calls + 3, syscalls.num_calls + 1000))
    with pytest.raises(WorkerLostError, match="undone"):
        memory.apply(DROPPED, 34, memory.version, [])
    with pytest.raises(WorkerLostError):
        memory.kv_gather(LOW, [0], torch.empty(2 * BLOCK_BYTES, dtype=torch.uint8))
    with pytest.raises(WorkerLostError):
        memory.offer(FULL, 0)
    memory.close()
    syscalls.fail_at = frozenset()
    memory.start()
    expect_sound(memory)
    memory.close()


def test_a_device_that_sleeps_holds_no_memory_but_its_workspace(memory):
    for shard in SHARDS:
        fill_shard(memory, shard)
    write_blocks(memory, SHAPE.all_layers, {block: block for block in range(memory.capacity_blocks)})
    memory.workspace().fill_(3)
    num_bytes = memory.held_bytes
    result = memory.apply(LayoutSpec(frozenset(), LayerRange(0, 0)), 0, memory.version, [])
    workspace = 4 * PAGE  # what is left of its last page belongs to it
    assert num_bytes > 40 * PAGE and memory.held_bytes == workspace and result.capacity_blocks == 0
    report = memory.report()
    assert report["free_bytes"] == report["budget_bytes"] - workspace
    assert memory.workspace().eq(3).all()
    back = memory.apply(FULL, 0, memory.version, [])
    assert back.missing_shards == SHAPE.all_shards and not back.intact_shards
    assert memory.capacity_blocks == back.capacity_blocks > 0
    fill_shard(memory, EMBED_SHARD)
    assert holds_shard(memory, EMBED_SHARD)
    memory.check()

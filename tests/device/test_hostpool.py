"""KV blocks to host slots and back, on the host and on a pretended card: bytes, layers, bounds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from fakecuda import FakeBindings, PoisonedPool
from pretendedcard import PretendedCard

from jettison.device import pages as pages_api
from jettison.device.backend import HostPool
from jettison.device.cuda import copies
from jettison.device.cuda.bytes import CardBytes
from jettison.device.cuda.card import Card
from jettison.device.cuda.hostpool import PinnedPool
from jettison.device.cuda.pages import PagePool as CardPages
from jettison.device.cuda.pieces import Copying, Way
from jettison.device.devicebytes_host import HostBytes
from jettison.device.hostpool import HostBuffers
from jettison.device.memory import DeviceMemory
from jettison.device.pages_host import PagePool
from jettison.errors import MappingError
from jettison.memory.layout import LayoutSpec
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, layer_shard

PAGE, BLOCK_SIZE = 4096, 4
SHARDS = {layer_shard(i): 2 * PAGE for i in range(4)} | {EMBED_SHARD: PAGE, HEAD_SHARD: PAGE}
SHAPE = ModelShape(4, 64, 4, 2, 24, 64, 64, 4, False, SHARDS)
CARD_PAGE = 2 << 20
BLOCK_BYTES = SHAPE.block_bytes_per_layer(BLOCK_SIZE)


Making = Callable[[int], HostPool]


ON_CARD = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


WAYS = [way.value for way in Way]


PLACES = ["host", *(f"pretended {way}" for way in WAYS)]


@pytest.fixture(params=[*PLACES, *(pytest.param(f"cuda {way}", marks=ON_CARD) for way in WAYS)])
def place(request: pytest.FixtureRequest) -> str:
    """Where a pool is, and on a card how it copies."""
    return request.param


@pytest.fixture
def card(place: str) -> Iterator[Card | None]:
    """None: the host."""
    card = {"host": lambda: None, "pretended": PretendedCard, "cuda": Card}[place.split()[0]]()
    if card is not None:
        card.start()
    yield card
    if card is not None:
        card.close()


def pages(card: Card | None) -> pages_api.PagePool:
    """Sixty."""
    if card is None:
        return PagePool(60 * PAGE, PAGE)
    if isinstance(card, PretendedCard):
        return PoisonedPool(60 * PAGE, PAGE, FakeBindings(granularity=PAGE))
    return CardPages(60 * CARD_PAGE, CARD_PAGE)


@pytest.fixture
def memory(card: Card | None) -> Iterator[DeviceMemory]:
    pool = pages(card)
    device = DeviceMemory(
        pool, HostBytes() if card is None else CardBytes(card), budget_bytes=60 * pool.page_bytes, shape=SHAPE,
        dtype=torch.float32, block_size=BLOCK_SIZE, workspace_bytes=PAGE,
    )
    device.start(LayoutSpec(SHAPE.all_shards, SHAPE.all_layers))
    for layer in range(4):
        device.kv_arena(layer)[: device.capacity_blocks].normal_()
    yield device
    device.close()


@pytest.fixture
def make(card: Card | None, place: str) -> Making:
    """A pool of so many slots. The card's pins two slots at a time, and copies three rows."""

    def made(num_slots: int) -> HostPool:
        if card is None:
            return HostBuffers(num_slots, 4, BLOCK_BYTES)
        copying = Copying(Way(place.split()[1]), 3 * BLOCK_BYTES, num_programs=2)
        return PinnedPool(card, num_slots, 4, BLOCK_BYTES, copying=copying, part_bytes=2 * 4 * BLOCK_BYTES)

    return made


def test_what_went_out_comes_back_in_any_block(memory: DeviceMemory, make: Making) -> None:
    host = make(8)
    before = [memory.kv_arena(layer)[[3, 1]].clone() for layer in range(4)]
    assert host.copy_out(memory, SHAPE.all_layers, [3, 1], [7, 0]) == 4 * 2 * BLOCK_BYTES
    for layer in range(4):
        memory.kv_arena(layer)[:6] = 0
    host.copy_in(memory, SHAPE.all_layers, [2, 5], [7, 0])
    for layer in range(4):
        assert torch.equal(memory.kv_arena(layer)[[2, 5]], before[layer])
        assert not memory.kv_arena(layer)[[0, 1, 3, 4]].any()


def test_only_the_layers_asked_for_are_touched(memory: DeviceMemory, make: Making) -> None:
    host = make(2)
    host.copy_out(memory, SHAPE.all_layers, [0], [1])
    before = [memory.kv_arena(layer)[0].clone() for layer in range(4)]
    for layer in range(4):
        memory.kv_arena(layer)[0] = 0
    host.copy_in(memory, LayerRange(1, 3), [0], [1])
    assert [torch.equal(memory.kv_arena(layer)[0], before[layer]) for layer in range(4)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("blocks", "slots", "layers", "error"),
    [([0], [2], (0, 4), IndexError), ([0], [-1], (0, 4), IndexError), ([0, 1], [0], (0, 4), ValueError),
     ([10**7], [0], (0, 4), IndexError), ([0], [0], (0, 5), IndexError)],
)
def test_what_is_not_there_is_refused(
    memory: DeviceMemory, make: Making, blocks: list[int], slots: list[int], layers: tuple[int, int],
    error: type[Exception],
) -> None:
    with pytest.raises(error):
        make(2).copy_out(memory, LayerRange(*layers), blocks, slots)


def test_memory_is_taken_at_the_first_copy(memory: DeviceMemory, make: Making) -> None:
    host = make(1 << 40)
    assert host.copy_out(memory, SHAPE.all_layers, [], []) == 0


def test_a_copy_beside_steps_copies_the_same_and_nothing_before_it_runs(memory: DeviceMemory, make: Making) -> None:
    host = make(8)
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
    [([0], [2], (0, 4), IndexError), ([0, 1], [0], (0, 4), ValueError), ([10**7], [0], (0, 4), IndexError)],
)
def test_a_copy_beside_steps_is_refused_before_it_runs(
    memory: DeviceMemory, make: Making, blocks: list[int], slots: list[int], layers: tuple[int, int],
    error: type[Exception], to_host: bool,
) -> None:
    with pytest.raises(error):
        make(2).beside(memory, LayerRange(*layers), blocks, slots, to_host=to_host)


def test_blocks_that_a_copy_will_write_spoil_dropped_shards_from_its_beginning(
    memory: DeviceMemory, make: Making
) -> None:
    """Pages of dropped layers hold KV now: what a copy may have written is not read as parameters again."""
    kept = LayerRange(0, 2)
    memory.apply(LayoutSpec(SHAPE.shards_for(kept), kept), 0, memory.version, [])
    full = LayoutSpec(SHAPE.all_shards, SHAPE.all_layers)
    high = memory.capacity_blocks - 1
    host = make(2)
    host.beside(memory, kept, [high], [0], to_host=True)
    assert layer_shard(3) in memory.apply(full, 0, memory.version, []).intact_shards
    memory.apply(LayoutSpec(SHAPE.shards_for(kept), kept), 0, memory.version, [])
    host.beside(memory, kept, [high], [0], to_host=False)
    assert memory.apply(full, 0, memory.version, []).missing_shards


def test_slots_are_read_and_written_layer_by_layer_as_blocks_are(memory: DeviceMemory, make: Making) -> None:
    host, layers = make(8), LayerRange(1, 4)
    content = torch.randint(0, 256, (3 * 3 * BLOCK_BYTES,), dtype=torch.uint8)
    host.scatter(layers, [5, 0, 4], content.numpy())
    host.copy_in(memory, layers, [2, 3, 9], [5, 0, 4])
    out = torch.zeros(len(content) + 7, dtype=torch.uint8)
    assert memory.kv_gather(layers, [2, 3, 9], out) == len(content) and torch.equal(out[:-7], content)
    out.zero_()
    assert host.gather(layers, [5, 0, 4], out) == len(content) and torch.equal(out[:-7], content)
    assert host.gather(layers, [], out) == 0
    with pytest.raises(ValueError, match="do not fit"):
        host.gather(layers, [5, 0, 4], out[: len(content) - 1])
    with pytest.raises(ValueError, match="expected"):
        host.scatter(layers, [5, 0, 4], out)


def test_a_copy_that_was_stopped_goes_on_where_it_was(memory: DeviceMemory, make: Making) -> None:
    host = make(8)
    blocks, slots = [3, 1, 7, 0], [7, 0, 1, 2]
    work = host.beside(memory, SHAPE.all_layers, blocks, slots, to_host=True)
    work.run(most_bytes=BLOCK_BYTES + 1)
    assert BLOCK_BYTES < work.copied_bytes < 16 * BLOCK_BYTES and not work.is_complete
    work.stop()
    done = work.copied_bytes
    work.run()
    assert work.copied_bytes == done
    work = host.beside(memory, SHAPE.all_layers, blocks, slots, to_host=True, skip_bytes=done)
    assert work.copied_bytes == done
    thread = threading.Thread(target=work.run)
    thread.start()
    thread.join()
    assert work.is_complete
    before = [memory.kv_arena(layer)[blocks].clone() for layer in range(4)]
    for layer in range(4):
        memory.kv_arena(layer)[:8] = 0
    host.copy_in(memory, SHAPE.all_layers, blocks, slots)
    assert all(torch.equal(memory.kv_arena(layer)[blocks], before[layer]) for layer in range(4))


class TestOnACard:
    """What only a card's pool has."""

    @pytest.fixture(params=WAYS)
    def place(self, request: pytest.FixtureRequest) -> str:
        return f"pretended {request.param}"

    def test_memory_is_pinned_where_slots_are_used(
        self, memory: DeviceMemory, make: Making, card: PretendedCard
    ) -> None:
        host = make(100)
        host.copy_out(memory, SHAPE.all_layers, [0, 1, 2], [10, 11, 99])
        assert list(card.pinned_bytes.values()).count(8 * BLOCK_BYTES) == 2
        count = len(card.pinned_bytes)
        host.copy_in(memory, SHAPE.all_layers, [0, 1], [99, 10])
        assert len(card.pinned_bytes) == count

    @pytest.mark.parametrize("num_slots", [1, 7, 8])
    def test_no_more_is_pinned_than_the_slots_have(
        self, memory: DeviceMemory, make: Making, card: PretendedCard, num_slots: int
    ) -> None:
        make(num_slots).copy_out(memory, SHAPE.all_layers, [0] * num_slots, range(num_slots))
        parts = [num_bytes for num_bytes in card.pinned_bytes.values() if num_bytes <= 8 * BLOCK_BYTES]  # no pieces
        assert sum(parts) == num_slots * SHAPE.num_layers * BLOCK_BYTES

    def test_what_cannot_be_pinned_fails_in_one_line_and_changes_nothing(
        self, memory: DeviceMemory, make: Making, card: PretendedCard
    ) -> None:
        card.most_pinned = 7 * BLOCK_BYTES
        with pytest.raises(MappingError, match="of host memory cannot be pinned") as caught:
            make(8).beside(memory, SHAPE.all_layers, [0], [0], to_host=True)
        assert "\n" not in str(caught.value)

    def test_copies_beside_steps_use_their_own_stream_and_whole_pieces(
        self, memory: DeviceMemory, make: Making, card: PretendedCard, place: str
    ) -> None:
        work = make(8).beside(memory, SHAPE.all_layers, [3, 1, 2], [7, 0, 1], to_host=True)
        card.log.clear()
        work.run()
        assert {stream for _, stream, _ in card.log} == {"beside"} and card.stream == "steps"
        to_slots = [size // BLOCK_BYTES for what, _, size in card.log if what == "out"]
        assert to_slots == {  # three rows a piece, four a slot; slots 0 and 1 lie together
            "pretended staged": [3, 1, 2, 3, 3], "pretended kernel": [3] * 4, "pretended engines": [1] * 12
        }[place]
        assert set(card.waits) == {"beside"} and not card.pending("beside")

    def test_copies_beside_steps_leave_the_card_to_them(
        self, memory: DeviceMemory, make: Making, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A block a millisecond, beside steps: the wait is before the second piece and all that follow."""
        host, now, slept = make(8), [0.0], []

        def sleep(seconds: float) -> None:
            slept.append(round(seconds * 1e3, 6))
            now[0] += seconds

        monkeypatch.setattr(copies, "time", SimpleNamespace(perf_counter_ns=lambda: int(now[0] * 1e9), sleep=sleep))
        host.copy_by(Copying(Way.KERNEL, 3 * BLOCK_BYTES, 2, bytes_per_s=BLOCK_BYTES * 1e3))
        host.beside(memory, SHAPE.all_layers, [3, 1], [7, 0], to_host=True).run()
        assert slept == [3, 3]
        host.copy_out(memory, SHAPE.all_layers, [3, 1], [7, 0])
        assert len(slept) == 2, "between steps it is fast"

"""A worker on a card maps ahead what its drops need: on a pretended card, with the host's kernels over its pages."""

from __future__ import annotations

import logging

import pytest
from fakecuda import FakeBindings, PoisonedPool

from jettison.device.backend_host import HostBackEnd
from jettison.device.spec import DeviceSpec
from jettison.device.worker import DeviceWorker
from jettison.memory.layout import LayoutSpec, RetainedKV
from jettison.types import LayerRange

PAGE = 4096
ALL, LOW, HIGH = LayerRange(0, 4), LayerRange(0, 2), LayerRange(2, 4)
EMPTY = LayoutSpec(frozenset(), LayerRange(0, 0))


class FakeCard(HostBackEnd):
    """Pages of a pretended card; tensors are the host's."""

    def __init__(self, fake: FakeBindings) -> None:
        self._fake = fake

    def make_pool(self, budget_bytes, page_bytes):
        return PoisonedPool(budget_bytes, page_bytes, self._fake)


@pytest.fixture
def fake():
    fake = FakeBindings(16 << 20, granularity=PAGE)
    yield fake
    fake.close()


@pytest.fixture
def start(fake, tiny_models):
    workers = []

    def make(**changes) -> DeviceWorker:
        options = {"budget_bytes": 4 << 20, "drop_layers": (LOW, HIGH), **changes}
        worker = DeviceWorker(
            DeviceSpec(model_dir=tiny_models["qwen2"], dtype="float64", block_size=4, max_num_tokens=64,
                       max_num_seqs=4, page_bytes=PAGE, **options),
            FakeCard(fake),
        )  # fmt: skip
        workers.append(worker)
        worker.start()
        return worker

    yield make
    for worker in workers:
        worker.close()


def layout(worker: DeviceWorker, layers: LayerRange, retained: tuple[RetainedKV, ...] = ()) -> LayoutSpec:
    return LayoutSpec(worker.shape.shards_for(layers), layers, retained)


def change(worker: DeviceWorker, spec: LayoutSpec, live_blocks: int = 0) -> int:
    """Apply a layout and fill what it lacks; returns the driver's calls."""
    result = worker.apply_layout(spec, live_blocks, worker.layout_version, [])
    for shard in sorted(result.missing_shards):
        worker.load_shard_from_disk(shard)
    worker._memory.check()
    return result.num_map_calls


@pytest.mark.parametrize("half", [LOW, HIGH])
def test_a_drop_calls_no_driver_and_neither_do_the_way_back_and_the_next_drop(start, half):
    worker = start()
    before = worker.capacity_blocks
    for _ in range(2):
        assert change(worker, layout(worker, half), before) == 0
        assert worker.capacity_blocks > before and worker.ready_for(half)
        assert change(worker, layout(worker, ALL), before) == 0
        assert worker.capacity_blocks == before and worker.ready_for(ALL)


def retained(worker: DeviceWorker, num_blocks: int) -> tuple[RetainedKV, ...]:
    return (RetainedKV(HIGH, tuple(range(num_blocks))),)


def test_kv_that_waits_to_be_sent_costs_a_drop_no_call(start):
    """All of it, as where memory is full; its pages serve once it has been sent, and cost none either."""
    worker = start()
    before = worker.capacity_blocks
    for _ in range(2):
        assert change(worker, layout(worker, LOW, retained(worker, before)), before) == 0
        meanwhile = worker.capacity_blocks
        assert meanwhile > before
        assert change(worker, layout(worker, LOW), before) == 0
        assert worker.capacity_blocks > meanwhile
        assert change(worker, layout(worker, ALL), before) == 0


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_where_part_of_it_waits_only_the_free_rest_is_mapped_anew(start, part):
    worker = start()
    before = worker.capacity_blocks
    spec = layout(worker, LOW, retained(worker, int(before * part)))
    worker._memory.check()
    all_pages = worker._memory.report()["kv_bytes"] // PAGE
    num_calls = change(worker, spec)
    assert 0 < num_calls < all_pages, "map, access and unmap for each page of at most a third"
    assert change(worker, layout(worker, LOW)) < all_pages
    assert change(worker, layout(worker, ALL)) == 0
    assert change(worker, spec) == 0, "and from then on it is known"


def test_an_offer_does_not_bind_a_layout_to_what_was_mapped_when_it_was_made(start):
    worker = start()
    unforeseen = layout(worker, LayerRange(3, 4))
    worker.offer_layout(unforeseen, 0)
    assert worker._memory.prepare(unforeseen) > 0
    assert change(worker, unforeseen) == 0


def test_what_is_mapped_already_is_passed_over_at_a_glance(start, monkeypatch):
    worker, asked = start(), []
    for arena in worker._memory._arenas.values():
        monkeypatch.setattr(arena, "prepare", lambda *run: asked.append(run) or 0)
    assert worker._memory.prepare(layout(worker, LOW), max_pages=2) == 0 and not asked


def test_both_halves_are_prepared_beside_each_other(start):
    worker = start()
    for half in (LOW, HIGH, LOW):
        assert change(worker, layout(worker, half)) == 0
        assert change(worker, layout(worker, ALL)) == 0


def test_the_way_back_is_mapped_beside_steps_and_so_is_the_next_drop(start):
    """As under load: blocks are in use all the time, written ones among them, and shards are overwritten."""
    worker = start()
    before = worker.capacity_blocks
    for _ in range(3):
        change(worker, layout(worker, LOW, retained(worker, before)), before)
        change(worker, layout(worker, LOW), before)
        worker._memory.note_written(worker.capacity_blocks)
        turns = 0
        while worker.ahead.turn():
            turns += 1
        assert turns > 0 and not worker.ahead.turn()
        back = LayoutSpec(worker.shape.all_shards, LOW)
        assert change(worker, back, before) == 0, "the shards' return, while KV stays"
        assert change(worker, layout(worker, ALL), before) == 0
        worker.ahead.finish()
        assert change(worker, layout(worker, LOW, retained(worker, before)), before) == 0, "and the next drop"
        worker.ahead.finish()
        change(worker, layout(worker, ALL), before)
        worker.ahead.finish()


def test_what_was_to_be_mapped_is_forgotten_with_its_layout(start):
    worker = start()
    change(worker, layout(worker, LOW))
    assert worker.ahead.turn(), "begun"
    change(worker, layout(worker, ALL))
    worker.ahead.finish()
    assert change(worker, layout(worker, HIGH)) == 0


def test_after_sleep_drops_are_prepared_anew(start, fake):
    worker = start()
    change(worker, EMPTY)
    assert fake.used_bytes < 1 << 20, "the card has the pages back"
    change(worker, layout(worker, ALL))
    assert change(worker, layout(worker, HIGH)) == 0


def test_merges_of_more_members_are_not_prepared_and_say_so(start, caplog):
    caplog.set_level(logging.INFO, "jettison.device.worker")
    worker = start()
    change(worker, layout(worker, LOW))
    assert "was not prepared" not in caplog.text
    change(worker, layout(worker, ALL))
    third, quarter = LayerRange(0, 1), LayerRange(3, 4)
    for part in (third, quarter):
        num_calls = change(worker, layout(worker, part))
        assert num_calls > 0 and f"was not prepared: {num_calls} calls of the driver" in caplog.text
        assert worker.ready_for(part)
        change(worker, layout(worker, ALL))
        assert worker.ready_for(ALL)


def test_a_member_of_a_pair_may_drop_further(start):
    worker = start()
    assert change(worker, layout(worker, LOW)) == 0
    assert change(worker, layout(worker, LayerRange(0, 1))) > 0
    change(worker, layout(worker, ALL))
    assert worker.ready_for(ALL)


def test_nothing_is_prepared_where_there_is_no_drop_or_no_gain(start, fake, tiny_models):
    calls = start(drop_layers=())._memory.report()["map_calls"]
    assert start()._memory.report()["map_calls"] > calls
    static = start(layers=LOW)
    static.close()
    host = DeviceWorker(
        DeviceSpec(model_dir=tiny_models["qwen2"], dtype="float64", block_size=4, max_num_tokens=64, max_num_seqs=4,
                   page_bytes=PAGE, budget_bytes=4 << 20, drop_layers=(LOW, HIGH)), HostBackEnd(),
    )  # fmt: skip
    host.start()
    assert not host._memory.prepares and change(host, layout(host, LOW)) > 0
    host.close()


def test_a_card_that_refuses_to_prepare_serves_all_the_same(start, fake, caplog, monkeypatch):
    from jettison.device.memory import DeviceMemory
    from jettison.errors import MappingError

    def refuse(self, *_):
        raise MappingError("cuMemMap: no")

    monkeypatch.setattr(DeviceMemory, "preparing", refuse)
    worker = start()
    assert "could not be mapped ahead: cuMemMap: no" in caplog.text
    assert change(worker, layout(worker, LOW)) > 0 and worker.ready_for(LOW)

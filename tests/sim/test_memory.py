"""Modelled memory against the page planner that real devices use.

Capacities and bytes are equal, always. Which shards come back intact, and down to where a shrink evacuates, are equal
as long as every restored shard has had its own pages back; what is allowed beyond is said where it is tested.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.errors import BudgetError, OutOfPagesError, StalePlanError
from jettison.memory.layout import LayoutSpec, RetainedKV
from jettison.memory.pagemap import PageMap, PageSizes
from jettison.memory.pages import plan_layout
from jettison.sim.memory import ModelledMemory
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, layer_shard

PAGE = 64


def make_shape(num_layers: int, shard_pages: int, ends_pages: int) -> ModelShape:
    shards = {layer_shard(i): shard_pages * PAGE for i in range(num_layers)}
    shards |= {EMBED_SHARD: ends_pages * PAGE, HEAD_SHARD: ends_pages * PAGE}
    return ModelShape(num_layers, 16, 2, 1, 4, 32, 64, 2, False, shards)


class RealMemory:
    """The planner with its map: ``device.memory`` without a device."""

    def __init__(self, shape: ModelShape, block_size: int, num_pages: int, spec: LayoutSpec) -> None:
        self.sizes = PageSizes.of(shape, block_size, PAGE)
        self.map = PageMap.with_workspace(num_pages, 1)
        plan_layout(self.map, spec, self.sizes, 0).apply(self.map)
        self.map.version = 0

    def plan(self, spec: LayoutSpec, live_blocks: int):  # type: ignore[no-untyped-def]
        return plan_layout(self.map, spec, self.sizes, live_blocks)

    def note_written(self, num_blocks: int) -> None:
        for layer in self.map.kv_layers.layers():
            self.map.mark_written(layer, 0, self.sizes.pages_for_blocks(num_blocks))


def pair(num_layers: int, shard_pages: int, ends_pages: int, block_size: int, spare_pages: int):  # type: ignore[no-untyped-def]
    shape = make_shape(num_layers, shard_pages, ends_pages)
    num_pages = 1 + num_layers * shard_pages + 2 * ends_pages + spare_pages
    spec = LayoutSpec(shape.all_shards, shape.all_layers)
    real = RealMemory(shape, block_size, num_pages, spec)
    model = ModelledMemory(shape, block_size, num_pages * PAGE, PAGE, PAGE, spec)
    return shape, real, model


sizes = st.tuples(
    st.integers(2, 8), st.integers(1, 9), st.integers(1, 6), st.sampled_from([1, 2, 3, 4, 8]), st.integers(20, 120)
)


def written_share(model: ModelledMemory, share: float) -> int:
    return int(model.capacity_blocks * share)


@given(sizes, st.integers(1, 7), st.booleans(), st.floats(0, 1), st.floats(0, 1), st.data())
@settings(max_examples=200)
def test_a_drop_and_its_restore_are_what_the_planner_makes_of_them(
    size: tuple[int, ...], cut: int, front: bool, held: float, written: float, data: st.DataObject
) -> None:
    shape, real, model = pair(*size)
    cut = min(cut, shape.num_layers - 1)
    stage = LayerRange(0, cut) if front else LayerRange(cut, shape.num_layers)
    foreign = LayerRange(cut, shape.num_layers) if front else LayerRange(0, cut)
    blocks = sorted(data.draw(st.sets(st.integers(0, max(0, model.capacity_blocks - 1)), max_size=6)))
    retained = (RetainedKV(foreign, tuple(blocks)),) if blocks and model.capacity_blocks else ()
    full = model.capacity_blocks
    drop = LayoutSpec(shape.shards_for(stage), stage, retained)
    same_layout(real, model, drop, full)
    num_written = int(full * held)
    real.note_written(num_written)
    model.note_written(num_written)
    same_layout(real, model, LayoutSpec(drop.shards, stage), model.capacity_blocks)
    num_written = written_share(model, written)
    real.note_written(num_written)
    model.note_written(num_written)
    live = min(num_written, full)
    same_layout(real, model, LayoutSpec(shape.all_shards, stage), live, exact=False)
    same_layout(real, model, LayoutSpec(shape.all_shards, shape.all_layers), live, exact=False)
    assert model.capacity_blocks == full


def same_layout(real: RealMemory, model: ModelledMemory, spec: LayoutSpec, live: int, *, exact: bool = True) -> None:
    """Apply to both. ``exact=False``: where shards return, pages that do not divide evenly may lie otherwise.

    Then a shrink may evacuate from another block, by what one shard's pages in one arena hold, and a shard may be
    intact in one and not in the other only if it lies right at the line up to which arenas were written.
    """
    plan, offer = real.plan(spec, live), model.offer(spec, live)
    assert offer.capacity_blocks == plan.capacity_blocks
    result = model.apply(spec, live, model.version, ())
    assert result.bytes_to_kv == plan.bytes_to_kv
    assert result.intact_shards | result.missing_shards == plan.intact_shards | plan.missing_shards
    slack = max(real.sizes.shard_pages.values())
    line, modelled = plan.evacuate_from_block, offer.evacuate_from_block
    assert abs(line - modelled) <= (real.sizes.blocks_in_pages(slack) + 1 if not exact else 0)
    if exact:
        assert result.intact_shards == plan.intact_shards
    plan.apply(real.map)
    real.map.check()
    same_report(real, model)


def same_report(real: RealMemory, model: ModelledMemory) -> None:
    """The model says of every use as many bytes as the map has pages for it, and of the rest what the map has free."""
    pages = {"parameter": "shard", "kv": "kv", "workspace": "workspace"}
    expected = {f"{use}_bytes": real.map.count(kind) * PAGE for use, kind in pages.items()}
    expected["free_bytes"] = len(real.map.free_pages()) * PAGE
    missing = real.sizes.shard_pages.keys() - real.map.shards()
    expected["dropped_parameter_bytes"] = sum(real.sizes.shard_pages[shard] for shard in missing) * PAGE
    expected["budget_bytes"] = real.map.num_pages * PAGE
    assert model.report() == expected


@given(sizes, st.integers(1, 7))
def test_a_drop_that_nobody_used_is_undone_by_mapping_alone(size: tuple[int, ...], cut: int) -> None:
    shape, real, model = pair(*size)
    cut = min(cut, shape.num_layers - 1)
    stage = LayerRange(0, cut)
    full = model.capacity_blocks
    same_layout(real, model, LayoutSpec(shape.shards_for(stage), stage), full)
    model.note_written(full)
    spec = LayoutSpec(shape.all_shards, stage)
    assert model.apply(spec, 0, model.version, ()).missing_shards == frozenset()
    assert not real.plan(spec, 0).missing_shards


def test_what_was_written_over_is_missing() -> None:
    shape, _, model = pair(4, 4, 2, 4, 40)
    stage = LayerRange(0, 2)
    model.apply(LayoutSpec(shape.shards_for(stage), stage), 0, 0, ())
    assert model.has_intact_shards
    model.note_written(model.capacity_blocks)
    assert not model.has_intact_shards
    result = model.apply(LayoutSpec(shape.all_shards, stage), 0, 1, ())
    assert not result.intact_shards and result.missing_shards == shape.all_shards - shape.shards_for(stage)


def test_one_block_on_a_shard_spoils_that_shard_alone() -> None:
    shape, _, model = pair(4, 4, 4, 4, 40)
    stage = LayerRange(0, 2)
    model.apply(LayoutSpec(shape.shards_for(stage), stage), 0, 0, ())
    model.note_landed(LayerRange(0, 1), [model.capacity_blocks - 1])
    result = model.apply(LayoutSpec(shape.all_shards, stage), 0, 1, ())
    assert 0 < len(result.intact_shards) < 3


def test_stale_and_impossible_layouts_are_refused_and_change_nothing() -> None:
    shape, _, model = pair(4, 4, 2, 4, 40)
    stage = LayerRange(0, 2)
    spec = LayoutSpec(shape.shards_for(stage), stage)
    with pytest.raises(StalePlanError):
        model.apply(spec, 0, 3, ())
    beyond = (RetainedKV(LayerRange(2, 4), (model.capacity_blocks,)),)
    with pytest.raises(StalePlanError):
        model.offer(LayoutSpec(spec.shards, stage, beyond), 0)
    assert model.version == 0 and model.shards == shape.all_shards
    model.apply(spec, 0, 0, ())
    everything = (RetainedKV(stage, tuple(range(model.capacity_blocks))),)
    with pytest.raises(OutOfPagesError):
        model.offer(LayoutSpec(shape.all_shards, LayerRange(2, 4), everything), 0)
    assert model.version == 1


def test_a_budget_below_the_parameters_is_one_clear_error() -> None:
    shape = make_shape(4, 4, 2)
    with pytest.raises(BudgetError, match="too small"):
        ModelledMemory(shape, 4, 10 * PAGE, 0, PAGE, LayoutSpec(shape.all_shards, shape.all_layers))


def test_a_report_after_a_drop_says_what_lies_where() -> None:
    shape, real, model = pair(4, 4, 2, 4, 41)
    stage, kept = LayerRange(0, 3), RetainedKV(LayerRange(3, 4), (0, 1, 5))
    same_layout(real, model, LayoutSpec(shape.shards_for(stage), stage, (kept,)), model.capacity_blocks)
    report = model.report()
    assert report["dropped_parameter_bytes"] == 6 * PAGE
    # A block is a page here: 62 pages less 1 of workspace, 14 of parameters and 3 retained, in three even arenas.
    assert report["kv_bytes"] == (3 + 3 * 14) * PAGE and report["free_bytes"] == 2 * PAGE


def test_on_a_card_a_drop_of_two_maps_nothing_and_one_of_more_does() -> None:
    shape = make_shape(4, 6, 3)
    halves = (LayerRange(0, 2), LayerRange(2, 4))
    spec = LayoutSpec(shape.all_shards, shape.all_layers)
    card = ModelledMemory(shape, 4, 200 * PAGE, PAGE, PAGE, spec, halves)

    def change(layers: LayerRange, *retained: RetainedKV, shards: frozenset[str] | None = None) -> int:
        new = LayoutSpec(shape.shards_for(layers) if shards is None else shards, layers, retained)
        return card.apply(new, 0, card.version, ()).num_map_calls

    before = card.capacity_blocks
    for half, other in (halves, halves[::-1]):
        assert change(half, RetainedKV(other, tuple(range(before)))) == change(half) == 0
        card.note_written(card.capacity_blocks)
        assert change(shape.all_layers) == 0 and card.capacity_blocks == before
    assert change(halves[0], RetainedKV(halves[1], tuple(range(before // 2)))) > 0, "the rest is had at once"
    change(shape.all_layers)
    assert change(LayerRange(0, 1)) > 20, "a member of three or four"
    change(shape.all_layers)
    change(LayerRange(0, 0), shards=frozenset())
    assert change(shape.all_layers) == 198, "after sleep all pages are mapped anew"
    assert change(halves[1]) == 0

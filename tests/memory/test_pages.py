"""Page plans against a naive model: one entry a page, and what was really written last into each."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.errors import OutOfPagesError, StalePlanError
from jettison.memory.extents import Extent, Run, RunSet, count_pages
from jettison.memory.layout import LayoutSpec, RetainedKV
from jettison.memory.pagemap import WORKSPACE, PageMap, PageSizes, kv_owner, shard_owner
from jettison.memory.pages import PagePlan, plan_layout
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, layer_shard
from longrun import LONG


def each_page(extents):
    """position -> page"""
    return {position + i: page + i for position, page, count in extents for i in range(count)}


class Device:
    """Carries plans out page by page and remembers who wrote each page last."""

    mapped_at = None

    def __init__(self, num_layers=4, layer_pages=6, ends_pages=(2, 3), spare_pages=40, workspace=2, block=3, page=4):
        shards = {layer_shard(i): layer_pages for i in range(num_layers)}
        shards |= {EMBED_SHARD: ends_pages[0], HEAD_SHARD: ends_pages[1]}
        self.shape = ModelShape(num_layers, 8, 1, 1, 1, 8, 8, 1, False, {s: n * page for s, n in shards.items()})
        self.sizes = PageSizes(page, block, shards)
        self.map = PageMap.with_workspace(sum(shards.values()) + spare_pages + workspace, workspace)
        self.last_writer: dict[int, object] = {}
        self.version_seen = 0
        self.full = LayoutSpec(self.shape.all_shards, self.shape.all_layers)
        self.change(self.full)

    def stage(self, lo, hi, *retained):
        layers = LayerRange(lo, hi)
        return LayoutSpec(self.shape.shards_for(layers), layers, retained)

    def plan(self, spec, live_blocks=0) -> PagePlan:
        before = (dict(self.map.contents), dict(self.map.homes), self.map.version)
        plan = plan_layout(self.map, spec, self.sizes, live_blocks, self.mapped_at)
        assert before == (self.map.contents, self.map.homes, self.map.version), "planning changed the map"
        return plan

    def change(self, spec, live_blocks=0) -> PagePlan:
        plan = self.plan(spec, live_blocks)
        self.expect_sound(spec, plan, live_blocks)
        self._expect_intact_is_true(spec, plan, live_blocks)
        plan.apply(self.map)
        self.map.check()
        for shard in plan.missing_shards:
            for position, page in each_page(self.map.of(shard_owner(shard))).items():
                self.last_writer[page] = (shard, position)
        return plan

    def write(self, layer, lo, hi):
        self.map.mark_written(layer, lo, hi)
        for position, page in each_page(self.map.of(kv_owner(layer))).items():
            if lo <= position < hi:
                self.last_writer[page] = "kv"

    def expect_sound(self, spec, plan, live_blocks):
        old = {owner: each_page(extents) for owner, extents in self.map.contents.items()}
        new = {owner: each_page(extents) for owner, extents in plan.contents.items()}
        sizes, target = self.sizes, set(spec.kv_layers.layers())
        # Every page once, and none from nowhere.
        pages = [page for pages in new.values() for page in pages.values()]
        assert len(pages) == len(set(pages)) and all(0 <= page < self.map.num_pages for page in pages)
        # What must be there.
        assert new.get(WORKSPACE) == old.get(WORKSPACE)
        assert {owner.key for owner in new if owner.kind == "shard"} == spec.shards
        for shard in spec.shards:
            assert sorted(new[shard_owner(shard)]) == list(range(sizes.shard_pages[shard]))
        lengths = {len(new.get(kv_owner(layer), {})) for layer in target}
        assert len(lengths) <= 1
        for layer in target:
            assert sorted(new.get(kv_owner(layer), {})) == list(range(*lengths))
        assert plan.capacity_blocks == (min(lengths) * sizes.page_bytes // sizes.kv_block_bytes if target else 0)
        if target:
            assert self.map.num_pages - len(pages) < len(target), "pages left over that would go round"
        # Retained KV is readable; foreign arenas keep nothing else.
        for layer in range(self.shape.num_layers):
            kept = {
                byte // sizes.page_bytes
                for r in spec.retained if layer in r.layers.layers() for b in r.block_ids
                for byte in range(b * sizes.kv_block_bytes, (b + 1) * sizes.kv_block_bytes)
            }  # fmt: skip
            if layer not in target:
                there = old.get(kv_owner(layer), {})
                assert new.get(kv_owner(layer), {}) == {position: there[position] for position in kept}
        # Blocks below the line of evacuation do not notice.
        assert plan.evacuate_from_block <= plan.capacity_blocks
        assert plan.evacuate_from_block >= min(live_blocks, plan.capacity_blocks)
        last = -(-plan.evacuate_from_block * sizes.kv_block_bytes // sizes.page_bytes)
        for layer in target:
            for position, page in old.get(kv_owner(layer), {}).items():
                if position < last:
                    assert new[kv_owner(layer)][position] == page
        self._expect_calls_lead_there(old, new, plan)

    def _expect_calls_lead_there(self, old, new, plan):
        now = {(owner, position): page for owner, pages in old.items() for position, page in pages.items()}
        for gone in plan.unmaps:
            for i in range(gone.num_pages):
                del now[gone.owner, gone.position + i]
        used = set(now.values())
        for m in plan.maps:
            for i in range(m.num_pages):
                assert (m.owner, m.position + i) not in now, "mapped over"
                assert m.page + i not in used, "a page mapped twice at once"
                now[m.owner, m.position + i] = m.page + i
                used.add(m.page + i)
        assert now == {(owner, position): page for owner, pages in new.items() for position, page in pages.items()}

    def _expect_intact_is_true(self, spec, plan, live_blocks):
        added = spec.shards - self.map.shards()
        assert plan.intact_shards | plan.missing_shards == added and not plan.intact_shards & plan.missing_shards
        pinned = {
            page for owner, extents in plan.contents.items()
            if owner.kind == "kv" and int(owner.key) not in spec.kv_layers.layers()
            for page in each_page(extents).values()
        }  # fmt: skip
        for shard in added:
            pages = each_page(plan.contents[shard_owner(shard)])
            untouched = all(self.last_writer.get(page) == (shard, i) for i, page in pages.items())
            if shard in plan.intact_shards:
                assert untouched, f"{shard} is said to be intact"
            home = self.map.homes.get(shard)
            if home is not None and home.is_intact and live_blocks == 0:
                if not pinned & set(each_page(home.extents).values()):
                    assert shard in plan.intact_shards, f"{shard} could have been had for nothing"


class Card(Device):
    """A device whose mappings stay until another page is needed at their position."""

    def __init__(self, **sizes):
        self.there = {}
        super().__init__(**sizes)

    def mapped_at(self, owner, lo, hi):
        there = self.there.get(owner, {})
        return tuple(Extent(position, there[position], 1) for position in range(lo, hi) if position in there)

    def change(self, spec, live_blocks=0):
        plan = super().change(spec, live_blocks)
        self.num_calls = 0
        for m in plan.maps:
            there = self.there.setdefault(m.owner, {})
            for i in range(m.num_pages):
                self.num_calls += there.get(m.position + i) != m.page + i
                there[m.position + i] = m.page + i
        return plan


# --- any sequence of layouts ---------------------------------------------------------------------------------------


@st.composite
def devices(draw):
    return draw(st.sampled_from([Device, Card]))(
        num_layers=draw(st.integers(1, 6)),
        layer_pages=draw(st.integers(1, 9)),
        ends_pages=(draw(st.integers(1, 5)), draw(st.integers(1, 5))),
        spare_pages=draw(st.integers(0, 60)),
        workspace=draw(st.integers(0, 3)),
        block=draw(st.sampled_from([1, 3, 4, 8, 11])),
    )


def random_step(device, rng):
    """One change of layout or one write, of any kind."""
    num_layers = device.shape.num_layers
    lo, hi = sorted(rng.sample(range(num_layers + 1), 2))
    capacity = device.sizes.blocks_in_pages(count_pages(device.map.of(kv_owner(device.map.kv_layers.lo))))
    kind = rng.randrange(6)
    if kind == 0 and device.map.kv_layers:
        first = rng.randrange(8)
        device.write(rng.choice(list(device.map.kv_layers.layers())), first, first + rng.randrange(1, 12))
        return
    live_blocks = rng.choice([0, 0, rng.randrange(capacity + 1), capacity])
    if kind == 1:
        device.change(device.full, live_blocks)
        return
    retained = []
    if kind >= 3:
        outside = [layer for layer in range(num_layers) if not lo <= layer < hi]
        for layer in rng.sample(outside, rng.randrange(len(outside) + 1)):
            there = each_page(device.map.of(kv_owner(layer)))
            whole = [
                b for b in range(device.sizes.blocks_in_pages(max(there, default=-1) + 1))
                if all(p in there for p in range(*device.sizes.page_range(b)))
            ]  # fmt: skip
            blocks = tuple(sorted(rng.sample(whole, rng.randrange(len(whole) + 1))))
            retained.append(RetainedKV(LayerRange(layer, layer + 1), blocks))
    stage = device.stage(lo, hi, *retained)
    # Sometimes all parameters come back while KV stays with the stage: the first half of a restore.
    spec = LayoutSpec(device.shape.all_shards, stage.kv_layers, stage.retained) if rng.random() < 0.3 else stage
    try:
        device.change(spec, live_blocks)
    except OutOfPagesError:
        kept = sum(len(pages) for pages in map(each_page, device.map.kv_arenas().values()))
        assert kept and spec.retained, "without retained KV the parameters always fit"


@given(devices(), st.integers(0, 2**32))
@settings(max_examples=2000 if LONG else 40, deadline=None)
def test_any_sequence_of_layouts_is_sound(device, seed):
    capacity = device.sizes.blocks_in_pages(count_pages(device.map.of(kv_owner(0))))
    rng = random.Random(seed)
    for _ in range(12):
        random_step(device, rng)
    assert device.change(device.full).capacity_blocks == capacity


# --- the ways of one drop ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare_pages", [80, 82])
def test_half_the_layers_give_each_shard_whole_to_one_arena(spare_pages):
    """With and without pages that do not go round."""
    device = Device(num_layers=8, layer_pages=6, ends_pages=(2, 4), spare_pages=spare_pages)
    plan = device.change(device.stage(0, 4), live_blocks=0)
    for layer in range(4, 8):
        pages = set(each_page(device.map.homes[layer_shard(layer)].extents).values())
        takers = [n for n in range(4) if pages & set(each_page(device.map.of(kv_owner(n))).values())]
        assert len(takers) == 1
        tail = each_page(device.map.of(kv_owner(takers[0])))
        positions = sorted(position for position, page in tail.items() if page in pages)
        # Near the end, below nothing but the arena's part of the head.
        assert positions == list(range(positions[0], positions[0] + 6)) and positions[-1] >= max(tail) - 1
    assert len(plan.maps) <= 3 * 4 and plan.bytes_to_kv == (4 * 6 + 4) * 4


def test_odd_pages_split_no_shard():
    """Pages that do not go round stay free rather than make one arena's part shorter than a shard."""
    device = Device(num_layers=8, layer_pages=6, ends_pages=(2, 4), spare_pages=82)
    layers = {layer_shard(i) for i in range(4, 8)}
    device.change(LayoutSpec(device.shape.all_shards - layers, LayerRange(0, 4)))
    for shard in layers:
        pages = set(each_page(device.map.homes[shard].extents).values())
        assert sum(bool(pages & set(each_page(device.map.of(kv_owner(n))).values())) for n in range(4)) == 1


def test_growth_disturbs_nothing():
    device = Device()
    before = device.plan(device.full).capacity_blocks
    plan = device.change(device.stage(0, 2), live_blocks=before)
    assert plan.capacity_blocks > 2 * before - 2 and plan.evacuate_from_block == plan.capacity_blocks


def test_a_restore_pops_exactly_what_the_drop_pushed():
    device = Device(num_layers=8, layer_pages=6, ends_pages=(2, 4), spare_pages=80)
    device.change(device.stage(0, 4))
    plan = device.change(LayoutSpec(device.shape.all_shards, LayerRange(0, 4)), live_blocks=0)
    assert plan.evacuate_from_block == plan.capacity_blocks
    assert plan.missing_shards == frozenset() and len(plan.intact_shards) == 5
    assert plan.bytes_to_kv == -(4 * 6 + 4) * 4


def test_written_pages_make_a_shard_missing_and_others_stay_intact():
    device = Device(num_layers=4, layer_pages=6, ends_pages=(2, 2), spare_pages=40)
    device.change(device.stage(0, 2))
    top = max(each_page(device.map.of(kv_owner(1))))
    device.write(1, top, top + 1)
    pages = each_page(device.map.of(kv_owner(1)))
    spoilt = {s for s, home in device.map.homes.items() if pages[top] in each_page(home.extents).values()}
    plan = device.change(device.full)
    assert plan.missing_shards == spoilt and len(spoilt) == 1 and len(plan.intact_shards) == 2


def test_an_intact_home_has_the_better_claim_to_a_page():
    device = Device(num_layers=4, layer_pages=6, ends_pages=(2, 2), spare_pages=40, block=4, page=4)
    one_arena, layers = LayerRange(0, 1), frozenset(layer_shard(i) for i in range(4))
    nothing = LayoutSpec(frozenset(), one_arena)
    capacity = device.change(LayoutSpec(layers, one_arena)).capacity_blocks
    capacity = device.change(nothing, live_blocks=capacity).capacity_blocks  # the layers' pages are on top
    device.write(0, 0, capacity)  # and all homes spoilt
    # With every block alive, the head gets what the arena's shrinking sets free: pages of some layer's old home.
    device.change(LayoutSpec(frozenset({HEAD_SHARD}), one_arena), live_blocks=capacity)
    taken = set(each_page(device.map.of(shard_owner(HEAD_SHARD))).values())
    device.change(nothing, live_blocks=capacity)
    assert any(taken & set(each_page(device.map.homes[layer_shard(i)].extents).values()) for i in range(4))
    assert device.change(device.full).intact_shards == {HEAD_SHARD}


def test_the_first_intact_position_is_where_writing_starts_to_matter():
    device = Device()
    assert device.map.first_intact_positions() == {}
    device.change(device.stage(0, 2))
    floor = device.map.first_intact_positions()[0]
    device.write(0, 0, floor)
    assert all(home.is_intact for home in device.map.homes.values())
    device.write(0, floor, floor + 1)
    assert sum(not home.is_intact for home in device.map.homes.values()) == 1


def test_live_blocks_are_not_popped_for_a_shard():
    device = Device(num_layers=4, layer_pages=6, ends_pages=(2, 2), spare_pages=40, block=4, page=4)
    small = device.plan(device.full).capacity_blocks
    device.change(device.stage(0, 2, RetainedKV(LayerRange(2, 4), tuple(range(small)))), live_blocks=small)
    grown = device.change(device.stage(0, 2), live_blocks=small).capacity_blocks
    spec = LayoutSpec(device.shape.all_shards, LayerRange(0, 2))
    # The retained pages came last, so they lie on top of the shards': down to them, or not.
    free, tight = device.plan(spec, live_blocks=small), device.plan(spec, live_blocks=grown)
    assert free.capacity_blocks == tight.capacity_blocks == tight.evacuate_from_block > free.evacuate_from_block
    assert not free.missing_shards and tight.missing_shards


@pytest.mark.parametrize("num_retained", [0, 3, 7, 12])
def test_what_is_mapped_at_a_position_stays_its_page(num_retained):
    card = Card(num_layers=4, layer_pages=8, spare_pages=80, block=4)
    there, calls = RetainedKV(LayerRange(2, 4), tuple(range(num_retained))), []
    for _ in range(3):
        card.change(card.stage(0, 2, there))
        calls.append(card.num_calls)
        card.change(card.stage(0, 2))
        calls.append(card.num_calls)
        card.change(card.full)
        assert card.num_calls == 0, "the way back"
    assert calls[0] > 0 and not any(calls[2:]), "the same drop again is had for nothing"


def test_what_is_mapped_decides_no_size():
    card, device = Card(), Device()
    for spec in (card.stage(0, 2), card.full, card.stage(2, 4), card.stage(2, 3), card.full):
        told, plain = card.change(spec), device.change(spec)
        assert told.capacity_blocks == plain.capacity_blocks and told.bytes_to_kv == plain.bytes_to_kv


def test_freed_retained_kv_counts_as_moved():
    device = Device(num_layers=4, layer_pages=6, ends_pages=(2, 2), spare_pages=40, block=4, page=4)
    kept = RetainedKV(LayerRange(2, 4), (0, 1, 2))
    dropped = device.change(device.stage(0, 2, kept))
    later = device.change(device.stage(0, 2))
    assert dropped.bytes_to_kv == (2 * 6 + 2) * 4 and later.bytes_to_kv == 2 * 3 * 4


def test_a_layout_may_be_taken_back_with_what_was_retained():
    device = Device(num_layers=4, layer_pages=6, ends_pages=(2, 2), spare_pages=40, block=4, page=4)
    before = each_page(device.map.of(kv_owner(3)))
    device.change(device.stage(0, 2, RetainedKV(LayerRange(2, 4), (1, 4))), live_blocks=10)
    plan = device.change(device.full, live_blocks=10)
    after = each_page(device.map.of(kv_owner(3)))
    assert (after[1], after[4]) == (before[1], before[4])
    assert plan.evacuate_from_block == plan.capacity_blocks == 10 and not plan.missing_shards


def test_refusals_change_nothing():
    device = Device(num_layers=4, layer_pages=6, ends_pages=(2, 2), spare_pages=4, block=4, page=4)
    device.change(device.stage(0, 2))
    with pytest.raises(StalePlanError, match="layer 3"):
        device.plan(device.stage(0, 2, RetainedKV(LayerRange(3, 4), (0,))))
    capacity = device.sizes.blocks_in_pages(count_pages(device.map.of(kv_owner(0))))
    all_kv = RetainedKV(LayerRange(0, 2), tuple(range(capacity)))
    everything = LayoutSpec(device.shape.all_shards, LayerRange(2, 3), (all_kv,))
    with pytest.raises(OutOfPagesError, match="pages too few"):
        device.plan(everything)
    plan = device.plan(device.full)
    plan.apply(device.map)
    with pytest.raises(StalePlanError, match="version"):
        plan.apply(device.map)
    with pytest.raises(OutOfPagesError):
        PageMap.with_workspace(2, 3)


def test_no_layers_at_all_leave_everything_free_and_nothing_intact():
    """Such a device sleeps: the memory behind its pages is given back."""
    device = Device()
    plan = device.change(LayoutSpec(frozenset(), LayerRange(0, 0)))
    assert plan.capacity_blocks == 0 and len(device.map.free_pages()) == device.map.num_pages - 2
    back = device.change(device.full)
    assert back.missing_shards == device.full.shards and not back.intact_shards


def test_check_notices_damage():
    device = Device()
    first, second = device.map.of(kv_owner(0)), device.map.of(kv_owner(1))
    for damaged in (second, first[:-1], tuple(e._replace(page=e.page + 10_000) for e in first)):
        device.map.contents[kv_owner(0)] = damaged
        with pytest.raises(AssertionError):
            device.map.check()
    device.map.contents[kv_owner(0)] = first
    device.map.check()


@given(st.integers(1, 9), st.integers(1, 9), st.sets(st.integers(0, 60)))
def test_page_ranges_are_the_pages_with_a_byte_of_the_blocks(page, block, ids):
    ranges = PageSizes(page, block, {}).page_ranges(sorted(ids))
    pages = {byte // page for i in ids for byte in range(i * block, (i + 1) * block)}
    assert [p for lo, hi in ranges for p in range(lo, hi)] == sorted(pages)
    assert all(before[1] < after[0] for before, after in pairwise(ranges)), "apart"


@given(st.sets(st.integers(0, 40)), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=8))
def test_a_set_of_runs_is_a_set_of_pages(pages, spans):
    runs, left = RunSet(Run(page, 1) for page in sorted(pages)), set(pages)
    for page, count in spans:
        there = [p for run in runs.overlap(page, count) for p in range(run.page, run.page + run.num_pages)]
        assert there == sorted(left & set(range(page, page + count)))
        assert runs.meets((Extent(0, page, count),)) == bool(there)
        assert [p for run in runs.take(page, count) for p in range(run.page, run.page + run.num_pages)] == there
        left -= set(there)
        assert [p for run in runs.runs() for p in range(run.page, run.page + run.num_pages)] == sorted(left)
        assert all(a.page + a.num_pages < b.page for a, b in pairwise(runs.runs())), "maximal"


def test_cycles_do_not_crumble_the_memory():
    """After any number of drops of any half with KV on the move, a remap takes as few calls as at first."""
    device = Device(num_layers=8, layer_pages=16, ends_pages=(8, 8), spare_pages=320, block=4, page=4)
    small = device.plan(device.full).capacity_blocks
    rng = random.Random(3)
    calls = []
    for _ in range(60):
        lo, hi = rng.choice([(0, 4), (4, 8), (0, 3), (2, 8)])
        held = tuple(sorted(rng.sample(range(small), rng.randrange(small))))
        outside = tuple(RetainedKV(LayerRange(a, b), held) for a, b in ((0, lo), (hi, 8)) if a < b)
        stage = device.stage(lo, hi)
        plans = [
            device.change(LayoutSpec(stage.shards, stage.kv_layers, outside), live_blocks=small),
            device.change(stage, live_blocks=10**6),
        ]
        device.write(lo, 0, 50)
        plans += [
            device.change(LayoutSpec(device.shape.all_shards, stage.kv_layers), live_blocks=small // 2),
            device.change(device.full, live_blocks=small // 2),
        ]
        calls.append(sum(len(plan.maps) for plan in plans))
        assert plans[-1].capacity_blocks == small
    assert max(calls[-20:]) <= 1.5 * max(calls[:20])

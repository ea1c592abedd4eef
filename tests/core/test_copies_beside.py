"""Copies beside steps, as live and modelled workers keep them: one at a time, one end each, layouts are followed."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jettison.core.controlstream import BesideCopy, CopiesBeside
from jettison.types import LayerRange

NUM_LAYERS, NUM_BLOCKS = 6, 12
ranges = st.tuples(st.integers(0, NUM_LAYERS), st.integers(0, NUM_LAYERS)).map(lambda ends: LayerRange(*sorted(ends)))


class Copies(RuleBasedStateMachine):
    """Beside it, what each block holds: a copy has to find the content that it was told to read, or end."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = CopiesBeside()
        self.wanted: dict[int, list[str]] = {}
        """Copies under way, in order: the contents of their blocks."""
        self.ended: list[int] = []
        self.next_id = 0
        self.kv_layers, self.capacity = LayerRange(0, NUM_LAYERS), NUM_BLOCKS
        self.holds = {block: f"content {block}" for block in range(NUM_BLOCKS)}

    @rule(data=st.data(), to_host=st.booleans())
    def begin(self, data: st.DataObject, to_host: bool) -> None:
        if not self.capacity or not self.kv_layers:
            return
        blocks = data.draw(st.lists(st.integers(0, self.capacity - 1), unique=True, max_size=4))
        lo = data.draw(st.integers(self.kv_layers.lo, self.kv_layers.hi - 1))
        layers = LayerRange(lo, data.draw(st.integers(lo + 1, self.kv_layers.hi)))
        self.next_id += 1
        self.copies.begin(BesideCopy(self.next_id, layers, blocks, range(len(blocks)), to_host))
        self.wanted[self.next_id] = [self.holds[block] for block in blocks]

    @precondition(lambda self: self.wanted)
    @rule()
    def complete(self) -> None:
        first = self.copies.first
        assert first is not None
        self.end(first.transfer_id)

    @rule(number=st.integers(0, 30))
    def cancel(self, number: int) -> None:
        self.end(number)

    def end(self, number: int) -> None:
        is_under_way = number in self.wanted
        assert (self.copies.end(number) is not None) == is_under_way
        if is_under_way:
            self.ended.append(number)
            del self.wanted[number]

    @rule(kv_layers=ranges, capacity=st.integers(0, NUM_BLOCKS), data=st.data())
    def change_layout(self, kv_layers: LayerRange, capacity: int, data: st.DataObject) -> None:
        """Blocks that lie beyond are moved to where nothing is wanted, as far as there is room."""
        used = {block for copy in self.copies for block in copy.blocks}
        targets = [block for block in range(min(capacity, self.capacity)) if block not in used]
        beyond = data.draw(st.permutations(sorted(block for block in used if block >= capacity)))
        moved = list(zip(beyond, targets, strict=False))
        for source, target in moved:
            self.holds[target] = self.holds[source]
        gone = self.copies.change_layout(kv_layers, capacity, moved)
        self.kv_layers, self.capacity = kv_layers, capacity
        for block in range(NUM_BLOCKS):
            if block not in {target for _, target in moved} and block not in used:
                self.holds[block] = f"content {block} of layout {self.next_id}"
        for copy in gone:
            is_inside = kv_layers.covers(copy.layers)
            assert not is_inside or max(copy.blocks) >= capacity, "it could have gone on"
            self.ended.append(copy.transfer_id)
            del self.wanted[copy.transfer_id]

    @invariant()
    def each_is_under_way_or_has_ended_once(self) -> None:
        assert [copy.transfer_id for copy in self.copies] == list(self.wanted), "in order"
        assert len(set(self.ended)) == len(self.ended)
        assert set(self.ended) | self.wanted.keys() == set(range(1, self.next_id + 1))

    @invariant()
    def what_goes_on_finds_its_blocks(self) -> None:
        for copy in self.copies:
            assert self.kv_layers.covers(copy.layers)
            assert all(block < self.capacity for block in copy.blocks)
            assert [self.holds[block] for block in copy.blocks] == self.wanted[copy.transfer_id]


TestCopies = Copies.TestCase


def test_the_dead_copy_nothing() -> None:
    copies = CopiesBeside()
    copies.begin(BesideCopy(1, LayerRange(0, 1), [0], [0], True))
    copies.clear()
    assert len(copies) == 0 and copies.first is None

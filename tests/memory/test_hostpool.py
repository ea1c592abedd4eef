"""The host pool's book: whatever is held and released, every slot is in exactly one place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jettison.errors import OutOfBlocksError
from jettison.memory.hostpool import HostPool, num_host_slots
from jettison.types import ModelShape

SHAPE = ModelShape(4, 16, 2, 1, 8, 32, 64, 4)


def test_slots_of_a_pool_hold_a_block_in_every_layer() -> None:
    block = 4 * SHAPE.block_bytes_per_layer(16)
    assert num_host_slots(3 * block + 1, SHAPE, 16) == 3
    assert num_host_slots(block - 1, SHAPE, 16) == 0


def test_the_lowest_slots_are_used_again_first() -> None:
    pool = HostPool(6)
    assert pool.hold("a", 2) == (0, 1) and pool.hold("b", 2) == (2, 3)
    pool.release("a")
    assert pool.hold("c", 3) == (0, 1, 4)
    assert pool.slots("b") == (2, 3) and pool.num_free == 1


def test_what_does_not_fit_takes_nothing() -> None:
    pool = HostPool(3)
    with pytest.raises(OutOfBlocksError):
        pool.hold("a", 4)
    assert pool.num_free == 3 and pool.holders() == ()
    pool.hold("a", 3)
    with pytest.raises(ValueError, match="already"):
        pool.hold("a", 0)
    with pytest.raises(KeyError):
        pool.slots("b")
    pool.release("b")


class Pool(RuleBasedStateMachine):
    """Against a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(10)
        self.model: dict[str, tuple[int, ...]] = {}

    @rule(name=st.sampled_from("abcdef"), num=st.integers(0, 6))
    def hold(self, name: str, num: int) -> None:
        if name in self.model:
            return
        if num > 10 - sum(map(len, self.model.values())):
            with pytest.raises(OutOfBlocksError):
                self.pool.hold(name, num)
        else:
            self.model[name] = self.pool.hold(name, num)

    @rule(name=st.sampled_from("abcdef"))
    def release(self, name: str) -> None:
        self.pool.release(name)
        self.model.pop(name, None)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        held = [s for slots in self.model.values() for s in slots]
        assert len(held) == len(set(held)) and self.pool.num_free == 10 - len(held)
        assert all(self.pool.slots(name) == slots for name, slots in self.model.items())


TestPool = Pool.TestCase
TestPool.settings = settings(deadline=None, max_examples=40)


@given(st.integers(0, 50))
def test_a_negative_count_is_refused(num: int) -> None:
    with pytest.raises(ValueError):
        HostPool(num).hold("a", -1)


def test_the_same_content_has_one_slot_and_outlives_who_wrote_it() -> None:
    pool = HostPool(6)
    assert pool.extend("a", ["x", "y", None]) == (0, 1, 2)
    assert pool.num_known(["x", "y", "z"]) == 2 and pool.num_known([None, "x"]) == 0
    assert pool.extend("b", ["x", "y", "z"]) == (2,), "only what is new has to be written"
    assert pool.slots("a")[:2] == pool.slots("b")[:2] and pool.num_free == 2
    pool.note_written(pool.slots("a")[:1])
    assert pool.num_written("a") == pool.num_written("b") == 1, "as far as it is there"
    pool.release("a")
    assert pool.num_free == 3 and pool.num_written("b") == 1
    pool.truncate("b", 1)
    assert pool.extend("c", ["y"]) == (0,), "nobody has it any more"
    pool.check()


def test_what_is_being_written_is_held_under_a_name_of_its_own() -> None:
    pool = HostPool(2)
    pool.extend("a", [None, None])
    pool.adopt("a: writing", pool.slots("a"))
    pool.release("a")
    assert pool.num_free == 0
    pool.release("a: writing")
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="free"):
        pool.adopt("b", [0])
    with pytest.raises(OutOfBlocksError):
        pool.extend("b", [None] * 3)
    assert pool.holders() == ()


class SharedPool(RuleBasedStateMachine):
    """Against holders counted by hand: every slot has its owners, free + held is all, no content is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(12)
        self.model: dict[str, list[tuple[str | None, int]]] = {}

    @rule(name=st.sampled_from("abcd"), contents=st.lists(st.sampled_from(["p", "q", "r", None]), max_size=4))
    def extend(self, name: str, contents: list[str | None]) -> None:
        before = dict(self._slots_by_content())
        new = sum(c is None for c in contents) + len({c for c in contents if c is not None} - before.keys())
        if new > self.pool.num_free:
            with pytest.raises(OutOfBlocksError):
                self.pool.extend(name, contents)
            return
        if sum(c is None or c not in before for c in contents) > self.pool.num_free:
            return  # the same new content twice: it may be refused
        first = self.pool.num_blocks_of(name)
        to_write = self.pool.extend(name, contents)
        assert len(to_write) == new
        slots = self.pool.slots(name)[first:]
        self.model.setdefault(name, []).extend(zip(contents, slots, strict=True))

    @rule(name=st.sampled_from("abcd"))
    def release(self, name: str) -> None:
        self.pool.release(name)
        self.model.pop(name, None)

    @rule(name=st.sampled_from("abcd"), num=st.integers(0, 3))
    def truncate(self, name: str, num: int) -> None:
        if name in self.model:
            self.pool.truncate(name, num)
            del self.model[name][num:]

    @rule(name=st.sampled_from("abcd"), num=st.integers(0, 4))
    def write(self, name: str, num: int) -> None:
        if name in self.model:
            self.pool.note_written(self.pool.slots(name)[:num])
            assert self.pool.num_written(name) >= min(num, len(self.model[name]))

    def _slots_by_content(self) -> dict[str, int]:
        return {c: slot for held in self.model.values() for c, slot in held if c is not None}

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        held = {slot for entries in self.model.values() for _, slot in entries}
        assert self.pool.num_free == 12 - len(held)
        by_content = {(c, slot) for entries in self.model.values() for c, slot in entries if c is not None}
        assert len(by_content) == len({c for c, _ in by_content}), "a content has two slots"
        for name, entries in self.model.items():
            assert self.pool.slots(name) == tuple(slot for _, slot in entries)


TestSharedPool = SharedPool.TestCase
TestSharedPool.settings = settings(deadline=None, max_examples=60)

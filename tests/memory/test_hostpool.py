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

"""The block ledger against a model that knows what every block really contains."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jettison.errors import OutOfBlocksError, StalePlanError
from jettison.memory.blocks import BlockLedger
from longrun import LONG


def ledger_with(num_blocks: int, **lengths: int) -> BlockLedger:
    ledger = BlockLedger(num_blocks, 16)
    for request_id, n in lengths.items():
        ledger.allocate(request_id, n)
    return ledger


def test_allocates_lowest_free_ids_first():
    ledger = ledger_with(8, a=3, b=2)
    assert ledger.table("a").ids == [0, 1, 2] and ledger.table("b").ids == [3, 4]
    ledger.release("a")
    assert ledger.allocate("c", 4) == [0, 1, 2, 5]
    assert (ledger.num_free, ledger.num_held, ledger.num_cached) == (2, 6, 0)


def test_allocation_is_all_or_nothing():
    ledger = ledger_with(4, a=3)
    version = ledger.version
    with pytest.raises(OutOfBlocksError, match="2 blocks wanted, 1 of 4"):
        ledger.allocate("b", 2)
    assert not ledger.has("b") and ledger.num_free == 1 and ledger.version == version
    assert ledger.can_allocate(1) and not ledger.can_allocate(2)


def test_zero_blocks_make_an_empty_table():
    ledger = BlockLedger(1, 16)
    ledger.allocate("a", 0)
    assert ledger.has("a") and ledger.num_blocks_of("a") == 0 and ledger.num_blocks_of("unknown") == 0
    ledger.release("a")
    with pytest.raises(KeyError):
        ledger.release("a")
    with pytest.raises(KeyError):
        ledger.table("a")


def test_sealed_blocks_stay_findable_and_deeper_ones_are_evicted_first():
    ledger = ledger_with(4, a=3)
    for index, name in enumerate([b"x", b"y", b"z"]):
        ledger.seal("a", index, name)
    ledger.release("a")
    assert ledger.num_cached == 3 and ledger.num_free == 4 and ledger.num_held == 0
    assert ledger.lookup([b"x", b"y", b"z"]) == [0, 1, 2]
    assert ledger.lookup([b"y", b"unknown", b"z"]) == [1]
    assert ledger.allocate("b", 2) == [3, 2]
    assert ledger.lookup([b"x", b"y", b"z"]) == [0, 1]


def test_eviction_takes_the_least_recently_used_release():
    ledger = ledger_with(4, a=2, b=2)
    ledger.seal("a", 0, b"a0")
    ledger.seal("b", 0, b"b0")
    ledger.release("a")
    ledger.release("b")
    ledger.adopt_prefix("again", ledger.lookup([b"a0"]))
    ledger.release("again")
    ledger.allocate("c", 3)
    assert ledger.lookup([b"a0"]) == [0] and ledger.lookup([b"b0"]) == []


def test_shared_blocks_are_held_until_the_last_release():
    ledger = ledger_with(4, a=2)
    ledger.seal("a", 0, b"x")
    ledger.adopt_prefix("b", [0])
    ledger.allocate("b", 1)
    assert ledger.table("b").ids == [0, 2]
    assert ledger.num_exclusive_blocks("a") == 1 and ledger.num_held == 3
    ledger.release("a")
    assert ledger.is_held(0) and not ledger.is_held(1) and not ledger.is_held(99) and not ledger.is_held(-1)
    assert ledger.num_exclusive_blocks("b") == 2 and ledger.num_cached == 0
    ledger.release("b")
    assert ledger.num_cached == 1 and ledger.num_free == 4


def test_adopting_needs_a_new_request_and_blocks_with_content():
    ledger = ledger_with(4, a=1)
    for request_id, blocks in [("a", []), ("b", [3]), ("b", [0, 0]), ("b", [7])]:
        with pytest.raises(ValueError):
            ledger.adopt_prefix(request_id, blocks)
    assert not ledger.has("b")
    ledger.check()


def test_equal_content_keeps_the_first_block_findable():
    ledger = ledger_with(4, a=1, b=1)
    ledger.seal("a", 0, b"x")
    ledger.seal("b", 0, b"x")
    ledger.seal("a", 0, b"x")
    assert ledger.lookup([b"x"]) == [0]
    ledger.release("b")
    assert ledger.num_cached == 0 and ledger.num_free == 3
    with pytest.raises(ValueError, match="other content"):
        ledger.seal("a", 0, b"y")
    with pytest.raises(IndexError):
        ledger.seal("a", 1, b"y")
    ledger.check()


def test_forgetting_frees_cached_blocks_and_unnames_held_ones():
    ledger = ledger_with(4, a=1, b=1)
    ledger.seal("a", 0, b"x")
    ledger.seal("b", 0, b"y")
    ledger.release("a")
    ledger.forget_cached()
    assert ledger.lookup([b"x"]) == [] == ledger.lookup([b"y"])
    ledger.release("b")
    assert ledger.num_cached == 0 and ledger.allocate("c", 1) == [0]
    ledger.check()


def test_resize_refuses_to_lose_a_held_block():
    ledger = ledger_with(4, a=2, b=2)
    ledger.seal("b", 1, b"x")
    ledger.release("a")
    with pytest.raises(StalePlanError, match="2 blocks from 2 up"):
        ledger.resize(2)
    ledger.release("b")
    ledger.resize(3)
    assert ledger.capacity == 3 and ledger.lookup([b"x"]) == []
    ledger.resize(6)
    assert ledger.allocate("c", 6) == [0, 1, 2, 3, 4, 5]
    ledger.check()


def test_compaction_moves_tables_and_names():
    ledger = ledger_with(8, a=4, b=2)
    ledger.seal("b", 0, b"x")
    ledger.adopt_prefix("c", [4])
    ledger.release("a")
    generations = [ledger.table(r).generation for r in "bc"]
    moves = ledger.plan_compaction(3)
    assert moves == [(4, 0), (5, 1)]
    ledger.apply_compaction(moves, 3)
    assert ledger.table("b").ids == [0, 1] and ledger.table("c").ids == [0] and ledger.lookup([b"x"]) == [0]
    assert [ledger.table(r).generation for r in "bc"] != generations
    ledger.resize(3)
    ledger.check()


def test_compaction_prefers_free_blocks_to_cached_ones():
    ledger = ledger_with(6, a=2, b=1, c=2)
    ledger.seal("a", 0, b"x")
    ledger.release("a")  # 0 cached, 1 free
    assert ledger.plan_compaction(4) == [(4, 1)]
    assert ledger.plan_compaction(3) == [(3, 1), (4, 0)]
    assert ledger.plan_compaction(2) is None
    assert ledger.plan_compaction(6) == [] == ledger.plan_compaction(99)
    ledger.apply_compaction([(3, 1), (4, 0)], 3)
    assert ledger.lookup([b"x"]) == [] and ledger.table("c").ids == [1, 0]
    ledger.check()


@pytest.mark.parametrize("moves", [[], [(3, 0)], [(4, 0), (3, 0)], [(4, 5), (3, 0)], [(4, 2), (3, 0)], [(2, 0)]])
def test_a_compaction_that_does_not_fit_is_refused_whole(moves):
    ledger = ledger_with(6, a=2, b=1, c=2)
    ledger.release("a")
    before = (ledger.version, list(ledger.table("c").ids))
    with pytest.raises(StalePlanError):
        ledger.apply_compaction(moves, 3)
    assert before == (ledger.version, ledger.table("c").ids)
    ledger.check()


def test_no_two_lives_of_a_request_share_a_generation():
    ledger = BlockLedger(4, 16)
    seen = set()
    for _ in range(5):
        ledger.allocate("a", 2)
        seen.add(ledger.table("a").generation)
        ledger.release("a")
    assert len(seen) == 5


def test_check_notices_damage():
    for damage in (
        lambda led: led._free.give(2, 3),
        lambda led: led._more_holders.__setitem__(0, 1),
        lambda led: led._held.__setitem__(0, 0),
        lambda led: led._free.take(1),
        lambda led: led._free._runs.insert(0, 9 << 32 | 10),
        lambda led: led._block_of.clear(),
        lambda led: led.table("a").ids.append(1),
    ):
        ledger = ledger_with(6, a=2)
        ledger.seal("a", 0, b"x")
        ledger.check()
        damage(ledger)
        with pytest.raises(AssertionError):
            ledger.check()


class TruthfulLedger:
    """A ledger beside what is really in each block: a request that gets a block writes it at once."""

    def __init__(self, num_blocks: int) -> None:
        self.ledger = BlockLedger(num_blocks, 4)
        self.bytes: dict[int, object] = {}
        self.owned: dict[str, list[object]] = {}
        self.num_made = 0

    def chain(self, stream: int, length: int) -> list[bytes]:
        return [b"%d:%d" % (stream, i) for i in range(length)]

    def allocate(self, request_id: str, n: int) -> None:
        if not self.ledger.can_allocate(n):
            with pytest.raises(OutOfBlocksError):
                self.ledger.allocate(request_id, n)
            return
        for block in self.ledger.allocate(request_id, n):
            self.num_made += 1
            self.bytes[block] = self.num_made
            self.owned.setdefault(request_id, []).append(self.num_made)
        self.owned.setdefault(request_id, [])

    def admit(self, request_id: str, stream: int, length: int) -> None:
        found = self.ledger.lookup(self.chain(stream, length))
        assert [self.bytes[block] for block in found] == self.chain(stream, length)[: len(found)]
        self.ledger.adopt_prefix(request_id, found)
        self.owned[request_id] = [self.bytes[block] for block in found]
        self.allocate(request_id, min(length - len(found), self.ledger.num_free))
        for index, name in enumerate(self.chain(stream, self.ledger.num_blocks_of(request_id))):
            block = self.ledger.table(request_id).ids[index]
            self.bytes[block] = self.owned[request_id][index] = name
            self.ledger.seal(request_id, index, name)

    def release(self, request_id: str) -> None:
        self.ledger.release(request_id)
        del self.owned[request_id]

    def shrink_and_grow(self, line: int, capacity: int) -> None:
        moves = self.ledger.plan_compaction(line)
        if moves is None:
            assert self.ledger.num_held > line or line < 0
            return
        for src, dst in moves:
            self.bytes[dst] = self.bytes[src]
        self.ledger.apply_compaction(moves, line)
        self.ledger.resize(line)
        self.ledger.resize(capacity)

    def expect_truth(self) -> None:
        self.ledger.check()
        assert set(self.ledger.requests()) == self.owned.keys()
        for request_id, owned in self.owned.items():
            assert [self.bytes[block] for block in self.ledger.table(request_id).ids] == owned


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.truth = TruthfulLedger(12)
        self.next_id = 0

    def _new_id(self) -> str:
        self.next_id += 1
        return str(self.next_id)

    @rule(n=st.integers(0, 5))
    def allocate(self, n):
        self.truth.allocate(self._new_id(), n)

    @precondition(lambda self: self.truth.owned)
    @rule(data=st.data(), n=st.integers(1, 3))
    def grow(self, data, n):
        self.truth.allocate(data.draw(st.sampled_from(sorted(self.truth.owned))), n)

    @rule(stream=st.integers(0, 2), length=st.integers(0, 6))
    def admit(self, stream, length):
        self.truth.admit(self._new_id(), stream, length)

    @precondition(lambda self: self.truth.owned)
    @rule(data=st.data())
    def release(self, data):
        self.truth.release(data.draw(st.sampled_from(sorted(self.truth.owned))))

    @rule()
    def forget(self):
        self.truth.ledger.forget_cached()
        assert self.truth.ledger.num_cached == 0

    @rule(line=st.integers(0, 14), more=st.integers(0, 4))
    def compact(self, line, more):
        self.truth.shrink_and_grow(line, line + more)

    @invariant()
    def truthful(self):
        self.truth.expect_truth()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=400 if LONG else 60, stateful_step_count=40, deadline=None)


def test_volume():
    """Many operations of all kinds; everything free at the end."""
    rng = random.Random(7)
    truth = TruthfulLedger(96)
    alive: list[str] = []
    for op in range(10_000_000 if LONG else 100_000):
        draw = rng.random()
        if draw < 0.30 or not alive:
            request_id = str(op)
            truth.admit(request_id, rng.randrange(6), rng.randrange(1, 9))
            alive.append(request_id)
        elif draw < 0.55:
            truth.allocate(rng.choice(alive), 1)
        elif draw < 0.998:
            truth.release(alive.pop(rng.randrange(len(alive))))
        elif draw < 0.999:
            truth.shrink_and_grow(rng.randrange(40, 97), 96)
        else:
            truth.ledger.forget_cached()
        if op % 1000 == 0:
            truth.expect_truth()
    for request_id in alive:
        truth.release(request_id)
    truth.expect_truth()
    assert truth.ledger.num_held == 0 and truth.ledger.num_free == truth.ledger.capacity

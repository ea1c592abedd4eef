"""Who makes room for the head of a queue: what a plan may never do, and that it finds what there is."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.relief import CANDIDATES, Holder, Movable, Relief, plan_relief


@st.composite
def clusters(draw: st.DrawFn) -> list[Holder]:
    holders = []
    for i in range(draw(st.integers(1, 6))):
        sizes = draw(st.lists(st.integers(1, 40), max_size=5))
        movable = [Movable(f"r{i}-{n}", size) for n, size in enumerate(sizes)]
        holders.append(Holder(i, draw(st.integers(-10, 60)), movable, draw(st.booleans()), draw(st.integers(0, 1))))
    return holders


def check(head_blocks: int, holders: list[Holder], relief: Relief) -> None:
    """The head has room once all have gone, they have room where they go, and none of them went for nothing."""
    by_id = {h.group_id: h for h in holders}
    at = by_id[relief.group_id]
    assert at.takes_head
    sizes = {m.request_id: m.num_blocks for m in at.movable}
    gone = [sizes[leave.request_id] for leave in relief.leaves]
    assert relief.num_blocks == sum(gone) and len(gone) == len({leave.request_id for leave in relief.leaves})
    missing = head_blocks - at.num_free
    assert sum(gone) >= missing
    assert all(sum(gone) - num < missing for num in gone)
    coming = dict.fromkeys(by_id, 0)
    for leave in relief.leaves:
        assert leave.destination != at.group_id
        coming[leave.destination] += sizes[leave.request_id]
    assert all(not num or num <= by_id[i].num_free for i, num in coming.items())


@given(st.integers(1, 80), clusters())
def test_the_head_gets_in_and_nobody_goes_for_nothing(head_blocks: int, holders: list[Holder]) -> None:
    relief = plan_relief(head_blocks, holders)
    if relief is not None:
        check(head_blocks, holders, relief)


@given(st.integers(1, 80), clusters())
def test_where_one_request_would_do_no_more_is_moved(head_blocks: int, holders: list[Holder]) -> None:
    ones = [
        m.num_blocks for at in holders if at.takes_head for m in at.movable
        if m.num_blocks >= head_blocks - at.num_free
        and any(h is not at and h.num_free >= m.num_blocks for h in holders)
    ]  # fmt: skip
    relief = plan_relief(head_blocks, holders)
    if any(h.takes_head and h.num_free >= head_blocks for h in holders):
        assert relief is not None and not relief.leaves
    elif ones:
        assert len(holders) <= CANDIDATES
        assert relief is not None and relief.num_blocks <= min(ones)


def test_the_head_goes_where_least_is_missing() -> None:
    rows = [Movable("small", 30), Movable("large", 90)]
    holders = [Holder(0, 100, [Movable("only", 200)]), Holder(1, 180, rows), Holder(2, 95, takes_head=False)]
    relief = plan_relief(200, holders)
    assert relief is not None and relief.group_id == 1
    assert [(leave.request_id, leave.destination) for leave in relief.leaves] == [("small", 2)]


def test_who_goes_stays_in_the_machine_where_there_is_room() -> None:
    for near, far in itertools.permutations((1, 2)):
        holders = [Holder(0, 0, [Movable("r", 10)], machine="here"),
                   Holder(near, 30, takes_head=False, machine="here"),
                   Holder(far, 10, takes_head=False, machine="there")]  # fmt: skip
        relief = plan_relief(10, holders)
        assert relief is not None and relief.leaves[0].destination == near


def test_of_other_machines_the_nearer_one_is_the_destination() -> None:
    def distance(src: object, dst: object) -> float:
        return {"here": 0.0, "near": 1.0, "far": 2.0}[str(dst)]

    for near, far in itertools.permutations((1, 2)):
        holders = [Holder(0, 0, [Movable("r", 10)], machine="here"),
                   Holder(near, 30, takes_head=False, machine="near"),
                   Holder(far, 10, takes_head=False, machine="far")]  # fmt: skip
        relief = plan_relief(10, holders, distance)
        assert relief is not None and relief.leaves[0].destination == near


def test_where_all_memory_is_taken_nobody_moves() -> None:
    assert plan_relief(50, [Holder(0, 10, [Movable("a", 60)]), Holder(1, 9, [Movable("b", 60)])]) is None

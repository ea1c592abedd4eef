"""Which groups are packed follows what happens to them, though most passes find them as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FakeCluster

from jettison.core.ladder.packing.packable import Packable
from jettison.core.serving.holds import GroupHold


def test_groups_that_pause_go_and_come_again_and_machines_are_those_of_now() -> None:
    cluster = FakeCluster(num_workers=3)
    core = cluster.core
    packable = Packable(core.state, core.moves)
    (full,) = {group.blocks.capacity for group in core.groups.values()}
    first = packable.by_size()
    assert first == {full: {0, 1, 2}} and packable.machine_of == {0: 0, 1: 1, 2: 2}
    assert packable.by_size() is first
    core.groups[1].hold("test", GroupHold.STEPS)
    assert packable.by_size() == {full: {0, 2}} and packable.machine_of.keys() == {0, 2}
    core.groups[1].release("test", GroupHold.STEPS)
    core.state.params = replace(core.state.params, machine_of={0: 7, 1: 7})
    assert packable.by_size() == {full: {0, 1, 2}} and packable.machine_of == {0: 7, 1: 7, 2: 2}


def test_groups_are_gone_over_only_where_some_were_reshaped(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=40)
    core = cluster.core
    packable = Packable(core.state, core.moves)
    first = packable.by_size()
    found: list[bool] = []
    sizes_now = packable._sizes_now
    monkeypatch.setattr(packable, "_sizes_now", lambda is_calm: found.append(is_calm) or sizes_now(is_calm))
    cluster.submit("a", [1] * 8, 30)
    cluster.run()
    assert packable.by_size() is first and not found, "steps reshape no group"
    core.groups[0].hold("test", GroupHold.STEPS)
    assert packable.by_size() == {40: {1}} and found == [True]
    core.groups[0].release("test", GroupHold.STEPS)
    cluster.kill(0)
    cluster.run()
    packable.check()
    assert packable.by_size() == {40: {1}} and len(found) > 1


def test_a_merged_group_is_not_packed_and_what_it_splits_into_is() -> None:
    cluster = FakeCluster(num_workers=2, auto_restore=False)
    core = cluster.core
    packable = Packable(core.state, core.moves)
    assert sum(map(len, packable.by_size().values())) == 2
    cluster.order("drop")
    assert packable.by_size() == {}
    cluster.run()
    assert core.state.pipelines and packable.by_size() == {} and packable.machine_of == {}
    cluster.order("restore")
    cluster.run()
    assert sorted(g for groups in packable.by_size().values() for g in groups) == sorted(core.groups)

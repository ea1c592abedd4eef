"""Sleepers as closed devices: opened before memory keeps a queue out, and not closed while they will be needed."""

from __future__ import annotations

import pytest
from fakes import MS, FakeCluster
from sleepers import is_asleep, sleep

from jettison.core.ladder.waking.wake import WakeRung
from jettison.core.params import AwakeParams
from jettison.core.ports import Record
from jettison.policy.packing.params import PackParams

WHY = "what is open will be full before a sleeper could serve"


def decided(cluster: FakeCluster) -> list[Record]:
    return [r for r in cluster.records if r.kind == "wake_decided"]


def packed(full_blocks: int = 500, *, packing: bool = True) -> FakeCluster:
    """One of two sleeps; requests that hold 3 blocks at first and 203 in the end come one by one."""
    cluster = FakeCluster(
        num_workers=2, full_blocks=full_blocks, policy="recompute", prefix_caching=False, awake=AwakeParams(1),
        packing=PackParams(packer="mell", epoch_s=0.05, head_room=0.05) if packing else None,
    )
    cluster.submit("first", [1] * 12, 800, 0.0)
    sleep(cluster, 1)
    cluster.run(stop=lambda: is_asleep(cluster, 1) and not cluster.core.state.requests)
    cluster.check_every_event = False
    for i in range(5):
        cluster.submit(f"r{i}", [1 + i] * 12, 800, cluster.now / MS + 40.0 * i)
    return cluster


def test_a_device_is_opened_before_memory_keeps_a_queue_out() -> None:
    cluster = packed()
    cluster.run()
    first = decided(cluster)[0]
    assert first.fields["reason"] == WHY and first.fields["workers"] == [1]
    need = first.fields["online_blocks"] + first.fields["growth_blocks"]  # type: ignore[operator]
    assert first.fields["online_blocks"] < first.fields["open_blocks"] < need  # type: ignore[operator]
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize(("full_blocks", "packing"), [(1200, True), (500, False)])
def test_none_is_opened_where_what_is_open_suffices_or_nothing_is_packed(full_blocks: int, packing: bool) -> None:
    cluster = packed(full_blocks, packing=packing)
    cluster.run()
    assert all(r.fields["reason"] != WHY for r in decided(cluster))
    cluster.expect_outputs()


def test_none_falls_asleep_that_will_be_needed_before_it_could_serve_again() -> None:
    cluster = packed()
    cluster.run(stop=lambda: len(cluster.core.state.requests) == 5)
    rung = next(r for r in cluster.core.ladder.rungs if isinstance(r, WakeRung))
    groups = list(cluster.core.groups.values())
    assert rung._opening.spared(groups, 60.0).num == 0
    assert rung._opening.spared(groups, 0.0).num == 0, "what it holds is needed somewhere"
    cluster.run()
    assert rung._opening.spared(groups, 0.0).num == len(groups), "nothing is held, and nothing comes"


def test_a_device_is_opened_where_those_that_are_open_have_room_for_all_requests_but_not_for_each() -> None:
    """Three requests of 0.6 devices each in the end on two devices: by volume they fit."""
    cluster = FakeCluster(
        num_workers=3, full_blocks=100, policy="recompute", prefix_caching=False, awake=AwakeParams(2),
        packing=PackParams(packer="mell", epoch_s=0.05, head_room=0.0),
    )
    cluster.submit("first", [1] * 12, 2, 0.0)
    sleep(cluster, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 2) and not cluster.core.state.requests)
    for i in range(3):
        cluster.submit(f"r{i}", [1 + i] * 120, 120, cluster.now / MS)
    cluster.run()
    fields = decided(cluster)[0].fields
    assert fields["reason"] == "requests will outgrow the devices that are open" and fields["workers"] == [2]
    assert fields["lacking_blocks"] > 0  # type: ignore[operator]
    assert cluster.core.state.counters.num_preemptions == 0
    cluster.expect_outputs()
    cluster.expect_nothing_left()

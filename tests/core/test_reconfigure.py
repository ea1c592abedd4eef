"""Other parameters between two events: all of them take effect, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster

from jettison.config import EngineConfig
from jettison.core.cluster import ClusterCore
from jettison.core.configured import scheduler_limits
from jettison.core.ladder.restore import RestoreOffer
from jettison.core.ladder.rung import Moment
from jettison.core.params import ClusterParams
from jettison.core.serving.holds import RESTORE
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import CostModel
from jettison.errors import ConfigError
from jettison.policy.swapping import SwapParams

PROFILE = HardwareProfile(
    CostModel(4, 1e-8, 1e-8, 1e-5, 1e-4, 1e-4, 0.0, 0.0, 0.0, 0.0), link_bytes_per_s=3e9, link_latency_s=4e-3,
    remap_fixed_s=0.0, remap_s_per_byte=0.0, host_copy_bytes_per_s=1e9, disk_bytes_per_s=1e9,
)


def rung_names(cluster: FakeCluster) -> tuple[str, ...]:
    return tuple(rung.name for rung in cluster.core.ladder.rungs)


def crowded(policy: str) -> FakeCluster:
    """One of two instances has more than it can hold: the clients of the other have left."""
    cluster = FakeCluster(policy=policy, full_blocks=24, max_seqs=32, prefix_caching=False)
    for i in range(12):
        cluster.submit(f"r{i}", [1 + (7 * i + j) % 60 for j in range(14)], 60, 2.0 * i)
    cluster.run(until_ms=30)
    for request_id in [*cluster.core.groups[1].queues.running]:
        cluster.cancel(request_id, 30)
    return cluster


@pytest.mark.parametrize("change", [
    lambda p: replace(p, static_pipeline=True),
    lambda p: replace(p, swap=SwapParams(num_host_slots=7)),
    lambda p: replace(p, profile=PROFILE),
    lambda p: replace(p, rungs=("drop", "no such rung")),
], ids=["layout", "host_slots", "profile", "unknown_rung"])
def test_what_cannot_be_changed_is_refused_and_nothing_of_it_is_done(change: object) -> None:
    cluster = FakeCluster(policy="swap")
    before, rungs = cluster.core.params, cluster.core.ladder.rungs
    wanted = replace(change(before), rebalance=not before.rebalance)  # type: ignore[operator]
    with pytest.raises(ConfigError):
        cluster.core.reconfigure(wanted)
    assert cluster.core.params is before and cluster.core.ladder.rungs == rungs


def test_rungs_come_in_their_order_and_those_that_stay_keep_what_they_know() -> None:
    cluster = crowded("swap")
    swap = cluster.core.ladder.rung("swap")
    rungs = (*cluster.core.params.rungs, "migrate")
    cluster.core.reconfigure(replace(cluster.core.params, rungs=rungs))
    assert rung_names(cluster) == ("swap", "migrate", "scale", "shed") and cluster.core.ladder.rung("swap") is swap
    cluster.run()
    assert cluster.core.state.counters.num_migrations > 0, "it looks at all instances, also at those that are still"
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_rung_does_not_go_while_requests_are_in_host_pools_because_of_it() -> None:
    cluster = crowded("swap")
    cluster.run(stop=lambda: any(g.queues.stored for g in cluster.core.groups.values()))
    before = cluster.core.params
    with pytest.raises(ConfigError, match="swap cannot go"):
        cluster.core.reconfigure(replace(before, rungs=("shed",)))
    assert cluster.core.params is before and "swap" in rung_names(cluster)
    cluster.run()
    cluster.core.reconfigure(replace(before, rungs=("shed",)))
    assert rung_names(cluster) == ("shed",)
    cluster.submit("later", [3] * 20, 20, cluster.now / MS)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_group_that_yielded_admits_again_when_restores_are_no_more() -> None:
    cluster = FakeCluster(policy="drop", auto_restore=False)
    cluster.order("drop")
    cluster.run(until_ms=60)
    (group,) = cluster.core.groups.values()
    group.blocks.cap_admission(RESTORE, 3)
    cluster.core.reconfigure(replace(cluster.core.params, rungs=("drop",)))
    assert group.blocks.admission_cap is None


def test_a_cap_that_another_rung_has_asked_for_is_no_reason_to_split() -> None:
    cluster = FakeCluster(policy="drop")
    cluster.order("drop")
    cluster.run(until_ms=60)
    (group,), rung, now_ns = cluster.core.groups.values(), cluster.core.ladder.rung("restore"), cluster.now
    group.blocks.cap_admission("another", 3)
    assert not list(rung.look(Moment.TICK, now_ns))
    group.blocks.cap_admission(RESTORE, 3)
    (offer,) = rung.look(Moment.TICK, now_ns)
    assert isinstance(offer, RestoreOffer) and "compute binds" in offer.why


def test_every_group_is_asked_again() -> None:
    cluster = FakeCluster(num_workers=3)
    cluster.run(until_ms=100)
    cluster.core.state.changes.touched.clear()
    params: ClusterParams = replace(cluster.core.params, batch_limit=3)
    cluster.core.reconfigure(params)
    assert cluster.core.params is params and cluster.core.state.changes.touched == {0, 1, 2}


def refused(cluster: FakeCluster, rungs: tuple[str, ...], why: str) -> None:
    before = cluster.core.params
    with pytest.raises(ConfigError, match=why):
        cluster.core.reconfigure(replace(before, rungs=rungs))
    assert cluster.core.params is before and rung_names(cluster) == before.rungs


def test_static_pipelines_get_no_rung_that_merges() -> None:
    cluster = FakeCluster(policy="pipeline")
    refused(cluster, ("drop", "restore", "scale", "shed"), "static pipelines stay as they are")
    with pytest.raises(ConfigError, match="static pipelines stay as they are"):
        ClusterCore(
            cluster.shape, cluster.core.state.limits, ClusterParams(static_pipeline=True), {0: 24, 1: 24}, b"secret"
        )


def test_drop_and_restore_do_not_go_while_they_have_moves_under_way() -> None:
    cluster = FakeCluster(full_blocks=60, auto_restore=False)
    cluster.submit("r", [3] * 20, 200)
    cluster.run(until_ms=5)
    cluster.order("drop")
    assert cluster.core.merges
    refused(cluster, ("restore", "scale", "shed"), "drop cannot go while it uses workers")
    cluster.run(stop=lambda: bool(cluster.core.state.pipelines) and not cluster.core.merges)
    cluster.order("restore")
    assert cluster.core.restores
    refused(cluster, ("drop", "scale", "shed"), "restore cannot go while it uses workers")


def test_merged_groups_are_restored_before_drop_goes() -> None:
    cluster = FakeCluster(full_blocks=60, auto_restore=False)
    cluster.order("drop")
    cluster.run(until_ms=60)
    refused(cluster, ("scale", "shed"), "restore them first")
    cluster.order("restore")
    cluster.run(stop=lambda: not cluster.core.in_transition)
    cluster.core.reconfigure(replace(cluster.core.params, rungs=("scale", "shed")))
    assert rung_names(cluster) == ("scale", "shed")


def test_drop_does_not_go_while_a_request_needs_several_members() -> None:
    cluster = FakeCluster(full_blocks=60)
    cluster.submit("large", [3] * 40, 400)
    cluster.run(until_ms=2)
    refused(cluster, ("scale", "shed"), "request large needs")
    cluster.cancel("large", 3)
    cluster.run(stop=lambda: "large" not in cluster.core.state.requests)
    cluster.core.reconfigure(replace(cluster.core.params, rungs=("scale", "shed")))


def test_answers_of_a_default_length_end_where_one_instance_does_when_drop_has_gone() -> None:
    cluster = FakeCluster(full_blocks=60)
    cluster.submit("r", [3] * 20, 900, has_default_length=True, ignore_eos=True)
    cluster.run(until_ms=5)
    cluster.core.reconfigure(replace(cluster.core.params, rungs=("scale", "shed")))
    assert cluster.core.state.requests["r"].request.params.max_tokens == 60 * BLOCK_SIZE - 20
    cluster.run()
    assert len(cluster.outputs["r"]) == 60 * BLOCK_SIZE - 20 and cluster.ends["r"] == ["length"]
    cluster.expect_nothing_left()


@pytest.mark.parametrize(("policy", "expected"), [("drop", True), ("swap", True), ("pipeline+swap", False)])
def test_lookahead_is_there_for_whatever_pipelines_later_rungs_form(policy: str, expected: bool) -> None:
    """Limits are made once, and lists of rungs may follow: only static pipelines never balance."""
    assert scheduler_limits(EngineConfig.resolve(model="m", overload=policy), 64).lookahead.enabled == expected

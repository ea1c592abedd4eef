"""A batch keeps no merged group from being restored: its KV gives way where the online requests alone fit apart."""

from __future__ import annotations

import pytest
from fakes import MS, FakeCluster, tokens
from test_checkpoints import chats, expect_all_well, harvesting

from jettison.core.ladder.restore import RestoreOffer
from jettison.core.ladder.rung import Offer
from jettison.types import ServiceClass
from longrun import part_of


def merged(offline: str, *, num_offline: int = 40, seed: int = 0, **options: object) -> FakeCluster:
    """Two instances that have merged, and so much offline work that all of their memory is filled for long."""
    cluster = harvesting(
        policy="drop", num_workers=2, full_blocks=60, eager=True, offline=offline, seed=seed, **options
    )
    for i in range(num_offline):
        name = f"batch-{i}"
        cluster.submit(name, tokens(name, 24), 120, 0.3 * i, service_class=ServiceClass.OFFLINE, ignore_eos=True)
    cluster.run(until_ms=60)
    cluster.order("drop")
    cluster.run(stop=lambda: bool(cluster.core.state.pipelines))
    return cluster


def steady_chat(cluster: FakeCluster, seconds: int) -> None:
    """A short online request every 100 ms."""
    for i in range(10 * seconds):
        chats(cluster, 1, cluster.now / MS + 100.0 * i + 1.0)


def is_apart(cluster: FakeCluster) -> bool:
    return not cluster.core.state.pipelines and not cluster.core.in_transition


def batch_is_there(cluster: FakeCluster) -> bool:
    """Some offline request has not ended."""
    return any(s.is_offline for s in cluster.core.state.requests.values())


def paused(cluster: FakeCluster) -> list[str]:
    return [r.fields["reason"] for r in cluster.records if r.kind == "offline_paused"]


@pytest.mark.parametrize("offline", ["harvest", "scheduler"])
@pytest.mark.parametrize("seed", part_of(range(3), (0,)))
def test_a_group_is_restored_while_a_batch_goes_on(offline: str, seed: int) -> None:
    cluster = merged(offline, seed=seed)
    steady_chat(cluster, 2)
    cluster.run(stop=lambda: is_apart(cluster))
    assert batch_is_there(cluster), "the batch has not ended"
    assert cluster.now < 2_000 * MS, "nor has the chat"
    assert paused(cluster)[0].startswith("without offline work")
    cluster.run()
    expect_all_well(cluster)
    kinds = [r.kind for r in cluster.records]
    assert kinds.count("offline_paused") == kinds.count("offline_resumed")


def test_without_a_rung_that_gives_room_the_batch_has_to_end_first() -> None:
    cluster = merged("priority", num_offline=40)
    rung, offered = cluster.core.ladder.rung("restore"), list[Offer]()
    begin = rung.begin
    rung.begin = lambda offer, now_ns: (offered.append(offer), begin(offer, now_ns))[1]  # type: ignore[method-assign]
    steady_chat(cluster, 1)
    cluster.run(stop=lambda: is_apart(cluster))
    assert not batch_is_there(cluster)
    assert {type(offer) for offer in offered} == {RestoreOffer}, "nothing is asked of rungs that do nothing"
    cluster.run()
    expect_all_well(cluster)


def test_the_pause_lasts_as_long_as_the_move_and_its_members_take_it_over() -> None:
    cluster = merged("scheduler")
    for worker in cluster.workers.values():
        worker.spoilt = lambda: True
    state = cluster.core.state
    (group,) = state.pipelines.values()
    cluster.run(stop=lambda: bool(cluster.core.restores))
    assert group.queues.offline_holders
    moves = [r.kind for r in cluster.records]
    cluster.run(stop=lambda: group.group_id not in state.groups)
    later = [r.kind for r in cluster.records][len(moves) :]
    assert "offline_resumed" not in later[: later.index("split")]
    cluster.run(until_ms=cluster.now / MS + 101)
    homes = [r.fields["group"] for r in cluster.records if r.kind == "offline_paused"][-2:]
    assert set(homes) == set(state.groups), "both members"
    cluster.run(stop=lambda: not any(g.queues.offline_holders for g in state.groups.values()))
    assert batch_is_there(cluster)
    cluster.run()
    expect_all_well(cluster)


def test_a_group_that_cannot_be_restored_is_not_emptied() -> None:
    """Each of its two online requests becomes too large for a member."""
    cluster = merged("scheduler")
    for i in range(2):
        cluster.submit(f"long-{i}", tokens(f"long-{i}", 30), 400, cluster.now / MS, ignore_eos=True)
    cluster.run(stop=lambda: any(r.startswith("long") for r in cluster.ends))
    assert cluster.core.state.pipelines and not paused(cluster)
    cluster.run()
    expect_all_well(cluster)


def test_a_group_whose_online_requests_do_not_fit_apart_is_not_emptied_again_and_again() -> None:
    cluster = merged("scheduler", max_seqs=32)
    for i in range(60):
        chats(cluster, 4, cluster.now / MS + 50.0 * i, prompt=60, output=60)
    until = cluster.now / MS + 3_000
    cluster.run(until_ms=until)
    num_restores = cluster.core.state.counters.num_restores
    assert sum(why.startswith("without offline work") for why in paused(cluster)) <= num_restores + 1
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("seed", part_of(range(3), (0,)))
def test_a_restore_that_waits_for_offline_work_alone_is_given_room(seed: int) -> None:
    """One that was begun whatever is held: an administrator's."""
    cluster = merged("scheduler", seed=seed)
    steady_chat(cluster, 2)
    cluster.run(until_ms=cluster.now / MS + 90)
    cluster.order("restore")
    assert cluster.core.restores and not paused(cluster)
    cluster.run(stop=lambda: is_apart(cluster))
    assert batch_is_there(cluster) and paused(cluster)
    cluster.run()
    expect_all_well(cluster)

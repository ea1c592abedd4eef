"""Offline work by its price: instances stay awake, and are woken, for what is worth more than their seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import MS, FakeCluster
from sleepers import is_asleep, sleep

from jettison.core.params import AwakeParams
from jettison.core.ports import Record
from jettison.policy.batchworth import BatchPrices
from jettison.types import ServiceClass

AUTO = AwakeParams(1, None, True, 0.3)
DEAR = BatchPrices(batch_token=1.0)
CHEAP = BatchPrices(batch_token=1e-6)
FLOOR = BatchPrices(floor_tokens_per_s=1e5)


def of_kind(cluster: FakeCluster, kind: str) -> list[Record]:
    return [r for r in cluster.records if r.kind == kind]


def begin(prices: BatchPrices, awake: AwakeParams = AUTO, num_workers: int = 3) -> FakeCluster:
    """One request has been served, so that step times are known."""
    cluster = FakeCluster(
        num_workers=num_workers, full_blocks=60, max_seqs=4, offline="harvest", policy="recompute",
        awake=replace(awake, prices=prices),
    )
    cluster.check_every_event = False  # its groups are full for long, and checks of each event would take most of it
    cluster.submit("first", [1] * 12, 40, 0.0)
    return cluster


def send(cluster: FakeCluster, num: int, at_ms: float, tokens: int = 120) -> None:
    for i in range(num):
        cluster.submit(f"o{i}", [1 + i] * 12, tokens, at_ms + 0.4 * i, service_class=ServiceClass.OFFLINE)


def num_asleep(cluster: FakeCluster) -> int:
    return len({*cluster.core.sleepers.asleep, *cluster.core.sleepers.leaving})


@pytest.mark.parametrize(("prices", "num"), [(BatchPrices(), 2), (CHEAP, 2), (DEAR, 0), (FLOOR, 0)])
def test_a_backlog_that_is_worth_more_than_device_seconds_keeps_instances_awake(
    prices: BatchPrices, num: int
) -> None:
    cluster = begin(prices)
    send(cluster, 20, 100.0, tokens=160)
    cluster.run(until_ms=900)
    assert any(not s.is_finished for s in cluster.core.state.requests.values())
    assert num_asleep(cluster) == num
    put_off = of_kind(cluster, "sleep_put_off")
    assert bool(put_off) is (num == 0)
    for record in put_off:
        fields = record.fields
        assert fields["kept"] and fields["price_device_second"] == 1.0
        assert fields["price_batch_token"] == prices.batch_token and fields["tokens_per_s"]
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_when_the_backlog_is_done_they_sleep() -> None:
    cluster = begin(DEAR)
    send(cluster, 6, 100.0, tokens=20)
    cluster.at(6_000 * MS, lambda: None)
    cluster.run()
    assert num_asleep(cluster) == 2 and not of_kind(cluster, "wake_decided")


@pytest.mark.parametrize(("prices", "reasons"), [
    (BatchPrices(), []), (CHEAP, []), (DEAR, ["offline work is worth it"]), (FLOOR, ["offline work is worth it"]),
])  # fmt: skip
def test_sleepers_wake_for_a_backlog_that_is_worth_it(prices: BatchPrices, reasons: list[str]) -> None:
    cluster = begin(prices, AwakeParams(1))
    sleep(cluster, 1, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 1) and is_asleep(cluster, 2))
    send(cluster, 20, cluster.now / MS)
    cluster.run()
    decided = of_kind(cluster, "wake_decided")
    assert [r.fields["reason"] for r in decided][:1] == reasons
    for record in decided:
        assert record.fields["gained_tokens_per_s"] > 0  # type: ignore[operator]
        assert record.fields["instances_awake"] in (1, 2) and record.fields["offline_requests"]
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_no_more_are_woken_than_may_be_awake_and_none_for_no_work() -> None:
    cluster = begin(DEAR, AwakeParams(1, 2))
    sleep(cluster, 1, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 1) and is_asleep(cluster, 2))
    cluster.submit("chat", [1] * 12, 60, cluster.now / MS)
    cluster.at(cluster.now + 1_500 * MS, lambda: None)
    cluster.run()
    assert not of_kind(cluster, "wake_decided")
    send(cluster, 20, cluster.now / MS)
    cluster.run()
    assert len(of_kind(cluster, "woken")) == 1
    cluster.expect_outputs()

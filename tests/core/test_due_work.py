"""Deadlines of offline work: sleepers are woken for them, those that serve are shared by what one had taken on, and
what is needed stays awake."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster
from sleepers import is_asleep, sleep

from jettison.core.ladder.waking.urgent import Urgent
from jettison.core.ladder.waking.wake import WakeRung
from jettison.core.params import AwakeParams
from jettison.core.ports import OfflineStored, Record, StoredWork
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.serving.holds import GroupHold
from jettison.core.serving.virtualtokens import key_of
from jettison.types import Request, SamplingParams, ServiceClass

WHY = "offline work would be late for its deadline"


def decided(cluster: FakeCluster) -> list[Record]:
    return [r for r in cluster.records if r.kind == "wake_decided"]


def begin(
    num_workers: int = 3, *, awake: AwakeParams | None = None, max_seqs: int = 1, **changes: object
) -> FakeCluster:
    """One request has been served, and all sleep but one: by themselves, or by order. An instance runs one at a time:
    with few under way, looking at everything after each event costs little."""
    cluster = FakeCluster(
        num_workers=num_workers, full_blocks=15 * max_seqs, max_seqs=max_seqs, offline="harvest", policy="recompute",
        awake=awake or AwakeParams(1, None, True, 0.3), **changes,  # type: ignore[arg-type]
    )
    cluster.submit("first", [1] * 12, 40, 0.0)
    return cluster


def send(
    cluster: FakeCluster, num: int, due_ms: float | None, *, at_ms: float = 1500.0, name: str = "o", tenant: str = ""
) -> None:
    for i in range(num):
        cluster.submit(
            f"{name}{i}", [1 + i % 40] * 12, 40, at_ms + 0.4 * i, service_class=ServiceClass.OFFLINE,
            deadline_ns=None if due_ms is None else int(due_ms * MS), tenant=tenant,
        )  # fmt: skip


def num_left(cluster: FakeCluster, name: str = "") -> int:
    states = cluster.core.state.requests.values()
    return sum(not state.is_finished and state.request_id.startswith(name) for state in states)


def run_to(cluster: FakeCluster, at_ms: float) -> None:
    cluster.at(int(at_ms * MS), lambda: None)
    cluster.run(stop=lambda: cluster.now >= at_ms * MS or not cluster.heap or cluster.heap[0][0] > at_ms * MS)


def test_sleepers_are_woken_for_a_deadline_and_it_is_met_and_they_sleep_again() -> None:
    cluster = begin()
    send(cluster, 30, 2_500.0)
    run_to(cluster, 1_499.0)
    assert cluster.core.sleepers.asleep == {1, 2}
    run_to(cluster, 2_500.0)
    assert not num_left(cluster)
    first, *_ = decided(cluster)
    assert first.fields["reason"] == WHY and first.fields["due_s"] == pytest.approx(1.0, abs=0.2)
    assert first.fields["needed_per_s"] > first.fields["available_per_s"]  # type: ignore[operator]
    assert sum(r.kind == "asleep" for r in cluster.records) <= 4, "nobody sleeps and wakes by turns"
    run_to(cluster, 6_000.0)
    assert len(cluster.core.sleepers.asleep) == 2
    cluster.expect_outputs()


@pytest.mark.parametrize("due_ms", [None, 1_400.0, 60_000.0])
def test_no_deadline_one_that_is_over_and_one_that_is_far_wake_nobody(due_ms: float | None) -> None:
    cluster = begin()
    send(cluster, 8, due_ms)
    cluster.run()
    assert not decided(cluster)
    cluster.expect_outputs()


def test_work_that_is_stored_wakes_before_any_of_it_has_come() -> None:
    cluster = begin()
    deadline_ns = int(2_500 * MS)
    send(cluster, 2, 2_500.0)
    cluster.at(int(1_510 * MS), OfflineStored((StoredWork(deadline_ns, 30, 360, 1_200, "", "batch_x"),)))
    run_to(cluster, 1_700.0)
    (first, *_) = decided(cluster)
    assert first.fields["deadline"] == "batch_x" and not cluster.core.sleepers.asleep
    assert cluster.core.ladder.gauges()["devices_needed_for_deadlines"] > 1.0
    cluster.at(cluster.now + 1, OfflineStored(()))
    cluster.run()
    run_to(cluster, cluster.now / MS + 3_000)
    assert "devices_needed_for_deadlines" not in cluster.core.ladder.gauges()
    assert len(cluster.core.sleepers.asleep) == 2


def test_who_was_put_to_sleep_by_order_is_woken_too_but_never_more_than_may_be_awake() -> None:
    cluster = begin(4, awake=AwakeParams(1, 2))
    sleep(cluster, 1)
    cluster.run(stop=lambda: is_asleep(cluster, 1))
    send(cluster, 30, 2_300.0)
    run_to(cluster, 2_000.0)
    assert len(cluster.core.groups) == 2 and len(cluster.core.sleepers.asleep) == 2
    cluster.run()
    cluster.expect_outputs()


def test_another_is_woken_where_one_dies_that_a_deadline_needs() -> None:
    cluster = begin(4)
    send(cluster, 30, 2_900.0)
    run_to(cluster, 1_800.0)
    num_asleep = len(cluster.core.sleepers.asleep)
    assert num_asleep and len(cluster.core.groups) > 1
    cluster.kill(max(w for group in cluster.core.groups.values() for w in group.worker_ids))
    run_to(cluster, 2_100.0)
    assert decided(cluster)[-1].fields["reason"] in (WHY, "a worker has died")
    assert len(cluster.core.groups) > 1
    cluster.run()
    cluster.expect_outputs()


def test_a_batch_that_one_took_on_whole_is_shared_with_those_who_wake_for_it() -> None:
    cluster = begin(2, max_seqs=5)
    send(cluster, 5, 1_580.0)  # all of them fit into the one that is awake
    cluster.run(stop=lambda: any(r.kind == "offline_spread" for r in cluster.records))
    spread = next(r for r in cluster.records if r.kind == "offline_spread")
    assert spread.fields["requests"] and len(cluster.core.groups) == 2
    num_offline = [g.queues.num_running_offline + len(g.queues.waiting_offline) for g in cluster.core.groups.values()]
    assert max(num_offline) - min(num_offline) <= 1
    cluster.run()
    assert sum(r.kind == "offline_spread" for r in cluster.records) == 1
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_of_two_batches_the_one_that_comes_later_and_is_due_sooner_goes_first() -> None:
    cluster = begin()
    send(cluster, 20, 60_000.0, name="late")
    send(cluster, 3, 1_900.0, at_ms=1_600.0, name="soon")
    cluster.run(until_ms=1_900.0)
    left = {state.request_id for state in cluster.core.state.requests.values() if not state.is_finished}
    assert left and all(request_id.startswith("late") for request_id in left)
    cluster.run()
    cluster.expect_outputs()


def test_a_tenant_with_time_lends_its_turns_and_is_paid_back() -> None:
    cluster = begin(2, awake=AwakeParams(1, 1, True, 0.3))
    send(cluster, 15, 60_000.0, name="late", tenant="a")
    send(cluster, 5, 2_050.0, at_ms=1_600.0, name="soon", tenant="b")
    run_to(cluster, 1_750.0)
    tokens, states = cluster.core.state.offline_tokens, cluster.core.state.requests
    assert tokens.gives_way == {("a", int(60_000 * MS))} and cluster.core.ladder.decides_nothing_before().until_ns == 0
    run_to(cluster, 2_050.0)
    assert not num_left(cluster, "soon") and tokens.of("a") < tokens.of("b")
    run_to(cluster, 2_110.0)
    assert not tokens.gives_way, "asked on ticks"
    send(cluster, 2, 60_000.0, at_ms=2_120.0, name="more", tenant="b")
    run_to(cluster, 2_125.0)
    cluster.run(stop=lambda: states["more0"].first_scheduled_ns is not None)
    assert num_left(cluster, "late") and tokens.of("a") >= tokens.of("b") - states["more0"].num_prompt


def test_what_cannot_be_met_gives_way_to_what_can() -> None:
    cluster = begin(2)
    send(cluster, 30, 1_900.0, name="lost")
    send(cluster, 4, 2_000.0, name="soon")
    cluster.run(until_ms=2_000.0)
    assert not num_left(cluster, "soon") and num_left(cluster, "lost")
    cluster.run()
    cluster.expect_outputs()


def test_no_work_gives_way_once_workers_sleep_by_order_alone() -> None:
    for changes in ({"awake": AwakeParams(1, 1)}, {"rungs": ("shed",)}):
        cluster = begin(2, awake=AwakeParams(1, 1, True, 0.3))
        send(cluster, 15, 60_000.0, name="late", tenant="a")
        send(cluster, 5, 2_050.0, at_ms=1_600.0, name="soon", tenant="b")
        run_to(cluster, 1_750.0)
        tokens = cluster.core.state.offline_tokens
        assert tokens.gives_way
        cluster.core.reconfigure(replace(cluster.core.params, **changes))
        run_to(cluster, 2_400.0)
        assert num_left(cluster, "late") and not tokens.gives_way


def urgent_at_one_of_two(num_prompt: int = 1) -> tuple[Group, Group, Urgent]:
    """An urgent request and many that give way wait at one group; the other is free. Each has one place."""
    cluster = begin(2)
    full, free = cluster.core.groups.values()
    for number in range(300):
        name, tenant = ("soon", "b") if number == 299 else (f"late{number}", "a")
        asked = Request(
            name, (1,) * (num_prompt if name == "soon" else 1), SamplingParams(), 0, tenant=tenant,
            service_class=ServiceClass.OFFLINE, deadline_ns=5 if tenant == "b" else 9,
        )  # fmt: skip
        state = cluster.core.state.requests[name] = RequestState(asked, number)
        full.queues.enqueue(state)
    wake = cluster.core.ladder.rung("wake")
    assert isinstance(wake, WakeRung)
    urgent = Urgent(wake.means, lambda state: True)
    urgent.note([("b", 5)], [("a", 9)])
    return full, free, urgent


def test_what_is_urgent_goes_where_there_is_a_place_and_what_gives_way_is_not_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full, free, urgent = urgent_at_one_of_two()
    list(full.queues.waiting_offline)
    looked: list[RequestState] = []
    noting = lambda state: looked.append(state) or key_of(state)  # noqa: E731
    monkeypatch.setattr("jettison.core.ladder.waking.urgent.key_of", noting)
    full.hold("test", GroupHold.OFFLINE)
    (offer,) = urgent.look()
    assert offer.going == (("soon", free.group_id),) and len(looked) < 10


def test_what_is_urgent_does_not_go_where_no_offline_request_is_let_in() -> None:
    full, free, urgent = urgent_at_one_of_two()
    full.in_flight[0] = None  # type: ignore[assignment]  # a step is under way
    free.hold("test", GroupHold.OFFLINE)
    assert not list(urgent.look())
    free.release("test", GroupHold.OFFLINE)
    assert list(urgent.look())


@pytest.mark.parametrize("is_too_large", [False, True])
def test_no_request_gives_its_place_up_where_that_makes_no_room(is_too_large: bool) -> None:
    full, free, urgent = urgent_at_one_of_two(15 * BLOCK_SIZE + 1 if is_too_large else 1)
    later = next(s for s in full.queues.waiting_offline if s.request_id == "late0")
    full.queues.take_out(later)
    free.queues.enqueue(later)
    free.queues.take_waiting(["late0"], lambda _: False)
    free.blocks.admit(later, 0)
    later.first_scheduled_ns = 0
    free.queues.resume(later)
    full.in_flight[0] = None  # type: ignore[assignment]  # a step is under way
    offers = list(urgent.look())
    assert [offer.request_ids for offer in offers] == ([] if is_too_large else [("late0",)])

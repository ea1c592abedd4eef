"""Transfer, recompute, live: with pretend KV, where each step checks every layer of every row, wherever it lies."""

from __future__ import annotations

import random

import pytest
from fakes import FakeCluster, Faults

from jettison.core import ports


def start(mode: str, *, num_workers: int = 2, prefix: int = 0, num: int = 8, **more: object) -> FakeCluster:
    cluster = FakeCluster(
        full_blocks=80, num_layers=6, num_workers=num_workers, auto_restore=False, exchange=mode, **more  # type: ignore[arg-type]
    )
    rng = random.Random(5)
    shared = [rng.randrange(1, 60) for _ in range(prefix)]
    for i in range(num):
        own = [rng.randrange(1, 60) for _ in range(18 + i)]
        cluster.submit(f"r{i}", shared + own, 90, at_ms=3.0 * i)
    cluster.run(until_ms=60)
    return cluster


def finish(cluster: FakeCluster) -> None:
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert not cluster.core.state.distrusted


def stalls(cluster: FakeCluster) -> float:
    counters = cluster.core.state.counters
    return counters.stall_ns / max(1, counters.num_stalls)


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("prefix", [0, 20])
def test_live_requests_run_while_their_kv_moves(num_workers: int, prefix: int) -> None:
    cluster = start("live", num_workers=num_workers, prefix=prefix)
    for _ in range(num_workers - 1):
        cluster.order("drop")
        cluster.run(stop=lambda: not cluster.core.in_transition)
    finish(cluster)
    assert cluster.num_remote_rows > 0
    assert sum(g.counters.num_preemptions for g in cluster.core.groups.values()) == 0
    assert all(not m.urgent or len(m.src_blocks) == 1 for m in cluster.sent), "only the open block is urgent"


def test_live_stalls_are_shorter_than_those_of_a_transfer() -> None:
    measured = {}
    for mode in ("transfer", "live"):
        cluster = start(mode)
        cluster.order("drop")
        finish(cluster)
        measured[mode] = stalls(cluster)
    assert measured["live"] < measured["transfer"]


def test_recompute_sends_nothing() -> None:
    cluster = start("recompute")
    cluster.order("drop")
    finish(cluster)
    assert not cluster.sent
    assert sum(g.counters.num_preemptions for g in cluster.core.groups.values()) > 0


def test_a_lost_part_of_a_live_request_makes_it_start_again_and_nobody_else() -> None:
    cluster = start("live")
    seen: list[ports.SendKV] = []

    def fails(move: ports.SendKV) -> bool:
        if not move.urgent and not seen:
            seen.append(move)
            return True
        return False

    cluster.fails_move = fails
    cluster.order("drop")
    finish(cluster)
    assert seen
    assert sum(g.counters.num_preemptions for g in cluster.core.groups.values()) == 1


def test_a_peer_that_does_not_answer_costs_time_and_no_token() -> None:
    cluster = start("live", faults=Faults(remote=0.3))
    cluster.order("drop")
    cluster.run()
    assert cluster.num_faults > 0
    assert all(ends[0] != "error" for ends in cluster.ends.values())
    finish(cluster)


@pytest.mark.parametrize("after_ms", [0.2, 1.0, 2.0, 4.0, 8.0])
def test_cancelled_while_live(after_ms: float) -> None:
    cluster = start("live", prefix=12)
    now = cluster.now / 1e6
    for i in (0, 3, 5):
        cluster.cancel(f"r{i}", now + after_ms)
    cluster.order("drop")
    finish(cluster)


@pytest.mark.parametrize("mode", ["transfer", "live"])
def test_pages_are_given_back_by_one_call_each(mode: str) -> None:
    cluster = start(mode)
    cluster.order("drop")
    finish(cluster)
    answers = [kind for _, kind in cluster.log]
    assert answers.count("LayoutOffered") == 2, "only for the drop itself"
    assert answers.count("LayoutApplied") >= 4
    assert not cluster.num_stale_layouts


def test_a_member_that_refused_is_asked_for_an_offer_again() -> None:
    cluster = start("transfer")
    cluster.order("drop")
    cluster.run(stop=lambda: len(cluster.core.groups) == 1)
    cluster.workers[0].fail_applies = 1
    finish(cluster)
    assert [kind for _, kind in cluster.log].count("LayoutOffered") == 3


def test_foreign_pages_stay_until_no_step_can_ask_for_them() -> None:
    """The pretend workers forget what is not retained; a step that asks for it then would fail."""
    cluster = start("live", num=3)
    cluster.order("drop")
    finish(cluster)
    assert cluster.num_remote_rows > 0
    assert not any(w.layout.retained for w in cluster.core.state.workers.values())

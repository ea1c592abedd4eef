"""Requests that a later controller goes on with, and workers that it has taken over with some of their shards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FakeCluster, expected_run

from jettison.core import ports


def resumed(cluster: FakeCluster, request_id: str, num_told: int, at_ms: float = 0.0, max_tokens: int = 12) -> None:
    """Submit a request of which a client has so many tokens."""
    cluster.submit(request_id, list(range(1, 30)), max_tokens, at_ms, ignore_eos=True)
    _, _, event = next(entry for entry in cluster.heap if getattr(entry[2], "request", None) is not None
                       and entry[2].request.request_id == request_id)  # fmt: skip
    cluster.heap.remove(next(entry for entry in cluster.heap if entry[2] is event))
    expected, _ = expected_run(event.request, cluster.core.state.limits.max_model_len)
    cluster.outputs[request_id] = expected[:num_told]
    cluster.at(int(at_ms * 1e6), ports.Arrived(replace(event.request, resumed=tuple(expected[:num_told]))))


@pytest.mark.parametrize("num_told", [1, 5, 11])
def test_a_resumed_request_goes_on_behind_what_its_client_has(num_told):
    cluster = FakeCluster(num_workers=2)
    for at in range(6):
        resumed(cluster, f"r{at}", num_told, at_ms=float(at))
    cluster.submit("new", list(range(1, 20)), 8)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_worker_that_comes_with_some_of_its_shards_fetches_the_others_alone():
    cluster = FakeCluster(num_workers=2)
    cluster.submit("r", list(range(1, 20)), 8)
    shards = sorted(cluster.core.state.workers[0].layout.shards)
    kept = frozenset(shards[:2])
    fetched: list[str] = []
    carry_out = cluster._carry_out

    def note(action):
        if isinstance(action, ports.SendShard | ports.LoadShard):
            fetched.append(action.shard)
        carry_out(action)

    cluster._carry_out = note
    cluster.kill_at(0, 1.0)
    cluster.restart_at(0, 500.0)
    handle = cluster.core.handle

    def with_kept(event, now_ns):
        if isinstance(event, ports.WorkerJoined):
            cluster.workers[0].filled |= set(kept)
            event = event._replace(kept=kept)
        return handle(event, now_ns)

    cluster.core.handle = with_kept
    cluster.run()
    assert sorted(fetched) == [shard for shard in shards if shard not in kept]
    cluster.expect_outputs()
    cluster.expect_nothing_left()

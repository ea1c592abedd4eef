"""What ends while a shrinking layout has a worker's blocks locked: copies beside steps, and requests."""

from __future__ import annotations

import random

import pytest
from fakes import FakeCluster
from test_pulls import RESIDENCIES, arranged, fill

from jettison.core import ports
from jettison.core.ladder.swap import SwapRung
from jettison.core.moving.merging import MergePhase
from jettison.core.moving.relayout import RelayoutPhase
from jettison.core.preemption import Preemption
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.holds import GroupHold


def is_locked(cluster: FakeCluster) -> bool:
    """A merge has a layout applied, and no block may change hands."""
    is_remapping = any(m.phase is MergePhase.REMAP for m in cluster.core.merges)
    return is_remapping and any(w.ledger_locked for w in cluster.core.state.workers.values())


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_of_a_freed_request_may_end_while_its_blocks_are_moved(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    cluster = FakeCluster(
        num_workers=2, full_blocks=40, policy="drop", max_seqs=40, host_slots=500, seed=seed, auto_restore=False)
    pieces: list[object] = []
    monkeypatch.setattr(cluster, "_copy_beside", pieces.append)  # they end when the test says so
    rng, state = random.Random(seed), cluster.core.state
    for i in range(29):
        prompt = [rng.randrange(1, 60) for _ in range(16)]
        cluster.submit(f"r{i}", prompt, 40 if i < 28 else 260, i, ignore_eos=True)
    cluster.run(until_ms=60)
    cluster.order("drop")
    cluster.run(stop=lambda: len(state.groups) == 1 and not cluster.core.merges)
    (group,) = state.groups.values()
    cluster.run(stop=lambda: len(group.queues.running) == 1 and next(iter(group.queues.running.values())).is_settled)
    group.hold("test", GroupHold.STEPS)
    cluster.run(stop=lambda: not group.in_flight)
    (freed,) = group.queues.running.values()
    sent = cluster.core.checkpoints.send(group, [(freed.request_id, 100)], lambda group: 100)
    cluster.carry_out(sent)
    group.preempt(freed, Preemption.STEP)
    group.release("test", GroupHold.STEPS)
    cluster.order("restore")
    copied = {a.src: set(a.src_blocks) for a in sent if isinstance(a, ports.SendKV)}

    def moves_them() -> bool:
        return any(
            r.phase is RelayoutPhase.APPLY and {block for block, _ in r._copies} & copied[r.worker.worker_id]
            for m in cluster.core.restores for r in m._relayouts
        )

    cluster.run(stop=moves_them)
    assert pieces and moves_them()
    for action in sent:
        assert isinstance(action, ports.SendKV)
        cluster._process(ports.TransferEnded(action.transfer_id, True, 100, 100))
    assert any(w.given_up for w in state.workers.values())
    cluster.run(stop=lambda: not cluster.core.restores)
    assert len(state.groups) == 2 and not any(w.given_up for w in state.workers.values())
    cluster.core.check()
    cluster._process(ports.CancelRequested(freed.request_id))  # no rung here brings it back
    cluster.run()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_request_that_is_cancelled_meanwhile_is_gone_with_the_merge(
    monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    cluster = arranged(RESIDENCIES[4], policy="swap" if is_stored else "drop")
    fill(cluster, 8 if is_stored else 40)
    cluster.run(until_ms=60)
    state = swapped_out(cluster, monkeypatch) if is_stored else None
    cluster.order("drop")
    cluster.run(stop=lambda: is_locked(cluster))
    assert is_locked(cluster)
    if state is None:
        state = [s for g in cluster.core.merges[0].sources for s in g.queues.waiting][-1]
    cluster._process(ports.CancelRequested(state.request_id))
    if not is_stored:  # it has no block, and leaves at once
        assert state.phase is Phase.FINISHED and state.request_id not in cluster.core.state.requests
    else:
        assert state.ending is not None and state.phase is Phase.STORED
    merge = cluster.core.merges[0]
    cluster.run(stop=lambda: merge.group is not None)
    assert state.phase is Phase.FINISHED and state.request_id not in cluster.core.state.requests
    monkeypatch.undo()
    cluster.run()
    cluster.expect_nothing_left()


def swapped_out(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> RequestState:
    """A request in a host pool, which does not come back while the patch lasts."""
    monkeypatch.setattr(SwapRung, "_returning", lambda self, group: ())

    def settled() -> RequestState | None:
        running = (s for g in cluster.core.groups.values() for s in g.queues.running.values())
        return next((s for s in running if s.is_settled and not s.num_pending and s.num_computed), None)

    cluster.run(stop=lambda: settled() is not None)
    state = settled()
    assert state is not None
    cluster.core.hosted.swap.send_out(state)
    cluster.run(stop=lambda: state.phase is Phase.STORED)
    return state

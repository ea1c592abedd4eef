"""A drop serves those who waited for it within one step of its decision, beside what is computed again of requests
before them. Steps are counted; no time is asserted."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fakes import FakeCluster

from jettison.core import ports
from jettison.core.moving.merging import Merging
from jettison.core.requests import RequestState
from longrun import part_of


class Counting:
    """Counts, apart from the core, which steps end between a decision and the first step with a queued request."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.group_of_step: dict[int, int] = {}
        self.open: dict[tuple[int, ...], tuple[Merging, set[str], dict[str, RequestState], Counter[object]]] = {}
        self.between: list[int] = []
        """Of every drop that served its queue: most steps that one group ended."""
        self.num_stages: list[int] = []
        """Of the longest group that each of them merged: a pipeline has a microbatch in flight in each stage."""
        self.beside: list[int] = []
        """The same without steps of the merged group that compute again what requests had that were served before: they
        are older and go first, and where that is cheaper than moving their KV it may fill a step or two."""
        self.again: set[int] = set()
        """Those steps."""
        self.known: set[Merging] = set()
        self._handle, cluster.core.handle = cluster.core.handle, self.handle  # type: ignore[method-assign]

    def handle(self, event: ports.Event, now_ns: int) -> list[ports.Action]:
        group_id = self.group_of_step.get(event.step_id) if isinstance(event, ports.StepCompleted) else None
        for *_, ended in self.open.values() if group_id is not None else ():
            ended[group_id] += 1
            ended["again", group_id] += event.step_id in self.again
        actions = self._handle(event, now_ns)
        for action in actions:
            if isinstance(action, ports.RunStep):
                self.group_of_step[action.step_id] = action.group_id
                self._issued(action)
        for merge in self.cluster.core.merges:
            if merge not in self.known:
                self.known.add(merge)
                queued = {s.request_id for g in merge.sources for s in g.queues.waiting}
                if queued:
                    served = {name: state for g in merge.sources for name, state in g.queues.running.items()}
                    self.open[merge.worker_ids] = (merge, queued, served, Counter())
        return actions

    def _issued(self, step: ports.RunStep) -> None:
        rows = {row.state.request_id for row in step.rows}
        for key, (merge, queued, served, ended) in list(self.open.items()):
            involved = {g.group_id for g in merge.sources} | ({merge.group.group_id} if merge.group else set())
            computed = [row for row in step.rows if row.num_tokens > 1 and row.state.request_id in served]
            if merge.group and step.group_id == merge.group.group_id and computed and not rows & queued:
                self.again.add(step.step_id)
                ended["tokens"] += sum(row.num_tokens for row in computed)
                assert ended["tokens"] <= sum(state.num_tokens for state in served.values()), "each is computed once"
            if step.group_id in involved and rows & queued:
                del self.open[key]
                self.between.append(max((ended[g] for g in involved), default=0))
                self.beside.append(max((ended[g] - ended["again", g] for g in involved), default=0))
                self.num_stages.append(max(len(g.stages) for g in merge.sources))


def overloaded(seed: int) -> tuple[FakeCluster, Counting]:
    """Bursts that memory cannot take, on instances of which a dropped layer gives room for everything."""
    rng = random.Random(seed)
    cluster = FakeCluster(num_workers=rng.choice([2, 3, 4, 6]), full_blocks=24, seed=seed, eager=True, max_seqs=64,
                          max_tokens=64, exchange="transfer")
    cluster.check_every_event = False
    counting = Counting(cluster)
    number, at_ms = 0, 0.0
    for _ in range(3):
        for _ in range(12 * len(cluster.workers)):
            at_ms += rng.expovariate(1.0)
            cluster.submit(f"r{number}", [rng.randrange(1, 60) for _ in range(rng.randint(4, 24))],
                           rng.randint(20, 60), at_ms, ignore_eos=True)
            number += 1
        at_ms += 3_000.0
    return cluster, counting


@pytest.mark.parametrize("seed", part_of([*range(12), 18, 20, 21, 38], [0, 9, 18, 20, 21, 38]))
def test_at_most_one_step_of_a_group_ends_before_the_first_queued_request_runs(seed: int) -> None:
    cluster, counting = overloaded(seed)
    cluster.run()
    cluster.expect_outputs()
    served = [r.fields for r in cluster.records if r.kind == "queue_served"]
    decided = [r for r in cluster.records if r.kind == "drop_decided"]
    assert decided and len(served) >= len(decided)
    assert [fields["steps_between"] for fields in served] == counting.between
    assert 1 in counting.num_stages, "instances were merged, and not pipelines alone"
    assert all(n <= stages for n, stages in zip(counting.beside, counting.num_stages, strict=True))
    assert all(fields["queued"] for fields in served)


def test_a_record_says_when_it_was_decided_and_what_was_in_flight() -> None:
    cluster, _ = overloaded(1)
    cluster.run(stop=lambda: any(r.kind == "queue_served" for r in cluster.records))
    (served,) = (r for r in cluster.records if r.kind == "queue_served")
    (decided,) = (r for r in cluster.records if r.kind == "drop_decided")
    (drop,) = (r for r in cluster.records if r.kind == "drop")
    took_ms = served.fields["decision_to_first_queued_step_ms"]
    assert served.time_ns - decided.time_ns == round(took_ms * 1e6)  # type: ignore[operator]
    assert drop.fields["decision_to_serving_ms"] <= took_ms  # type: ignore[operator]
    assert (served.fields["step_in_flight_ms"] == 0.0) == (served.fields["steps_between"] == 0)


def test_a_queue_that_leaves_and_a_drop_that_fails_leave_nothing_to_watch() -> None:
    cluster, _ = overloaded(2)
    watch = cluster.core.moves.first_served
    cluster.run(stop=lambda: bool(watch.open))
    for state in list(watch.open[0].queued.values()):
        cluster.cancel(state.request_id, cluster.now / 1e6)
    cluster.run()
    assert not watch.open

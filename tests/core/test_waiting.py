"""The waiting queue: one tenant's order is what it always was, several take turns, and none is passed over twice."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import FakeCluster
from hypothesis import given
from hypothesis import strategies as st

from jettison.core import ports
from jettison.core.requests import RequestState
from jettison.core.serving.waiting import Turns, WaitingQueue
from jettison.policy.order import SchedulingPolicy
from jettison.types import Request, SamplingParams

TENANTS = "abcd"


class Queue:
    """A queue, and what has come of it."""

    def __init__(self, policy: SchedulingPolicy = "fcfs", turns: Turns | None = None) -> None:
        self.queue = WaitingQueue(turns, policy)
        self.num = 0

    def ask(self, tenant: str, priority: int = 0) -> RequestState:
        request = Request(f"{tenant}{self.num}", (1,), SamplingParams(), 0, priority, tenant=tenant)
        state = RequestState(request, self.num)
        self.num += 1
        self.queue.add(state)
        self.queue.check()
        return state

    def serve(self, count: int = 1, aside: frozenset[str] = frozenset()) -> list[RequestState]:
        able = [s for s in self.queue if s.request_id not in aside][:count]
        before = [s.request_id for s in self.queue]
        taken = self.queue.take([s.request_id for s in able], lambda s: s.request_id in aside)
        assert taken == able
        self.queue.check()
        if not aside:  # what was planned ahead still holds
            assert [s.request_id for s in self.queue] == before[count:]
        return taken


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(TENANTS), st.integers(-1, 1)),
        st.tuples(st.just("serve"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("preempt"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("deal"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(ACTS)
def test_with_one_tenant_the_order_is_priority_and_arrival(acts: list[tuple[str, object, int]]) -> None:
    told, running = Queue(), []
    mirror: list[RequestState] = []
    for what, number, priority in acts:
        if what == "ask":
            mirror.append(told.ask("only", priority))
        elif what == "serve" and mirror:
            count = min(int(number), len(mirror))  # type: ignore[call-overload]
            taken = told.serve(count)
            assert taken == mirror[:count]
            running += taken
            del mirror[:count]
        elif what == "preempt" and running:
            told.queue.add(running[0])
            mirror.append(running.pop(0))
        mirror.sort(key=lambda s: s.order)
        assert list(told.queue) == mirror and told.queue.head is (mirror[0] if mirror else None)


@given(ACTS, st.sampled_from(["fcfs", "priority"]))
def test_nobody_who_waits_is_passed_over_twice_and_preempted_requests_come_first(
    acts: list[tuple[str, object, int]], policy: SchedulingPolicy
) -> None:
    """Whatever comes, is served, preempted, cancelled or dealt again to another group."""
    turns = Turns()
    told, running = Queue(policy, turns), []
    passed: dict[str, Counter[str]] = {}
    """Tenant that waits -> how often each other one got a turn since it began to wait, or had its last turn."""
    for what, number, priority in acts:
        if what == "ask":
            tenant = str(number)
            # Under the policy priority only equal ones take turns.
            told.ask(tenant, priority if policy == "fcfs" else 0)
            passed.setdefault(tenant, Counter())
        elif what == "serve":
            for _ in range(int(number)):  # type: ignore[call-overload]
                if not told.queue:
                    break
                # A tenant's own priorities may keep its own preempted request waiting: no business of others.
                lines: dict[str, RequestState] = {}
                for state in sorted(told.queue, key=lambda s: s.order):
                    lines.setdefault(state.tenant, state)
                again = [s for s in lines.values() if s.turn is not None]
                (taken,) = told.serve()
                if again:
                    assert taken is min(again, key=lambda s: s.turn or 0)
                else:
                    for tenant, counts in passed.items():
                        if tenant != taken.tenant:
                            counts[taken.tenant] += 1
                            assert counts[taken.tenant] <= 1, f"{tenant} was passed over twice"
                    passed[taken.tenant] = Counter()
                running.append(taken)
        elif what == "preempt" and running:
            state = running.pop(int(number) % len(running))  # type: ignore[call-overload]
            told.queue.add(state)
            passed.setdefault(state.tenant, Counter())
        elif what == "leave" and told.queue:
            told.queue.remove(list(told.queue)[int(number) % len(told.queue)])  # type: ignore[call-overload]
        elif what == "deal":
            queue, before = WaitingQueue(turns, policy), list(told.queue)
            for state in sorted(told.queue.clear(), key=lambda s: s.order):
                queue.add(state)
            told.queue = queue
            assert list(queue) == before, "turns survive when queues are dealt again"
        told.queue.check()
        waits = {s.tenant for s in told.queue}
        passed = {tenant: counts for tenant, counts in passed.items() if tenant in waits}
        assert told.queue.head is next(iter(told.queue), None) and len(told.queue) == len(list(told.queue))


def test_one_that_steps_aside_has_had_its_turn_and_stays_the_head() -> None:
    """Overload is read off the head: it must not come and go with the turns of others."""
    told = Queue()
    giant = told.ask("a")
    for tenant in "aabb":
        told.ask(tenant)
    aside = frozenset({giant.request_id})
    assert [s.request_id for s in told.serve(1, aside)] == ["b3"]
    assert told.queue.head is giant
    assert [s.request_id for s in told.serve(1, aside)] == ["a1"], "its tenant goes on when it is its turn again"
    assert told.queue.head is giant
    assert [s.request_id for s in told.serve(3)] == ["a0", "b4", "a2"]


def test_priority_counts_among_a_tenants_own() -> None:
    told = Queue()
    for tenant, priority in (("a", 0), ("a", 0), ("b", -5), ("a", -1), ("b", -9)):
        told.ask(tenant, priority)
    assert [s.request_id for s in told.queue] == ["a3", "b4", "a0", "b2", "a1"]
    told = Queue("priority")
    for tenant, priority in (("a", 0), ("a", 0), ("b", -5), ("a", -1), ("b", -9)):
        told.ask(tenant, priority)
    assert [s.request_id for s in told.queue] == ["b4", "b2", "a3", "a0", "a1"]


def test_a_request_that_does_not_wait_cannot_be_removed() -> None:
    told = Queue()
    (state,) = [told.ask("a")]
    told.serve()
    with pytest.raises(ValueError, match="not in deque"):
        told.queue.remove(state)


# --- in a cluster


def first_served(cluster: FakeCluster) -> list[str]:
    """Requests in the order in which they were first in a step."""
    seen: dict[str, None] = {}
    handle = cluster.core.handle

    def handled(event: ports.Event, now_ns: int) -> list[ports.Action]:
        actions = handle(event, now_ns)
        for action in actions:
            if isinstance(action, ports.RunStep):
                seen.update(dict.fromkeys(row.state.request_id for row in action.rows))
        return actions

    cluster.core.handle = handled  # type: ignore[method-assign]
    cluster.run()
    cluster.expect_outputs()
    return list(seen)


@pytest.mark.parametrize("priority", [0, -1000])
def test_a_tenant_with_many_requests_does_not_shut_out_another(priority: int) -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=8, max_seqs=1)
    for i in range(100):
        cluster.submit(f"a{i}", [1, 2, 3], 3, 0.0, tenant="a")
    cluster.submit("b", [1, 2, 3], 3, 0.01, tenant="b", priority=priority)
    assert first_served(cluster).index("b") == 2, "one of a's runs, and a's turn comes before a newcomer's"


def test_whoever_asks_for_the_policy_priority_gets_it() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=8, max_seqs=1, scheduling_policy="priority")
    for i in range(5):
        cluster.submit(f"a{i}", [1, 2, 3], 3, 0.0, tenant="a", priority=-1)
    cluster.submit("b", [1, 2, 3], 3, 0.01, tenant="b")
    assert first_served(cluster)[-1] == "b"


@pytest.mark.parametrize("policy", ["drop", "recompute", "migrate"])
def test_turns_survive_deaths_and_drops(policy: str) -> None:
    """Requests that wait are dealt out again when a worker dies and comes back, and when groups merge."""
    cluster = FakeCluster(num_workers=3, full_blocks=10, max_seqs=2, policy=policy)
    for i in range(60):
        cluster.submit(f"a{i}", [1, 2, 3], 3, 0.0, tenant="a")
    for tenant in "bc":
        for i in range(3):
            cluster.submit(f"{tenant}{i}", [1, 2, 3], 3, 0.5, tenant=tenant)
    cluster.kill_at(1, 3.0)
    cluster.restart_at(1, 60.0)
    if policy == "drop":
        cluster.order_at("drop", 8.0)
    served = first_served(cluster)
    last_light = max(served.index(f"{tenant}{i}") for tenant in "bc" for i in range(3))
    # Up to 6 had begun before b and c came; then each turn of theirs lets two others go first, in each of 3 groups.
    assert last_light <= 6 + 3 * 3 * 3, served[: last_light + 1]

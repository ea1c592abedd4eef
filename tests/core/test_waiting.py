"""The waiting queue: one tenant's order is its own, and of several the one that has been served least is next."""

from __future__ import annotations

import pytest
from fakes import FakeCluster
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.core import ports
from jettison.core.requests import RequestState
from jettison.core.serving import waiting
from jettison.core.serving.virtualtokens import LEAST_SWEEP, VirtualTokens, key_of
from jettison.core.serving.waiting import WaitingQueue
from jettison.policy.order import OUTPUT_WEIGHT, PROMPT_WEIGHT, SchedulingPolicy
from jettison.types import Request, SamplingParams, ServiceClass

TENANTS = "abcd"


class Queue:
    """A queue, and what has come of it."""

    def __init__(self, policy: SchedulingPolicy = "fcfs") -> None:
        self.num = 0
        self.asked: list[RequestState] = []
        self.tokens = VirtualTokens(lambda: (s.tenant for s in self.asked))
        self.policy: SchedulingPolicy = policy
        self.queue = WaitingQueue(self.tokens, policy)

    def ask(self, tenant: str, priority: int = 0, num_prompt: int = 1, deadline_ns: int | None = None) -> RequestState:
        state = self.state(tenant, priority, num_prompt, deadline_ns)
        self.queue.add(state)
        self.queue.check()
        return state

    def state(
        self, tenant: str, priority: int = 0, num_prompt: int = 1, deadline_ns: int | None = None
    ) -> RequestState:
        request = Request(
            f"{tenant}{self.num}", (1,) * num_prompt, SamplingParams(), 0, priority, tenant=tenant,
            deadline_ns=deadline_ns,
        )
        state = RequestState(request, self.num, self.policy)
        self.num += 1
        self.asked.append(state)
        return state

    def serve(self, count: int = 1, aside: frozenset[str] = frozenset()) -> list[RequestState]:
        able = [s for s in self.queue if s.request_id not in aside][:count]
        before = [s.request_id for s in self.queue]
        taken = self.queue.take([s.request_id for s in able], lambda s: s.request_id in aside)
        assert taken == able
        for state in taken:
            if state.first_scheduled_ns is None:
                state.first_scheduled_ns = 0
                self.tokens.charge(state.tenant, PROMPT_WEIGHT * state.num_prompt)
        self.queue.check()
        self.tokens.check(self.asked)
        if not aside:  # what was planned ahead still holds
            assert [s.request_id for s in self.queue] == before[count:]
        return taken

    def deal(self) -> None:
        """All that wait are queued again, in another group."""
        queue = WaitingQueue(self.tokens, self.policy)
        for state in sorted(self.queue.clear(), key=lambda s: s.order):
            queue.add(state)
        self.queue = queue


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(TENANTS), st.integers(-1, 1)),
        st.tuples(st.just("serve"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("compute"), st.integers(0, 9), st.integers(1, 20)),
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
    assert told.tokens.of("only") == 0, "whatever a lone tenant has been served, the next one is lifted to it"


@given(ACTS, st.sampled_from(["fcfs", "priority"]))
def test_who_has_been_served_least_is_next_and_preempted_requests_come_first(
    acts: list[tuple[str, object, int]], policy: SchedulingPolicy
) -> None:
    """Whatever comes, is served, computed, preempted, cancelled or dealt again to another group."""
    told, running = Queue(policy), []
    for what, number, other in acts:
        if what == "ask":
            told.ask(str(number), other if policy == "fcfs" else 0, num_prompt=3 + 5 * other + len(told.asked) % 4)
        elif what == "serve":
            for _ in range(int(number)):  # type: ignore[call-overload]
                if not told.queue:
                    break
                # A tenant's own priorities may keep its own preempted request waiting: no business of others.
                lines: dict[str, RequestState] = {}
                for state in sorted(told.queue, key=lambda s: s.order):
                    lines.setdefault(state.tenant, state)
                again = [s for s in lines.values() if s.turn is not None]
                least = min(told.tokens.of(tenant) for tenant in lines)
                (taken,) = told.serve()
                if again:
                    assert taken is min(again, key=lambda s: s.turn or 0)
                else:
                    assert told.tokens.of(taken.tenant) - least in (0, taken.num_prompt)
                running.append(taken)
        elif what == "compute" and running:
            told.tokens.charge(running[int(number) % len(running)].tenant, OUTPUT_WEIGHT * other)  # type: ignore[call-overload]
        elif what == "preempt" and running:
            told.queue.add(running.pop(int(number) % len(running)))  # type: ignore[call-overload]
        elif what == "leave" and told.queue:
            state = list(told.queue)[int(number) % len(told.queue)]  # type: ignore[call-overload]
            told.queue.remove(state)
            told.tokens.leave(state)
        elif what == "deal":
            before = list(told.queue)
            told.deal()
            assert list(told.queue) == before, "what was served is not forgotten when queues are dealt again"
        told.queue.check()
        told.tokens.check(told.asked)
        assert told.queue.head is next(iter(told.queue), None) and len(told.queue) == len(list(told.queue))


LENDING = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(TENANTS), st.none() | st.integers(1, 3)),
        st.tuples(st.just("serve"), st.just(""), st.integers(1, 3)),
        st.tuples(st.just("preempt"), st.just(""), st.just(0)),
        st.tuples(st.just("lend"), st.sampled_from([*TENANTS, ""]), st.integers(1, 3)),
    ),
    max_size=60,
)


@given(LENDING)
def test_what_gives_way_goes_behind_whatever_was_served_or_preempted(acts: list[tuple[str, str, int | None]]) -> None:
    told, running = Queue(), []
    for what, tenant, number in acts:
        if what == "ask":
            told.ask(tenant, deadline_ns=number)
        elif what == "serve" and told.queue:
            running += told.serve(min(number or 0, len(told.queue)))
        elif what == "preempt" and running:
            told.queue.add(running.pop(0))
        elif what == "lend":
            told.tokens.gives_way = frozenset({(tenant, number)} if tenant else ())
        told.queue.check()
        ways = [key_of(s) in told.tokens.gives_way for s in told.queue]
        assert ways == sorted(ways) and told.queue.head is next(iter(told.queue), None)
        for name in TENANTS:
            own = [(gives, s.order) for gives, s in zip(ways, told.queue, strict=True) if s.tenant == name]
            assert own == sorted(own)


def test_a_line_is_not_walked_for_each_that_joins_it_while_something_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    told, looked = Queue(), []
    for number in range(400):
        told.queue.add(told.state("a", deadline_ns=2 + number % 2))
    told.tokens.gives_way = frozenset({("a", 3)})
    assert [s.request.deadline_ns for s in told.queue] == [2] * 200 + [3] * 200
    monkeypatch.setattr(waiting, "key_of", lambda state: looked.append(state) or key_of(state))
    for deadline_ns in (2, 3):
        told.queue.add(told.state("a", deadline_ns=deadline_ns))
    assert len(looked) < 40
    told.queue.check()


# --- what idleness earns


def counts(told: Queue, tenants: str = "abc") -> list[int]:
    return [told.tokens.of(tenant) for tenant in tenants]


def test_who_comes_to_an_empty_line_is_lifted_to_the_least_of_those_in_line() -> None:
    told = Queue()
    for tenant in "aab":
        told.ask(tenant, num_prompt=10)
    told.serve(2)
    told.tokens.charge("b", 7)
    told.ask("b", num_prompt=10)
    assert counts(told) == [10, 17, 0], "one that has been served more than that keeps its count"
    told.ask("c")
    assert counts(told) == [10, 17, 10]
    told.ask("c")
    assert counts(told) == [10, 17, 10], "with one in line already nothing is lifted"


def test_where_nobody_is_in_line_it_is_lifted_to_who_left_last() -> None:
    told = Queue()
    for tenant in "ab":
        told.ask(tenant, num_prompt=10)
    told.serve(2)
    told.tokens.charge("b", 30)
    told.ask("c")
    assert counts(told) == [10, 40, 40], "b left last, and goes on being served"
    told.ask("a")
    assert counts(told) == [40, 40, 40]


def test_being_dealt_out_again_is_no_return() -> None:
    told = Queue()
    for tenant, num_prompt in (("a", 1), ("b", 50), ("a", 1), ("b", 1)):
        told.ask(tenant, num_prompt=num_prompt)
    told.serve(2)
    told.deal()
    assert counts(told, "ab") == [1, 50] and [s.request_id for s in told.queue] == ["a2", "b3"]


def test_a_request_that_has_had_its_turn_is_in_line_no_more() -> None:
    told = Queue()
    told.ask("a", num_prompt=1)
    told.ask("b", num_prompt=50)
    again, _ = told.serve(2)
    told.queue.add(again)
    told.ask("c")
    assert counts(told) == [1, 50, 50], "a waits, but is owed nothing: its next request would be lifted, too"


def test_tenants_that_are_gone_are_forgotten_and_it_makes_no_difference() -> None:
    told = Queue()
    for i in range(1_000):
        told.ask("stays", num_prompt=5)
        told.ask(f"t{i}", num_prompt=3)
        told.serve(len(told.queue) - 1)
        told.asked = [s for s in told.asked if s.turn is None]  # what is served ends at once
        assert len(told.tokens._counts) < 3 * LEAST_SWEEP
    (left,) = told.queue
    assert told.tokens.of("t0") == 0 and told.tokens.of(left.tenant) > 1_000
    told.ask("t0")
    assert told.tokens.of("t0") == told.tokens.of(left.tenant), "where it would have been lifted to, had it been kept"


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
    assert first_served(cluster).index("b") == 1, "one of a's runs, which counts from when b is there"


def test_whoever_asks_for_the_policy_priority_gets_it() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=8, max_seqs=1, scheduling_policy="priority")
    for i in range(5):
        cluster.submit(f"a{i}", [1, 2, 3], 3, 0.0, tenant="a", priority=-1)
    cluster.submit("b", [1, 2, 3], 3, 0.01, tenant="b")
    assert first_served(cluster)[-1] == "b"


@pytest.mark.parametrize("policy", ["drop", "recompute", "migrate"])
def test_counts_survive_deaths_and_drops(policy: str) -> None:
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
    # Up to 6 had begun before b and c came; then each of theirs lets two others go first, in each of 3 groups.
    assert last_light <= 6 + 3 * 3 * 3, served[: last_light + 1]


def backlogged(
    sizes: dict[str, list[tuple[int, int]]], max_seqs: int, full_blocks: int, service_class: ServiceClass
) -> FakeCluster:
    """One instance and, for each tenant, requests of so many prompt and output tokens; all of them at once."""
    cluster = FakeCluster(
        num_workers=1, full_blocks=full_blocks, max_seqs=max_seqs, policy="recompute", prefix_caching=False
    )
    for tenant, asked in sizes.items():
        for i, (num_prompt, num_output) in enumerate(asked):
            tokens = [1 + (7 * i + j) % 50 for j in range(num_prompt)]
            cluster.submit(
                f"{tenant}{i}", tokens, num_output, 0.0, tenant=tenant, ignore_eos=True, service_class=service_class
            )
    return cluster


SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=5, max_size=25)


@settings(deadline=None, max_examples=30)
@given(SIZES, SIZES, st.integers(1, 5), st.integers(18, 40), st.sampled_from(ServiceClass))
def test_between_two_backlogged_tenants_counts_stay_within_the_papers_bound(
    a: list[tuple[int, int]], b: list[tuple[int, int]], max_seqs: int, full_blocks: int, service_class: ServiceClass
) -> None:
    """Lemma 4.3: a prompt, or twice what runs may hold: with one place twice the largest request. And no step is left
    out while anybody waits, however blocks run out and requests are preempted."""
    cluster = backlogged({"a": a, "b": b}, max_seqs, full_blocks, service_class)
    largest = max(sum(size) for size in a + b)
    bound, core = max(PROMPT_WEIGHT, OUTPUT_WEIGHT) * max_seqs * largest, cluster.core
    is_offline = service_class is ServiceClass.OFFLINE
    tokens = core.state.offline_tokens if is_offline else core.state.tokens
    apart: list[int] = []

    def look() -> bool:
        (group,) = core.groups.values()
        queue = group.queues.waiting_offline if is_offline else group.queues.waiting
        assert not queue or group.in_flight, "a request waits, and nothing runs"
        if len(queue.num_by_tenant()) == 2:
            apart.append(abs(tokens.of("a") - tokens.of("b")))
        return False

    cluster.run(stop=look)
    assert apart and max(apart) <= bound
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    served = sum(PROMPT_WEIGHT * p + OUTPUT_WEIGHT * o for p, o in a + b)
    assert tokens.of("a") + tokens.of("b") <= served + bound, "nothing is charged twice, whatever was preempted"


@pytest.mark.parametrize("service_class", ServiceClass)
def test_five_hundred_long_requests_hold_up_no_other_tenants_one(service_class: ServiceClass) -> None:
    cluster = backlogged({"many": [(40, 30)] * 500, "one": []}, 4, 40, service_class)
    cluster.submit("one", [1] * 10, 5, 50.0, tenant="one", service_class=service_class)
    cluster.run(stop=lambda: "one" in cluster.core.state.requests)
    before = cluster.core.groups[0].counters.num_steps
    cluster.run(stop=lambda: "one" not in cluster.core.state.requests)
    assert cluster.core.groups[0].counters.num_steps - before < 3 * 30, "those that run end, and it is next"
    assert len(cluster.core.state.requests) > 450


def test_the_earlier_deadline_of_a_tenant_goes_first() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=8, max_seqs=1)
    for name, deadline_s in (("runs", None), ("late", 900), ("soon", 60), ("now", None)):
        deadline_ns = None if deadline_s is None else deadline_s * 10**9
        cluster.submit(name, [1, 2, 3], 3, tenant="a", service_class=ServiceClass.OFFLINE, deadline_ns=deadline_ns)
    assert first_served(cluster) == ["runs", "now", "soon", "late"]

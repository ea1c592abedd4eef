"""A pipeline's microbatches planned ahead: balanced, made anew when something happens, and never against memory."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_group import Bench

from jettison.core.ports import RunStep
from jettison.core.requests import RequestState
from jettison.core.serving import stepplan
from jettison.core.serving.holds import GroupHold
from jettison.policy.batching import BlockedBy
from jettison.policy.lookahead import LookaheadParams, LookaheadView
from jettison.types import Request, SamplingParams, ServiceClass


def rows(step: RunStep | None) -> list[tuple[str, int, int]]:
    assert step is not None
    return [(r.state.request_id, r.context_len, r.num_tokens) for r in step.rows]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[LookaheadView]:
    """From what microbatches were planned."""
    made: list[LookaheadView] = []
    plan = stepplan.plan_microbatches

    def counted(view, cost, least_tokens):  # type: ignore[no-untyped-def]
        made.append(view)
        return plan(view, cost, least_tokens)

    monkeypatch.setattr(stepplan, "plan_microbatches", counted)
    return made


def pipeline(num_stages: int = 2, num_blocks: int = 100, min_tokens: int = 8, **limits: object) -> Bench:
    return Bench(num_blocks, num_stages, lookahead=LookaheadParams(enabled=True, min_tokens=min_tokens), **limits)


def test_the_queue_is_divided_evenly_and_planned_once_while_nothing_happens(plans: list[LookaheadView]) -> None:
    bench = pipeline(min_tokens=12)
    bench.ask("a", 14)
    bench.ask("b", 10)
    assert rows(bench.plan()) == [("a", 0, 12)]
    assert rows(bench.plan()) == [("a", 12, 2), ("b", 0, 10)]
    assert len(plans) == 1


def test_an_arrival_and_a_commit_make_the_plan_anew(plans: list[LookaheadView]) -> None:
    bench = pipeline(enable_prefix_caching=False)
    bench.ask("a", 24)
    first = bench.plan()
    assert first is not None and rows(first) == [("a", 0, 8)]
    bench.ask("b", 12)
    assert rows(bench.plan()) == [("a", 8, 9)]
    assert len(plans) == 2
    bench.commit(first)
    assert rows(bench.plan()) == [("a", 17, 7), ("b", 0, 3)]
    assert len(plans) == 3


def test_what_memory_does_not_admit_is_not_counted_on() -> None:
    bench = pipeline(num_blocks=5)
    bench.ask("a", 16)
    bench.ask("big", 16)
    assert rows(bench.plan()) == [("a", 0, 8)]
    assert rows(bench.plan()) == [("a", 8, 8)]
    assert bench.group.head_blocked_by is BlockedBy.MEMORY


def test_few_tokens_go_by_plain_budgets() -> None:
    bench = pipeline(min_tokens=16)
    bench.ask("a", 15)
    assert rows(bench.plan()) == [("a", 0, 15)]


def test_one_stage_never_looks_ahead(plans: list[LookaheadView]) -> None:
    bench = pipeline(num_stages=1)
    bench.ask("a", 40)
    assert rows(bench.plan()) == [("a", 0, 16)]
    assert plans == []


def test_decodes_under_pressure_preempt_as_they_do_without_lookahead() -> None:
    outputs = []
    for enabled in (True, False):
        bench = Bench(6, 2, lookahead=LookaheadParams(enabled=enabled, min_tokens=4), enable_prefix_caching=False)
        states = [bench.ask(name, 7, max_tokens=8) for name in "abc"]
        for _ in range(200):
            for step in [s for s in (bench.plan(), bench.plan()) if s is not None]:
                bench.commit(step)
            if all(len(s.tokens) == 15 for s in states):
                break
        assert bench.group.counters.num_preemptions > 0
        outputs.append([s.tokens for s in states])
    assert outputs[0] == outputs[1]
    assert all(len(tokens) == 15 for tokens in outputs[0])


def step_both_ways(bench: Bench) -> bool:
    """A step, which is planned both ways first. Returns whether the short way had a plan."""
    planner = bench.group.planner
    short = planner._decodes()
    if short is not None:
        assert short == planner._planned()(planner.view(), planner.limits())
    bench.step()
    return short is not None


@settings(max_examples=100, deadline=None)
@given(
    st.integers(6, 14), st.booleans(), st.integers(2, 6), st.integers(3, 16),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 18), st.integers(2, 12)), min_size=3, max_size=9),
)
@example(14, True, 6, 3, [(0, 1, 12)] * 6)
def test_decodes_alone_are_planned_as_with_a_row_for_each(
    num_blocks: int, prefill_first: bool, max_num_seqs: int, num_tokens: int, requests: list[tuple[int, int, int]]
) -> None:
    """Whatever waits, lacks blocks or is preempted meanwhile."""
    bench = Bench(
        num_blocks, prefill_first=prefill_first, max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens)
    states = []
    for number, (num_steps, num_prompt, num_output) in enumerate(requests):
        for _ in range(num_steps):
            step_both_ways(bench)
        states.append(bench.ask(f"r{number}", num_prompt, max_tokens=min(num_output, 4 * num_blocks - num_prompt)))
    for _ in range(400):
        if not bench.group.queues.running and not bench.group.queues.has_waiting:
            break
        step_both_ways(bench)
    assert all(state.num_output > 0 for state in states)


def offline_suspect(bench: Bench, num_tokens: int) -> RequestState:
    """A waiting request of a batch that was under way at two deaths."""
    request = Request(
        "batch", tuple(range(100, 100 + num_tokens)), SamplingParams(max_tokens=5), 0,
        service_class=ServiceClass.OFFLINE,
    )
    state = RequestState(request, 99)
    state.suspicion.on_trial = True
    bench.group.queues.enqueue(state)
    return state


def test_an_offline_suspect_that_waits_for_memory_is_passed_by_online_requests() -> None:
    bench = Bench(10, enable_prefix_caching=False)
    bench.ask("chat", 12)
    bench.step()
    offline_suspect(bench, 32)
    bench.ask("next", 4)
    assert [name for name, _, _ in bench.step()] == ["chat", "next"]
    assert bench.group.head_blocked_by is None


def test_an_offline_suspect_is_tried_only_while_offline_work_is_admitted() -> None:
    bench = Bench(20, enable_prefix_caching=False)
    offline_suspect(bench, 8)
    bench.ask("chat", 4)
    bench.group.hold("test", GroupHold.OFFLINE)
    assert [[name for name, _, _ in bench.step()] for _ in range(3)] == [["chat"]] * 3
    bench.group.release("test", GroupHold.OFFLINE)
    assert [name for name, _, _ in bench.step()] == ["batch"], "alone"


def test_most_steps_have_decodes_alone() -> None:
    bench = Bench()
    for name in "abc":
        bench.ask(name, 5, max_tokens=20)
    bench.step()
    bench.ask("d", 5, max_tokens=20)
    assert [step_both_ways(bench) for _ in range(10)] == [True] * 10

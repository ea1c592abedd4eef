"""One group's serving loop: chunks, cache, preemption, ends, versions. The model is three lines here."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
from fakes import fake_prompt_logprobs

from jettison.core.ports import RunStep, StepCompleted
from jettison.core.preemption import Preemption
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.group import Group, SchedulerLimits
from jettison.core.serving.holds import GroupHold
from jettison.errors import StalePlanError
from jettison.memory.blocks import BlockLedger
from jettison.memory.prefix import PrefixHasher
from jettison.memory.stages import StagePlan
from jettison.policy.batching import BlockedBy, plan_batch
from jettison.policy.lookahead import LookaheadParams
from jettison.types import LATER_TOKEN_ID, FinishReason, LayerRange, Request, SampledToken, SamplingParams

EOS = 2
LIMITS = SchedulerLimits(
    block_size=4, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=1000, watermark=0.0,
    eos_token_ids=frozenset({EOS}),
)


class RowResult(NamedTuple):
    """What came of one row that got a token or ended."""

    state: RequestState
    token: SampledToken | None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class Bench:
    """A group and somebody who runs its steps; every token it samples is ``token``."""

    def __init__(self, num_blocks: int = 100, num_stages: int = 1, **limits: object) -> None:
        self.limits = dataclasses.replace(LIMITS, **limits)  # type: ignore[arg-type]
        edges = range(0, 2 * num_stages + 1, 2)
        stages = tuple(StagePlan(w, LayerRange(lo, lo + 2)) for w, lo in enumerate(edges[:-1]))
        self.ledgers = {w: BlockLedger(num_blocks, 4) for w in range(num_stages)}
        self.group = Group(0, 0, stages, self.ledgers, self.limits, PrefixHasher(4, b"k"))
        self.steps = 0
        self.token = 9

    def ask(
        self, name: str, prompt: int | list[int], *, priority: int = 0, salt: str = "", **params: object
    ) -> RequestState:
        tokens = tuple(range(100, 100 + prompt)) if isinstance(prompt, int) else tuple(prompt)
        sampling = SamplingParams(**{"max_tokens": 50, **params})  # type: ignore[arg-type]
        state = RequestState(Request(name, tokens, sampling, 0, priority, salt), self.steps)
        self.steps += 1
        self.group.queues.enqueue(state)
        return state

    def plan(self) -> RunStep | None:
        self.steps += 1
        step = self.group.next_step(self.steps, self.steps)
        self.group.check()
        return step

    def commit(self, step: RunStep, token: int | None = None) -> list[RowResult]:
        tokens = [SampledToken(self.token if token is None else token) for row in step.rows if row.samples]
        prompt = {i: entries for i, row in enumerate(step.rows) if (entries := fake_prompt_logprobs(row))}
        outcome = self.group.commit(StepCompleted(step.step_id, tokens, prompt, 0), self.steps)
        for end in outcome.ended:
            self.group.queues.take_out(end.state)
            self.group.release_blocks(end.state)
        self.group.check()
        going_on = zip(outcome.going_on, outcome.tokens, strict=True)
        results = [*(RowResult(s, token) for s, token in going_on), *(RowResult(*end) for end in outcome.ended)]
        in_order = [row.state for row in step.rows]
        return sorted(results, key=lambda result: in_order.index(result.state))

    def step(self, token: int | None = None) -> list[tuple[str, int, int]]:
        """Plan, run, commit: (request, context, tokens) of each row."""
        step = self.plan()
        if step is None:
            return []
        self.commit(step, token)
        return [(r.state.request_id, r.context_len, r.num_tokens) for r in step.rows]


# --- prefill


def test_a_row_whose_grammar_is_not_ready_is_sampled_later_and_no_other_waits() -> None:
    """Its last token is computed once more; the block that it would have filled is sealed then."""
    bench = Bench()
    late, other = bench.ask("late", 8), bench.ask("other", 5)
    step = bench.plan()
    assert step is not None and [row.samples for row in step.rows] == [True, True]
    tokens = [SampledToken(LATER_TOKEN_ID), SampledToken(9)]
    outcome = bench.group.commit(StepCompleted(step.step_id, tokens, {}, 0), 1)
    bench.group.check()
    assert outcome.going_on == [other] and not outcome.ended
    assert (late.num_computed, late.num_sealed, late.tokens[8:]) == (7, 1, [])
    assert (other.num_computed, other.tokens[5:]) == (5, [9])
    assert sorted(bench.step()) == [("late", 7, 1), ("other", 5, 1)]
    assert late.num_sealed == 2 and late.tokens[8:] == [9]
    step = bench.plan()
    assert step is not None
    bench.commit(step, LATER_TOKEN_ID)
    assert late.num_computed == 8 and late.ending is None
    assert sorted(bench.step()) == [("late", 8, 1), ("other", 6, 1)]


def test_a_long_prompt_goes_in_chunks_and_samples_once() -> None:
    bench = Bench()
    state = bench.ask("a", 40)
    assert [bench.step() for _ in range(3)] == [[("a", 0, 16)], [("a", 16, 16)], [("a", 32, 8)]]
    assert state.tokens[40:] == [9]
    assert bench.step() == [("a", 40, 1)]


def test_decodes_go_on_beside_a_long_prompt() -> None:
    bench = Bench(enable_prefix_caching=False)
    bench.ask("a", 4)
    bench.step()
    bench.ask("b", 30)
    assert bench.step() == [("a", 4, 1), ("b", 0, 15)]
    assert bench.step() == [("a", 5, 1), ("b", 15, 15)]
    assert bench.step() == [("a", 6, 1), ("b", 30, 1)]


def test_chunks_of_one_prompt_follow_each_other_down_a_pipeline() -> None:
    bench = Bench(num_stages=2, lookahead=LookaheadParams(enabled=False))
    state = bench.ask("a", 40)
    first, second = bench.plan(), bench.plan()
    assert first is not None and second is not None
    assert bench.plan() is None, "as many steps in flight as stages"
    assert [(s.rows[0].context_len, s.rows[0].num_tokens) for s in (first, second)] == [(0, 16), (16, 16)]
    assert state.num_pending == 32 and state.num_computed == 0
    bench.commit(first)
    third = bench.plan()
    assert third is not None and third.rows[0].samples
    bench.commit(second)
    bench.commit(third)
    assert state.num_output == 1


def test_a_chunk_that_ends_before_the_chunk_it_follows_is_named_and_counts_for_nothing_once_distrusted() -> None:
    bench = Bench(num_stages=2, lookahead=LookaheadParams(enabled=False))
    state = bench.ask("a", 40)
    first, second = bench.plan(), bench.plan()
    assert first is not None and second is not None
    assert bench.group.overtaking(first.step_id) == []
    assert bench.group.overtaking(second.step_id) == [state]
    state.distrust()
    assert bench.group.overtaking(second.step_id) == [], "it is known already"
    assert bench.commit(second) == []
    assert bench.group.fail(first.step_id) == [state]
    assert (state.num_computed, state.num_pending, state.num_sealed, state.num_output) == (0, 0, 0, 0)
    bench.group.preempt(state, Preemption.STEP)
    assert bench.step() == [("a", 0, 16)], "nothing of it is in the prefix cache"


def test_chunks_that_end_in_order_overtake_nothing() -> None:
    bench = Bench(num_stages=2, lookahead=LookaheadParams(enabled=False))
    state = bench.ask("a", 60)
    steps = [bench.plan(), bench.plan()]
    while steps:
        step = steps.pop(0)
        assert step is not None and bench.group.overtaking(step.step_id) == []
        bench.commit(step)
        if not state.num_output:
            steps += [s for s in [bench.plan()] if s is not None]
    assert state.num_output == 1


# --- prefix cache


def test_a_prefix_is_found_after_its_owner_has_gone_and_its_last_token_is_computed() -> None:
    bench = Bench()
    bench.ask("a", 12, max_tokens=1)
    bench.step()
    b = bench.ask("b", 12)
    assert bench.step() == [("b", 8, 4)], "the last block is computed: its last token has to be sampled from"
    assert b.num_cached == 8
    assert bench.group.counters.prefix_queries == 24 and bench.group.counters.prefix_hits == 8


def test_a_prefix_held_by_a_running_request_is_shared() -> None:
    bench = Bench()
    bench.ask("a", 12)
    bench.step()
    bench.ask("b", [*range(100, 112), 7, 7])
    bench.step()
    tables = [bench.ledgers[0].table(r).ids for r in "ab"]
    assert tables[0][:3] == tables[1][:3]
    assert bench.ledgers[0].num_held == len({*tables[0], *tables[1]})


def test_salts_and_the_switch_keep_prefixes_apart() -> None:
    salted = Bench()
    salted.ask("a", 12)
    salted.step()
    salted.ask("b", 12, salt="other")
    assert ("b", 0, 12) in salted.step()
    switched_off = Bench(enable_prefix_caching=False)
    switched_off.ask("a", 12)
    switched_off.step()
    switched_off.ask("b", 12)
    assert ("b", 0, 12) in switched_off.step()
    assert switched_off.group.counters.prefix_queries == 0


def test_in_a_pipeline_only_what_every_stage_has_counts() -> None:
    bench = Bench(num_stages=2, num_blocks=20)
    bench.ask("a", 12, max_tokens=1)
    bench.step()
    bench.ledgers[1].resize(0)  # the second stage has lost its cached blocks
    bench.ledgers[1].resize(20)
    bench.ask("b", 12)
    assert bench.step() == [("b", 0, 12)]


def test_who_counted_on_held_blocks_behind_one_that_was_evicted_waits() -> None:
    """Two requests computed the same beginning. The one whose blocks are found ends, and the other's later blocks
    follow on them. A running request's growth evicts one: then none behind it is found; who counted on them waits."""
    bench = Bench(num_blocks=8)
    bench.ask("found", 8, max_tokens=1)
    holder = bench.ask("holder", 8)
    bench.step()
    bench.ask("other", list(range(300, 308)), max_tokens=1)
    while holder.num_computed < 16:
        bench.step()
    waits = bench.ask("waits", [*range(100, 108), *holder.output[:8], 77])
    assert bench.group.blocks.num_allocatable == 4 and bench.group.blocks.cached_prefix(waits) == (16, 3)
    assert bench.step() == [("holder", 16, 1)]
    assert waits.phase is Phase.WAITING and list(bench.group.queues.waiting) == [waits]


def test_admissions_that_evict_what_others_of_their_plan_counted_on_do_not_take_more_than_there_is() -> None:
    """X's copy of a common block is the one that is found, and Y's blocks follow on it. Z evicts it; A, which counted
    on Y's blocks, takes more than planned, and B, which counts on none, waits."""
    bench = Bench(31, max_num_batched_tokens=400, max_num_seqs=10)
    common = [1] * 4
    conversation = [*common, *range(200, 224)]
    bench.ask("X", [*common, *range(300, 308)], max_tokens=1)
    bench.ask("Y", conversation)
    bench.step()
    bench.ask("W", list(range(400, 440)), max_tokens=1)
    bench.step()
    bench.ask("Z", list(range(500, 552)))
    bench.ask("A", [*conversation, 7, 7, 7, 7])
    bench.ask("B", list(range(600, 620)))
    rows = bench.step()
    assert [name for name, *_ in rows][:2] == ["Y", "Z"] and "B" not in [name for name, *_ in rows]


def test_a_prefix_that_one_stage_has_lost_is_room_in_no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(31, num_stages=2, max_num_batched_tokens=400, max_num_seqs=10)
    state = bench.ask("A", list(range(100, 124)), max_tokens=4)
    bench.step()
    first, second = bench.ledgers.values()
    hashes = bench.group.blocks.prompt_names(state)
    assert len(first.lookup(hashes)) == len(second.lookup(hashes)) == 6
    other = bench.ask("B", [*range(100, 124), 7])
    assert bench.group.blocks.cached_prefix(other) == (24, 1)
    look_up = BlockLedger.lookup
    monkeypatch.setattr(BlockLedger, "lookup", lambda self, names: [] if self is second else look_up(self, names))
    first.allocate("others", first.num_free - 1)
    assert second.num_free >= 7 and not bench.group.blocks.can_admit(other, 24), "it takes seven blocks in both"


def test_a_cached_block_that_an_earlier_admission_evicts_is_computed_instead() -> None:
    bench = Bench(num_blocks=6, max_num_batched_tokens=64)
    bench.ask("a", 16, max_tokens=1)
    bench.step()  # leaves four cached blocks and two free ones
    bench.ask("b", [1] * 12, max_tokens=1)
    c = bench.ask("c", [*range(100, 108), 3], max_tokens=1)
    rows = bench.step()
    assert [r for r, _, _ in rows] == ["b", "c"] and sum(n for _, _, n in rows) <= 12 + 9
    while c.finish_reason is None and c.num_output == 0:
        bench.step()
    assert c.tokens == [*range(100, 108), 3, 9]


# --- preemption


def test_preempted_requests_keep_their_tokens_and_come_back_first() -> None:
    bench = Bench(num_blocks=6, enable_prefix_caching=False)
    a, b = bench.ask("a", 8), bench.ask("b", 8)
    c = bench.ask("c", 4, priority=0)
    bench.step()
    while not bench.group.counters.num_preemptions:
        bench.step()
    victim = b if b.num_preemptions else c
    assert a.num_preemptions == 0
    assert victim.phase is Phase.WAITING and victim.num_output > 0 and victim.num_computed == 0
    assert bench.group.queues.waiting.head is victim
    before = list(victim.tokens)
    while victim.phase is Phase.WAITING:
        bench.step()
        if a.num_output >= 14:
            bench.group.queues.take_out(a)
            bench.group.release_blocks(a)
    assert victim.tokens[: len(before)] == before
    assert bench.group.counters.num_recomputed_tokens > 0


def test_the_oldest_is_never_preempted_and_everybody_finishes_in_the_end() -> None:
    for num_stages in (1, 2):
        bench = Bench(num_blocks=10, num_stages=num_stages, enable_prefix_caching=False)
        states = [bench.ask(f"r{i}", [i] * 6, max_tokens=20) for i in range(6)]
        flights: list[RunStep] = []
        for _ in range(600):
            step = bench.plan()
            while step is not None:
                flights.append(step)
                step = bench.plan()
            if not flights:
                break
            oldest = next(iter(bench.group.queues.running.values()), None)
            preemptions = oldest.num_preemptions if oldest else 0
            bench.commit(flights.pop(0))
            assert oldest is None or oldest.num_preemptions == preemptions
        assert all(s.num_output == 20 for s in states)
        assert states[0].num_preemptions == 0 and sum(s.num_preemptions for s in states) > 0
        assert all(ledger.num_held == 0 for ledger in bench.ledgers.values())


def test_prompt_logprobs_are_appended_once_though_the_prompt_is_computed_twice() -> None:
    bench = Bench(max_num_batched_tokens=5)
    state = bench.ask("a", 14, prompt_logprobs=0)
    bench.step()
    bench.step()
    bench.group.preempt(state, Preemption.STEP)
    for _ in range(4):
        bench.step()
    assert state.num_output >= 1
    assert state.prompt_logprobs is not None and state.prompt_logprobs[0] is None
    assert [e.token_id for e in state.prompt_logprobs[1:] if e] == list(range(101, 114))


def test_prompt_logprobs_need_the_whole_prompt_computed() -> None:
    bench = Bench()
    bench.ask("a", 12, max_tokens=1)
    bench.step()
    bench.ask("b", 12, prompt_logprobs=1)
    assert bench.step() == [("b", 0, 12)]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_prompt_that_fills_the_context_is_scored(num_stages: int) -> None:
    bench = Bench(num_stages=num_stages, max_num_batched_tokens=5, max_model_len=14)
    state = bench.ask("a", 14, max_tokens=0, prompt_logprobs=0)
    steps = []
    while (step := bench.plan()) is not None:
        steps.append(step)
        ended = bench.commit(step)
    assert [(r.state, r.token, r.finish_reason) for r in ended] == [(state, None, FinishReason.LENGTH)]
    assert not any(row.samples for step in steps for row in step.rows), "nothing is drawn"
    assert len(steps) == 3 and state.output == []
    assert state.prompt_logprobs is not None and state.prompt_logprobs[0] is None
    assert [e.token_id for e in state.prompt_logprobs[1:] if e] == list(range(101, 114))
    assert all(ledger.num_held == 0 for ledger in bench.ledgers.values())


# --- the queue


def test_priority_before_arrival_and_arrival_before_preemption() -> None:
    bench = Bench(max_num_seqs=1)
    for name, priority in [("a", 0), ("low", 5), ("b", 0), ("high", -1)]:
        bench.ask(name, 4, priority=priority, max_tokens=1)
    order = []
    while rows := bench.step():
        order += [r for r, _, _ in rows]
    assert order == ["high", "a", "b", "low"]


def test_queued_blocks_follow_the_queue() -> None:
    bench = Bench()
    states = [bench.ask(str(i), 5 + i) for i in range(6)]
    assert bench.group.queues.queued_blocks() == sum(-(-(5 + i) // 4) for i in range(6))
    bench.group.queues.take_out(states[3])
    bench.step()
    assert bench.group.queues.queued_blocks() == sum(-(-len(s.tokens) // 4) for s in bench.group.queues.waiting)
    assert {s.request_id for s in bench.group.queues.take_all()} == {"0", "1", "2", "4", "5"}
    assert bench.group.queues.queued_blocks() == 0


def test_the_group_says_what_the_head_waits_for() -> None:
    bench = Bench(num_blocks=4)
    bench.ask("a", 12, max_tokens=3)
    bench.ask("b", 12)
    bench.step()
    assert bench.group.head_blocked_by is BlockedBy.MEMORY
    bench.step()
    bench.step()
    bench.step()
    assert bench.group.head_blocked_by is None


# --- ends


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "num_output", "stop"),
    [
        ({"max_tokens": 3}, [9, 9, 9, 9], FinishReason.LENGTH, 3, None),
        ({"max_tokens": 0}, [9, 9], FinishReason.LENGTH, 0, None),
        ({}, [9, EOS, 9], FinishReason.STOP, 2, EOS),
        ({"ignore_eos": True, "max_tokens": 3}, [EOS, EOS, EOS], FinishReason.LENGTH, 3, None),
        ({"stop_token_ids": (5, 6)}, [9, 9, 6], FinishReason.STOP, 3, 6),
        ({"stop_token_ids": (5,), "ignore_eos": True}, [EOS, 5], FinishReason.STOP, 2, 5),
        ({"min_tokens": 3}, [EOS, EOS, EOS], FinishReason.STOP, 3, EOS),
        ({"min_tokens": 3, "stop_token_ids": (5,)}, [5, 9, 9, 5], FinishReason.STOP, 4, 5),
        ({"max_tokens": 2}, [9, EOS], FinishReason.STOP, 2, EOS),
    ],
)
def test_why_a_request_ends(
    params: dict[str, object], tokens: list[int], reason: FinishReason, num_output: int, stop: int | None
) -> None:
    bench = Bench()
    state = bench.ask("a", 4, **params)
    results: list[RowResult] = []
    for token in tokens:
        step = bench.plan()
        if step is None:
            break
        results += bench.commit(step, token)
    assert [r.finish_reason for r in results] == [None] * (num_output - 1) + [reason]
    assert results[-1].stop_token_id == stop and state.num_output == num_output


def test_the_model_length_ends_a_request() -> None:
    bench = Bench(max_model_len=10)
    state = bench.ask("a", 7)
    while bench.step():
        pass
    assert len(state.tokens) == 10


# --- what is in flight


def test_an_ending_request_gets_no_more_tokens_and_no_more_steps() -> None:
    bench = Bench()
    state = bench.ask("a", 4)
    bench.ask("b", 4)
    step = bench.plan()
    assert step is not None
    state.end_with(FinishReason.CANCELLED)
    assert [r.state.request_id for r in bench.commit(step)] == ["b"]
    assert state.num_output == 0 and state.num_pending == 0
    assert bench.step() == [("b", 4, 1)]


def test_nothing_of_a_failed_step_counts() -> None:
    bench = Bench()
    a = bench.ask("a", 8)
    bench.step()
    step = bench.plan()
    assert step is not None
    computed, tokens = a.num_computed, list(a.tokens)
    assert bench.group.fail(step.step_id) == [a]
    assert (a.num_pending, a.num_computed, a.tokens) == (0, computed, tokens)
    bench.group.check()


def test_a_paused_group_plans_nothing() -> None:
    bench = Bench()
    bench.ask("a", 4)
    bench.group.hold("a", GroupHold.STEPS)
    assert bench.plan() is None
    bench.group.release("a", GroupHold.STEPS)
    assert bench.plan() is not None


@pytest.mark.parametrize("what", GroupHold)
def test_an_owner_lifts_no_hold_of_another(what) -> None:
    bench = Bench()
    group = bench.group

    def holders() -> frozenset[str]:
        of = {
            GroupHold.STEPS: group.paused, GroupHold.PREEMPTION: group.holds_preemption,
            GroupHold.OFFLINE: group.queues.offline_holders,
        }
        assert not any(held for other, held in of.items() if other is not what), "holds are apart"
        return of[what]

    group.hold("a", what)
    group.hold("a", what)
    group.hold("b", what)
    group.release("a", what)
    group.release("c", what)
    assert holders() == {"b"}
    group.release("b", what)
    assert not holders()


def test_resumed_requests_are_in_order_of_age() -> None:
    bench = Bench()
    states = [bench.ask(str(i), 4) for i in range(4)]
    bench.step()
    for state in states[:2]:
        bench.group.queues.take_out(state)
    bench.group.queues.resume(states[1])
    bench.group.queues.resume(states[0])
    assert list(bench.group.queues.running) == ["0", "1", "2", "3"]


# --- counters


def test_blocks_given_back_do_not_count_those_that_others_still_hold() -> None:
    bench = Bench()
    bench.ask("a", 8)
    bench.step()
    b = bench.ask("b", [*range(100, 108), 1, 2])
    bench.step()
    assert bench.group.counters.num_grown_blocks == 1, "a's ninth token"
    bench.group.queues.take_out(b)
    bench.group.release_blocks(b)
    assert bench.group.counters.num_freed_blocks == 1


# --- versions


def test_a_stale_plan_is_refused_and_changes_nothing() -> None:
    for change in ("queue", "ledger"):
        bench = Bench()
        bench.ask("a", 4)
        plan = plan_batch(bench.group.planner.view(), bench.group.planner.limits())
        if change == "queue":
            bench.ask("b", 4)
        else:
            bench.ledgers[0].allocate("somebody of another group", 1)
        with pytest.raises(StalePlanError):
            bench.group.apply(plan, 1, 0)
        assert not bench.group.queues.running and not bench.group.in_flight
        bench.group.check()


def test_a_plan_is_applied_once() -> None:
    bench = Bench(num_stages=2)
    bench.ask("a", 4)
    plan = plan_batch(bench.group.planner.view(), bench.group.planner.limits())
    assert bench.group.apply(plan, 1, 0) is not None
    with pytest.raises(StalePlanError):
        bench.group.apply(plan, 2, 0)


def test_planning_and_looking_change_nothing() -> None:
    bench = Bench()
    bench.ask("a", 40)
    version = bench.group.version
    first = plan_batch(bench.group.planner.view(), bench.group.planner.limits())
    assert plan_batch(bench.group.planner.view(), bench.group.planner.limits()) == first
    assert bench.group.version == version

"""The batching policy: budget, order, watermark, preemption."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.policy.batching import (
    Admission,
    BatchLimits,
    BatchPlan,
    BatchView,
    BlockedBy,
    Chunk,
    RunningRow,
    VictimRow,
    WaitingRow,
    plan_batch,
    plan_prefill_first,
)

LIMITS = BatchLimits(max_num_tokens=100, max_num_seqs=8, watermark_blocks=0, block_size=4)


def decode(name: str, room: int = 1, in_flight: bool = False) -> RunningRow:
    return RunningRow(name, 1, room, in_flight)


def waiting(name: str, tokens: int, cached: int = 0, blocks: int | None = None) -> WaitingRow:
    return WaitingRow(name, tokens, cached, -(-tokens // 4) if blocks is None else blocks)


def view(
    running: Sequence[RunningRow] = (),
    queue: Sequence[WaitingRow] = (),
    *,
    free: int = 1000,
    reserved: int = 0,
    num_running: int | None = None,
    victims: Sequence[VictimRow] | None = None,
) -> BatchView:
    if victims is None:
        victims = [VictimRow(r.request_id, 2) for r in reversed(running) if not r.in_flight]
    count = len(running) if num_running is None else num_running
    return BatchView(7, running, count, iter(queue), lambda: victims, free, reserved)


def limits(**changes: int) -> BatchLimits:
    return LIMITS._replace(**changes)


# --- prompts first


def test_prompts_first_then_newcomers_then_decodes() -> None:
    rows = [decode("a"), RunningRow("long", 60, 60, False), decode("b")]
    plan = plan_prefill_first(view(rows, [waiting("new", 39)]), LIMITS)
    assert plan.chunks == (Chunk("long", 60, 0), Chunk("a", 1, 0))  # and none is left for b
    assert plan.admissions == (Admission("new", 39, 0),) and plan.head_blocked_by is None


def test_decodes_stand_still_while_prompts_fill_the_budget() -> None:
    plan = plan_prefill_first(view([decode("a"), decode("b")], [waiting("new", 150)]), LIMITS)
    assert not plan.chunks and plan.admissions == (Admission("new", 100, 0),)


def test_newcomers_leave_the_blocks_that_decodes_grow_by() -> None:
    rows = [decode("a", 0), decode("b", 0), decode("c", 1)]
    plan = plan_prefill_first(view(rows, [waiting("new", 8)], free=3), LIMITS)
    assert [c.request_id for c in plan.chunks] == ["a", "b", "c"] and not plan.admissions and not plan.preemptions
    assert plan.head_blocked_by is BlockedBy.MEMORY
    plan = plan_prefill_first(view(rows, [waiting("new", 8)], free=4), LIMITS)
    assert [c.request_id for c in plan.chunks] == ["a", "b", "c"] and [a.request_id for a in plan.admissions] == ["new"]


def test_without_prompts_to_compute_the_youngest_gives_way_as_ever() -> None:
    rows = [decode("a", 0), decode("b", 0), decode("c", 0), decode("d", 0)]
    queue = [waiting("new", 8)]
    plan = plan_prefill_first(view(rows, queue, free=0), LIMITS)
    assert plan == plan_batch(view(rows, queue, free=0), LIMITS) and plan.preemptions == ("d", "c")


def test_the_last_token_of_a_prompt_comes_first_and_a_decode_does_not() -> None:
    rows = [decode("a"), RunningRow("last", 1, 1, False, awaits_first=True)]
    plan = plan_prefill_first(view(rows, [waiting("new", 99)]), LIMITS)
    assert plan.chunks == (Chunk("last", 1, 0),) and plan.admissions == (Admission("new", 99, 0),)


def test_prompts_and_decodes_have_the_places_of_one_step() -> None:
    rows = [decode(name) for name in "abcdefghij"] + [RunningRow("long", 9, 9, False)]
    plan = plan_prefill_first(view(rows), LIMITS)
    assert [c.request_id for c in plan.chunks] == ["long", *"abcdefg"]


def test_microbatches_share_prompts_and_decodes_together() -> None:
    rows = [decode("a"), decode("b"), decode("c"), RunningRow("long", 9, 9, False)]
    plan = plan_prefill_first(view(rows), limits(num_microbatches=2))
    assert [c.request_id for c in plan.chunks] == ["long", "a"]


# --- running requests


def test_decodes_come_before_prefill_remainders_and_both_in_order_of_age() -> None:
    rows = [RunningRow("long", 60, 60, False), decode("b"), RunningRow("long2", 80, 80, True), decode("d")]
    plan = plan_batch(view(rows), LIMITS)
    assert plan.chunks == (Chunk("b", 1, 0), Chunk("d", 1, 0), Chunk("long", 60, 0), Chunk("long2", 38, 0))
    assert plan.version == 7 and not plan.preemptions and not plan.is_empty


def test_growth_counts_blocks_for_tokens_beyond_the_slots_held() -> None:
    plan = plan_batch(view([RunningRow("a", 9, 0, False), RunningRow("b", 9, 5, False), decode("c", room=0)]), LIMITS)
    assert [(c.request_id, c.num_new_blocks) for c in plan.chunks] == [("c", 1), ("a", 3), ("b", 1)]


def test_the_youngest_gives_way() -> None:
    plan = plan_batch(view([decode("a", 0), decode("b", 0), decode("c", 0), decode("d", 0)], free=0), LIMITS)
    assert plan.preemptions == ("d", "c")  # d's two blocks serve a and b; c then has none and is the youngest left
    assert [c.request_id for c in plan.chunks] == ["a", "b"]


def test_a_request_that_needs_no_block_runs_though_others_give_way() -> None:
    plan = plan_batch(view([decode("a", 0), decode("b", 1), decode("c", 0)], free=0), LIMITS)
    assert plan.preemptions == ("c",)
    assert [c.request_id for c in plan.chunks] == ["a", "b"]


def test_the_oldest_waits_rather_than_give_way_while_younger_ones_are_in_flight() -> None:
    rows = [decode("oldest", 0)]
    plan = plan_batch(view(rows, free=0, num_running=3), LIMITS)
    assert plan.is_empty and not plan.preemptions


def test_nobody_gives_way_for_a_younger_one() -> None:
    rows = [RunningRow("old prefill", 30, 40, False), decode("middle", 1), RunningRow("young", 1, 0, True)]
    plan = plan_batch(view(rows, free=0), LIMITS)
    assert not plan.preemptions
    assert [c.request_id for c in plan.chunks] == ["middle", "old prefill"]


def test_alone_and_without_room_it_gives_itself_up() -> None:
    plan = plan_batch(view([decode("a", 0)], free=0), LIMITS)
    assert plan.preemptions == ("a",) and plan.is_empty


def test_requests_in_flight_are_never_preempted() -> None:
    rows = [decode("a", 0), RunningRow("b", 5, 5, True), RunningRow("c", 5, 5, True)]
    plan = plan_batch(view(rows, free=0), LIMITS)
    assert not plan.preemptions and [c.request_id for c in plan.chunks] == ["b", "c"]


def test_no_admission_in_a_step_that_preempts() -> None:
    plan = plan_batch(view([decode("a", 0), decode("b", 0)], [waiting("w", 4)], free=0), LIMITS)
    assert plan.preemptions == ("b",) and not plan.admissions
    assert plan.head_blocked_by is BlockedBy.MEMORY


# --- admission


def test_the_queue_is_served_strictly_in_order() -> None:
    plan = plan_batch(view((), [waiting("a", 8), waiting("big", 400), waiting("c", 4)], free=20), LIMITS)
    assert [a.request_id for a in plan.admissions] == ["a"]
    assert plan.head_blocked_by is BlockedBy.MEMORY


def test_who_needs_more_than_the_group_has_steps_aside_and_is_what_the_head_waits_for() -> None:
    giant = WaitingRow("giant", 400, 0, 100, is_oversized=True)
    second = giant._replace(request_id="second")
    plan = plan_batch(view(queue=[giant, waiting("a", 8), second, waiting("b", 8)], free=4), LIMITS)
    assert [a.request_id for a in plan.admissions] == ["a", "b"]
    assert plan.head_blocked_by is BlockedBy.MEMORY
    behind = plan_batch(view(queue=[waiting("a", 8), giant], free=4), limits(max_num_seqs=1))
    assert [a.request_id for a in behind.admissions] == ["a"] and behind.head_blocked_by is BlockedBy.MEMORY
    full = plan_batch(view(queue=[giant, waiting("a", 8)], free=4, num_running=8), LIMITS)
    assert not full.admissions and full.head_blocked_by is BlockedBy.MEMORY


def test_one_that_the_group_could_hold_is_not_passed() -> None:
    plan = plan_batch(view([decode("r")], [waiting("large", 80), waiting("a", 4)], free=10), LIMITS)
    assert not plan.admissions and plan.head_blocked_by is BlockedBy.MEMORY


def test_prompts_are_cut_to_the_budget_but_take_all_their_blocks() -> None:
    plan = plan_batch(view([decode("r")], [waiting("a", 80), waiting("b", 300), waiting("c", 4)], free=96), LIMITS)
    assert plan.admissions == (Admission("a", 80, 0), Admission("b", 19, 0))
    assert plan.head_blocked_by is BlockedBy.TOKEN_BUDGET  # 20 + 75 of 96 blocks: c would fit


def test_a_full_budget_blocks_the_queue() -> None:
    plan = plan_batch(view([RunningRow("r", 200, 200, False)], [waiting("a", 4)]), LIMITS)
    assert plan.head_blocked_by is BlockedBy.TOKEN_BUDGET and not plan.admissions


def test_the_number_of_sequences_blocks_the_queue() -> None:
    queue = [waiting(str(i), 4) for i in range(20)]
    plan = plan_batch(view([decode("a"), decode("b")], queue, num_running=5), LIMITS)
    assert len(plan.admissions) == 3 and plan.head_blocked_by is BlockedBy.SEQUENCES


def test_cached_tokens_are_not_computed_again() -> None:
    plan = plan_batch(view((), [waiting("a", 20, cached=16, blocks=1)], free=1), LIMITS)
    assert plan.admissions == (Admission("a", 4, 16),)


@pytest.mark.parametrize(("num_running", "expected"), [(0, ["a"]), (1, [])])
def test_the_watermark_holds_only_while_something_runs(num_running: int, expected: list[str]) -> None:
    rows = [decode("r")] * num_running
    plan = plan_batch(view(rows, [waiting("a", 40)], free=10), limits(watermark_blocks=1))
    assert [a.request_id for a in plan.admissions] == expected


def test_newcomers_leave_room_for_kv_that_is_to_land_and_running_requests_do_not() -> None:
    rows = [decode("r", 0), decode("s", 0)]
    plan = plan_batch(view(rows, [waiting("a", 4)], free=3, reserved=30), LIMITS)
    assert not plan.preemptions and len(plan.chunks) == 2
    assert not plan.admissions and plan.head_blocked_by is BlockedBy.MEMORY


def test_an_empty_queue_is_not_blocked() -> None:
    assert plan_batch(view([decode("a")]), LIMITS).head_blocked_by is None


# --- pipelines


@pytest.mark.parametrize(("num_running", "num_stages", "rows"), [(10, 2, 5), (11, 2, 6), (10, 3, 4), (1, 4, 1)])
def test_microbatches_share_the_running_requests(num_running: int, num_stages: int, rows: int) -> None:
    running = [decode(str(i)) for i in range(num_running)]
    plan = plan_batch(view(running), limits(num_microbatches=num_stages, max_num_seqs=64))
    assert [c.request_id for c in plan.chunks] == [str(i) for i in range(rows)]


def test_as_many_microbatches_as_stages_hold_every_running_request() -> None:
    running = [decode(str(i)) for i in range(10)] + [RunningRow("p", 30, 40, False)]
    seen: list[str] = []
    for _ in range(3):
        left = [r for r in running if r.request_id not in seen]
        plan = plan_batch(view(left, num_running=11), limits(num_microbatches=3, max_num_seqs=24))
        seen += [c.request_id for c in plan.chunks]
    assert sorted(seen) == sorted(r.request_id for r in running)


def test_no_microbatch_has_more_rows_than_an_instance_runs_by_itself() -> None:
    queue = [waiting(str(i), 2) for i in range(10)]
    plan = plan_batch(view(queue=queue, free=50), limits(num_microbatches=2, max_num_seqs=8))
    assert len(plan.admissions) == 4 and plan.head_blocked_by is BlockedBy.TOKEN_BUDGET
    shares = {str(i): 1 for i in range(10)}
    plan = plan_batch(view([decode(r) for r in shares], free=50), limits(num_microbatches=2, max_num_seqs=12), shares)
    assert len(plan.chunks) == 6


# --- any view


@st.composite
def views(draw: st.DrawFn) -> tuple[BatchView, BatchLimits, dict[str, int], list[WaitingRow]]:
    num = draw(st.integers(0, 12))
    running = [
        RunningRow(f"r{i}", ready, draw(st.integers(0, 8)), draw(st.booleans()), draw(st.booleans()))
        for i, ready in enumerate(draw(st.lists(st.one_of(st.just(1), st.integers(1, 60)), min_size=num, max_size=num)))
    ]
    queue = [
        waiting(f"w{i}", tokens, 4 * ((tokens - 1) // 4) if draw(st.booleans()) else 0)
        for i, tokens in enumerate(draw(st.lists(st.integers(1, 90), max_size=6)))
    ]
    reclaim = {row.request_id: draw(st.integers(0, 6)) for row in running if not row.in_flight}
    victims = [VictimRow(row.request_id, reclaim[row.request_id]) for row in reversed(running) if not row.in_flight]
    the_view = view(
        running, queue, free=draw(st.integers(0, 30)), reserved=draw(st.sampled_from([0, 0, 5, 40])),
        num_running=num + draw(st.integers(0, 3)), victims=victims,
    )
    bounds = BatchLimits(
        draw(st.integers(1, 64)), draw(st.integers(1, 16)), draw(st.integers(0, 3)), 4, draw(st.integers(1, 3))
    )
    return the_view, bounds, reclaim, queue


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(views(), st.sampled_from([plan_batch, plan_prefill_first]))
def test_no_plan_breaks_a_bound(
    drawn: tuple[BatchView, BatchLimits, dict[str, int], list[WaitingRow]],
    planned: Callable[[BatchView, BatchLimits], BatchPlan],
) -> None:
    the_view, bounds, reclaim, queue = drawn
    plan = planned(the_view, bounds)
    rows = {row.request_id: row for row in the_view.running}
    num_tokens = sum(c.num_tokens for c in plan.chunks) + sum(a.num_tokens for a in plan.admissions)
    assert num_tokens <= bounds.max_num_tokens
    assert all(1 <= c.num_tokens <= rows[c.request_id].num_ready_tokens for c in plan.chunks)

    grown = sum(c.num_new_blocks for c in plan.chunks)
    assert all(
        c.num_tokens <= rows[c.request_id].num_free_slots + 4 * c.num_new_blocks for c in plan.chunks
    ), "every token has a slot"
    gained = sum(reclaim[r] for r in plan.preemptions)
    needs = {w.request_id: w.num_blocks_needed for w in queue}
    admitted = sum(needs[a.request_id] for a in plan.admissions)
    assert grown <= the_view.num_free_blocks + gained
    if plan.admissions:
        assert grown + admitted + the_view.num_reserved_blocks <= the_view.num_free_blocks
        assert not plan.preemptions
        assert the_view.num_running + len(plan.admissions) <= bounds.max_num_seqs
    assert [a.request_id for a in plan.admissions] == [w.request_id for w in queue[: len(plan.admissions)]]

    most = max(1, bounds.max_num_seqs // bounds.num_microbatches)
    assert len(plan.chunks) + len(plan.admissions) <= most, "no more rows than an instance runs by itself"
    share = -(-the_view.num_running // bounds.num_microbatches)
    assert len(plan.chunks) <= (most if bounds.num_microbatches == 1 else max(1, share))
    if planned is plan_prefill_first and not plan.preemptions:
        waiting_first = [row for row in the_view.running if row.num_ready_tokens > 1 or row.awaits_first]
        left_out = [row for row in waiting_first if row.num_free_slots >= row.num_ready_tokens]
        left_out = [row for row in left_out if row.request_id not in {c.request_id for c in plan.chunks}]
        decoding = {r.request_id for r in the_view.running} - {r.request_id for r in waiting_first}
        if left_out and decoding & {c.request_id for c in plan.chunks}:
            cap = most
            if bounds.num_microbatches > 1:
                cap = min(most, max(1, -(-the_view.num_running // bounds.num_microbatches)))
            assert len(plan.chunks) - len(decoding & {c.request_id for c in plan.chunks}) >= cap, "prompts come first"

    scheduled = {c.request_id for c in plan.chunks}
    assert len(scheduled) == len(plan.chunks) and not scheduled & set(plan.preemptions)
    assert all(not rows[r].in_flight for r in plan.preemptions)
    if plan.preemptions and the_view.num_running > 1:
        assert the_view.running[0].request_id not in plan.preemptions or len(plan.preemptions) == len(rows)
    lone = the_view.num_running == len(rows) and not any(r.in_flight for r in rows.values())
    if not scheduled and rows and lone and (planned is plan_batch or not plan.admissions):
        # Nothing runs and nothing is in flight: then all had to go, and the queue starts again from the oldest.
        assert len(plan.preemptions) == len(rows)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(views())
def test_planning_changes_nothing(drawn: tuple[BatchView, BatchLimits, dict[str, int], list[WaitingRow]]) -> None:
    the_view, bounds, _, queue = drawn
    again = the_view._replace(waiting=iter(queue))
    assert plan_batch(the_view, bounds) == plan_batch(again, bounds)


def test_a_plan_without_rows_is_empty() -> None:
    assert BatchPlan(0, ("a",), (), (), BlockedBy.MEMORY).is_empty

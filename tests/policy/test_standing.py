"""Why offline work stands still: the first rule that keeps it out, with its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from jettison.policy.standing import Foreseen, StandingView, Standstill, StepRoom, why_standing

RUNNING = StandingView(running=2, waiting=3, stored=0, coming=0, online_waiting=0)
WAITING = RUNNING._replace(running=0, num_blocks_needed=4, num_blocks_free=9)
ROOM = StepRoom(100, 512, 3, 64, is_timed=True, one_more_s=0.010, may_take_s=0.008)


@pytest.mark.parametrize(("view", "why", "inputs"), [
    (RUNNING._replace(changes_layout=True, pauses=True), Standstill.LAYOUT, {}),
    (WAITING._replace(pauses=True, online_waiting=5), Standstill.PAUSED, {"online_waiting": 5}),
    (RUNNING._replace(computes_again=True), Standstill.AGAIN, {}),
    (RUNNING._replace(num_abandoned_steps=4), Standstill.ABANDONED, {"abandoned_steps": 4}),
    (RUNNING._replace(num_abandoned_steps=1, step=ROOM), Standstill.TIME,
     {"step_tokens": 100, "with_one_more_ms": 10.0, "may_take_ms": 8.0}),
    (WAITING._replace(num_abandoned_steps=4, num_places=0), Standstill.PLACES, {"free_places": 0}),
    (RUNNING._replace(step=ROOM), Standstill.TIME,
     {"step_tokens": 100, "with_one_more_ms": 10.0, "may_take_ms": 8.0}),
    (WAITING._replace(step=ROOM), Standstill.TIME,
     {"step_tokens": 100, "with_one_more_ms": 10.0, "may_take_ms": 8.0}),
    (RUNNING._replace(step=ROOM._replace(foreseen=Foreseen(50, 51, 100, 7))), Standstill.ONLINE_MEMORY,
     {"online_blocks": 50, "growth_blocks": 51, "blocks": 100, "online_requests": 7}),
    (RUNNING._replace(step=ROOM._replace(foreseen=Foreseen(50, 50, 100, 7))), Standstill.TIME,
     {"step_tokens": 100, "with_one_more_ms": 10.0, "may_take_ms": 8.0}),
    (RUNNING._replace(step=ROOM._replace(one_more_s=None, may_take_s=0.0)), Standstill.UNKNOWN_TIMES, {}),
    (RUNNING._replace(step=ROOM._replace(num_tokens=512, is_timed=False)), Standstill.TOKENS,
     {"step_tokens": 512, "max_tokens": 512}),
    (RUNNING._replace(step=ROOM._replace(may_take_s=None, num_rows=64)), Standstill.PLACES,
     {"rows": 64, "max_rows": 64}),
    (RUNNING._replace(num_blocks_needed=1), Standstill.MEMORY, {"needed_blocks": 1, "free_blocks": 0}),
    (WAITING._replace(num_blocks_needed=10), Standstill.MEMORY, {"needed_blocks": 10, "free_blocks": 9}),
    (WAITING._replace(num_places=0), Standstill.PLACES, {"free_places": 0}),
    (WAITING._replace(is_too_large=True, num_places=0), Standstill.TOO_LARGE, {"needed_blocks": 4}),
    (WAITING._replace(stored=1, online_waiting=2), Standstill.ONLINE_FIRST, {"online_waiting": 2}),
    (WAITING._replace(stored=1, coming=2), Standstill.RETURNING, {"coming": 2}),
    (RUNNING, Standstill.NEXT, {}),
    (WAITING._replace(step=ROOM._replace(may_take_s=None)), Standstill.NEXT, {}),
])  # fmt: skip
def test_the_first_rule_that_keeps_it_out_is_named(
    view: StandingView, why: Standstill, inputs: dict[str, Any]
) -> None:
    assert why_standing(view) == (why, inputs)

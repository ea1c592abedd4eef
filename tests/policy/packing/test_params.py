"""What packing leaves free, when prompts ahead are too many, and what goes on under pressure."""

from __future__ import annotations

import pytest

from jettison.policy.packing.params import (
    LEAST_HEAD_ROOM,
    MOST_HEAD_ROOM,
    PackParams,
    breaks_ttft,
    devices_needed,
    goes_on,
    head_room_blocks,
)
from jettison.policy.slo import AHEAD_SHARE

AUTO = PackParams()


def test_head_room_that_was_asked_for_is_kept_whatever_arrives() -> None:
    assert head_room_blocks(PackParams(head_room=0.15), 1000, None, 1e6, 10.0) == 150


@pytest.mark.parametrize(("blocks_per_s", "ttft_s", "part"), [
    (0.0, 2.0, LEAST_HEAD_ROOM), (50.0, 2.0, 0.1), (51.0, 2.0, 0.15), (1e4, 2.0, MOST_HEAD_ROOM),
    (50.0, None, LEAST_HEAD_ROOM),
])
def test_head_room_holds_what_arrives_within_the_objective(
    blocks_per_s: float, ttft_s: float | None, part: float
) -> None:
    assert head_room_blocks(AUTO, 1000, None, blocks_per_s, ttft_s) == round(part * 1000)


def test_head_room_stays_while_it_is_about_right() -> None:
    assert head_room_blocks(AUTO, 1000, 150, 50.0, 2.0) == 150
    assert head_room_blocks(AUTO, 1000, 200, 50.0, 2.0) == 100


def test_what_nothing_has_room_for_needs_devices_of_its_own() -> None:
    assert devices_needed(3, 0, 100) == 3
    assert devices_needed(3, 101, 100) == 5


def test_prompts_ahead_break_the_objective_and_a_prompt_by_itself_does_not() -> None:
    most = round(1000 * AHEAD_SHARE)
    assert breaks_ttft(most - 200, 201, 1000.0, 1.0)
    assert not breaks_ttft(most - 200, 200, 1000.0, 1.0)
    assert breaks_ttft(1, 1, 0.0, 1.0), "decodes leave no time for prompts"
    assert breaks_ttft(0, 1001, 1000.0, 1.0), "beside decodes a long prompt alone may"
    assert not breaks_ttft(0, 1000, 1000.0, 1.0)
    assert not breaks_ttft(900, 200, None, 1.0) and not breaks_ttft(900, 200, 1000.0, None)


def test_under_pressure_a_move_goes_on_unless_it_fills_who_lacks_memory() -> None:
    assert goes_on(destination_lacks=False, is_landing=False)
    assert not goes_on(destination_lacks=True, is_landing=False)
    assert goes_on(destination_lacks=True, is_landing=True), "its last blocks are under way: sooner there than back"

"""Why a slice, rows that a step has shed (``core.serving.slices``), is given up before its rows have come to their end.

What is discarded during an event is told at the event's end (``ClusterCore.handle``).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from jettison.types import GroupId


class Discard(StrEnum):
    """Why a slice was given up, as it stands in the event log."""

    HELD = "its group is about to change its layers or its members"
    ROOM = "online requests need blocks or places that its requests have"
    LOST = "a worker of its group is dead"
    FAILED = "the step that it went on with has failed"
    ENDED = "one of its requests has ended"
    MOVES = "one of its requests moves, or is computed again"
    NOTHING = "no layer of it had been computed"
    OVERTAKEN = "a later chunk of one of its requests was under way"


class Discarded(NamedTuple):
    """A slice that was given up."""

    group_id: GroupId
    why: Discard
    num_tokens: int
    num_layers: int


def told(discarded: Sequence[Discarded]) -> list[dict[str, object]]:
    """What the event log has of them."""
    return [
        {"group": one.group_id, "reason": str(one.why), "tokens": one.num_tokens, "layers": one.num_layers}
        for one in discarded
    ]

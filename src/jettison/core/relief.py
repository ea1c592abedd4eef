"""What a policy other than dropping does about memory, as one object that the cluster core asks at fixed places.

The base does nothing: it is what ``recompute`` (the batching policy preempts by itself), ``pipeline`` (decided at the
start) and ``drop`` (``core.merging``, ``core.restoring``) need. ``core.swapping`` and ``core.balancing`` fill it in.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from jettison.core.group import GroupCore
from jettison.core.ports import Action, MoveEnded
from jettison.core.request import RequestState
from jettison.types import MoveId, WorkerId


class Abandoned(NamedTuple):
    """What remains of a relief's work for broken groups."""

    moves: set[MoveId]
    """Transfers that it does not wait for any more."""
    actions: list[Action]


class Relief:
    """Nothing is done. One call of the core asks in this order: an event's own method, then before and after steps."""

    @property
    def is_quiet(self) -> bool:
        """Nobody is on the way, or kept elsewhere, for whom a step of another request could matter."""
        return True

    @property
    def dispatches_once(self) -> bool:
        """Waiting requests stay where they are, however full it is there and whoever has room; all but those that are
        too large for their group."""
        return False

    @property
    def due_ns(self) -> int | None:
        """When it next looks at groups, whichever event comes first; None: only at those that an event is about."""
        return None

    @property
    def steps_ahead(self) -> int:
        """For how many steps of growth it wants to see room before it acts."""
        return 0

    def note_grown(self, group: GroupCore) -> None:
        """Requests of the group have taken blocks in steps that are told of late."""

    @property
    def awaits_tick(self) -> bool:
        """It may do something although nothing but time has passed."""
        return False

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Workers that a transfer is using, or that owe a request its KV: no layout may change there."""
        return ()

    def owed_blocks(self, group: GroupCore) -> int:
        """Blocks that requests of the group need and neither hold nor wait for in its queue; dispatch counts them."""
        return 0

    def note_step(self, group: GroupCore, seconds: float) -> None:
        """A step of the group took so long, from its issue to its commit."""

    def note_steps(self, group: GroupCore, times_ns: Sequence[int]) -> None:
        """``note_step`` for steps that followed each other: each ended, and the next was issued, at the next time."""

    def on_move(self, event: MoveEnded, now_ns: int) -> list[Action] | None:
        """Take the end of a transfer; None if it is not one of these."""
        return None

    def cancel(self, state: RequestState) -> list[Action]:
        """The request is ending: stop what is done to it. Idempotent; the request may have been reaped already."""
        return []

    def abandon(self, broken: Sequence[GroupCore]) -> Abandoned:
        """These groups are about to be dissolved because a worker is dead: forget their requests."""
        return Abandoned(set(), [])

    def before_steps(self, busy: Set[WorkerId], now_ns: int) -> list[Action]:
        """Decide and start, before the groups plan their steps. Groups with ``busy`` workers are in a move: hands
        off."""
        return []

    def after_steps(self, now_ns: int) -> list[Action]:
        """Send what should follow the steps just issued in a worker's stream."""
        return []

    def check(self) -> None:
        """Raise AssertionError on any broken invariant."""

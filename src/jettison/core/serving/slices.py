"""Slices: the offline rows of a step that it has shed at a safepoint, so that the online ones go on without them.

    step N        | online and offline rows |  at a safepoint, as an online request has come
                  | online rows ----------- |  end: committed as ever
    slice of N    | kept at layer l, its requests' tokens still under way
    step M        | online rows | from layer l on also the slice's | end: all are committed; or these kept once more

What the rows have computed is theirs: hidden states at layer l, which the first stage keeps by the step's id, and KV in
the layers before it, behind the tokens that count as computed. So a slice is one step in the book until its rows are
committed at their end. Their tokens stay pending (``RequestState.num_pending``), so nothing seals, preempts, moves or
frees what they write; the group plans nothing of these requests (``Group.absent``).

A slice that is in the way is discarded: its requests are then as they were before the step, as after one that was given
up. A group keeps one at most. Not here: when a step sheds (``core.driving.safepoints``), and whose turn it is
(``policy.slices``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jettison.core.ports import StepRow
from jettison.core.requests import UNSCHEDULED, Phase, RequestState
from jettison.cost.stepwork import StepWork


class Keeping(Protocol):
    """See ``core.serving.slicing.Slices``."""

    kept: Slice | None


@dataclass(slots=True)
class Slice:
    """Rows that were shed and are not under way."""

    step_id: int
    """The step by whose id the group's first stage keeps them."""
    rows: tuple[StepRow, ...]
    work: StepWork
    num_layers: int
    """Layers of the first stage that they have behind them."""
    shed_ns: int
    """When they were shed first."""
    has_no_place: bool = False
    """The last step of online requests was too large for its rows to join: it is their turn by themselves."""

    @property
    def is_sound(self) -> bool:
        """Whether all of its requests may still run: none ends, moves or starts again."""
        return all(
            row.state.phase is Phase.RUNNING and not row.state.holds & UNSCHEDULED for row in self.rows
        )

    def has(self, state: RequestState) -> bool:
        """Whether it has a row of the request."""
        return any(row.state is state for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of its rows."""
        return self.work.num_tokens

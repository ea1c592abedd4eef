"""Why offline work stands still (makes no progress): which of the rules that let online requests go first keeps it out.
``jettison explain`` shows it.

Pure, and decides nothing: it names the decisions of ``policy.filling``, ``policy.order`` and the rungs, and their
numbers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from jettison.policy.safepoints import AGAIN_AND_AGAIN


class Standstill(StrEnum):
    """Reasons, as worded in the event log."""

    NO_WORKER = "no living worker can take it"
    LAYOUT = "its instances merge, split or recover"
    PAUSED = "paused: its memory is for online requests"
    AGAIN = "it computes again what it had given up"
    ABANDONED = "its steps are given up, one after the other, for online arrivals"
    UNKNOWN_TIMES = "step times are not known yet"
    ONLINE_MEMORY = "online requests are foreseen to need the memory, so their steps are not filled"
    TIME = "online work fills the time that a step may take"
    TOKENS = "online work fills the tokens of a step"
    ONLINE_FIRST = "online requests wait, and nothing comes back before them"
    RETURNING = "it is on its way back from host memory"
    TOO_LARGE = "it is too large for its group"
    PLACES = "every place is taken"
    MEMORY = "memory is taken"
    OTHERS = "another key's requests are served first"
    GIVES_WAY = "it has time, and gives way to what would be late otherwise"
    NEXT = "it is in the next step"


class Foreseen(NamedTuple):
    """Blocks that the online requests of a group are foreseen to need soon, beside those that it has."""

    held_blocks: int
    """Now, each once where they do not fit otherwise."""
    growth_blocks: int
    """What they, and arrivals, are foreseen to take more; at least what has to stay free beside them."""
    capacity_blocks: int
    num_requests: int

    @property
    def fits(self) -> bool:
        """Whether all of it is there, once offline requests have given theirs."""
        return self.held_blocks + self.growth_blocks <= self.capacity_blocks

    def as_fields(self) -> dict[str, int]:
        """For the event log."""
        return {
            "online_blocks": self.held_blocks, "growth_blocks": self.growth_blocks, "blocks": self.capacity_blocks,
            "online_requests": self.num_requests,
        }  # fmt: skip


class StepRoom(NamedTuple):
    """The last step of a group, and its time with one offline token more."""

    num_tokens: int
    max_tokens: int
    num_rows: int
    max_rows: int
    is_timed: bool = False
    """Latency objectives bound the step: ``may_take_s`` is their bound."""
    one_more_s: float | None = None
    """Seconds of the step with one token more; None while that is not known."""
    may_take_s: float | None = None
    """Longest time that the step may take; None: no bound."""
    foreseen: Foreseen | None = None
    """Memory that online requests are foreseen to need: their steps are filled where it is there. None: nothing is."""


class StandingView(NamedTuple):
    """Offline requests of one group, none of which gets a new token."""

    running: int
    waiting: int
    stored: int
    """Requests with KV in host pools, which come back before waiting ones start."""
    coming: int
    """Requests on their way back from host pools."""
    online_waiting: int
    changes_layout: bool = False
    pauses: bool = False
    computes_again: bool = False
    num_abandoned_steps: int = 0
    """Steps given up since the work stands still."""
    step: StepRoom | None = None
    """None: no step is under way."""
    is_too_large: bool = False
    """The next request to be admitted is too large for the whole group."""
    num_places: int = 1
    """Free places."""
    num_blocks_needed: int = 0
    """Blocks that the next request to run on, come back or be admitted needs, with those that have to stay free beside
    it."""
    num_blocks_free: int = 0


def why_standing(view: StandingView) -> tuple[Standstill, dict[str, Any]]:
    """The first rule that keeps the work out, and the numbers that the rule went by."""
    step = view.step
    if view.changes_layout:
        return Standstill.LAYOUT, {}
    if view.pauses:
        return Standstill.PAUSED, {"online_waiting": view.online_waiting}
    if view.running and view.num_abandoned_steps >= AGAIN_AND_AGAIN:
        return Standstill.ABANDONED, {"abandoned_steps": view.num_abandoned_steps}
    if view.computes_again:
        return Standstill.AGAIN, {}
    if not view.running and (kept_out := _why_not_let_in(view)) is not None:
        return kept_out
    if view.running and view.num_blocks_needed > view.num_blocks_free:
        return _lacking_blocks(view)
    if step is not None:
        if step.is_timed and step.may_take_s is not None:
            if step.foreseen is not None and not step.foreseen.fits:
                return Standstill.ONLINE_MEMORY, step.foreseen.as_fields()
            if step.one_more_s is None:
                return Standstill.UNKNOWN_TIMES, {}
            if step.one_more_s > step.may_take_s:
                return Standstill.TIME, {
                    "step_tokens": step.num_tokens, "with_one_more_ms": round(1e3 * step.one_more_s, 3),
                    "may_take_ms": round(1e3 * step.may_take_s, 3),
                }
        if step.num_tokens >= step.max_tokens:
            return Standstill.TOKENS, {"step_tokens": step.num_tokens, "max_tokens": step.max_tokens}
        if step.num_rows >= step.max_rows:
            return Standstill.PLACES, {"rows": step.num_rows, "max_rows": step.max_rows}
    return Standstill.NEXT, {}


def _why_not_let_in(view: StandingView) -> tuple[Standstill, dict[str, Any]] | None:
    if view.coming:
        return Standstill.RETURNING, {"coming": view.coming}
    if view.stored and view.online_waiting:
        return Standstill.ONLINE_FIRST, {"online_waiting": view.online_waiting}
    if view.is_too_large:
        return Standstill.TOO_LARGE, {"needed_blocks": view.num_blocks_needed}
    if view.num_places <= 0:
        return Standstill.PLACES, {"free_places": 0}
    return _lacking_blocks(view) if view.num_blocks_needed > view.num_blocks_free else None


def _lacking_blocks(view: StandingView) -> tuple[Standstill, dict[str, Any]]:
    return Standstill.MEMORY, {"needed_blocks": view.num_blocks_needed, "free_blocks": view.num_blocks_free}

"""Whether a step sheds its offline rows for an online request that has come, and when these rows have their turn.

Pure: predicted times in, decisions out. ConServe (section 4.3) gives a step of offline requests alone up and computes
it again; a step of both classes runs to its end there, and its arrivals wait for it. Here both stop at the next
safepoint and go on later from where they were (``core.serving.slices``). What that costs is that weights are read a
second time in the layers that are left.
"""

from __future__ import annotations

from typing import NamedTuple


class ShedView(NamedTuple):
    """A step under way as an online request comes; all times in seconds, of the first stage."""

    whole_left_s: float
    """Until it ends with all of its rows; negative: it takes longer than predicted."""
    stop_s: float
    """Until it comes to its next safepoint."""
    online_left_s: float
    """From there, of its online rows alone."""
    offline_left_s: float
    """From there, of its offline rows alone."""

    @property
    def saved_s(self) -> float:
        """How much sooner the stage is free."""
        return self.whole_left_s - self.stop_s - self.online_left_s

    @property
    def price_s(self) -> float:
        """How much longer the stage computes all in all."""
        return self.stop_s + self.online_left_s + self.offline_left_s - self.whole_left_s


def sheds(view: ShedView) -> bool:
    """Whether the step is told to shed its offline rows: where the request gains more than the stage loses. So it is
    past a step's predicted end, too: it costs nothing where no safepoint is left, and helps where the step is late."""
    return view.whole_left_s <= 0.0 or view.saved_s > max(0.0, view.price_s)


class TurnView(NamedTuple):
    """A group that keeps a slice, as it is about to plan a step."""

    has_online: bool
    """Online requests run or wait here."""
    awaits_first: bool
    """An online request here waits for its first token."""
    had_turn: bool
    """The slice has run since the last step of online requests."""
    num_layers: int
    """Layers of the first stage that the slice has before it."""
    left_s: float | None
    """Predicted seconds of these; None: not known."""
    room_s: float
    """Seconds that may pass, by the objectives, until the next step of online requests begins."""


ALL_LAYERS = None


def plan_turn(view: TurnView) -> int | None:
    """Layers that the slice may compute now: all that it has (None) where no online request is there. Else online
    requests go first; the slice has a turn after each of their steps, of as many layers as fit before the next one has
    to begin, and of one at least: a layer cannot be cut as a prompt can, and what is kept holds its blocks. 0: it
    waits."""
    if not view.has_online:
        return ALL_LAYERS
    if view.awaits_first or view.had_turn or not view.left_s:
        return 0
    return max(1, min(view.num_layers, int(view.room_s / view.left_s * view.num_layers)))

"""Whether a step sheds its offline rows for an online request that has come, and when these rows go on.

Pure: predicted times in, decisions out. ConServe (section 4.3) gives a step of offline requests alone up and computes
it again; a step of both classes runs to its end there, and its arrivals wait for it. Here both stop at the next
safepoint and go on later from where they were (``core.serving.slices``): by themselves where no online request runs,
else beside the next online rows, which they join at the layer that they have reached. What that costs is that weights
are read a second time in the layers that are left, where no other rows would have read them then.

Steps of both classes are not planned apart from the start: two steps read the weights twice in every layer for the same
tokens, online rows get none of them sooner, and an arrival waits for one layer either way.
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
    past a step's last predicted safepoint, too: it costs nothing there, and helps where the step is late."""
    is_past = view.stop_s >= view.whole_left_s
    return is_past or view.saved_s > max(0.0, view.price_s)


class JoinView(NamedTuple):
    """A group that keeps a slice, and the next step of its online requests."""

    awaits_first: bool
    """An online request here waits for its first token."""
    num_layers: int
    """Layers of the first stage that the slice has before it."""
    layer_s: float | None
    """Predicted seconds that the slice adds to each of these; None: not known."""
    room_s: float
    """Seconds that the step may take, by the objectives, beyond what it takes by itself."""


def plan_joining(view: JoinView) -> int:
    """In how many layers the slice joins the step, from the one that it has reached on: as many as the step has room
    for, and one at least where no request waits for its first token, since a layer cannot be cut as a prompt can, and
    what is kept holds its blocks."""
    if view.layer_s is None:
        return 0
    num_layers = view.num_layers if view.layer_s <= 0.0 else int(view.room_s / view.layer_s)
    return min(view.num_layers, max(num_layers, 0 if view.awaits_first else 1))

"""How often a step of offline requests checks whether to give up (a safepoint), and which offline requests make way
when an online request arrives.

Pure: ConServe sections 4.2 and 4.3, Algorithm 2. The paper prints that algorithm's first test the wrong way round:
nothing is done where the deadline holds, not where it does not. It also lets offline requests leave a batch one by one
while that is computed. Here a step runs to its end or is given up whole, so only the next batch can leave some out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

LONGEST_STRETCH = 0.1
"""Share of the TTFT objective that a step may take from one safepoint to the next."""
AGAIN_AND_AGAIN = 2
"""Steps given up one after the other from which offline work counts as kept out: a single one is the normal cost of an
arrival."""
SHORTER, LONGER = 0.5, 1.25
"""Factors on the time that a step may take: after one that was given up, and after one that ended. So about three steps
end for each that is given up."""
LEAST_SAFEPOINTS = 2
"""Fewest safepoints between a step's first layer and its end; one before the first layer comes on top."""


def choose_safepoint_layers(num_layers: int, stage_s: float | None, ttft_s: float | None) -> int:
    """Layers from one safepoint to the next, in a first stage of ``num_layers`` that computes for ``stage_s``."""
    most = max(1, (num_layers - 1) // LEAST_SAFEPOINTS)
    if not stage_s or ttft_s is None:
        return most
    return max(1, min(most, int(LONGEST_STRETCH * ttft_s / stage_s * num_layers)))


def next_safepoint_s(num_layers: int, every: int, stage_s: float, elapsed_s: float) -> float:
    """Seconds until a first stage that has computed for ``elapsed_s`` comes to its next safepoint or, past the last
    one, to its end."""
    layer_s = stage_s / num_layers
    layer = every * (int(elapsed_s / (every * layer_s)) + 1) if layer_s > 0 else num_layers
    return max(0.0, min(layer, num_layers) * layer_s - elapsed_s)


def shortened_s(longest_s: float | None, ran_s: float, num_given_up: int) -> float | None:
    """How long the next step of offline requests alone may take (None: no bound) after one that was given up after
    ``ran_s``.

    A step that is given up computes nothing: where arrivals come faster than such steps end, offline work would never
    progress. ``num_given_up``: steps given up one after the other, with no step between them that computed offline
    tokens; one alone changes nothing.
    """
    if num_given_up < AGAIN_AND_AGAIN:
        return longest_s
    return SHORTER * (ran_s if longest_s is None else min(ran_s, longest_s))


def lengthened_s(longest_s: float, took_s: float) -> float | None:
    """The same after a step that has come to its end; None again where that step was much shorter than its bound."""
    return None if took_s < SHORTER * longest_s else LONGER * max(longest_s, took_s)


class Ahead(NamedTuple):
    """The time that a group's next batch has to wait. With one stage both numbers are the same."""

    first_s: float
    """Seconds until the first stage may begin with the batch."""
    last_s: float
    """Seconds until the last step before it is over."""

    def room_s(self, left_s: float, num_stages: int) -> float:
        """How long a batch may take from its beginning to its end if it has to end within ``left_s``. Its last stage
        cannot begin before the earlier steps are over."""
        return min(left_s - self.first_s, num_stages * (left_s - self.last_s))


class ArrivalView(NamedTuple):
    """A group whose newest step has offline requests alone, as an online request arrives."""

    left_s: float
    """Seconds until the earliest deadline of an online request that waits for its first token; negative: it has
    passed."""
    num_stages: int
    runs_on: Ahead | None
    """The wait if the step runs to its end; None: the step has been told to give up."""
    given_up: Ahead
    """The wait if the step is given up at its next safepoint."""
    longest_wait_s: float
    """Longest time that an arrival may wait for the step, whatever its deadline: one TPOT, as in a step of both
    classes."""


class MakingWay(NamedTuple):
    """The measures taken for the deadline."""

    abandons: bool
    """The step under way is to be given up."""
    num_kept: int
    """How many of the running offline requests, the oldest, may be in the next batch."""


def plan_making_way(view: ArrivalView, num_fitting: Callable[[bool, float], int | None]) -> MakingWay:
    """Leave as few offline requests as possible, newest first, out of the next batch. Give the step under way up only
    where that alone is not enough, or where the step takes longer than an arrival may wait for it. The step is told to
    give up past its last predicted safepoint, too: it costs nothing there, and a step that takes longer than predicted
    may have safepoints left.

    ``num_fitting(is_given_up, seconds)``: how many offline requests, oldest first, fit beside the online ones into a
    batch of at most so many seconds, if the step under way is given up or not; None where the batch takes longer even
    without any.
    """
    if view.runs_on is not None and view.runs_on.first_s <= view.longest_wait_s:
        num_kept = num_fitting(False, view.runs_on.room_s(view.left_s, view.num_stages))
        if num_kept is not None:
            return MakingWay(False, num_kept)
    num_kept = num_fitting(True, view.given_up.room_s(view.left_s, view.num_stages))
    return MakingWay(view.runs_on is not None, num_kept or 0)

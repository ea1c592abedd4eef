"""How often a step of offline requests looks whether to give up, and who makes way when an online request arrives.

Pure: ConServe sections 4.2 and 4.3, Algorithm 2. The paper prints that algorithm's first test the wrong way round:
nothing is done where the deadline holds, not where it does not. It also has offline requests leave, one by one, a batch
that is being computed; here a step runs to its end or is given up whole, so only the next batch can do without some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

LONGEST_STRETCH = 0.1
"""Of the TTFT objective: what a step may take from one safepoint to the next."""
AGAIN_AND_AGAIN = 2
"""Steps that were given up one after the other: one alone is what an arrival costs, and keeps nobody out."""
SHORTER, LONGER = 0.5, 1.25
"""What a step may take after one that was given up, and after one that was not: some three come to their ends for each
that does not."""
LEAST_SAFEPOINTS = 2
"""Between a step's first layer and its end; the one before the first layer comes on top."""


def choose_safepoint_layers(num_layers: int, stage_s: float | None, ttft_s: float | None) -> int:
    """Layers from one safepoint to the next, of a first stage of so many that computes for ``stage_s``."""
    most = max(1, (num_layers - 1) // LEAST_SAFEPOINTS)
    if not stage_s or ttft_s is None:
        return most
    return max(1, min(most, int(LONGEST_STRETCH * ttft_s / stage_s * num_layers)))


def next_safepoint_s(num_layers: int, every: int, stage_s: float, elapsed_s: float) -> float:
    """Seconds until a first stage that has computed for ``elapsed_s`` comes to its next safepoint, or, behind the last
    one, to its end."""
    layer_s = stage_s / num_layers
    layer = every * (int(elapsed_s / (every * layer_s)) + 1) if layer_s > 0 else num_layers
    return max(0.0, min(layer, num_layers) * layer_s - elapsed_s)


def shortened_s(longest_s: float | None, ran_s: float, num_given_up: int) -> float | None:
    """What the next step of offline requests alone may take (None: as long as it likes) behind one that was given up
    after ``ran_s``.

    What was given up has computed nothing: where arrivals come faster than such steps end, offline work would get
    nowhere at any cost. ``num_given_up``: one after the other, none of which has left offline tokens to any step since;
    one alone changes nothing.
    """
    if num_given_up < AGAIN_AND_AGAIN:
        return longest_s
    return SHORTER * (ran_s if longest_s is None else min(ran_s, longest_s))


def lengthened_s(longest_s: float, took_s: float) -> float | None:
    """The same behind one that has come to its end; None again where it was much shorter than it might have been."""
    return None if took_s < SHORTER * longest_s else LONGER * max(longest_s, took_s)


class Ahead(NamedTuple):
    """What a group's next batch has to wait for. Of one stage both are the same."""

    first_s: float
    """Until the first stage may begin with it."""
    last_s: float
    """Until the last step before it is over."""

    def room_s(self, left_s: float, num_stages: int) -> float:
        """What a batch may take from its beginning to its end if that has to come in ``left_s``. Its last stage cannot
        begin before the steps before it are over."""
        return min(left_s - self.first_s, num_stages * (left_s - self.last_s))


class ArrivalView(NamedTuple):
    """A group whose newest step is offline requests' alone, as an online request arrives."""

    left_s: float
    """Until the earliest deadline of an online request that waits for its first token; negative: it has passed."""
    num_stages: int
    runs_on: Ahead | None
    """If the step runs to its end; None: it has been asked to be given up."""
    given_up: Ahead
    """If it is given up at its next safepoint."""
    longest_wait_s: float
    """What an arrival may wait for the step, whatever its deadline: one TPOT, as in a step of both classes."""


class MakingWay(NamedTuple):
    """What is done for the deadline."""

    abandons: bool
    """The step under way is to be given up."""
    num_kept: int
    """Of the running offline requests those that may be in the next batch: the oldest."""


def plan_making_way(view: ArrivalView, num_fitting: Callable[[bool, float], int | None]) -> MakingWay:
    """Have as few offline requests as possible leave the next batch, newest first, and give the step under way up only
    where that alone is not enough, or it takes longer than an arrival may wait for it. That is asked for behind the
    last safepoint, too: it costs nothing there, and a step that takes longer than predicted may have some left.

    ``num_fitting``: how many of the offline requests fit, oldest first, beside the online ones into a batch that takes
    at most so many seconds, if the step under way was given up (or was not); None where it takes longer without any.
    """
    if view.runs_on is not None and view.runs_on.first_s <= view.longest_wait_s:
        num_kept = num_fitting(False, view.runs_on.room_s(view.left_s, view.num_stages))
        if num_kept is not None:
            return MakingWay(False, num_kept)
    num_kept = num_fitting(True, view.given_up.room_s(view.left_s, view.num_stages))
    return MakingWay(view.runs_on is not None, num_kept or 0)

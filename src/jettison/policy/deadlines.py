"""Deadlines of offline work as demand: which work would be late, how few sleepers mend that, how many instances may
sleep. Pure.

Work is seconds of one instance that has nothing else to do; supply is such seconds a second. A tenant's own work is
served earliest deadline first, and tenants alike (``policy.order``): so until a demand is met, its tenant is served all
work that is due before it, and each other tenant is served as much, or all of its work if that is less. With one tenant
that is earliest deadline first over everything, which on a given supply meets all deadlines that any order meets. Where
a demand would be late, tenants with time to spare lend it their turns (``policy.lending``); no wake waits for that.

Sleepers are woken, as few as suffice, as soon as the serving instances would miss a deadline if work took
``WAKE_MARGIN`` times as long as predicted. A wake put off to the last moment spares nothing: the same work takes the
same seconds of instances, and more of them have to wake. Serving instances fall asleep once the rest would meet every
deadline by ``SLEEP_MARGIN``. That margin is larger, so that a prediction error between the two does not wake and put to
sleep by turns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

WAKE_MARGIN = 1.25
"""Factor on predicted times that a deadline must leave room for. Predictions for a mixture of requests beside a chat
are off by so much, and a window that is a seventh longer than all instances need is still kept."""

SLEEP_MARGIN = 1.6
"""The same factor, for a supply without the instances that are to fall asleep."""

LEAST_GAIN = 0.02
"""Where work will be late even with all sleepers: share of the time to the deadline by which waking must reduce
lateness."""

NEARLY = 0.05
"""Share of the lateness that waking all sleepers would mend, for which no further sleeper is woken."""


class Demand(NamedTuple):
    """Offline requests of one tenant that are due at one time."""

    due_s: float | None
    """Deadline, from now; None: no deadline, and served before the tenant's other work, as a client waits for the
    answer."""
    work_s: float
    """Seconds of one instance, in steps as full as they can be."""
    prompt_s: float = 0.0
    """Part of ``work_s`` that its prompts take."""
    lone_s: float = 0.0
    """Seconds that its longest answer takes in steps of its own ..."""
    full_s: float = 0.0
    """... and in full ones."""
    fills: float = 1.0
    """How many instances its requests would fill the steps of."""
    tenant: str = ""
    name: str = ""
    """Its name in the event log."""


class Supply(NamedTuple):
    """Instances that do offline work, and sleepers that will."""

    num_now: int
    share: float = 1.0
    """Seconds of work that each does a second."""
    coming_s: tuple[float, ...] = ()
    """Seconds from now until each further instance begins to serve."""
    coming_share: float = 1.0
    """``share`` of each further instance."""
    online: float = 0.0
    """Seconds of instance time that online requests take a second, on all instances together."""

    @property
    def rate(self) -> float:
        """Seconds of work that all serving instances do a second."""
        return self.num_now * self.share

    def seconds_for(self, work_s: float) -> float:
        """Seconds from now until ``work_s`` of work is done; infinite where no instance serves or will serve."""
        if work_s <= 0.0:
            return 0.0
        time_s, rate = 0.0, self.rate
        for at_s in sorted(self.coming_s):
            if rate * (at_s - time_s) >= work_s:
                break
            work_s -= rate * (at_s - time_s)
            time_s, rate = at_s, rate + self.coming_share
        return time_s + work_s / rate if rate > 0.0 else math.inf

    def and_woken(self, wakes_s: Sequence[float]) -> Supply:
        """This supply with further sleepers woken; ``wakes_s``: how long each wake takes."""
        return self._replace(coming_s=(*self.coming_s, *wakes_s))


class WakePlan(NamedTuple):
    """How many of the sleepers that were named are to be woken now, and for what."""

    num: int
    demand: Demand
    """The demand that would be latest without them."""
    late_s: float
    """How late it would be without them, margin included."""
    late_with_s: float
    """Lateness that is left with them, of all demands together, margin included; 0: all are in time."""
    needed: float
    """Seconds of work a second that meeting it takes, with all work that is served before it; margin included."""


def work_before(demands: Sequence[Demand]) -> list[float]:
    """For each demand: seconds of work that are done when its last answer ends, its own and what each tenant is served
    by then."""
    total_of: defaultdict[str, float] = defaultdict(float)
    reached = [0.0] * len(demands)
    for at in sorted(range(len(demands)), key=lambda i: _due(demands[i])):
        each = demands[at]
        total_of[each.tenant] += each.work_s
        reached[at] = total_of[each.tenant]
    return [
        sum(min(work_s, total_s) for total_s in total_of.values())
        for work_s in reached
    ]


def _due(demand: Demand) -> float:
    return -math.inf if demand.due_s is None else demand.due_s


MOST_ONLINE = 0.9
"""Largest share of an instance's time that online requests are assumed to take from an answer."""


def end_of(demand: Demand, work_s: float, supply: Supply, margin: float = 1.0) -> float:
    """Seconds from now until a demand's last answer ends. ``work_s``: all work done by then, its own included. Work is
    assumed to take ``margin`` times as long as predicted, one answer only half of that excess longer: one answer is
    predicted better than many.

    An answer takes as many steps as it has tokens, however many instances there are, and is held up by online requests
    beside it. The last answer ends half an answer's time after the supply has done the work, as answers are spread over
    their own time. It never ends sooner than a whole answer's time after the prompts are computed.
    """
    done_s = supply.seconds_for(margin * work_s)
    if demand.work_s <= 0.0:
        return done_s
    num = max(1, supply.num_now + len(supply.coming_s))
    held_up = 1.0 / (1.0 - min(MOST_ONLINE, supply.online / num))
    answer_s = demand.lone_s + (demand.full_s - demand.lone_s) * min(1.0, demand.fills / num)
    answer_s *= held_up * (1.0 + margin) / 2.0
    begun_s = supply.seconds_for(margin * (work_s - demand.work_s + demand.prompt_s))
    return max(done_s + answer_s / 2.0, begun_s + answer_s)


def ends(demands: Sequence[Demand], supply: Supply, margin: float = 1.0) -> list[float]:
    """``end_of`` each demand, where tenants get equal shares."""
    return [
        end_of(demand, work_s, supply, margin)
        for demand, work_s in zip(demands, work_before(demands), strict=True)
    ]


def lateness(demands: Sequence[Demand], supply: Supply, margin: float) -> list[float]:
    """By how many seconds each misses its deadline; 0 where it does not. A demand whose deadline has passed is beyond
    saving and counts 0, as one without a deadline does."""
    return [
        max(0.0, end_s - demand.due_s) if demand.due_s is not None and demand.due_s > 0.0 else 0.0
        for demand, end_s in zip(demands, ends(demands, supply, margin), strict=True)
    ]


def plan_wakes(demands: Sequence[Demand], supply: Supply, wakes_s: Sequence[float]) -> WakePlan | None:
    """How many sleepers to wake now, those with the shortest wakes (``wakes_s``, seconds) first; None: none of them.

    The fewest with which no demand is late. Where a demand is late even with all sleepers, the fewest that mend nearly
    as much: a batch that expires keeps the answers that it has. Where all of them mend hardly anything, none: where one
    answer by itself takes longer than there is time, no sleeper helps. But one, where all instances sleep. Lateness is
    summed over all demands, so that a lost demand hides none that can be saved.
    """
    late = lateness(demands, supply, WAKE_MARGIN)
    if not any(late) or not wakes_s:
        return None
    soonest = sorted(wakes_s)

    def late_with_s(num: int) -> float:
        return sum(lateness(demands, supply.and_woken(soonest[:num]), WAKE_MARGIN))

    worst = max(range(len(late)), key=lambda i: (late[i], -_due(demands[i])))
    demand = demands[worst]
    due_s, best_s = demand.due_s or 0.0, late_with_s(len(soonest))
    least = 0 if math.isfinite(sum(late)) else 1  # where all sleep, one is woken in any case
    mended_s = late_with_s(least) - best_s
    if not math.isfinite(best_s) or (best_s > 0.0 and mended_s < LEAST_GAIN * due_s and not least):
        return None
    part = NEARLY if mended_s >= LEAST_GAIN * due_s else 1.0
    target_s = best_s + part * mended_s if best_s > 0.0 else 0.0
    num = next((n for n in range(1, len(soonest)) if late_with_s(n) <= target_s), len(soonest))
    needed = WAKE_MARGIN * work_before(demands)[worst] / due_s
    return WakePlan(num, demand, late[worst], late_with_s(num), needed)


def may_go(demands: Sequence[Demand], supply: Supply, num_going: int, margin: float = SLEEP_MARGIN) -> bool:
    """Whether ``num_going`` serving instances may fall asleep: no demand is late without them, or lateness does not
    grow."""
    fewer = supply._replace(num_now=max(0, supply.num_now - num_going))
    without = lateness(demands, fewer, margin)
    if not any(without):
        return True
    return math.isfinite(sum(without)) and sum(without) <= sum(lateness(demands, supply, margin))


def needed_now(demands: Sequence[Demand], supply: Supply) -> float | None:
    """Instances needed to meet all deadlines ahead, with the work served before each; None where no deadline is
    ahead."""
    ahead = [
        WAKE_MARGIN * work_s / demand.due_s for demand, work_s in zip(demands, work_before(demands), strict=True)
        if demand.due_s is not None and demand.due_s > 0.0
    ]
    return max(ahead) / supply.share if ahead else None


class Seen(NamedTuple):
    """Offline work done by instances that had more of it than they could take on."""

    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    instance_s: float = 0.0

    def faded(self, factor: float) -> Seen:
        """Each number times ``factor``."""
        return Seen(*(factor * each for each in self))


BELIEF_S = 4.0
"""Weight of ``assumed``, as if it had been seen for so many seconds of an instance."""

LEAST_SHARE, MOST_SHARE = 0.02, 1.5
"""Bounds of a share: an instance that a chat keeps busy now is not so for ever, and one that is faster than predicted
may have been lucky."""


def share_of(seen: Sequence[Seen], prompt_token_s: float, output_token_s: float, assumed: float) -> float:
    """Seconds of offline work that an instance does a second, beside everything else: the least by any of the records
    ``seen`` (of the last moments, of longer), as the next minutes may be like either. ``assumed``: the share before
    anything was seen."""
    shares = [
        (BELIEF_S * assumed + each.prompt_tokens * prompt_token_s + each.output_tokens * output_token_s)
        / (BELIEF_S + each.instance_s)
        for each in seen
    ]
    return min(max(min(shares, default=assumed), LEAST_SHARE), MOST_SHARE)


def expected_tokens(
    num_ended: int, ended_tokens: float, running_tokens: Sequence[float], usual_tokens: float, longest_tokens: float
) -> float:
    """Expected tokens of an answer of a batch: the mean of its ended answers and of those under way, at most
    ``longest_tokens``. An answer under way counts as the tokens that it has, or as ``usual_tokens`` if these are more.
    Without answers under way the mean would be too small, as short answers end first."""
    num = num_ended + len(running_tokens)
    total = ended_tokens + sum(max(each, usual_tokens) for each in running_tokens)
    mean = total / num if num else usual_tokens
    return max(1.0, min(mean, longest_tokens))

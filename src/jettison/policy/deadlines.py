"""Deadlines of offline work as demand: what is late, how few sleepers mend that, which may go. Pure.

Work is seconds of one instance that has nothing else to do; supply is such seconds a second. A tenant's own work is
served earliest deadline first, and tenants alike (``policy.order``): so before a demand is met its tenant gets all that
is due before it, and each other tenant as much, or what it has. Where one tenant is alone that is earliest deadline
first over everything, which on a given supply meets all deadlines that any order meets. Where that would be late,
tenants with time lend it their turns (``policy.lending``); no wake waits for that.

Sleepers are woken as soon as what serves would be late by ``WAKE_MARGIN``, the fewest that do. A wake that is put off
to the last moment spares nothing: the same work takes the same seconds of instances, and more of them have to wake.
Those that serve go once the rest would meet everything by ``SLEEP_MARGIN``, which is larger: so no error of a
prediction between the two wakes and puts to sleep by turns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

WAKE_MARGIN = 1.25
"""Times what is predicted, for which there has to be time: predictions of a mixture of requests beside a chat are off
by so much, and a window that is a seventh longer than all instances need is still kept."""

SLEEP_MARGIN = 1.6
"""The same without those that are to fall asleep."""

LEAST_GAIN = 0.02
"""Of the time that is left, by which waking has to bring something nearer to its deadline that will be late even so."""

NEARLY = 0.05
"""Of what waking all could mend, the part for which no more are woken."""


class Demand(NamedTuple):
    """Offline requests of one tenant that are due at one time."""

    due_s: float | None
    """From now; None: at no time, and served before the tenant's others, as a client waits for it."""
    work_s: float
    """Of one instance, in steps as full as they can be."""
    prompt_s: float = 0.0
    """Of that, the prompts."""
    lone_s: float = 0.0
    """What its longest answer takes in steps of its own ..."""
    full_s: float = 0.0
    """... and in full ones."""
    fills: float = 1.0
    """Instances whose steps its requests would fill."""
    tenant: str = ""
    name: str = ""
    """For whom this is told."""


class Supply(NamedTuple):
    """Instances that do offline work, and sleepers that will."""

    num_now: int
    share: float = 1.0
    """Seconds of work that each does a second."""
    coming_s: tuple[float, ...] = ()
    """When each of some others begins to serve."""
    coming_share: float = 1.0
    """Of each of those."""
    online: float = 0.0
    """Seconds of an instance that online requests take a second, of all together."""

    @property
    def rate(self) -> float:
        """What all do that serve now."""
        return self.num_now * self.share

    def seconds_for(self, work_s: float) -> float:
        """From now on until so much has been done; infinite where nothing will do it."""
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
        """With these sleepers, whose wakes take so long."""
        return self._replace(coming_s=(*self.coming_s, *wakes_s))


class WakePlan(NamedTuple):
    """How many of the sleepers that were named are to be woken now, and for what."""

    num: int
    demand: Demand
    """That would be latest without them."""
    late_s: float
    """By so much, margin included."""
    late_with_s: float
    """Still, with them; 0: in time."""
    needed: float
    """Seconds of work a second that it takes to meet it, with all that is served before it."""


def work_before(demands: Sequence[Demand]) -> list[float]:
    """Seconds of work that are done when each of these has its last answer, itself and all that shares with it."""
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
"""Of an instance's time, what online requests are taken to hold an answer up by at most."""


def end_of(demand: Demand, work_s: float, supply: Supply, margin: float = 1.0) -> float:
    """Seconds from now at which a demand has its last answer, where ``work_s`` are done then with all that is served
    before it. All work is taken to take ``margin`` times as long, and an answer by half of that more: what is known of
    one is known better than of many.

    An answer takes as many steps as it has tokens, however many instances there are, and waits for what is online
    beside it. The last ones are there half of that after the supply has done their work, for they are spread over
    their own time; and never sooner than all of it, once their prompts are computed.
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
    """``end_of`` each, where tenants share alike."""
    return [
        end_of(demand, work_s, supply, margin)
        for demand, work_s in zip(demands, work_before(demands), strict=True)
    ]


def lateness(demands: Sequence[Demand], supply: Supply, margin: float) -> list[float]:
    """By how many seconds each misses its deadline; 0 where it does not. What was due before now is beyond saving, and
    counts no more than what is due at no time."""
    return [
        max(0.0, end_s - demand.due_s) if demand.due_s is not None and demand.due_s > 0.0 else 0.0
        for demand, end_s in zip(demands, ends(demands, supply, margin), strict=True)
    ]


def plan_wakes(
    demands: Sequence[Demand], supply: Supply, wakes_s: Sequence[float], margin: float = WAKE_MARGIN
) -> WakePlan | None:
    """Which of these sleepers to wake now, the soonest first; None: none of them.

    The fewest with which nothing is late. Where something is late even with all, the fewest that mend nearly as much:
    a batch that expires keeps the answers that it has. None where that is hardly anything, and one where all sleep:
    where one answer by itself takes longer than there is time, no sleeper helps. Least lateness is of all demands
    together, so that one that is lost hides none that can be saved.
    """
    late = lateness(demands, supply, margin)
    if not any(late) or not wakes_s:
        return None
    soonest = sorted(wakes_s)

    def late_with_s(num: int) -> float:
        return sum(lateness(demands, supply.and_woken(soonest[:num]), margin))

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
    needed = margin * work_before(demands)[worst] / due_s
    return WakePlan(num, demand, late[worst], late_with_s(num), needed)


def may_go(demands: Sequence[Demand], supply: Supply, num_going: int, margin: float = SLEEP_MARGIN) -> bool:
    """Whether so many of those that serve may fall asleep: nothing is later for it."""
    fewer = supply._replace(num_now=max(0, supply.num_now - num_going))
    without = lateness(demands, fewer, margin)
    if not any(without):
        return True
    return math.isfinite(sum(without)) and sum(without) <= sum(lateness(demands, supply, margin))


def needed_now(demands: Sequence[Demand], supply: Supply, margin: float = WAKE_MARGIN) -> float | None:
    """Instances that it takes to meet all deadlines ahead, with what is served before each; None without any."""
    ahead = [
        margin * work_s / demand.due_s for demand, work_s in zip(demands, work_before(demands), strict=True)
        if demand.due_s is not None and demand.due_s > 0.0
    ]
    return max(ahead) / supply.share if ahead else None


class Seen(NamedTuple):
    """What instances that had more offline work than they could take on have done of it."""

    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    instance_s: float = 0.0

    def faded(self, factor: float) -> Seen:
        """What is left of it."""
        return Seen(*(factor * each for each in self))


BELIEF_S = 4.0
"""Seconds of instances for which ``assumed`` counts as if it had been seen."""

LEAST_SHARE, MOST_SHARE = 0.02, 1.5
"""Bounds of a share: an instance that a chat keeps busy now is not so for ever, and one that is faster than predicted
may have been lucky."""


def share_of(seen: Sequence[Seen], prompt_token_s: float, output_token_s: float, assumed: float) -> float:
    """Seconds of work that an instance does a second, beside everything else: the least by any of these records (of
    the last moments, of longer), as the next minutes may be like either. ``assumed``: before anything was seen."""
    shares = [
        (BELIEF_S * assumed + each.prompt_tokens * prompt_token_s + each.output_tokens * output_token_s)
        / (BELIEF_S + each.instance_s)
        for each in seen
    ]
    return min(max(min(shares, default=assumed), LEAST_SHARE), MOST_SHARE)


def expected_tokens(
    num_ended: int, ended_tokens: float, running_tokens: Sequence[float], usual_tokens: float, longest_tokens: float
) -> float:
    """How long an answer of a batch will be: as its own were, those under way counted as what they have, or as long as
    answers usually are; not longer than it may. Short answers end first: without those under way they would be all."""
    num = num_ended + len(running_tokens)
    total = ended_tokens + sum(max(each, usual_tokens) for each in running_tokens)
    mean = total / num if num else usual_tokens
    return max(1.0, min(mean, longest_tokens))

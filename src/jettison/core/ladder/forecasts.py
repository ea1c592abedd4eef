"""What rungs ask of the forecast (``policy.forecast``): what merges and wakes would save the whole cluster, and
what a merged group saves by being taken apart now. Views and comparisons; rungs decide by them.

All groups are one pool in the model, as waiting requests go where there is room. What is compared shares its
arrivals and lengths, so what the model does not know of them cancels out for the most part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from jettison.core.ladder.dropplans import block_bytes
from jettison.core.ladder.rung import Means, Worth
from jettison.core.load.pullrates import PullRates
from jettison.core.serving.group import Group
from jettison.memory.kvtransfers import ExchangeMode
from jettison.policy.forecast import Arrangement, Forecast, Load, Plan, forecast
from jettison.types import NANOSECONDS, GroupId, WorkerId

HORIZON_S = 10.0
"""Time for which arrivals are foreseen; what they leave is played for as long again. A burst lasts seconds, and so does
what it leaves behind."""

WORTH = 0.4
"""Least part of what memory alone could save that a merge has to save. A pipeline that keeps up saves nearly all; one
that saves less pays most of it back in bubbles, and the forecast is off by as much as what is left."""

EMPTYING_WORTH = 0.5
"""Least part of a merged group's cost that emptying it has to save. Emptying costs those that wait, for certain and at
once; what it brings comes later, if the load stays as it is."""

LATER_S = 1.0
"""A restore is compared with the same one later."""

PAIRED_SHARE = 3 / 7
"""Part of the undropped memory that the requests of two members may hold when these take their layers back: each holds
blocks of all requests while these return, and a seventh stays free for growth."""


class Saving(NamedTuple):
    """What an alternative is forecast to save over staying, and what that is judged by."""

    worth: Worth
    possible_request_s: float
    """What ample memory would save, without a pipeline."""
    staying: Forecast
    taking: Forecast

    @property
    def is_worth_a_pipeline(self) -> bool:
        """Whether it saves enough of what memory could save."""
        return self.worth.net_request_s > WORTH * self.possible_request_s

    @property
    def is_worth_a_device(self) -> bool:
        """Whether the memory of one more device could save more than the device counts as meanwhile."""
        return self.possible_request_s > self.staying.longest_wait_s

    def as_fields(self) -> dict[str, object]:
        """For the event log; in request-seconds, and seconds."""
        fields: dict[str, object] = {
            "stay_request_s": self.staying.cost_request_s, "taken_request_s": self.taking.cost_request_s,
            "possible_request_s": self.possible_request_s, "stay_longest_wait_s": self.staying.longest_wait_s,
            "taken_longest_wait_s": self.taking.longest_wait_s,
        }  # fmt: skip
        return fields | ({"device_s": self.worth.device_s} if self.worth.device_s else {})


class Question:
    """What merges and wakes would save, on one state: staying as things are is forecast once, with the instances that
    are being woken."""

    def __init__(
        self, means: Means, load: Load, lengths: Mapping[GroupId, int], tokens: float, stay: Arrangement,
        coming: _Coming | None,
    ) -> None:
        """``lengths``: stages of each group that may merge; ``tokens``: their KV together."""
        self._means, self._load, self._lengths, self._tokens, self._stay = means, load, lengths, tokens, stay
        self._coming = coming
        self._staying = self._and_woken(stay, list(lengths.values()), tokens, coming)
        self.staying = forecast(load, self._staying, HORIZON_S)
        ample = forecast(load, Plan(stay._replace(capacity_tokens=math.inf)), HORIZON_S)
        self._possible = max(0.0, self.staying.cost_request_s - ample.cost_request_s)

    @classmethod
    def of(cls, means: Means, now_ns: int, apart: Collection[WorkerId] = ()) -> Question | None:
        """On the present groups. ``apart``: members of a restore under way, which is taken to be over; they are asked
        for by ``lone``. None while step times are not known."""
        outlook, groups = means.loads.outlook, list(means.state.groups.values())
        others = [g for g in groups if g.worker_ids[0] not in apart]
        lengths = {g.group_id: len(g.stages) for g in others} | {lone(w): 1 for w in apart}
        tokens = outlook.capacity_tokens(others) + outlook.apart_tokens(apart)
        stay = outlook.arrangement(list(lengths.values()), tokens)
        if stay is None:
            return None
        return cls(means, outlook.load(groups), lengths, tokens, stay, _coming(means, now_ns))

    def merging(self, merges: Iterable[Collection[GroupId]]) -> Saving:
        """What these merges, each of some groups, would save."""
        sources = list(merges)
        merged = {g for each in sources for g in each}
        lengths = [length for g, length in self._lengths.items() if g not in merged]
        lengths += [sum(self._lengths[g] for g in each) for each in sources]
        outlook = self._means.loads.outlook
        tokens = self._tokens + outlook.copies_tokens(sum(len(each) - 1 for each in sources))
        taken = outlook.arrangement(lengths, tokens)
        assert taken is not None, "step times are known: they were when the question was asked"
        if self._coming is None:
            back = self._stay._replace(starts_s=self._means.state.params.restore.min_settled_s)
            plan = Plan(taken, back, PAIRED_SHARE)
        else:
            plan = self._and_woken(taken, lengths, tokens, self._coming)
        taking = forecast(self._load, plan, HORIZON_S)
        stalls = sum(_stalls_request_s(self._means, each) for each in sources)
        saved = self.staying.cost_request_s - taking.cost_request_s - stalls
        return Saving(Worth(saved), self._possible, self.staying, taking)

    def waking(self, worker_ids: Collection[WorkerId], takes_s: float) -> Saving:
        """What waking these sleepers would save, if they serve after ``takes_s``. Their devices count for as long as
        the queue would wait without them."""
        coming = _Coming(tuple(worker_ids), takes_s)
        if self._coming is not None:
            coming = _Coming(self._coming.worker_ids + coming.worker_ids, max(takes_s, self._coming.in_s))
        plan = self._and_woken(self._stay, list(self._lengths.values()), self._tokens, coming)
        taking = forecast(self._load, plan, HORIZON_S)
        saved = self.staying.cost_request_s - taking.cost_request_s
        needed_device_s = len(worker_ids) * self.staying.longest_wait_s
        return Saving(Worth(saved, needed_device_s), self._possible, self.staying, taking)

    def _and_woken(
        self, first: Arrangement, lengths: Sequence[int], tokens: float, coming: _Coming | None
    ) -> Plan:
        """An arrangement of groups of these lengths, joined by the workers that are being woken."""
        if coming is None:
            return Plan(first)
        outlook, woken = self._means.loads.outlook, coming.worker_ids
        joined = outlook.arrangement(
            [*lengths, *([1] * len(woken))], tokens + outlook.apart_tokens(woken), coming.in_s
        )
        return Plan(first, joined, is_sure=True)


class _Coming(NamedTuple):
    """Sleepers that are being woken."""

    worker_ids: tuple[WorkerId, ...]
    in_s: float
    """Seconds until the last of them serves."""


def _coming(means: Means, now_ns: int) -> _Coming | None:
    """The sleepers that are being woken; those without a prediction, and those that are late by as much as a forecast
    looks ahead, do not count. None: no worker is."""
    left_s = {
        w: (expected_ns - now_ns) / NANOSECONDS for w in means.sleepers.waking
        if (expected_ns := means.sleepers.expected_ns(w)) is not None
    }
    worker_ids = tuple(sorted(w for w, seconds in left_s.items() if seconds > -HORIZON_S))
    return _Coming(worker_ids, max(0.0, *(left_s[w] for w in worker_ids))) if worker_ids else None


def _stalls_request_s(means: Means, group_ids: Collection[GroupId]) -> float:
    """Request-seconds that running requests stand still in the exchange of a merge: each until its KV has arrived, half
    of the time of all on average. 0.0 where they run on meanwhile (``--exchange live``)."""
    state = means.state
    groups = [state.groups[g] for g in group_ids if g in state.groups]
    if state.params.exchange is ExchangeMode.LIVE or len(groups) < 2:
        return 0.0
    members = [s for g in groups for s in g.worker_ids]
    leaving_bytes = max(g.blocks.num_used for g in groups) * block_bytes(state) * (len(members) - 1) / len(members)
    return sum(len(g.queues.running) for g in groups) * leaving_bytes / PullRates(state).slowest(members) / 2


def lone(worker_id: WorkerId) -> GroupId:
    """How a member of a restore is named in a question, as a group of its own: no group has such an id."""
    return -1 - worker_id


class TakingApart(NamedTuple):
    """What alternatives to staying merged would save, in request-seconds."""

    staying: Forecast
    now: Forecast
    """Restored at once."""
    emptied: Forecast
    """Restored once its memory has been emptied for it."""

    @property
    def saved_request_s(self) -> float:
        """By a restore now, over a later one; below 0: it costs."""
        return self.staying.cost_request_s - self.now.cost_request_s

    @property
    def should_empty(self) -> bool:
        """Whether the group serves so badly that its memory is worth emptying."""
        saved = self.staying.cost_request_s - self.emptied.cost_request_s
        return saved > EMPTYING_WORTH * self.staying.cost_request_s


def taking_apart(means: Means, group: Group, fitting_tokens: float) -> TakingApart | None:
    """What a merged group would save by being taken apart. ``fitting_tokens``: KV that its requests may hold for that.
    None while step times are not known."""
    outlook, members = means.loads.outlook, group.worker_ids
    parts = _parts(len(members))
    tokens = outlook.apart_tokens(members) + outlook.copies_tokens(len(members) - len(parts))
    merged = outlook.arrangement([len(members)], outlook.capacity_tokens([group]))
    apart = outlook.arrangement(parts, tokens)
    if merged is None or apart is None:
        return None
    fetched_bytes = means.state.shape.parameter_bytes * (len(members) - 1) / len(members)
    takes_s = fetched_bytes / PullRates(means.state).slowest(members)
    share, load = fitting_tokens / tokens, outlook.load([group])
    now = Plan(merged, apart._replace(starts_s=takes_s))
    later = Plan(merged, apart._replace(starts_s=takes_s + LATER_S), share)
    emptied = Plan(merged, apart._replace(starts_s=takes_s), share, is_capped=True)
    return TakingApart(*(forecast(load, plan, HORIZON_S) for plan in (later, now, emptied)))


def _parts(num_members: int) -> Sequence[int]:
    """Lengths of the groups that a merged one becomes: a long one goes back by halves, as groups of every second member
    have room for more while requests return."""
    return [1] * num_members if num_members < 4 else [(num_members + 1) // 2, num_members // 2]

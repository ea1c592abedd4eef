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
from jettison.types import GroupId, WorkerId

HORIZON_S = 10.0
"""Time for which arrivals are foreseen; what they leave is played for as long again. A burst lasts seconds, and so does
what it leaves behind."""

WORTH = 0.35
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
    rank: Worth
    """What it saves within ``HORIZON_S``, by which offers are compared: ``worth`` looks further for a slow wake."""

    @property
    def is_worth_a_pipeline(self) -> bool:
        """Whether it saves enough of what memory could save. What is foreseen beyond that does not count: a merge
        brings nothing but memory."""
        return min(self.worth.net_request_s, self.possible_request_s) > WORTH * self.possible_request_s

    @property
    def is_worth_a_device(self) -> bool:
        """Whether ample memory would save more than one more device counts as meanwhile."""
        return _is_worth_a_device(self.possible_request_s, self.staying)

    def as_fields(self) -> dict[str, object]:
        """For the event log; in request-seconds, and seconds."""
        fields: dict[str, object] = {
            "stay_request_s": self.staying.cost_request_s, "taken_request_s": self.taking.cost_request_s,
            "possible_request_s": self.possible_request_s, "stay_longest_wait_s": self.staying.longest_wait_s,
            "taken_longest_wait_s": self.taking.longest_wait_s,
        }  # fmt: skip
        return fields | ({"device_s": self.worth.device_s} if self.worth.device_s else {})


def _is_worth_a_device(possible_request_s: float, staying: Forecast) -> bool:
    return possible_request_s > staying.longest_wait_s


class Question:
    """What merges and wakes would save, on one state: staying as things are is forecast once, with the instances that
    are being woken."""

    def __init__(
        self, means: Means, load: Load, lengths: Mapping[GroupId, int], tokens: float, stay: Arrangement,
        coming: Sequence[_Coming],
    ) -> None:
        """``lengths``: stages of each group that may merge; ``tokens``: their KV together; ``coming``: the sleepers
        that are being woken, the soonest first."""
        self._means, self._load, self._lengths, self._tokens, self._stay = means, load, lengths, tokens, stay
        self._coming = coming
        self.staying = self._play(stay, list(lengths.values()), tokens, coming)
        ample = self._play(stay._replace(capacity_tokens=math.inf), list(lengths.values()), math.inf, coming)
        self._possible = max(0.0, self.staying.cost_request_s - ample.cost_request_s)

    @classmethod
    def of(cls, means: Means, now_ns: int, apart: Collection[WorkerId] = ()) -> Question | None:
        """On the groups that take requests now. ``apart``: members of a restore under way, which is taken to be over;
        they are asked for by ``lone``. None while step times are not known, and where no group takes requests."""
        outlook, groups = means.loads.outlook, list(means.state.groups.values())
        opened = means.moves.serving_groups()
        serving = {w for g in opened for w in g.worker_ids}
        others = [g for g in opened if g.worker_ids[0] not in apart]
        lengths = {g.group_id: len(g.stages) for g in others} | {lone(w): 1 for w in apart}
        tokens = outlook.capacity_tokens(others) + outlook.apart_tokens(apart)
        stay = outlook.arrangement(list(lengths.values()), tokens) if lengths else None
        if stay is None:
            return None
        # The requests of a pipeline that is taken apart go home to its members. Those of a worker that leaves for sleep
        # run on there: they take nothing of the others' memory, and all that comes goes to these.
        load = outlook.load([g for g in groups if not serving.isdisjoint(g.worker_ids)], share=1.0)
        coming = sorted(_Coming(in_s, w) for w, in_s in means.sleepers.coming_s(now_ns).items())
        return cls(means, load, lengths, tokens, stay, coming)

    @property
    def is_worth_a_device(self) -> bool:
        """As ``Saving.is_worth_a_device``: whatever is offered, ample memory would save the same."""
        return _is_worth_a_device(self._possible, self.staying)

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
        if self._coming:
            taking = self._play(taken, lengths, tokens, self._coming)
        else:
            back = self._stay._replace(starts_s=self._means.state.params.restore.min_settled_s)
            taking = forecast(self._load, Plan(taken, back, PAIRED_SHARE), HORIZON_S)
        stalls = sum(_stalls_request_s(self._means, each) for each in sources)
        saved = self.staying.cost_request_s - taking.cost_request_s - stalls
        return Saving(Worth(saved), self._possible, self.staying, taking, Worth(saved))

    def waking(self, worker_ids: Collection[WorkerId], takes_s: float) -> Saving:
        """What waking these sleepers would save, if they serve after ``takes_s``. Their devices count for as long as
        the queue would wait without them."""
        horizon_s = max(HORIZON_S, takes_s + HORIZON_S / 2.0)  # a wake that takes long is seen to serve
        saving = self._waking(worker_ids, takes_s, horizon_s)
        return saving if horizon_s == HORIZON_S else saving._replace(
            rank=self._waking(worker_ids, takes_s, HORIZON_S).worth
        )

    def _waking(self, worker_ids: Collection[WorkerId], takes_s: float, horizon_s: float) -> Saving:
        lengths, staying = list(self._lengths.values()), self.staying
        if horizon_s != HORIZON_S:
            staying = self._play(self._stay, lengths, self._tokens, self._coming, horizon_s)
        coming = sorted([*self._coming, *(_Coming(takes_s, w) for w in worker_ids)])
        taking = self._play(self._stay, lengths, self._tokens, coming, horizon_s)
        worth = Worth(staying.cost_request_s - taking.cost_request_s, len(worker_ids) * staying.longest_wait_s)
        return Saving(worth, self._possible, staying, taking, worth)

    def _play(
        self, first: Arrangement, lengths: Sequence[int], tokens: float, coming: Sequence[_Coming],
        horizon_s: float = HORIZON_S,
    ) -> Forecast:
        """An arrangement of groups of these lengths, joined by one worker after the other."""
        outlook = self._means.loads.outlook
        joined: list[Arrangement] = []
        for number, each in enumerate(coming, 1):
            woken = [c.worker_id for c in coming[:number]]
            with_them = outlook.arrangement(
                [*lengths, *([1] * number)], tokens + outlook.apart_tokens(woken), each.in_s
            )
            assert with_them is not None, "step times are known: they were when the question was asked"
            joined.append(with_them)
        return forecast(self._load, Plan(first, joined=joined), horizon_s)


class _Coming(NamedTuple):
    """A sleeper that is being woken."""

    in_s: float
    """Seconds until it serves."""
    worker_id: WorkerId


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

    def as_fields(self, taken: Forecast) -> dict[str, object]:
        """For the event log, of one of the alternatives; in request-seconds, and seconds."""
        return {
            "stay_request_s": self.staying.cost_request_s, "taken_request_s": taken.cost_request_s,
            "stay_longest_wait_s": self.staying.longest_wait_s, "taken_longest_wait_s": taken.longest_wait_s,
        }

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
    parts = parts_of(len(members))
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


def parts_of(num_members: int) -> Sequence[int]:
    """Lengths of the groups that a merged one becomes: a long one goes back by halves, as groups of every second member
    have room for more while requests return."""
    return [1] * num_members if num_members < 4 else [(num_members + 1) // 2, num_members // 2]

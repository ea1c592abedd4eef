"""Which group computes a newcomer's prompt: two tests, of a group's memory and of the prompts ahead there, and what
each place costs. ``policy.packing.placing`` weighs places; here are its views of groups."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from jettison.core.ladder.prompts import PromptWork, prompt_rate_of, slowed_share
from jettison.core.load.views import Loads
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.policy.packing.params import breaks_ttft
from jettison.policy.packing.placing import DevicePrice, Host, goes_elsewhere, place_cost
from jettison.policy.slo import objectives
from jettison.types import GroupId

MOST_PLACES = 64
"""Groups that a newcomer's prompt is weighed in beside the one that packing chose: each takes a few predictions. Eight
would make a day's P99 TTFT a tenth longer at 64 instances."""


def has_room(cluster: ClusterState, group: Group, state: RequestState) -> bool:
    """Whether the group has a place for a newcomer, and its blocks above the watermark, behind all online requests that
    wait there. Cached blocks of its prompt that a request there holds are not counted as needed. Where offline work is
    harvested, its places count as free, and so do blocks that a single offline request holds alone."""
    blocks, queues = group.blocks, group.queues
    makes_way = cluster.params.offline.slo_aware
    num_served = queues.num_served_online if makes_way else queues.num_served
    if num_served + len(queues.waiting) >= group.max_running:
        return False
    _, needed = blocks.cached_prefix(state)
    num_free = blocks.num_free - blocks.watermark - queues.queued_blocks()
    if num_free >= needed or not makes_way or num_served == queues.num_served:
        return num_free >= needed
    # Asked last: it goes through all that offline requests hold.
    num_free += blocks.num_used - blocks.num_used_without(s.request_id for s in queues.holding_offline())
    return num_free >= needed


def fits_compute(cluster: ClusterState, group: Group, state: RequestState) -> bool:
    """Whether the group's steps have the time for a newcomer: beside the requests that decode there, the prompts ahead
    and its own leave it its objective for the first token. True where too little is known."""
    work, ttft_s = PromptWork(cluster), objectives(cluster.params.offline.slo, cluster.predictor).ttft_s
    return not breaks_ttft(work.ahead(group), work.of(state), prompt_rate_of(cluster, group), ttft_s)


def cheapest(
    groups: Iterable[Group], cost_of: Callable[[Group], tuple[bool, float]], has_room: Callable[[Group], bool]
) -> list[Group]:
    """At most ``MOST_PLACES`` groups that have room, those that cost least."""
    costs = sorted((cost_of(group), group.group_id, group) for group in groups)
    return list(islice((group for _, _, group in costs if has_room(group)), MOST_PLACES))


class Late(NamedTuple):
    """A request that waits for its first step in a group, and would better be served by an empty one."""

    state: RequestState
    group: Group
    ahead_s: float
    """Seconds until its turn comes there."""
    cost_s: float
    """Request-seconds that its prompt costs there ..."""
    elsewhere_s: float
    """... and in the empty group."""


class Newcomers:
    """Weighs the groups in which a newcomer's prompt may be computed."""

    def __init__(self, cluster: ClusterState, loads: Loads) -> None:
        self._cluster, self._loads = cluster, loads

    def choose(
        self, wanted: Group, state: RequestState, others: Callable[[], tuple[Iterable[Group], Iterable[Group]]],
        needed: Container[GroupId],
    ) -> Group | None:
        """The group for a newcomer: ``wanted``, which packing chose by memory, unless another costs less and keeps the
        objective for the first token, too. ``others``: the other groups in use, and those without online requests, all
        of them packed; ``needed``: packing cannot do without these. Where ``wanted`` has no room, or would break the
        objective, those in use that keep it come first, and none costs more for not being the one that packing chose.
        None: none of them has room.

        Of the others those are weighed that keep the objective, and cost least, at first sight: as if a prompt ran at
        its full rate and decodes waited for it. Of empty groups, which are alike, it is the first.
        """
        cluster = self._cluster
        cluster.catch_up(wanted.group_id)
        work = PromptWork(cluster)
        prompt, ttft_s = work.of(state), objectives(cluster.params.offline.slo, cluster.predictor).ttft_s

        def keeps(host: Host | None) -> bool:
            return host is None or not breaks_ttft(host.ahead_tokens, prompt, host.tokens_per_s, ttft_s)

        def is_extra(group: Group) -> bool:
            return is_in_time and group is not wanted and group.group_id not in needed

        def at_first_sight(group: Group) -> tuple[bool, float]:
            num = group.queues.num_served_online
            host = Host(work.ahead(group), work.tokens_per_s, num, float(num > 0), is_extra=is_extra(group))
            return not keeps(host), place_cost(host, prompt, price)

        fits = has_room(cluster, wanted, state)
        price, here = self._price(wanted), self._host(wanted, work) if fits else None
        is_in_time = fits and keeps(here)
        if is_in_time and (here is None or (not here.ahead_tokens and not self._alone_is_better(here, prompt, price))):
            return wanted
        in_use, spares = others()
        found: list[tuple[Group, Host | None]] = [(wanted, here)] if fits else []
        few = cheapest(in_use, at_first_sight, lambda g: self._has_room(g, state))
        nearby = [(g, self._host(g, work)) for g in few]
        found += [(g, host) for g, host in nearby if not is_in_time or keeps(host)]
        if not is_in_time and (keeping := [(g, host) for g, host in nearby if keeps(host)]):
            found = keeping
        elif (spare := next((g for g in spares if self._has_room(g, state)), None)) is not None:
            found.append((spare, self._host(spare, work)))
        costs = dict[GroupId, float]()
        for group, host in found:
            cost = 0.0 if host is None else place_cost(host._replace(is_extra=is_extra(group)), prompt, price)
            costs[group.group_id] = cost
        groups = (group for group, _ in found)
        return min(groups, key=lambda g: (costs[g.group_id], g.blocks.num_free, g.group_id), default=None)

    def stays(self, state: RequestState, group: Group, wanted: Group) -> bool:
        """Whether a request that waits for its first step in a group stays although packing wants it elsewhere: its
        prompt costs less where it is, even as if packing could do without that group. What stays has to be moved later,
        or keeps the packing from what it wants."""
        work = PromptWork(self._cluster)
        here, there = self._host(group, work), self._host(wanted, work)
        if here is None or there is None:
            return False
        ahead = work.begun(group)
        for waiting in group.queues.waiting:
            if waiting is state:
                break
            ahead += work.of(waiting)
        price, prompt = self._price(wanted), work.of(state)
        cost_s = place_cost(here._replace(ahead_tokens=ahead, is_extra=True), prompt, price)
        return cost_s < place_cost(there, prompt, price)

    def late(self, groups: Iterable[Group], opens_s: float = 0.0) -> Iterator[Late]:
        """Yield the requests that wait for their first step in these groups, and would better be served by a group that
        is empty, and serves in ``opens_s`` seconds."""
        work = PromptWork(self._cluster)
        for group in groups:
            if not group.queues.waiting:
                continue
            self._cluster.catch_up(group.group_id)
            here, price = self._host(group, work), self._price(group)
            empty = self._alone(opens_s)
            if here is None or empty is None:
                continue
            ahead = work.begun(group)
            waiting = list(group.queues.waiting)
            for number, state in enumerate(waiting, 1):
                at = here._replace(ahead_tokens=ahead, num_behind=len(waiting) - number)
                is_sooner = not opens_s or opens_s < at.ahead_s
                if is_sooner and goes_elsewhere(at, empty, prompt := work.of(state), price):
                    costs = (place_cost(host, prompt, price) for host in (at, empty))
                    yield Late(state, group, at.ahead_s, *costs)
                if state.group_id == group.group_id:  # the caller has not moved it
                    ahead += work.of(state)

    # --- views ------------------------------------------------------------------------------------------------

    def _has_room(self, group: Group, state: RequestState) -> bool:
        """``has_room`` of the group as it is now."""
        self._cluster.catch_up(group.group_id)
        return has_room(self._cluster, group, state)

    def _alone_is_better(self, here: Host, prompt: float, price: DevicePrice) -> bool:
        """Whether an empty group, if there is one, costs a newcomer less."""
        empty = self._alone(0.0)
        return empty is not None and goes_elsewhere(here, empty, prompt, price)

    def _alone(self, opens_s: float) -> Host | None:
        """A group without requests, which packing could do without; None while too little is known of steps."""
        rate = self._cluster.predictor.prefill_tokens_per_s(self._cluster.limits.max_num_batched_tokens)
        return None if rate is None else Host(tokens_per_s=rate, opens_s=opens_s, is_extra=True)

    def _host(self, group: Group, work: PromptWork) -> Host | None:
        """A group as a newcomer finds it; None while too little is known of steps."""
        rate, queues = prompt_rate_of(self._cluster, group), group.queues
        if rate is None:
            return None
        num_decoding = len(queues.running) - queues.num_running_offline
        num_decoding -= sum(not s.is_offline for s in queues.prefilling.values())
        return Host(
            work.ahead(group), rate, max(0, num_decoding),
            slowed_share(self._cluster, group, rate), self._coming_per_s(group),
        )

    def _coming_per_s(self, group: Group) -> float:
        """Requests a second that come to a group: as many as it serves, in the time that each stays (Little's law), and
        no more than come at all; 0 while that is not known."""
        traffic, stay_s = self._loads.traffic.traffic(), self._loads.traffic.mean_stay_s
        if traffic is None or not stay_s:
            return 0.0
        return min(traffic.requests_per_s, group.queues.num_served_online / stay_s)

    def _price(self, group: Group) -> DevicePrice:
        """What a group is worth that packing could do without: as many requests as this one has."""
        packing, queues = self._cluster.params.packing, group.queues
        num_requests = queues.num_served_online + len(queues.waiting)
        return DevicePrice(num_requests, 0.0 if packing is None else packing.epoch_s)

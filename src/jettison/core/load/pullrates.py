"""Rates at which shards would travel before a drop: as profiled, as measured by KV transfers or at the start, or shared
memory's.

A pull can be worth its time only where its time is known: no such pull goes over a link of unknown rate. Where networks
were not measured at the start, the exchange of the first drop between two machines, which needs no pull, does it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations

from jettison.core.load.distances import network_rates
from jettison.core.state import ClusterState
from jettison.policy.exchange import LinkId
from jettison.policy.links import Links
from jettison.types import WorkerId


class PullRates:
    """Rates of links, as known at one decision."""

    def __init__(self, cluster: ClusterState) -> None:
        params = cluster.params
        profile = params.profile
        self._cluster = cluster
        self._profiled = None if params.profiled_link is None else params.profiled_link[0]
        self._near = params.near_bytes_per_s
        # A link that is neither profiled nor measured has shared memory's rate, but only between workers of one
        # machine: ``jettison profile`` measures such links, and without a profile the parameters have what to assume.
        self._shared_memory = params.link_bytes_per_s if profile is None else profile.link_bytes_per_s
        self._is_shared_memory = params.has_profiled_links
        """All links are shared memory: no worker is on another machine."""
        self._machine = Links(params.machine_of).machine
        self._networks = {} if self._is_shared_memory else network_rates(cluster)

    def of(self, link: LinkId) -> float | None:
        """Bytes per second of one direction of a link: as profiled or, where links were not profiled, as measured. A
        link without a measured transfer has shared memory's rate inside one machine, else the best rate measured
        between its two machines. None where its rate is not known."""
        if self._profiled is not None:
            return self._profiled
        rate = self._cluster.link_rates.get(link)
        if rate is not None and rate.bytes_per_s is not None:
            return rate.bytes_per_s
        src, dst = (self._machine(worker_id) for worker_id in link)
        return self._shared_memory if self._is_shared_memory or src == dst else self._networks.get((src, dst))

    def of_kv(self, link: LinkId) -> float | None:
        """Bytes per second of one direction of a link for a request's KV: the near rate, if the parameters give one and
        both workers are on one machine; else as ``of`` says. None where it is not known.

        A request's ends are known when this is asked, so the near rate may be used; plans of drops count on the slowest
        link that they might use.
        """
        if self._near is not None and self._machine(link[0]) == self._machine(link[1]):
            return self._near
        return self.of(link)

    def slowest(self, worker_ids: Iterable[WorkerId]) -> float:
        """Bytes per second of the slowest measured link between these workers, or of a network between their machines
        that was measured at the start; a network of which nothing is known counts as the slowest of those. Without any,
        shared memory's rate. Where links were profiled, the profiled rate."""
        if self._profiled is not None:
            return self._profiled
        among = set(worker_ids)
        measured = [
            rate.bytes_per_s for link, rate in self._cluster.link_rates.items()
            if rate.bytes_per_s is not None and among.issuperset(link)
        ]
        machines, networks = {self._machine(w) for w in among}, self._cluster.params.networks
        measured += [r for pair, r in networks.items() if machines.issuperset(pair)]
        if networks and any(pair not in self._networks for pair in permutations(machines, 2)):
            measured.append(min(networks.values()))
        return min(measured, default=self._shared_memory)

"""At which rate shards would travel before a drop: as profiled, as KV transfers measured, or as shared memory has it.

A pull is worth its time only where its time is known: a link of which nothing is known gets no pull that is to
pay for itself. The exchange of the first drop between two machines, which needs none, measures it.
"""

from __future__ import annotations

from collections.abc import Iterable

from jettison.core.load.distances import network_rates
from jettison.core.state import ClusterState
from jettison.policy.exchange import LinkId
from jettison.policy.links import Links
from jettison.types import WorkerId


class PullRates:
    """As known at one decision."""

    def __init__(self, cluster: ClusterState) -> None:
        params = cluster.params
        profile = params.profile
        self._cluster = cluster
        self._profiled = None if params.profiled_link is None else params.profiled_link[0]
        self._near = params.near_bytes_per_s
        # What was neither told nor measured is taken for shared memory, but only where it is: between workers of one
        # machine, whose links are what ``jettison profile`` measures, or, without a profile, carry 1 GB/s.
        self._shared_memory = params.link_bytes_per_s if profile is None else profile.link_bytes_per_s
        self._is_shared_memory = params.has_profiled_links
        """All links are: no worker was placed elsewhere."""
        self._machine = Links(params.machine_of).machine
        self._networks = {} if self._is_shared_memory else network_rates(cluster)

    def of(self, link: LinkId) -> float | None:
        """Bytes per second of one direction of a link; None where nothing is known of it."""
        if self._profiled is not None:
            return self._profiled
        rate = self._cluster.link_rates.get(link)
        if rate is not None and rate.bytes_per_s is not None:
            return rate.bytes_per_s
        src, dst = (self._machine(worker_id) for worker_id in link)
        return self._shared_memory if self._is_shared_memory or src == dst else self._networks.get((src, dst))

    def of_kv(self, link: LinkId) -> float | None:
        """The same for a request's KV, whose ends are known when it is asked for: what plans of drops count on is the
        slowest link that they might come to."""
        if self._near is not None and self._machine(link[0]) == self._machine(link[1]):
            return self._near
        return self.of(link)

    def slowest(self, worker_ids: Iterable[WorkerId]) -> float:
        """Of the links between these workers that have been measured; without one, shared memory's."""
        if self._profiled is not None:
            return self._profiled
        among = set(worker_ids)
        measured = [
            rate.bytes_per_s for link, rate in self._cluster.link_rates.items()
            if rate.bytes_per_s is not None and among.issuperset(link)
        ]
        return min(measured, default=self._shared_memory)

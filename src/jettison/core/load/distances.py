"""How far workers are from each other, as the core knows it: machines from its parameters, networks from what was
measured at the start, or else from transfers.

``ClusterParams.machine_of`` has each worker's machine: in a simulated cluster from its topology, in a live one from the
hosts of its workers. ``ClusterParams.networks`` has the rates between machines of a live cluster, from probes before it
serves. Without these a network's rate is learned from the KV that exchanges have sent over it. So is that of a pair of
machines that no probe has measured, as a host has joined since; until its first transfer such a pair counts as the
slowest that a probe has measured. A probe of a host that joins would write into blocks of workers that serve.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import cast

from jettison.core.state import ClusterState
from jettison.policy.links import FAR, NEAR, Links, MachineDistance, MachineId, one_or_another

SLOWER = 4.0
"""Each such factor below the fastest network's rate makes a distance one step longer. Transfers that share a port with
others measure less than their link could carry; only a multiple of that says that the link is of another kind."""

QUIET_SLOWER = 2.0
"""The same of rates that were measured with nothing else on the way: a probe errs by tenths, and kinds of links are at
least 2.5 times apart (1, 2.5, 10 Gbit/s)."""


def known_links(cluster: ClusterState) -> Links | None:
    """Known distances between the workers; None where all are alike.

    All are alike where no machine was named, where one machine has all workers, and where each worker has a machine of
    its own and no network has been slower than the others.
    """
    if not cluster.params.machine_of:
        return None
    links = Links(cluster.params.machine_of, _slow_networks(cluster))
    num_workers = Counter(links.machine(w) for w in cluster.workers)
    if len(num_workers) == 1 or (max(num_workers.values()) == 1 and not links.between):
        return None
    return links


def machine_distance(cluster: ClusterState) -> MachineDistance:
    """Between machines, by what was measured at the start (and by transfers, where a host has joined since), as it is
    when the distance is asked for; where nothing was measured when this is called, all networks are alike."""
    if not cluster.params.networks:
        return one_or_another
    classes = _Classes.of(cluster.params.networks)

    def distance(src: Hashable, dst: Hashable) -> float:
        nonlocal classes
        if src == dst:
            return NEAR
        if classes.networks is not cluster.params.networks:  # a packer keeps this function for long
            classes = _Classes.of(cluster.params.networks)
        pair = cast(tuple[MachineId, MachineId], (src, dst))
        if pair in classes.networks:
            return classes.further.get(pair, FAR)
        return classes.unmeasured(network_rates(cluster).get(pair))

    return distance


def network_rates(cluster: ClusterState) -> dict[tuple[MachineId, MachineId], float]:
    """Bytes per second of the fastest measured link between two different machines, by (from, to); at least what was
    measured at the start, as transfers that share a port measure less. Pairs that were not measured are left out."""
    machine = Links(cluster.params.machine_of).machine
    rates: dict[tuple[MachineId, MachineId], float] = dict(cluster.params.networks)
    for (src, dst), rate in cluster.link_rates.items():
        pair = machine(src), machine(dst)
        if pair[0] != pair[1] and rate.bytes_per_s is not None:
            rates[pair] = max(rates.get(pair, 0.0), rate.bytes_per_s)
    return rates


def _slow_networks(cluster: ClusterState) -> dict[tuple[MachineId, MachineId], float]:
    """Distances of the pairs of machines, by (from, to), that are further than ``FAR``: by what was measured at the
    start, which stays as it is; of pairs that were not, by what transfers have measured (``network_rates``)."""
    networks, shown = cluster.params.networks, network_rates(cluster)
    if not networks:
        return further_than_far(shown, SLOWER)
    classes, machine = _Classes.of(networks), Links(cluster.params.machine_of).machine
    found = dict(classes.further)
    for pair in permutations({machine(worker_id) for worker_id in cluster.workers}, 2):
        if pair not in networks and (distance := classes.unmeasured(shown.get(pair))) > FAR:
            found[pair] = distance
    return found


@dataclass(frozen=True, slots=True)
class _Classes:
    """Kinds of networks where some were measured at the start."""

    networks: Mapping[tuple[MachineId, MachineId], float]
    """What was measured."""
    further: Mapping[tuple[MachineId, MachineId], float]
    """Distances of the measured pairs that are further than ``FAR``."""

    @classmethod
    def of(cls, networks: Mapping[tuple[MachineId, MachineId], float]) -> _Classes:
        """Of these rates."""
        return cls(networks, further_than_far(networks, QUIET_SLOWER))

    def unmeasured(self, shown: float | None) -> float:
        """Of a pair without a measured rate. ``shown``: bytes per second that transfers have reached; None: no transfer
        has ended, and a fast network must not be left for this one."""
        if shown is None:
            return max(self.further.values(), default=FAR)
        slower = max(self.networks.values(), default=0.0) / shown
        # Steps as long as those of measured pairs, so that equal rates are equally far.
        return FAR if slower < SLOWER else FAR + math.floor(math.log(slower, QUIET_SLOWER))


def further_than_far(
    rates: Mapping[tuple[MachineId, MachineId], float], slower: float
) -> dict[tuple[MachineId, MachineId], float]:
    """Distances of the pairs whose rate is at least ``slower`` times below the fastest: ``FAR``, and one step more for
    each such factor. All other pairs are left out, as they are ``FAR``; so are pairs without a rate."""
    fastest = max(rates.values(), default=0.0)
    steps = {pair: math.floor(math.log(fastest / rate, slower)) for pair, rate in rates.items()}
    return {pair: FAR + num for pair, num in steps.items() if num > 0}

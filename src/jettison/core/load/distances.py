"""How far workers are from each other, as the core knows it: machines from its parameters, networks from what was
measured at the start, or else from transfers.

``ClusterParams.machine_of`` has each worker's machine: in a simulated cluster from its topology, in a live one from the
hosts of its workers. ``ClusterParams.networks`` has the rates between machines of a live cluster, from probes before it
serves. Without these a network's rate is learned from the KV that exchanges have sent over it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping

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
    """Between machines, by what was measured at the start; without that all networks are alike."""
    if not cluster.params.networks:
        return one_or_another
    known = further_than_far(cluster.params.networks, QUIET_SLOWER)
    further: dict[tuple[Hashable, Hashable], float] = dict(known.items())
    return lambda src, dst: NEAR if src == dst else further.get((src, dst), FAR)


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
    start, which stays as it is; else by what transfers have measured (``network_rates``)."""
    if cluster.params.networks:
        return further_than_far(cluster.params.networks, QUIET_SLOWER)
    return further_than_far(network_rates(cluster), SLOWER)


def further_than_far(
    rates: Mapping[tuple[MachineId, MachineId], float], slower: float
) -> dict[tuple[MachineId, MachineId], float]:
    """Distances of the pairs whose rate is at least ``slower`` times below the fastest: ``FAR``, and one step more for
    each such factor. All other pairs are left out, as they are ``FAR``; so are pairs without a rate."""
    fastest = max(rates.values(), default=0.0)
    steps = {pair: math.floor(math.log(fastest / rate, slower)) for pair, rate in rates.items()}
    return {pair: FAR + num for pair, num in steps.items() if num > 0}

"""How far workers are from each other, as the core knows it: machines from its parameters, networks from measured
transfers.

``ClusterParams.machine_of`` has each worker's machine: in a simulated cluster from its topology, in a live one from the
placements of its workers. A network's rate is learned from the KV that exchanges have sent over it.
"""

from __future__ import annotations

import math
from collections import Counter

from jettison.core.state import ClusterState
from jettison.policy.links import FAR, Links, MachineId

SLOWER = 4.0
"""Each such factor below the fastest network's rate makes a distance one step longer. Transfers that share a port with
others measure less than their link could carry; only a multiple of that says that the link is of another kind."""


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


def network_rates(cluster: ClusterState) -> dict[tuple[MachineId, MachineId], float]:
    """Bytes per second of the fastest measured link between two different machines, by (from, to). Pairs without a
    measured link are left out."""
    machine = Links(cluster.params.machine_of).machine
    rates: dict[tuple[MachineId, MachineId], float] = {}
    for (src, dst), rate in cluster.link_rates.items():
        pair = machine(src), machine(dst)
        if pair[0] != pair[1] and rate.bytes_per_s is not None:
            rates[pair] = max(rates.get(pair, 0.0), rate.bytes_per_s)
    return rates


def _slow_networks(cluster: ClusterState) -> dict[tuple[MachineId, MachineId], float]:
    """Distances of the pairs of machines, by (from, to), whose rate (``network_rates``) is at least ``SLOWER`` times
    below the fastest: ``FAR``, and one step more for each such factor. All other pairs are left out, as they are
    ``FAR``; so are pairs that were never used."""
    rates = network_rates(cluster)
    fastest = max(rates.values(), default=0.0)
    steps = {pair: math.floor(math.log(fastest / rate, SLOWER)) for pair, rate in rates.items()}
    return {pair: FAR + num for pair, num in steps.items() if num > 0}

"""Who is near whom in a simulated cluster, and that its drops keep to it."""

from __future__ import annotations

import pytest
from scenarios import Watched, make_setup

from jettison.sim.links import LinkClass, LinkSpec, Topology

NETWORK = LinkSpec.of(LinkClass.RDMA, 2e8)
NVLINK = LinkSpec.of(LinkClass.NVLINK, 2e9)
CROSSED = {0: 0, 1: 1, 2: 0, 3: 1}
"""Two machines of two instances; by their numbers alone, 0 and 1 would be a pair."""


@pytest.mark.parametrize(
    ("topology", "near"),
    [
        (Topology(NETWORK), {}),
        (Topology(NETWORK, NVLINK, machine_of=CROSSED), CROSSED),
        (Topology(NETWORK, machine_of=CROSSED), {}),  # inside a machine, too, the network carries it
    ],
)
def test_the_core_knows_the_machines_whose_links_are_better(topology: Topology, near: dict[int, int]) -> None:
    watched = Watched(make_setup(num_workers=4, topology=topology))
    assert dict(watched.cluster.core.params.machine_of) == near


@pytest.mark.parametrize("seed", range(3))
def test_instances_merge_inside_their_machine_first(seed: int) -> None:
    watched = Watched(make_setup(num_workers=4, topology=Topology(NETWORK, NVLINK, machine_of=CROSSED)))
    watched.load(seed, num_requests=100)
    watched.cluster.run(until_ns=600 * 10**9)
    watched.expect_all_served()
    pairs = [r.fields["workers"] for r in watched.records if r.kind == "drop" and len(r.fields["workers"]) == 2]
    assert pairs and all(CROSSED[a] == CROSSED[b] for a, b in pairs)

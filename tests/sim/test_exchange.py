"""Exchanges in virtual time: links hold them, and neither turns behind a pipeline's steps nor pages that come late."""

from __future__ import annotations

from typing import Any

import pytest
from scenarios import Watched, make_setup

from jettison.sim.links import LinkClass, LinkSpec, Topology

NUM_BLOCKS = 800
"""Twice that has to be in place after a merge, and the foreign half of it is in the way: it lands in turns."""

BYTES_PER_S = 4e6
"""All KV that changes hands in about twenty of the longest steps."""

LONGEST_STEP_S = 22e-3
"""Of the merged group: a full budget of prefill tokens, with the decodes beside it."""


class Exchanged(Watched):
    """Two full workers with a queue each, merged while prompts fill their steps."""

    def __init__(self, exchange: str, bytes_per_s: float) -> None:
        link = LinkSpec(bytes_per_s, 1e-5, link_class=LinkClass.RDMA)
        setup = make_setup(num_blocks=NUM_BLOCKS, exchange=exchange, eager=False, topology=Topology(link))
        super().__init__(setup)
        for i in range(200):
            self.submit(f"r{i}", 150 + 7 * i % 90, 400, 0.0)
        self.cluster.loop.at(2_000_000_000, self.cluster.request_drop)

    def fields(self, kind: str) -> dict[str, Any]:
        """Of the one record of this kind."""
        (record,) = (r for r in self.records if r.kind == kind)
        return dict(record.fields)


@pytest.mark.parametrize("exchange", ["transfer", "live"])
@pytest.mark.parametrize("speed", [1, 16])
def test_kv_is_in_place_about_when_the_links_have_carried_it(exchange: str, speed: int) -> None:
    watched = Exchanged(exchange, BYTES_PER_S * speed)
    watched.cluster.run(is_over=lambda: "exchange_done" in watched.kinds())
    drop, done = watched.fields("drop"), watched.fields("exchange_done")
    assert drop["stalled"] > 60 and drop["waiting"] > 100
    assert drop["capacity_blocks"] < 2 * NUM_BLOCKS - 200, "not all KV can land at once"
    links_s = done["bytes"] / 2 / watched.cluster.setup.topology.between.bytes_per_s  # as much goes each way
    # Pages come back in turns, each behind the step under way: on a fast link that is what is left.
    assert done["in_place_ms"] / 1e3 <= 1.3 * links_s + 2 * LONGEST_STEP_S

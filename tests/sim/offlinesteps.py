"""Simulated clusters with steps of offline requests that may stop at safepoints, and what must not change them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scenarios import Watched, make_setup
from test_fastforward import books

from jettison.policy.offline import OfflineParams, SloParams
from jettison.sim.setup import ClusterSetup

COMMAND_NS, REPORT_NS = 30_000, 70_000


def harvesting(policy: str = "recompute", *, ttft_s: float | None = None, every: int | None = None,
               **changes: Any) -> ClusterSetup:
    setup = make_setup(policy, **({"num_workers": 1, "num_blocks": 200} | changes))
    offline = OfflineParams(slo=SloParams(ttft_s=ttft_s), safepoint_layers=every)
    return replace(setup, params=replace(setup.params, offline=offline))


def expect_fast_forwards_change_nothing(setup: ClusterSetup, seed: int) -> None:
    runs = []
    for compress in (False, True):
        watched = Watched(replace(setup, compress=compress), checks=False)
        watched.load(seed, num_requests=40, span_s=1.5, mean_prompt=60, offline_share=0.5)
        watched.submit("last", 20, 200, 5.0)
        watched.cluster.run()
        watched.expect_all_served()
        runs.append(watched)
    naive, compressed = runs
    assert books(compressed) == books(naive) and compressed.records == naive.records
    assert compressed.cluster.fast_forwards.num_steps > 0

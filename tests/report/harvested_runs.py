"""A small simulated run with a batch beside bursts of online requests, which harvesting has to give way to."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))

from scenarios import make_setup

from jettison.core.ladder.lists import with_offline
from jettison.policy.offline import OfflineParams, SloParams
from jettison.report.results import RunResult
from jettison.simulate.run import SimulationOptions, simulate_workload
from jettison.workload.lengths import Lengths, LogNormalPair
from jettison.workload.pool import OfflinePool
from jettison.workload.traces import TraceRow, Workload

BATCH = OfflinePool(LogNormalPair(Lengths(100, 0.0, 100), Lengths(80, 0.0, 80)), num_requests=30)
SLO_TTFT_S, SLO_TPOT_S = 0.02, 0.006


def bursts(num: int = 3, each: int = 14) -> Workload:
    """Bursts that need all memory; between them some requests that come alone."""
    rows = [TraceRow(0.3 + burst + 0.004 * i, 120, 60) for burst in range(num) for i in range(each)]
    rows += [TraceRow(0.8 + burst + 0.05 * i, 20, 3) for burst in range(num) for i in range(4)]
    return Workload(tuple(sorted(rows, key=lambda row: row.arrival_s)), "bursts", "made up", span_s=float(num + 1))


def harvested(name: str = "harvest", mode: str = "harvest", *, pool: OfflinePool | None = BATCH, num_bursts: int = 3,
              **options: Any) -> RunResult:
    """``mode``: ``harvest``, ``priority`` or ``none``."""
    setup = make_setup("recompute", num_workers=1, num_blocks=60)
    offline = OfflineParams(serves=mode != "none", slo_aware=mode == "harvest",
                            slo=SloParams(ttft_s=0.004, tpot_s=SLO_TPOT_S))
    parts = ("scheduler", "checkpoint", "prefetch") if mode == "harvest" else ()
    params = replace(setup.params, offline=offline, rungs=with_offline(setup.params.rungs, parts))
    load = bursts(num_bursts) if num_bursts else Workload((TraceRow(0.3, 20, 3),), "calm", "made up", span_s=2.0)
    return simulate_workload(load, replace(setup, params=params), SimulationOptions(
        name=name, pool=pool, observe_interval_s=0.02, slo_ttft_s=SLO_TTFT_S, slo_tpot_s=SLO_TPOT_S, **options,
    ))  # fmt: skip

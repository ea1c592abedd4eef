"""KunServe v3, Figs. 12 and 13: five systems under one burst, on four workloads."""

from __future__ import annotations

from statistics import fmean

from jettison.report.overload import slo_base, slo_violations
from papers import measures
from papers.claims import by_seed, change, lower, own, share
from papers.figure import OWN_RANGE, Claim, Figure, Part, Stated
from papers.measures import count, ratio, throughput, tpot, ttft
from papers.plots import by_workload, over_time
from papers.reasons import compute_bound, memory_bound, pressure, timing
from papers.specs import Seed
from papers.systems import BY_PRESSURE, DROPPING, SPARE

BARE = BY_PRESSURE.name
SYSTEMS = ("drop", "recompute", "pipeline", "swap", "migrate", BY_PRESSURE)
BASELINES = ("recompute", "pipeline", "swap", "migrate")
BURSTS = {
    "LongBench 14B": "burst-longbench-14b",
    "ShareGPT 14B": "burst-sharegpt-14b",
    "BurstGPT 14B": "burst-burstgpt-14b",
    "LongBench 72B": "burst-longbench-72b",
}

FIG12 = Figure(
    "kunserve-fig12", "memory, TTFT and throughput over time", "v3 section 5.2",
    tuple(
        Part(
            workload, spec=spec, systems=SYSTEMS, conditions="recompute",
            claims=(
                *(
                    change("mean throughput", throughput, "pipeline", baseline).stated((-21.8, -3.3), (-25, -3))
                    for baseline in ("recompute", "swap", "migrate", "drop")
                ),
                share("mean KV demand / capacity", measures.mean_load).stated((None, 60)),
                share("bubbles", measures.bubble_share, "pipeline"),
                own("from the last arrival to the end", measures.tail_s, "pipeline", "s"),
                own("from the last arrival to the end", measures.tail_s, "recompute", "s"),
                *pressure(),
            ),
        )
        for workload, spec in BURSTS.items()
    ),
    tuple(
        over_time(
            workload.lower().replace(" ", "-"), workload, ("drop", BARE, "recompute", "pipeline", "migrate"),
            f"{workload}, seed 0",
        )
        for workload in BURSTS
    ),
)  # fmt: skip


def lowest(system: str) -> Claim:
    """Above 1 where dropping is the lowest of all."""

    def number(seed: Seed) -> float | None:
        theirs = [value for name in BASELINES if (value := ttft(99)(seed.runs[name])) is not None]
        return ratio(min(theirs, default=None), ttft(99)(seed.runs[system]))

    return by_seed("lowest P99 TTFT of all: best baseline over ours", system, number, "the best baseline", "x")


def fewer_violations(system: str, scale: int) -> Claim:
    """Of the SLO, in points."""

    def number(seed: Seed) -> float | None:
        ours, *theirs = (violated_percent(seed, name, scale) for name in (system, *BASELINES))
        known = [value for value in theirs if value is not None]
        return None if ours is None or not known else fmean(known) - ours

    metric = f"SLO violations at scale {scale}: points fewer than the baselines' mean"
    return by_seed(metric, system, number, "mean of baselines", "points")


def violated_percent(seed: Seed, system: str, scale: int) -> float | None:
    """TTFT or TPOT over ``scale`` times the best baseline's median."""
    base = slo_base([seed.runs[name] for name in BASELINES])
    (found,) = slo_violations(seed.runs[system], base, (scale,))["either"]
    return None if found is None else 100.0 * found


def latency(
    system: str, paper: tuple[float, float], p50_tpot: Stated, p50_band: Stated, to_recompute: Stated = None
) -> tuple[Claim, ...]:
    """P99 TTFT against each baseline (``to_recompute``: a band of its own), and what it costs in TPOT."""
    p99 = {baseline: lower("P99 TTFT, times lower", ttft(99), system, baseline) for baseline in BASELINES}
    judged = {baseline: claim.stated(paper, paper, OWN_RANGE) for baseline, claim in p99.items()}
    if to_recompute is not None:
        judged["recompute"] = p99["recompute"].stated(paper, to_recompute)
    return (
        *judged.values(),
        lowest(system).stated((paper[0], None), (1, None), "the paper's claim"),
        change("P50 TPOT, increase", tpot(50), system, "recompute").stated(p50_tpot, p50_band),
    )


def violations(system: str, scale: int) -> tuple[Claim, ...]:
    """Saved at a scale, and left at 4."""
    left = by_seed("SLO violations left at scale 4", system, lambda seed: violated_percent(seed, system, 4), unit="%")
    return fewer_violations(system, scale).stated((7.2, 12.8)), left.stated(0)


def workload_part(workload: str, scale: int, paper: tuple[float, float], *bands: Stated) -> Part:
    """``bands``: as ``latency`` has them."""
    return Part(
        workload, spec=BURSTS[workload], systems=(*SYSTEMS, SPARE), conditions="recompute",
        claims=(
            *(claim for system in DROPPING for claim in latency(system, paper, *bands)),
            *(claim for system in DROPPING for claim in violations(system, scale)),
            *(own("drops", count("drops"), system) for system in DROPPING),
            own("mean stay", measures.mean_stay_s, unit="s"),
            *memory_bound(), *compute_bound(), *timing(),
        ),
    )  # fmt: skip


FIG13 = Figure(
    "kunserve-fig13", "latency and SLO violations of all systems", "v3 section 5.2",
    (
        workload_part("LongBench 14B", 10, (12.7, 72.2), (15.8, 22.7), (10, 40), (5, None)),
        workload_part("ShareGPT 14B", 5, (12.7, 72.2), None, None),
        workload_part("BurstGPT 14B", 5, (12.7, 72.2), None, None),
        workload_part("LongBench 72B", 10, (8.4, 11.9), (18.3, 22.7), (10, 40)),
        Part(
            "BurstGPT 14B, decodes first", spec="burst-burstgpt-14b", systems=("recompute", BY_PRESSURE, SPARE),
            changes={"settings": {"step_priority": "decode", "max_num_batched_tokens": 2048}}, conditions="recompute",
            claims=memory_bound((BARE,)),
        ),
        # Half the GPU memory: the tenth at which the mean stay comes nearest to the paper's at the load rule's load.
        Part(
            "BurstGPT 14B, KV by stay", spec="burst-burstgpt-14b",
            changes={
                "cluster": {"memory_utilisation": 0.5}, "settings": {"slo_ttft_ms": 1900, "slo_tpot_ms": 200},
            },
            systems=("drop", "recompute", "pipeline", BY_PRESSURE, SPARE), conditions="recompute",
            claims=(
                *(
                    lower("P99 TTFT, times lower", ttft(99), system, baseline).stated((12.7, 72.2))
                    for system in DROPPING for baseline in ("recompute", "pipeline")
                ),
                own("mean stay (set by the choice of memory, not found)", measures.mean_stay_s, unit="s").stated(11),
                *memory_bound(("pipeline", *DROPPING)),
            ),
        ),
    ),
    (
        by_workload("p99-ttft", "P99 TTFT, seconds (median of seeds)", tuple(BURSTS), ttft(99), log=True),
        by_workload("p50-ttft", "P50 TTFT, seconds (median of seeds)", tuple(BURSTS), ttft(50), log=True),
        by_workload("p50-tpot", "P50 TPOT, seconds (median of seeds)", tuple(BURSTS), tpot(50), log=False),
    ),
)  # fmt: skip

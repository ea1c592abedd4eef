"""KunServe v1 (2024): its figures as data. Fig. 14 is in ``exchange``, the plans of Fig. 16 in ``grouping``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jettison.report.overload import SloBase, slo_base, slo_violations
from papers import measures
from papers.claims import by_seed, change, higher, lower, own, share
from papers.figure import OWN_RANGE, Claim, Figure, Found, Part, Plot, Stated
from papers.figures import exchange, grouping
from papers.figures.v3 import PIPELINE_PLOT, if_it_stands, static_pipelines
from papers.measures import Measure, ratio, tpot, ttft, within
from papers.plots import by_measure, middle_of, over_sweep, over_time
from papers.reasons import compute_bound, memory_bound, pressure
from papers.specs import Results, Seed
from papers.systems import (
    BY_PRESSURE,
    DROPPING,
    KUNSERVE,
    PIPELINES_STAND_S,
    REPLICAS,
    SPARE,
    WITHOUT_RESTORE,
)
from papers.variants import Changes, Variant

BARE = BY_PRESSURE.name
SPIKE = "BurstGPT 14B, spike"

# --- Fig. 4: the same bytes of the host's memory, as KV that goes there or as parameters streamed back at every step


def _kv_swap(gib: float) -> Variant:
    return Variant(f"KV swap {gib:g} GiB", "swap", {"host_memory": round(gib * 2**30)})


def _parameter_swap(gib: float) -> Variant:
    return Variant(f"parameter swap {gib:g} GiB", "recompute", {}, Changes(streamed_bytes=round(gib * 2**30)))


def _swapped(
    gib: float, p50_ttft: Stated = None, p50_tbt: Stated = None, stood_still: Stated = None
) -> tuple[Claim, ...]:
    kv, parameters = _kv_swap(gib).name, _parameter_swap(gib).name
    return (
        lower(f"P50 TTFT, times lower, {gib:g} GiB", ttft(50), kv, parameters).stated(p50_ttft, p50_ttft, OWN_RANGE),
        lower(f"P50 TBT, times lower, {gib:g} GiB", tpot(50), kv, parameters).stated(p50_tbt, p50_tbt, OWN_RANGE),
        share(f"requests that stood still for a second, {gib:g} GiB", measures.stalled_share, kv).stated(stood_still),
    )


FIG4 = Figure(
    "kunserve-v1-fig4", "parameter swap against KV swap", "v1 section 2.3",
    (
        Part(
            SPIKE, spec="v1-swap", conditions=_kv_swap(0.5).name,
            systems=tuple(make(gib) for gib in (0.5, 2.0, 8.0) for make in (_kv_swap, _parameter_swap)),
            claims=(*_swapped(0.5, (1.1, 1.3), (1.0, 2.6), (8.9, 9.9)), *_swapped(2.0), *_swapped(8.0)),
        ),
    ),
    (
        by_measure(
            "latency", SPIKE, SPIKE,
            {"P50 TTFT, s": ttft(50), "P99 TTFT, s": ttft(99), "P50 TPOT, s": tpot(50), "P99 TPOT, s": tpot(99)},
        ),
    ),
)  # fmt: skip

# --- Fig. 5

FIG5 = Figure(
    "kunserve-v1-fig5", "replication against pipelines", "v1 section 3",
    (
        static_pipelines(
            *(
                higher(
                    f"P{q} {name}, times higher", if_it_stands(within(key, q, PIPELINES_STAND_S)), stages, REPLICAS.name
                ).stated(paper, band, OWN_RANGE)
                for stages, name, key, q, paper, band in (
                    ("2 stages", "TTFT", "ttft_s", 50, (1, 1.8), (1, 1.8)),
                    ("2 stages", "TBT (mean of a request)", "tpot_s", 50, (1, 2), (1, 2)),
                    ("8 stages", "TTFT", "ttft_s", 99, 5.4, None),
                    ("8 stages", "TBT (mean of a request)", "tpot_s", 99, 5.1, None),
                )
            )
        ),
    ),
    (PIPELINE_PLOT,),
)  # fmt: skip

# --- Figs. 10 to 13: its systems under a spike of 14 times

SYSTEMS = ("drop", "recompute", "migrate", "pipeline", BY_PRESSURE, SPARE)
LARGE_SYSTEMS = ("drop", "recompute", "pipeline", BY_PRESSURE, SPARE)


def best_lower(system: str, baseline: str, metric: str) -> Claim:
    """P99 TTFT, times lower: the largest over the sweep's points, of those where the system dropped at all."""

    def numbers(found: Found) -> list[float | None]:
        return [_times_lower(results, system, baseline) for results in _where_dropped(found, system)]

    return Claim(metric, system, numbers, baseline, "x", max)


def _where_dropped(found: Found, system: str) -> Found:
    dropped = [results for results in found if any(run.events.get("drops") for run in results.runs[system])]
    return dropped if system != SPARE.name and dropped else found


def _times_lower(results: Results, system: str, baseline: str) -> float | None:
    ours, theirs = (middle_of(results.runs[name], ttft(99)) for name in (system, baseline))
    return ratio(theirs, ours)


def increase_at_best(metric: str, measure: Measure, system: str) -> Claim:
    """Over recompute, in percent, at the point where dropping gains most."""
    plain = change(metric, measure, system, "recompute")

    def numbers(found: Found) -> list[float | None]:
        best = max(found, key=lambda results: _times_lower(results, "drop", "recompute") or 0.0)
        return list(plain.numbers([best]))

    return replace(plain, numbers=numbers)


def violations_at_worst(system: str) -> Claim:
    """SLO violations where recompute has most; TTFT and TBT within 5 times their medians with memory to spare."""

    def numbers(found: Found) -> list[float | None]:
        worst: tuple[float, float] | None = None
        for results in found:
            base = slo_base(results.runs[SPARE.name])
            theirs, ours = (
                slo_violations(results.runs[name][0], base, (5,))["either"][0] for name in ("recompute", system)
            )
            if theirs is not None and ours is not None and (worst is None or theirs > worst[0]):
                worst = (theirs, ours)
        return [None if worst is None else 100.0 * worst[1]]

    return Claim("SLO violations left", system, numbers, unit="%")


def _latency(paper: Mapping[str, Stated], metric: str = "P99 TTFT, times lower") -> tuple[Claim, ...]:
    """To each baseline, judged by the least that the paper states; and what memory alone could give."""
    claims = [
        best_lower(system, baseline, metric).stated(stated, (_least(stated), None), OWN_RANGE)
        for system in DROPPING
        for baseline, stated in paper.items()
    ]
    return (*claims, *(best_lower(SPARE.name, baseline, metric) for baseline in paper))


def _least(stated: Stated) -> float | None:
    return stated[0] if isinstance(stated, tuple) else stated


def _data_set(workload: str, lengths: str, loads: tuple[float, ...], slo: Stated) -> Part:
    """v1 sweeps the rate upwards from the average memory demand."""
    p99: dict[str, Stated] = {"recompute": (8.4, 27.3), "pipeline": (2.9, 52.2), "migrate": (23.1, 47.6)}
    metric = "P99 TTFT, times lower" + (", best of the sweep" if len(loads) > 1 else "")
    return Part(
        workload, spec="v1-burst", systems=SYSTEMS, conditions="recompute",
        changes={"workload": {"lengths": lengths}},
        sweep=tuple({"workload": {"mean_load": load}} for load in loads),
        claims=(
            *_latency(p99, metric),
            *(increase_at_best("P50 TBT, increase", tpot(50), system).stated((7.9, 37.5)) for system in DROPPING),
            *(increase_at_best("P99 TBT, increase", tpot(99), system).stated((33.4, 77.4)) for system in DROPPING),
            violations_at_worst("drop").stated(slo), violations_at_worst("recompute"),
            *_reasons(),
        ),
    )  # fmt: skip


def _reasons() -> tuple[Claim, ...]:
    return (*pressure(), *memory_bound(), *compute_bound())


FIG10 = Figure(
    "kunserve-v1-fig10", "three data sets over rates", "v1 section 5.2",
    (
        _data_set("BurstGPT", "burstgpt", (0.5, 0.65), 0),
        _data_set("AzureConv", "azure-conv", (0.65,), 7.5),
        # Its requests are short and many: at more, its dropping systems take minutes to simulate.
        _data_set("AGIEval-CoT", "agieval", (0.5,), 0.6),
    ),
    (over_sweep("burstgpt", "BurstGPT", "mean_load", "mean KV demand / capacity", "P99 TTFT, s", ttft(99)),),
)  # fmt: skip

FIG11 = Figure(
    "kunserve-v1-fig11", "BurstGPT over time", "v1 section 5.2",
    (
        # The least load at which its spike overflows what is not dropped.
        Part(
            "BurstGPT 14B", spec="v1-burst", systems=SYSTEMS, changes={"workload": {"mean_load": 0.65}},
            conditions="recompute",
            claims=(
                own("largest over median TTFT", measures.over_median(100), "recompute", "x").stated(38.9, (20, None)),
                *(own("largest over median TTFT", measures.over_median(100), system, "x") for system in DROPPING),
                *_reasons(),
            ),
        ),
    ),
    (over_time("time-line", "BurstGPT 14B"),),
)  # fmt: skip


def _large(model: str, preset: str, claims: tuple[Claim, ...]) -> Part:
    return Part(
        model, (*claims, *_reasons()), "v1-burst-70b", LARGE_SYSTEMS, {"cluster": {"preset": preset}},
        conditions="recompute",
    )  # fmt: skip


FIG12 = Figure(
    "kunserve-v1-fig12", "Llama-3.1-70B", "v1 section 5.2",
    (
        _large(
            "Llama-3.1-70B", "kunserve-v1-70b",
            (
                *_latency({"recompute": (1, 48.7), "pipeline": 29}),
                change("P50 TBT, increase", tpot(50), "drop", "recompute").stated((25.4, 54.1)),
                change("P99 TBT, increase", tpot(99), "drop", "recompute").stated((60.8, 92.6)),
                change("mean throughput", measures.throughput, "pipeline", "recompute").stated(-16.4, (-25, -3)),
            ),
        ),
    ),
    (over_time("time-line", "Llama-3.1-70B"),),
)  # fmt: skip

FIG13 = Figure(
    "kunserve-v1-fig13", "Llama-3.2-90B", "v1 section 5.2",
    (
        _large(
            "Llama-3.2-90B", "kunserve-v1-90b",
            (
                *_latency({"recompute": (13.4, 51.4)}),
                violations_at_worst("drop").stated(0.1), violations_at_worst("recompute"),
            ),
        ),
    ),
    (over_time("time-line", "Llama-3.2-90B"),),
)  # fmt: skip

# --- Fig. 15: two spikes; KunServe's own trigger, so that both systems drop

TWO_SPIKES, SECOND_SPIKE_S = "BurstGPT 14B, two spikes", 80.0
RESTORING = replace(BY_PRESSURE, name="drop, live restore")
KEEPING = replace(WITHOUT_RESTORE, name="drop, no restore")
R, K = RESTORING.name, KEEPING.name


def violations(system: str) -> Claim:
    """The base is the restoring system's medians."""

    def percent(seed: Seed) -> float | None:
        base = SloBase(*(measure(seed.runs[R]) or 0.0 for measure in (ttft(50), tpot(50))))
        (found,) = slo_violations(seed.runs[system], base, (5,))["either"]
        return None if found is None else 100.0 * found

    return by_seed("SLO violations (5 times the median)", system, percent, unit="%")


def least_free(system: str) -> Claim:
    """Of the KV there is, in percent."""
    return share("least free memory after the second spike", measures.least_free_share(SECOND_SPIKE_S), system)


FIG15 = Figure(
    "kunserve-v1-fig15", "with and without live restore", "v1 section 5.3",
    (
        Part(
            TWO_SPIKES, spec="v1-restore", systems=(RESTORING, KEEPING), conditions=R,
            claims=(
                lower("P99 TTFT, times lower by restoring", ttft(99), R, K).stated(37.6, (3, None)),
                change("P50 TTFT, change by restoring", ttft(50), R, K).stated(-30.7),
                change("P50 TBT, change by restoring", tpot(50), R, K).stated(-34.3),
                change("P99 TBT, change by restoring", tpot(99), R, K).stated(-9.1),
                least_free(R).stated(25.7),
                violations(R).stated(0),
                least_free(K).stated(0),
                violations(K).stated(4),
                *pressure((R, K)),
            ),
        ),
    ),
    (over_time("time-line", TWO_SPIKES),),
)  # fmt: skip

# --- Fig. 16: both greedy planners in a run, and each against every grouping of eight instances on paper

MEMORY_GREEDY = replace(BY_PRESSURE, name="memory-greedy", settings={**KUNSERVE, "planner": "memory"})

FIG16 = Figure(
    "kunserve-v1-fig16", "grouping strategies against exhaustive search", "v1 section 5.3",
    (
        Part(
            SPIKE, spec="v1-burst", systems=(BY_PRESSURE, MEMORY_GREEDY), conditions=BARE,
            claims=tuple(
                higher(f"{metric}, times higher", measure, MEMORY_GREEDY.name, BARE).stated(
                    paper, (1, 2 * paper - 1), "from none to twice the paper's increase"
                )
                for metric, measure, paper in (
                    ("P50 TTFT", ttft(50), 1.2), ("P99 TTFT", ttft(99), 1.2), ("P99 TBT", tpot(99), 1.1)
                )
            ),
        ),
        grouping.PLANS,
    ),
    (Plot("cost", grouping.draw_costs),),
)  # fmt: skip

FIGURES = (FIG4, FIG5, FIG10, FIG11, FIG12, FIG13, exchange.FIG14, FIG15, FIG16)

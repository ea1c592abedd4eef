"""KunServe v3, Figs. 12 and 13: five systems under one burst, on four workloads."""

from __future__ import annotations

from jettison.report.overload import slo_base, slo_violations
from jettison.report.results import RunResult
from jettison.simulate.reproduce import remarks
from jettison.simulate.reproduce.conditions import conditions, step_rule
from jettison.simulate.reproduce.figures.stay import add_stay
from jettison.simulate.reproduce.jobs import Variant
from jettison.simulate.reproduce.measures import (
    Measure,
    alone,
    bubble_share,
    compared,
    mean_load,
    mean_of,
    never_dropped,
    throughput,
    tpot,
    ttft,
)
from jettison.simulate.reproduce.pictures import bars, time_lines
from jettison.simulate.reproduce.pool import Runs
from jettison.simulate.reproduce.rows import Band, Outcome, Row, median_and_spread
from jettison.simulate.reproduce.specs import SPARE, WITHOUT_GUARD, Results, read_spec, run_spec, run_specs

WORKLOADS = {
    "LongBench 14B": "burst-longbench-14b",
    "ShareGPT 14B": "burst-sharegpt-14b",
    "BurstGPT 14B": "burst-burstgpt-14b",
    "LongBench 72B": "burst-longbench-72b",
}
BASELINES = ("recompute", "pipeline", "swap", "migrate")
DECODES_FIRST = {"step_priority": "decode", "max_num_batched_tokens": 2048}
"""As this engine has it by default, and a usual token budget for that."""
SYSTEMS = ("drop", WITHOUT_GUARD.name)


def _results(runs: Runs, names: tuple[str, ...] | None = None) -> dict[str, Results]:
    chosen = {title: spec for title, spec in WORKLOADS.items() if names is None or title in names}
    specs = [read_spec(name) for name in chosen.values()]
    found = run_specs(specs, runs, [*specs[0].variants, WITHOUT_GUARD, SPARE])
    return dict(zip(chosen, found, strict=True))


def reproduce_fig13(runs: Runs) -> Outcome:
    """Latencies and SLO violations."""
    outcome = Outcome()
    found = _results(runs)
    for workload, results in found.items():
        _latency_rows(outcome, workload, results)
        _slo_rows(outcome, workload, results)
        outcome.conditions[workload] = conditions(results, "recompute")
    for name, measure in (("p99-ttft", ttft(99)), ("p50-ttft", ttft(50)), ("p50-tpot", tpot(50))):
        groups = {w: {v: mean_of(r, measure) for v, r in results.runs.items()} for w, results in found.items()}
        title = f"{name.replace('-', ' ').upper()}, seconds (median of seeds)"
        outcome.pictures[name] = bars(groups, "seconds", title, log="ttft" in name)
    outcome.remarks += [remarks.bound(found), *remarks.why(found), remarks.timing(found), _guard_remark(found)]
    outcome.remarks.append(_priority_remark(found["BurstGPT 14B"], runs))
    add_stay(outcome, runs, found["BurstGPT 14B"])
    return outcome


def _priority_remark(as_shown: Results, runs: Runs) -> str:
    """What the figure comes to with decodes before prompts, as this engine has it by default."""
    settings = dict(as_shown.spec.raw["settings"]) | DECODES_FIRST
    systems = (Variant("recompute", "recompute"), WITHOUT_GUARD, SPARE)
    otherwise = run_spec(as_shown.spec.changed(settings=settings), runs, systems)
    told = []
    for results in (as_shown, otherwise):
        figures = {v.name: mean_of(results.runs[v.name], ttft(99)) for v in systems}
        named = ", ".join(f"{name} {remarks.seconds(value)}" for name, value in figures.items())
        told.append(f"{step_rule(results.one('recompute'))}: {named}")
    return (
        "What a step takes first, and how much. BurstGPT 14B, P99 TTFT, each at its own rate for the same mean load: "
        f"{'; '.join(told)}. Memory to spare tells how much of recompute's tail waits for memory."
    )


def reproduce_fig12(runs: Runs) -> Outcome:
    """Time lines, and what a static pipeline costs in throughput."""
    outcome = Outcome()
    found = _results(runs)
    for workload, results in found.items():
        for baseline in ("recompute", "swap", "migrate", "drop"):
            outcome.rows.append(
                compared(
                    results,
                    "kunserve-fig12",
                    workload,
                    "mean throughput",
                    "pipeline",
                    baseline,
                    throughput,
                    paper=Band(-21.8, -3.3),
                    band=Band(-25.0, -3.0),
                    band_source="reference.md 11",
                    percent=True,
                )
            )
        outcome.rows.append(
            alone(
                results,
                "kunserve-fig12",
                workload,
                "mean KV demand / capacity",
                "recompute",
                mean_load,
                paper=Band(None, 60.0),
                unit="%",
                scale=100.0,
            )
        )
        outcome.rows.append(
            alone(
                results,
                "kunserve-fig12",
                workload,
                "bubbles",
                "pipeline",
                bubble_share,
                paper=None,
                unit="%",
                scale=100.0,
            )
        )
        outcome.conditions[workload] = conditions(results, "recompute")
        shown = {name: results.one(name) for name in ("drop", WITHOUT_GUARD.name, "recompute", "pipeline", "migrate")}
        key = workload.lower().replace(" ", "-")
        outcome.pictures[key] = time_lines(shown, f"{workload}, seed {results.spec.parsed.seeds[0]}")
    outcome.remarks += [remarks.pressure(found), _throughput_remark(found)]
    return outcome


def _throughput_remark(found: dict[str, Results]) -> str:
    """What a mean throughput over a run says, and what not."""
    tails = ", ".join(
        f"{workload} {mean_of(results.runs['pipeline'], _tail_s) or 0.0:.0f} s against "
        f"{mean_of(results.runs['recompute'], _tail_s) or 0.0:.0f} s"
        for workload, results in found.items()
    )
    return (
        "Arrivals are an open loop, so over a whole run every system that keeps up has the same throughput; a static "
        f"pipeline's is lower by how much longer it works after the last arrival ({tails}, pipeline against recompute)."
    )


def _tail_s(run: RunResult) -> float | None:
    rows = run.requests_detail or []
    last = max((row["scheduled_s"] for row in rows), default=None)
    return None if last is None else run.duration_s - last


def _latency_rows(outcome: Outcome, workload: str, results: Results) -> None:
    is_72b = workload.endswith("72B")
    p99 = Band(8.4, 11.9) if is_72b else Band(12.7, 72.2)
    for system in SYSTEMS:
        for baseline in BASELINES:
            band = Band(5.0, None) if (workload, baseline) == ("LongBench 14B", "recompute") else p99
            source = "reference.md 11" if band.high is None else "the paper's own range"
            outcome.rows.append(
                compared(
                    results,
                    "kunserve-fig13",
                    workload,
                    "P99 TTFT, times lower",
                    system,
                    baseline,
                    ttft(99),
                    paper=p99,
                    band=band,
                    band_source=source,
                )
            )
        outcome.rows.append(_lowest_row(workload, results, system))
        outcome.rows.append(
            compared(
                results,
                "kunserve-fig13",
                workload,
                "P50 TPOT, increase",
                system,
                "recompute",
                tpot(50),
                paper=_tpot_paper(workload),
                band=Band(10.0, 40.0) if "LongBench" in workload else None,
                band_source="reference.md 11",
                percent=True,
            )
        )


def _tpot_paper(workload: str) -> Band | None:
    return {"LongBench 14B": Band(15.8, 22.7), "LongBench 72B": Band(18.3, 22.7)}.get(workload)


def _lowest_row(workload: str, results: Results, system: str) -> Row:
    """Best baseline's P99 TTFT over ours: above 1 where dropping is the lowest of all."""
    found: list[float | None] = []
    for index, run in enumerate(results.runs[system]):
        theirs = [value for b in BASELINES if (value := ttft(99)(results.runs[b][index])) is not None]
        ours = ttft(99)(run)
        found.append(min(theirs) / ours if theirs and ours else None)
    middle, spread = median_and_spread(found)
    return Row(
        "kunserve-fig13",
        workload,
        "lowest P99 TTFT of all: best baseline over ours",
        system,
        "the best baseline",
        Band(8.4 if workload.endswith("72B") else 12.7, None),
        middle,
        "x",
        spread,
        Band(1.0, None),
        "the paper's claim",
        is_idle=never_dropped(results.runs[system]),
    )


def _slo_rows(outcome: Outcome, workload: str, results: Results) -> None:
    scale = 10 if "LongBench" in workload else 5
    for system in SYSTEMS:
        saved: list[float | None] = []
        left: list[float | None] = []
        for index, run in enumerate(results.runs[system]):
            baselines = [results.runs[name][index] for name in BASELINES]
            base = slo_base(baselines)
            shares = [slo_violations(r, base, (scale,))["either"][0] for r in baselines]
            mine = slo_violations(run, base, (scale, 4))["either"]
            known = [share for share in shares if share is not None]
            saved.append(None if mine[0] is None or not known else 100.0 * (sum(known) / len(known) - mine[0]))
            left.append(None if mine[1] is None else 100.0 * mine[1])
        for metric, found, paper in (
            (f"SLO violations at scale {scale}: points fewer than the baselines' mean", saved, Band(7.2, 12.8)),
            ("SLO violations left at scale 4", left, Band(0.0, 0.0)),
        ):
            middle, spread = median_and_spread(found)
            outcome.rows.append(
                Row(
                    "kunserve-fig13",
                    workload,
                    metric,
                    system,
                    "" if "left" in metric else "mean of baselines",
                    paper,
                    middle,
                    "%" if "left" in metric else "points",
                    spread,
                )
            )


def _guard_remark(found: dict[str, Results]) -> str:
    """What the test for compute costs or saves."""
    measure: Measure = ttft(99)
    parts = []
    for workload, results in found.items():
        drops = {name: sum(int(r.events.get("drops", 0)) for r in results.runs[name]) for name in SYSTEMS}
        ours, bare = (mean_of(results.runs[name], measure) for name in SYSTEMS)
        if ours and bare:
            parts.append(
                f"{workload}: {drops['drop']} drops and P99 {ours:.2f} s with the test, {drops[WITHOUT_GUARD.name]} "
                f"and {bare:.2f} s without"
            )
    return (
        "`drop` is the policy as it is shipped: it declines where it finds that compute binds, or that a pipeline "
        "would fall behind by more than the wait, and waits for a wait that it predicts or has seen for a second or "
        "two. `drop without compute guard` is KunServe's own trigger. " + "; ".join(parts) + "."
    )

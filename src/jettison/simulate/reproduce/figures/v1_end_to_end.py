"""KunServe v1, Figs. 10 to 13: its four systems under a spike of 14 times, on its lengths and its larger models."""

from __future__ import annotations

from jettison.report.overload import slo_base, slo_violations
from jettison.simulate.reproduce import remarks
from jettison.simulate.reproduce.conditions import conditions
from jettison.simulate.reproduce.measures import (
    compared,
    mean_of,
    never_dropped,
    over_median,
    throughput,
    tpot,
    ttft,
)
from jettison.simulate.reproduce.pictures import lines, time_lines
from jettison.simulate.reproduce.pool import Runs
from jettison.simulate.reproduce.rows import Band, Outcome, Row, median_and_spread, ratio
from jettison.simulate.reproduce.specs import SPARE, WITHOUT_GUARD, Results, Spec, read_spec, run_spec, run_specs

LOADS = (0.5, 0.65)
"""v1 sweeps the rate upwards from the average memory demand; its motivating run has 49.8 %."""

OVERFLOWS = LOADS[1]
"""The least of these at which its spike overflows what is not dropped: 14B's figures of one load have this one."""

LOADS_OF = {"BurstGPT": LOADS, "AzureConv": (OVERFLOWS,), "AGIEval-CoT": LOADS[:1]}
"""AGIEval's requests are short and many: at more, its dropping systems take minutes to simulate."""

SYSTEMS = ("drop", WITHOUT_GUARD.name)
LENGTHS = {"BurstGPT": "burstgpt", "AzureConv": "azure-conv", "AGIEval-CoT": "agieval"}
PAPER_P99 = {"recompute": Band(8.4, 27.3), "pipeline": Band(2.9, 52.2), "migrate": Band(23.1, 47.6)}
PAPER_SLO = {"BurstGPT": Band(0.0, 0.0), "AzureConv": Band(7.5, 7.5), "AGIEval-CoT": Band(0.6, 0.6)}
SLO_SCALE = 5
SPIKE_REMARK = (
    "v1's text gives the height of its spike (14 times) and not its length. Three seconds are taken here; where the "
    "peak stays below the capacity nothing overflows, and no policy has anything to do."
)


def _sweep(runs: Runs, base: Spec, loads: tuple[float, ...]) -> list[Results]:
    variants = [*base.variants, WITHOUT_GUARD, SPARE]
    return run_specs([base.changed(mean_load=load) for load in loads], runs, variants)


def reproduce_v1_fig10(runs: Runs) -> Outcome:
    """Three data sets over rates: the best of the sweep, as the paper gives it."""
    outcome, base = Outcome(), read_spec("v1-burst")
    highest: dict[str, Results] = {}
    for workload, lengths in LENGTHS.items():
        loads = LOADS_OF[workload]
        sweep = _sweep(runs, base.changed(lengths=lengths), loads)
        highest[workload] = sweep[-1]
        _latency_rows(outcome, "kunserve-v1-fig10", workload, sweep, PAPER_P99)
        outcome.rows.append(_slo_row("kunserve-v1-fig10", workload, sweep, PAPER_SLO[workload]))
        outcome.conditions[workload] = conditions(sweep[-1], "recompute")
        if len(loads) > 1:
            outcome.pictures[lengths] = lines(
                {
                    name: (list(loads), [mean_of(r.runs[name], ttft(99)) or 0.0 for r in sweep])
                    for name in sweep[0].runs
                },
                "mean KV demand / capacity",
                "P99 TTFT, s",
                workload,
                log=True,
            )
    outcome.remarks += [remarks.pressure(highest), remarks.bound(highest), *remarks.why(highest), SPIKE_REMARK]
    return outcome


def reproduce_v1_fig11(runs: Runs) -> Outcome:
    """The time line on BurstGPT lengths."""
    outcome, base = Outcome(), read_spec("v1-burst")
    results = _sweep(runs, base, (OVERFLOWS,))[0]
    figure, workload = "kunserve-v1-fig11", "BurstGPT 14B"
    for system, paper in (("recompute", Band(38.9, 38.9)), ("drop", None), (WITHOUT_GUARD.name, None)):
        found = [over_median(100)(run) for run in results.runs[system]]
        middle, spread = median_and_spread(found)
        outcome.rows.append(
            Row(
                figure,
                workload,
                "largest over median TTFT",
                system,
                "",
                paper,
                middle,
                "x",
                spread,
                Band(20.0, None) if system == "recompute" else None,
                "reference.md 11",
            )
        )
    outcome.conditions[workload] = conditions(results, "recompute")
    outcome.pictures["time-line"] = time_lines({name: found[0] for name, found in results.runs.items()}, workload)
    outcome.remarks += [remarks.pressure({workload: results}), *remarks.why({workload: results}), SPIKE_REMARK]
    return outcome


def reproduce_v1_fig12(runs: Runs) -> Outcome:
    """Llama-3.1-70B on four A800 an instance."""
    paper = {"recompute": Band(1.0, 48.7), "pipeline": Band(29.0, 29.0)}
    outcome, results = _large(runs, "kunserve-v1-fig12", "Llama-3.1-70B", "kunserve-v1-70b", paper)
    for metric, measure, increase in (("P50 TBT", tpot(50), Band(25.4, 54.1)), ("P99 TBT", tpot(99), Band(60.8, 92.6))):
        outcome.rows.append(
            compared(
                results,
                "kunserve-v1-fig12",
                "Llama-3.1-70B",
                f"{metric}, increase",
                "drop",
                "recompute",
                measure,
                paper=increase,
                percent=True,
            )
        )
    outcome.rows.append(
        compared(
            results,
            "kunserve-v1-fig12",
            "Llama-3.1-70B",
            "mean throughput",
            "pipeline",
            "recompute",
            throughput,
            paper=Band(-16.4, -16.4),
            band=Band(-25.0, -3.0),
            band_source="reference.md 11",
            percent=True,
        )
    )
    return outcome


def reproduce_v1_fig13(runs: Runs) -> Outcome:
    """Llama-3.2-90B."""
    paper = {"recompute": Band(13.4, 51.4)}
    outcome, results = _large(runs, "kunserve-v1-fig13", "Llama-3.2-90B", "kunserve-v1-90b", paper)
    outcome.rows.append(_slo_row("kunserve-v1-fig13", "Llama-3.2-90B", [results], Band(0.1, 0.1)))
    return outcome


def _large(runs: Runs, figure: str, workload: str, preset: str, paper: dict[str, Band]) -> tuple[Outcome, Results]:
    base = read_spec("v1-burst-70b").changed(preset=preset)
    results = run_spec(base, runs, [*base.variants, WITHOUT_GUARD, SPARE])
    outcome = Outcome()
    _latency_rows(outcome, figure, workload, [results], paper)
    outcome.conditions[workload] = conditions(results, "recompute")
    outcome.pictures["time-line"] = time_lines({name: found[0] for name, found in results.runs.items()}, workload)
    met = {workload: results}
    outcome.remarks += [remarks.pressure(met), remarks.bound(met), *remarks.why(met), SPIKE_REMARK]
    return outcome, results


def _latency_rows(outcome: Outcome, figure: str, workload: str, sweep: list[Results], paper: dict[str, Band]) -> None:
    """Largest ratio over the sweep, where the system dropped at all, by system and baseline; and what memory alone
    could give."""
    for system in (*SYSTEMS, SPARE.name):
        for baseline, band in paper.items():
            if baseline not in sweep[0].runs:
                continue
            met = [results for results in sweep if not never_dropped(results.runs[system])] or sweep
            ratios = [
                ratio(mean_of(results.runs[baseline], ttft(99)), mean_of(results.runs[system], ttft(99)))
                for results in met
            ]
            known = [value for value in ratios if value is not None]
            judged = None if system == SPARE.name else Band(band.low, None)
            outcome.rows.append(
                Row(
                    figure,
                    workload,
                    "P99 TTFT, times lower" + (", best of the sweep" if len(sweep) > 1 else ""),
                    system,
                    baseline,
                    None if system == SPARE.name else band,
                    max(known, default=None),
                    "x",
                    (min(known), max(known)) if known else None,
                    judged,
                    "the paper's own range",
                    is_idle=all(never_dropped(results.runs[system]) for results in met),
                )
            )
    best = max(
        sweep, key=lambda r: ratio(mean_of(r.runs["recompute"], ttft(99)), mean_of(r.runs["drop"], ttft(99))) or 0
    )
    for metric, measure, increase in (("P50 TBT", tpot(50), Band(7.9, 37.5)), ("P99 TBT", tpot(99), Band(33.4, 77.4))):
        if figure == "kunserve-v1-fig10":
            for system in SYSTEMS:
                outcome.rows.append(
                    compared(
                        best,
                        figure,
                        workload,
                        f"{metric}, increase",
                        system,
                        "recompute",
                        measure,
                        paper=increase,
                        percent=True,
                    )
                )


def _slo_row(figure: str, workload: str, sweep: list[Results], paper: Band) -> Row:
    """Violations that are left where recompute has most; TTFT and TBT within 5 times their medians under a modest load:
    with memory to spare, here."""
    worst: tuple[float, float] | None = None
    for results in sweep:
        base = slo_base(results.runs[SPARE.name])
        shares = {
            name: slo_violations(results.runs[name][0], base, (SLO_SCALE,))["either"][0]
            for name in ("recompute", "drop")
        }
        if shares["recompute"] is not None and shares["drop"] is not None:
            if worst is None or shares["recompute"] > worst[0]:
                worst = (shares["recompute"], shares["drop"])
    before = None if worst is None else 100.0 * worst[0]
    return Row(
        figure,
        workload,
        f"SLO violations left (recompute: {before:.1f} %)" if before is not None else "SLO violations",
        "drop",
        "",
        paper,
        None if worst is None else 100.0 * worst[1],
        "%",
    )

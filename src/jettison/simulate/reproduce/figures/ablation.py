"""KunServe v3, Fig. 14: dropping, then coordinated exchange, then lookahead, on LongBench lengths."""

from __future__ import annotations

from dataclasses import replace

from jettison.cost.model import ChunkShape
from jettison.report.results import RunResult
from jettison.simulate.reproduce import remarks
from jettison.simulate.reproduce.conditions import conditions
from jettison.simulate.reproduce.jobs import Changes, Variant
from jettison.simulate.reproduce.measures import (
    Measure,
    alone,
    bubble_share,
    compared,
    mean_of,
    throughput,
    tpot,
    ttft,
    within,
)
from jettison.simulate.reproduce.pictures import bars
from jettison.simulate.reproduce.pool import Runs
from jettison.simulate.reproduce.rows import Band, Outcome, Row
from jettison.simulate.reproduce.specs import SPARE, Results, burst_span_s, read_spec, run_spec

FIGURE, WORKLOAD = "kunserve-fig14", "LongBench 14B, burst"
DP, DROP, EXCHANGE, LOOKAHEAD = "recompute", "drop", "+ coordinated exchange", "+ lookahead"


def reproduce_fig14(runs: Runs) -> Outcome:
    """Every part of dropping without the test for compute, so that there are drops to take apart."""
    spec = read_spec("ablation")
    variants = [
        v if v.policy != "drop" else Variant(v.name, v.policy, v.settings, replace(v.changes, compute_guard=False))
        for v in spec.variants
    ]
    shipped = Variant("as shipped, with the compute guard", "drop", {}, Changes())
    results = run_spec(spec, runs, [*variants, shipped, SPARE])
    outcome = Outcome()
    _machine_rows(outcome, results)
    _drop_rows(outcome, results)
    _exchange_rows(outcome, results)
    _lookahead_rows(outcome, results)
    outcome.conditions[WORKLOAD] = conditions(results, DP)
    groups = {
        f"P{q:g} TTFT, s": {name: mean_of(found, _burst("ttft_s", q)) for name, found in results.runs.items()}
        for q in (50, 90, 99)
    } | {
        f"P{q:g} TPOT, s": {name: mean_of(found, _burst("tpot_s", q)) for name, found in results.runs.items()}
        for q in (50, 99)
    }
    outcome.pictures["latency"] = bars(groups, "seconds", "requests that arrive in the burst", log=True)
    drops = {n: [int(r.events.get("drops", 0)) for r in found] for n, found in results.runs.items()}
    moved = {n: [r.events.get("exchanged_bytes", 0) / 1e9 for r in found] for n, found in results.runs.items()}
    outcome.remarks.append(
        "Drops by seed: "
        + ", ".join(f"{name} {counts}" for name, counts in drops.items() if any(counts))
        + "; exchanged GB: "
        + ", ".join(f"{n} {[round(v, 1) for v in vs]}" for n, vs in moved.items() if any(vs))
        + ". The first three systems drop whenever requests wait for memory, as KunServe does; with the test for "
        f"compute ({shipped.name}) there are {drops[shipped.name]}."
    )
    outcome.remarks += [
        remarks.bound({WORKLOAD: results}, (DROP, LOOKAHEAD)),
        "What later parts can add. Throughput: arrivals are an open loop, and what arrives is served; only where a "
        "backlog lasts to the end of the run can a shorter bubble show in it. Lookahead mixes prompts and decodes by "
        "cost, and merged groups without it put prompts first: its rows tell of both. Exchange: it is bulk of a "
        f"burst's running requests over one link a direction at {_link_gbps(results):.0f} Gbps, and an activation "
        "that has to wait for it waits once a microbatch.",
    ]
    return outcome


def _link_gbps(results: Results) -> float:
    return results.spec.machine.topology.between.bytes_per_s * 8 / 1e9


def _machine_rows(outcome: Outcome, results: Results) -> None:
    """Step times that the paper mentions, beside the preset's: neither was fitted to them."""
    machine = results.spec.machine
    cost = machine.profile.cost
    chunk, context = 2048, 5900
    full = [ChunkShape(context, 1)] * (machine.kv_tokens // context)
    for metric, seconds, paper in (
        (f"prefill step of {chunk} tokens", cost.batch_cost_s([ChunkShape(0, chunk)]), 221.0),
        ("decode step, memory full", cost.batch_cost_s(full), 60.0),
    ):
        outcome.rows.append(Row(FIGURE, WORKLOAD, metric, "the preset", "", Band(paper, paper), 1e3 * seconds, "ms"))
    outcome.rows.append(
        alone(results, FIGURE, WORKLOAD, "exchange", EXCHANGE, _exchange_s, paper=Band(1.3, 1.3), unit="s")
    )


def _exchange_s(run: RunResult) -> float | None:
    """Mean time of an exchange."""
    took = [entry["ms"] / 1e3 for entry in run.events.get("log", ()) if entry["kind"] == "exchange_done"]
    return sum(took) / len(took) if took else None


def burst_s() -> tuple[float, float]:
    """When arrivals count: in the burst and in the ten seconds after it."""
    return burst_span_s("ablation", after_s=10.0)


def _burst(key: str, q: float) -> Measure:
    return within(key, q, *burst_s())


def _drop_rows(outcome: Outcome, results: Results) -> None:
    for q, paper in ((90, 8.8), (99, 11.7), (99.9, 10.3)):
        outcome.rows.append(
            compared(
                results,
                FIGURE,
                WORKLOAD,
                f"P{q:g} TTFT, times lower",
                DROP,
                DP,
                _burst("ttft_s", q),
                paper=Band(paper, paper),
                band=Band(5.0, None) if q == 99 else None,
                band_source="reference.md 11",
            )
        )
    outcome.rows.append(
        compared(
            results,
            FIGURE,
            WORKLOAD,
            "P50 TPOT, increase",
            DROP,
            DP,
            _burst("tpot_s", 50),
            paper=Band(21.0, 31.9),
            band=Band(10.0, 40.0),
            band_source="reference.md 11",
            percent=True,
        )
    )


def _exchange_rows(outcome: Outcome, results: Results) -> None:
    for q, paper in ((99, 1.5), (99.9, 1.4)):
        outcome.rows.append(
            compared(
                results,
                FIGURE,
                WORKLOAD,
                f"P{q:g} TTFT, times lower",
                EXCHANGE,
                DROP,
                _burst("ttft_s", q),
                paper=Band(paper, paper),
                band=Band(1.2, 2.0) if q == 99 else None,
                band_source="reference.md 11",
            )
        )
    for q in (90, 99.9):
        outcome.rows.append(
            compared(
                results,
                FIGURE,
                WORKLOAD,
                f"P{q:g} TPOT, change",
                EXCHANGE,
                DROP,
                _burst("tpot_s", q),
                paper=Band(-5.0, -5.0),
                percent=True,
            )
        )


def _lookahead_rows(outcome: Outcome, results: Results) -> None:
    for q, paper in ((90, -4.5), (99, -10.6), (99.9, -9.7)):
        outcome.rows.append(
            compared(
                results,
                FIGURE,
                WORKLOAD,
                f"P{q:g} TPOT, change",
                LOOKAHEAD,
                EXCHANGE,
                _burst("tpot_s", q),
                paper=Band(paper, paper),
                percent=True,
            )
        )
    for system, paper, band in ((EXCHANGE, 21.9, Band(15.0, 30.0)), (LOOKAHEAD, 8.3, Band(None, 12.0))):
        outcome.rows.append(
            alone(
                results,
                FIGURE,
                WORKLOAD,
                "bubbles",
                system,
                bubble_share,
                paper=Band(paper, paper),
                band=band,
                band_source="reference.md 11",
                unit="%",
                scale=100.0,
            )
        )
    outcome.rows.append(
        compared(
            results,
            FIGURE,
            WORKLOAD,
            "throughput, change",
            LOOKAHEAD,
            EXCHANGE,
            throughput,
            paper=Band(20.0, 20.0),
            band=Band(8.0, 25.0),
            band_source="reference.md 11",
            percent=True,
        )
    )
    for name, measure in (("P99 TTFT", ttft(99)), ("P50 TPOT", tpot(50))):
        outcome.rows.append(
            compared(
                results,
                FIGURE,
                WORKLOAD,
                f"{name}, whole run, times lower",
                LOOKAHEAD,
                DP,
                measure,
                paper=None,
            )
        )

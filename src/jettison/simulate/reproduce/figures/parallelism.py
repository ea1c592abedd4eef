"""KunServe v1 and v3, Fig. 5: what static pipelines cost where nothing is short."""

from __future__ import annotations

from itertools import pairwise

from jettison.simulate.reproduce.conditions import conditions
from jettison.simulate.reproduce.jobs import MERGES_END_S, Changes, Variant
from jettison.simulate.reproduce.measures import Measure, alone, bubble_share, compared, tpot, ttft, within
from jettison.simulate.reproduce.pictures import bars
from jettison.simulate.reproduce.pool import Runs
from jettison.simulate.reproduce.rows import Band, Outcome
from jettison.simulate.reproduce.specs import Results, read_spec, run_spec

WORKLOAD = "BurstGPT 14B, no bursts"
REPLICAS = "8 instances"
NUM_PROCESSORS = 8
STAGES = {"2 stages": 4, "4 stages": 6, "8 stages": 7}
"""Merges of eight instances that make pipelines so long."""

SETTLED_S = MERGES_END_S
"""Arrivals before the pipelines stand do not count."""


def _results(runs: Runs) -> Results:
    """Pipelines are made by merging at the start, and stay; microbatches by token counts, as in vLLM."""
    variants = [Variant(REPLICAS, "recompute")]
    variants += [Variant(name, "drop", {}, Changes(num_merges=merges)) for name, merges in STAGES.items()]
    return run_spec(read_spec("parallelism"), runs, variants)


def reproduce_v1_fig5(runs: Runs) -> Outcome:
    """Ratios to replication, as v1 states them."""
    results = _results(runs)
    outcome = _outcome(results)
    for stages, key, q, paper in (
        ("2 stages", "ttft_s", 50, Band(1.0, 1.8)),
        ("2 stages", "tpot_s", 50, Band(1.0, 2.0)),
        ("8 stages", "ttft_s", 99, Band(5.4, 5.4)),
        ("8 stages", "tpot_s", 99, Band(5.1, 5.1)),
    ):
        name = "TTFT" if key == "ttft_s" else "TBT (mean of a request)"
        outcome.rows.append(
            compared(
                results,
                "kunserve-v1-fig5",
                WORKLOAD,
                f"P{q} {name}, times higher",
                stages,
                REPLICAS,
                _if_it_stands(within(key, q, SETTLED_S, 1e9)),
                paper=paper,
                band=paper if paper.low != paper.high else None,
                band_source="the paper's own range",
                inverse=True,
            )
        )
    outcome.remarks.append(
        "v1 does not say at which load it compares. Here a fifth of the memory is in use, so that no stage has a "
        "queue: a pipeline costs its bubbles and hand-overs, and no wait. Nearer to its throughput a pipeline's tail "
        "is longer (kunserve-fig12 and -fig13 have one under a burst)."
    )
    return outcome


def reproduce_fig5(runs: Runs) -> Outcome:
    """The more is dropped, the higher the latency: v3 draws it and states no number."""
    results = _results(runs)
    outcome = _outcome(results)
    names = [REPLICAS, *STAGES]
    for shorter, longer in pairwise(names):
        for metric, measure in (("P50 TTFT", ttft(50)), ("P50 TPOT", tpot(50)), ("P99 TPOT", tpot(99))):
            outcome.rows.append(
                compared(
                    results,
                    "kunserve-fig5",
                    WORKLOAD,
                    f"{metric}, times higher",
                    longer,
                    shorter,
                    _if_it_stands(measure),
                    paper=Band(1.0, None),
                    band=Band(1.0, None),
                    band_source="the paper's statement",
                    inverse=True,
                )
            )
    return outcome


def _if_it_stands(measure: Measure) -> Measure:
    """None where the pipelines that were asked for have not come about."""
    return lambda run: measure(run) if run.series["groups"][-1][1] == NUM_PROCESSORS - STAGES.get(run.name, 0) else None


def _outcome(results: Results) -> Outcome:
    outcome = Outcome()
    outcome.conditions[WORKLOAD] = conditions(results, REPLICAS)
    groups = {
        f"P{q} {label}, s": {name: within(key, q, SETTLED_S, 1e9)(found[0]) for name, found in results.runs.items()}
        for key, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"))
        for q in (50, 99)
    }
    outcome.pictures["latency"] = bars(groups, "seconds", "static pipelines on eight processors", log=True)
    figure = "kunserve-fig5"
    bubbles = [alone(results, figure, WORKLOAD, "bubbles", name, bubble_share, paper=None).ours for name in STAGES]
    outcome.remarks.append(
        "Bubbles: "
        + ", ".join(
            f"{name} {100 * share:.0f} %" for name, share in zip(STAGES, bubbles, strict=True) if share is not None
        )
        + "."
    )
    return outcome

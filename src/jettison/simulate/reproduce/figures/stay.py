"""What KunServe v3's own stay time says of the memory in its Fig. 13: a burst with as much KV as goes with it."""

from __future__ import annotations

from collections.abc import Mapping

from jettison.simulate.reproduce.conditions import conditions
from jettison.simulate.reproduce.jobs import Variant
from jettison.simulate.reproduce.measures import alone, compared, mean_of, ttft
from jettison.simulate.reproduce.pool import Runs
from jettison.simulate.reproduce.remarks import mean_stay_s, seconds
from jettison.simulate.reproduce.rows import Band, Outcome, ratio
from jettison.simulate.reproduce.specs import SPARE, WITHOUT_GUARD, Results, read_spec, run_spec

FIGURE, WORKLOAD = "kunserve-fig13", "BurstGPT 14B, KV by stay"
STAY_S = 11.0
"""Mean stay of a BurstGPT request (v3 section 2.2)."""

UTILISATION = 0.5
"""Of GPU memory: the tenth at which the mean stay comes nearest to ``STAY_S`` at the load rule's mean load. Nothing but
that statement on the workload sets it."""

STAY_METRIC = "mean stay (set by the choice of memory, not found)"

ORDER_OF_MAGNITUDE = 10.0

BASELINES = ("recompute", "pipeline")
SYSTEMS = ("drop", WITHOUT_GUARD.name)


def add_stay(outcome: Outcome, runs: Runs, as_stated: Results) -> None:
    """Rows (none of them judged: this set-up is no reading of the papers' memory), conditions and a remark.
    ``as_stated``: the figure's own BurstGPT runs."""
    spec = read_spec("burst-burstgpt-14b").changed(memory_utilisation=UTILISATION)
    variants = [*(Variant(name, name) for name in ("drop", *BASELINES)), WITHOUT_GUARD, SPARE]
    results = run_spec(spec, runs, variants)
    for system in SYSTEMS:
        for baseline in BASELINES:
            outcome.rows.append(
                compared(
                    results,
                    FIGURE,
                    WORKLOAD,
                    "P99 TTFT, times lower",
                    system,
                    baseline,
                    ttft(99),
                    paper=Band(12.7, 72.2),
                )
            )
    outcome.rows.append(
        alone(results, FIGURE, WORKLOAD, STAY_METRIC, "recompute", mean_stay_s, paper=Band(STAY_S, STAY_S), unit="s")
    )
    outcome.conditions[WORKLOAD] = conditions(results, "recompute")
    outcome.remarks.append(remark(results, as_stated))


def remark(results: Results, as_stated: Results) -> str:
    """Which of the paper's statements are kept where, and what each choice gives."""
    ours, theirs = (seconds(mean_of(found.runs["recompute"], mean_stay_s)) for found in (results, as_stated))
    full, less = (found.spec.machine.kv_tokens for found in (as_stated, results))
    p99 = {name: mean_of(found, ttft(99)) for name, found in results.runs.items()}
    told = ", ".join(f"{name} {seconds(value)}" for name, value in p99.items())
    return (
        "v3 says of BurstGPT: a KV capacity of 243 K tokens an instance, a mean load of 56.3 %, and a mean stay of "
        f"{STAY_S:.0f} s. All figures of this page keep the first two ({full:,} tokens), and stays come to {theirs}. "
        f"`{WORKLOAD}` keeps the load and gives up the capacity: {UTILISATION:.0%} of GPU memory, {less:,} tokens of "
        f"KV, is the tenth chosen for a stay near {STAY_S:.0f} s, so that stays are {ours} is set and not found. "
        f"P99 TTFT: {told}. {_worth(p99)}"
    )


def _worth(p99_s: Mapping[str, float | None]) -> str:
    """What memory and dropping give of recompute's P99 TTFT, as far as it is known."""
    spare, bare = (ratio(p99_s["recompute"], p99_s[name]) for name in (SPARE.name, WITHOUT_GUARD.name))
    parts = []
    if spare is not None:
        # Divided by more than two: the greater part of it goes away with memory alone.
        cause = "memory is what most of it waits for" if spare > 2.0 else "most of it does not wait for memory"
        parts.append(f"Memory to spare divides recompute's by {spare:.1f}: {cause}.")
    if bare is not None:
        parts.append(f"KunServe's own trigger divides it by {bare:.1f}.")
    if spare is not None:
        parts.append(
            "An order of magnitude is more than memory alone can give in this burst."
            if spare < ORDER_OF_MAGNITUDE
            else "Memory alone can give an order of magnitude in this burst."
        )
    return " ".join(parts) or "What memory gives is not known."

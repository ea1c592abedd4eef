"""What KunServe v3's own stay time says of the memory in its Fig. 13: a burst with as much KV as goes with it."""

from __future__ import annotations

from jettison.simulate.reproduce.conditions import conditions
from jettison.simulate.reproduce.jobs import Variant
from jettison.simulate.reproduce.measures import alone, compared, mean_of, ttft
from jettison.simulate.reproduce.pool import Runs
from jettison.simulate.reproduce.remarks import mean_stay_s
from jettison.simulate.reproduce.rows import Band, Outcome
from jettison.simulate.reproduce.specs import SPARE, WITHOUT_GUARD, Results, read_spec, run_spec

FIGURE, WORKLOAD = "kunserve-fig13", "BurstGPT 14B, KV by stay"
STAY_S = 11.0
"""Mean stay of a BurstGPT request (v3 section 2.2)."""

UTILISATION = 0.5
"""Of GPU memory: the tenth at which the mean stay comes nearest to ``STAY_S`` at the load rule's mean load. Nothing but
that statement on the workload sets it."""

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
        alone(results, FIGURE, WORKLOAD, "mean stay", "recompute", mean_stay_s, paper=Band(STAY_S, STAY_S), unit="s")
    )
    outcome.conditions[WORKLOAD] = conditions(results, "recompute")
    outcome.remarks.append(_remark(results, as_stated))


def _remark(results: Results, as_stated: Results) -> str:
    """Which of the paper's statements go together, and what each choice gives."""
    ours, theirs = (mean_of(found.runs["recompute"], mean_stay_s) or 0.0 for found in (results, as_stated))
    full, less = (found.spec.machine.kv_tokens for found in (as_stated, results))
    p99 = {name: mean_of(found, ttft(99)) or 0.0 for name, found in results.runs.items()}
    told = ", ".join(f"{name} {value:.2f} s" for name, value in p99.items())
    return (
        "What v3 says of BurstGPT does not go together on the GPUs that it names: a KV capacity of 243 K tokens an "
        f"instance, a mean load of 56.3 %, and a mean stay of {STAY_S:.0f} s. All figures of this page keep the first "
        f"two ({full:,} tokens), and stays are {theirs:.0f} s. `{WORKLOAD}` keeps the last two and gives up the first: "
        f"{UTILISATION:.0%} of GPU memory, {less:,} tokens of KV, stays of {ours:.0f} s. Memory then runs short first, "
        f"and P99 TTFT is: {told}. So this burst is worth {p99['recompute'] / p99[WITHOUT_GUARD.name]:.1f}x to "
        f"KunServe's own trigger, of the {p99['recompute'] / p99[SPARE.name]:.1f}x that memory could give, which a "
        "static pipeline has from the start. An order of magnitude is more than memory alone can give in this burst."
    )

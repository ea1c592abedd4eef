"""The fairness header of each comparison (design 5.5), and what stands in for what."""

from __future__ import annotations

from jettison.report.results import METRIC_DEFINITIONS, RunResult
from jettison.report.summary import fairness_rows
from papers.harvest_load import told
from papers.specs import Results

CALIBRATION = (
    "step times: presets' roofline, calibrated on operators that others have timed (docs/cost-model.md); nothing is "
    "fitted to a figure of the papers"
)
SHOWN_METRICS = ("ttft_s", "tpot_s")


def conditions(results: Results, run_name: str) -> list[tuple[str, str]]:
    """(label, value): the header of one run of the comparison, the load rule, the metrics."""
    spec = results.spec
    run = results.one(run_name)
    rows = [("cluster", spec.machine.name), *fairness_rows(run), ("load rule", load_rule(results))]
    rows.append(("steps", step_rule(run)))
    rows += [("seeds", ", ".join(str(seed) for seed in spec.parsed.seeds)), ("step times", CALIBRATION)]
    rows += [(name, METRIC_DEFINITIONS[name]) for name in SHOWN_METRICS]
    return rows


def step_rule(run: RunResult) -> str:
    """Whether prompts or decodes come first in a step, and how many tokens it has."""
    cluster = run.config["cluster"]
    first = "prompts" if cluster["step_priority"] == "prefill" else "decodes"
    return f"{first} first, {cluster['max_num_batched_tokens']:,} tokens a step"


def load_rule(results: Results) -> str:
    """How many users there are, and why."""
    spec = results.spec
    workload = spec.parsed.workload
    if spec.load is not None:
        runs = next(iter(results.runs.values()))
        rates = ", ".join(f"{run.config['workload']['mean_rate_per_s']:.3g}" for run in runs)
        return f"{told(spec.load)}: {rates} requests/s"
    base = None if workload.arrivals is None else dict(workload.arrivals.numbers).get("rate_per_s")
    if spec.mean_load is None or base is None:
        return f"as the spec {spec.name} has it"
    times = workload.upscale or 1.0
    rates = ", ".join(f"{factor * times * base:.3g}" for factor in results.factors)
    return (
        f"each seed's rate is scaled until the mean KV demand with memory to spare is {spec.mean_load:g} of the "
        f"undropped capacity (KunServe v3: 56.3 %, and under 60 %; v1: 49.8 % and upwards): {rates} requests/s outside "
        "bursts"
    )

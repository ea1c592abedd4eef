"""What a run's arrivals would have met under other policies: simulated, on the cluster that the run says it had.

A simulated run carries its spec, a live one the description of its deployment (``config.deployment``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jettison.errors import ConfigError, UserError
from jettison.report.results import RunResult
from jettison.simulate.batch import run_cases
from jettison.simulate.cases import Case
from jettison.simulate.machines import cluster_setup, resolve_machine
from jettison.simulate.spec import POLICIES, parse_spec


def parse_policies(text: str) -> tuple[str, ...]:
    """``recompute,swap``. Raises ConfigError for a name that is no policy."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--counterfactual: {name!r} is no policy; known: {', '.join(POLICIES)}")
    return tuple(dict.fromkeys(names))


def counterfactual_runs(
    run: RunResult, policies: Sequence[str], *, num_processes: int | None = None
) -> dict[str, RunResult]:
    """By a name that says that it is simulated: the same arrivals and lengths under each policy.

    A live run is simulated under its own policy as well, so that the reader sees how near the simulation comes.
    Raises UserError where the run does not say what met whom.
    """
    cases = []
    own = run.config.get("policy")
    asked = [*policies, own] if is_live(run) and own in POLICIES and own not in policies else policies
    for policy in asked:
        name = f"{policy} (this run, simulated)" if policy == own else f"{policy} (simulated)"
        cases.append(Case(name, _spec(run, policy), variant=policy))
    for case in cases:
        spec = parse_spec(case.raw, run.name)
        cluster_setup(resolve_machine(spec.cluster, spec.settings), spec, spec.variants[0], 0)
    return {result.name: result for result in run_cases(cases, num_processes=num_processes)}


def is_live(run: RunResult) -> bool:
    """It was measured, not simulated."""
    return not run.config.get("simulated", False)


def _spec(run: RunResult, policy: str) -> dict[str, Any]:
    """Of the recorded arrivals under a policy."""
    rows = recorded_rows(run)
    workload = {"rows": rows, "span_s": max(run.duration_s, rows[-1][0] + 1e-3)}
    variant = {"name": policy, "policy": policy}
    if is_live(run):
        deployment = run.config.get("deployment")
        if not isinstance(deployment, Mapping):
            raise UserError(
                f"run {run.name} does not say on which cluster it ran (config.deployment): only runs against a server "
                "of this version do"
            )
        return {"cluster": {"description": deployment}, "workload": workload, "variants": [variant]}
    spec = run.config.get("spec")
    if not isinstance(spec, Mapping):
        raise UserError(f"run {run.name} does not carry its spec (config.spec): simulate it with `jettison simulate`")
    kept = {key: spec[key] for key in ("cluster", "settings", "timing", "faults", "run") if key in spec}
    settings = spec["variants"][0].get("settings", {})
    return {**kept, "workload": workload, "variants": [{**variant, "settings": settings}], "seeds": spec["seeds"]}


def recorded_rows(run: RunResult) -> list[list[float]]:
    """``[arrival, input, output]`` of every request, as a spec has them: what was really produced, where it ended."""
    details = run.requests_detail
    if not details:
        raise UserError(f"run {run.name} keeps no row a request (requests_detail): its arrivals are not known")
    rows = []
    for row in sorted(details, key=lambda row: row["scheduled_s"]):
        done = row["status"] == "completed" and row["output_tokens"]
        rows.append([row["scheduled_s"], row["input_tokens"], row["output_tokens"] if done else row["wanted_tokens"]])
    return rows


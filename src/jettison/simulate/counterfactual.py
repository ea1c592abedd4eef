"""What a run's arrivals would have met under other policies: simulated, on the cluster that the run says it had.

A simulated run carries its spec, a live one the description of its deployment (``config.deployment``).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jettison.config.sections import SchedulerConfig
from jettison.cost.deployment import deployment_from_document
from jettison.errors import ConfigError, UserError
from jettison.report.results import RunResult
from jettison.report.summary import format_value
from jettison.simulate.batch import run_cases
from jettison.simulate.cases import Case
from jettison.simulate.machines import cluster_setup, resolve_machine
from jettison.simulate.profiling import foreign_profile, profiling_command
from jettison.simulate.spec import POLICIES, parse_spec

FOREIGN = " with another's profile"
"""In the name of what was simulated with a profile that was measured for something else than the run."""


OWN = " (this run, simulated"
"""In the name of what simulates a run under its own policy."""

MOST_UNASKED = 20_000
"""Requests, all runs and policies together, that are simulated without being asked for."""

FAR_RATIO = 1.5
"""Simulated over measured, or the other way round, from which a simulation stands for nothing that was measured."""

FAR_SHARE = 0.05
"""Of all requests, likewise: more or fewer that were refused."""


def parse_policies(text: str) -> tuple[str, ...]:
    """``recompute,swap``. Raises ConfigError for a name that is no policy."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--counterfactual: {name!r} is no policy; known: {', '.join(POLICIES)}")
    return tuple(dict.fromkeys(names))


def other_policies(run: RunResult, others: Mapping[str, RunResult]) -> tuple[str, ...]:
    """Those under which neither the run nor ``others`` has met its arrivals."""
    known = {found.config.get("policy") for found in (run, *others.values())}
    return tuple(policy for policy in POLICIES if policy not in known)


def told_if_long(run: RunResult, num_policies: int, num_before: int = 0) -> str | None:
    """Why a run is not simulated unless the user asks for it; None where that is a matter of seconds. ``num_before``:
    requests that have been simulated unasked already."""
    number = num_before + num_policies * run.requests.submitted
    return None if number <= MOST_UNASKED else f"{number:,} requests to simulate take a while"


def counterfactual_runs(
    run: RunResult, policies: Sequence[str], *, profile: Path | None = None, run_file: Path = Path("RUN"),
    num_processes: int | None = None, note: Callable[[str], None] | None = None,
) -> dict[str, RunResult]:
    """Simulated runs of the same arrivals and lengths under each policy, by names that mark them as simulated.

    A live run is simulated under its own policy as well, so that the reader sees the error of the simulation.
    ``profile``: the profile of a live run's machine, where its server had none; the names mark a profile of another
    machine (``told_of_profile``). ``run_file``: the name of the run's file in messages. ``note``: policies that the
    run's settings do not go with are left out, unless that leaves none, and it is told which and why. Raises UserError
    where the run lacks its requests or its spec, or its machine has not been measured; ConfigError for policies that
    its settings forbid.
    """
    if profile is None and is_live(run):
        _check_profiled(run, policies, run_file)
    cases, seed = [], _seed(run)
    with_what = FOREIGN if profile is not None and told_of_profile(run, profile) is not None else ""
    own = run.config.get("policy")
    asked = [*policies, own] if is_live(run) and own in POLICIES and own not in policies else policies
    for policy in asked:
        name = f"{policy}{OWN}{with_what})" if policy == own else f"{policy} (simulated{with_what})"
        cases.append(Case(name, _spec(run, policy, profile), variant=policy, seed=seed))
    possible, refused = list[Case](), list[tuple[Case, ConfigError]]()
    for case in cases:
        spec = parse_spec(case.raw, run.name)
        try:
            cluster_setup(resolve_machine(spec.cluster, spec.settings), spec, spec.variants[0], seed)
        except ConfigError as error:
            refused.append((case, error))
        else:
            possible.append(case)
    for case, why in refused:
        if note is None or not possible:
            raise why
        note(f"{case.variant}: {why}")
    return {result.name: result for result in run_cases(possible, num_processes=num_processes)}


def untold_of(run: RunResult, simulated: Mapping[str, RunResult], warning: str | None) -> frozenset[str]:
    """Which of ``counterfactual_runs`` say nothing of what was saved: a live run's own, and all where it is far off.

    ``warning``: what ``told_if_far`` says.
    """
    return frozenset(simulated if warning is not None else (n for n in simulated if _is_own(run, n)))


def told_if_far(run: RunResult, simulated: Mapping[str, RunResult]) -> str | None:
    """One line where what was simulated is not what the run met, or a live run's own simulation is far from what it
    measured; None where it is near, or there is none.

    Far is ``FAR_RATIO`` times either way, in P99 TTFT or the mean end to end, or ``FAR_SHARE`` of all requests more or
    fewer that were refused.
    """
    if simulated and (partial := _told_if_partial(run)) is not None:
        return f"{partial}: nothing is said to be saved"
    own = next((result for name, result in simulated.items() if _is_own(run, name)), None)
    if own is None:
        return None
    pairs = (
        ("P99 TTFT", run.ttft_s.p99, own.ttft_s.p99), ("mean end to end", run.e2e_s.mean, own.e2e_s.mean),
    )  # fmt: skip
    known = [(label, ours, theirs) for label, ours, theirs in pairs if ours is not None and theirs is not None]
    refused = run.requests.rejected, own.requests.rejected
    is_far = abs(refused[0] - refused[1]) > FAR_SHARE * run.requests.submitted
    if not is_far and all(ours <= FAR_RATIO * theirs and theirs <= FAR_RATIO * ours for _, ours, theirs in known):
        return None
    figures = "; ".join(
        [f"{label} {format_value(theirs, 's')} and not {format_value(ours, 's')}" for label, ours, theirs in known]
        + ([f"{refused[1]} refused and not {refused[0]}"] if is_far else [])
    )
    return f"the simulation of this run is far from what it measured ({figures}): the simulated figures say nothing"


def _is_own(run: RunResult, name: str) -> bool:
    """It simulates a live run as it was."""
    return is_live(run) and name.startswith(f"{run.config.get('policy')}{OWN}")


def told_of_profile(run: RunResult, profile: Path) -> str | None:
    """One line where a profile was measured for something else than what a live run ran on; None where it fits.

    Raises ConfigError for a file that is no profile, or a run whose description is none.
    """
    described = run.config.get("deployment")
    if not is_live(run) or not isinstance(described, Mapping):
        return None
    return foreign_profile(deployment_from_document(described, f"run {run.name!r}: config.deployment"), profile)


def is_live(run: RunResult) -> bool:
    """It was measured, not simulated."""
    return not run.config.get("simulated", False)


def _check_profiled(run: RunResult, policies: Sequence[str], run_file: Path) -> None:
    """Raises UserError that says how to make the profile that is missing, and where to give it."""
    described = run.config.get("deployment")
    if not isinstance(described, Mapping) or described.get("profile") is not None:
        return
    deployment = deployment_from_document(described, f"run {run.name!r}: config.deployment")
    out = str(run_file.parent / "profile.json")
    again = ["jettison", "explain", str(run_file), "--counterfactual", ",".join(policies), "--profile", out]
    raise UserError(
        f"there is no cost profile to simulate the run {run.name!r} with: its server had none of the model "
        f"{deployment.name!r}. `{profiling_command(deployment, out=out)}` makes one on the machine that served it "
        f"(MODEL_DIR: the folder of the model; with --num-threads, if the server had it), in about a minute, or in "
        f"seconds and less surely with --quick. Then `{shlex.join(again)}`"
    )


def _seed(run: RunResult) -> int:
    """Of the run's prompts and noise."""
    seed = run.config.get("seed")
    return seed if isinstance(seed, int) and seed >= 0 else 0


def _spec(run: RunResult, policy: str, profile: Path | None) -> dict[str, Any]:
    """Of the recorded arrivals under a policy."""
    rows = recorded_rows(run)
    span_s = _described(run).get("duration_s", run.duration_s)
    workload: dict[str, Any] = {"rows": rows, "span_s": max(span_s, rows[-1][0], 1e-3)}
    variant = {"name": policy, "policy": policy}
    if is_live(run):
        deployment = run.config.get("deployment")
        if not isinstance(deployment, Mapping):
            raise UserError(
                f"the run {run.name!r} does not say on which cluster it ran (config.deployment): only runs against a "
                "server of this version do"
            )
        cluster = {"description": deployment} | ({} if profile is None else {"profile": str(profile)})
        said = deployment.get("settings") or {}
        limit = said.get("max_num_queued_reqs", SchedulerConfig().max_num_queued_reqs)
        return {
            "cluster": cluster, "workload": workload, "variants": [variant], "seeds": [_seed(run)],
            "settings": {
                "max_num_queued_reqs": "none" if limit is None else limit,
                "min_instances": "auto", "max_instances": "auto",  # how long processes take to start is not told
            },
        }
    if profile is not None:
        raise UserError(f"--profile: the run {run.name!r} was simulated, its spec says with what")
    spec = run.config.get("spec")
    if not isinstance(spec, Mapping):
        raise UserError(f"the run {run.name!r} does not carry its spec (config.spec): run it with `jettison simulate`")
    kept = {key: spec[key] for key in ("cluster", "settings", "timing", "faults", "run") if key in spec}
    settings = spec["variants"][0].get("settings") or {}
    if isinstance(written := spec.get("workload"), Mapping):  # its batches are drawn by its seed
        workload |= {key: written[key] for key in ("offline", "batches", "seed") if key in written}
    return {**kept, "workload": workload, "variants": [{**variant, "settings": settings}], "seeds": spec["seeds"]}


def recorded_rows(run: RunResult) -> list[list[Any]]:
    """``[arrival, input, output]``, and ``offline`` where it is, of every request of the load, as a spec has them: what
    was really produced, where the request ended or its client hung up. Requests of a batch beside the load are not
    among them."""
    details = run.requests_detail
    if not details:
        raise UserError(f"the run {run.name!r} keeps no row a request (requests_detail): its arrivals are not known")
    offline = {row["index"] for row in _offline_of_load(run)}
    num = _described(run).get("num_requests", math.inf)
    online = [row for row in details if row["index"] not in offline and row["index"] < num]
    rows = []
    for row in sorted([*online, *_offline_of_load(run)], key=lambda row: (row["scheduled_s"], row["index"])):
        if row["status"] == "cancelled":
            output = max(1, row["output_tokens"])
        else:
            output = (row["status"] == "completed" and row["output_tokens"]) or row["wanted_tokens"]
        rows.append([row["scheduled_s"], row["input_tokens"], output])
        rows[-1] += ["offline"] if row["index"] in offline else []
    return rows


def _told_if_partial(run: RunResult) -> str | None:
    """One line where the run does not keep all that its cluster had to serve; None where it does."""
    if _described(run).get("has_tenants"):
        return "the run does not keep the tenants of its requests: the simulated figures are of one tenant"
    offline = (run.classes or {}).get("offline", {})
    num_offline = offline.get("requests", {}).get("submitted", 0) + offline.get("unfinished", 0)
    num_lost = num_offline - len(_offline_of_load(run))
    if num_lost > 0 and is_live(run):
        return f"{num_lost:,} requests of a batch were sent beside the run, and none of it is simulated"
    if is_live(run) and run.log("instance_asked", "instance_released"):
        return "instances were started or given up meanwhile, and the simulated ones are those of its begin"
    return None


def _offline_of_load(run: RunResult) -> list[Mapping[str, Any]]:
    """Offline requests that the load itself has: those of a batch beside it have later indices."""
    rows = (run.classes or {}).get("offline", {}).get("requests_detail") or ()
    return [row for row in rows if row["index"] < _described(run).get("num_requests", 0)]


def _described(run: RunResult) -> Mapping[str, Any]:
    """What the run says of its workload."""
    found = run.config.get("workload")
    return found if isinstance(found, Mapping) else {}

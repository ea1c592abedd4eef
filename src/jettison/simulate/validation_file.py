"""What is kept of a validation: everything that was compared, and enough of the live runs to simulate them again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jettison.cost.deployment import costs_from_plain
from jettison.cost.drift import MachineThen
from jettison.errors import ConfigError
from jettison.report.output import write_whole
from jettison.report.results import RequestCounts, RunResult, Summary
from jettison.simulate.cases import cases_of, run_case
from jettison.simulate.validation import Pair, compare, compare_means, worst

FORMAT = "jettison-validation-3"


def write_document(path: Path, pairs: Sequence[Pair]) -> None:
    """Replace the file as a whole. Raises OSError."""
    write_whole(path, json.dumps(validation_document(pairs), indent=1, sort_keys=True) + "\n")


def validation_document(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Everything that was compared, and with which constants it was simulated."""
    rows = [row for pair in pairs for row in compare(pair)]
    means = compare_means(pairs)
    deployment = pairs[0].live.config.get("deployment") or {}
    return {
        "format": FORMAT,
        "means": [row.as_dict() for row in means],
        "rows": [row.as_dict() for row in rows],
        "worst": worst(rows).as_dict(),
        "within": all(row.is_within for row in means),
        "host_costs": deployment.get("costs"),
        "profile": deployment.get("profile"),
        "runs": [
            {
                "scenario": pair.scenario, "factor": pair.factor,
                "foreign_cores": pair.live.client.get("foreign_cores"),
                "stolen_cores": pair.live.client.get("stolen_cores"),
                "machine_speed": [list(point) for point in pair.then.speed],
                "core_speeds": list(pair.then.core_speeds),
                "controller_factor": pair.then.controller_factor,
                "step_shape": [list(point) for point in pair.then.step_shape],
                "crowded_shape": [list(point) for point in pair.then.crowded_shape],
                "had_share": pair.then.had_share,
                **{
                    side: {
                        "requests": asdict(run.requests), "ttft_s": asdict(run.ttft_s), "tpot_s": asdict(run.tpot_s),
                        "e2e_s": asdict(run.e2e_s), "output_tokens_per_s": run.output_tokens_per_s,
                        "duration_s": run.duration_s,
                        "events": {k: v for k, v in run.events.items() if k != "log"},
                        "fairness": run.config.get("fairness"),
                    }
                    for side, run in (("live", pair.live), ("simulated", pair.simulated))
                },
            }
            for pair in pairs
        ],
    }  # fmt: skip


def read_document(path: Path) -> dict[str, Any]:
    """Raises ConfigError for a file that is not one, or of another version."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kept = document["format"]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is no result of a validation") from None
    if kept != FORMAT:
        raise ConfigError(f"{path} is of format {kept}, which keeps too little of its live runs (wanted: {FORMAT})")
    return document


def _is_of(document: Mapping[str, Any], deployment: Mapping[str, Any]) -> bool:
    """Its live runs were served with these constants. Those of an earlier version say less, and mean the same."""
    kept, now = (
        costs and costs_from_plain(costs, "host_costs") for costs in (document["host_costs"], deployment["costs"])
    )
    return kept == now and document["profile"] == deployment["profile"]


def _points(pairs: Sequence[Sequence[Any]]) -> tuple[tuple[Any, float], ...]:
    """As a document has them, and as ``MachineThen`` does."""
    return tuple((at, value) for at, value in pairs)


def simulate_again(raw: Mapping[str, Any], name: str, base_dir: Path, document: Mapping[str, Any]) -> list[Pair]:
    """The simulated side anew, of live runs that a document keeps: the same requests on the same machine.

    Raises ConfigError as ``validate_command`` does, where profile or host costs are not those of the document any
    more, and where the spec has runs that it does not keep.
    """
    kept = {run["scenario"]: run for run in document["runs"]}
    pairs = []
    for case in cases_of(raw, name, base_dir, factor=document["runs"][0]["factor"]):
        deployment = case.raw["cluster"]["description"]
        if not _is_of(document, deployment):
            raise ConfigError(f"{name}: profile or host costs were measured anew: its live runs belong to others")
        scenario = f"{raw.get('name', name)}, {case.label}, seed {case.seed}"
        if scenario not in kept:
            raise ConfigError(f"{name}: there is no live run of {scenario}")
        run = kept[scenario]
        case = replace(case, factor=run["factor"])
        then = MachineThen(
            _points(run["machine_speed"]), tuple(run["core_speeds"]), run["controller_factor"],
            step_shape=_points(run.get("step_shape", ())), crowded_shape=_points(run.get("crowded_shape", ())),
            had_share=run.get("had_share", 1.0),
        )
        simulated = run_case(case, then=then)
        live = kept_run(run, deployment)
        pairs.append(Pair(raw.get("name", name), case.label, case.seed, live, simulated, case.factor, then))
    return pairs


def kept_run(run: Mapping[str, Any], deployment: Mapping[str, Any]) -> RunResult:
    """What a document keeps of a live run. ``deployment``: of which its constants are those that it was run with."""
    live = run["live"]
    return RunResult(
        run["scenario"], duration_s=live["duration_s"], requests=RequestCounts(**live["requests"]),
        ttft_s=_summary(live["ttft_s"]), tpot_s=_summary(live["tpot_s"]), e2e_s=_summary(live["e2e_s"]),
        output_tokens_per_s=live["output_tokens_per_s"], events=live["events"],
        client={name: run.get(name) for name in ("foreign_cores", "stolen_cores")},
        config={"fairness": live["fairness"], "deployment": deployment},
    )  # fmt: skip


def _summary(kept: Mapping[str, Any]) -> Summary:
    """Documents of an earlier version do not say of how many it is."""
    return Summary(**{"count": None, **kept})

"""What is kept of a validation: everything that was compared, and enough of the live runs to simulate them again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jettison.cost.model import CostModel
from jettison.errors import ConfigError
from jettison.report.output import write_whole
from jettison.report.results import RequestCounts, RunResult, Summary
from jettison.simulate.cases import cases_of, run_case
from jettison.simulate.validation import Trio, compare, compare_means

FORMAT = "jettison-validation-4"


def write_document(path: Path, trios: Sequence[Trio]) -> None:
    """Replace the file as a whole. Raises OSError."""
    write_whole(path, json.dumps(validation_document(trios), indent=1, sort_keys=True) + "\n")


def validation_document(trios: Sequence[Trio]) -> dict[str, Any]:
    """Everything that was compared, and what it was simulated with."""
    deployment = trios[0].live.config.get("deployment") or {}
    return {
        "format": FORMAT,
        "means": [row.as_dict() for row in compare_means(trios)],
        "rows": [row.as_dict() for trio in trios for row in compare(trio)],
        "profile": deployment.get("profile"),
        "runs": [
            {
                "scenario": trio.scenario, "factor": trio.factor, "steps": asdict(trio.steps),
                "live": _kept(trio.live), "live_again": _kept(trio.again), "simulated": _kept(trio.simulated),
            }
            for trio in trios
        ],
    }


def _kept(run: RunResult) -> dict[str, Any]:
    return {
        "requests": asdict(run.requests), "ttft_s": asdict(run.ttft_s), "tpot_s": asdict(run.tpot_s),
        "e2e_s": asdict(run.e2e_s), "output_tokens_per_s": run.output_tokens_per_s, "duration_s": run.duration_s,
        "events": {key: value for key, value in run.events.items() if key != "log"},
        "fairness": run.config.get("fairness"),
    }


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


def simulate_again(raw: Mapping[str, Any], name: str, base_dir: Path, document: Mapping[str, Any]) -> list[Trio]:
    """The simulated side anew, of live runs that a document keeps: the same requests, with the steps they recorded.

    Raises ConfigError as ``validate_command`` does, where the profile is not the document's any more, and where the
    spec has runs that it does not keep.
    """
    kept = {run["scenario"]: run for run in document["runs"]}
    trios = []
    for case in cases_of(raw, name, base_dir, factor=document["runs"][0]["factor"]):
        deployment = case.raw["cluster"]["description"]
        if document["profile"] != deployment["profile"]:
            raise ConfigError(f"{name}: the profile was measured anew: its live runs belong to another")
        scenario = f"{raw.get('name', name)}, {case.label}, seed {case.seed}"
        if scenario not in kept:
            raise ConfigError(f"{name}: there is no live run of {scenario}")
        run = kept[scenario]
        case, steps = replace(case, factor=run["factor"]), CostModel(**run["steps"])
        live, again = (_run_of(run, side, deployment) for side in ("live", "live_again"))
        simulated = run_case(case, steps=steps)
        trios.append(
            Trio(raw.get("name", name), case.label, case.seed, live, again, simulated, steps, case.factor)
        )
    return trios


def _run_of(run: Mapping[str, Any], side: str, deployment: Mapping[str, Any]) -> RunResult:
    """What a document keeps of a live run. ``deployment``: of which its profile is the one that it was run with."""
    kept = run[side]
    return RunResult(
        run["scenario"], duration_s=kept["duration_s"], requests=RequestCounts(**kept["requests"]),
        ttft_s=Summary(**kept["ttft_s"]), tpot_s=Summary(**kept["tpot_s"]), e2e_s=Summary(**kept["e2e_s"]),
        output_tokens_per_s=kept["output_tokens_per_s"], events=kept["events"],
        config={"fairness": kept["fairness"], "deployment": deployment},
    )  # fmt: skip

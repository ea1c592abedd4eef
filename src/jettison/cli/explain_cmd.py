"""``jettison explain``: what a run decided, why, and what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jettison.errors import UserError


def explain(
    run_file: Annotated[Path, typer.Argument(metavar="RUN", help="Result file (`bench`, `demo`, `simulate` --json).")],
    name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Which run of the file (default: those with a log).")
    ] = None,
    slo_ttft_s: Annotated[
        float, typer.Option("--slo-ttft", min=0.0, metavar="SECONDS", help="Objective for the first token.")
    ] = 1.0,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Only such decisions; may be given more than once."),
    ] = None,
    counterfactual: Annotated[
        str | None,
        typer.Option(
            "--counterfactual", metavar="POLICIES",
            help="Also simulate the recorded arrivals under these: recompute,swap,migrate,pipeline,drop.",
        ),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write all of it as JSON.")
    ] = None,
) -> None:
    """Show each decision with its inputs, its prediction and its outcome, and a card for each overload.

    Runs of the same file that met the same arrivals under other policies say what
    would have happened without the drop; --counterfactual simulates it.
    """
    from jettison.report.decisions import decisions_of, incidents_of
    from jettison.report.explain import explain_document, print_decisions, print_incident
    from jettison.report.results import met_the_same, read_results
    from jettison.simulate.counterfactual import counterfactual_runs, parse_policies

    policies = parse_policies(counterfactual) if counterfactual is not None else ()
    runs = read_results(run_file)
    chosen = [r for r in runs if (r.name == name if name is not None else r.events.get("log"))]
    if not chosen:
        names = ", ".join(r.name for r in runs) or "none"
        missing = "no run with an event log" if name is None else f"no run named {name!r}"
        raise UserError(f"{run_file}: {missing} (runs: {names})")
    console = Console()
    documents = []
    for run in chosen:
        others = {r.config.get("policy") or r.name: r for r in runs if r is not run and met_the_same(r, run)}
        if policies:
            with console.status("simulating"):
                others |= counterfactual_runs(run, policies)
        decisions = [d for d in decisions_of(run) if not kinds or d.kind in kinds]
        incidents = incidents_of(run, slo_ttft_s, others)
        console.rule(run.name, align="left")
        if decisions:
            print_decisions(decisions, console)
        else:
            console.print("nothing was decided" if not kinds else "no such decision")
        for number, incident in enumerate(incidents, 1):
            print_incident(incident, number, slo_ttft_s, console)
        documents.append(explain_document(run, incidents))
    if json_out is not None:
        json_out.parent.mkdir(parents=True, exist_ok=True)
        json_out.write_text(json.dumps({"runs": documents}, indent=1, sort_keys=True) + "\n", encoding="utf-8")

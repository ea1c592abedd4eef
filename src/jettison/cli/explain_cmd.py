"""``jettison explain``: what a run decided, why, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jettison.errors import UserError

if TYPE_CHECKING:
    from jettison.report.results import RunResult


def explain(
    run_file: Annotated[Path, typer.Argument(metavar="RUN", help="Result file (`bench`, `demo`, `simulate` --json).")],
    name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Which run of the file (default: those with a log).")
    ] = None,
    slo_ttft_s: Annotated[
        float | None,
        typer.Option(
            "--slo-ttft", min=0.0, metavar="SECONDS",
            help="Objective for the first token (default: the run's own, or 1).",
        ),
    ] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Only such decisions, for example restore; repeatable."),
    ] = None,
    counterfactual: Annotated[
        str | None,
        typer.Option(
            "--counterfactual", metavar="POLICIES",
            help="Also simulate the recorded arrivals under these: recompute,swap,migrate,pipeline,drop.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --counterfactual: what `jettison profile --out` wrote, where the run's server had no profile.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="With --counterfactual: runs at one time (default: as many as cores)."),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write all of it as JSON.")
    ] = None,
) -> None:
    """Show each decision with its inputs, its prediction and its outcome, and a card for each overload.

    Runs of the same file that met the same arrivals at the same point of a sweep say
    what would have happened there; --counterfactual simulates other policies, which
    needs a cost profile of the machine (`jettison profile`).
    """
    from jettison.report.decisions import KINDS
    from jettison.report.output import check_writable, write_whole
    from jettison.report.results import read_results
    from jettison.simulate.counterfactual import parse_policies

    policies = parse_policies(counterfactual) if counterfactual is not None else ()
    for flag, value in (("--profile", profile), ("--processes", processes)):
        if value is not None and not policies:
            raise UserError(f"{flag} goes with --counterfactual")
    for kind in kinds or ():
        if kind not in KINDS:
            raise UserError(f"--kind {kind!r}: no such kind (there are: {', '.join(map(repr, KINDS))})")
    if json_out is not None:
        check_writable(json_out)
    runs = read_results(run_file)
    chosen = _chosen(runs, name, run_file)
    console = Console()
    documents = []
    for run in chosen:
        simulated: dict[str, RunResult] = {}
        if policies:
            simulated = _simulated(run, policies, profile, run_file, processes, console)
        documents.append(_explain(run, _others(run, runs), simulated, slo_ttft_s, kinds or (), console))
    if json_out is not None:
        write_whole(json_out, json.dumps({"runs": documents}, indent=1, sort_keys=True) + "\n")


def _simulated(
    run: RunResult, policies: Sequence[str], profile: Path | None, run_file: Path, processes: int | None,
    console: Console,
) -> dict[str, RunResult]:
    from jettison.report.terminal import spinner
    from jettison.simulate.counterfactual import counterfactual_runs

    _warn_of_profile(run, profile)
    with spinner(f"simulating what {run.name} met", console):
        return counterfactual_runs(run, policies, profile=profile, run_file=run_file, num_processes=processes)


def _explain(
    run: RunResult, others: dict[str, RunResult], simulated: dict[str, RunResult], asked_slo_s: float | None,
    kinds: Sequence[str], console: Console,
) -> dict[str, Any]:
    """Print what is to be told of one run; the same as a document. Whatever was simulated is shown: on the cards, or
    where there are none, for the whole run."""
    from jettison.report.decisions import decisions_of
    from jettison.report.explain import explain_document, print_decisions, print_incident, print_whole_run
    from jettison.report.incidents import incidents_of, slo_ttft_of, whole_run
    from jettison.simulate.counterfactual import told_if_far, untold_of

    slo_ttft_s = slo_ttft_of(run, asked_slo_s)
    warning = told_if_far(run, simulated)
    untold = untold_of(run, simulated, warning)
    incidents = incidents_of(run, slo_ttft_s, others | simulated, untold=untold)
    console.rule(run.name, align="left")
    for number, incident in enumerate(incidents, 1):
        print_incident(incident, number, slo_ttft_s, console, warning)
    whole = None
    if simulated and not incidents:
        whole = whole_run(run, slo_ttft_s, others | simulated, untold=untold)
        print_whole_run(whole, slo_ttft_s, console, warning)
    if decisions := [d for d in decisions_of(run) if not kinds or d.kind in kinds]:
        print_decisions(decisions, console, folds=not kinds)
    else:
        console.print("nothing was decided" if not kinds else "no such decision")
    return explain_document(run, incidents, slo_ttft_s, warning, whole)


def _others(run: RunResult, runs: Sequence[RunResult]) -> dict[str, RunResult]:
    """What met the same as ``run``, by variant, or by policy where there are none; by its own name where that is
    taken."""
    from jettison.report.results import met_the_same

    others: dict[str, RunResult] = {}
    for other in runs:
        if other is not run and met_the_same(other, run):
            label = other.config.get("variant") or other.config.get("policy") or other.name
            others[other.name if label in others else label] = other
    return others


def _warn_of_profile(run: RunResult, profile: Path | None) -> None:
    """One line on stderr where the profile is another's."""
    from jettison.report.terminal import print_line
    from jettison.simulate.counterfactual import told_of_profile

    if profile is not None and (told := told_of_profile(run, profile)):
        print_line(f"warning: {told}", Console(stderr=True))


def _chosen(runs: Sequence[RunResult], name: str | None, run_file: Path) -> list[RunResult]:
    """The run of that name; without one those that decided something, or else those that could have.

    Raises UserError where there is no such run, or its server told no events.
    """
    names = ", ".join(r.name for r in runs) or "none"
    named = [r for r in runs if name is None or r.name == name]
    if not named:
        raise UserError(f"{run_file}: no run named {name!r} (runs: {names})")
    with_log = [r for r in named if r.events.get("log") is not None]
    if not with_log:
        missing = "no run with an event log" if name is None else f"run {name!r} has no event log"
        raise UserError(f"{run_file}: {missing}: its server did not tell what it decided (runs: {names})")
    return [r for r in with_log if r.events["log"]] or with_log

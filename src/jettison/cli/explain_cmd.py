"""``jettison explain``: what a run decided, why, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jettison.errors import JettisonError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from jettison.report.incidents import Comparison, Incident
    from jettison.report.results import RunResult


SIMULATED_POLICIES = typer.Option(
    "--counterfactual", metavar="POLICIES",
    help="Simulate the recorded arrivals under these: recompute,swap,migrate,pipeline,drop (default: for runs with a "
    "card those that the file has no run of).",
)
SIMULATED_PROFILE = typer.Option(
    metavar="FILE",
    help="For the simulation: what `jettison profile --out` wrote, where the run's server had no profile.",
)


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
    counterfactual: Annotated[str | None, SIMULATED_POLICIES] = None,
    no_counterfactual: Annotated[bool, typer.Option("--no-counterfactual", help="Simulate nothing.")] = False,
    why_offline: Annotated[
        bool,
        typer.Option("--why-offline", help="Only when offline work (a batch) stood still, and why. Simulates nothing."),
    ] = False,
    profile: Annotated[Path | None, SIMULATED_PROFILE] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Simulations at one time (default: as many as cores)."),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write all of it as JSON.")
    ] = None,
) -> None:
    """Show each decision with its inputs, its prediction and its outcome, and a card for each overload.

    Cards say what would have happened elsewhere: in the runs of the same file that met
    the same arrivals at the same point of a sweep, and under the other policies,
    simulated; a live run needs a cost profile of its machine for that (`jettison profile`).
    """
    from rich.console import Console

    from jettison.live.machine.endings import ended_by_sigterm
    from jettison.report.output import check_writable, write_whole
    from jettison.report.results import read_results
    from jettison.simulate.counterfactual import parse_policies

    asked = Asked(
        parse_policies(counterfactual) if counterfactual is not None else None, profile, processes, slo_ttft_s,
        tuple(kinds or ()), why_offline, not (no_counterfactual or why_offline),
    )  # fmt: skip
    _check_flags(asked, no_counterfactual)
    if json_out is not None:
        check_writable(json_out)
    console = Console()
    with ended_by_sigterm():
        explained = _explain_all(read_results(run_file), name, asked, run_file, console)
    if json_out is not None:  # first: a reader of the words may be gone
        documents = [each.document() for each in explained]
        write_whole(json_out, json.dumps({"runs": documents}, indent=1, sort_keys=True) + "\n")
    for each in explained:
        each.print(asked, console)


def _explain_all(
    runs: Sequence[RunResult], name: str | None, asked: Asked, run_file: Path, console: Console
) -> list[Explained]:
    """Each of the runs that are meant, with what was simulated of it."""
    explained = []
    num_simulated = 0
    told: dict[str, str] = {}
    for run in _chosen(runs, name, run_file):
        others = _others(run, runs)
        simulated: dict[str, RunResult] = {}
        why_not = None
        if asked.simulates:
            simulated, why_not = _simulated(run, others, asked, run_file, num_simulated, console)
            num_simulated += len(simulated) * run.requests.submitted
            why_not = None if why_not is None else _told_once(run, why_not, told)
        explained.append(_explained(run, others, simulated, asked, why_not))
    return explained


def _told_once(run: RunResult, why_not: str, told: dict[str, str]) -> str:
    """Why a run was not simulated; where that is what was ``told`` of another, whose."""
    first = told.setdefault(why_not.replace(repr(run.name), ""), run.name)
    return why_not if first == run.name else f"as of {first!r}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says."""

    policies: tuple[str, ...] | None
    """To be simulated. None: nothing is said; runs with a card are, under the policies that the file has no run of."""
    profile: Path | None
    processes: int | None
    slo_ttft_s: float | None
    kinds: tuple[str, ...]
    """Of decisions; none: all."""
    why_offline: bool
    """Of offline work alone."""
    simulates: bool


def _check_flags(asked: Asked, no_counterfactual: bool) -> None:
    """Raises UserError for what contradicts itself, and for kinds that there are not."""
    from jettison.report.decisions import KINDS

    for kind in asked.kinds:
        if kind not in KINDS:
            raise UserError(f"--kind {kind!r}: no such kind (there are: {', '.join(map(repr, KINDS))})")
    if asked.kinds and asked.why_offline:
        raise UserError("--kind does not go with --why-offline")
    refusing = "--no-counterfactual" if no_counterfactual else "--why-offline"
    for flag, value in (
        ("--counterfactual", asked.policies), ("--profile", asked.profile), ("--processes", asked.processes),
    ):  # fmt: skip
        if not asked.simulates and value is not None:
            raise UserError(f"{flag} does not go with {refusing}")


def _simulated(
    run: RunResult, others: dict[str, RunResult], asked: Asked, run_file: Path, num_before: int, console: Console
) -> tuple[dict[str, RunResult], str | None]:
    """What was simulated of a run, and one line that says why nothing was, or what was not, where something could be
    expected.

    What was not asked for is simulated where there is a card for it and that takes seconds, together with the
    ``num_before`` requests of runs before it. Raises UserError where the user asked, by policies or by a profile, for
    what cannot be done.
    """
    from jettison.report.incidents import incidents_of, slo_ttft_of
    from jettison.simulate.counterfactual import other_policies, told_if_long

    policies = asked.policies
    if policies is None:
        policies = other_policies(run, others)
        if not policies or not incidents_of(run, slo_ttft_of(run, asked.slo_ttft_s), others):
            return {}, None
        if (told := told_if_long(run, len(policies), num_before)) is not None:
            return {}, f"{told}: ask for them with --counterfactual {','.join(policies)}"
    left_out = list[str]()
    try:
        simulated = _simulate(run, policies, asked, run_file, None if asked.policies else left_out.append, console)
        return simulated, "; ".join(left_out) or None
    except JettisonError as error:
        if asked.policies is not None or asked.profile is not None:
            raise
        return {}, str(error)


def _simulate(
    run: RunResult, policies: Sequence[str], asked: Asked, run_file: Path, note: Callable[[str], None] | None,
    console: Console,
) -> dict[str, RunResult]:
    from jettison.report.terminal import phase
    from jettison.simulate.counterfactual import counterfactual_runs

    _warn_of_profile(run, asked.profile)
    with phase(f"simulating what {run.name} met under {', '.join(policies)}", console):
        return counterfactual_runs(
            run, policies, profile=asked.profile, run_file=run_file, num_processes=asked.processes, note=note
        )


def _explained(
    run: RunResult, others: dict[str, RunResult], simulated: dict[str, RunResult], asked: Asked, why_not: str | None
) -> Explained:
    """Whatever was simulated is told of: on the cards, or where there are none, for the whole run."""
    from jettison.report.incidents import incidents_of, slo_ttft_of, whole_run
    from jettison.simulate.counterfactual import told_if_far, untold_of

    slo_ttft_s = slo_ttft_of(run, asked.slo_ttft_s)
    warning = told_if_far(run, simulated)
    untold = untold_of(run, simulated, warning)
    elsewhere = others | simulated
    incidents = incidents_of(run, slo_ttft_s, elsewhere, untold=untold)
    whole = None
    if simulated and not incidents:
        whole = whole_run(run, slo_ttft_s, elsewhere, untold=untold)
    compared = list(elsewhere.values()) if incidents or whole is not None else []
    return Explained(run, incidents, slo_ttft_s, warning, whole, compared, why_not)


@dataclass(frozen=True, slots=True)
class Explained:
    """What there is to tell of one run."""

    run: RunResult
    incidents: list[Incident]
    slo_ttft_s: float
    warning: str | None
    """Of what was simulated."""
    whole: Comparison | None
    compared: list[RunResult]
    why_not: str | None
    """It was not simulated."""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        from jettison.report.explain import explain_document

        return explain_document(self.run, self.incidents, self.slo_ttft_s, self.warning, self.whole, self.compared)

    def print(self, asked: Asked, console: Console) -> None:
        """In words; of offline work alone where that is asked."""
        from jettison.report.decisions import decisions_of
        from jettison.report.explain import (
            print_conditions,
            print_decisions,
            print_incident,
            print_whole_run,
            print_why_offline,
        )
        from jettison.report.terminal import print_line

        console.rule(self.run.name, align="left")
        if asked.why_offline:
            print_why_offline(self.run, console)
            return
        for number, incident in enumerate(self.incidents, 1):
            print_incident(incident, number, self.slo_ttft_s, console, self.warning)
        if self.whole is not None:
            print_whole_run(self.whole, self.slo_ttft_s, console, self.warning)
        if self.compared:
            print_conditions(self.run, self.compared, console)
        if self.why_not is not None:
            print_line(f"not simulated under other policies: {self.why_not}", console, "dim")
        if decisions := [d for d in decisions_of(self.run) if not asked.kinds or d.kind in asked.kinds]:
            print_decisions(decisions, console, folds=not asked.kinds)
        else:
            console.print("no such decision" if asked.kinds else "nothing was decided")


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
    from rich.console import Console

    from jettison.report.terminal import print_line
    from jettison.simulate.counterfactual import told_of_profile

    if profile is not None and (told := told_of_profile(run, profile)):
        print_line(f"warning: {told}", Console(stderr=True))


def _chosen(runs: Sequence[RunResult], name: str | None, run_file: Path) -> list[RunResult]:
    """The run of that name; without one those that decided something, or else those that could have.

    Raises UserError where there is no such run, or its server told no events.
    """
    names = ", ".join(r.name for r in runs)
    if not runs:
        raise UserError(f"{run_file} holds no run")
    named = [r for r in runs if name is None or r.name == name]
    if not named:
        raise UserError(f"{run_file}: no run named {name!r} (runs: {names})")
    with_log = [r for r in named if r.events.get("log") is not None]
    if not with_log:
        missing = "no run with an event log" if name is None else f"run {name!r} has no event log"
        raise UserError(f"{run_file}: {missing}: its server did not tell what it decided (runs: {names})")
    return [r for r in with_log if r.events["log"]] or with_log

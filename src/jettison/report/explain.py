"""Decisions and incidents of a run for people (a terminal) and for programs (JSON)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from jettison.report.brief import brief_conditions
from jettison.report.decisions import Decision, decisions_of
from jettison.report.incidents import Comparison, Incident
from jettison.report.offlinework import harvested_tokens, has_offline_work, seconds_by_reason, stood_still
from jettison.report.results import RunResult
from jettison.report.summary import fairness_rows, format_number, format_value
from jettison.report.terminal import print_fitted, print_line, print_whole

MAX_ROWS = 200
"""Rows shown in a terminal; the JSON has every decision."""

FOLDED = ("rebalance", "migrate", "pack", "give up step", "preempt")
"""Frequent kinds of decisions about one or a few requests each, folded into shared rows."""


def format_field(name: str, value: Any) -> str:
    """``freed_bytes=1048576`` -> ``freed 1 MiB``: the unit from the name's end.

    ``stay_request_s=265.6`` -> ``stay 265.6 request-seconds``.
    """
    words = name.split("_")
    label, stem, unit = " ".join(words), " ".join(words[:-1]), words[-1]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{label} {_listed(value)}"
    if words[-2:] == ["request", "s"]:
        return f"{' '.join(words[:-2])} {format_number(float(value))} request-seconds"
    if unit == "s" and stem:
        return f"{stem} {format_value(float(value), 's')}"
    if unit == "ms":
        return f"{stem} {format_value(float(value) / 1e3, 's')}".strip()
    if "bytes" in words:
        return f"{label} {format_number(value / 2**20)} MiB"
    return f"{label} {format_number(value)}" if isinstance(value, float) else f"{label} {value:,}"


def _listed(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_listed(v)}" for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_listed(item) for item in value)
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _fields(fields: Mapping[str, Any]) -> str:
    """A line each, for ``rich``."""
    return escape("\n".join(format_field(name, value) for name, value in fields.items())) or "-"


def explain_document(
    run: RunResult, incidents: Sequence[Incident], slo_ttft_s: float, warning: str | None = None,
    whole: Comparison | None = None, compared: Sequence[RunResult] = (),
) -> dict[str, Any]:
    """The explanation as JSON: ``decisions``, ``offline_stood_still``, ``incidents``, the objective, ``whole_run``
    (null where there are incidents or nothing was simulated), ``simulation_warning`` (null where there is none), and
    ``conditions``: the fairness header of the run and of each of ``compared`` as (label, value) rows."""
    return {
        "run": run.name,
        "slo_ttft_s": slo_ttft_s,
        "decisions": [asdict(d) for d in decisions_of(run)],
        "offline_stood_still": [asdict(stood) for stood in stood_still(run)],
        "incidents": [_with_saved(incident) for incident in incidents],
        "whole_run": None if whole is None else _with_saved(whole),
        "simulation_warning": warning,
        "conditions": {other.name: fairness_rows(other) for other in (run, *compared)} if compared else {},
    }


def _with_saved(found: Comparison) -> dict[str, Any]:
    return asdict(found) | {"saved": {c.policy: found.num_saved(c.policy) for c in found.counterfactuals}}


def print_decisions(decisions: Sequence[Decision], console: Console, *, folds: bool = True) -> None:
    """Print a row for each decision: time, kind, inputs, prediction, outcome.

    ``folds``: consecutive moves of single requests share a row.
    """
    table = Table(header_style="bold", show_lines=True)
    for header in ("at, s", "decision", "inputs", "predicted", "outcome"):
        table.add_column(header, no_wrap=header == "at, s", overflow="fold")
    rows = _folded(decisions) if folds else [[decision] for decision in decisions]
    for same in rows[:MAX_ROWS]:
        table.add_row(*(_row(same[0]) if len(same) == 1 else _shared_row(same)))
    print_whole(table, console)
    if len(rows) > MAX_ROWS:
        left_out = sum(map(len, rows[MAX_ROWS:]))
        console.print(f"{left_out} more are in the JSON", style="dim")


def _folded(decisions: Sequence[Decision]) -> list[list[Decision]]:
    """Decisions in groups: consecutive ones of a kind in ``FOLDED`` share a group."""
    rows: list[list[Decision]] = []
    for decision in decisions:
        if rows and decision.kind in FOLDED and rows[-1][0].kind == decision.kind:
            rows[-1].append(decision)
        else:
            rows.append([decision])
    return rows


def _row(decision: Decision) -> list[str]:
    where = "" if decision.group is None else f"\ngroup {decision.group}"
    if decision.workers:
        where += f"\nworkers {', '.join(map(str, decision.workers))}"
    return [
        f"{decision.at_s:.3f}", decision.kind + where, _fields(decision.inputs), _fields(decision.predicted),
        _fields(decision.outcome),
    ]


def _shared_row(same: Sequence[Decision]) -> list[str]:
    """The row of several moves: the number of requests, why they moved, and their destinations."""
    num_requests = sum(_num_moved(decision) for decision in same)
    homes: set[Any] = set()
    for decision in same:
        to = decision.inputs.get("to", decision.inputs.get("destination"))
        homes |= set(to) if isinstance(to, list | tuple) else {to} - {None}
    inputs: dict[str, Any] = {"requests": num_requests}
    if homes:
        inputs["to"] = sorted(homes, key=str)
    if reasons := dict.fromkeys(d.inputs["reason"] for d in same if "reason" in d.inputs):
        inputs["reason"] = list(reasons)
    when = f"{same[0].at_s:.3f} to\n{same[-1].at_s:.3f}"
    return [when, f"{same[0].kind}, {len(same)} times", _fields(inputs), "-", "-"]


def _num_moved(decision: Decision) -> int:
    found = decision.inputs.get("requests", 1)
    return found if isinstance(found, int) else 1


def print_incident(
    incident: Incident, number: int, slo_ttft_s: float, console: Console, warning: str | None = None
) -> None:
    """Print the card of one overload. ``warning``: a line on the simulated figures on it."""
    trigger = incident.trigger
    long_s = format_value(incident.end_s - incident.begin_s, "s")
    until = f"{incident.end_s:.2f} s" if incident.is_over else f"the end of the run ({incident.end_s:.2f} s)"
    workers = f"; workers {', '.join(map(str, incident.workers))}" if incident.workers else ""
    lines = [f"[b]When[/b]     {incident.begin_s:.2f} s to {until}, {long_s} long{workers}"]
    if incident.kind == "drop":
        lines += _drop_lines(incident)
    elif incident.kind == "no drop":
        told = {name: value for name, value in trigger.inputs.items() if name not in ("reason", "because")}
        lines += [
            f"[b]Trigger[/b]  {_inline(told)}", f"[b]Foreseen[/b] {_inline(trigger.predicted)}",
            f"[b]Done[/b]     no drop: {escape('; '.join(reasons_of(incident.declined)))}",
        ]
    else:
        lines += [f"[b]Trigger[/b]  {_inline(trigger.inputs)}", f"[b]Done[/b]     {_inline(trigger.outcome)}"]
    if incident.most_waiting is None:
        lines.append("[b]Requests[/b] not in the file one by one")
    else:
        lines += _request_lines(incident, incident.most_waiting, slo_ttft_s)
    for other in incident.counterfactuals:
        lines.append(
            f"[b]Compare[/b]  {escape(other.policy)}: TTFT P50 {format_value(other.p50_ttft_s, 's')}, P99 "
            f"{format_value(other.p99_ttft_s, 's')}; {other.num_over_slo} over{_saved(incident, other.policy)}"
        )
    if warning is not None:
        lines.append(f"[b]Warning[/b]  {escape(warning)}")
    title = f"incident {number}: {_TITLES[incident.kind]}"
    console.print(Panel("\n".join(lines), title=title, title_align="left"))


_TITLES = {"drop": "layers dropped", "no drop": "no drop", "wait": "late requests"}


def _request_lines(incident: Incident, most_waiting: int, slo_ttft_s: float) -> list[str]:
    return [
        f"[b]Waiting[/b]  up to {most_waiting:,} at one time for their first token",
        f"[b]Requests[/b] {incident.num_arrivals} arrived: TTFT P50 {format_value(incident.p50_ttft_s, 's')}, "
        f"P99 {format_value(incident.p99_ttft_s, 's')}; {incident.num_over_slo} over {format_value(slo_ttft_s, 's')}",
    ]


def _drop_lines(incident: Incident) -> list[str]:
    trigger = incident.trigger
    lines = [f"[b]Trigger[/b]  {_inline(trigger.inputs)}", f"[b]Foreseen[/b] {_inline(trigger.predicted)}"]
    if trigger.plan:
        lines.append(f"[b]Plan[/b]     {format_plan(trigger.plan)}")
    lines.append(f"[b]Done[/b]     {_inline(trigger.outcome)}")
    if len(incident.drops) > 1:
        lines.append(f"         and {len(incident.drops) - 1} more drops before it was over")
    for drop in incident.drops[1:]:
        if drop.plan:
            lines.append(f"         at {drop.at_s:.2f} s {format_plan(drop.plan)}")
    lines.append(f"[b]Freed[/b]    {format_number(incident.bytes_freed / 2**20)} MiB of parameters for KV cache")
    return lines


def format_plan(merges: Sequence[Mapping[str, Any]]) -> str:
    """The merges in words: ``groups 0, 1: worker 1 layers 0 to 2, worker 0 layers 3 to 5``; both layer numbers are
    inclusive, from 0."""
    return "; ".join(
        f"groups {_listed(merge['groups'])}: " + ", ".join(
            f"worker {stage['worker']} layers {stage['layers'][0]} to {stage['layers'][1] - 1}"
            for stage in merge["stages"]
        )
        for merge in merges
    )


def reasons_of(declined: Sequence[Decision]) -> list[str]:
    """The reasons against a drop, each once, with its groups."""
    groups: dict[str, set[int]] = {}
    for decision in declined:
        if decision.kind == "drop":
            reason = f"a drop failed: {decision.outcome.get('failed', 'the log ends before it')}"
        else:
            said = (decision.inputs.get("reason"), decision.inputs.get("because"))
            reason = ": ".join(str(part) for part in said if part is not None) or "not in the log"
        groups.setdefault(reason, set()).update(() if decision.group is None else (decision.group,))
    return [
        reason + (f" (group{'s' if len(found) > 1 else ''} {_listed(sorted(found))})" if found else "")
        for reason, found in groups.items()
    ]


def print_why_offline(run: RunResult, console: Console) -> None:
    """Print when offline work stood still, and why: seconds by reason, then each time with the inputs of the reason."""
    if not has_offline_work(run):
        console.print("no request of this run was offline")
        return
    stood = stood_still(run)
    if (harvested := harvested_tokens(run)) is not None:
        print_line(f"harvested while requests arrived: {harvested:,.0f} tokens", console)
    if not stood:
        console.print("offline work never stood still for longer than steps and copies take")
        return
    for reason, seconds in seconds_by_reason(run, stood).items():
        print_line(f"stood still for {format_value(seconds, 's')}: {reason}", console)
    table = Table(header_style="bold", show_lines=True)
    for header in ("from, s", "to, s", "what", "why", "by these numbers"):
        table.add_column(header, no_wrap=header.endswith("s"), overflow="fold")
    for each in stood[:MAX_ROWS]:
        until = "the end" if each.end_s is None else f"{each.end_s:.3f}"
        group = "no group" if each.group is None else f"group {each.group}"
        what = group if each.request is None else f"{group}\nrequest {escape(each.request)}"
        table.add_row(f"{each.begin_s:.3f}", until, what, each.reason, _fields(each.inputs))
    print_whole(table, console)
    if len(stood) > MAX_ROWS:
        console.print(f"{len(stood) - MAX_ROWS} more are in the JSON", style="dim")


def print_whole_run(
    whole: Comparison, slo_ttft_s: float, console: Console, warning: str | None = None
) -> None:
    """Print the figures of all requests of a run without an overload, here and under other policies."""
    console.print("no overload; all requests of the run:")
    table = Table(header_style="bold")
    for header in ("", "TTFT P50", "TTFT P99", f"over {format_value(slo_ttft_s, 's')}"):
        table.add_column(header, overflow="fold")
    rows = [("this run", whole.p50_ttft_s, whole.p99_ttft_s, f"{whole.num_over_slo} of {whole.num_arrivals}")]
    rows += [
        (other.policy, other.p50_ttft_s, other.p99_ttft_s, f"{other.num_over_slo}{_saved(whole, other.policy)}")
        for other in whole.counterfactuals
    ]
    for name, p50, p99, over in rows:
        table.add_row(escape(name), format_value(p50, "s"), format_value(p99, "s"), over)
    print_whole(table, console)
    if warning is not None:
        console.print(f"warning: {escape(warning)}", soft_wrap=True)


def print_conditions(run: RunResult, compared: Sequence[RunResult], console: Console) -> None:
    """Print the conditions that the cards' comparisons depend on: the run's, and those of the compared runs."""
    for line in brief_conditions([(other, other) for other in (run, *compared)]):
        if not (run.config.get("simulated") and line.startswith("client lag")):
            print_fitted(line, console, "dim")


def _saved(found: Comparison, policy: str) -> str:
    """A text on the requests that the run saved, or lost, against a policy; empty where that is not known."""
    saved = found.num_saved(policy)
    if saved is None:
        return ""
    return f", so {saved} saved" if saved >= 0 else f": here {-saved} more over"


def _inline(fields: Mapping[str, Any]) -> str:
    """In one line, for ``rich``."""
    return escape("; ".join(format_field(name, value) for name, value in fields.items())) or "not in the log"

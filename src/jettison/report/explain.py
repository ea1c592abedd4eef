"""Decisions and incidents of a run for people (a terminal) and for programs (JSON)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from jettison.report.decisions import Decision, Incident, decisions_of
from jettison.report.results import RunResult
from jettison.report.summary import format_number, format_value
from jettison.report.terminal import print_whole

MAX_ROWS = 200
"""Rows shown in a terminal; the JSON has every decision."""

FOLDED = ("rebalance", "migrate")
"""Kinds of which there are many, each about one or a few requests."""


def format_field(name: str, value: Any) -> str:
    """``freed_bytes=1048576`` -> ``freed 1 MiB``: the unit from the name's end."""
    words = name.split("_")
    label, stem, unit = " ".join(words), " ".join(words[:-1]), words[-1]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{label} {_listed(value)}"
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
    return "\n".join(format_field(name, value) for name, value in fields.items()) or "-"


def explain_document(run: RunResult, incidents: Sequence[Incident], warning: str | None = None) -> dict[str, Any]:
    """The same as JSON: ``decisions``, ``incidents`` and ``simulation_warning`` (null where there is none)."""
    return {
        "run": run.name,
        "decisions": [asdict(d) for d in decisions_of(run)],
        "incidents": [
            asdict(i) | {"saved": {c.policy: i.num_saved(c.policy) for c in i.counterfactuals}} for i in incidents
        ],
        "simulation_warning": warning,
    }


def print_decisions(decisions: Sequence[Decision], console: Console, *, folds: bool = True) -> None:
    """One row a decision: when, what, from which inputs, what was predicted, what came of it.

    ``folds``: moves of single requests that follow each other share a row.
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
    """Neighbours of one kind together, where the kind is one of ``FOLDED``."""
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
    """Of several moves: how many requests went, and where to."""
    num_requests = sum(_num_moved(decision) for decision in same)
    homes: set[Any] = set()
    for decision in same:
        to = decision.inputs.get("to", decision.inputs.get("destination"))
        homes |= set(to) if isinstance(to, list | tuple) else {to} - {None}
    inputs: dict[str, Any] = {"requests": num_requests}
    if homes:
        inputs["to"] = sorted(homes, key=str)
    when = f"{same[0].at_s:.3f} to\n{same[-1].at_s:.3f}"
    return [when, f"{same[0].kind}, {len(same)} times", _fields(inputs), "-", "-"]


def _num_moved(decision: Decision) -> int:
    found = decision.inputs.get("requests", 1)
    return found if isinstance(found, int) else 1


def print_incident(
    incident: Incident, number: int, slo_ttft_s: float, console: Console, warning: str | None = None
) -> None:
    """The card of one overload. ``warning``: what to tell of the simulated figures on it."""
    trigger = incident.trigger
    until = f"{incident.end_s:.2f} s" if incident.is_over else f"the end of the run ({incident.end_s:.2f} s)"
    lines = [
        f"[b]When[/b]     {incident.begin_s:.2f} s to {until}; workers {', '.join(map(str, incident.workers))}",
        f"[b]Trigger[/b]  {_inline(trigger.inputs)}",
        f"[b]Foreseen[/b] {_inline(trigger.predicted)}",
        f"[b]Done[/b]     {_inline(trigger.outcome)}",
    ]
    if len(incident.drops) > 1:
        lines.append(f"         and {len(incident.drops) - 1} more drops before it was over")
    lines.append(f"[b]Freed[/b]    {format_number(incident.bytes_freed / 2**20)} MiB of parameters for KV cache")
    lines.append(
        f"[b]Requests[/b] {incident.num_arrivals} arrived: TTFT P50 {format_value(incident.p50_ttft_s, 's')}, "
        f"P99 {format_value(incident.p99_ttft_s, 's')}; {incident.num_over_slo} over {format_value(slo_ttft_s, 's')}"
    )
    for other in incident.counterfactuals:
        lines.append(
            f"[b]Compare[/b]  {other.policy}: TTFT P50 {format_value(other.p50_ttft_s, 's')}, P99 "
            f"{format_value(other.p99_ttft_s, 's')}; {other.num_over_slo} over{_saved(incident, other.policy)}"
        )
    if warning is not None:
        lines.append(f"[b]Warning[/b]  {escape(warning)}")
    console.print(Panel("\n".join(lines), title=f"incident {number}", title_align="left"))


def _saved(incident: Incident, policy: str) -> str:
    """What the run spared its requests, or cost them, against a policy; empty where that cannot be told."""
    saved = incident.num_saved(policy)
    if saved is None:
        return ""
    return f", so {saved} saved" if saved >= 0 else f": here {-saved} more over"


def _inline(fields: Mapping[str, Any]) -> str:
    return "; ".join(format_field(name, value) for name, value in fields.items()) or "not in the log"

"""When offline work stood still in a run, and why, from its event log; and what was given up for online requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jettison.report.classes import class_figure
from jettison.report.results import RunResult

Subject = tuple[int | None, str | None]
_TOLD = ("t", "kind", "group", "request", "reason", "stood_ms")


@dataclass(slots=True)
class Stood:
    """A time without a first-time token, as long as it had one reason."""

    begin_s: float
    end_s: float | None
    """None: until the end of the run."""
    group: int | None
    """None: no worker could take it."""
    request: str | None
    """None: all of the group's. Else the one that was next of its key's, while others were served."""
    reason: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """What the reason went by, when it was told."""


def stood_still(run: RunResult) -> list[Stood]:
    """By their beginnings; empty where the log has none."""
    found: list[Stood] = []
    open_now: dict[Subject, Stood] = {}
    for event in run.events.get("log") or []:
        if event["kind"] not in ("offline_stands", "offline_goes_on"):
            continue
        subject = (event.get("group"), event.get("request"))
        before = open_now.pop(subject, None)
        if before is not None:
            before.end_s = event["t"]
        if event["kind"] == "offline_stands":
            begin_s = event["t"] if before is not None else event["t"] - event["stood_ms"] / 1e3
            inputs = {name: value for name, value in event.items() if name not in _TOLD}
            stood = open_now[subject] = Stood(begin_s, None, *subject, event["reason"], inputs)
            found.append(stood)
    return sorted(found, key=lambda stood: stood.begin_s)


def seconds_by_reason(run: RunResult, stood: Sequence[Stood]) -> dict[str, float]:
    """Of whole groups, summed over them, the longest first."""
    total: dict[str, float] = {}
    for each in stood:
        if each.request is None:
            total[each.reason] = total.get(each.reason, 0.0) + _end_s(run, each) - each.begin_s
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _end_s(run: RunResult, stood: Stood) -> float:
    return max(stood.begin_s, run.duration_s) if stood.end_s is None else stood.end_s


def pauses(run: RunResult) -> list[tuple[float, float | None]]:
    """When groups had stopped their offline work: begin and end, None where the run ended before it."""
    found: list[tuple[float, float | None]] = []
    begun: dict[int, float] = {}
    for event in run.events.get("log") or []:
        if event["kind"] == "offline_paused":
            begun[event["group"]] = event["t"]
        elif event["kind"] == "offline_resumed":
            found.append((begun.pop(event["group"], event["t"] - event.get("ms", 0.0) / 1e3), event["t"]))
    return sorted([*found, *((begin_s, None) for begin_s in begun.values())], key=lambda pause: pause[0])


def abandoned_at(run: RunResult) -> list[float]:
    """When steps were given up."""
    return [event["t"] for event in run.events.get("log") or [] if event["kind"] == "step_abandoned"]


def has_offline_work(run: RunResult) -> bool:
    """Some offline request was sent, or a batch was to run beside the load."""
    return run.classes is not None


def harvested_tokens(run: RunResult) -> float | None:
    """Offline tokens that were computed for the first time inside the arrival window."""
    parts = [class_figure(run, "offline", "tokens", kind) for kind in ("prompt", "output")]
    return None if None in parts else sum(part for part in parts if part is not None)

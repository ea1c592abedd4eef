"""A day served in two ways: a table of the figures of each, and the events of each phase from the event log.

``jettison demo`` plays it. Pure; the picture is ``report.plots``'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jettison.report.bill import awake_of
from jettison.report.results import RunResult, percentile
from jettison.report.summary import format_value

MOST_DEVICE_SECONDS = 0.7
"""Goal of a day: device-seconds as a share of the baseline's."""

Event = dict[str, Any]


class PhaseSpan(NamedTuple):
    """A named part of the day, in seconds since its start."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class DayFigures:
    """The figures of one run of a day."""

    p99_ttft_s: float | None
    """P99 TTFT of online requests."""
    num_done: int
    """Answered lines of the batch."""
    num_lines: int
    batch_end_s: float | None
    """Time of the last answer of the batch; None where a line has no answer."""
    device_s: float
    """Awake instances over time, in device-seconds, until the run's last answer or the end of the day, whichever is
    later."""


def day_figures(run: RunResult, day_s: float) -> DayFigures:
    """The figures of a run. ``day_s``: duration of the arrivals. Raises ValueError for a run that does not record its
    number of instances."""
    awake = awake_of(run)
    if awake is None:
        raise ValueError(f"the run {run.name!r} does not say how many instances it had")
    offline = (run.classes or {}).get("offline", {})
    counts = offline.get("requests") or {}
    ends = [row["scheduled_s"] + row["e2e_s"] for row in offline.get("requests_detail") or () if row["e2e_s"]]
    num_done, num_lines = counts.get("completed", 0), counts.get("submitted", 0)
    end_s = max(day_s, run.duration_s, *ends)
    return DayFigures(
        run.ttft_s.p99, num_done, num_lines, max(ends, default=None) if num_done == num_lines else None,
        awake.device_s(end_s),
    )  # fmt: skip


def day_rows(baseline: DayFigures, day: DayFigures) -> list[list[str]]:
    """Cells of the table: label, the baseline's figure, the day's, and the day's over the baseline's."""
    rows: list[tuple[str, str, str, float | None]] = [
        ("P99 TTFT", format_value(baseline.p99_ttft_s, "s"), format_value(day.p99_ttft_s, "s"),
         _over(day.p99_ttft_s, baseline.p99_ttft_s)),
        ("batch lines done", _done(baseline), _done(day), None),
        ("batch done at", format_value(baseline.batch_end_s, "s"), format_value(day.batch_end_s, "s"), None),
        ("device-seconds", f"{baseline.device_s:.0f}", f"{day.device_s:.0f}", _over(day.device_s, baseline.device_s)),
    ]  # fmt: skip
    return [[label, base, own, "" if over is None else f"{over:.2f}"] for label, base, own, over in rows]


def missed_goals(baseline: DayFigures, day: DayFigures) -> list[str]:
    """Goals of the day that were missed, a line each: device-seconds, first tokens no later, all lines done."""
    missed = []
    over = _over(day.device_s, baseline.device_s)
    if over is not None and over > MOST_DEVICE_SECONDS:
        missed.append(f"device-seconds are {over:.2f} of the baseline's, more than {MOST_DEVICE_SECONDS:g}")
    if day.p99_ttft_s is not None and baseline.p99_ttft_s is not None and day.p99_ttft_s > baseline.p99_ttft_s:
        missed.append("99 of 100 first tokens came later than in the baseline")
    if day.num_done < day.num_lines:
        missed.append(f"{day.num_lines - day.num_done} of {day.num_lines} lines of the batch were not done")
    return missed


def day_opening(baseline: DayFigures, day: DayFigures) -> str:
    """The report's first sentence."""
    over = _over(day.device_s, baseline.device_s)
    share = "" if over is None else f" ({over:.0%})"
    return (
        f"The same day took {day.device_s:.0f} instead of {baseline.device_s:.0f} device-seconds{share}; 99 of 100 "
        f"first tokens came within {format_value(day.p99_ttft_s, 's')} instead of "
        f"{format_value(baseline.p99_ttft_s, 's')}; {_done(day)} lines of the batch were done, and {_done(baseline)} "
        "in the baseline."
    )


def _done(figures: DayFigures) -> str:
    return f"{figures.num_done} of {figures.num_lines}"


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


# --- what happened when -----------------------------------------------------------------------------------------------

_STORY = {
    "asleep": ("fell asleep", "worker"), "woken": ("woke", "worker"), "drop": ("dropped layers", "workers"),
    "restore_done": ("had them back", "workers"), "instance_asked": ("was asked for", "worker"),
    "instance_released": ("gave its process back", "worker"),
}
"""Kind of event -> the phrase for its instances, and the field that names them."""


def story_rows(runs: Sequence[RunResult], phases: Sequence[PhaseSpan]) -> list[list[str]]:
    """A row for each phase of each run: phase, run, P99 TTFT of the requests that arrived in it, their number, and the
    events."""
    rows = []
    for phase in phases:
        for run in runs:
            events = [e for e in run.log() if _is_in(e["t"], phase, phases)]
            found = [
                row["ttft_s"] for row in run.requests_detail or ()
                if row["ttft_s"] is not None and _is_in(row["scheduled_s"], phase, phases)
            ]
            tail = percentile(found, 99.0)
            span = f"{phase.name}, {phase.start_s:g} to {phase.end_s:g} s"
            rows.append([span, run.name, str(len(found)), format_value(tail, "s"), told(events)])
    return rows


def told(events: Sequence[Event]) -> str:
    """The events in words, in their order; packed requests are given as a number."""
    parts = [
        f"{event['t']:.1f} s: {_instances(event[field])} {what}"
        for event in events
        if (known := _STORY.get(event["kind"])) is not None
        for what, field in (known,)
    ]
    moved = sum(event["kind"] == "migrated" for event in events)
    if moved:
        parts.append(f"{moved} request{'s' * (moved != 1)} moved to pack them")
    return "; ".join(parts) or "nothing"


def _is_in(at_s: float, phase: PhaseSpan, phases: Sequence[PhaseSpan]) -> bool:
    """Whether a time is in a phase; a time after the last phase counts for that phase."""
    return phase.start_s <= at_s < (math.inf if phase == phases[-1] else phase.end_s)


def _instances(named: Any) -> str:
    ids = named if isinstance(named, list | tuple) else [named]
    return f"instance{'s' * (len(ids) > 1)} {' and '.join(map(str, ids))}"

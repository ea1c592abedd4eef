"""Standstills of offline work in a run, with their reasons, from its event log; and the work abandoned for online
requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jettison.report.classes import TOKEN_KINDS, class_figure, grown, total_per_s
from jettison.report.results import RunResult
from jettison.report.summary import format_count, format_value

Subject = tuple[int | None, str | None]
_TOLD = ("t", "kind", "group", "request", "reason", "stood_ms")


@dataclass(slots=True)
class Stood:
    """A span without first-time offline tokens, for one reason."""

    begin_s: float
    end_s: float | None
    """End of the span; None: it lasted until the end of the run."""
    group: int | None
    """The group; None: no worker could take offline work."""
    request: str | None
    """None: all offline work of the group stood still. Else the next request of a key, while others were served."""
    reason: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Inputs of the reason, as logged."""


def stood_still(run: RunResult) -> list[Stood]:
    """All standstills, by begin; empty where the log has none."""
    found: list[Stood] = []
    open_now: dict[Subject, Stood] = {}
    for event in run.log("offline_stands", "offline_goes_on"):
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
    """Seconds of standstill of whole groups by reason, summed over groups, the longest first."""
    total: dict[str, float] = {}
    for each in stood:
        if each.request is None:
            total[each.reason] = total.get(each.reason, 0.0) + _end_s(run, each) - each.begin_s
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _end_s(run: RunResult, stood: Stood) -> float:
    return max(stood.begin_s, run.duration_s) if stood.end_s is None else stood.end_s


def pauses(run: RunResult) -> list[tuple[float, float | None]]:
    """Pauses of offline work of groups: begin and end; end None where the run ended first."""
    found: list[tuple[float, float | None]] = []
    begun: dict[int, float] = {}
    for event in run.log("offline_paused", "offline_resumed"):
        if event["kind"] == "offline_paused":
            begun[event["group"]] = event["t"]
        else:
            found.append((begun.pop(event["group"], event["t"] - event.get("ms", 0.0) / 1e3), event["t"]))
    return sorted([*found, *((begin_s, None) for begin_s in begun.values())], key=lambda pause: pause[0])


def abandoned_at(run: RunResult) -> list[float]:
    """Times of abandoned steps."""
    return [event["t"] for event in run.log("step_abandoned")]


def has_offline_work(run: RunResult) -> bool:
    """Whether the run had offline work: an offline request of its client, or any batch beside the load, its own or
    another client's."""
    return run.classes is not None or bool(_grown_beside(run))


def harvested_tokens(run: RunResult) -> float | None:
    """Offline tokens computed for the first time inside the arrival window; over the whole run, where other clients had
    sent the batch."""
    if run.classes is None:
        return _grown_beside(run) or None
    parts = [class_figure(run, "offline", "tokens", kind) for kind in TOKEN_KINDS]
    return None if None in parts else sum(part for part in parts if part is not None)


def _grown_beside(run: RunResult) -> float:
    """The growth of the server's count of offline tokens; 0 for a server without one."""
    series = (run.series.get(f"offline_{kind}_tokens", ()) for kind in TOKEN_KINDS)
    return sum(grown(points, 0.0, run.duration_s) or 0.0 for points in series)


# --- rows of the HTML report: a label, then each run's figure

Figure = Callable[[RunResult], str]


def _of_class(name: str, *keys: str) -> Figure:
    return lambda run: format_value(class_figure(run, name, *keys), "")


def _share(*keys: str) -> Figure:
    def shown(run: RunResult) -> str:
        value = class_figure(run, "online", *keys)
        return "-" if value is None else f"{value:.1%}"

    return shown


def _event(*names: str) -> Figure:
    """A figure of several counts; '-' where a run's engine does not count them."""
    return lambda run: " / ".join(format_count(run.events.get(name)) for name in names)


_CLASS_ROWS: tuple[tuple[str, Figure], ...] = (
    ("online: P50 and P99 of TTFT", lambda run: _pair(run, "ttft_s")),
    ("online: P50 and P99 of every gap between tokens", lambda run: _pair(run, "itl_s")),
    ("online: first tokens within the objective", _share("ttft_within")),
    ("online: gaps within the objective", _share("gaps_within")),
    ("online: requests that kept both, in every gap", _share("requests_within")),
    ("online: first-time tokens/s", _of_class("online", "tokens", "total_per_s")),
    ("offline: first-time tokens/s, harvested", _of_class("offline", "tokens", "total_per_s")),
    ("offline: of them output tokens/s", _of_class("offline", "tokens", "output_per_s")),
    ("offline: requests completed", _of_class("offline", "requests", "completed")),
    ("both: first-time tokens/s", lambda run: format_value(total_per_s(run), "")),
)

_GIVEN_UP_ROWS: tuple[tuple[str, Figure], ...] = (
    ("steps given up for an arrival / their tokens", _event("steps_abandoned", "tokens_abandoned")),
    ("steps that shed their offline part for an arrival / times that such parts went on",
     _event("steps_shed", "slices_resumed")),
    ("such parts given up / their tokens", _event("slices_discarded", "tokens_discarded")),
    ("requests freed at once, as host memory had a copy / their tokens that were computed again",
     _event("checkpoint_frees", "freed_recomputed_tokens")),
    ("requests that lost all that they had computed", _event("offline_discards")),
    ("copies dropped: for others, or as the link was slower than computing", _event("checkpoints_dropped")),
    ("blocks copied to host memory / brought back", _event("checkpointed_blocks", "prefetched_blocks")),
    ("times that nothing could run but what was on its way back", _event("prefetch_stalls")),
    ("pauses, as memory kept online requests out", _event("offline_pauses")),
)


def _pair(run: RunResult, field_name: str) -> str:
    return ", ".join(format_value(class_figure(run, "online", field_name, which), "s") for which in ("p50", "p99"))


def class_rows(runs: Sequence[RunResult]) -> list[list[str]]:
    """Rows of both classes."""
    return [[label, *map(figure, runs)] for label, figure in _CLASS_ROWS]


def given_up_rows(runs: Sequence[RunResult]) -> tuple[list[list[str]], list[str]]:
    """Rows on abandoned offline work and on standstills, for each reason in any of the runs; and the labels of rows
    that are 0 in all runs."""
    everything = [[label, *map(figure, runs)] for label, figure in _GIVEN_UP_ROWS]
    never = [row[0] for row in everything if all(set(cell) <= set("0-/ ") for cell in row[1:])]
    rows = [row for row in everything if row[0] not in never]
    stood = [seconds_by_reason(run, stood_still(run)) for run in runs]
    for reason in dict.fromkeys(reason for each in stood for reason in each):
        rows.append([f"stood still: {reason}", *(format_value(each.get(reason, 0.0), "s") for each in stood)])
    return rows, never


def objectives_told(runs: Sequence[RunResult]) -> list[str]:
    """The objectives of online requests, in words; empty where there are none."""
    found = dict.fromkeys(
        f"TTFT {format_value(run.goodput['slo_ttft_s'], 's')}, gap {format_value(run.goodput['slo_tpot_s'], 's')}"
        for run in runs if run.goodput is not None
    )
    return [f"Objectives: {'; '.join(found)}."] if found else []

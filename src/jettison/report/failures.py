"""Runs with unanswered requests: reported before any figure, and refused as results.

Percentiles cover answered requests only, and a server that dies early has answered the fastest ones. So the number of
missing answers comes first. Requests that the client cancelled are not failures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from jettison.errors import JettisonError
from jettison.report.results import RunResult, first_error
from jettison.report.terminal import print_line


def failure_lines(runs: Iterable[RunResult]) -> list[str]:
    """A line for each run with failures, in their order; none where every request was answered."""
    return [_line(run) for run in runs if run.requests.unanswered]


def _line(run: RunResult) -> str:
    requests = run.requests
    kinds = {"failed": requests.failed, "rejected": requests.rejected}
    how = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
    missing = f"{requests.unanswered:,} of {requests.submitted:,} requests were not answered ({how})"
    return f"{run.name}: {missing}{_because(first_error(run))}"


def _because(error: str | None) -> str:
    return f"; the first error: {' '.join(error.split())}" if error else ""


def print_failures(runs: Sequence[RunResult], console: Console) -> None:
    """Print the lines, unwrapped, if there are any. Call it before any figure is shown."""
    lines = failure_lines(runs)
    for line in lines:
        print_line(line, console, "bold red")
    if lines:
        print_line("figures are of what was answered: the rows that count requests say of how many", console, "red")


def check_answered(runs: Sequence[RunResult], allowed_share: float = 0.0) -> None:
    """Refuse runs in which more than this share of the requests was not answered, and runs without any answer.

    Raises JettisonError, one line that begins with the first such run. Call it after all results are printed and
    written.
    """
    for run in runs:
        requests = run.requests
        if not requests.completed:
            raise JettisonError(f"none of {requests.submitted:,} requests was answered{_because(first_error(run))}")
        if requests.unanswered > allowed_share * requests.submitted:
            raise JettisonError(_line(run))


def exit_if_unanswered(runs: Sequence[RunResult], console: Console) -> None:
    """The last call of a script that measures runs: if requests were not answered, print a line and exit with 1."""
    print_failures(runs, console)
    if any(run.requests.unanswered for run in runs):
        raise SystemExit(1)

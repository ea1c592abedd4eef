"""Cautions about a workload, shown to the user before it is used: rows that were left out, stamps of a doubtful unit,
hours without an arrival.

Notes list the changes made to a workload; a caution names something that may make it another experiment than the user
meant.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from rich.console import Console

from jettison.report.terminal import print_line, progress_console
from jettison.workload.rows import Workload

LONG_GAP_S = 3600.0
"""A gap without arrivals from this length on is told: it would be replayed, or simulated, for nothing."""

_NAMED_GAPS = 3


def cautions_of(workload: Workload) -> list[str]:
    """The cautions about a workload, one line each."""
    gaps = _gap_line(workload)
    return [*workload.skipped_rows, *workload.doubts, *([gaps] if gaps else [])]


def print_cautions(cautions: Iterable[str], console: Console) -> None:
    """Print the cautions, each once, where the progress of the following work is shown: on a terminal there, else on
    stderr."""
    shown = progress_console(console)
    for line in dict.fromkeys(cautions):
        print_line(f"mind: {line}", shown, "yellow")


def _gap_line(workload: Workload) -> str | None:
    """A line on the gaps of at least ``LONG_GAP_S`` from time zero to the last arrival: the longest few, in the order
    of time."""
    arrival_s = np.concatenate([[0.0], workload.columns.arrival_s])
    lengths_s = np.diff(arrival_s)
    long = np.flatnonzero(lengths_s >= LONG_GAP_S)
    if not len(long):
        return None
    named = np.sort(long[np.argsort(-lengths_s[long], kind="stable")][:_NAMED_GAPS])
    where = ", ".join(
        f"from {arrival_s[at]:,.0f} s to {arrival_s[at + 1]:,.0f} s ({lengths_s[at] / 3600.0:.1f} h)" for at in named
    )
    more = f", and {len(long) - len(named):,} shorter gaps of an hour or more" if len(long) > len(named) else ""
    return f"{workload.name}: no request arrives {where}{more}"

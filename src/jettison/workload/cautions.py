"""What a person should be told of a workload before it is used: rows that were left out, stamps whose unit is in doubt,
hours without an arrival.

Notes say what was done to a workload; a caution says what may make another experiment of it than was meant.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from rich.console import Console

from jettison.report.terminal import print_line, progress_console
from jettison.workload.rows import Workload

LONG_GAP_S = 3600.0
"""Without an arrival for so long: time that is replayed, or simulated, for nothing."""

_NAMED_GAPS = 3


def cautions_of(workload: Workload) -> list[str]:
    """One line each; empty where there is nothing to mind."""
    gaps = _gap_line(workload)
    return [*workload.skipped_rows, *workload.doubts, *([gaps] if gaps else [])]


def print_cautions(cautions: Iterable[str], console: Console) -> None:
    """Print them, each once, beside the progress of what follows: where that is seen, else on stderr."""
    shown = progress_console(console)
    for line in dict.fromkeys(cautions):
        print_line(f"mind: {line}", shown, "yellow")


def _gap_line(workload: Workload) -> str | None:
    """Where nothing arrives for ``LONG_GAP_S`` and more, from time zero to the last arrival: the longest few, in the
    order of time."""
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

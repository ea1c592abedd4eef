"""The display of long work: progress on a terminal, plain lines elsewhere, tables without cuts.

Figures go to a command's console (stdout). Progress goes there, too, if it is a terminal, else to stderr. Where neither
is a terminal (a log file, a CI pipeline), a plain line announces each phase, and further lines report the progress of
long ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress, ProgressColumn
from rich.status import Status
from rich.table import Table

_WIDEST = 10_000

LINE_EVERY_S = 10.0
"""Wall-clock time between two lines of progress."""


def progress_console(console: Console) -> Console:
    """The console for progress bars: ``console``, or stderr where that is no terminal."""
    return console if console.is_terminal else Console(stderr=True)


def note_phase(text: str, console: Console) -> None:
    """Print a plain line on stderr where no progress bar can be shown; else nothing."""
    shown = progress_console(console)
    if not shown.is_terminal:
        print_line(text, shown)


class PacedLines:
    """Progress as a plain line on stderr every ``LINE_EVERY_S``, where no progress bar can be shown; else nothing. Work
    shorter than that prints none."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = progress_console(console)
        self._clock = clock
        self._due_s = clock() + LINE_EVERY_S

    def offer(self, text: Callable[[], str]) -> None:
        """Print a line if one is due; ``text`` is called only then. Call this often."""
        if self._shown.is_terminal or self._clock() < self._due_s:
            return
        self._due_s = self._clock() + LINE_EVERY_S
        print_line(text(), self._shown)


def progress_bar(
    *columns: ProgressColumn, console: Console, refresh_per_second: float = 10.0, disable: bool = False
) -> Progress:
    """A bar that vanishes when the work is done, and prints nothing where no bar can be shown."""
    shown = progress_console(console)
    is_off = disable or not shown.is_terminal
    return Progress(
        *columns, console=shown, refresh_per_second=refresh_per_second, disable=is_off, transient=True
    )


@contextmanager
def spinner(text: str, console: Console) -> Iterator[Status]:
    """Show the current work with a spinner, where one can be shown; the caller may change the text meanwhile."""
    shown = progress_console(console)
    status = Status(text, console=shown)
    if not shown.is_terminal:
        yield status
        return
    with status:
        yield status


@contextmanager
def phase(text: str, console: Console) -> Iterator[Status]:
    """Show long work with a spinner, or with the text as one line where no spinner can be shown."""
    note_phase(text, console)
    with spinner(text, console) as status:
        yield status


def print_whole(table: Table, console: Console, *, never_folds: bool = False) -> None:
    """Print a table; without a terminal (with ``never_folds``: always) as wide as its cells."""
    if console.is_terminal and not never_folds:
        console.print(table)
        return
    table.width = Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
    console.print(table, crop=False, no_wrap=True, overflow="ignore")


def print_line(text: str, console: Console, style: str | None = None) -> None:
    """Print plain text that is never wrapped, for programs that read lines."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_fitted(text: str, console: Console, style: str | None = None) -> None:
    """Print one line, shortened to the width of a terminal if need be."""
    if console.is_terminal:
        console.print(text, style=style, markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
    else:
        print_line(text, console, style)

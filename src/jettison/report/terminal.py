"""What a person sees of long work: progress where a terminal is, plain lines where none is, tables that are whole.

Figures go to the console that a command was given (stdout). Progress goes to the same where it is a terminal, else to
stderr; where that is none either (a log file, a pipeline of CI), one line says what begins, and of what takes long
another one now and then how far it is.
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
"""Wall-clock time between two lines that say how far something is."""


def progress_console(console: Console) -> Console:
    """Where a progress bar is seen: ``console``, or stderr where that is no terminal."""
    return console if console.is_terminal else Console(stderr=True)


def note_phase(text: str, console: Console) -> None:
    """A plain line on stderr where no progress bar is seen; nothing where one is."""
    shown = progress_console(console)
    if not shown.is_terminal:
        print_line(text, shown)


class PacedLines:
    """How far something is, as a plain line on stderr every ``LINE_EVERY_S`` where no progress bar is seen; nothing
    where one is. What takes less time than that prints none."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = progress_console(console)
        self._clock = clock
        self._due_s = clock() + LINE_EVERY_S

    def offer(self, text: Callable[[], str]) -> None:
        """To be called often; ``text`` is asked for when a line is due."""
        if self._shown.is_terminal or self._clock() < self._due_s:
            return
        self._due_s = self._clock() + LINE_EVERY_S
        print_line(text(), self._shown)


def progress_bar(
    *columns: ProgressColumn, console: Console, refresh_per_second: float = 10.0, disable: bool = False
) -> Progress:
    """A bar that vanishes when it is done, and prints nothing at all where it would not be seen."""
    shown = progress_console(console)
    is_off = disable or not shown.is_terminal
    return Progress(
        *columns, console=shown, refresh_per_second=refresh_per_second, disable=is_off, transient=True
    )


@contextmanager
def spinner(text: str, console: Console) -> Iterator[Status]:
    """What happens now, where a spinner is seen; the text may be changed while it turns."""
    shown = progress_console(console)
    status = Status(text, console=shown)
    if not shown.is_terminal:
        yield status
        return
    with status:
        yield status


@contextmanager
def phase(text: str, console: Console) -> Iterator[Status]:
    """A spinner, or the text once as a line where no spinner is seen: for what takes long."""
    note_phase(text, console)
    with spinner(text, console) as status:
        yield status


def print_whole(table: Table, console: Console, *, never_folds: bool = False) -> None:
    """Print a table; where no terminal limits it (with ``never_folds``: anywhere), as wide as its cells are."""
    if console.is_terminal and not never_folds:
        console.print(table)
        return
    table.width = Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
    console.print(table, crop=False, no_wrap=True, overflow="ignore")


def print_line(text: str, console: Console, style: str | None = None) -> None:
    """Plain text that is never wrapped: one line for programs that read it."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_fitted(text: str, console: Console, style: str | None = None) -> None:
    """One line that a terminal may shorten, and nothing else."""
    if console.is_terminal:
        console.print(text, style=style, markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
    else:
        print_line(text, console, style)

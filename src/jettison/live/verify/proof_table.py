"""The table of ``jettison verify``: its rows, the file that has them as they come, and how it is printed.

Not here: what the events are, and in which order they are run (``live.verify.run``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jettison.device.reference import Reference
from jettison.live.verify.applicable import Lack
from jettison.live.verify.scenarios import Outcome
from jettison.report.output import write_whole
from jettison.report.terminal import print_whole


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    architecture: str
    event: str
    tokens_compared: int
    mismatches: int
    ties: int
    """Differences where both tokens' logits are a few ulps apart (never in float64): not a mismatch."""
    incomplete: int
    """Requests that ended early without being cancelled: what is missing was not compared."""
    happened: bool
    evidence: str
    applicable: bool = True
    """False: the model cannot have the event, and ``evidence`` says why."""
    lack: Lack | None = None
    """The same as one of the closed list; None where it is applicable."""
    in_parts: int = 0
    """Differences of requests that attended to KV elsewhere, counted apart where ``Conditions`` say so: no mismatch."""
    seconds: float | None = None
    """That the event and its comparison took; None where neither was tried."""

    @property
    def is_failed(self) -> bool:
        """It shows a fault, or it should have shown something and did not."""
        return self.applicable and bool(self.mismatches or self.incomplete or not self.happened)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all rows of a table have in common."""

    dtype: str
    reference: str
    kernels: str
    """The back end's own name."""
    max_model_len: int | None
    """Context that was served; None: the model's."""
    parts_apart: bool = False
    """Below float64, compared with each request alone: attention in parts adds in another order, and may differ."""


class ProofTable:
    """Rows as they come, each at once in the file."""

    def __init__(self, conditions: Conditions, path: Path | None) -> None:
        self.conditions = conditions
        self.rows: list[Row] = []
        self._path = path

    @property
    def is_proof(self) -> bool:
        """No row shows a fault, and some compared tokens: a table of what cannot be had proves nothing."""
        return not any(row.is_failed for row in self.rows) and any(row.tokens_compared for row in self.rows)

    def add(self, row: Row) -> None:
        """Count a row, and write all that there are. Raises OSError."""
        self.rows.append(row)
        self.write(is_complete=False)

    def write(self, *, is_complete: bool) -> None:
        """Replace the file in one go. Raises OSError."""
        if self._path is not None:
            document = self._document() | {"complete": is_complete}
            write_whole(self._path, json.dumps(document, indent=2, sort_keys=True) + "\n")

    def _document(self) -> dict[str, object]:
        rows = self.rows
        return asdict(self.conditions) | {
            "rows": [asdict(row) for row in rows],
            "tokens_compared": sum(r.tokens_compared for r in rows),
            "mismatches": sum(r.mismatches for r in rows),
            "in_parts": sum(r.in_parts for r in rows),
            "incomplete": sum(r.incomplete for r in rows),
            "not_applicable": sum(not r.applicable for r in rows),
            "failed": sum(r.is_failed for r in rows),
        }


def compare(
    architecture: str, event: str, outcome: Outcome, reference: Reference, *, parts_apart: bool = False
) -> Row:
    """Compare each request with the reference up to its first difference, and count those that are not whole.

    ``parts_apart``: see ``Conditions``.
    """
    problems = [r.problem for r in outcome.requests if r.problem]
    num_compared = mismatches = ties = in_parts = 0
    for request in outcome.requests:
        if not request.output:
            continue
        verdict = reference.check(request.prompt, request.output, request.grammar)
        num_compared += verdict.num_compared
        is_apart = parts_apart and request.was_live
        mismatches += verdict.is_mismatch and not is_apart
        in_parts += verdict.is_mismatch and is_apart
        ties += verdict.is_tie
    evidence = "; ".join([outcome.evidence, *problems[:1]])
    return Row(
        architecture, event, num_compared, mismatches, ties, len(problems), outcome.happened, evidence,
        in_parts=in_parts,
    )


def not_applicable(architecture: str, event: str, lack: Lack, sentence: str) -> Row:
    """The row of an event that the model cannot have."""
    return Row(architecture, event, 0, 0, 0, 0, happened=False, evidence=sentence, applicable=False, lack=lack)


def failed(architecture: str, event: str, error: Exception) -> Row:
    """The row of an event that ended with an error."""
    return Row(architecture, event, 0, 0, 0, 0, happened=False, evidence=f"{type(error).__name__}: {error}")


def print_table(console: Console, table: ProofTable) -> None:
    """All rows, and what they come to."""
    rows, conditions = table.rows, table.conditions
    drawn = Table(title=f"Tokens against {conditions.reference}, {conditions.dtype}, kernels {conditions.kernels}")
    for heading, justify in (
        ("architecture", "left"), ("event", "left"), ("tokens compared", "right"), ("mismatches", "right"),
        ("ties", "right"), ("evidence", "left"),
    ):
        drawn.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        mark = f"[red]{row.mismatches}[/red]" if row.mismatches else "0"
        numbers = (f"{row.tokens_compared:,}", mark, str(row.ties)) if row.applicable else ("", "", "")
        drawn.add_row(row.architecture, row.event, *numbers, _evidence(row))
    print_whole(drawn, console)
    total = sum(r.tokens_compared for r in rows)
    console.print(f"{total:,} tokens compared, {sum(r.mismatches for r in rows)} mismatches")
    if rows and not any(r.applicable for r in rows):
        console.print("[red]nothing was compared[/red]: this model can have none of the events here")
    if in_parts := sum(r.in_parts for r in rows):
        console.print(
            f"{in_parts} requests that attended to KV elsewhere (live) differ: parts of attention add in another order"
        )
    if missed := sum(r.applicable and not r.happened for r in rows):
        console.print(f"[red]{missed} of {len(rows)} events did not happen[/red]: their rows prove nothing")
    if cut := sum(r.incomplete for r in rows):
        console.print(f"[red]{cut} requests ended early[/red]: what they lack was not compared")
    if left_out := sum(not r.applicable for r in rows):
        console.print(f"{left_out} of {len(rows)} events are none that this model can have")


def _evidence(row: Row) -> str:
    text = escape(row.evidence)
    if not row.applicable:
        return f"not applicable, because {text}"
    if not row.happened:
        text = f"[red]did not happen:[/red] {text}"
    return f"[red]{row.incomplete} ended early:[/red] {text}" if row.incomplete else text

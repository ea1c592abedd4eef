"""The full page of a reproduction: every figure's rows beside the paper's, its plots and its conditions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jettison.report.plots import to_png
from papers.figure import Figure
from papers.pictures import DRAWING
from papers.registry import FIGURES
from papers.rows import Outcome, Row

DPI = 70
TOLD_IN = Path(__file__).with_name("setup.md")
"""How each figure is set up, and why ours differs, by the figure's name."""

_TITLE = "# The papers' figures, reproduced in virtual time"

_HEAD = """One figure: `jettison reproduce NAME`; all names: `jettison reproduce list`.
How the figures are set up, what stands in for what, and why rows lie outside of their bands: [setup.md]({told_in}).

A band is what reference figures of the papers were judged to allow beforehand, or the paper's own range; a row
without one is stated and not judged, nor is one that would hold because nothing dropped. Medians of the seeds, with
the range where there are several. Rows of which the papers state nothing are folded away below each table: they say
what memory and compute did meanwhile.
"""


def write_page(path: Path, outcomes: Mapping[str, Outcome], effort: str) -> None:
    """The page, and its pictures in a folder beside it. ``effort``: a sentence at its end on what it took. Raises
    OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told_in = os.path.relpath(TOLD_IN, path.resolve().parent)
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    is_all = all(name in outcomes or figure.is_long for name, figure in FIGURES.items())
    names = "all" if is_all else " ".join(outcomes)
    parts = [_TITLE, f"\nWritten by `jettison reproduce {names}`.", _HEAD.format(told_in=told_in), _summary(outcomes)]
    for name, outcome in outcomes.items():
        files = [f"{folder.name}/{file}" for file in save_pictures(folder, name, outcome)]
        parts.append(_section(FIGURES[name], outcome, files, told_in))
    parts.append(f"\n{effort}\n")
    path.write_text("\n".join(parts), encoding="utf-8")


def save_pictures(folder: Path, name: str, outcome: Outcome) -> list[str]:
    """Write the plots as PNG; their file names."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for what, picture in outcome.pictures.items():
        file = f"{name}-{what}.png"
        with DRAWING:
            png = to_png(picture, dpi=DPI)
        (folder / file).write_bytes(png)
        files.append(file)
    return files


def _summary(outcomes: Mapping[str, Outcome]) -> str:
    lines = [
        "## Summary", "",
        "| figure | rows judged | inside | not judged, as nothing dropped |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, outcome in outcomes.items():
        judged = [row.in_band for row in outcome.rows if row.in_band is not None]
        idle = sum(row.in_band is None and row.is_idle and row.claim.band is not None for row in outcome.rows)
        lines.append(f"| [{name}](#{name}) | {len(judged)} | {sum(judged)} | {idle or ''} |")
    missing = [name for name in FIGURES if name not in outcomes]
    if missing and len(missing) < len(outcomes):
        lines += ["", f"Not run for this page: {', '.join(missing)}."]
    return "\n".join([*lines, ""])


def _section(figure: Figure, outcome: Outcome, files: Sequence[str], told_in: str) -> str:
    lines = [f"## {figure.name}", "", f"{figure.title[0].upper()}{figure.title[1:]} ({figure.source})."]
    lines += [f"[Set-up and reasons]({told_in}#{figure.name})."]
    if figure.specs:
        specs = ", ".join(f"`{name}.yaml`" for name in figure.specs)
        lines += [f"Specs (`papers/specs/`): {specs}."]
    lines += ["", *table([row for row in outcome.rows if not row.is_beside])]
    for file in files:
        lines += ["", f"![{Path(file).stem}]({file})"]
    beside = [row for row in outcome.rows if row.is_beside]
    if beside:
        lines += ["", "<details><summary>Measured beside it</summary>", "", *table(beside), "", "</details>"]
    lines += ["", "<details><summary>Conditions</summary>", ""]
    for workload, rows in outcome.conditions.items():
        lines += [f"**{workload}**", "", *(f"- {label}: {value}" for label, value in rows), ""]
    return "\n".join([*lines, "</details>", ""])


def table(rows: Sequence[Row]) -> list[str]:
    """A Markdown table."""
    lines = ["| workload | metric | system | against | paper | ours | in band |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        *cells, verdict = row_cells(row)
        if row.in_band is False:
            verdict = verdict.replace("no", "**no**", 1)
        lines.append("| " + " | ".join([*cells, verdict]) + " |")
    return lines


def row_cells(row: Row) -> tuple[str, str, str, str, str, str, str]:
    """The columns of a row, as text."""
    claim = row.claim
    paper = "-" if claim.paper is None else _with_unit(str(claim.paper), claim.unit)
    ours = "-" if row.ours is None else _with_unit(f"{row.ours:.3g}", claim.unit)
    if row.spread is not None and row.spread[0] != row.spread[1]:
        ours += f" ({row.spread[0]:.3g} to {row.spread[1]:.3g})"
    idle = f"nothing dropped ({claim.band})" if row.is_idle and claim.band is not None else ""
    idle = "never: the run proves nothing of it" if row.proves_nothing else idle
    verdict = {None: idle, True: f"yes ({claim.band})", False: f"no ({claim.band})"}[row.in_band]
    return row.workload, claim.metric, claim.system, claim.baseline or "-", paper, ours, verdict


def _with_unit(text: str, unit: str) -> str:
    if not unit:
        return text
    return f"{text}x" if unit == "x" else f"{text} {unit}"

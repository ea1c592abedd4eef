"""docs/reproduction.md: every figure's rows beside the paper's, its plots and its conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jettison.report.plots import to_png
from jettison.simulate.reproduce.pictures import DRAWING
from jettison.simulate.reproduce.registry import EXPERIMENTS, Experiment
from jettison.simulate.reproduce.rows import Outcome, Row

DPI = 70
_HEAD = """# The papers' figures, reproduced in virtual time

Written by `jettison reproduce all`. One figure: `jettison reproduce NAME`; all names: `jettison reproduce list`.

Every system here is a policy on one simulated engine (docs/baselines.md): the group and cluster cores are those that
serve live, the GPUs are presets whose step times were calibrated on operators that others have timed
(docs/presets.md). **No constant is fitted to a figure of the papers.** (One what-if has as much memory as goes with a
stay time that v3 states: `KV by stay` in kunserve-fig13; no row of it is judged.) Where a row lies outside of its
band, it says so, and the remarks say by how much and why, as far as it is known.

What stands in for what: BurstGPT's trace is not to be had beyond 400 slow rows, so arrivals are synthetic, with what
the papers tell of it: a rate that doubles at 45 s (and again at 440 s of the 640 s run), a coefficient of variation
of 1.37 (that of the trace's first rows). They are drawn at 2.71 requests/s on average, ten times the trace's mean
rate of 0.271: v3's public scripts divide the trace's timestamps by 10 (SJTU-IPADS/kunserve,
`evaluation/trace/burstgpt.py`, the default of `--scale`), and only at such a rate can one be seen to double at 45 s.
(The script also cuts them to whole seconds; here they are not cut.) Then they are upscaled by TraceUpscaler's method,
as the papers and the same scripts do it: all copies of an arrival stand on its instant. A run is 286 s (but for that
of 640 s, and the replayed burst): the scripts' 775 rows at that rate. A burst lasts 75 s, from 45 s to 120 s, the
least that the text allows: replayed without end it fills vLLM's memory at 120 s and KunServe's at 152 s (v3 section
5.6); by itself it fills vLLM's, too, so it lasts until then, and no burst of the trace lasts as long as the latter
(docs/decisions.md says how we came to look). v1 only divides time; its arrivals are drawn at the final rate, with its
spike of 14 times, of which nobody says how long it is: 3 s here. Lengths are drawn by the data sets' published
statistics (docs/workloads.md). The load rule is one for all: users are added until the mean KV demand, with memory to
spare, is 0.56 of the undropped capacity. v1's 14B has 0.65, and 0.5 as well in its sweep: at the 0.498 of its
motivating run our spike overflows nothing, and nobody drops (so it is with its larger models, at 0.5). Where fewer
instances than the papers' serve, so that all of it takes minutes, the conditions say so.

Each spec holds a figure's cluster, arrivals, lengths, load and systems. What no spec can say is added to it by the
figure: pipelines that are merged before anybody comes (fig. 5), parameters that are streamed (v1's fig. 4), the
trigger without guard, memory to spare; and users are added for each seed by itself, before a burst is replayed.
`jettison simulate` on the same spec meets the same cluster and systems, with its own draw of requests.

What a step takes first decides whether a burst meets the limit of compute or of memory first. In v3's bursts prompts
come before decodes, within 4,096 tokens a step (`step_priority: prefill`), for every system alike. So it is in the
engine that v3's authors have published (SJTU-IPADS/kunserve: "prefill-first" in `kunserve/colocated_scheduler.py`,
the default of `--chunked-prefill-budget` in `kunserve/kunserve_config.py`), and so vLLM 0.6.3 does unless told to
chunk prompts. A burst then slows decodes down and requests stay longer; with decodes first it makes first tokens
late. kunserve-fig13 says what either comes to. Merged groups that look ahead (`drop`) mix prompts and decodes by
cost, and do not put prompts first. v1's figures, and those without a burst, have decodes first, within 2,048 tokens.

`drop` is the policy as it is shipped. It does not drop where its cost model finds that compute binds or that a
pipeline would fall behind by more than the wait for memory, and not before it predicts such a wait or has seen it for
a second or two. `drop without compute guard` is KunServe's own trigger: load above capacity with requests waiting
(for 0.2 s, in a burst for 0.05 s: who ends next may make room). `memory to spare` is recompute with eight times the
KV memory: what memory alone could give.

A band is what reference figures of the papers were judged to allow beforehand, or the paper's own range; a row
without one is stated and not judged, nor is one that would hold because nobody had to drop anything. Medians of the
seeds, with the range where there are several.
"""


def write_page(path: Path, outcomes: Mapping[str, Outcome], effort: str) -> None:
    """The page, and its pictures in a folder beside it. ``effort``: a sentence at its end on what it took. Raises
    OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    parts = [_HEAD, _summary(outcomes)]
    for name, outcome in outcomes.items():
        parts.append(_section(EXPERIMENTS[name], outcome, save_pictures(folder, name, outcome), folder.name))
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
        "A row is judged by its size: inside, ours lies where reference figures of the papers allow. What lies outside",
        "may still point the same way; each figure's remarks say where it does, and why it is larger or smaller.", "",
        "| figure | rows judged | inside | not judged, as nothing dropped |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, outcome in outcomes.items():
        judged = [row.in_band for row in outcome.rows if row.in_band is not None]
        idle = sum(row.in_band is None and row.is_idle and row.band is not None for row in outcome.rows)
        lines.append(f"| [{name}](#{name}) | {len(judged)} | {sum(judged)} | {idle or ''} |")
    missing = [name for name in EXPERIMENTS if name not in outcomes]
    if missing:
        lines += ["", f"Not run for this page: {', '.join(missing)}."]
    return "\n".join([*lines, ""])


def _section(experiment: Experiment, outcome: Outcome, files: Sequence[str], folder: str) -> str:
    lines = [f"## {experiment.name}", "", f"{experiment.title[0].upper()}{experiment.title[1:]}.", ""]
    if experiment.specs:
        specs = ", ".join(f"`{name}.yaml`" for name in experiment.specs)
        lines += [f"Specs (`src/jettison/simulate/reproduce/specs/`): {specs}.", ""]
    lines += table(outcome.rows)
    for remark in outcome.remarks:
        lines += ["", remark]
    for file in files:
        lines += ["", f"![{file.removesuffix('.png')}]({folder}/{file})"]
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
    paper = "-" if row.paper is None else _with_unit(str(row.paper), row.unit)
    ours = "-" if row.ours is None else _with_unit(f"{row.ours:.3g}", row.unit)
    if row.spread is not None and row.spread[0] != row.spread[1]:
        ours += f" ({row.spread[0]:.3g} to {row.spread[1]:.3g})"
    idle = f"nothing dropped ({row.band})" if row.is_idle and row.band is not None else ""
    verdict = {None: idle, True: f"yes ({row.band})", False: f"no ({row.band})"}[row.in_band]
    return row.workload, row.metric, row.system, row.baseline or "-", paper, ours, verdict


def _with_unit(text: str, unit: str) -> str:
    if not unit:
        return text
    return f"{text}x" if unit == "x" else f"{text} {unit}"

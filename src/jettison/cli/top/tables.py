"""What a server said, as lines and tables of a terminal. Pure: a document in, something that ``rich`` draws out.

Colours are those of the console's pictures. Texts of requests come from clients: nothing in them is taken for markup,
and what does not print is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from jettison.server.console.words import amount, counted, span

Document = Mapping[str, Any]

USES = (
    ("parameters", "weights", "blue"), ("online", "KV in use", "dark_orange"), ("offline", "KV of batches", "magenta"),
    ("foreign", "KV kept for another", "yellow"), ("cached", "KV cached", "green"), ("room", "KV free", "grey70"),
    ("workspace", "workspace", "cyan"), ("free", "unused", "grey30"),
)  # fmt: skip
"""Uses of an instance's memory as the console names them, their words, and their colours."""
TITLES = {"memory": "Memory of instances", "queues": "Queues", "rungs": "Rungs at work", "requests": "Requests",
          "events": "What happened"}  # fmt: skip
"""Part -> its title; the first part has none."""
MOST_BAR, LEAST_BAR = 48, 12
"""Cells of the bar of one instance: what the figures beside it (``FIGURES``) leave of the screen."""
FIGURES = 66
WIDTH = 120
"""Cells of a screen, unless it says otherwise."""
MOST_CHARS = 400
"""Of a text from the server."""


def plain(value: object, most: int = MOST_CHARS) -> str:
    """A text that moves no cursor and sets no colour, cut to ``most`` characters."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(value)[:most])


def head(data: Document) -> Text:
    """State, load and latencies, in two lines."""
    batch, ttft = data.get("batch", (0, 0)), data.get("ttft", (None, None, 0))
    tokens = data.get("tokens_per_s")
    line = Text()
    line.append(plain(data.get("state", "?")), "bold green" if data.get("state") == "ready" else "bold yellow")
    line.append(f"  {plain(', '.join(map(str, data.get('models', ()))))}  jettison {plain(data.get('version', ''))}\n")
    line.append(f"{data.get('running', 0)} running, {data.get('waiting', 0)} waiting, {batch[0]} + {batch[1]} of "
                f"batches   {'–' if tokens is None else f'{tokens:,.0f}'} tokens/s")
    if ttft[2]:
        line.append(f"   first token in the last minute: median {span(ttft[0])}, P99 {span(ttft[1])}")
    totals = data.get("totals", {})
    if totals:
        told = (f"{value:,.0f} {plain(name).removeprefix('num_').replace('_', ' ')}" for name, value in totals.items())
        line.append("\n" + ", ".join(told))
    for trouble in data.get("troubles", ()):
        line.append(f"\n{plain(trouble)}", "bold red")
    return line


def memory(data: Document, width: int = WIDTH) -> Table:
    """One line for each instance: a bar of its memory, and its figures."""
    cells = max(LEAST_BAR, min(MOST_BAR, width - FIGURES))
    table = _table("id", "memory", "weights", "KV in use", "KV free", "borrowed", "of", "state")
    for each in data.get("instances", ()):
        uses = each["uses"]
        used = sum(uses[name] for name in ("online", "offline", "foreign"))
        state = f"group {each['group']}" if each["state"] == "awake" else str(each["state"])
        if state == "unprovisioned":
            state = "no process"
        table.add_row(
            plain(each["id"]), bar(uses, each["budget"], cells), amount(uses["parameters"]), amount(used),
            amount(uses["room"] + uses["cached"]), amount(each["dropped"]), amount(each["budget"]),
            Text(plain(state), "bold red" if each["state"] == "dead" else ""))
    return table


def bar(uses: Mapping[str, int], budget: int, num_cells: int) -> Text:
    """So many cells of each colour as a use has of the budget; rounded so that all are ``num_cells``."""
    line, done, cells = Text(), 0, 0
    for name, _, colour in USES:
        done += uses.get(name, 0)
        until = min(num_cells, round(num_cells * done / budget)) if budget else 0
        line.append("█" * (until - cells), colour)
        cells = max(cells, until)
    return line


def legend() -> Text:
    """The bar's colours."""
    line = Text()
    for _, words, colour in USES:
        line.append("█ ", colour).append(f"{words}  ")
    return line


def queues(data: Document) -> Table:
    """One line for each group: its pipeline, its requests, its blocks."""
    table = _table("group", "instances", "running", "waiting", "moving", "batch", "KV blocks", "layers")
    for group in data.get("groups", ()):
        used, _, total = group["blocks"]
        running, waiting, hosted = group["batch"]
        table.add_row(
            plain(group["id"]), plain(" ".join(map(str, group["instances"]))), str(group["running"]),
            Text(str(group["waiting"]), "bold yellow" if group["waiting"] else ""), str(group["moving"]),
            f"{running} + {waiting}" + (f" ({hosted} hosted)" if hosted else ""), f"{used:,} of {total:,}",
            plain(" ".join(f"{low}–{high - 1}" for low, high in group["layers"])))
    return table


def rungs(data: Document) -> RenderableType:
    """What is at work now, and why."""
    return _said((str(each.get("rung", "")), each) for each in data.get("at_work", ())) or Text(
        "none: memory is as it was at the start", "dim")


def events(found: Sequence[Document], now_s: float, most: int = 8) -> RenderableType:
    """The last ones, the newest first."""
    last = ((f"{span(max(0.0, now_s - each.get('t', 0.0)))} ago", each) for each in reversed(found[-most:]))
    return _said(last) or Text("none yet", "dim")


def _said(rows: Iterable[tuple[str, Document]]) -> Table | None:
    """What happened or is at work, each with a word in front of it; None where there is nothing."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    for begin, each in rows:
        line = Text(plain(each.get("what", "")))
        if each.get("why"):
            line.append(f" Why: {plain(each['why'])}.", "italic")
        table.add_row(plain(begin), line)
    return table if table.row_count else None


def requests(found: Document, waits: Mapping[str, str], width: int = WIDTH, most: int = 12) -> RenderableType:
    """Requests under way: those that wait come first, with what they wait for."""
    waiting = found.get("waiting", ())
    rows = [*waiting, *(row for row in found.get("under_way", ()) if row["ttft"] is not None)][:most]
    if not rows:
        return Text("none", "dim")
    table = _table("id", "for", "tokens", "state")
    for row in rows:
        name, is_waiting = str(row["id"]), row["ttft"] is None
        state = Text(f"{'batch, ' if row['batch'] else ''}{'no token yet' if is_waiting else 'writes'}",
                     "bold yellow" if is_waiting else "")
        if row["preempted"]:
            state.append(f", lost its place {row['preempted']} times")
        if why := waits.get(name):
            state.append(f": {plain(why)}", "not bold")
        tokens = f"{row['prompt']} + {row['output']}"
        table.add_row(Text(plain(name, max(12, min(40, width // 3)))), span(row["took"]), tokens, state)
    num_more = found.get("num_under_way", 0) - len(rows)
    if num_more > 0:
        table.caption = f"and {counted(num_more, 'request')} more"
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, no_wrap=name not in ("state", "layers"))
    return table

"""``jettison reproduce``: figures of the papers beside ours."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import jettison
from jettison.errors import ConfigError

CHECKOUT = Path(jettison.__file__).resolve().parents[2]
"""Where ``papers/`` lies beside ``src/``, if this is a checkout."""


def _laboratory() -> Any:
    """The command of ``papers/``. Raises ConfigError outside of a checkout: an installed package does not have it."""
    if not (CHECKOUT / "papers" / "command.py").is_file():
        raise ConfigError(
            "the papers' figures are in a checkout of the source and in no installed package: "
            "get the repository, `make install` there, and run .venv/bin/jettison reproduce"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    return importlib.import_module("papers.command")


def reproduce(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Figures (`list` shows them), or `all`.")],
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write rows and conditions.")
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draw the plots there, as PNG (default: reproduction; a page has its own)."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with its plots (with `all`: papers/pages/reproduction.md)."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Simulate so many runs at once (default: one a core).")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep finished runs there and take those that this version has left there: goes on after a stop.",
        ),
    ] = None,
) -> None:
    """Simulate the experiments behind figures of the KunServe, MELL and ConServe papers, beside their numbers."""
    from rich.console import Console

    from jettison.live.machine.endings import ended_by_sigterm

    command = _laboratory()
    console = Console()
    if names == ["list"]:
        command.list_figures(console)
        return
    if len(names) > 1 and {"all", "list"} & set(names):
        raise ConfigError("`all` and `list` stand alone")
    with ended_by_sigterm():
        command.reproduce(names, console, json_out=json_out, plots=plots, page=page, processes=processes, keep=keep)

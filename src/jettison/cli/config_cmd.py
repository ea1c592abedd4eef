"""``jettison config show``: what is in force, and where each value came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jettison.cli.flags import resolve_config, tell_notes, with_config_flags
from jettison.cli.help import Group
from jettison.cli.pasted import PastedCommand
from jettison.config import KEYS, SECRET_KEYS, EngineConfig

app = typer.Typer(help="Look at the configuration.", no_args_is_help=True, cls=Group, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Look at the configuration."""


@app.command("show", cls=PastedCommand)
@with_config_flags
def show(
    model_dir: Annotated[
        Path | None, typer.Argument(metavar="MODEL_DIR", help="Model folder; may be left out here.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="YAML file with the same keys; a flag beats it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    **flags: Any,
) -> None:
    """Print every key, its value and its source (default, file, env or flag). Takes the flags of serve."""
    resolved = resolve_config(model_dir, config, flags, needs_model=False)
    tell_notes(resolved)
    if as_json:
        typer.echo(json.dumps(_rows(resolved), indent=2))
    else:
        _print_table(resolved)


def _rows(config: EngineConfig) -> dict[str, dict[str, Any]]:
    values = config.shown()
    shown = {name: "***" if name in SECRET_KEYS and value else value for name, value in values.items()}
    return {name: {"value": shown[name], "source": config.provenance[name]} for name in KEYS}


def _print_table(config: EngineConfig) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from jettison.report.terminal import print_whole

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("key", "value", "source"):
        table.add_column(heading, overflow="fold")
    for name, row in _rows(config).items():
        source = row["source"]
        style = "dim" if source == "default" else None
        table.add_row(name, Text(KEYS[name].show(row["value"])), source, style=style)
    print_whole(table, Console())

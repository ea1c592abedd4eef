"""``jettison batch``: files of requests, computed without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jettison.cli.flags import resolve_config, tell_notes, with_config_flags
from jettison.cli.help import Group
from jettison.cli.pasted import PastedCommand
from jettison.live.machine.address_space import check_address_limit

app = typer.Typer(
    help="Compute files of requests (OpenAI's batch format).", no_args_is_help=True, cls=Group, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Compute files of requests (OpenAI's batch format)."""


@app.command("run", cls=PastedCommand)
@with_config_flags
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Requests, one a line, as for /v1/batches.")],
    model_dir: Annotated[
        Path | None, typer.Argument(metavar="MODEL_DIR", help="Model folder (Hugging Face layout).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Answers (default: FILE with .out.jsonl); what has none goes "
                     "into a file of the same name with .errors."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="YAML file with the same keys; a flag beats it.")
    ] = None,
    **flags: Any,
) -> None:
    """Compute all lines of a file without a server, with progress.

    A run that was stopped or killed goes on where it was when the same command is
    given again. The engine has the flags of `jettison serve`.
    """
    resolved = resolve_config(model_dir, config, flags)
    tell_notes(resolved)
    check_address_limit()
    from jettison.live.machine.endings import ended_by_sigterm
    from jettison.server.batches.run_command import run_command

    with resolved.placed(), ended_by_sigterm():
        code = run_command(resolved, file, out or file.with_name(f"{file.stem}.out.jsonl"))
    raise typer.Exit(code)

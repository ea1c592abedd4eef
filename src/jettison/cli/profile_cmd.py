"""``jettison profile``: measure what steps, transfers and remaps cost here, and keep it beside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jettison.cli.flags import resolve_config, tell_notes, with_config_flags
from jettison.live.machine.address_space import check_address_limit


@with_config_flags
def profile(
    model_dir: Annotated[
        Path | None, typer.Argument(metavar="MODEL_DIR", help="Model folder (Hugging Face layout).")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="YAML file with the same keys; a flag beats it.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where the profile goes (default: beside the model)."),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write every measurement as JSON.")
    ] = None,
    html_out: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the tables and the picture as a page.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and rounds: seconds, and less sure.")] = False,
    order_seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of held-out shapes and order.")] = 0,
    **flags: Any,
) -> None:
    """Measure what steps, links and remaps cost on this machine, and fit the cost model.

    Give it the flags that `jettison serve` will get: --instances and --num-threads
    decide how many threads a worker has, and a profile is valid for that many.
    """
    resolved = resolve_config(model_dir, config, flags)
    tell_notes(resolved)
    check_address_limit()
    from jettison.live.profile.command import profile_command

    with resolved.placed():
        code = profile_command(resolved, out=out, json_out=json_out, html_out=html_out, quick=quick, seed=order_seed)
    raise typer.Exit(code)

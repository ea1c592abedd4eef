"""``jettison demo``: a burst on this machine, with dropping off and on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jettison.live.machine.address_space import MORE_PROGRAM_BYTES, check_address_limit


def demo(
    out_dir: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the model, the logs and the report go.")
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of the model and the workload.", min=0)] = 0,
) -> None:
    """Make a small model, serve it with little memory, replay a burst with dropping off and on, and compare."""
    check_address_limit(MORE_PROGRAM_BYTES)
    from jettison.demo import run_demo
    from jettison.live.machine.endings import ended_by_sigterm

    with ended_by_sigterm():
        code = run_demo(out_dir, seed)
    raise typer.Exit(code)

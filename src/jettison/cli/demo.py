"""``jettison demo``: a day on this machine, or a burst alone, with and without elastic memory."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from jettison.live.machine.address_space import MORE_PROGRAM_BYTES, check_address_limit


class Scene(StrEnum):
    """What is played."""

    DAY = "day"
    BURST = "burst"


def demo(
    out_dir: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the model, the logs and the report go.")
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of the model and the workload.", min=0)] = 0,
    scene: Annotated[
        Scene, typer.Option(help="A day on four instances, or a burst alone on two.")
    ] = Scene.DAY,
) -> None:
    """Make a small model, serve it with little memory for a day of 100 s, plainly and elastically, and compare.

    The day has a quiet night, a morning that fills up, a burst and an evening, and a
    batch that runs in what they leave. The burst alone: dropping off and on. At the end
    a small trained model, if it can be fetched, chats before, in and after a drop.
    """
    check_address_limit(MORE_PROGRAM_BYTES)
    from rich.console import Console

    from jettison.demo.burst import run_burst
    from jettison.demo.chats import show_chats
    from jettison.demo.day import run_day
    from jettison.live.machine.endings import ended_by_sigterm

    with ended_by_sigterm():
        code = run_day(out_dir, seed) if scene is Scene.DAY else run_burst(out_dir, seed)
        show_chats(Console())
    raise typer.Exit(code)

"""``jettison bench``: replay a trace or a synthetic workload against any OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jettison.errors import ConfigError

_LOAD = "Load"
_SHAPE = "Shaping"
_OUT = "Results"


def bench(
    url: Annotated[str, typer.Option(metavar="URL", help="Server, without /v1.")] = "http://127.0.0.1:8000",
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Trace to replay.", rich_help_panel=_LOAD)
    ] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="NAME", help="Synthetic workload by name.", rich_help_panel=_LOAD)
    ] = None,
) -> None:
    """Replay a load and report TTFT and TPOT."""
    if (trace is None) == (workload is None):
        raise ConfigError("give one load: --trace FILE or --workload NAME")

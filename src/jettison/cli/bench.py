"""``jettison bench``: replay a trace or a synthetic workload against any OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jettison.errors import ConfigError

_LOAD = "Load: one trace or one workload"
_SHAPE = "Shaping of the load"
_CLIENT = "Client"
_OUT = "Results"


def bench(
    url: Annotated[str, typer.Option(metavar="URL", help="Server's root.")] = "http://127.0.0.1:8000",
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Trace to replay.", rich_help_panel=_LOAD)] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="NAME", help="Synthetic workload by name.", rich_help_panel=_LOAD)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every draw.", min=0, rich_help_panel=_LOAD)] = 0,
    slice_s: Annotated[
        float | None,
        typer.Option("--slice", metavar="SECONDS", help="Cut the trace into windows so long.", rich_help_panel=_SHAPE),
    ] = None,
    slice_index: Annotated[
        int, typer.Option(min=0, help="Which window to replay, from 0.", rich_help_panel=_SHAPE)
    ] = 0,
    thin: Annotated[
        float | None, typer.Option(metavar="FRACTION", help="Keep this part of the requests.", rich_help_panel=_SHAPE)
    ] = None,
    length_scale: Annotated[
        float | None, typer.Option(metavar="FACTOR", help="Multiply all lengths by this.", rich_help_panel=_SHAPE)
    ] = None,
    lengths_from: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the lengths from another trace.", rich_help_panel=_SHAPE),
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many requests.", rich_help_panel=_SHAPE)
    ] = None,
    duration_s: Annotated[
        float | None,
        typer.Option("--duration", metavar="SECONDS", help="Stop after so much of the load.", rich_help_panel=_SHAPE),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="At most so many requests at once (default: open loop).", rich_help_panel=_CLIENT),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the run in the report.", rich_help_panel=_OUT)] = "run",
    slo_ttft_s: Annotated[
        float | None,
        typer.Option("--slo-ttft", metavar="SECONDS", help="Time to first token that counts as good.",
                     rich_help_panel=_OUT),
    ] = None,
    slo_tpot_s: Annotated[
        float | None,
        typer.Option("--slo-tpot", metavar="SECONDS", help="Time per output token that counts as good.",
                     rich_help_panel=_OUT),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures.", rich_help_panel=_OUT)
    ] = None,
    html_out: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots.", rich_help_panel=_OUT)
    ] = None,
) -> None:
    """Replay a load as it was (open loop: nobody waits for an answer before asking) and report TTFT and TPOT."""
    if (trace is None) == (workload is None):
        raise ConfigError("give one load: --trace FILE or --workload NAME")
    from jettison.workload.bench import run_bench

    run_bench(
        url,
        trace=trace,
        workload=workload,
        slice_s=slice_s,
        slice_index=slice_index,
        thin=thin,
        length_scale=length_scale,
        lengths_from=lengths_from,
        seed=seed,
        num_requests=num_requests,
        duration_s=duration_s,
        max_concurrency=max_concurrency,
        json_out=json_out,
        html_out=html_out,
        name=name,
        slo_ttft_s=slo_ttft_s,
        slo_tpot_s=slo_tpot_s,
    )

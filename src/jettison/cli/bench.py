"""``jettison bench``: replay a trace or a synthetic workload against any OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from jettison.errors import ConfigError, JettisonError

_LOAD = "Load (one trace or one workload)"
_SHAPE = "Shaping, in this order"
_CLIENT = "Client"
_OUT = "Results"
_CONDITIONS = "Conditions, for the report (default: what a Jettison server tells of itself)"


def bench(
    url: Annotated[str, typer.Option(metavar="URL", help="Server's root.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model to ask for (default: the server's first).")
    ] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="Key to send.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Trace to replay.", rich_help_panel=_LOAD)] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Built-in: burst, burstgpt-like, azure-conv-like.", rich_help_panel=_LOAD
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every draw.", min=0, rich_help_panel=_LOAD)] = 0,
    jitter: Annotated[
        bool | None,
        typer.Option(
            "--jitter/--no-jitter",
            help="Spread arrivals inside the trace's clock step (default: where the step is coarse).",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    slice_s: Annotated[
        float | None,
        typer.Option("--slice", metavar="SECONDS", help="Cut the load into windows so long.", rich_help_panel=_SHAPE),
    ] = None,
    slice_index: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Which window, from 0.", rich_help_panel=_SHAPE)
    ] = None,
    thin: Annotated[
        float | None, typer.Option(metavar="FRACTION", help="Keep this part, drawn.", rich_help_panel=_SHAPE)
    ] = None,
    thin_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep each Nth request.", rich_help_panel=_SHAPE)
    ] = None,
    rate_scale: Annotated[
        float | None, typer.Option(metavar="FACTOR", help="Multiply the rate.", rich_help_panel=_SHAPE)
    ] = None,
    lengths_from: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take lengths from another trace.", rich_help_panel=_SHAPE)
    ] = None,
    length_scale: Annotated[
        float | None, typer.Option(metavar="FACTOR", help="Multiply all lengths.", rich_help_panel=_SHAPE)
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Cap lengths to this context.", rich_help_panel=_SHAPE)
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stop after so many requests.", rich_help_panel=_SHAPE)
    ] = None,
    duration_s: Annotated[
        float | None,
        typer.Option("--duration", metavar="SECONDS", help="Stop after so much of the load.", rich_help_panel=_SHAPE),
    ] = None,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="Endpoint to use.", rich_help_panel=_CLIENT)
    ] = "completions",
    vocab_size: Annotated[
        int, typer.Option(min=2, metavar="N", help="Prompts draw token ids below this.", rich_help_panel=_CLIENT)
    ] = 256,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos/--stop-at-eos", help="Ask for exactly the load's output lengths.",
                     rich_help_panel=_CLIENT),
    ] = True,
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="At most so many at once (default: open loop).", rich_help_panel=_CLIENT),
    ] = None,
    cancel_fraction: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, metavar="FRACTION", help="Hang up early on this part.", rich_help_panel=_CLIENT),
    ] = 0.0,
    request_timeout_s: Annotated[
        float,
        typer.Option("--request-timeout", metavar="SECONDS", help="Longest wait for a request.",
                     rich_help_panel=_CLIENT),
    ] = 600.0,
    total_timeout_s: Annotated[
        float | None,
        typer.Option("--total-timeout", metavar="SECONDS", help="End of the run; what is left has failed.",
                     rich_help_panel=_CLIENT),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the run in the report.", rich_help_panel=_OUT)] = "run",
    slo_ttft_s: Annotated[
        float | None,
        typer.Option("--slo-ttft", metavar="SECONDS", help="Time to first token that is good.", rich_help_panel=_OUT),
    ] = None,
    slo_tpot_s: Annotated[
        float | None,
        typer.Option("--slo-tpot", metavar="SECONDS", help="Time per output token that is good.", rich_help_panel=_OUT),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures.", rich_help_panel=_OUT)
    ] = None,
    html_out: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots.", rich_help_panel=_OUT)
    ] = None,
    parameter_share: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, metavar="FRACTION", help="Parameters' part of memory.",
                     rich_help_panel=_CONDITIONS),
    ] = None,
    kv_capacity_tokens: Annotated[
        float | None,
        typer.Option(min=1, metavar="N", help="KV capacity of all instances, in tokens.", rich_help_panel=_CONDITIONS),
    ] = None,
    num_instances: Annotated[
        int | None,
        typer.Option("--instances", min=1, metavar="N", help="Instances served from.", rich_help_panel=_CONDITIONS),
    ] = None,
) -> None:
    """Replay a load as it was (open loop: nobody waits for an answer before asking) and report TTFT and TPOT."""
    if (trace is None) == (workload is None):
        raise ConfigError("give one load: --trace FILE or --workload NAME")
    options = dict(locals())  # each option is a parameter of run_bench, of the same name; a test compares the two
    from jettison.workload.bench import run_bench

    run = run_bench(**options)
    if not run.requests.completed:
        errors = [row["error"] for row in run.requests_detail or () if row.get("error")]
        first = f"; the first error: {errors[0]}" if errors else ""
        raise JettisonError(f"none of {run.requests.submitted} requests was answered{first}")

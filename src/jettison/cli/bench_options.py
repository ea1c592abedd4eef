"""The options of ``jettison bench`` as types: what each is called and what its help says. Defaults: ``cli.bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

_LOAD = "Load (one trace or one workload)"
_SHAPE = "Shaping, in this order"
_CLIENT = "Client"
_BATCH = "A batch beside the load, as service_tier flex"
_OUT = "Results"
_CONDITIONS = "Conditions, for the report (default: what a Jettison server tells of itself)"

Url = Annotated[str, typer.Option(metavar="URL", help="Server's root.")]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Model to ask for (default: the server's first).")]
ApiKey = Annotated[str | None, typer.Option(metavar="KEY", help="Key to send.")]
Trace = Annotated[Path | None, typer.Option(metavar="FILE", help="Trace to replay.", rich_help_panel=_LOAD)]
TraceFormat = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="NAME", help="Trace's format, where its columns leave it open.", rich_help_panel=_LOAD
    ),
]
Unit = Annotated[
    str | None,
    typer.Option(
        metavar="UNIT", help="Of the trace's stamps: s, ms, us, ns (default: its format's).", rich_help_panel=_LOAD
    ),
]
Workload = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Built-in: burst, burstgpt-like, azure-conv-like.", rich_help_panel=_LOAD),
]
Seed = Annotated[int, typer.Option(help="Seed of every draw.", min=0, rich_help_panel=_LOAD)]
Jitter = Annotated[
    bool | None,
    typer.Option(
        "--jitter/--no-jitter",
        help="Spread arrivals inside the trace's clock step (default: where a format's stamps are seen to be steps).",
        rich_help_panel=_LOAD,
    ),
]
SkipBadRows = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Leave out bad rows of files, and name them.", rich_help_panel=_LOAD)
]
SliceS = Annotated[
    float | None,
    typer.Option("--slice", metavar="SECONDS", help="Cut the load into windows so long.", rich_help_panel=_SHAPE),
]
SliceIndex = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Which window, from 0.", rich_help_panel=_SHAPE)
]
Thin = Annotated[
    float | None, typer.Option(metavar="FRACTION", help="Keep this part, drawn.", rich_help_panel=_SHAPE)
]
ThinEvery = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Keep each Nth request.", rich_help_panel=_SHAPE)
]
RateScale = Annotated[float | None, typer.Option(metavar="FACTOR", help="Multiply the rate.", rich_help_panel=_SHAPE)]
LengthsFrom = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Take lengths from another trace.", rich_help_panel=_SHAPE)
]
LengthScale = Annotated[
    float | None, typer.Option(metavar="FACTOR", help="Multiply all lengths.", rich_help_panel=_SHAPE)
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=2, metavar="N", help="Cap lengths to this context.", rich_help_panel=_SHAPE)
]
NumRequests = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Stop after so many requests.", rich_help_panel=_SHAPE)
]
DurationS = Annotated[
    float | None,
    typer.Option("--duration", metavar="SECONDS", help="Stop after so much of the load.", rich_help_panel=_SHAPE),
]
Endpoint = Annotated[Literal["completions", "chat"], typer.Option(help="Endpoint to use.", rich_help_panel=_CLIENT)]
VocabSize = Annotated[
    int, typer.Option(min=2, metavar="N", help="Prompts draw token ids below this.", rich_help_panel=_CLIENT)
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos/--stop-at-eos", help="Ask for exactly the load's output lengths.", rich_help_panel=_CLIENT
    ),
]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="At most so many at once (default: open loop).", rich_help_panel=_CLIENT),
]
CancelFraction = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, metavar="FRACTION", help="Hang up early on this part.", rich_help_panel=_CLIENT),
]
RequestTimeoutS = Annotated[
    float,
    typer.Option("--request-timeout", metavar="SECONDS", help="Longest wait for a request.", rich_help_panel=_CLIENT),
]
TotalTimeoutS = Annotated[
    float | None,
    typer.Option(
        "--total-timeout", metavar="SECONDS", help="End of the run; what is left has failed.", rich_help_panel=_CLIENT
    ),
]
OfflineLengths = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Lengths of its requests: longbench, sharegpt, others.", rich_help_panel=_BATCH),
]
OfflineUnfinished = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="So many at any time (default: all at once).", rich_help_panel=_BATCH),
]
OfflineRequests = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="So many in all (default: while the load lasts).", rich_help_panel=_BATCH),
]
OfflineMaxInput = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Cut its prompts to so many tokens.", rich_help_panel=_BATCH)
]
OfflineMaxOutput = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Cut its answers to so many tokens.", rich_help_panel=_BATCH)
]
OfflineApiKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="Key of offline requests.", rich_help_panel=_BATCH)
]
AllowFailures = Annotated[
    float,
    typer.Option(
        min=0.0, max=1.0, metavar="FRACTION", help="Exit 0 if at most this part was not answered.", rich_help_panel=_OUT
    ),
]
Name = Annotated[str, typer.Option(help="Name of the run in the report.", rich_help_panel=_OUT)]
SloTtftS = Annotated[
    float | None,
    typer.Option("--slo-ttft", metavar="SECONDS", help="Time to first token that is good.", rich_help_panel=_OUT),
]
SloTpotS = Annotated[
    float | None,
    typer.Option("--slo-tpot", metavar="SECONDS", help="Time per output token that is good.", rich_help_panel=_OUT),
]
JsonOut = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures.", rich_help_panel=_OUT)
]
HtmlOut = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots.", rich_help_panel=_OUT)
]
ParameterShare = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, metavar="FRACTION", help="Parameters' part of memory.", rich_help_panel=_CONDITIONS),
]
KvCapacityTokens = Annotated[
    float | None,
    typer.Option(min=1, metavar="N", help="KV capacity of all instances, in tokens.", rich_help_panel=_CONDITIONS),
]
NumInstances = Annotated[
    int | None,
    typer.Option("--instances", min=1, metavar="N", help="Instances served from.", rich_help_panel=_CONDITIONS),
]

"""``jettison trace``: look at traces of requests, cut them, upscale them, make them up, fetch public ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from jettison.cli.flags import with_option_flags
from jettison.cli.help import Command, Group
from jettison.workload.options import SynthOptions

app = typer.Typer(
    help="Look at traces of requests, cut, upscale, make and fetch them.", no_args_is_help=True, cls=Group,
    rich_markup_mode=None,
)  # fmt: skip

Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="Trace file of a known format, plain or gzip.")]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Trace to write (.gz packs it).")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every draw.")]
Jitter = Annotated[
    bool | None,
    typer.Option(
        "--jitter/--no-jitter",
        help="Spread arrivals inside the trace's clock step (default: where a format's stamps are seen to be steps).",
    ),
]
TraceFormat = Annotated[
    str | None, typer.Option("--format", metavar="NAME", help="Its format, where its columns leave it open.")
]
Unit = Annotated[
    str | None, typer.Option(metavar="UNIT", help="Of its time stamps: s, ms, us, ns (default: its format's).")
]
SkipBadRows = Annotated[bool, typer.Option("--skip-bad-rows", help="Leave out bad rows of files, and name them.")]


@app.callback()
def _group() -> None:
    """Look at traces of requests, cut, upscale, make and fetch them."""


@app.command("info", cls=Command)
def info(
    trace: Trace,
    trace_format: TraceFormat = None,
    unit: Unit = None,
    jitter: Jitter = None,
    skip_bad_rows: SkipBadRows = False,
    seed: Seed = 0,
    json_out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures.")] = None,
) -> None:
    """Print rates, burstiness and lengths of a trace, and a small plot."""
    from rich.console import Console

    from jettison.workload.trace_tools import Source, show_info
    from jettison.workload.units import Reading

    source = Source(trace, Reading(trace_format, unit), jitter, skip_bad_rows, seed)
    show_info(source, json_out=json_out, console=Console())


@app.command("slice", cls=Command)
def slice_(
    trace: Trace,
    out: Out,
    start_s: Annotated[
        float, typer.Option("--start", min=0.0, metavar="SECONDS", help="From here on; arrivals count from it.")
    ] = 0.0,
    end_s: Annotated[
        float | None, typer.Option("--end", min=0.0, metavar="SECONDS", help="Up to here (default: the end).")
    ] = None,
    skip: Annotated[int, typer.Option(min=0, metavar="N", help="Leave out the first N requests of that.")] = 0,
    thin: Annotated[float | None, typer.Option(metavar="FRACTION", help="Then keep this part, drawn.")] = None,
    num_requests: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the first N of what is left.")
    ] = None,
    trace_format: TraceFormat = None,
    unit: Unit = None,
    jitter: Jitter = None,
    skip_bad_rows: SkipBadRows = False,
    seed: Seed = 0,
) -> None:
    """Cut a trace by time, thin it, and keep its first rows."""
    from rich.console import Console

    from jettison.workload.trace_tools import Source, slice_trace
    from jettison.workload.units import Reading

    source = Source(trace, Reading(trace_format, unit), jitter, skip_bad_rows, seed)
    slice_trace(
        source, out, start_s=start_s, end_s=end_s, skip=skip, num_requests=num_requests, thin=thin, console=Console()
    )


@app.command("upscale", cls=Command)
def upscale(
    trace: Trace,
    out: Out,
    factor: Annotated[float | None, typer.Option(metavar="FACTOR", help="Times as many requests a second.")] = None,
    rate_per_s: Annotated[
        float | None, typer.Option("--rate", metavar="RATE", help="Mean requests a second to scale to.")
    ] = None,
    keep: Annotated[
        Literal["requests", "span"],
        typer.Option(help="What stays: the number of requests (the paper's; shorter), or the trace's time."),
    ] = "requests",
    spread_s: Annotated[
        float | None,
        typer.Option("--spread", metavar="SECONDS", help="Spread copies inside the trace's clock step of this width."),
    ] = None,
    lengths_from: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take lengths from another trace, in its order.")
    ] = None,
    trace_format: TraceFormat = None,
    unit: Unit = None,
    jitter: Jitter = None,
    skip_bad_rows: SkipBadRows = False,
    seed: Seed = 0,
) -> None:
    """More requests at the same moments (TraceUpscaler): bursts and gaps keep their width."""
    from rich.console import Console

    from jettison.workload.trace_tools import Source, upscale_trace
    from jettison.workload.units import Reading

    source = Source(trace, Reading(trace_format, unit), jitter, skip_bad_rows, seed)
    upscale_trace(
        source, out, factor=factor, rate_per_s=rate_per_s, keep=keep, spread_s=spread_s, lengths_from=lengths_from,
        console=Console(),
    )  # fmt: skip


@app.command("synth", cls=Command)
@with_option_flags(SynthOptions)
def synth(
    *, out: Out,
    process: Annotated[
        Literal["poisson", "gamma", "on-off", "diurnal", "burst", "servegen"],
        typer.Option(help="How requests arrive; burst repeats one of a trace, servegen draws from measured clients."),
    ] = "poisson",
    options: SynthOptions,
    seed: Seed = 0,
) -> None:
    """Make a trace up from an arrival process and a distribution of lengths."""
    from rich.console import Console

    from jettison.workload.trace_tools import synthesise_trace

    synthesise_trace(process, options, out, seed=seed, console=Console())


@app.command("fetch", cls=Command)
def fetch(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Public trace; without a name they are listed.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where it goes (default: its own name, here).")
    ] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="Fetch the same file from here.")] = None,
    sha256: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="Expected digest, where none is published.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Longest wait for the network.")
    ] = 30.0,
) -> None:
    """Download a public trace and check it."""
    from rich.console import Console

    from jettison.workload.trace_tools import fetch_trace, list_public_traces

    if name is None:
        list_public_traces(Console())
    else:
        fetch_trace(name, out, url=url, sha256=sha256, timeout_s=timeout_s, console=Console())

"""The functions of ``jettison trace``: describe, cut, upscale, draw or fetch a trace.

The command line only fills these functions' arguments. Every result is a file of our own format with its whole history
above the header, and a printed line on the written file.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.table import Table

from jettison.errors import ConfigError
from jettison.report.output import write_whole
from jettison.report.terminal import print_whole, progress_bar
from jettison.workload import shaping
from jettison.workload.arrivals import ArrivalProcess, Burst, Diurnal, OnOff, Steady
from jettison.workload.cautions import cautions_of, print_cautions
from jettison.workload.describe import describe, print_info
from jettison.workload.fetch import PUBLIC_TRACES, fetch, public_trace
from jettison.workload.lengths import LengthModel, Lengths, LogNormalPair, published_lengths
from jettison.workload.options import SynthOptions
from jettison.workload.rows import MAX_TOKENS, Workload
from jettison.workload.servegen import draw_servegen, read_servegen
from jettison.workload.synthetic import synthesise
from jettison.workload.traces import read_trace, write_trace
from jettison.workload.units import Reading

ProcessName = Literal["poisson", "gamma", "on-off", "diurnal", "burst", "servegen"]


class Source(NamedTuple):
    """A trace file, and how it is read (see ``read_trace``)."""

    path: Path
    reading: Reading
    jitter: bool | None
    skip_bad_rows: bool
    seed: int
    """Of every draw, those of what is made of the trace included."""

    def read(self) -> Workload:
        """Raises TraceError, ConfigError."""
        return read_trace(
            self.path, jitter=self.jitter, seed=self.seed, skip_bad_rows=self.skip_bad_rows, reading=self.reading
        )


def show_info(source: Source, *, json_out: Path | None, console: Console) -> None:
    """Print rates, burstiness and lengths of a trace; ``json_out`` gets the same figures."""
    load = source.read()
    info = describe(load)
    if json_out is not None:
        write_whole(json_out, json.dumps(info.as_dict(), indent=1) + "\n")
    print_cautions(cautions_of(load), console)
    print_info(info, console)


def save(workload: Workload, out: Path, console: Console) -> None:
    """Write the workload and print a line. Raises ConfigError where it has no requests."""
    if not workload.rows:
        raise ConfigError(f"{workload.name}: no request is left to write ({'; '.join(workload.notes)})")
    write_trace(out, workload)
    print_cautions(cautions_of(workload), console)
    console.print(
        f"wrote {out}: {len(workload.rows):,} requests in {workload.duration_s:,.1f} s, "
        f"{workload.mean_rate_per_s:.4g} a second",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def slice_trace(
    source: Source, out: Path, *, start_s: float, end_s: float | None, skip: int, num_requests: int | None,
    thin: float | None, console: Console,
) -> None:
    """Cut by time, leave rows out, thin, and limit the rest, as ``load_workload`` does."""
    load = source.read()
    if start_s or end_s is not None:
        load = shaping.window(load, start_s, end_s)
    load = shaping.skip(load, skip)
    if thin is not None:
        load = shaping.thin_by_probability(load, thin, source.seed)
    load = shaping.limit(load, num_requests=num_requests)
    save(load, out, console)


def upscale_trace(
    source: Source, out: Path, *, factor: float | None, rate_per_s: float | None, keep: shaping.Keep,
    spread_s: float | None, lengths_from: Path | None, console: Console,
) -> None:
    """Upscale a trace (TraceUpscaler), by a factor or to a mean rate."""
    if (factor is None) == (rate_per_s is None):
        raise ConfigError("give --factor or --rate, one of the two")
    load = source.read()
    if rate_per_s is not None:
        if not load.mean_rate_per_s > 0:
            raise ConfigError(f"{source.path}: all requests arrive at one instant, there is no rate to scale")
        factor = rate_per_s / load.mean_rate_per_s
        if factor < 1:
            raise ConfigError(
                f"{source.path} has {load.mean_rate_per_s:.4g} requests/s already; to have fewer: trace slice --thin"
            )
    if lengths_from is not None:
        other = read_trace(lengths_from, jitter=False, skip_bad_rows=source.skip_bad_rows, only_lengths=True)
        load = shaping.swap_lengths(load, other)
    assert factor is not None
    scaled = shaping.upscale(load, factor, source.seed, keep=keep, spread_s=spread_s)
    save(scaled, out, console)
    if keep == "requests" and factor > 1:
        span_s = scaled.rows[-1].arrival_s - scaled.rows[0].arrival_s
        console.print(
            f"Rates are {factor:.3g} times as high at every moment; as many requests as before are used up by the "
            f"first {span_s:.4g} s of the trace, whose mean need not be that of all (--keep span keeps its whole time)"
        )


_COMMON = ("duration", "lengths", "lengths_from", "skip_bad_rows", "prompt", "output")
_USED: dict[str, tuple[str, ...]] = {
    "poisson": ("rate", "num_requests", "bursts", *_COMMON),
    "gamma": ("rate", "cv", "num_requests", "bursts", *_COMMON),
    "on-off": ("rate", "cv", "num_requests", "on", "off", "off_rate", *_COMMON),
    "diurnal": ("rate", "cv", "num_requests", "peak", "period", "peak_at", *_COMMON),
    "burst": (
        "trace", "trace_format", "unit", "burst_start", "burst_end", "repeat", "lengths", "lengths_from",
        "skip_bad_rows",
    ),
    "servegen": (
        "windows", "histograms", "start", "duration", "rate_scale", "lengths", "lengths_from", "skip_bad_rows",
    ),
}
"""Process -> the options that apply to it."""

_NEEDED = {
    "poisson": ("rate",), "gamma": ("rate", "cv"), "on-off": ("rate", "on", "off"), "diurnal": ("rate",),
    "burst": ("trace", "burst_start", "burst_end", "repeat"), "servegen": ("windows", "histograms"),
}  # fmt: skip


def flag(name: str) -> str:
    """An option as it is written on the command line."""
    return "--" + {"bursts": "burst", "trace_format": "format"}.get(name, name).replace("_", "-")


def synthesise_trace(process: ProcessName, options: SynthOptions, out: Path, *, seed: int, console: Console) -> None:
    """Draw a workload and write it. Raises ConfigError for options that exclude each other."""
    save(make_workload(process, options, seed), out, console)


def make_workload(process: ProcessName, options: SynthOptions, seed: int) -> Workload:
    """The workload that the options describe."""
    _check(process, options)
    if process == "burst":
        assert options.trace and options.burst_start is not None and options.burst_end and options.repeat
        reading = Reading(options.trace_format, options.unit)
        load = read_trace(options.trace, seed=seed, skip_bad_rows=bool(options.skip_bad_rows), reading=reading)
        load = shaping.replay_burst(load, options.burst_start, options.burst_end, options.repeat)
    elif process == "servegen":
        assert options.windows and options.histograms
        profile = read_servegen(
            options.windows, options.histograms, skip_bad_rows=bool(options.skip_bad_rows)
        )  # fmt: skip
        load = draw_servegen(
            profile, seed, start_s=options.start or 0.0, duration_s=options.duration,
            rate_scale=1.0 if options.rate_scale is None else options.rate_scale,
        )  # fmt: skip
    else:
        return _swapped(_drawn(process, options, seed), options)
    if options.lengths is not None:
        load = shaping.draw_lengths(load, published_lengths(options.lengths), seed)
    return _swapped(load, options)


def _drawn(process: ProcessName, options: SynthOptions, seed: int) -> Workload:
    lengths: LengthModel
    if options.lengths is not None:
        lengths = published_lengths(options.lengths)
    else:
        prompt, output = options.prompt or 512.0, options.output or 128.0
        lengths = LogNormalPair(_log_normal("prompt", prompt), _log_normal("output", output))
    return synthesise(
        _process(process, options), lengths, seed=seed, duration_s=options.duration, num_requests=options.num_requests,
        name=process, source=f"synthetic ({process})",
    )  # fmt: skip


def _log_normal(name: str, median: float) -> Lengths:
    if not 1.0 <= median <= MAX_TOKENS:
        raise ConfigError(f"{flag(name)} needs a number of tokens from 1 to {MAX_TOKENS}, not {median:g}")
    return Lengths(median, 0.5, min(MAX_TOKENS, max(1, round(8 * median))))


def _process(process: ProcessName, options: SynthOptions) -> ArrivalProcess:
    assert options.rate is not None
    cv = 1.0 if options.cv is None else options.cv
    if process == "on-off":
        assert options.on is not None and options.off is not None
        return OnOff(options.rate, options.on, options.off, options.off_rate or 0.0, cv)
    if process == "diurnal":
        plain = Diurnal(options.rate, cv=cv)
        period_s = plain.period_s if options.period is None else options.period
        peak_at_s = period_s * plain.peak_at_s / plain.period_s if options.peak_at is None else options.peak_at
        peak = plain.peak_over_mean if options.peak is None else options.peak
        return Diurnal(options.rate, peak, period_s, peak_at_s, cv)
    return Steady(options.rate, cv, tuple(_burst(text) for text in options.bursts or ()))


def _burst(text: str) -> Burst:
    try:
        start_s, duration_s, multiplier = map(float, text.split(":"))
    except ValueError:
        raise ConfigError(f"--burst {text!r}: START:SECONDS:FACTOR is expected, as in 20:3:7") from None
    return Burst(start_s, duration_s, multiplier)


def _check(process: ProcessName, options: SynthOptions) -> None:
    values = {f.name: getattr(options, f.name) for f in fields(options)}
    given = [name for name, value in values.items() if value is not None and value is not False and value != []]
    for name in given:
        if name not in _USED[process]:
            others = [other for other, used in _USED.items() if name in used]
            raise ConfigError(f"{flag(name)} is for --process {' or '.join(others)}, not {process}")
    missing = [flag(name) for name in _NEEDED[process] if name not in given]
    if missing:
        raise ConfigError(f"--process {process} needs {', '.join(missing)}")
    if process not in ("burst", "servegen") and (options.duration is None) == (options.num_requests is None):
        raise ConfigError("give --duration or --num-requests, one of the two")
    if options.lengths is not None and (options.lengths_from or options.prompt or options.output):
        raise ConfigError("--lengths goes with neither --lengths-from nor --prompt and --output")


def _swapped(load: Workload, options: SynthOptions) -> Workload:
    if options.lengths_from is None:
        return load
    skips = bool(options.skip_bad_rows)
    other = read_trace(options.lengths_from, jitter=False, skip_bad_rows=skips, only_lengths=True)
    return shaping.swap_lengths(load, other)


def list_public_traces(console: Console) -> None:
    """The names that ``fetch`` knows."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "licence", "what"):
        table.add_column(heading, overflow="fold")
    for trace in PUBLIC_TRACES.values():
        table.add_row(trace.name, trace.licence, trace.about)
    print_whole(table, console)


def fetch_trace(
    name: str, out: Path | None, *, url: str | None, sha256: str | None, timeout_s: float, console: Console
) -> None:
    """Download a public trace, check it, and read its first lines."""
    trace = public_trace(name)
    path = out if out is not None else Path(trace.file_name)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with progress_bar(*columns, console=console) as progress:
        task = progress.add_task(trace.file_name, total=None)
        done = fetch(
            trace, path, url=url, sha256=sha256, timeout_s=timeout_s,
            on_progress=lambda sofar, total: progress.update(task, completed=sofar, total=total),
        )  # fmt: skip
    known = "checked" if trace.sha256 or sha256 else "not published: keep it, and give it as --sha256 next time"
    verb = "is there already" if done.was_there else "fetched"
    console.print(
        f"{done.path}: {verb}, {done.num_bytes:,} bytes, SHA-256 {done.sha256} ({known}); licence {trace.licence}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


"""What ``jettison bench`` and ``jettison trace synth`` may be told: a field an option, with its default and its help.

``cli.flags.with_option_flags`` makes the command lines of them. Loads as light as flags: nothing that reads or sends is
imported here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jettison.errors import ConfigError

Endpoint = Literal["completions", "chat"]
PromptKind = Literal["tokens", "text"]

_LOAD = "Load (one trace or one workload)"
_SHAPE = "Shaping, in this order"
_CLIENT = "Client"
_BATCH = "A batch beside the load, as service_tier flex"
_OUT = "Results"
_CONDITIONS = "Conditions, for the report (default: what a Jettison server tells of itself)"
_ARRIVALS = "Arrivals"
_LENGTHS = "Lengths"


class Flag(NamedTuple):
    """How an option is written and explained."""

    text: str
    panel: str | None
    metavar: str | None
    told: str | None
    """As it is written; None: as its field is called."""
    least: float | None
    most: float | None


def flag(
    default: object, text: str, panel: str | None = None, *, metavar: str | None = None, told: str | None = None,
    least: float | None = None, most: float | None = None,
) -> Any:
    """A field that is an option."""
    return field(default=default, metadata={"flag": Flag(text, panel, metavar, told, least, most)})


def check_numbers(options: Any) -> None:
    """Raise ConfigError for an option that is no finite number, and for seconds that are not above 0."""
    for each in fields(options):
        told, value = each.metadata.get("flag"), getattr(options, each.name)
        if told is None or not isinstance(value, float):
            continue
        name = told.told or "--" + each.name.replace("_", "-")
        if not math.isfinite(value):
            raise ConfigError(f"{name} needs a finite number, not {value:g}")
        if told.metavar == "SECONDS" and value <= 0.0:
            raise ConfigError(f"{name} needs a time above 0 s, not {value:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """One source of requests, and how it is shaped."""

    trace: Path | None = flag(None, "Trace to replay.", _LOAD, metavar="FILE")
    trace_format: str | None = flag(
        None, "Trace's format, where its columns leave it open.", _LOAD, metavar="NAME", told="--format")
    unit: str | None = flag(
        None, "Of the trace's stamps: s, ms, us, ns (default: its format's).", _LOAD, metavar="UNIT")
    workload: str | None = flag(None, "Built-in: burst, burstgpt-like, azure-conv-like.", _LOAD, metavar="NAME")
    """A built-in synthetic one; without a trace and a name the built-in burst."""
    seed: int = flag(0, "Seed of every draw.", _LOAD, least=0)
    """Of every draw, the replay's included."""
    jitter: bool | None = flag(
        None, "Spread arrivals inside the trace's clock step (default: where a format's stamps are seen to be steps).",
        _LOAD, told="--jitter/--no-jitter")
    """As ``read_trace`` takes it."""
    skip_bad_rows: bool = flag(False, "Leave out bad rows of files, and name them.", _LOAD, told="--skip-bad-rows")
    """Of ``trace`` and ``lengths_from``; else a bad row refuses its file."""
    slice_s: float | None = flag(None, "Cut the load into windows so long.", _SHAPE, metavar="SECONDS", told="--slice")
    slice_index: int | None = flag(None, "Which window, from 0.", _SHAPE, metavar="N", least=0)
    thin: float | None = flag(None, "Keep this part, drawn.", _SHAPE, metavar="FRACTION")
    thin_every: int | None = flag(None, "Keep each Nth request.", _SHAPE, metavar="N", least=1)
    rate_scale: float | None = flag(None, "Multiply the rate.", _SHAPE, metavar="FACTOR")
    lengths_from: Path | None = flag(None, "Take lengths from another trace.", _SHAPE, metavar="FILE")
    length_scale: float | None = flag(None, "Multiply all lengths.", _SHAPE, metavar="FACTOR")
    max_model_len: int | None = flag(None, "Cap lengths to this context.", _SHAPE, metavar="N", least=2)
    num_requests: int | None = flag(None, "Stop after so many requests.", _SHAPE, metavar="N", least=1)
    duration_s: float | None = flag(
        None, "Stop after so much of the load.", _SHAPE, metavar="SECONDS", told="--duration")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(LoadOptions):
    """All that ``jettison bench`` may be told, but where the server is."""

    model: str | None = flag(None, "Model to ask for (default: the server's first).", metavar="NAME")
    api_key: str | None = flag(None, "Key to send.", metavar="KEY")
    endpoint: Endpoint = flag("completions", "Endpoint to use.", _CLIENT)
    vocab_size: int = flag(256, "Prompts draw token ids below this.", _CLIENT, metavar="N", least=2)
    ignore_eos: bool = flag(
        True, "Ask for exactly the load's output lengths.", _CLIENT, told="--ignore-eos/--stop-at-eos")
    max_concurrency: int | None = flag(
        None, "At most so many at once (default: open loop).", _CLIENT, metavar="N", least=1)
    cancel_fraction: float = flag(0.0, "Hang up early on this part.", _CLIENT, metavar="FRACTION", least=0.0, most=1.0)
    request_timeout_s: float = flag(
        600.0, "Longest wait for a request.", _CLIENT, metavar="SECONDS", told="--request-timeout")
    total_timeout_s: float | None = flag(
        None, "End of the run; what is left has failed.", _CLIENT, metavar="SECONDS", told="--total-timeout")
    offline_lengths: str | None = flag(
        None, "Lengths of its requests: longbench, sharegpt, others.", _BATCH, metavar="NAME")
    """A published set: with it a batch runs beside the load, its lengths scaled as the load's are."""
    offline_unfinished: int | None = flag(
        None, "So many at any time (default: all at once).", _BATCH, metavar="N", least=1)
    offline_requests: int | None = flag(
        None, "So many in all (default: while the load lasts).", _BATCH, metavar="N", least=1)
    offline_max_input: int | None = flag(None, "Cut its prompts to so many tokens.", _BATCH, metavar="N", least=1)
    offline_max_output: int | None = flag(None, "Cut its answers to so many tokens.", _BATCH, metavar="N", least=1)
    offline_api_key: str | None = flag(None, "Key of offline requests.", _BATCH, metavar="KEY")
    allow_failures: float = flag(
        0.0, "Exit 0 if at most this part was not answered.", _OUT, metavar="FRACTION", least=0.0, most=1.0)
    name: str = flag("run", "Name of the run in the report.", _OUT)
    slo_ttft_s: float | None = flag(
        None, "Time to first token that is good.", _OUT, metavar="SECONDS", told="--slo-ttft")
    slo_tpot_s: float | None = flag(
        None, "Time per output token that is good.", _OUT, metavar="SECONDS", told="--slo-tpot")
    json_out: Path | None = flag(None, "Write the figures.", _OUT, metavar="FILE", told="--json")
    html_out: Path | None = flag(None, "Write a report with plots.", _OUT, metavar="FILE", told="--html")
    parameter_share: float | None = flag(
        None, "Parameters' part of memory.", _CONDITIONS, metavar="FRACTION", least=0.0, most=1.0)
    """This and the next three fill the fairness header; what is not given is what the server tells of itself."""
    kv_capacity_tokens: float | None = flag(
        None, "KV capacity of all instances, in tokens.", _CONDITIONS, metavar="N", least=1)
    """Undropped, whole cluster."""
    num_instances: int | None = flag(
        None, "Instances served from.", _CONDITIONS, metavar="N", told="--instances", least=1)
    prompt_kind: PromptKind | None = None
    """None: token ids, or text on the chat endpoint. From here on no options of the command line."""
    shared_prefix_tokens: int = 0
    num_shared_prefixes: int = 1
    merged_capacity_tokens: float | None = None
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthOptions:
    """What a synthetic trace is made of; None where nothing was said."""

    rate: float | None = flag(None, "Requests a second (on-off: while on; diurnal: mean).", _ARRIVALS, metavar="RATE")
    cv: float | None = flag(None, "Irregularity of the gaps: 1 is Poisson.", _ARRIVALS, metavar="CV")
    duration: float | None = flag(None, "Length of the trace.", _ARRIVALS, metavar="SECONDS")
    num_requests: int | None = flag(None, "Or its number of requests.", _ARRIVALS, metavar="N", least=1)
    bursts: list[str] | None = flag(
        None, "A burst (poisson, gamma); may be given more than once.", _ARRIVALS, told="--burst",
        metavar="START:SECONDS:FACTOR")
    on: float | None = flag(None, "on-off: time on.", _ARRIVALS, metavar="SECONDS")
    off: float | None = flag(None, "on-off: time off.", _ARRIVALS, metavar="SECONDS")
    off_rate: float | None = flag(None, "on-off: rate while off (0).", _ARRIVALS, metavar="RATE")
    peak: float | None = flag(None, "diurnal: peak over mean (1.6).", _ARRIVALS, metavar="FACTOR")
    period: float | None = flag(None, "diurnal: a day (86400).", _ARRIVALS, metavar="SECONDS")
    peak_at: float | None = flag(None, "diurnal: time of the peak (14 h of 24).", _ARRIVALS, metavar="SECONDS")
    trace: Path | None = flag(None, "burst: trace that has it.", _ARRIVALS, metavar="FILE")
    trace_format: str | None = flag(
        None, "Its format, where its columns leave it open.", metavar="NAME", told="--format")
    unit: str | None = flag(None, "Of its time stamps: s, ms, us, ns (default: its format's).", metavar="UNIT")
    burst_start: float | None = flag(None, "burst: where it starts.", _ARRIVALS, metavar="SECONDS")
    burst_end: float | None = flag(None, "burst: where it ends.", _ARRIVALS, metavar="SECONDS")
    repeat: int | None = flag(None, "burst: times that it comes again.", _ARRIVALS, metavar="N", least=1)
    windows: Path | None = flag(
        None, "servegen: clients' windows (CSV), or a folder of chunk-*-trace.csv.", _ARRIVALS, metavar="PATH")
    histograms: Path | None = flag(None, "servegen: token histograms (CSV).", _ARRIVALS, metavar="FILE")
    start: float | None = flag(None, "servegen: from here on.", _ARRIVALS, metavar="SECONDS")
    rate_scale: float | None = flag(None, "servegen: multiply rates.", _ARRIVALS, metavar="FACTOR")
    lengths: str | None = flag(None, "Lengths of a published data set (docs/workloads.md).", _LENGTHS, metavar="NAME")
    lengths_from: Path | None = flag(None, "Lengths of a trace, in its order.", _LENGTHS, metavar="FILE")
    prompt: float | None = flag(None, "Median input, log-normal with sigma 0.5 (512).", _LENGTHS, metavar="N", least=1)
    output: float | None = flag(None, "Median output, the same way (128).", _LENGTHS, metavar="N", least=1)
    skip_bad_rows: bool = flag(False, "Leave out bad rows of files, and name them.", told="--skip-bad-rows")

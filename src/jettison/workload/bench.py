"""``jettison bench``: choose a load, shape it, replay it, print and store the result.

The command line only fills :class:`BenchOptions`. Choosing and shaping are :func:`load_workload`, which other tools
use as well, so that every tool shapes a load in the same order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from jettison.errors import ConfigError
from jettison.report.fairness import FairnessHeader, measured_demand, measured_in
from jettison.report.html import write_html
from jettison.report.output import check_writable
from jettison.report.results import RequestRecord, RunResult, write_results
from jettison.report.summary import print_summary
from jettison.report.terminal import note_phase, progress_bar
from jettison.workload import shaping
from jettison.workload.cautions import cautions_of, print_cautions
from jettison.workload.client import ReplayOptions, replay_sync
from jettison.workload.conditions import Conditions, conditions_of, merged_capacity
from jettison.workload.lengths import published_lengths
from jettison.workload.options import BenchOptions, LoadOptions, check_numbers
from jettison.workload.pool import OfflinePool
from jettison.workload.prompts import PromptMaker
from jettison.workload.synthetic import generate, preset
from jettison.workload.traces import Workload, read_trace
from jettison.workload.units import Reading


def load_workload(options: LoadOptions) -> Workload:
    """The load in the one order in which every tool shapes it.

    Source (a trace file or a named synthetic workload), slice, thin, scale the time, take other lengths,
    scale lengths, cap to the model's context, limit. Raises ConfigError for options that contradict each
    other or leave nothing, TraceError for bad files.
    """
    load = _cut(_source(options), options)
    if options.rate_scale is not None and options.rate_scale != 1.0:
        load = shaping.scale_time(load, options.rate_scale)
    if options.lengths_from is not None:
        other = read_trace(
            options.lengths_from, jitter=False, skip_bad_rows=options.skip_bad_rows, only_lengths=True
        )
        load = shaping.swap_lengths(load, other)
    if options.length_scale is not None and options.length_scale != 1.0:
        load = shaping.scale_lengths(load, options.length_scale)
    if options.max_model_len is not None:
        load = shaping.cap_lengths(load, options.max_model_len)
    load = shaping.limit(load, num_requests=options.num_requests, duration_s=options.duration_s)
    if not load.rows:
        raise ConfigError(f"{load.name}: no request is left to send ({'; '.join(load.notes)})")
    return load


def _source(options: LoadOptions) -> Workload:
    if options.trace is not None and options.workload is not None:
        raise ConfigError("give one load: a trace file or a named workload, not both")
    if options.trace is not None:
        return read_trace(
            options.trace, jitter=options.jitter, seed=options.seed, skip_bad_rows=options.skip_bad_rows,
            reading=Reading(options.trace_format, options.unit),
        )  # fmt: skip
    if options.trace_format is not None or options.unit is not None:
        raise ConfigError("a format and a unit are a trace's; a synthetic workload has seconds")
    if options.jitter is not None:
        raise ConfigError("jitter is for traces; a synthetic workload has exact arrivals")
    return generate(preset(options.workload or "burst"), options.seed)


def _cut(load: Workload, options: LoadOptions) -> Workload:
    """The load sliced and thinned."""
    slice_s, slice_index = options.slice_s, options.slice_index
    if (slice_s is None) != (slice_index is None):
        raise ConfigError("a slice needs both its length and its index")
    if slice_s is not None and slice_index is not None:
        cut = shaping.slices(load, slice_s)
        if not 0 <= slice_index < len(cut):
            raise ConfigError(f"slice {slice_index} does not exist: {load.name} has {len(cut)} slices of {slice_s:g} s")
        load = cut[slice_index]
    if options.thin is not None:
        load = shaping.thin_by_probability(load, options.thin, options.seed)
    if options.thin_every is not None:
        load = shaping.thin_every(load, options.thin_every)
    return load


def run_bench(url: str, options: BenchOptions, console: Console | None = None) -> RunResult:
    """Replay one load against ``url``, print the table, write the requested files, return the run.

    A request that fails raises nothing: it is counted, and the printed summary begins with the failures
    (``report.failures.check_answered`` refuses a run with too many). Raises UserError (ConfigError, TraceError) before
    anything is sent.
    """
    check_numbers(options)
    load = load_workload(options)
    # What could fail after the run fails before it: a finished run must not be lost.
    _conditions(options).check()
    for path in (options.json_out, options.html_out):
        if path is not None:
            check_writable(path)
    console = console or Console()
    if not options.quiet:
        told = [] if load.columns.tenant is None else [f"{load.name}: all tenants' requests are sent with one key"]
        print_cautions([*cautions_of(load), *told], console)
    run = _replay_with_progress(url, load, _replay(options), console, options.quiet)
    conditions = _conditions(options).or_else(conditions_of(run)).completed()
    run.config["fairness"] = fairness_of_run(
        run, load, parameter_share=conditions.parameter_share, kv_capacity_tokens=conditions.kv_capacity_tokens,
        merged_capacity_tokens=conditions.merged_capacity_tokens,
    ).as_dict()
    # Files first: the reader of the printed output may have closed the pipe.
    if options.json_out is not None:
        write_results(options.json_out, [run])
    if options.html_out is not None:
        write_html(options.html_out, [run], title=f"jettison bench: {options.name}")
    if not options.quiet:
        print_summary([run], console)
    return run


def _conditions(options: BenchOptions) -> Conditions:
    """What was said of the cluster."""
    return Conditions(
        options.parameter_share, options.kv_capacity_tokens, options.merged_capacity_tokens, options.num_instances
    )


def _pool(options: BenchOptions) -> OfflinePool | None:
    """The batch beside the load. Raises ConfigError."""
    if options.offline_lengths is None:
        told = (options.offline_unfinished, options.offline_requests, options.offline_max_input,
                options.offline_max_output)  # fmt: skip
        if any(value is not None for value in told):
            raise ConfigError("a batch beside the load needs lengths: --offline-lengths NAME")
        return None
    lengths = published_lengths(options.offline_lengths)
    if options.length_scale is not None:
        lengths = replace(lengths, scale=lengths.scale * options.length_scale)
    return OfflinePool(
        lengths, options.offline_unfinished, options.offline_requests, options.offline_max_input,
        options.offline_max_output, seed=options.seed,
    )


def _replay(options: BenchOptions) -> ReplayOptions:
    """How the load is sent."""
    return ReplayOptions(
        name=options.name,
        model=options.model,
        endpoint=options.endpoint,
        prompt_kind=options.prompt_kind or ("text" if options.endpoint == "chat" else "tokens"),
        prompts=PromptMaker(
            seed=options.seed,
            low_token_id=min(8, options.vocab_size // 2),
            high_token_id=options.vocab_size,
            shared_prefix_tokens=options.shared_prefix_tokens,
            num_shared_prefixes=options.num_shared_prefixes,
        ),
        ignore_eos=options.ignore_eos,
        api_key=options.api_key,
        pool=_pool(options),
        offline_api_key=options.offline_api_key,
        max_concurrency=options.max_concurrency,
        request_timeout_s=options.request_timeout_s,
        total_timeout_s=options.total_timeout_s,
        cancel_fraction=options.cancel_fraction,
        seed=options.seed,
        slo_ttft_s=options.slo_ttft_s,
        slo_tpot_s=options.slo_tpot_s,
    )


def _replay_with_progress(url: str, load: Workload, options: ReplayOptions, console: Console, quiet: bool) -> RunResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Four redraws a second: the client shares its cores with the server it measures.
    with progress_bar(*columns, console=console, refresh_per_second=4, disable=quiet) as progress:
        task = progress.add_task(f"{load.name}: requests ended", total=len(load.rows))

        def note(ended: int, total: int) -> None:
            if ended == 1 and not quiet:  # not before: a missing server is one line on stderr
                note_phase(f"{load.name}: replaying {total} requests, {load.duration_s:.0f} s", console)
            progress.update(task, completed=ended)

        return replay_sync(url, load, replace(options, on_progress=note))


def fairness_of_run(
    run: RunResult,
    load: Workload,
    *,
    parameter_share: float | None = None,
    kv_capacity_tokens: float | None = None,
    merged_capacity_tokens: float | None = None,
    num_instances: int = 2,
) -> FairnessHeader:
    """The fairness header with demand as this run measured it (queue included).

    Compare runs under one header, because a baseline's measured demand contains the queue that its own shortage made.
    """
    records = [_record(row) for row in run.requests_detail or []]
    mean_tokens, peak_tokens = measured_demand(records, load.duration_s)
    return FairnessHeader(
        mean_demand_tokens=mean_tokens,
        peak_demand_tokens=peak_tokens,
        demand_model=measured_in(run.name),
        parameter_share=parameter_share,
        kv_capacity_tokens=kv_capacity_tokens,
        merged_capacity_tokens=merged_capacity(
            kv_capacity_tokens, merged_capacity_tokens, parameter_share, num_instances
        ),
        arrivals=(load.source, *load.notes),
    )


def _record(row: dict[str, Any]) -> RequestRecord:
    scheduled_s = row["scheduled_s"]
    return RequestRecord(
        index=row["index"],
        scheduled_s=scheduled_s,
        input_tokens=row["input_tokens"],
        wanted_tokens=row["wanted_tokens"],
        status=row["status"],
        sent_s=row["sent_s"],
        first_s=None if row["ttft_s"] is None else scheduled_s + row["ttft_s"],
        finished_s=None if row["e2e_s"] is None else scheduled_s + row["e2e_s"],
        output_tokens=row["output_tokens"],
    )

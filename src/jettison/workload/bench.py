"""``jettison bench``: choose a load, shape it, replay it, print and store the result.

The command line only fills :func:`run_bench`'s arguments. Choosing and shaping are :func:`load_workload`, which
other tools use as well, so that every tool shapes a load in the same order.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
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
from jettison.workload.client import Endpoint, PromptKind, ReplayOptions, replay_sync
from jettison.workload.conditions import Conditions, conditions_of, merged_capacity
from jettison.workload.prompts import PromptMaker
from jettison.workload.synthetic import generate, preset
from jettison.workload.traces import Workload, read_trace


def load_workload(
    *,
    trace: Path | None = None,
    workload: str | None = None,
    jitter: bool | None = None,
    slice_s: float | None = None,
    slice_index: int | None = None,
    thin: float | None = None,
    thin_every: int | None = None,
    rate_scale: float | None = None,
    lengths_from: Path | None = None,
    length_scale: float | None = None,
    max_model_len: int | None = None,
    num_requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
) -> Workload:
    """The load in the one order in which every tool shapes it.

    Source (a trace file or a named synthetic workload), slice, thin, scale the time, take other lengths,
    scale lengths, cap to the model's context, limit. Raises ConfigError for options that contradict each
    other or leave nothing, TraceError for bad files.
    """
    load = _source(trace, workload, jitter, seed)
    if (slice_s is None) != (slice_index is None):
        raise ConfigError("a slice needs both its length and its index")
    if slice_s is not None and slice_index is not None:
        cut = shaping.slices(load, slice_s)
        if not 0 <= slice_index < len(cut):
            raise ConfigError(f"slice {slice_index} does not exist: {load.name} has {len(cut)} slices of {slice_s:g} s")
        load = cut[slice_index]
    if thin is not None:
        load = shaping.thin_by_probability(load, thin, seed)
    if thin_every is not None:
        load = shaping.thin_every(load, thin_every)
    if rate_scale is not None and rate_scale != 1.0:
        load = shaping.scale_time(load, rate_scale)
    if lengths_from is not None:
        load = shaping.swap_lengths(load, read_trace(lengths_from, jitter=False))
    if length_scale is not None and length_scale != 1.0:
        load = shaping.scale_lengths(load, length_scale)
    if max_model_len is not None:
        load = shaping.cap_lengths(load, max_model_len)
    load = shaping.limit(load, num_requests=num_requests, duration_s=duration_s)
    if not load.rows:
        raise ConfigError(f"{load.name}: no request is left to send ({'; '.join(load.notes)})")
    return load


def _source(trace: Path | None, workload: str | None, jitter: bool | None, seed: int) -> Workload:
    if trace is not None and workload is not None:
        raise ConfigError("give one load: a trace file or a named workload, not both")
    if trace is not None:
        return read_trace(trace, jitter=jitter, seed=seed)
    if jitter is not None:
        raise ConfigError("jitter is for traces; a synthetic workload has exact arrivals")
    return generate(preset(workload or "burst"), seed)


def run_bench(
    url: str,
    *,
    trace: Path | None = None,
    workload: str | None = None,
    jitter: bool | None = None,
    slice_s: float | None = None,
    slice_index: int | None = None,
    thin: float | None = None,
    thin_every: int | None = None,
    rate_scale: float | None = None,
    lengths_from: Path | None = None,
    length_scale: float | None = None,
    max_model_len: int | None = None,
    num_requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    name: str = "run",
    model: str | None = None,
    api_key: str | None = None,
    endpoint: Endpoint = "completions",
    prompt_kind: PromptKind | None = None,
    vocab_size: int = 256,
    shared_prefix_tokens: int = 0,
    num_shared_prefixes: int = 1,
    ignore_eos: bool = True,
    max_concurrency: int | None = None,
    request_timeout_s: float = 600.0,
    total_timeout_s: float | None = None,
    cancel_fraction: float = 0.0,
    slo_ttft_s: float | None = None,
    slo_tpot_s: float | None = None,
    parameter_share: float | None = None,
    kv_capacity_tokens: float | None = None,
    merged_capacity_tokens: float | None = None,
    num_instances: int | None = None,
    json_out: Path | None = None,
    html_out: Path | None = None,
    console: Console | None = None,
    quiet: bool = False,
) -> RunResult:
    """Replay one load against ``url``, print the table, write what was asked for, return the run.

    ``prompt_kind`` None means token ids, or text on the chat endpoint. ``parameter_share``,
    ``kv_capacity_tokens`` (undropped, whole cluster), ``merged_capacity_tokens`` and ``num_instances`` fill
    the fairness header; what is not given is what the server told of itself (``/jettison/deployment``), if it did.
    Raises UserError (ConfigError, TraceError) before anything is sent.
    """
    load = load_workload(
        trace=trace,
        workload=workload,
        jitter=jitter,
        slice_s=slice_s,
        slice_index=slice_index,
        thin=thin,
        thin_every=thin_every,
        rate_scale=rate_scale,
        lengths_from=lengths_from,
        length_scale=length_scale,
        max_model_len=max_model_len,
        num_requests=num_requests,
        duration_s=duration_s,
        seed=seed,
    )
    options = ReplayOptions(
        name=name,
        model=model,
        endpoint=endpoint,
        prompt_kind=prompt_kind or ("text" if endpoint == "chat" else "tokens"),
        prompts=PromptMaker(
            seed=seed,
            low_token_id=min(8, vocab_size // 2),
            high_token_id=vocab_size,
            shared_prefix_tokens=shared_prefix_tokens,
            num_shared_prefixes=num_shared_prefixes,
        ),
        ignore_eos=ignore_eos,
        api_key=api_key,
        max_concurrency=max_concurrency,
        request_timeout_s=request_timeout_s,
        total_timeout_s=total_timeout_s,
        cancel_fraction=cancel_fraction,
        seed=seed,
        slo_ttft_s=slo_ttft_s,
        slo_tpot_s=slo_tpot_s,
    )
    # What could fail after the run fails before it: a finished run must not be lost.
    said = Conditions(parameter_share, kv_capacity_tokens, merged_capacity_tokens, num_instances)
    said.check()
    for path in (json_out, html_out):
        if path is not None:
            check_writable(path)
    console = console or Console()
    run = _replay_with_progress(url, load, options, console, quiet)
    conditions = said.or_else(conditions_of(run)).completed()
    header = fairness_of_run(
        run, load, parameter_share=conditions.parameter_share, kv_capacity_tokens=conditions.kv_capacity_tokens,
        merged_capacity_tokens=conditions.merged_capacity_tokens,
    )
    run.config["fairness"] = header.as_dict()
    if not quiet:
        print_summary([run], console)
    if json_out is not None:
        write_results(json_out, [run])
    if html_out is not None:
        write_html(html_out, [run], title=f"jettison bench: {name}")
    return run


def _replay_with_progress(url: str, load: Workload, options: ReplayOptions, console: Console, quiet: bool) -> RunResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Four redraws a second: the client shares its cores with the server it measures.
    with progress_bar(*columns, console=console, refresh_per_second=4, disable=quiet) as progress:
        task = progress.add_task(f"{load.name}: requests ended", total=len(load.rows))

        def note(ended: int, total: int) -> None:
            if ended == 1 and not quiet:  # not before: a server that is not there is one line on stderr
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

    Compare runs under one header: the baseline's demand contains the queue that its own shortage made.
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

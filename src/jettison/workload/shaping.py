"""What may be done to a workload between reading it and replaying it: slice, thin, rescale, swap lengths.

Every function is pure, returns a new workload and adds a note that says what it did, so that a report can
print the whole chain. Random draws come from a seed that the caller names.
"""

from __future__ import annotations

import math

import numpy as np

from jettison.errors import ConfigError
from jettison.workload.traces import TraceRow, Workload


def slices(workload: Workload, window_s: float) -> list[Workload]:
    """Cut into consecutive windows of ``window_s`` seconds: all of them, so that none is picked.

    Windows without an arrival are kept (silence is part of the trace) and so is a last, shorter one. The
    arrivals of each window are counted from its start. Raises ConfigError unless ``window_s`` is positive.
    """
    if not window_s > 0:
        raise ConfigError(f"slice length must be above 0 s, got {window_s:g}")
    num_windows = max(1, math.ceil(workload.duration_s / window_s))
    if workload.rows and workload.rows[-1].arrival_s >= num_windows * window_s:
        num_windows += 1  # the last arrival stands exactly on the last edge
    windows: list[list[TraceRow]] = [[] for _ in range(num_windows)]
    for row in workload.rows:
        index = int(row.arrival_s / window_s)
        windows[index].append(row._replace(arrival_s=row.arrival_s - index * window_s))
    cut = []
    for index, rows in enumerate(windows):
        span_s = min(window_s, max(workload.duration_s - index * window_s, 0.0))
        note = f"slice {index} of {num_windows}: {index * window_s:g} s to {index * window_s + span_s:g} s"
        cut.append(workload.with_rows(rows, note, span_s=span_s))
    return cut


def thin_by_probability(workload: Workload, keep: float, seed: int) -> Workload:
    """Keep each arrival with probability ``keep``, one seeded draw per arrival.

    A Poisson stream stays Poisson and bursts keep their width and their multiple of the mean; the
    variability of a more regular or more bursty stream moves towards Poisson as ``keep`` falls.
    """
    if not 0 < keep <= 1:
        raise ConfigError(f"the share of arrivals to keep must be in (0, 1], got {keep:g}")
    draws = np.random.default_rng(seed).random(len(workload.rows))
    rows = [row for row, draw in zip(workload.rows, draws, strict=True) if draw < keep]
    return workload.with_rows(rows, f"kept each arrival with probability {keep:g}, seed {seed}", span_s=workload.span_s)


def thin_every(workload: Workload, k: int) -> Workload:
    """Keep the first of every ``k`` arrivals: what one of ``k`` servers behind a round-robin balancer sees."""
    if k < 1:
        raise ConfigError(f"keep one arrival in k: k must be at least 1, got {k}")
    return workload.with_rows(workload.rows[::k], f"kept every {k}th arrival", span_s=workload.span_s)


def scale_time(workload: Workload, rate_scale: float) -> Workload:
    """Divide every time stamp by ``rate_scale``, so that rates rise by it.

    Gaps and bursts are squeezed together with everything else (BurstGPT's guide, ``--scale``): right for
    matching a slower or faster machine, wrong for asking what more users would do.
    """
    if not rate_scale > 0:
        raise ConfigError(f"rate scale must be above 0, got {rate_scale:g}")
    rows = [row._replace(arrival_s=row.arrival_s / rate_scale) for row in workload.rows]
    span_s = None if workload.span_s is None else workload.span_s / rate_scale
    return workload.with_rows(rows, f"time stamps divided by {rate_scale:g}", span_s=span_s)


def scale_lengths(
    workload: Workload, factor: float, *, floor_tokens: int = 1, input_factor: float | None = None
) -> Workload:
    """Multiply input and output lengths by ``factor``, rounded, never below ``floor_tokens``.

    ``input_factor``, where given, is for inputs: prefill and decoding do not weigh the same on every machine.
    """
    if input_factor is None:
        input_factor = factor
    if not (factor > 0 and input_factor > 0):
        raise ConfigError(f"length scale must be above 0, got {min(factor, input_factor):g}")
    if floor_tokens < 1:
        raise ConfigError(f"the shortest length must be at least 1 token, got {floor_tokens}")

    def scaled(num_tokens: int, by: float) -> int:
        return max(floor_tokens, round(num_tokens * by))

    rows = [
        TraceRow(row.arrival_s, scaled(row.input_tokens, input_factor), scaled(row.output_tokens, factor))
        for row in workload.rows
    ]
    by = f"{factor:g}" if input_factor == factor else f"{input_factor:g} (inputs) and {factor:g} (outputs)"
    note = f"lengths multiplied by {by}, at least {floor_tokens}"
    return workload.with_rows(rows, note, span_s=workload.span_s)


def cap_lengths(workload: Workload, max_model_len: int) -> Workload:
    """Make every request fit ``max_model_len`` tokens: the output is cut to the limit less one, then the input."""
    if max_model_len < 2:
        raise ConfigError(f"max_model_len must be at least 2 tokens, got {max_model_len}")

    def capped(row: TraceRow) -> TraceRow:
        output_tokens = min(row.output_tokens, max_model_len - 1)
        return TraceRow(row.arrival_s, min(row.input_tokens, max_model_len - output_tokens), output_tokens)

    rows = [capped(row) for row in workload.rows]
    num_cut = sum(new != old for new, old in zip(rows, workload.rows, strict=True))
    note = f"{num_cut} of {len(rows)} requests cut to {max_model_len} tokens in all"
    return workload.with_rows(rows, note, span_s=workload.span_s)


def swap_lengths(workload: Workload, lengths: Workload) -> Workload:
    """Keep the arrivals and take the lengths of another trace in its own order, from its start again at its end.

    This is how the papers pair arrivals of one trace with the lengths of another data set.
    """
    if not lengths.rows:
        raise ConfigError(f"{lengths.source}: has no lengths to take")
    rows = []
    for index, row in enumerate(workload.rows):
        other = lengths.rows[index % len(lengths.rows)]
        rows.append(TraceRow(row.arrival_s, other.input_tokens, other.output_tokens))
    return workload.with_rows(rows, f"lengths taken in order from {lengths.source}", span_s=workload.span_s)


def limit(workload: Workload, *, num_requests: int | None = None, duration_s: float | None = None) -> Workload:
    """Keep the first ``num_requests`` arrivals and those before ``duration_s``; None does not limit."""
    rows = workload.rows
    span_s = workload.span_s
    said = []
    if duration_s is not None:
        if not duration_s > 0:
            raise ConfigError(f"duration must be above 0 s, got {duration_s:g}")
        rows = tuple(row for row in rows if row.arrival_s < duration_s)
        span_s = min(duration_s, workload.duration_s)
        said.append(f"arrivals before {duration_s:g} s")
    if num_requests is not None:
        if num_requests < 0:
            raise ConfigError(f"number of requests must be at least 0, got {num_requests}")
        if num_requests < len(rows):
            rows, span_s = rows[:num_requests], None
        said.append(f"the first {num_requests} requests")
    return workload.with_rows(rows, f"kept {' and '.join(said)}", span_s=span_s) if said else workload

"""Changes to a workload between reading and replaying it: cut, thin, upscale, rescale, swap lengths.

Every function is pure, returns a new workload and adds a note on its change, so that a report can print the whole
chain. Random draws come from a seed that the caller names.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from jettison.errors import ConfigError
from jettison.workload.lengths import LengthModel
from jettison.workload.rows import MAX_ARRIVAL_S, MAX_TOKENS, Columns, Flags, Floats, Workload, check_number

Keep = Literal["requests", "span"]

MAX_SLICES = 10**6
"""Most slices of a workload; all of them are made at once."""

LEAST_SPREAD_S = 1e-9
"""Least ``spread_s``: time is counted in nanoseconds."""


def slices(workload: Workload, window_s: float) -> list[Workload]:
    """Cut a workload into consecutive windows of ``window_s`` seconds; returns all of them, so that a caller picks none
    by chance.

    Windows without an arrival are kept (silence is part of the trace) and so is a last, shorter one. The
    arrivals of each window are counted from its start. Raises ConfigError unless ``window_s`` is positive, and for more
    than ``MAX_SLICES``.
    """
    if not window_s > 0:
        raise ConfigError(f"slice length must be above 0 s, got {window_s:g}")
    if not workload.duration_s / window_s <= MAX_SLICES:
        raise ConfigError(f"{workload.name} has more than {MAX_SLICES:,} slices of {window_s:g} s, which is too many")
    columns = workload.columns
    indices = (columns.arrival_s / window_s).astype(np.int64)
    num_windows = max(1, math.ceil(workload.duration_s / window_s))
    if len(columns):
        num_windows = max(num_windows, int(indices[-1]) + 1)  # the last arrival may be at the last edge
    edges = np.searchsorted(indices, np.arange(num_windows + 1))
    cut = []
    for index in range(num_windows):
        span_s = min(window_s, max(workload.duration_s - index * window_s, 0.0))
        note = f"slice {index} of {num_windows}: {index * window_s:g} s to {index * window_s + span_s:g} s"
        rows = columns[int(edges[index]) : int(edges[index + 1])]
        rows = rows.with_arrivals(np.maximum(rows.arrival_s - index * window_s, 0.0))  # an edge may be rounded up
        cut.append(workload.with_rows(rows, note, span_s=span_s))
    return cut


def window(workload: Workload, start_s: float = 0.0, end_s: float | None = None) -> Workload:
    """The arrivals of [``start_s``, ``end_s``), counted from ``start_s``; to the end where ``end_s`` is None."""
    last_s = workload.duration_s
    if not (0 <= start_s <= last_s and (end_s is None or end_s > start_s)):
        until = "the end" if end_s is None else f"{end_s:g} s"
        raise ConfigError(f"{start_s:g} s to {until} is no window of {workload.name}, which has 0 s to {last_s:g} s")
    columns = workload.columns
    keep = columns.arrival_s >= start_s
    if end_s is not None:
        keep &= columns.arrival_s < end_s
    rows = columns.at(keep)
    span_s = (last_s if end_s is None else min(end_s, last_s)) - start_s
    note = f"cut to {start_s:g} s to {start_s + span_s:g} s"
    return workload.with_rows(rows.with_arrivals(rows.arrival_s - start_s), note, span_s=span_s)


def skip(workload: Workload, num_requests: int) -> Workload:
    """The workload without its first ``num_requests``; the next one then arrives at 0."""
    if num_requests < 0:
        raise ConfigError(f"number of requests to leave out must be at least 0, got {num_requests}")
    if num_requests == 0:
        return workload
    if num_requests >= len(workload.rows):
        raise ConfigError(f"{workload.name} has {len(workload.rows)} requests, {num_requests} cannot be left out")
    rows = workload.columns[num_requests:]
    start_s = float(rows.arrival_s[0])
    span_s = None if workload.span_s is None else workload.span_s - start_s
    moved = rows.with_arrivals(rows.arrival_s - start_s)
    return workload.with_rows(moved, f"without the first {num_requests} requests", span_s=span_s)


def thin_by_probability(workload: Workload, keep: float, seed: int) -> Workload:
    """Keep each arrival with probability ``keep``, one seeded draw per arrival.

    A Poisson stream stays Poisson and bursts keep their width and their multiple of the mean; the
    variability of a more regular or more bursty stream moves towards Poisson as ``keep`` falls.
    """
    if not 0 < keep <= 1:
        raise ConfigError(f"the share of arrivals to keep must be in (0, 1], got {keep:g}")
    draws = np.random.default_rng(seed).random(len(workload.rows))
    rows = workload.columns.at(draws < keep)
    return workload.with_rows(rows, f"kept each arrival with probability {keep:g}, seed {seed}", span_s=workload.span_s)


def thin_every(workload: Workload, k: int) -> Workload:
    """Keep the first of every ``k`` arrivals: the load of one of ``k`` servers behind a round-robin balancer."""
    if k < 1:
        raise ConfigError(f"keep one arrival in k: k must be at least 1, got {k}")
    return workload.with_rows(workload.columns[::k], f"kept every {k}th arrival", span_s=workload.span_s)


def upscale(
    workload: Workload, factor: float, seed: int, *, keep: Keep = "requests", spread_s: float | None = None
) -> Workload:
    """More users at the same moments: TraceUpscaler (Sajal et al., EuroSys 2024).

    Each arrival becomes floor(``factor``) arrivals at its own time, and one more with the fraction's probability (one
    seeded draw per arrival, whatever the factor). Requests keep their data and order and take the new times in turn. So
    the rate of every interval rises by ``factor``, while bursts and gaps keep their width. Open loop only.

    ``keep="requests"`` (the authors') stops at as many arrivals as there are requests, within about the first
    1/``factor`` of the time. ``"span"`` keeps the whole time and takes the requests again from their start when they
    run out. ``spread_s`` spreads copies uniformly inside their source's time-stamp step of that width (1 for BurstGPT's
    whole seconds); None, the authors' way, leaves them on one instant. Raises ConfigError for a factor below 1, and
    for one that makes more than ``MAX_REQUESTS`` of a whole span.
    """
    if not (factor >= 1 and math.isfinite(factor)):
        raise ConfigError(f"upscaling needs a factor of at least 1, got {factor:g}; to have fewer requests, thin")
    if spread_s is not None and not LEAST_SPREAD_S <= spread_s <= MAX_ARRIVAL_S:
        raise ConfigError(
            f"the step to spread copies in must be from {LEAST_SPREAD_S:g} s to {MAX_ARRIVAL_S:g} s, got {spread_s:g}"
        )
    columns = workload.columns
    draw_rng, spread_rng = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
    extra = draw_rng.random(len(columns)) < factor - math.floor(factor)
    if keep == "requests":
        arrivals = _first_copies(columns.arrival_s, factor, extra)
    else:
        check_number(max(len(columns), 1) * factor, f"{workload.name} upscaled {factor:g} times")
        arrivals = np.repeat(columns.arrival_s, math.floor(factor) + extra)
    if spread_s is not None:
        offsets = spread_rng.uniform(0.0, spread_s, size=len(arrivals))
        arrivals = np.sort(np.floor(arrivals / spread_s) * spread_s + offsets)
    rows = columns.at(np.arange(len(arrivals)) % max(len(columns), 1)).with_arrivals(arrivals)
    span_s = workload.span_s
    if keep == "requests" and factor > 1:
        span_s = None  # only the part of the time up to the last of them
    spread = "" if spread_s is None else f", copies spread inside {spread_s:g} s"
    note = f"upscaled {factor:g} times (TraceUpscaler), keeping the {keep}{spread}, seed {seed}"
    return workload.with_rows(rows, note, span_s=span_s)


def _first_copies(arrival_s: Floats, factor: float, extra: Flags) -> Floats:
    """The first copies of arrivals, as many as there are arrivals: floor(``factor``) copies of each, and one more where
    ``extra`` is true.

    Copies of later arrivals are not made, and no arrival has more copies than are wanted in all.
    """
    wanted = len(arrival_s)
    copies = np.minimum(min(math.floor(factor), wanted) + extra, wanted)
    made = np.cumsum(copies)
    num_copied = int(np.searchsorted(made, wanted)) + 1
    return np.repeat(arrival_s[:num_copied], copies[:num_copied])[:wanted]


def replay_burst(workload: Workload, start_s: float, end_s: float, repeats: int) -> Workload:
    """Everything up to ``end_s``, then ``repeats`` times the intervals and requests of [``start_s``, ``end_s``).

    An extreme burst (KunServe v3 section 5.6): the first burst, repeated until every system has run out of memory.
    """
    if repeats < 1:
        raise ConfigError(f"a burst is repeated at least once, got {repeats}")
    burst = window(workload, start_s, end_s).columns
    if not len(burst):
        raise ConfigError(f"{workload.name} has no arrival from {start_s:g} s to {end_s:g} s: no burst to repeat")
    check_number(len(burst) * repeats, f"{start_s:g} s to {end_s:g} s of {workload.name} repeated")
    width_s = end_s - start_s
    if not end_s + repeats * width_s <= MAX_ARRIVAL_S:
        raise ConfigError(f"{repeats} times {width_s:g} s is too long, at most {MAX_ARRIVAL_S:g} s are possible")
    columns = workload.columns
    before = columns.at(columns.arrival_s < end_s)
    starts_s = np.arange(repeats) * width_s
    again = burst.at(np.tile(np.arange(len(burst)), repeats))
    times_s = ((burst.arrival_s + end_s) + starts_s[:, np.newaxis]).ravel()
    note = f"{start_s:g} s to {end_s:g} s repeated {repeats} times after {end_s:g} s"
    return workload.with_rows(joined([before, again.with_arrivals(times_s)]), note, span_s=end_s + repeats * width_s)


def joined(parts: list[Columns]) -> Columns:
    """Requests of all parts, in their order."""
    return Columns(
        np.concatenate([part.arrival_s for part in parts]),
        np.concatenate([part.input_tokens for part in parts]),
        np.concatenate([part.output_tokens for part in parts]),
        np.concatenate([part.all_cached for part in parts]),
        np.concatenate([part.all_offline for part in parts]),
        np.concatenate([part.all_tenants for part in parts]),
    )


def scale_time(workload: Workload, rate_scale: float) -> Workload:
    """Divide every time stamp by ``rate_scale``, so that rates rise by it.

    Gaps and bursts are squeezed together with everything else (BurstGPT's guide, ``--scale``): right for
    matching a slower or faster machine, wrong for asking what more users would do.
    """
    if not 0 < rate_scale < math.inf:
        raise ConfigError(f"rate scale must be a finite number above 0, got {rate_scale:g}")
    if not workload.duration_s / rate_scale <= MAX_ARRIVAL_S:
        raise ConfigError(f"rate scale {rate_scale:g}: the last requests would come after {MAX_ARRIVAL_S:g} s")
    columns = workload.columns
    span_s = None if workload.span_s is None else workload.span_s / rate_scale
    rows = columns.with_arrivals(columns.arrival_s / rate_scale)
    return workload.with_rows(rows, f"time stamps divided by {rate_scale:g}", span_s=span_s)


def scale_lengths(
    workload: Workload, factor: float, *, floor_tokens: int = 1, input_factor: float | None = None
) -> Workload:
    """Multiply input and output lengths by ``factor``, rounded, never below ``floor_tokens``.

    ``input_factor``, where given, is the factor of inputs: the cost of prefill relative to decoding differs between
    machines.
    """
    if input_factor is None:
        input_factor = factor
    if not (factor > 0 and input_factor > 0):
        raise ConfigError(f"length scale must be above 0, got {min(factor, input_factor):g}")
    if floor_tokens < 1:
        raise ConfigError(f"the shortest length must be at least 1 token, got {floor_tokens}")
    columns = workload.columns
    with np.errstate(over="ignore"):
        inputs = np.maximum(floor_tokens, np.rint(columns.input_tokens * input_factor))
        outputs = np.maximum(floor_tokens, np.rint(columns.output_tokens * factor))
    by = f"{factor:g}" if input_factor == factor else f"{input_factor:g} (inputs) and {factor:g} (outputs)"
    if (longest := max(inputs.max(initial=0.0), outputs.max(initial=0.0))) > MAX_TOKENS:
        raise ConfigError(f"length scale {by}: a length comes to {longest:.4g} tokens, {MAX_TOKENS} are possible")
    note = f"lengths multiplied by {by}, at least {floor_tokens}"
    return workload.with_rows(columns.with_lengths(inputs, outputs), note, span_s=workload.span_s)


def cap_lengths(workload: Workload, max_model_len: int) -> Workload:
    """Make every request fit ``max_model_len`` tokens: the output is cut to the limit less one, then the input."""
    if not 2 <= max_model_len <= MAX_TOKENS:
        raise ConfigError(f"max_model_len must be from 2 to {MAX_TOKENS} tokens, got {max_model_len}")
    columns = workload.columns
    outputs = np.minimum(columns.output_tokens, max_model_len - 1)
    inputs = np.minimum(columns.input_tokens, max_model_len - outputs)
    num_cut = int(np.count_nonzero((inputs != columns.input_tokens) | (outputs != columns.output_tokens)))
    note = f"{num_cut} of {len(columns)} requests cut to {max_model_len} tokens in all"
    return workload.with_rows(columns.with_lengths(inputs, outputs), note, span_s=workload.span_s)


def swap_lengths(workload: Workload, lengths: Workload) -> Workload:
    """Keep the arrivals and take the lengths of another trace in its own order, from its start again at its end.

    This is how the papers pair arrivals of one trace with the lengths of another data set.
    """
    others = lengths.columns
    if not len(others):
        raise ConfigError(f"{lengths.source}: has no lengths to take")
    columns = workload.columns
    taken = others.at(np.arange(len(columns)) % len(others))
    rows = Columns(
        columns.arrival_s, taken.input_tokens, taken.output_tokens, None, columns.is_offline, columns.tenant
    )
    swapped = workload.with_rows(rows, f"lengths taken in order from {lengths.source}", span_s=workload.span_s)
    left_out = lengths.skipped_rows
    return replace(swapped, notes=(*swapped.notes, *left_out), skipped_rows=(*swapped.skipped_rows, *left_out))


def draw_lengths(workload: Workload, lengths: LengthModel, seed: int) -> Workload:
    """Keep the arrivals and draw new lengths."""
    columns = workload.columns
    prompt_rng, output_rng = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
    inputs, outputs = lengths.draw(prompt_rng, output_rng, len(columns))
    rows = Columns(columns.arrival_s, inputs, outputs, None, columns.is_offline, columns.tenant)
    return workload.with_rows(rows, f"{lengths.describe()}; seed {seed}", span_s=workload.span_s)


def limit(workload: Workload, *, num_requests: int | None = None, duration_s: float | None = None) -> Workload:
    """Keep the first ``num_requests`` arrivals and those before ``duration_s``; None does not limit."""
    rows = workload.columns
    span_s = workload.span_s
    said = []
    if duration_s is not None:
        if not duration_s > 0:
            raise ConfigError(f"duration must be above 0 s, got {duration_s:g}")
        rows = rows.at(rows.arrival_s < duration_s)
        span_s = min(duration_s, workload.duration_s)
        said.append(f"arrivals before {duration_s:g} s")
    if num_requests is not None:
        if num_requests < 0:
            raise ConfigError(f"number of requests must be at least 0, got {num_requests}")
        if num_requests < len(rows):
            rows, span_s = rows[:num_requests], None
        said.append(f"the first {num_requests} requests")
    return workload.with_rows(rows, f"kept {' and '.join(said)}", span_s=span_s) if said else workload

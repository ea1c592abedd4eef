"""The section ``workload`` of a spec: where requests come from, and what is done to them, in which order.

Only what is written; the requests themselves are made by ``simulate.workloads``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jettison.config.values import nonempty, shown, truth
from jettison.errors import ConfigError
from jettison.simulate.fields import Section, above, number, whole, word
from jettison.workload.arrivals import LEAST_CV, MOST_CV, Burst
from jettison.workload.formats import CLASSES
from jettison.workload.lengths import Lengths, published_lengths
from jettison.workload.rows import MAX_ARRIVAL_S, MAX_TOKENS, TraceRow
from jettison.workload.shaping import LEAST_SPREAD_S
from jettison.workload.units import PER_S

Parse = Callable[[object], float]

SOURCES = ("trace", "builtin", "arrivals", "servegen", "rows")


@dataclass(frozen=True, slots=True)
class ArrivalSpec:
    """A process of arrivals (``workload.arrivals``)."""

    process: str
    """``poisson``, ``gamma``, ``on_off`` or ``diurnal``."""
    numbers: tuple[tuple[str, float], ...]
    """What the process needs, by its own names: rates, times, the CV."""
    duration_s: float
    bursts: tuple[Burst, ...] = ()
    """Of ``poisson`` and ``gamma``."""


@dataclass(frozen=True, slots=True)
class LengthSpec:
    """Where lengths come from: another trace, a named distribution, or one for inputs and one for outputs."""

    trace: str | None = None
    name: str | None = None
    input: Lengths | None = None
    output: Lengths | None = None


@dataclass(frozen=True, slots=True)
class ServeGenSpec:
    """A characterisation in ServeGen's form (``workload.servegen``): a file or folder of windows, a file of
    histograms, and the part of its time to draw."""

    windows: str
    histograms: str | None
    """None: the lengths are another section's."""
    start_s: float = 0.0
    duration_s: float | None = None
    rate_scale: float = 1.0
    every_s: float | None = None
    """With ``part_s``: of every so many seconds from ``start_s`` on the first ``part_s``, one after the other."""
    part_s: float | None = None


@dataclass(frozen=True, slots=True)
class BurstReplay:
    """The requests of a window, again and again after its end (KunServe v3 section 5.6)."""

    start_s: float
    end_s: float
    repeats: int


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """Offline requests beside the load (``workload.pool``)."""

    lengths: LengthSpec
    unfinished: int | None = None
    num_requests: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    start_s: float = 0.0
    completion_window_s: float | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """One source, then shaping in the order of the fields."""

    trace: str | None = None
    builtin: str | None = None
    arrivals: ArrivalSpec | None = None
    servegen: ServeGenSpec | None = None
    rows: tuple[TraceRow, ...] | None = None
    """Requests one by one."""
    seed: int | None = None
    """None: each run's own seed."""
    format: str | None = None
    """Of the trace, where its columns leave it open."""
    unit: str | None = None
    """Of the trace's time stamps, where these are bare numbers."""
    jitter: bool | None = None
    skip_bad_rows: bool = False
    """Of every file that is read here: the trace, ServeGen's, the lengths'."""
    skip: int | None = None
    """Without the first so many requests."""
    window_s: tuple[float, float] | None = None
    """Arrivals from the one time up to the other."""
    slice_s: float | None = None
    slice_index: int | None = None
    thin: float | None = None
    thin_every: int | None = None
    upscale: float | None = None
    """TraceUpscaler's factor: more users, the same pattern."""
    spread_s: float | None = None
    """Copies are spread inside time-stamp steps so wide; None: they stand on one instant, as the authors leave them."""
    rate_scale: float | None = None
    """Divides time: the same users, faster."""
    replay_burst: BurstReplay | None = None
    lengths: LengthSpec | None = None
    length_scale: float | None = None
    max_model_len: int | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    mean_load: float | None = None
    """Mean KV demand, memory to spare, as a part of the undropped capacity: decides how many users there are."""
    mean_load_by: str = "users"
    """``users``: more or fewer of them (rate, upscaling, thinning); ``time``: time is divided."""
    span_s: float | None = None
    """With ``rows``: the length of the observation, where it is longer than until the last arrival."""
    offline: BatchSpec | None = None
    """What is beside the load, and is not shaped with it."""
    batches: tuple[BatchSpec, ...] = ()
    """More of that."""


def parse_workload(raw: object, where: str) -> WorkloadSpec:
    """Check the section. Raises ConfigError that begins with the place."""
    if isinstance(raw, str):
        raw = {"builtin": raw}
    if raw is None:
        raise ConfigError(f"{where} is missing: name a trace, a built-in workload or a process of arrivals")
    section = Section(raw, where)
    sources = [key for key in SOURCES if section.has(key)]
    if len(sources) != 1:
        listed = ", ".join(SOURCES)
        raise ConfigError(f"{where} needs exactly one of {listed}, not {' and '.join(sources) or 'none'}")
    arrivals = _arrivals(section.section("arrivals")) if section.has("arrivals") else None
    spec = WorkloadSpec(
        trace=section.take("trace", nonempty, None),
        builtin=section.take("builtin", nonempty, None),
        arrivals=arrivals,
        servegen=_servegen(section.section("servegen")) if section.has("servegen") else None,
        rows=_rows(section) if section.has("rows") else None,
        seed=section.take("seed", whole(0), None),
        format=section.take("format", nonempty, None),
        unit=section.take("unit", word(*PER_S), None),
        jitter=section.take("jitter", truth, None),
        skip_bad_rows=section.take("skip_bad_rows", truth, False),
        skip=section.take("skip", whole(0), None),
        window_s=section.take("window_s", _window, None),
        slice_s=section.take("slice_s", above(0.0), None),
        slice_index=section.take("slice_index", whole(0), None),
        thin=section.take("thin", above(0.0), None),
        thin_every=section.take("thin_every", whole(1), None),
        upscale=section.take("upscale", number(1.0), None),
        spread_s=section.take("spread_s", number(LEAST_SPREAD_S, MAX_ARRIVAL_S), None),
        rate_scale=section.take("rate_scale", above(0.0), None),
        replay_burst=_replay_burst(section.section("replay_burst")) if section.has("replay_burst") else None,
        lengths=_lengths(section.raw("lengths"), section.at("lengths")) if section.has("lengths") else None,
        length_scale=section.take("length_scale", above(0.0), None),
        max_model_len=section.take("max_model_len", whole(2, MAX_TOKENS), None),
        num_requests=section.take("num_requests", whole(1), None),
        duration_s=section.take("duration_s", above(0.0), None),
        mean_load=section.take("mean_load", above(0.0), None),
        mean_load_by=section.take("mean_load_by", word("users", "time"), "users"),
        span_s=section.take("span_s", above(0.0, MAX_ARRIVAL_S), None),
        offline=_batch(section.section("offline")) if section.has("offline") else None,
        batches=tuple(_batch(Section(raw, where)) for raw, where in section.items("batches")),
    )
    _check(section, spec)
    section.close()
    return spec


def _check(section: Section, spec: WorkloadSpec) -> None:
    if spec.arrivals is not None and spec.lengths is None:
        raise ConfigError(f"{section.at('lengths')} is missing: arrivals have none of their own")
    if spec.servegen is not None and spec.servegen.histograms is None and spec.lengths is None:
        raise ConfigError(f"{section.at('servegen.histograms')} is missing: or say lengths")
    if (spec.slice_s is None) != (spec.slice_index is None):
        missing = "slice_index" if spec.slice_index is None else "slice_s"
        raise ConfigError(f"{section.at(missing)} is missing: a slice needs both its length and its index")
    for key in ("format", "unit", "jitter"):
        if getattr(spec, key) is not None and spec.trace is None:
            raise ConfigError(f"{section.at(key)} is for traces")
    reads_files = spec.trace is not None or spec.servegen is not None
    if spec.skip_bad_rows and not reads_files and (spec.lengths is None or spec.lengths.trace is None):
        raise ConfigError(f"{section.at('skip_bad_rows')} is for files: a trace, ServeGen's, or the lengths of one")
    if spec.spread_s is not None and spec.upscale is None and spec.mean_load is None:
        raise ConfigError(f"{section.at('spread_s')} goes with upscale, or with mean_load")
    if spec.span_s is not None and spec.rows is None:
        raise ConfigError(f"{section.at('span_s')} goes with rows only")
    if spec.span_s is not None and spec.rows is not None and (last_s := spec.rows[-1].arrival_s) > spec.span_s:
        raise ConfigError(f"{section.at('span_s')} {spec.span_s:g} ends before the last request, at {last_s:g} s")
    if spec.thin is not None and spec.thin > 1.0:
        raise ConfigError(f"{section.at('thin')} needs a part from 0 to 1, not {spec.thin:g}")


def _batch(section: Section) -> BatchSpec:
    batch = BatchSpec(
        _lengths(section.raw("lengths"), section.at("lengths")), section.take("unfinished", whole(1), None),
        section.take("num_requests", whole(1), None), section.take("max_input_tokens", whole(1, MAX_TOKENS), None),
        section.take("max_output_tokens", whole(1, MAX_TOKENS), None),
        section.take("start_s", number(0.0, MAX_ARRIVAL_S), 0.0),
        section.take("completion_window_s", above(0.0, MAX_ARRIVAL_S), None), section.take("tenant", nonempty, None),
    )
    section.close()
    if batch.lengths.trace is not None:
        where = section.at("lengths.trace")
        raise ConfigError(f"{where} is for a trace's arrivals; name a set, or say input and output")
    if batch.unfinished is None and batch.num_requests is None:
        raise ConfigError(
            f"{section.at('unfinished')} is missing: how many are to be in the system at any time; or num_requests"
        )
    if batch.completion_window_s is not None and batch.num_requests is None:
        raise ConfigError(f"{section.at('num_requests')} is missing: an endless batch has no completion window")
    return batch


def _servegen(section: Section) -> ServeGenSpec:
    spec = ServeGenSpec(
        section.take("windows", nonempty), section.take("histograms", nonempty, None),
        section.take("start_s", number(0.0), 0.0),
        section.take("duration_s", above(0.0), None), section.take("rate_scale", above(0.0), 1.0),
        section.take("every_s", above(0.0), None), section.take("part_s", above(0.0), None),
    )
    section.close()
    if (spec.every_s is None) != (spec.part_s is None):
        missing = "part_s" if spec.part_s is None else "every_s"
        raise ConfigError(f"{section.at(missing)} is missing: every_s and part_s go together")
    if spec.every_s is not None and spec.duration_s is not None:
        raise ConfigError(f"{section.at('duration_s')} does not go with every_s: parts last to the end of the time")
    return spec


def _replay_burst(section: Section) -> BurstReplay:
    where = section.at("end_s")
    replay = BurstReplay(
        section.take("start_s", number(0.0)), section.take("end_s", above(0.0)), section.take("repeats", whole(1)),
    )
    section.close()
    if replay.end_s <= replay.start_s:
        raise ConfigError(f"{where} {replay.end_s:g} is not after start_s {replay.start_s:g}")
    return replay


def _window(value: object) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"needs [from, to] in seconds, not {shown(value)}")
    begin_s, end_s = number(0.0)(value[0]), number(0.0)(value[1])
    if end_s <= begin_s:
        raise ValueError(f"needs [from, to] with from before to, not {shown(value)}")
    return begin_s, end_s


def _rows(section: Section) -> tuple[TraceRow, ...]:
    """``[arrival in s, input tokens, output tokens]`` each, and its class where it is offline."""
    arrival_s, tokens = number(0.0, MAX_ARRIVAL_S), whole(1, MAX_TOKENS)
    rows = []
    for raw, where in section.items("rows"):
        if not isinstance(raw, list | tuple) or len(raw) not in (3, 4):
            raise ConfigError(f"{where} needs [arrival in s, input tokens, output tokens], not {shown(raw)}")
        try:
            is_offline = len(raw) == 4 and word(*CLASSES)(raw[3]) == "offline"
            rows.append(TraceRow(arrival_s(raw[0]), tokens(raw[1]), tokens(raw[2]), is_offline=is_offline))
        except ValueError as error:
            raise ConfigError(f"{where} {error}") from None
    if not rows:
        raise ConfigError(f"{section.at('rows')} is empty")
    return tuple(sorted(rows, key=lambda row: row.arrival_s))


# --- arrivals


_CV = number(LEAST_CV, MOST_CV)

_PROCESSES: Mapping[str, Mapping[str, tuple[Parse, float | None]]] = {
    "poisson": {"rate_per_s": (above(0.0), None)},
    "gamma": {"rate_per_s": (above(0.0), None), "cv": (_CV, None)},
    "on_off": {
        "on_rate_per_s": (above(0.0), None), "on_s": (above(0.0), None), "off_s": (above(0.0), None),
        "off_rate_per_s": (number(0.0), 0.0), "cv": (_CV, 1.0),
    },
    "diurnal": {
        "mean_rate_per_s": (above(0.0), None), "peak_over_mean": (number(1.0, 2.0), 1.6),
        "period_s": (above(0.0), 86_400.0), "peak_at_s": (number(0.0), 50_400.0), "cv": (_CV, 1.0),
    },
}
"""Process -> its numbers, each with its parser and its default (None: it has to be given)."""


def _arrivals(section: Section) -> ArrivalSpec:
    process = section.take("process", word(*_PROCESSES), "poisson")
    numbers = tuple(
        (key, section.take(key, parse) if default is None else section.take(key, parse, default))
        for key, (parse, default) in _PROCESSES[process].items()
    )
    duration_s = section.take("duration_s", above(0.0, MAX_ARRIVAL_S))
    bursts: tuple[Burst, ...] = ()
    if process in ("poisson", "gamma"):
        bursts = tuple(_burst(raw, where) for raw, where in section.items("bursts"))
    section.close()
    return ArrivalSpec(process, numbers, duration_s, bursts)


def _burst(raw: object, where: str) -> Burst:
    section = Section(raw, where)
    burst = Burst(
        section.take("start_s", number(0.0)), section.take("duration_s", above(0.0)),
        section.take("multiplier", above(0.0)),
    )
    section.close()
    return burst


# --- lengths


def _lengths(raw: object, where: str) -> LengthSpec:
    if isinstance(raw, str):
        return _published(raw, where)
    section = Section(raw, where)
    if section.has("trace"):
        spec = LengthSpec(trace=section.take("trace", nonempty))
    elif section.has("name"):
        spec = _published(section.take("name", nonempty), where)
    else:
        spec = LengthSpec(
            input=_distribution(section.raw("input"), section.at("input")),
            output=_distribution(section.raw("output"), section.at("output")),
        )
    section.close()
    return spec


def _published(name: str, where: str) -> LengthSpec:
    try:
        published_lengths(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return LengthSpec(name=name)


def _distribution(raw: object, where: str) -> Lengths:
    """A whole number, always the same; or a log-normal by its median and its mean or the sigma of its logarithm."""
    if raw is None:
        raise ConfigError(f"{where} is missing")
    if not isinstance(raw, Mapping):
        try:
            fixed = whole(1, MAX_TOKENS)(raw)
        except ValueError as error:
            raise ConfigError(f"{where} {error}, or median and mean") from None
        return Lengths(fixed, 0.0, fixed, fixed)
    section = Section(raw, where)
    median = section.take("median", above(0.0, MAX_TOKENS))
    cap = section.take("cap", whole(1, MAX_TOKENS), 1 << 17)
    floor = section.take("floor", whole(1, MAX_TOKENS), 1)
    if section.has("mean") == section.has("sigma"):
        raise ConfigError(f"{where} needs either mean or sigma beside the median")
    mean = section.take("mean", above(0.0, MAX_TOKENS), None)
    sigma = section.take("sigma", number(0.0, 10.0), 0.0)
    section.close()
    if floor > cap:
        raise ConfigError(f"{where}.floor {floor} is above {where}.cap {cap}")
    if mean is None:
        return Lengths(median, sigma, cap, floor)
    if mean < median:
        raise ConfigError(f"{where}.mean {mean:g} is below the median {median:g}: no log-normal has that")
    made = Lengths.from_mean(median, mean, cap)
    return Lengths(made.median, made.sigma, cap, floor)

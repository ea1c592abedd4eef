"""The requests of a spec: its source, shaped in the one order, for one seed.

``mean_load`` is not applied here: the caller knows the machine, finds the factor (``simulate.loads``) and passes it as
``factor``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from jettison.errors import ConfigError, TraceError
from jettison.simulate.workload_spec import ArrivalSpec, BatchSpec, LengthSpec, WorkloadSpec
from jettison.workload import shaping
from jettison.workload.arrivals import ArrivalProcess, Diurnal, OnOff, Steady
from jettison.workload.lengths import LengthModel, LogNormalPair, published_lengths
from jettison.workload.pool import OfflinePool
from jettison.workload.rows import Workload, as_columns
from jettison.workload.servegen import draw_servegen, read_servegen
from jettison.workload.synthetic import generate, preset, synthesise
from jettison.workload.traces import read_trace
from jettison.workload.units import Reading

DATA_VARIABLE = "JETTISON_DATA"
"""Environment variable: a folder in which traces are looked for, too, its own folders included."""


def build_workload(spec: WorkloadSpec, run_seed: int, base_dir: Path = Path(), *, factor: float = 1.0) -> Workload:
    """The requests. ``factor``: so many times the users (or the speed of time, with ``mean_load_by: time``).

    Raises ConfigError for shaping that leaves nothing or makes no sense, TraceError for bad files.
    """
    seed = run_seed if spec.seed is None else spec.seed
    users = factor if spec.mean_load_by == "users" else 1.0
    load, users_left = _source(spec, seed, base_dir, users)
    load = _cut(load, spec, seed)
    load = _more_users(load, spec, seed, users_left)
    rate_scale = (spec.rate_scale or 1.0) * (factor if spec.mean_load_by == "time" else 1.0)
    if rate_scale != 1.0:
        with _placing("rate_scale" if spec.rate_scale is not None else "mean_load"):
            load = shaping.scale_time(load, rate_scale)
    if spec.replay_burst is not None:
        burst = spec.replay_burst
        with _placing("replay_burst"):
            load = shaping.replay_burst(load, burst.start_s, burst.end_s, burst.repeats)
    if spec.lengths is not None and spec.arrivals is None:
        load = _other_lengths(load, spec.lengths, seed, base_dir, spec.skip_bad_rows)
    if spec.length_scale is not None:
        with _placing("length_scale"):
            load = shaping.scale_lengths(load, spec.length_scale)
    if spec.max_model_len is not None:
        load = shaping.cap_lengths(load, spec.max_model_len)
    load = shaping.limit(load, num_requests=spec.num_requests, duration_s=spec.duration_s)
    if not load.rows:
        raise ConfigError(f"workload: no request is left of {load.name} ({'; '.join(load.notes)})")
    return load


def missing_file(spec: WorkloadSpec, base_dir: Path = Path()) -> str | None:
    """Why the requests cannot be made for want of a file that is named; None where all are there."""
    named = []
    if spec.trace is not None:
        named.append((spec.trace, "workload.trace", False))
    if spec.servegen is not None:
        named.append((spec.servegen.windows, "workload.servegen.windows", True))
        if spec.servegen.histograms is not None:
            named.append((spec.servegen.histograms, "workload.servegen.histograms", False))
    if spec.lengths is not None and spec.lengths.trace is not None:
        named.append((spec.lengths.trace, "workload.lengths.trace", False))
    try:
        for name, where, or_folder in named:
            _data_file(name, base_dir, where, or_folder=or_folder)
    except TraceError as error:
        return str(error)
    return None


def build_pool(spec: WorkloadSpec, run_seed: int) -> OfflinePool | None:
    """The batch beside the load, where there is one; the same for every load of this seed."""
    return None if spec.offline is None else _pool(spec.offline, run_seed if spec.seed is None else spec.seed)


def build_batches(spec: WorkloadSpec, run_seed: int) -> tuple[OfflinePool, ...]:
    """The others, likewise, each with draws of its own."""
    seed = run_seed if spec.seed is None else spec.seed
    return tuple(_pool(batch, seed + number) for number, batch in enumerate(spec.batches, 1))


def _pool(batch: BatchSpec, seed: int) -> OfflinePool:
    tenant = {} if batch.tenant is None else {"tenant": batch.tenant}
    return OfflinePool(
        _length_model(batch.lengths), batch.unfinished, batch.num_requests, batch.max_input_tokens,
        batch.max_output_tokens, batch.start_s, seed, batch.completion_window_s, **tenant,
    )


@contextmanager
def _placing(key: str) -> Iterator[None]:
    """What is refused while the requests are made says where it was asked for."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"workload.{key}: {str(error).removeprefix(f'{key}: ')}") from None


def _source(spec: WorkloadSpec, seed: int, base_dir: Path, users: float) -> tuple[Workload, float]:
    """The source with as many users as it can be asked for, and how many times more are still to come."""
    if spec.trace is not None:
        path = _data_file(spec.trace, base_dir, "workload.trace")
        reading = Reading(spec.format, spec.unit)
        load = read_trace(path, jitter=spec.jitter, seed=seed, skip_bad_rows=spec.skip_bad_rows, reading=reading)
        return load, users
    if spec.rows is not None:
        return Workload(as_columns(spec.rows), "rows", "requests of the spec", span_s=spec.span_s), users
    if spec.builtin is not None:
        with _placing("builtin"):
            return generate(preset(spec.builtin).scaled(users), seed), 1.0
    if spec.servegen is not None:
        part = spec.servegen
        profile = read_servegen(
            _data_file(part.windows, base_dir, "workload.servegen.windows", or_folder=True),
            None if part.histograms is None
            else _data_file(part.histograms, base_dir, "workload.servegen.histograms"),
            skip_bad_rows=spec.skip_bad_rows,
        )
        with _placing("servegen"):
            start_s = part.start_s
            if part.every_s is not None and part.part_s is not None:
                profile, start_s = profile.compressed(start_s, part.every_s, part.part_s), 0.0
            return draw_servegen(
                profile, seed, start_s=start_s, duration_s=part.duration_s, rate_scale=part.rate_scale * users
            ), 1.0
    assert spec.arrivals is not None and spec.lengths is not None
    lengths = _length_model(spec.lengths)
    arrivals = spec.arrivals
    with _placing("arrivals"):
        process = _process(arrivals, users)
        return synthesise(process, lengths, seed=seed, duration_s=arrivals.duration_s, name=arrivals.process), 1.0


def _process(spec: ArrivalSpec, users: float) -> ArrivalProcess:
    numbers = dict(spec.numbers)
    if spec.process == "on_off":
        process = OnOff(**numbers)
        return replace(
            process, on_rate_per_s=process.on_rate_per_s * users, off_rate_per_s=process.off_rate_per_s * users
        )
    if spec.process == "diurnal":
        daily = Diurnal(**numbers)
        return replace(daily, mean_rate_per_s=daily.mean_rate_per_s * users)
    steady = Steady(**numbers, bursts=spec.bursts)
    return replace(steady, rate_per_s=steady.rate_per_s * users)


def _length_model(spec: LengthSpec) -> LengthModel:
    if spec.trace is not None:
        raise ConfigError("workload.lengths.trace is for a trace's arrivals; name a set, or say input and output")
    if spec.name is not None:
        return published_lengths(spec.name)
    assert spec.input is not None and spec.output is not None
    return LogNormalPair(spec.input, spec.output)


def _cut(load: Workload, spec: WorkloadSpec, seed: int) -> Workload:
    if spec.skip:
        with _placing("skip"):
            load = shaping.skip(load, spec.skip)
    if spec.window_s is not None:
        with _placing("window_s"):
            load = shaping.window(load, *spec.window_s)
    if spec.slice_s is not None and spec.slice_index is not None:
        with _placing("slice_s"):
            cut = shaping.slices(load, spec.slice_s)
        if spec.slice_index >= len(cut):
            raise ConfigError(
                f"workload.slice_index {spec.slice_index} does not exist: {load.name} has {len(cut)} slices of "
                f"{spec.slice_s:g} s"
            )
        load = cut[spec.slice_index]
    if spec.thin is not None:
        load = shaping.thin_by_probability(load, spec.thin, seed)
    if spec.thin_every is not None:
        load = shaping.thin_every(load, spec.thin_every)
    return load


def _more_users(load: Workload, spec: WorkloadSpec, seed: int, users: float) -> Workload:
    """Requests that are there already: upscaled, or thinned where fewer are wanted."""
    factor = (spec.upscale or 1.0) * users
    if factor == 1.0:
        return load
    if factor < 1.0:
        return shaping.thin_by_probability(load, factor, seed)
    with _placing("upscale" if spec.upscale is not None else "mean_load"):
        return shaping.upscale(load, factor, seed, keep="span", spread_s=spec.spread_s)


def _other_lengths(
    load: Workload, spec: LengthSpec, seed: int, base_dir: Path, skip_bad_rows: bool
) -> Workload:
    if spec.trace is not None:
        path = _data_file(spec.trace, base_dir, "workload.lengths.trace")
        other = read_trace(path, jitter=False, skip_bad_rows=skip_bad_rows, only_lengths=True)
        return shaping.swap_lengths(load, other)
    return shaping.draw_lengths(load, _length_model(spec), seed)


def _data_file(name: str, base_dir: Path, where: str, *, or_folder: bool = False) -> Path:
    """As it is, beside the spec, or in the data folder or one of its folders. Raises TraceError."""
    places = [Path(name), base_dir / name]
    data = os.environ.get(DATA_VARIABLE)
    if data:
        places += [Path(data) / name, *sorted(Path(data).glob(f"*/{name}"))]
    for path in places:
        if path.is_file() or (or_folder and path.is_dir()):
            return path
    more = "" if data else f" (traces are looked for under {DATA_VARIABLE}, too, where it is set)"
    kind = "file or folder" if or_folder else "file"
    raise TraceError(f"{where}: there is no {kind} {name}{more}")

"""The recorded memory of a run by use, as samples over time: of the whole cluster, or of one worker. Draws nothing.

A run of Jettison has bytes by worker and use; a run without workers has KV blocks; any server with vLLM's metrics has
the share of its KV cache in use. The most detailed of these is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jettison.report.results import RunResult, SeriesPoint

MEMORY_SERIES = "worker_memory_bytes"
"""Series ``worker_memory_bytes/<use>/<worker>``: bytes of each use on each worker."""

KV_BLOCKS, KV_CAPACITY = "kv_blocks_used", "kv_blocks_total"
"""Series ``<name>/<group>``: KV blocks that requests hold, and all that the group has."""

KV_CACHED, KV_OFFLINE = "kv_blocks_cached", "offline_blocks"
"""Series of some of these blocks: free ones that still hold a prefix, and ones that offline requests hold."""

WORKER_GROUP = "worker_group"
"""Series ``worker_group/<worker>``: the worker's group, below 0 for none."""

KV_USAGE = "kv_usage"
"""Series of the share of the KV cache in use."""

USES = ("parameters", "kv", "workspace", "free")
"""Uses of a worker's memory, in the order in which they are stacked."""

MOST_SAMPLES = 1500
"""Most samples, as a picture is no wider than this in points; of longer series every n-th sample is taken."""

LEAST_SHARE = 0.01
"""A use that never exceeds this share of all memory is left out: it would be a mere line with an entry in the
legend."""

Floats = npt.NDArray[np.float64]

_MIB, _GIB = 2.0**20, 2.0**30
_GIB_FROM = 8 * _GIB


@dataclass(frozen=True, slots=True)
class MemoryByUse:
    """Memory by use: for each use one value at each time, which holds until the next."""

    times_s: Floats
    layers: dict[str, Floats]
    """Use -> values in ``unit``, to be stacked in this order: ``parameters``, ``kv_held``, ``kv_other`` (free or
    cached; where the held part is not recorded, all KV is ``kv``), ``workspace``, ``free``. For one instance
    ``kv_online``, ``kv_offline``, ``kv_cached`` and ``kv_free`` replace the first two."""
    unit: str


def worker_names(run: RunResult) -> list[str]:
    """Workers with recorded memory, in numeric order where names are numbers."""
    parts = [name.split("/") for name in run.series if name.startswith(f"{MEMORY_SERIES}/")]
    names = {part[2] for part in parts if len(part) == 3}
    return sorted(names, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))


def total_points(run: RunResult, name: str) -> list[SeriesPoint]:
    """The series ``name``, or ``name/<group>`` summed over the groups in each sample."""
    if name in run.series:
        return run.series[name]
    total: dict[float, float] = {}
    for key, points in run.series.items():
        if key.startswith(f"{name}/"):
            for t, value in points:
                total[t] = total.get(t, 0.0) + value
    return sorted(total.items())


def held_at(points: Sequence[SeriesPoint], times_s: Floats) -> Floats:
    """The series' value at each time: the last one at or before it, the first one earlier than that."""
    stamps = np.array([t for t, _ in points])
    values = np.array([value for _, value in points], dtype=np.float64)
    return values[np.clip(np.searchsorted(stamps, times_s, side="right") - 1, 0, len(values) - 1)]


def worker_memory(run: RunResult, worker: str) -> MemoryByUse:
    """One worker's memory; the held part of its KV cache is not told apart."""
    named = {use: run.series.get(f"{MEMORY_SERIES}/{use}/{worker}", []) for use in USES}
    times_s = _sample_times(*named.values())
    layers = {use: held_at(points, times_s) for use, points in named.items() if points}
    return _scaled(times_s, layers)


def instance_memory(run: RunResult, worker: str) -> MemoryByUse:
    """One worker's memory with its KV split by owner (online, offline, cached, free); as ``worker_memory`` where the
    run records no groups.

    Each member of a merged group has the group's shares, because a block has a part in every stage.
    """
    group_points = run.series.get(f"{WORKER_GROUP}/{worker}")
    named = {use: run.series.get(f"{MEMORY_SERIES}/{use}/{worker}", []) for use in USES}
    if not group_points or not named["kv"]:
        return worker_memory(run, worker)
    times_s = _sample_times(*named.values())
    groups = held_at(group_points, times_s)
    kv = held_at(named["kv"], times_s)
    shares = {use: np.zeros_like(times_s) for use in ("kv_online", "kv_offline", "kv_cached")}
    for group in np.unique(groups[groups >= 0]).astype(int):
        is_in = groups == group
        found = {
            name: held_at(points, times_s[is_in])
            for name in (KV_BLOCKS, KV_CAPACITY, KV_CACHED, KV_OFFLINE)
            if (points := run.series.get(f"{name}/{group}"))
        }
        if KV_BLOCKS in found and KV_CAPACITY in found:
            none = np.zeros(int(is_in.sum()))
            used, total = found[KV_BLOCKS], found[KV_CAPACITY]
            offline = np.minimum(found.get(KV_OFFLINE, none), used)  # a shared block counts for each holder
            shares["kv_online"][is_in] = _share(used - offline, total)
            shares["kv_offline"][is_in] = _share(offline, total)
            shares["kv_cached"][is_in] = _share(np.minimum(found.get(KV_CACHED, none), total - used), total)
    split = {use: kv * share for use, share in shares.items()}
    split["kv_free"] = kv - sum(split.values())
    layers: dict[str, Floats] = {}
    for use, points in named.items():
        layers |= split if use == "kv" else {use: held_at(points, times_s)} if points else {}
    return _scaled(times_s, layers, drops_small=False)


def cluster_memory(run: RunResult) -> MemoryByUse | None:
    """The whole cluster's memory, or its KV cache where the run recorded only that; None without either."""
    workers = worker_names(run)
    used, total = total_points(run, KV_BLOCKS), total_points(run, KV_CAPACITY)
    if workers:
        series = {use: [run.series.get(f"{MEMORY_SERIES}/{use}/{worker}", []) for worker in workers] for use in USES}
        times_s = _sample_times(*(points for each in series.values() for points in each))
        layers = {
            use: np.sum([held_at(points, times_s) for points in each if points], axis=0)
            for use, each in series.items()
            if any(each)
        }
        if used and total and "kv" in layers:
            layers = _split_kv(layers, _share(held_at(used, times_s), held_at(total, times_s)))
        return _scaled(times_s, layers)
    if used and total:
        times_s = _sample_times(used, total)
        held, capacity = held_at(used, times_s), held_at(total, times_s)
        return MemoryByUse(times_s, {"kv_held": held, "kv_other": np.maximum(capacity - held, 0.0)}, "KV blocks")
    if usage := run.series.get(KV_USAGE):
        times_s = _sample_times(usage)
        percent = 100.0 * held_at(usage, times_s)
        return MemoryByUse(times_s, {"kv_held": percent, "kv_other": 100.0 - percent}, "% of KV cache")
    return None


def _split_kv(layers: dict[str, Floats], held_share: Floats) -> dict[str, Floats]:
    """Split the KV into held and other bytes. A block has the same number of bytes in every group, over all its stages,
    so the share of blocks is the share of bytes."""
    split: dict[str, Floats] = {}
    for use, values in layers.items():
        if use == "kv":
            split |= {"kv_held": values * held_share, "kv_other": values * (1.0 - held_share)}
        else:
            split[use] = values
    return split


def _share(used: Floats, total: Floats) -> Floats:
    return np.clip(np.divide(used, total, out=np.zeros_like(used), where=total > 0), 0.0, 1.0)


def _sample_times(*series: Sequence[SeriesPoint]) -> Floats:
    times = np.array(sorted({t for points in series for t, _ in points}))
    return times[:: -(-len(times) // MOST_SAMPLES)] if len(times) else times


def _scaled(times_s: Floats, layers: dict[str, Floats], *, drops_small: bool = True) -> MemoryByUse:
    """Bytes as MiB, or as GiB for large values; without uses too small to be seen, unless ``drops_small`` is False."""
    most = float(np.sum(list(layers.values()), axis=0).max()) if layers and len(times_s) else 0.0
    if drops_small:
        layers = {use: values for use, values in layers.items() if values.max(initial=0.0) > LEAST_SHARE * most}
    size, unit = (_GIB, "GiB") if most >= _GIB_FROM else (_MIB, "MiB")
    return MemoryByUse(times_s, {use: values / size for use, values in layers.items()}, unit)

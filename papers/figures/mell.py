"""MELL (2025): Figs. 6 and 11 to 15, on the fluid model of ``papers.placements``; ``mell_served`` has those
that the whole simulator serves, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure as Picture

from jettison.report.placement import Placed, gap_closed, late_share
from papers.figure import OWN_RANGE, Claim, Figure, Found, Part, Plot, Stated
from papers.figures import mell_served
from papers.pictures import bars, lines
from papers.placements import (
    BLOCK_SIZE,
    CURVES,
    LOADS,
    PRESETS,
    SEEDS,
    SYSTEMS,
    Load,
    bound,
    demand,
    lives_of,
    num_kept,
    placed,
    prefill_tokens,
)

ALL = tuple(Load(model, arrivals) for model in PRESETS for arrivals in LOADS)
FAST = tuple(load for load in ALL if load.arrivals == "Poisson 1.1/s")
MELL, MOST, FEW, SHORT = "mell", "mell, most moves", "mell, few moves", "mell, epochs of 0.1 s"
BASELINES: dict[str, Stated] = {"load-balance": (None, -5.0), "best-fit": (None, -15.0), "worst-fit": (None, -15.0)}
"""By how much fewer devices than theirs count as a reproduction, in percent; at 1.1 requests/s."""
GOALS = {"load-balance": (80.0, None), "worst-fit": (80.0, None), "best-fit": (60.0, None)}
"""Of the gap to the bound, in percent (issue: ours)."""
OURS = "our goal"
REPACK_EVERY = 10
"""Epochs between two repacks of the oracle that are looked at."""

Of = Callable[[Placed], float | None]


def _mean(found: Placed) -> float:
    return found.mean_devices


def _peak(found: Placed) -> float:
    return float(found.peak_devices)


def _by_seed(
    metric: str, system: str, number: Callable[[int], float | None], baseline: str = "", unit: str = ""
) -> Claim:
    """Nothing is served: a number for each seed's requests."""
    return Claim(metric, system, lambda _: [number(seed) for seed in SEEDS], baseline, unit)


def _own(metric: str, load: Load, system: str, of: Of, unit: str = "") -> Claim:
    def number(seed: int) -> float | None:
        found = placed(load, seed, SYSTEMS[system])
        return None if found is None else of(found)

    return _by_seed(metric, system, number, unit=unit)


def _change(metric: str, load: Load, system: str, baseline: str, of: Of) -> Claim:
    """By how much more it is than the baseline's, in percent."""

    def number(seed: int) -> float | None:
        ours, theirs = placed(load, seed, SYSTEMS[system]), placed(load, seed, SYSTEMS[baseline])
        if ours is None or theirs is None or not of(theirs):
            return None
        return 100.0 * ((of(ours) or 0.0) / (of(theirs) or 1.0) - 1.0)

    return _by_seed(metric, system, number, baseline, "%")


def _possible(load: Load, baseline: str, name: str) -> Claim:
    """What the bound, or an oracle that repacks everything at every epoch, would save."""

    def number(seed: int) -> float | None:
        found, theirs = demand(load, seed), placed(load, seed, SYSTEMS[baseline])
        if found is None or theirs is None:
            return None
        least = found.repacked(REPACK_EVERY).mean() if name == "full repack" else bound(load, seed).mean()
        return float(100.0 * (least / theirs.mean_devices - 1.0))

    return _by_seed("devices, mean", name, number, baseline, "%")


def _closed(load: Load, system: str, baseline: str) -> Claim:
    def number(seed: int) -> float | None:
        ours, theirs = placed(load, seed, SYSTEMS[system]), placed(load, seed, SYSTEMS[baseline])
        if ours is None or theirs is None:
            return None
        closed = gap_closed(theirs.mean_devices, ours.mean_devices, float(bound(load, seed).mean()))
        return None if closed is None else 100.0 * closed

    return _by_seed("gap to the bound (L2, same sizes and reserve) closed", system, number, baseline, "%")


def _devices(load: Load) -> Part:
    judged = load in FAST
    claims = []
    for baseline, band in BASELINES.items():
        stated = (-15.0, None) if baseline == "load-balance" else (None, -20.0)
        for system in (MELL, FEW):
            claims.append(_change("devices, mean", load, system, baseline, _mean)
                          .stated(stated if judged else None, band if judged else None))  # fmt: skip
        claims += [_change("devices, peak", load, MELL, baseline, _peak), _possible(load, baseline, "L2 bound")]
        claims += [_possible(load, baseline, "full repack")] if judged else []
        claims += [_closed(load, MOST, baseline).stated(None, GOALS[baseline], OURS), _closed(load, MELL, baseline)]
    names = (MELL, MOST, FEW, "printed", *BASELINES)
    claims += [_own("devices, time-mean", load, name, _mean) for name in names]
    claims += [_own("computed again, a request", load, name, partial(_again, load)) for name in BASELINES]
    claims.append(_by_seed("requests cut to a device", "all", partial(_cut, load), unit="%"))
    return Part(load.name, tuple(claims))


def _again(load: Load, found: Placed) -> float:
    """Recomputations over arrivals."""
    return found.num_recomputed / max(1, len({o.request_id for batch in found.demand.batches for o in batch}))


def _cut(load: Load, seed: int) -> float | None:
    found = lives_of(load, seed)
    return None if found is None else 100.0 * found[1] / len(found[0])


def _moves(load: Load) -> Part:
    few = _change("migrations a second", load, FEW, "load-balance", lambda found: found.moves_per_s)
    all_ = _change("migrations a second", load, MELL, "load-balance", lambda found: found.moves_per_s)
    rates = [_own("migrations a second", load, name, lambda found: found.moves_per_s)
             for name in (MELL, MOST, FEW, "load-balance")]  # fmt: skip
    items = [_own("items a second, multi-items counted once", load, name, _items) for name in (MELL, "load-balance")]
    late = [_own("migrations that an epoch's boundaries make wait", load, name, partial(_late, load), "%")
            for name in (MELL, MOST)]  # fmt: skip
    claims = (few.stated((None, 0), (None, 0)), all_.stated((None, 0), (None, 0)), *rates, *items, *late)
    return Part(load.name, claims)


def _items(found: Placed) -> float:
    return found.num_items / (len(found.devices) * found.demand.epoch_s)


def _late(load: Load, found: Placed) -> float:
    """The link between machines, and a prefill of one second."""
    preset = load.preset
    tokens = prefill_tokens(load, found.demand.epoch_s)
    block_bytes = BLOCK_SIZE * preset.instance.kv_bytes_per_token
    rate = preset.scale_out.bytes_per_s
    return 100.0 * late_share(found, block_bytes, preset.instances_per_node, rate, tokens // BLOCK_SIZE)


def _batching(load: Load) -> Part:
    saved = _change("migrations a second", load, MELL, SHORT, lambda found: found.moves_per_s)
    paper = (-25.0, 0.0) if load.arrivals == "Azure" else (-30.0, 0.0)
    return Part(load.name, (saved.stated(paper, (-35, -15)),))


def _utilisation(load: Load) -> Part:
    def share(name: str) -> Claim:
        return _own("KV memory in use", load, name, lambda f: 100.0 * (f.utilisation or 0.0), "%")

    judged = [share(name).stated((88, None), (85, None)) for name in (MELL, FEW)]
    others = [share(name).stated((65, 80)) for name in BASELINES]
    return Part(load.name, (*judged, *others))


def _kept(load: Load) -> Part:
    """On three quarters of the devices that would do on average."""

    def number(baseline: str, seed: int) -> float | None:
        if demand(load, seed) is None:
            return None
        num = max(1, int(0.75 * bound(load, seed).mean()))
        ours = num_kept(load, seed, SYSTEMS[MELL], num)
        theirs = num_kept(load, seed, SYSTEMS[baseline], num)
        return 100.0 * (ours / theirs - 1.0) if ours and theirs else None

    what = "requests whose KV stays in memory to their end"
    claims = [_by_seed(what, MELL, partial(number, name), name, "%") for name in ("worst-fit", "best-fit")]
    return Part(load.name, (claims[0].stated((23, 60), (23, 60), OWN_RANGE), claims[1]))


def _bars(of: Of, ylabel: str, systems: Sequence[str]) -> Callable[[Mapping[str, Found]], Picture]:
    def draw(_: Mapping[str, Found]) -> Picture:
        groups = {
            load.name.replace(" on ", "\n"): {
                name: of(found) for name in systems if (found := placed(load, SEEDS[0], SYSTEMS[name])) is not None
            }
            for load in FAST
        }
        return bars(groups, ylabel, f"{ylabel}, Poisson 1.1/s")

    return draw


def _curve(load: Load) -> Callable[[Mapping[str, Found]], Picture]:
    """Devices over migrations a second; the bound is what no number of moves beats."""

    def draw(_: Mapping[str, Found]) -> Picture:
        systems = {**CURVES, **{name: (SYSTEMS[name],) for name in BASELINES}}
        series: dict[str, tuple[list[float], list[float]]] = {}
        for name, each in systems.items():
            found = [f for system in each if (f := placed(load, SEEDS[0], system)) is not None]
            series[name] = ([f.moves_per_s for f in found], [f.mean_devices for f in found])
        most = max(x for xs, _ in series.values() for x in xs)
        series["bound (L2)"] = ([0.0, most], [float(bound(load, SEEDS[0]).mean())] * 2)
        return lines(series, "migrations a second", "devices, mean", load.name)

    return draw


def _over_time(load: Load) -> Callable[[Mapping[str, Found]], Picture]:
    def draw(_: Mapping[str, Found]) -> Picture:
        series = {}
        for name in (MELL, *BASELINES):
            found = placed(load, SEEDS[0], SYSTEMS[name])
            assert found is not None
            series[name] = (found.demand.times_s[::10].tolist(), found.devices[::10].tolist())
        least = bound(load, SEEDS[0])[::10]
        return lines(series | {"L2 bound": ((np.arange(len(least)) * 10.0).tolist(), least.tolist())}, "seconds",
                     "devices", load.name)  # fmt: skip

    return draw


def _short(load: Load) -> str:
    """For file names."""
    return PRESETS[load.model].removeprefix("mell-")


def _fewer_always(load: Load) -> Part:
    """Part of the time in which the packing has no more devices than each baseline."""

    def number(baseline: str, seed: int) -> float | None:
        ours, theirs = placed(load, seed, SYSTEMS[MELL]), placed(load, seed, SYSTEMS[baseline])
        return None if ours is None or theirs is None else 100.0 * fmean(ours.devices <= theirs.devices)

    claims = [_by_seed("time with no more devices", MELL, partial(number, b), b, "%").stated((100, 100))
              for b in BASELINES]  # fmt: skip
    return Part(load.name, tuple(claims))


FIGURES = (
    Figure(
        "mell-fig6", "requests that migration lets a cluster hold", "MELL section III", tuple(map(_kept, FAST)),
        (Plot("devices", _over_time(FAST[0])),),
    ),
    Figure(
        "mell-fig11", "devices needed", "MELL section VIII.C",
        (*map(_devices, ALL), *(mell_served.devices_part(w, BASELINES) for w in mell_served.PARTS)),
        (Plot("devices", _bars(_mean, "devices, mean", (MELL, FEW, *BASELINES))),
         *(Plot(f"curve-{_short(load)}", _curve(load)) for load in FAST)),
    ),
    Figure(
        "mell-fig12", "migrations a second", "MELL section VIII.C",
        (*map(_moves, ALL), *map(mell_served.moves_part, mell_served.PARTS)),
        (Plot("moves", _bars(lambda f: f.moves_per_s, "migrations a second", (MELL, FEW, "load-balance"))),),
    ),
    Figure(
        "mell-fig13", "what batching of operations saves", "MELL section VIII.C", tuple(map(_batching, ALL)),
        (Plot("moves", _bars(lambda f: f.moves_per_s, "migrations a second", (SHORT, MELL))),),
    ),
    Figure(
        "mell-fig14", "utilisation of KV memory", "MELL section VIII.C",
        (*map(_utilisation, ALL), *map(mell_served.utilisation_part, mell_served.PARTS)),
        (Plot("utilisation", _bars(lambda f: f.utilisation, "KV memory in use", (MELL, FEW, *BASELINES))),),
    ),
    Figure(
        "mell-fig15", "devices over time", "MELL section VIII.C", tuple(map(_fewer_always, FAST)),
        tuple(Plot(f"devices-{_short(load)}", _over_time(load)) for load in FAST),
    ),
)  # fmt: skip

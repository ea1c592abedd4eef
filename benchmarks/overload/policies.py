"""Dropping and its four baselines on the same engine, the same arrivals and the same bytes (docs/policies.md).

    python -m benchmarks overload policies [--workloads burst conv code] [--instances 2 4] [--seeds 3] [--policies ...]
    python -m benchmarks overload policies --sweep      # where the advantage ends: parameter share against burst height
    python -m benchmarks overload policies --ablation   # drop, + coordinated exchange, + lookahead; restore off
    python -m benchmarks overload policies --quick ...  # half of the burst's length, the first burst only

The model has 20M parameters (``traces.MODEL``).

Loads: ``burst`` is the built-in burst, calibrated to this machine by the rule of ``simulate.calibrate``; ``conv`` and
``code`` are Azure 2023 arrivals with their own lengths, scaled, compressed and thinned by the rules of
``traces.py``, and of these the first slice whose predicted peak demand lies above the undropped and below 0.8 of
the merged capacity (else the slice with the highest peak: the note says which). Policies are interleaved: every seed
starts with another one. SLO(scale) = scale times the P50 of the best baseline in that run. The burst window holds the
requests that arrive while the workload alone wants more KV than the undropped capacity. With 4 instances four workers
share this machine's cores.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.evidence import LIVE
from benchmarks.overload import traces
from benchmarks.shared import Row, data_dir, in_turn, keep, median, parse, print_rows, ratio, say, work_folder
from jettison.cost.speed import MachineSpeed
from jettison.demo.burst import demo_workload, make_setup, plan_load
from jettison.live.experiments.overload import ExperimentSetup, measure_speed, run_policy
from jettison.report.failures import exit_if_unanswered
from jettison.report.overload import SLO_SCALES, overload_arrivals, slo_base, slo_violations, window_ttft_p99
from jettison.report.results import RunResult, write_results
from jettison.report.summary import print_fairness
from jettison.simulate.calibrate import calibrate, peak_demand_tokens
from jettison.workload import shaping
from jettison.workload.synthetic import generate, preset
from jettison.workload.traces import Workload, read_trace

POLICIES = ("drop", "recompute", "swap", "migrate", "pipeline")
QUICK_S = 37.5
"""Of the burst's 75 s: its first burst and what follows it."""

SWEEP_SHARES = (0.34, 0.5, 0.66, 0.75)
"""The papers' models: 0.34 to 0.75."""

SWEEP_HEIGHTS = (3.0, 7.0, 14.0)
"""Rate in a burst over the rate outside."""

ABLATION: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("recompute", "recompute", {}),
    ("drop", "drop", {"coordination": False, "exchange_piece_bytes": 16 << 20, "lookahead": "off"}),
    ("+ coordinated exchange", "drop", {"lookahead": "off"}), ("+ lookahead", "drop", {"lookahead": "on"}),
    ("+ lookahead, restore off", "drop", {"lookahead": "on", "restore_threshold": 0.0}),
)  # fmt: skip
"""Name, policy, flags. Uncoordinated: whole requests go at once, and activations wait behind them."""

@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals under a name; ``of_seed`` makes those of one seed."""

    name: str
    of_seed: Callable[[int], Workload]


@dataclass(frozen=True, slots=True)
class Contender:
    """What meets the arrivals."""

    name: str
    policy: str
    flags: dict[str, object]


# --- settings


def _settings(work: Path, instances: int, args: Namespace) -> Iterator[tuple[ExperimentSetup, Load]]:
    for name in args.workloads:
        model = traces.MODEL
        setup = replace(make_setup(work / f"{name}-{instances}", 0, model), instances=instances)
        speed = measure_speed(setup)
        yield setup, (_burst(setup, speed, args) if name == "burst" else _trace(name, setup, speed, args))


def _burst(setup: ExperimentSetup, speed: MachineSpeed, args: Namespace) -> Load:
    """The built-in burst; with more than two instances, so many times the users."""
    users = setup.instances / 2

    def arrivals(seed: int) -> Workload:
        load = demo_workload(seed) if users == 1 else generate(preset("burst").scaled(users), seed)
        return shaping.limit(load, duration_s=QUICK_S) if args.quick else load

    if users == 1:
        scale = plan_load(setup, speed, 0).rate_scale
    else:
        scale = calibrate(arrivals(0), speed, setup.deployment())
    return Load("burst", lambda seed: shaping.scale_time(arrivals(seed), scale))


def _trace(name: str, setup: ExperimentSetup, speed: MachineSpeed, args: Namespace) -> Load:
    """One slice of a real trace, chosen by the stated rule."""
    trace = read_trace(data_dir(args.data) / f"AzureLLMInferenceTrace_{name}.csv.gz")
    whole = traces.shape(trace, args, setup, speed)
    found = _slice(whole, setup, speed, args)
    factors: list[float] = []
    for _ in range(args.pilots):
        speed, _, factor = traces.correct_speed(found.load, setup, speed)
        factors.append(factor)
        found = _slice(whole, setup, speed, args)
        if abs(factor - 1.0) <= traces.CLOSE_TO_TARGET:
            break
    rule = "predicted peak above the undropped and at most 0.8 of the merged capacity"
    note = (
        f"slice {found.index} of {found.count}: the first with a {rule}" if found.fits else
        f"slice {found.index} of {found.count}: none has a {rule}; the one with the highest"
    )
    note += (
        f"; {found.peak_tokens / setup.capacity_tokens():.2f} of the undropped capacity; every arrival kept with "
        f"probability {found.keep:.4f}; speed corrected by pilots: {', '.join(f'{f:.2f}' for f in factors) or 'no'}"
    )
    print(f"{name}: {note}")
    noted = replace(found.load, notes=(*found.load.notes, note))
    return Load(name, lambda seed: noted)


class _Slice(NamedTuple):
    """A slice of a thinned trace, and how it was chosen."""

    load: Workload
    index: int
    count: int
    peak_tokens: float
    """Predicted, with memory to spare."""
    keep: float
    fits: bool
    """It has the peak that the rule asks for; else it is the one with the highest."""


def _slice(whole: Workload, setup: ExperimentSetup, speed: MachineSpeed, args: Namespace) -> _Slice:
    """Thin to the mean load, cut, and choose by the rule."""
    thinned, keep = traces.thin(whole, args.mean_load, setup, speed)
    low, high = setup.capacity_tokens(), 0.8 * setup.merged_capacity_tokens()
    pieces = [p for p in shaping.slices(thinned, args.slice) if p.rows]
    peaks = [peak_demand_tokens(p, speed, setup.deployment()) for p in pieces]
    fitting = [i for i, peak in enumerate(peaks) if low < peak <= high]
    chosen = fitting[0] if fitting else max(range(len(pieces)), key=peaks.__getitem__)
    return _Slice(pieces[chosen], chosen, len(pieces), peaks[chosen], keep, bool(fitting))


def _sweep(work: Path, instances: int, args: Namespace) -> Iterator[tuple[ExperimentSetup, Load]]:
    """Parameter share by the KV that is left beside the parameters; heights at the rate that height 7 calibrates to."""
    for share in args.shares:
        model = traces.MODEL
        sized = replace(make_setup(work / f"share-{share:g}", 0, model), instances=instances)
        tokens = _kv_tokens_for_share(sized, share)
        setup = replace(sized, kv_tokens_per_instance=tokens)
        speed = measure_speed(setup)
        base = preset("burst").scaled(instances / 2)
        scale = calibrate(generate(base, 0), speed, setup.deployment(), target_share=_target(setup))
        for height in args.heights:
            spec = replace(base, bursts=tuple(replace(b, multiplier=height) for b in base.bursts))

            def arrivals(seed: int, spec: Any = spec, scale: float = scale) -> Workload:
                load = shaping.scale_time(generate(spec, seed), scale)
                return shaping.limit(load, duration_s=QUICK_S / scale) if args.quick else load

            yield setup, Load(f"share {share:g}, burst {height:g}x", arrivals)


def _target(setup: ExperimentSetup) -> float:
    """Peak over merged capacity that overloads the undropped one: 0.7, or a little above 1 of the latter."""
    return max(0.7, 1.05 * setup.capacity_tokens() / setup.merged_capacity_tokens())


def _kv_tokens_for_share(setup: ExperimentSetup, share: float) -> int:
    """KV tokens an instance at which parameters are this share of its memory: found by bisection, whole blocks."""
    low, high = 16, 1 << 20
    while high - low > setup.block_size:
        middle = (low + high) // 2
        if replace(setup, kv_tokens_per_instance=middle).parameter_share() > share:
            low = middle
        else:
            high = middle
    return high // setup.block_size * setup.block_size


# --- comparing


def compare(
    setup: ExperimentSetup, load: Load, contenders: Sequence[Contender], seeds: int
) -> tuple[list[Row], list[RunResult]]:
    """Every contender on every seed, each seed starting with another; one row a contender and seed."""
    rows: list[Row] = []
    runs: list[RunResult] = []
    for seed in range(seeds):
        arrivals = load.of_seed(seed)
        met: dict[str, RunResult] = {}
        for contender in in_turn(contenders, seed):
            flagged = replace(setup, extra_flags=setup.extra_flags | contender.flags)
            name = f"{load.name} x{setup.instances} seed {seed} {contender.name}"
            met[contender.name] = run_policy(flagged, contender.policy, arrivals, name=name, seed=seed)
            say(f"{name}: P99 TTFT {met[contender.name].ttft_s.p99}")
        rows += _figures(setup, load.name, seed, contenders, met)
        runs += [met[c.name] for c in contenders]
    return rows, runs


def _figures(
    setup: ExperimentSetup, name: str, seed: int, contenders: Sequence[Contender], met: dict[str, RunResult]
) -> list[Row]:
    ours = next((c.name for c in contenders if c.policy == "drop"), None)
    baselines = [met[c.name] for c in contenders if c.policy != "drop"] or list(met.values())
    base = slo_base(baselines)
    window = overload_arrivals(next(iter(met.values())).requests_detail or [], base, setup.capacity_tokens())
    rows = []
    for contender in contenders:
        run = met[contender.name]
        row: Row = {
            "load": name, "instances": setup.instances, "seed": seed, "policy": contender.name,
            "requests": run.requests.submitted, "failed": run.requests.unanswered,
            "p50_ttft_s": run.ttft_s.p50, "p99_ttft_s": run.ttft_s.p99,
            "window_requests": len(window), "window_p99_ttft_s": window_ttft_p99(run, window),
            "p50_tpot_s": run.tpot_s.p50, "p99_tpot_s": run.tpot_s.p99,
            "tokens_per_s": run.output_tokens_per_s,
            "mean_queue_s": run.events.get("queue_seconds", 0.0) / max(1, run.requests.submitted),
            "slo_scales": list(SLO_SCALES), "slo": slo_violations(run, base),
            "events": {k: v for k, v in run.events.items() if k != "log" and v},
            "fairness": {k: run.config["fairness"][k] for k in
                         ("parameter_share", "mean_load", "capacity_over_mean_need", "peak_over_capacity",
                          "peak_over_merged")},
        }
        if ours is not None:
            row["p99_over_drop"] = ratio(row["p99_ttft_s"], met[ours].ttft_s.p99)
            row["window_p99_over_drop"] = ratio(row["window_p99_ttft_s"], window_ttft_p99(met[ours], window))
            row["throughput_over_drop"] = ratio(row["tokens_per_s"], met[ours].output_tokens_per_s)
        rows.append(row)
    return rows


# --- showing

COLUMNS = ("p50_ttft_s", "p99_ttft_s", "window_p99_ttft_s", "mean_queue_s", "p50_tpot_s", "p99_tpot_s",
           "tokens_per_s", "p99_over_drop", "window_p99_over_drop", "throughput_over_drop")  # fmt: skip
COUNTED = ("drops", "restores", "rebalanced", "preemptions", "migrations", "swapped_out_blocks", "recomputed_tokens")


def show(rows: Sequence[Row]) -> None:
    """Medians over the seeds, a line a policy; last the share of requests over scale x P50 of the best baseline."""
    lines = []
    for policy in dict.fromkeys(r["policy"] for r in rows):
        mine = [r for r in rows if r["policy"] == policy]
        line: Row = {"policy": policy} | {column: median(r.get(column) for r in mine) for column in COLUMNS}
        line |= {name: median(r["events"].get(name, 0) for r in mine) for name in COUNTED}
        lines.append(line | {f"over {scale}": median(r["slo"]["either"][i] for r in mine)
                             for i, scale in enumerate(SLO_SCALES)})  # fmt: skip
    print_rows(lines, title=f"{rows[0]['load']}, {rows[0]['instances']} instances; ratios: the figure / drop's")


def main() -> None:
    args = parse(
        __doc__, workloads=(["burst", "conv"], {"choices": ("burst", "conv", "code")}), instances=[2, 4],
        policies=(list(POLICIES), {"choices": POLICIES}), seeds=3,
        quick=(False, "half of the burst's length, traces of 60 s"),
        sweep=(False, "parameter share against burst height"), shares=(list(SWEEP_SHARES), "of the sweep"),
        heights=(list(SWEEP_HEIGHTS), "of the sweep"), ablation=(False, "parts of dropping switched on one by one"),
        data=Path, slice=(90.0, "seconds of replay of a trace slice"),
        output_scale=0.625,
        compress=(8.0, "the traces' time is divided by this"),
        pilots=(2, "most replays with ample memory that correct the speed"),
        mean_load=(0.4, "predicted mean KV demand / undropped capacity"),
        runs=(Path, "all runs in the common result format"), work=Path,
    )  # fmt: skip
    args.slice = min(args.slice, 60.0) if args.quick else args.slice
    work, console = work_folder(args.work, "overload"), Console(width=150)
    contenders = [Contender(*step) for step in ABLATION] if args.ablation else [
        Contender(policy, policy, {}) for policy in args.policies
    ]  # fmt: skip
    rows: list[Row] = []
    runs: list[RunResult] = []
    for instances in args.instances:
        for setup, load in (_sweep if args.sweep else _settings)(work, instances, args):
            found, done = compare(setup, load, contenders, args.seeds)
            rows, runs = rows + found, runs + done
            show(found)
            print_fairness(done[0], console)
            keep(args.json, {"rows": rows}, *LIVE)  # a run that is cut off loses only what it has not measured
            if args.runs:
                write_results(args.runs, runs)
    exit_if_unanswered(runs, console)

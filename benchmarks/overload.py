"""Dropping and its four baselines on the same engine, the same arrivals and the same bytes (docs/policies.md).

    python benchmarks/overload.py [--workloads burst conv code] [--instances 2 4] [--seeds 3] [--policies ...]
    python benchmarks/overload.py --sweep        # where the advantage ends: parameter share against burst height
    python benchmarks/overload.py --ablation     # drop, + coordinated exchange, + lookahead; restore off
    python benchmarks/overload.py --rebalancing  # what overflows a batch limit goes to spare instances, or stays
    python benchmarks/overload.py --quick ...    # half of the burst's length, the first burst only

The model has 20M parameters (``real_traces.MODELS``).

Loads: ``burst`` is the built-in burst, calibrated to this machine by the rule of ``simulate.calibrate``; ``conv`` and
``code`` are Azure 2023 arrivals with their own lengths, scaled, compressed and thinned by the rules of
``real_traces.py``, and of these the first slice whose predicted peak demand lies above the undropped and below 0.8 of
the merged capacity (else the slice with the highest peak: the note says which). Policies are interleaved: every seed
starts with another one. SLO(scale) = scale times the P50 of the best baseline in that run. The burst window holds the
requests that arrive while the workload alone wants more KV than the undropped capacity. With 4 instances four workers
share this machine's cores.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import real_traces
from evidence import LIVE, write_result
from rich.console import Console
from rich.table import Table

from jettison.config import KEYS
from jettison.cost.speed import MachineSpeed
from jettison.demo.burst import demo_workload, make_setup, plan_load
from jettison.live.experiments.overload import ExperimentSetup, measure_speed, run_policy
from jettison.report.failures import exit_if_unanswered
from jettison.report.html import write_html
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
    ("+ coordinated exchange", "drop", {"lookahead": "off"}),
    ("+ lookahead", "drop", {"lookahead": "on"}),
    ("+ lookahead, restore off", "drop", {"lookahead": "on", "restore_threshold": 0.0}),
)
"""Name, policy, flags. Uncoordinated: whole requests go at once, and activations wait behind them."""

REBALANCING: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("drop", "drop", {"rebalance": True}),
    ("drop, no rebalancing", "drop", {"rebalance": False}),
)
"""The batch limit comes from a profile, which ``--rebalancing`` makes first."""


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


def main() -> None:
    """Command line."""
    args = _arguments()
    console = Console(width=170)
    work = args.work or Path(tempfile.mkdtemp(prefix="jettison-overload-"))
    rows: list[dict[str, Any]] = []
    runs: list[RunResult] = []
    contenders = [Contender(p, p, {}) for p in args.policies]
    if args.ablation:
        contenders = list(_ablation(console))
    if args.rebalancing:
        contenders = [Contender(*entry) for entry in REBALANCING]
    for instances in args.instances:
        if args.sweep:
            settings = _sweep(work, instances, args)
        else:
            settings = _settings(work, instances, args, console)
        for setup, load in settings:
            if args.rebalancing:
                _make_profile(setup)
            found, done = compare(setup, load, contenders, args.seeds, console)
            rows += found
            runs += done
            print_rows(found, console)
            print_fairness(done[0], console)
            save(args, rows, runs)
    save(args, rows, runs)
    exit_if_unanswered(runs, console)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=("burst", "conv", "code"), default=["burst", "conv"])
    parser.add_argument("--instances", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="half of the burst's length, traces of 60 s")
    parser.add_argument("--sweep", action="store_true", help="parameter share against burst height")
    parser.add_argument("--shares", nargs="+", type=float, default=list(SWEEP_SHARES), help="of the sweep")
    parser.add_argument("--heights", nargs="+", type=float, default=list(SWEEP_HEIGHTS), help="of the sweep")
    parser.add_argument("--ablation", action="store_true", help="parts of dropping switched on one by one")
    parser.add_argument("--rebalancing", action="store_true", help="dropping with and without rebalancing")
    parser.add_argument("--data", type=Path, help="folder with arrivals/ (else JETTISON_DATA, else ../shared/data)")
    parser.add_argument("--slice", type=float, default=90.0, help="seconds of replay of a trace slice")
    parser.add_argument("--scaling", choices=sorted(real_traces.MODELS), default="time", help="of the traces' lengths")
    parser.add_argument("--output-scale", type=float, default=0.625, help="with --scaling time")
    parser.add_argument("--length-scale", type=float, default=0.125, help="with --scaling uniform")
    parser.add_argument("--compress", type=float, default=8.0, help="the traces' time is divided by this")
    parser.add_argument("--pilots", type=int, default=2, help="most replays with ample memory that correct the speed")
    parser.add_argument("--mean-load", type=float, default=0.4, help="predicted mean KV demand / undropped capacity")
    parser.add_argument("--json", type=Path, help="table of figures")
    parser.add_argument("--runs", type=Path, help="all runs in the common result format, and .html beside it")
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.slice = min(args.slice, 60.0)
    return args


# --- settings


def _settings(
    work: Path, instances: int, args: argparse.Namespace, console: Console
) -> Iterator[tuple[ExperimentSetup, Load]]:
    for name in args.workloads:
        model = real_traces.MODELS[args.scaling]
        setup = replace(make_setup(work / f"{name}-{instances}", 0, model), instances=instances)
        speed = measure_speed(setup)
        yield setup, (_burst(setup, speed, args) if name == "burst" else _trace(name, setup, speed, args, console))


def _burst(setup: ExperimentSetup, speed: MachineSpeed, args: argparse.Namespace) -> Load:
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


def _trace(
    name: str, setup: ExperimentSetup, speed: MachineSpeed, args: argparse.Namespace, console: Console
) -> Load:
    """One slice of a real trace, chosen by the stated rule."""
    trace = read_trace(real_traces.data_dir(args.data) / f"AzureLLMInferenceTrace_{name}.csv.gz")
    whole = real_traces.shape(trace, args, setup, speed)
    found = _slice(whole, setup, speed, args)
    factors: list[float] = []
    for _ in range(args.pilots):
        speed, _, factor = real_traces.correct_speed(found.load, setup, speed)
        factors.append(factor)
        found = _slice(whole, setup, speed, args)
        if abs(factor - 1.0) <= real_traces.CLOSE_TO_TARGET:
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
    console.print(f"{name}: {note}", markup=False)
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


def _slice(whole: Workload, setup: ExperimentSetup, speed: MachineSpeed, args: argparse.Namespace) -> _Slice:
    """Thin to the mean load, cut, and choose by the rule."""
    thinned, keep = real_traces.thin(whole, args.mean_load, setup, speed)
    low, high = setup.capacity_tokens(), 0.8 * setup.merged_capacity_tokens()
    pieces = [p for p in shaping.slices(thinned, args.slice) if p.rows]
    peaks = [peak_demand_tokens(p, speed, setup.deployment()) for p in pieces]
    fitting = [i for i, peak in enumerate(peaks) if low < peak <= high]
    chosen = fitting[0] if fitting else max(range(len(pieces)), key=peaks.__getitem__)
    return _Slice(pieces[chosen], chosen, len(pieces), peaks[chosen], keep, bool(fitting))


def _make_profile(setup: ExperimentSetup) -> None:
    """Profile the setup's model, beside it, where ``serve`` finds it."""
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in setup.flags().items()]
    subprocess.run([sys.executable, "-m", "jettison", "profile", str(setup.model_dir), "--quick", *flags], check=True)


def _sweep(work: Path, instances: int, args: argparse.Namespace) -> Iterator[tuple[ExperimentSetup, Load]]:
    """Parameter share by the KV that is left beside the parameters; heights at the rate that height 7 calibrates to."""
    for share in args.shares:
        model = real_traces.MODELS[args.scaling]
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


def _ablation(console: Console) -> Iterator[Contender]:
    """Steps whose flags this build has; the others are named, not left out in silence."""
    for name, policy, flags in ABLATION:
        unknown = [flag for flag in flags if flag not in KEYS]
        if unknown:
            console.print(f"ablation step {name!r}: this build has no {', '.join(unknown)}; left at its only behaviour")
        yield Contender(name, policy, {k: v for k, v in flags.items() if k in KEYS})


# --- comparing


def compare(
    setup: ExperimentSetup, load: Load, contenders: Sequence[Contender], seeds: int, console: Console
) -> tuple[list[dict[str, Any]], list[RunResult]]:
    """Every contender on every seed, each seed starting with another; one row a contender and seed."""
    rows: list[dict[str, Any]] = []
    runs: list[RunResult] = []
    for seed in range(seeds):
        arrivals = load.of_seed(seed)
        turn = seed % len(contenders)
        met: dict[str, RunResult] = {}
        for contender in [*contenders[turn:], *contenders[:turn]]:
            flagged = replace(setup, extra_flags=setup.extra_flags | contender.flags)
            name = f"{load.name} x{setup.instances} seed {seed} {contender.name}"
            met[contender.name] = run_policy(flagged, contender.policy, arrivals, name=name, seed=seed)
            console.print(f"{name}: P99 TTFT {met[contender.name].ttft_s.p99}", markup=False, style="dim")
        rows += _figures(setup, load.name, seed, contenders, met)
        runs += [met[c.name] for c in contenders]
    return rows, runs


def _figures(
    setup: ExperimentSetup, name: str, seed: int, contenders: Sequence[Contender], met: dict[str, RunResult]
) -> list[dict[str, Any]]:
    ours = next((c.name for c in contenders if c.policy == "drop"), None)
    baselines = [met[c.name] for c in contenders if c.policy != "drop"] or list(met.values())
    base = slo_base(baselines)
    window = overload_arrivals(next(iter(met.values())).requests_detail or [], base, setup.capacity_tokens())
    rows = []
    for contender in contenders:
        run = met[contender.name]
        row: dict[str, Any] = {
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
            row["p99_over_drop"] = _ratio(row["p99_ttft_s"], met[ours].ttft_s.p99)
            row["window_p99_over_drop"] = _ratio(row["window_p99_ttft_s"], window_ttft_p99(met[ours], window))
            row["throughput_over_drop"] = _ratio(row["tokens_per_s"], met[ours].output_tokens_per_s)
        rows.append(row)
    return rows


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


# --- showing


COLUMNS = ("p50_ttft_s", "p99_ttft_s", "window_p99_ttft_s", "mean_queue_s", "p50_tpot_s", "p99_tpot_s",
           "tokens_per_s", "p99_over_drop", "window_p99_over_drop", "throughput_over_drop")


def print_rows(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Medians over the seeds, a line a policy; then the SLO violations over the scale factors."""
    title = f"{rows[0]['load']}, {rows[0]['instances']} instances, medians of {len({r['seed'] for r in rows})} seeds"
    table = Table(title=f"{title} (ratios: this policy's figure / drop's)")
    for column in ("policy", *COLUMNS, "events"):
        table.add_column(column.replace("_", " "), justify="left" if column in ("policy", "events") else "right")
    violations = Table(title="share of requests over scale x P50 of the best baseline (TTFT or TPOT)")
    violations.add_column("policy")
    for scale in SLO_SCALES:
        violations.add_column(str(scale), justify="right")
    for policy in dict.fromkeys(r["policy"] for r in rows):
        mine = [r for r in rows if r["policy"] == policy]
        cells = [_text(_median([r.get(column) for r in mine])) for column in COLUMNS]
        names = sorted({name for r in mine for name in r["events"]} & _SHOWN)
        counts = [f"{name} {_text(_median([r['events'].get(name, 0) for r in mine]))}" for name in names]
        table.add_row(policy, *cells, ", ".join(counts))
        shares = [_median([r["slo"]["either"][i] for r in mine]) for i in range(len(SLO_SCALES))]
        violations.add_row(policy, *["-" if s is None else f"{s:.1%}" for s in shares])
    console.print(table)
    console.print(violations)


_SHOWN = {"drops", "restores", "rebalanced", "preemptions", "migrations", "swapped_out_blocks", "recomputed_tokens"}


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def save(args: argparse.Namespace, rows: Sequence[dict[str, Any]], runs: Sequence[RunResult]) -> None:
    """Write what there is so far: a run that is cut off loses only what it has not measured."""
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_result(args.json, {"rows": list(rows)}, *LIVE)
    if args.runs:
        write_results(args.runs, runs)
        write_html(args.runs.with_suffix(".html"), runs, title="Overload: dropping and its baselines")


if __name__ == "__main__":
    main()

"""``jettison demo --scene burst``: a burst with dropping off and on, and once beyond what dropping can carry."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from jettison.cost.speed import MachineSpeed
from jettison.device.model.create import create_model
from jettison.live.experiments.overload import ExperimentSetup, measure_speed, run_policy
from jettison.report.brief import missed_aim, print_brief
from jettison.report.failures import check_answered, print_failures
from jettison.report.html import write_html
from jettison.report.results import RunResult, write_results
from jettison.report.terminal import note_phase, phase, progress_bar
from jettison.simulate.calibrate import Calibration, calibrate, safest_rate_scale
from jettison.workload.pool import OfflinePool
from jettison.workload.shaping import scale_time
from jettison.workload.synthetic import SyntheticSpec, generate, preset
from jettison.workload.traces import Workload

BEYOND_SHARE = 2.2
"""Peak demand over merged capacity in the setting where dropping is no longer enough."""

CALIBRATION_SEEDS = 3


@dataclass(frozen=True, slots=True)
class DemoModel:
    """Small enough that a burst takes seconds on a laptop, and so large that a step is mostly the model's own work, as
    it is of the models that people serve: a pipeline adds the same to a step of any size. The parameters' share is like
    the papers' (0.34 to 0.75)."""

    layers: int = 10
    hidden: int = 384
    heads: int = 6
    kv_heads: int = 2
    kv_tokens_per_instance: int = 2128
    context: int = 1312
    """As long as the longest request of the burst may be, prompt and answer at their caps."""


def make_setup(out_dir: Path, seed: int, model: DemoModel | None = None) -> ExperimentSetup:
    """The demo's deployment; the model folder is made anew."""
    model = model or DemoModel()
    model_dir = out_dir / "model"
    shutil.rmtree(model_dir, ignore_errors=True)
    model_dir.parent.mkdir(parents=True, exist_ok=True)
    create_model(
        model_dir, arch="qwen3", layers=model.layers, hidden=model.hidden, heads=model.heads,
        kv_heads=model.kv_heads, seed=seed, max_position_embeddings=model.context,
    )
    return ExperimentSetup(model_dir, out_dir, model.kv_tokens_per_instance, max_num_seqs=128)


def demo_workload(seed: int, burst: SyntheticSpec | None = None) -> Workload:
    """The built-in burst (or another), before calibration."""
    return generate(burst or preset("burst"), seed)


def plan_load(
    setup: ExperimentSetup, speed: MachineSpeed, seed: int, burst: SyntheticSpec | None = None
) -> Calibration:
    """How fast to replay here: the rule of ``simulate.calibrate`` over a few seeds, this run's among them."""
    loads = [demo_workload(s, burst) for s in range(seed, seed + CALIBRATION_SEEDS)]
    return safest_rate_scale(loads, speed, setup.deployment())


def plan_beyond(
    setup: ExperimentSetup, speed: MachineSpeed, seed: int, burst: SyntheticSpec | None = None
) -> float:
    """How fast to replay for more than dropping can carry."""
    return calibrate(demo_workload(seed, burst), speed, setup.deployment(), target_share=BEYOND_SHARE)


def run_burst(
    out_dir: Path, seed: int = 0, *, model: DemoModel | None = None, burst: SyntheticSpec | None = None
) -> int:
    """Make the model, calibrate, replay the same burst under both policies, then a heavier one; write the report.

    Raises JettisonError when a server does not come up, and, after all is written, where requests were not answered.
    ``model``, ``burst``: in place of the demo's own, for a demo of another size.
    """
    console = Console()
    console.print("[bold]Jettison demo[/bold]: two instances, one burst, dropping off and on")
    setup = make_setup(out_dir, seed, model)
    mib = setup.memory_bytes() / 2**20
    console.print(
        f"model of {setup.parameter_share():.0%} of each instance's {mib:.0f} MiB, KV for "
        f"{setup.capacity_tokens() / setup.instances:.0f} tokens an instance "
        f"({setup.merged_capacity_tokens():.0f} for both when merged)"
    )
    with phase("measuring this machine, then fitting the load to it", console):
        speed = measure_speed(setup)
        plan = plan_load(setup, speed, seed, burst)
        beyond = plan_beyond(setup, speed, seed, burst)
    console.print(
        f"a decode step takes {speed.decode_base_s * 1e3:.1f} ms + {speed.decode_per_request_s * 1e3:.2f} ms a request,"
        f" prefill {speed.prefill_tokens_per_s:.0f} tokens/s: arrivals are replayed at {plan.rate_scale:.2f} times"
        f" their rate, so that peak demand should be {plan.peak_over_capacity:.2f} of the undropped and"
        f" {plan.peak_over_merged:.2f} of the merged capacity"
    )
    runs = []
    for label, scale in (("burst", plan.rate_scale), ("beyond", beyond)):
        load = scale_time(demo_workload(seed, burst), scale)
        for policy in ("recompute", "drop"):
            runs.append(run_shown(console, setup, policy, load, f"{label}: {policy}", seed))
    console.print()
    print_failures(runs, console)
    pairs = [(runs[0], runs[1]), (runs[2], runs[3])]
    titles = {
        "burst": f"peak demand is to be {plan.peak_over_merged:.2f} of the merged capacity: dropping carries it",
        "beyond": f"the same requests, faster, for {BEYOND_SHARE:.2f} of it: more than dropping carries",
    }
    print_brief(pairs, titles, console)
    for (baseline, run), aimed in zip(pairs, (plan.peak_over_merged, BEYOND_SHARE), strict=True):
        if missed := missed_aim(baseline, run, aimed):
            console.print(missed, style="bold red", markup=False, highlight=False)
    write_results(out_dir / "report.json", runs)
    write_html(out_dir / "report.html", runs, title="Jettison demo: a burst with dropping off and on")
    console.print(f"report: {out_dir / 'report.html'}, {out_dir / 'report.json'}", soft_wrap=True)
    check_answered(runs)
    return 0


def run_shown(
    console: Console, setup: ExperimentSetup, policy: str, load: Workload, name: str, seed: int, *,
    pool: OfflinePool | None = None,
) -> RunResult:
    """``run_policy``, with its progress on the console. ``pool``: a batch beside the load."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    note_phase(f"{name}: {len(load.rows)} requests arriving over {load.duration_s:.0f} s", console)
    with progress_bar(*columns, console=console, refresh_per_second=2) as progress:
        task = progress.add_task(f"{name}: requests", total=len(load.rows))
        return run_policy(
            setup, policy, load, name=name, seed=seed, pool=pool,
            on_progress=lambda ended, _total: progress.update(task, completed=ended),
        )

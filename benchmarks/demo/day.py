"""The demo's day over several seeds: device-seconds, P99 TTFT and the batch, against the same day all awake.

    python -m benchmarks demo day [--seeds 3] [--json OUT] [--work DIR]
    python -m benchmarks demo day --simulated --profile FILE --speed TOKENS_PER_S BASE_S PER_REQUEST_S [--seeds 5]

Live, each seed is a whole ``jettison demo``: profiled, measured, fitted and served both ways. ``--simulated`` plays the
same days with the same core in virtual time, over the steps of a profile of the demo's model (``jettison profile``), at
a speed as ``jettison demo`` measures it; no server is started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from benchmarks.shared import LIVE, VIRTUAL, Row, keep, parse, print_block, say, work_folder
from jettison.config import EngineConfig
from jettison.core.configured import cluster_params, scheduler_limits
from jettison.cost.speed import MachineSpeed
from jettison.demo.burst import make_setup
from jettison.demo.day import DAY_MODEL, NUM_INSTANCES, SERVED, run_day
from jettison.demo.load import DAY, fit_day, seeded
from jettison.memory.hostpool import num_host_slots
from jettison.report.day import day_figures, missed_goals
from jettison.report.results import RunResult, read_results
from jettison.sim.setup import MemorySetup, setup_from_profile
from jettison.simulate.profiling import with_profile
from jettison.simulate.run import SimulationOptions, simulate_workload
from jettison.workload.prompts import PromptMaker

TOLD = ("drops", "restores", "sleeps", "wakes", "preemptions")


def simulated(work: Path, profile_path: Path, speed: MachineSpeed, seeds: range) -> Iterator[list[RunResult]]:
    """Both ways of each seed's day, in virtual time."""
    setup = dataclasses.replace(make_setup(work, 0, DAY_MODEL), instances=NUM_INSTANCES)
    deployment = with_profile(setup.deployment(), profile_path)
    profile = deployment.profile
    assert profile is not None, "it was just read"
    for seed in seeds:
        workload, runs = DAY.workload(fit_day(DAY, speed, deployment, seed).rate_per_s, seed), []
        for name, (policy, flags) in SERVED.items():
            config = EngineConfig.resolve(
                needs_model=False, num_cores=1,
                **{**deployment.settings, **flags, "overload": policy, "instances": NUM_INSTANCES,
                   "memory": deployment.budget_bytes},
            )  # fmt: skip
            slots = num_host_slots(config.memory.host_memory_bytes, deployment.shape, setup.block_size)
            cluster = setup_from_profile(
                deployment.shape, scheduler_limits(config, deployment.max_model_len),
                cluster_params(config, num_host_slots=slots, profile=profile), NUM_INSTANCES,
                MemorySetup(deployment.budget_bytes, deployment.workspace_bytes, deployment.page_bytes), profile,
            )
            options = SimulationOptions(name=name, pool=seeded(DAY.batch, seed), prompts=PromptMaker(seed=seed))
            runs.append(simulate_workload(workload, cluster, options))
        yield runs


def served(work: Path, seeds: range) -> Iterator[list[RunResult]]:
    """Both ways of each seed's day, by servers on this machine."""
    for seed in seeds:
        run_day(work / str(seed), seed)
        yield read_results(work / str(seed) / "report.json")


def row_of(seed: int, runs: list[RunResult]) -> Row:
    """What a day came to, beside its baseline."""
    baseline, day = (day_figures(run, DAY.duration_s) for run in runs)
    return {
        "seed": seed, "requests": runs[0].ttft_s.count, "baseline": dataclasses.asdict(baseline),
        "day": dataclasses.asdict(day), "device_seconds_over_baseline": day.device_s / baseline.device_s,
        "missed": missed_goals(baseline, day), "events": {key: runs[1].events.get(key) for key in TOLD},
    }  # fmt: skip


def main() -> None:
    args = parse(__doc__, seeds=3, work=Path, simulated=False, profile=Path, speed=(None, {"nargs": 3, "type": float}))
    if args.simulated and not (args.profile and args.speed):
        raise SystemExit("--simulated needs --profile and --speed")
    work, seeds = work_folder(args.work, "day"), range(args.seeds)
    days = simulated(work, args.profile, MachineSpeed(*args.speed), seeds) if args.simulated else served(work, seeds)
    rows = []
    for seed, runs in zip(seeds, days, strict=True):
        rows.append(row_of(seed, runs))
        say(rows[-1])
    print_block("demo_day", {"rows": rows})
    keep(args.json, {"rows": rows}, *(VIRTUAL if args.simulated else LIVE))

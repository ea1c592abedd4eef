"""One overload experiment: a model, a memory budget, arrivals, and the policies that meet them.

The same code behind ``jettison demo`` and the live benchmarks: a fresh server per run, equal bytes, equal arrivals.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from jettison.config import KEYS, EngineConfig
from jettison.cost.deployment import Deployment
from jettison.cost.speed import MachineSpeed
from jettison.errors import JettisonError
from jettison.live.engine.assembly import assemble
from jettison.live.engine.deployed import deployment_of
from jettison.live.experiments.server_process import ServerProcess, flag_arguments
from jettison.report.failures import check_answered
from jettison.report.output import safe_name
from jettison.report.results import RunResult
from jettison.workload.bench import fairness_of_run
from jettison.workload.client import ReplayOptions, replay_sync
from jettison.workload.conditions import capacities
from jettison.workload.pool import OfflinePool
from jettison.workload.prompts import PromptMaker
from jettison.workload.traces import TraceRow, Workload

PROFILED_FLAGS = ("instances", "dtype", "block_size", "max_num_batched_tokens", "max_num_seqs", "memory")
"""Of a setup, what decides which steps are profiled."""


@dataclass(frozen=True, slots=True)
class ExperimentSetup:
    """A deployment under test: everything but the overload policy and the arrivals."""

    model_dir: Path
    work_dir: Path
    """Logs go here."""
    kv_tokens_per_instance: int
    instances: int = 2
    dtype: str = "float32"
    block_size: int = 16
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 256
    device: str = "cpu"
    """As ``--device``: what is compared must not change with the machine."""
    extra_flags: dict[str, object] = field(default_factory=dict)

    def flags(self) -> dict[str, object]:
        """Flags of ``jettison serve``, memory included: sized so that each instance holds the KV tokens asked for."""
        base: dict[str, object] = {
            "instances": self.instances,
            "device": self.device,
            "dtype": self.dtype,
            "block_size": self.block_size,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "max_num_queued_reqs": "none",
            "generation_config": "vllm",  # a penalty that the model's maker sets would be in some models' steps alone
        } | self.extra_flags
        return base | {"memory": self.memory_bytes()}

    def _assembly_config(self) -> EngineConfig:
        return EngineConfig.resolve(
            model=str(self.model_dir), device=self.device, dtype=self.dtype, instances=self.instances,
            block_size=self.block_size, max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs, max_model_len=self.extra_flags.get("max_model_len"),
        )

    def deployment(self) -> Deployment:
        """What it is to a simulation: sizes and settings, whatever the policy."""
        return deployment_of(assemble(self._assembly_config()), kv_tokens=self.kv_tokens_per_instance)

    def memory_bytes(self) -> int:
        """Bytes of each instance."""
        return self.deployment().budget_bytes

    def parameter_share(self) -> float:
        """Parameters / memory of one instance, undropped."""
        deployment = self.deployment()
        return deployment.shape.parameter_bytes / deployment.budget_bytes

    def capacity_tokens(self) -> float:
        """KV tokens of all instances, undropped: whole pages may hold a few blocks more than were asked for."""
        return capacities(self.deployment())[0]

    def merged_capacity_tokens(self) -> float:
        """KV tokens of one group of all instances: the spare copies' bytes join the KV."""
        return capacities(self.deployment())[1]


def run_policy(
    setup: ExperimentSetup,
    policy: str,
    workload: Workload,
    *,
    name: str | None = None,
    seed: int = 0,
    total_timeout_s: float | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    beside: Callable[[str], AbstractContextManager[object]] = nullcontext,
    pool: OfflinePool | None = None,
) -> RunResult:
    """A fresh server with this policy meets the arrivals; the result carries its fairness header.

    ``beside``: of the server's address; entered before the first arrival, and left after the last answer. ``pool``: a
    batch of offline requests beside the arrivals.
    """
    options = ReplayOptions(
        name=name or policy, seed=seed, prompts=PromptMaker(seed=seed), total_timeout_s=total_timeout_s,
        on_progress=on_progress, pool=pool,
    )
    return meet_policy(setup, policy, workload, options, beside)


def meet_policy(
    setup: ExperimentSetup, policy: str, workload: Workload, options: ReplayOptions,
    beside: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> RunResult:
    """``run_policy`` with a client of one's own: other prompts, what is done with the answers."""
    log = setup.work_dir / f"server-{safe_name(options.name)}.log"
    with ServerProcess(setup.model_dir, setup.flags() | {"overload": policy}, log) as server, beside(server.url):
        run = replay_sync(server.url, workload, options)
    run.config |= {"policy": policy, "flags": {k: str(v) for k, v in setup.flags().items()}}
    run.config["fairness"] = fairness_of_run(
        run,
        workload,
        parameter_share=setup.parameter_share(),
        kv_capacity_tokens=setup.capacity_tokens(),
        merged_capacity_tokens=setup.merged_capacity_tokens(),
        num_instances=setup.instances,
    ).as_dict()
    return run


def run_config(
    keys: Mapping[str, object],
    workload: Workload,
    work_dir: Path,
    *,
    name: str,
    seed: int = 0,
    slo_ttft_s: float | None = None,
    slo_tpot_s: float | None = None,
    timeline: Path | None = None,
) -> RunResult:
    """A fresh server told these keys of ``jettison serve`` (the model folder among them) meets the arrivals.

    ``timeline``: where it writes its time line at its end. Raises JettisonError when the server does not come up.
    """
    told = {key: value for key, value in keys.items() if KEYS[key].section != "server" and key != "log_level"}
    told["generation_config"] = "vllm"
    model_dir = Path(str(told.pop("model")))
    config = work_dir / "serve.yaml"
    given = {key: value for key, value in told.items() if value not in (None, "")}
    config.write_text(json.dumps(given), encoding="utf-8")  # JSON is YAML
    flags: dict[str, object] = {"config": config}
    if timeline is not None:
        flags["timeline"] = timeline
    with ServerProcess(model_dir, flags, work_dir / "server.log") as server:
        options = ReplayOptions(
            name=name, seed=seed, prompts=PromptMaker(seed=seed), slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_tpot_s,
            total_timeout_s=10.0 * workload.duration_s + 300.0,
        )
        run = replay_sync(server.url, workload, options)
    run.config |= {"policy": str(told.get("overload")), "flags": {key: str(value) for key, value in told.items()}}
    return run


def profile_quickly(setup: ExperimentSetup) -> None:
    """``jettison profile --quick`` of the model, into the place where its servers look for one.

    Raises JettisonError where it fails, with the end of what it said.
    """
    flags = {key: value for key, value in setup.flags().items() if key in PROFILED_FLAGS}
    command = [sys.executable, "-m", "jettison", "profile", str(setup.model_dir), "--quick", *flag_arguments(flags)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JettisonError(f"the profile failed (exit code {done.returncode}):\n{done.stderr[-2000:]}")


def measure_speed(setup: ExperimentSetup, *, batches: tuple[int, ...] = (4, 16, 40)) -> MachineSpeed:
    """Prefill rate and decode step times of one instance while all instances work, as they will in the experiment."""
    log = setup.work_dir / "server-calibration.log"
    with ServerProcess(setup.model_dir, setup.flags() | {"overload": "recompute"}, log) as server:
        return measure_speed_at(server.url, setup, batches=batches)


def measure_speed_at(
    url: str, setup: ExperimentSetup, *, batches: tuple[int, ...] = (4, 16, 40)
) -> MachineSpeed:
    """The same of a server that runs already: ``setup`` says how many instances stand behind it.

    Raises JettisonError where a request is not answered: times of the others would say nothing.
    """

    def replay(rows: list[TraceRow], name: str) -> RunResult:
        load = Workload(tuple(rows), name, "calibration")
        run = replay_sync(url, load, ReplayOptions(name=name, observe=False))
        check_answered([run])
        return run

    def closed(num: int, prompt: int, output: int) -> list[TraceRow]:
        return [TraceRow(0.0, prompt, output)] * (num * setup.instances)

    replay(closed(8, 16, 8), "warm up")
    steps: list[tuple[int, float]] = []
    for batch in batches:
        run = replay(closed(batch, 16, 32), f"decode {batch}")
        # On a machine that others use tokens come to the client in bunches: most gaps are 0, the requests' means not.
        # Where all of an answer comes at once, its whole time bounds its steps.
        step_s = run.itl_s.p50 or run.tpot_s.p50 or (run.e2e_s.p50 and run.e2e_s.p50 / 32)
        assert step_s is not None, "calibration run without output"
        steps.append((batch, step_s))
    budget = setup.max_num_batched_tokens
    num_prompts = max(2, setup.kv_tokens_per_instance // (2 * budget))
    run = replay(closed(num_prompts, budget - 1, 1), "prefill")
    tokens = num_prompts * (budget - 1)
    assert run.ttft_s.max is not None, "calibration run without output"
    overhead_s = min(seconds for _, seconds in steps)
    prefill_s = max(run.ttft_s.max - num_prompts * overhead_s, run.ttft_s.max / 2)
    return MachineSpeed.from_points(tokens / prefill_s, steps)

"""What safepoints cost, and how soon an online arrival ends a step of offline requests (ConServe section 6.4.2).

    python -m benchmarks chat safepoints --json safepoints.json

    python -m benchmarks chat safepoints --layers 4 --hidden 128 --pairs 20 --arrivals 10    # a short look

Cost: one device in this process runs the same step with and without looks at its flag, in turns; a look by itself is
timed in a loop. Beside it the paper's: 988 us a check, 4 % of a step of 98.5 ms.

Arrivals: an engine with a worker process computes long offline prompts, chunk after chunk, and online requests come at
random phases of such steps. Each second one finds steps armed and a deadline that is missed already, so the step under
way is asked to be given up; the others find steps without safepoints. Time is from the arrival's event to that of the
step's end, both at the core; beside it what the predictor says of the layers between two safepoints, and the bound that
this must keep to: those layers' time and 5 ms.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.servers import greedy
from benchmarks.shared import SERVING, Namespace, keep, milliseconds, parse, print_block, print_verdicts, settings_of
from jettison.config import EngineConfig
from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.cost.stepwork import StepWork
from jettison.device.model.create import create_model
from jettison.device.step import StepInput
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.wire.stepflag import StepFlag
from jettison.live.worker.main import make_device_worker
from jettison.policy.offline import OfflineParams
from jettison.types import Request, ServiceClass

PAPER = {"check_us": 988.0, "step_ms": 98.5, "step_overhead": 0.04, "layers": 8, "end_ms": 5.41}
GOALS = {"step_overhead": 0.01, "beyond_layers_ms": 5.0}
VARIANTS = {
    "with": OfflineParams(), "without": OfflineParams(slo_aware=False),
}  # fmt: skip
LOOKS = 200_000
LATE_NS = 10**12
"""Online requests have been waiting for so long when they come: no deadline holds any more."""


def config_of(arguments: Namespace, model: Path, slices: str = "off") -> EngineConfig:
    """One instance with memory for what is asked of it."""
    settings: dict[str, object] = {
        "model": str(model), "instances": 1, "num_threads": 1, "dtype": arguments.dtype, "overload": "recompute",
        "max_num_batched_tokens": arguments.chunk, "max_num_seqs": 64, "enable_prefix_caching": False,
        "offline_slices": slices,
    }
    num_blocks = 2 * arguments.prompt * (arguments.offline + 1) // 16
    memory = assemble(EngineConfig.resolve(**settings)).memory_for_blocks(num_blocks)
    return EngineConfig.resolve(**settings, memory=memory)


# --- what a step costs -------------------------------------------------------------------------------------------


def look_ns() -> float:
    """Nanoseconds of one look at a flag in shared memory, the call of it included."""
    flag, fd = StepFlag.open()
    os.close(fd)

    def looks() -> bool:
        return flag.names(7)

    started = time.perf_counter_ns()
    for _ in range(LOOKS):
        looks()
    return (time.perf_counter_ns() - started) / LOOKS


def make_step(num_rows: int, num_tokens: int, num_layers: int, every: int) -> StepInput:
    """So many rows of so many tokens each, at the beginning of their prompts."""
    width = -(-num_tokens // 16)
    return StepInput(
        step_id=1, layer_lo=0, layer_hi=num_layers, token_ids=np.full(num_rows * num_tokens, 5, dtype=np.int32),
        query_lens=np.full(num_rows, num_tokens, dtype=np.int32), context_lens=np.zeros(num_rows, dtype=np.int32),
        block_tables=np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width),
        sample_rows=np.arange(num_rows, dtype=np.int32), safepoint_layers=every,
    )


def step_costs(arguments: Namespace, model: Path) -> dict[str, dict[str, float]]:
    """By step and k: milliseconds without looks, and what looks add, as the median of pairs run in turns."""
    device = make_device_worker(assemble(config_of(arguments, model)).worker_specs[0])
    device.start()
    flag, fd = StepFlag.open()
    os.close(fd)
    found: dict[str, dict[str, float]] = {}
    try:
        for name, rows, tokens in (("prefill", 1, arguments.chunk), ("decode", 32, 1)):
            for every in sorted({1, max(1, (arguments.layers - 1) // 2)}):
                plain, armed = (make_step(rows, tokens, arguments.layers, k) for k in (0, every))
                runs = {
                    "plain": lambda plain=plain: device.run_step(plain, None),
                    "armed": lambda armed=armed: device.run_step(armed, None, None, lambda: flag.names(1)),
                }
                found[f"{name}, k = {every}"] = paired(runs, arguments.pairs)
    finally:
        device.close()
    return found


def paired(runs: dict[str, Callable[[], object]], num_pairs: int) -> dict[str, float]:
    """Both in turns, the first pair uncounted."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(num_pairs + 1):
        for name in sorted(runs, reverse=bool(index % 2)):
            took_ms = milliseconds(runs[name])
            if index:
                taken[name].append(took_ms)
    step_ms = statistics.median(taken["plain"])
    added_ms = statistics.median(a - p for a, p in zip(taken["armed"], taken["plain"], strict=True))
    return {"step_ms": step_ms, "added_ms": added_ms, "added_share": added_ms / step_ms}


# --- how soon a step ends ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ending:
    """A step of offline requests alone, from an online arrival to its end."""

    variant: str
    phase: float
    """Of its predicted time, when the request came."""
    waited_ms: float
    layers_ms: float
    """What the layers between two safepoints were predicted to take; of a step without, the whole of it."""
    abandoned: bool


class Watch:
    """Sits before a core, and times the ends of the steps that online arrivals find."""

    def __init__(self, core: ClusterCore) -> None:
        self.core = core
        self.variant = ""
        self.endings: list[Ending] = []
        self.step_began = asyncio.Event()
        self.step_s = 0.0
        self._open: dict[int, tuple[int, float, float]] = {}
        self._handle = core.handle
        core.handle = self._watched  # type: ignore[method-assign]

    def _watched(self, event: ports.Event, now_ns: int) -> list[ports.Action]:
        if isinstance(event, ports.Arrived) and event.request.service_class is ServiceClass.ONLINE:
            self._note_found(now_ns)
        if isinstance(event, ports.StepCompleted | ports.StepAbandoned) and event.step_id in self._open:
            arrived_ns, phase, layers_s = self._open.pop(event.step_id)
            abandoned = isinstance(event, ports.StepAbandoned)
            self.endings.append(
                Ending(self.variant, phase, (now_ns - arrived_ns) / 1e6, 1e3 * layers_s, abandoned)
            )
        actions = self._handle(event, now_ns)
        for action in actions:
            if isinstance(action, ports.RunStep) and self._is_wanted(action):
                self.step_s = self._predict_s(self.core.groups[action.group_id].in_flight[action.step_id].work)
                self.step_began.set()
        return actions

    def _is_wanted(self, step: ports.RunStep) -> bool:
        """Offline requests alone, and a long chunk."""
        is_armed = step.safepoint_layers > 0
        is_offline = all(row.state.is_offline for row in step.rows)
        return is_offline and is_armed == (self.variant == "with") and any(row.num_tokens > 1 for row in step.rows)

    def _note_found(self, now_ns: int) -> None:
        for group in self.core.groups.values():
            for step_id, flight in group.in_flight.items():
                if self._is_wanted(flight.step):
                    step_s, num_layers = self._predict_s(flight.work), self.core.state.shape.num_layers
                    share = (flight.step.safepoint_layers or num_layers) / num_layers
                    phase = (now_ns - flight.issued_ns) / 1e9 / step_s
                    self._open[step_id] = (now_ns, phase, step_s * min(1.0, share))

    def _predict_s(self, work: StepWork) -> float:
        return self.core.state.predictor.predict_s(work) or 1.0


async def measure_arrivals(arguments: Namespace, model: Path) -> list[Ending]:
    """Arrivals of both kinds in turns, each in a step of its own."""
    engine = Engine(config_of(arguments, model))
    rng = random.Random(arguments.seed)
    num_asked = 0

    async def ask(num_prompt: int, num_output: int, service_class: ServiceClass) -> None:
        nonlocal num_asked
        num_asked += 1
        prompt = tuple(rng.choices(range(3, 200), k=num_prompt))
        arrival_ns = time.monotonic_ns() - (LATE_NS if service_class is ServiceClass.ONLINE else 0)
        request = Request(f"r{num_asked}", prompt, greedy(num_output), arrival_ns, service_class=service_class)
        async for event in engine.submit(request):
            if event.error is not None:
                raise RuntimeError(event.error)

    async def keep_asking() -> None:
        while True:
            await ask(arguments.prompt, 2, ServiceClass.OFFLINE)

    await engine.start()
    batch: list[asyncio.Task[None]] = []
    try:
        watch = Watch(engine.core)
        for worker in engine.snapshot().workers:
            os.sched_setaffinity(worker.pid, {arguments.cores[-1]})
        batch = [asyncio.create_task(keep_asking()) for _ in range(arguments.offline)]
        await asyncio.sleep(arguments.warm_up_s)
        for index in range(2 * arguments.arrivals):
            watch.variant = sorted(VARIANTS)[index % 2]
            offline = replace(VARIANTS[watch.variant], safepoint_layers=arguments.every)
            engine.core.reconfigure(replace(engine.core.params, offline=offline))
            watch.step_began.clear()
            await watch.step_began.wait()
            await asyncio.sleep(rng.random() * watch.step_s)
            await ask(8, 1, ServiceClass.ONLINE)
    finally:
        for task in batch:
            task.cancel()
        await asyncio.gather(*batch, return_exceptions=True)
        await engine.close()
    return watch.endings


def summary(endings: list[Ending]) -> dict[str, dict[str, float]]:
    """By variant."""
    found: dict[str, dict[str, float]] = {}
    for variant in VARIANTS:
        mine = [e for e in endings if e.variant == variant]
        waited, beyond = [e.waited_ms for e in mine], [e.waited_ms - e.layers_ms for e in mine]
        found[variant] = {
            "arrivals": len(mine), "abandoned": sum(e.abandoned for e in mine),
            "waited_p50_ms": float(np.percentile(waited, 50)), "waited_p99_ms": float(np.percentile(waited, 99)),
            "layers_ms": statistics.median(e.layers_ms for e in mine),
            "beyond_layers_p99_ms": float(np.percentile(beyond, 99)),
        }  # fmt: skip
    return found


def judge(costs: dict[str, dict[str, float]], arrivals: dict[str, dict[str, float]]) -> list[tuple[bool, str]]:
    """What has to hold, and whether it does."""
    dearest = max(cost["added_share"] for cost in costs.values())
    armed, plain = arrivals["with"], arrivals["without"]
    beyond_ms, most_ms = armed["beyond_layers_p99_ms"], GOALS["beyond_layers_ms"]
    return [
        (dearest <= GOALS["step_overhead"], f"looks add {dearest:.2%} to a step, {GOALS['step_overhead']:.0%} allowed"),
        (
            beyond_ms <= most_ms,
            f"P99 to the step's end {armed['waited_p99_ms']:.1f} ms, {beyond_ms:.1f} beyond the predicted layers, "
            f"{most_ms:g} allowed; without safepoints {plain['waited_p99_ms']:.1f} ms",
        ),
        (armed["abandoned"] > 0, f"{armed['abandoned']:.0f} of {armed['arrivals']:.0f} steps were given up"),
    ]


def main() -> None:
    arguments = parse(
        __doc__, layers=12, hidden=768, dtype="bfloat16", chunk=(512, "tokens of a step"),
        prompt=(2048, "tokens of an offline prompt"), offline=(3, "offline requests at a time"),
        every=(int, "layers between two safepoints (default: as the engine chooses)"),
        pairs=(100, "steps with and without looks"), arrivals=(200, "of each kind"),
        warm_up_s=(10.0, "in which step times are learned"), cores=[0, 1], seed=0, json=Path("safepoints.json"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="jettison-safepoints-") as scratch:
        model = Path(scratch) / "model"
        create_model(
            model, arch="qwen3", layers=arguments.layers, hidden=arguments.hidden, heads=4, kv_heads=1, seed=0,
            max_position_embeddings=2 * arguments.prompt,
        )
        check_ns = look_ns()
        costs = step_costs(arguments, model)
        endings = asyncio.run(measure_arrivals(arguments, model))
    found = summary(endings)
    document = {
        "settings": settings_of(arguments), "paper": PAPER, "goals": GOALS, "look_ns": check_ns, "steps": costs,
        "arrivals": found, "endings": [asdict(ending) for ending in endings],
    }  # fmt: skip
    print_block("safepoints", document)
    keep(arguments.json, document | {"verdicts": print_verdicts(judge(costs, found))}, *SERVING)

"""How soon an online arrival ends a step of both classes, with and without slices (``--offline-slices``).

    python -m benchmarks chat slices --json slices.json

    python -m benchmarks chat slices --layers 4 --hidden 128 --arrivals 10 --warm-up-s 3    # a short look

An engine with a worker process decodes a few online requests beside a batch of long prompts, so its steps have rows of
both. Online requests come at random phases of such steps, as many with slices as without. Time is from the arrival's
event to that of the step's end, both at the core. With slices it must keep to what the predictor says of the layers
between two safepoints and of the online rows after them, and 5 ms; without them a step runs to its end.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.chat.safepoints import config_of
from benchmarks.servers import greedy
from benchmarks.shared import SERVING, Namespace, keep, parse, print_block, print_verdicts, settings_of
from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.core.serving.flights import InFlight, work_of
from jettison.core.totals import counters
from jettison.cost.stepwork import StepWork
from jettison.device.model.create import create_model
from jettison.live.engine.engine import Engine
from jettison.types import Request, ServiceClass

GOALS = {"beyond_ms": 5.0}
VARIANTS = ("on", "off")


@dataclass(slots=True)
class Ending:
    """A step of both classes, from an online arrival to its end."""

    variant: str
    phase: float
    """Of its predicted time, when the request came."""
    waited_ms: float
    allowed_ms: float
    """What the layers between two safepoints and the online rows after them were predicted to take."""
    shed: bool


class Watch:
    """Sits before a core, and times the ends of the steps that online arrivals find."""

    def __init__(self, core: ClusterCore, variant: str) -> None:
        self.core = core
        self.variant = variant
        self.endings: list[Ending] = []
        self.step_began = asyncio.Event()
        self.step_s = 0.0
        self.is_probing = False
        self._open: dict[int, tuple[int, float, float]] = {}
        self._handle = core.handle
        core.handle = self._watched  # type: ignore[method-assign]

    def _watched(self, event: ports.Event, now_ns: int) -> list[ports.Action]:
        if self.is_probing and isinstance(event, ports.Arrived) and event.request.request_id.startswith("probe"):
            self._note_found(now_ns)
        if isinstance(event, ports.StepCompleted | ports.StepAbandoned) and event.step_id in self._open:
            arrived_ns, phase, allowed_s = self._open.pop(event.step_id)
            shed = isinstance(event, ports.StepCompleted) and event.kept_layers is not None
            self.endings.append(Ending(self.variant, phase, (now_ns - arrived_ns) / 1e6, 1e3 * allowed_s, shed))
        actions = self._handle(event, now_ns)
        for action in actions:
            if isinstance(action, ports.RunStep) and _num_online(action):
                self.step_s = self._predict_s(self.core.groups[action.group_id].in_flight[action.step_id].work)
                self.step_began.set()
        return actions

    def _note_found(self, now_ns: int) -> None:
        for group in self.core.groups.values():
            for step_id, flight in group.in_flight.items():
                if num_online := _num_online(flight.step):
                    step_s = self._predict_s(flight.work)
                    phase = (now_ns - flight.issued_ns) / 1e9 / step_s
                    self._open[step_id] = (now_ns, phase, self._allowed_s(flight, num_online, step_s, phase))

    def _allowed_s(self, flight: InFlight, num_online: int, step_s: float, phase: float) -> float:
        num_layers = self.core.state.shape.num_layers
        online_s = self._predict_s(work_of(flight.step.rows[:num_online]))
        return step_s * (flight.step.safepoint_layers or 1) / num_layers + online_s * max(0.0, 1.0 - phase)

    def _predict_s(self, work: StepWork) -> float:
        return self.core.state.predictor.predict_s(work) or 1.0


def _num_online(step: ports.RunStep) -> int:
    """Online rows of a step that has rows of both classes; else 0."""
    num_online = sum(not row.state.is_offline for row in step.rows)
    return num_online if num_online < len(step.rows) else 0


async def measure(arguments: Namespace, model: Path, variant: str) -> tuple[list[Ending], dict[str, float]]:
    """Arrivals each in a step of its own; and the core's counts."""
    engine = Engine(config_of(arguments, model, variant))
    rng = random.Random(arguments.seed)
    names = iter(range(1 << 30))

    async def ask(name: str, num_prompt: int, num_output: int, service_class: ServiceClass) -> None:
        prompt = tuple(rng.choices(range(3, 200), k=num_prompt))
        request = Request(
            f"{name}{next(names)}", prompt, greedy(num_output), time.monotonic_ns(), service_class=service_class
        )
        async for event in engine.submit(request):
            if event.error is not None:
                raise RuntimeError(event.error)

    async def keep_asking(name: str, num_prompt: int, num_output: int, service_class: ServiceClass) -> None:
        while True:
            await ask(name, num_prompt, num_output, service_class)

    await engine.start()
    tasks: list[asyncio.Task[None]] = []
    try:
        watch = Watch(engine.core, variant)
        for worker in engine.snapshot().workers:
            os.sched_setaffinity(worker.pid, {arguments.cores[-1]})
        kinds = [("batch", arguments.prompt, 2, ServiceClass.OFFLINE)] * arguments.offline
        kinds += [("chat", 8, 200, ServiceClass.ONLINE)] * arguments.chats
        tasks = [asyncio.create_task(keep_asking(*kind)) for kind in kinds]
        await asyncio.sleep(arguments.warm_up_s)
        watch.is_probing = True
        for _ in range(arguments.arrivals):
            watch.step_began.clear()
            await watch.step_began.wait()
            await asyncio.sleep(rng.random() * watch.step_s)
            await ask("probe", 8, 1, ServiceClass.ONLINE)
        return watch.endings, counters(engine.core)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.close()


def summary(endings: list[Ending]) -> dict[str, dict[str, float]]:
    """By variant."""
    found: dict[str, dict[str, float]] = {}
    for variant in VARIANTS:
        mine = [e for e in endings if e.variant == variant]
        waited, beyond = [e.waited_ms for e in mine], [e.waited_ms - e.allowed_ms for e in mine]
        found[variant] = {
            "arrivals": len(mine), "shed": sum(e.shed for e in mine),
            "waited_p50_ms": float(np.percentile(waited, 50)), "waited_p99_ms": float(np.percentile(waited, 99)),
            "allowed_ms": statistics.median(e.allowed_ms for e in mine),
            "beyond_p99_ms": float(np.percentile(beyond, 99)),
        }  # fmt: skip
    return found


def judge(found: dict[str, dict[str, float]]) -> list[tuple[bool, str]]:
    """What has to hold, and whether it does."""
    on, off, most_ms = found["on"], found["off"], GOALS["beyond_ms"]
    return [
        (
            on["beyond_p99_ms"] <= most_ms,
            f"P99 to the step's end {on['waited_p99_ms']:.1f} ms, {on['beyond_p99_ms']:.1f} beyond predicted layers "
            f"and online rows, {most_ms:g} allowed; without slices {off['waited_p99_ms']:.1f} ms",
        ),
        (on["shed"] > 0, f"{on['shed']:.0f} of {on['arrivals']:.0f} steps shed rows"),
    ]


def main() -> None:
    arguments = parse(
        __doc__, layers=12, hidden=768, dtype="float32", chunk=(512, "tokens of a step"),
        prompt=(2048, "tokens of an offline prompt"), offline=(3, "offline requests at a time"),
        chats=(2, "online requests that decode meanwhile"), arrivals=(200, "with slices, and without"),
        warm_up_s=(10.0, "in which step times are learned"), cores=[0, 1], seed=0, json=Path("slices.json"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="jettison-slices-") as scratch:
        model = Path(scratch) / "model"
        create_model(
            model, arch="qwen3", layers=arguments.layers, hidden=arguments.hidden, heads=4, kv_heads=1, seed=0,
            max_position_embeddings=2 * arguments.prompt,
        )
        runs = {variant: asyncio.run(measure(arguments, model, variant)) for variant in VARIANTS}
    endings = [ending for mine, _ in runs.values() for ending in mine]
    found = summary(endings)
    totals = {
        variant: {name: totals[name] for name in ("steps_shed", "slices_resumed", "slices_discarded")}
        for variant, (_, totals) in runs.items()
    }
    document = {
        "settings": settings_of(arguments), "goals": GOALS, "arrivals": found, "totals": totals,
        "endings": [asdict(ending) for ending in endings],
    }  # fmt: skip
    print_block("slices", document)
    keep(arguments.json, document | {"verdicts": print_verdicts(judge(found))}, *SERVING)

"""Record what the steps of a live run took, for ``replay.py``: one file a workload.

    python -m benchmarks predictor record --out FOLDER [--model demo] [--workload chat ...] [--seconds 20]

The engine runs in this process, its workers in theirs. Clients ask, wait for the answer's end, think and ask again; how
many there are changes in phases. ``pipeline-*`` merge both instances first; ``drop`` has little memory and lets the
engine merge and split as it likes. Each file holds a quick profile of the model, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.predictor.replay import FORMAT
from benchmarks.servers import greedy
from benchmarks.shared import Row, parse
from jettison.config import EngineConfig
from jettison.core.ports import Emit, Record, RunStep, Transfer, TransferEnded
from jettison.device.model.create import create_model
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.profile.measure import run_profile
from jettison.types import GroupId, Request, WorkerId

CONTEXT = 2048
BUDGET = 512


class Lengths(NamedTuple):
    """Log-normal: mean prompt and output tokens, and the deviation of their logarithms."""

    prompt: float
    output: float
    sigma: float = 0.7

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        means = np.array([self.prompt, self.output])
        drawn = rng.lognormal(np.log(means) - self.sigma**2 / 2, self.sigma)
        prompt, output = np.clip(np.rint(drawn), 2, [CONTEXT * 3 // 4, CONTEXT // 5]).astype(int)
        return int(prompt), int(output)


@dataclass(frozen=True)
class Scenario:
    """Clients, and what they ask for."""

    kinds: tuple[Lengths, ...]
    clients: tuple[int, ...]
    """In each phase; phases are equally long."""
    think_s: float = 0.2
    is_merged: bool = False
    kv_tokens: int = 60_000
    """Of an instance."""
    overload: str = "recompute"


CHAT, PROMPTS = Lengths(60, 60), Lengths(600, 6)
SCENARIOS = {
    "chat": Scenario((CHAT,), (4, 16, 48, 8)), "prefill": Scenario((PROMPTS,), (1, 4, 12, 2)),
    "mixed": Scenario((CHAT, CHAT, CHAT, PROMPTS, Lengths(800, 60)), (3, 12, 24, 6)),
    "pipeline-chat": Scenario((CHAT,), (4, 16, 48, 8), is_merged=True),
    "pipeline-prefill": Scenario((PROMPTS,), (2, 4, 12, 3), is_merged=True),
    "pipeline-mixed": Scenario((CHAT, CHAT, CHAT, PROMPTS, Lengths(800, 60)), (3, 12, 24, 6), is_merged=True),
    "drop": Scenario((CHAT, Lengths(150, 100)), (4, 60, 4, 60, 4), kv_tokens=2500, overload="drop"),
}  # fmt: skip


class StepRecorder:
    """A ``core.observing.RunObserver`` that keeps steps: issue, end, chunks, and when each stage began and ended."""

    def __init__(self) -> None:
        self.steps: list[Row] = []
        self._open: dict[int, Row] = {}

    def step_issued(self, step: RunStep) -> None:
        self._open[step.step_id] = {
            "group": step.group_id, "stages": [[s.worker_id, s.layers.lo, s.layers.hi] for s in step.stages],
            "issued_ns": time.monotonic_ns(), "chunks": [[row.num_tokens, row.context_len] for row in step.rows],
            "samples": sum(row.samples for row in step.rows), "spans": [],
        }  # fmt: skip

    def stage_done(self, worker_id: WorkerId, step_id: int, started_ns: int, ended_ns: int) -> None:
        if step_id in self._open:
            self._open[step_id]["spans"].append([worker_id, started_ns, ended_ns])

    def step_ended(self, step_id: int) -> None:
        step = self._open.pop(step_id, None)
        if step is not None and len(step["spans"]) == len(step["stages"]):
            self.steps.append({**step, "ended_ns": time.monotonic_ns()})

    def transfer_begun(self, transfer: Transfer) -> None: ...

    def transfer_ended(self, ended: TransferEnded, now_ns: int) -> None: ...

    def recorded(self, record: Record) -> None: ...

    def emitted(self, emit: Emit) -> None: ...

    def looked(self, loads: Iterable[tuple[GroupId, Mapping[str, float]]], now_ns: int) -> None: ...


MODELS = {"demo": (6, 256, 4, 1), "wide": (8, 512, 8, 2)}
"""Layers, hidden size, heads, KV heads: float32 models of steps of about 3 and 10 ms."""


def make_model(name: str, folder: Path) -> Path:
    """Below ``folder``, unless it is there."""
    path = folder / name
    if not path.exists():
        layers, hidden, heads, kv_heads = MODELS[name]
        create_model(
            path, arch="qwen3", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, seed=0,
            max_position_embeddings=CONTEXT,
        )
    return path


def config_of(model_dir: Path, scenario: Scenario) -> EngineConfig:
    keys: dict[str, object] = {
        "model": str(model_dir), "instances": 2, "num_threads": 1, "max_num_batched_tokens": BUDGET, "max_num_seqs": 64,
        "enable_prefix_caching": False, "overload": scenario.overload, "profile": "none", "max_model_len": CONTEXT,
    }  # fmt: skip
    memory = assemble(EngineConfig.resolve(**keys)).memory_for_blocks(scenario.kv_tokens // 16)
    return EngineConfig.resolve(**keys, memory=memory)


async def serve(config: EngineConfig, scenario: Scenario, seconds: float, seed: int) -> StepRecorder:
    """Phases of equal length, and then the answers that are still due."""
    engine, recorder = Engine(config), StepRecorder()
    engine.timeline = recorder  # type: ignore[assignment]  # it is not written: no path is configured
    await engine.start()
    try:
        if scenario.is_merged:
            engine.core.reconfigure(replace(engine.core.params, auto_restore=False))
            for _ in range(200):
                if len(engine.core.groups) == 1:
                    break
                engine.orders.request_drop()
                await asyncio.sleep(0.05)
            else:
                raise RuntimeError("the groups did not merge")
        phase_s = seconds / len(scenario.clients)
        began = time.monotonic()
        clients = [_client(engine, scenario, began, phase_s, i, seed) for i in range(max(scenario.clients))]
        await asyncio.gather(*clients)
    finally:
        await engine.close()
    return recorder


async def _client(engine: Engine, scenario: Scenario, began: float, phase_s: float, number: int, seed: int) -> None:
    rng = np.random.default_rng((seed, number))
    asked = 0
    while (phase := int((time.monotonic() - began) / phase_s)) < len(scenario.clients):
        if number >= scenario.clients[phase]:
            await asyncio.sleep(max(0.001, began + (phase + 1) * phase_s - time.monotonic()))
            continue
        await asyncio.sleep(float(rng.exponential(scenario.think_s)))
        prompt, output = scenario.kinds[rng.integers(len(scenario.kinds))].draw(rng)
        tokens = tuple(int(t) for t in rng.integers(3, engine.info.vocab_size, prompt))
        async for event in engine.submit(Request(f"{number}-{asked}", tokens, greedy(output), time.monotonic_ns())):
            if event.error is not None:
                raise RuntimeError(event.error)
        asked += 1


def main() -> None:
    args = parse(
        __doc__, out=(Path, {"required": True}), model=("demo", {"choices": list(MODELS)}),
        workload=(list(SCENARIOS), {"choices": list(SCENARIOS)}), seconds=20.0, seed=0,
    )  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    model_dir = make_model(args.model, args.out)
    profile_path = args.out / f"{args.model}.profile.json"
    if not profile_path.exists():
        profiled = run_profile(config_of(model_dir, SCENARIOS["chat"]), quick=True).stored.profile
        plain = {"cost": dataclasses.asdict(profiled.cost), "added_stage_s": profiled.added_stage_s(2)}
        profile_path.write_text(json.dumps(plain))
    for name in args.workload:
        config = config_of(model_dir, SCENARIOS[name])
        recorder = asyncio.run(serve(config, SCENARIOS[name], args.seconds, args.seed))
        path = args.out / f"{args.model}.{name}.{args.seed}.json.gz"
        document = {
            "format": FORMAT, "model": args.model, "workload": name, "budget": BUDGET,
            "num_layers": assemble(config).shape.num_layers, "profile": json.loads(profile_path.read_text()),
            "steps": recorder.steps,
        }
        path.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0))
        print(f"{path}: {len(recorder.steps)} steps", flush=True)

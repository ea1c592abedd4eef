"""What serving adds to steps on this machine: the way to the controller and back, and other instances that compute.

Two engines, one of a single instance and one of all, decode the same batches in turn: what a step takes in the second
over what it takes in the first is the contention, and the time between two steps of the first are two hops.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise

from jettison.config import EngineConfig
from jettison.cost.model import CostModel
from jettison.cost.recorded import RecordedStep
from jettison.errors import JettisonError
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.profile.recorded_steps import recorded_steps
from jettison.report.timeline import Timeline
from jettison.types import Request, SamplingParams

BATCH = 8
"""Requests an instance decodes at a time."""
PROMPT, OUTPUT = 16, 64
"""Tokens of each, or less where the model has fewer positions."""
SPARE_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class ServingSpeed:
    """Medians."""

    hop_s: float
    """One way between a worker and the controller, half of the controller's turn included."""
    contention: float
    """What a step takes while all instances compute over what it takes alone; at least 1."""
    num_instances: int
    """That computed at once."""


def measure_serving(config: EngineConfig, cost: CostModel, *, rounds: int) -> ServingSpeed:
    """``config``: as the cluster is to be served; ``cost``: of its steps, with nothing else computing.

    Runs an event loop of its own. Raises ModelError, BudgetError, ConfigError, JettisonError (an engine ends, or
    decodes no batch).
    """
    alone, together = asyncio.run(_serve(config, rounds))
    gaps = [
        after.began_s - before.began_s - before.seconds
        for before, after in pairwise(alone) if before.num_requests == after.num_requests
    ]  # fmt: skip
    if not gaps or not (together or config.instances == 1):
        raise JettisonError("the engine has decoded no batch to be measured")
    contention = _over_prediction(together, cost) / _over_prediction(alone, cost) if together else 1.0
    return ServingSpeed(max(0.0, statistics.median(gaps) / 2), max(1.0, contention), config.instances)


def _over_prediction(steps: Sequence[RecordedStep], cost: CostModel) -> float:
    """Batches are not all of one size, nor their contexts: what the model says of each evens that out."""
    return statistics.median(step.seconds / step.predicted_s(cost) for step in steps)


async def _serve(config: EngineConfig, rounds: int) -> tuple[list[RecordedStep], list[RecordedStep]]:
    """Decode steps of the engine with one instance, and of that with all; none of the latter where there is but one."""
    lines: list[Timeline] = []
    async with AsyncExitStack() as exits:
        engines: list[Engine] = []
        for num_instances in dict.fromkeys((1, config.instances)):
            engine = Engine(_probed(config, num_instances))
            engine.timeline = line = Timeline()
            exits.push_async_callback(engine.close)
            engines.append(engine)
            lines.append(line)
        await asyncio.gather(*(engine.start() for engine in engines))
        for index in range(rounds):
            for engine in engines:  # in turn: a machine is faster or slower for minutes
                await _decode(engine, index)
    num_layers = assemble(config).shape.num_layers
    alone, *together = (
        [step for step in recorded_steps(line.document(), num_layers) if step.num_tokens == step.num_requests]
        for line in lines
    )  # fmt: skip
    return alone, together[0] if together else []


def _probed(config: EngineConfig, num_instances: int) -> EngineConfig:
    """As it is to be served, but small, and with nothing else to do than these batches."""
    assembly = assemble(config)
    blocks = num_instances * BATCH * (-(-(PROMPT + OUTPUT) // config.memory.block_size) + 1) + SPARE_BLOCKS
    memory = assembly.memory_for_blocks(blocks)
    return EngineConfig.resolve(**config.flat() | {
        "instances": num_instances, "memory": memory, "gpu_memory_utilization": None, "host_memory": memory,
        "cards": config.devices.cards[:num_instances], "overload": "recompute", "profile": "none",
        "enable_prefix_caching": False, "timeline": None, "max_num_queued_reqs": None,
    })  # fmt: skip


async def _decode(engine: Engine, index: int) -> None:
    """A batch for each instance, all at once, to the end."""
    rng, info = random.Random(index), engine.info
    batch = min(BATCH, engine.core.state.limits.max_num_seqs)
    prompt = min(PROMPT, info.max_model_len // 4)
    params = SamplingParams(max_tokens=min(OUTPUT, info.max_model_len // 2), temperature=0.0, ignore_eos=True)

    async def one(number: int) -> None:
        tokens = tuple(rng.randrange(info.vocab_size) for _ in range(prompt))
        async for event in engine.submit(Request(f"{index}-{number}", tokens, params, time.monotonic_ns())):
            if event.error is not None:
                raise JettisonError(f"a request of the probe failed: {event.error}")

    await asyncio.gather(*(one(number) for number in range(batch * len(engine.core.groups))))

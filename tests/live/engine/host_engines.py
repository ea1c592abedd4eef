"""Engines whose workers are on several hosts, and what they answer while something happens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from jettison.config import EngineConfig
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.engine.spawner import Spawner
from jettison.live.host.heritage import Heritage
from jettison.types import Request, SamplingParams
from waiting import until


def engine_of(folder: Path, spawner: Spawner | None, heritage: Heritage | None = None, **flags: object) -> Engine:
    base: dict[str, object] = {
        "model": str(folder), "memory": "64MiB", "page_size": 4096, "block_size": 8, "max_num_seqs": 32,
        "max_num_batched_tokens": 64, "num_threads": 1, "dtype": "float64", "exchange": "transfer",
        "exchange_piece_bytes": 1 << 14, "restore_dwell_ms": 100,
    } | flags  # fmt: skip
    sized = assemble(EngineConfig.resolve(**base))  # type: ignore[arg-type]
    config = EngineConfig.resolve(**base | {"memory": sized.memory_for_blocks(200)})  # type: ignore[arg-type]
    return Engine(config, spawner, heritage)


async def nothing(engine: Engine) -> None:
    """No move."""


async def answers(
    engine: Engine, prompts: list[list[int]], then: Callable[[Engine], Awaitable[None]] = nothing
) -> list[list[int]]:
    async def one(i: int, prompt: list[int]) -> list[int]:
        sampling = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
        return [t.token_id async for event in engine.submit(Request(f"q{i}", tuple(prompt), sampling, 0))
                for t in event.tokens]  # fmt: skip

    streams = [asyncio.create_task(one(i, prompt)) for i, prompt in enumerate(prompts)]
    await until(lambda: sum(g.num_running for g in engine.snapshot().groups) >= len(prompts) // 2)
    await then(engine)
    return await asyncio.gather(*streams)


def drawn_prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(256) for _ in range(rng.randint(5, 20))] for _ in range(8)]


async def expected_answers(folder: Path) -> list[list[int]]:
    """To the drawn prompts, of one instance on this host."""
    alone = engine_of(folder, None, instances=1)
    try:
        await alone.start()
        return await answers(alone, drawn_prompts())
    finally:
        await alone.close()

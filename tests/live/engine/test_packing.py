"""Requests over three worker processes are packed while they stream: on fewer in the end, with the same tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from jettison.config import EngineConfig
from jettison.device.model.create import create_model
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.verify.fault_rounds import expected_tokens
from jettison.types import Request, SamplingParams
from waiting import until

NUM_OUTPUT = 300


async def test_requests_spread_over_three_end_up_on_fewer(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    create_model(folder, arch="qwen2", layers=4, hidden=256, heads=4, kv_heads=2, seed=5, max_position_embeddings=512)
    flags: dict[str, object] = {
        "model": str(folder), "instances": 3, "memory": "1GiB", "page_size": 4096, "block_size": 4,
        "num_threads": 1, "dtype": "float64", "packing": "mell", "packing_epoch_s": 0.05, "packing_head_room": 0.05,
    }  # fmt: skip
    sized = assemble(EngineConfig.resolve(**flags))  # type: ignore[arg-type]
    config = EngineConfig.resolve(**flags | {"memory": sized.memory_for_blocks(600)})  # type: ignore[arg-type]
    prompts = [[7 * i + j for j in range(20)] for i in range(6)]
    expected = expected_tokens(config, prompts, NUM_OUTPUT)
    engine = Engine(config)

    async def one(i: int) -> list[int]:
        params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)
        events = engine.submit(Request(f"r{i}", tuple(prompts[i]), params, 0))
        return [token.token_id async for event in events for token in event.tokens]

    def num_used() -> int:
        return sum(bool(group.queues.all_requests()) for group in engine.core.groups.values())

    try:
        await engine.start()
        packing = engine.core.params
        engine.core.reconfigure(replace(packing, rungs=tuple(r for r in packing.rungs if r != "pack")))
        streams = asyncio.gather(*map(one, range(len(prompts))))
        await until(lambda: num_used() == 3)
        engine.core.reconfigure(packing)
        await until(lambda: num_used() < 3 and bool(engine.snapshot().counters["packing_migrations"]))
        assert not streams.done(), "while they stream"
        gauges = engine.snapshot().gauges
        assert gauges["devices_needed"] < 3 and gauges["devices_used"] < 3
        assert await streams == expected
        engine.core.check()
    finally:
        await engine.close()

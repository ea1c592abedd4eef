"""Three instances and a quiet: one falls asleep by itself. A burst wakes it, and every token is what it would be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from jettison.config import EngineConfig
from jettison.core.moving.sleeping import SleepState
from jettison.device.model.create import create_model
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.verify.fault_rounds import expected_tokens
from jettison.types import Request, SamplingParams


async def test_a_quiet_puts_one_to_sleep_and_a_burst_wakes_it(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    create_model(folder, arch="qwen2", layers=4, hidden=64, heads=4, kv_heads=2, seed=5, max_position_embeddings=512)
    flags: dict[str, object] = {
        "model": str(folder), "instances": 3, "memory": "1GiB", "page_size": 4096, "block_size": 4,
        "num_threads": 1, "dtype": "float64", "overload": "recompute", "sleep": "auto", "sleep_after_s": 0.3,
    }  # fmt: skip
    sized = assemble(EngineConfig.resolve(**flags))  # type: ignore[arg-type]
    config = EngineConfig.resolve(**flags | {"memory": sized.memory_for_blocks(64)})  # type: ignore[arg-type]
    prompts = [[7 * i + j for j in range(20)] for i in range(24)]
    expected = expected_tokens(config, prompts, 80)
    engine = Engine(config)

    async def served(i: int) -> list[int]:
        params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
        events = engine.submit(Request(f"r{i}", tuple(prompts[i]), params, 0))
        return [token.token_id async for event in events for token in event.tokens]

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)

    def num_in(state: SleepState) -> int:
        return sum(engine.core.sleepers.state_of(w) is state for w in engine.core.state.workers)

    try:
        await engine.start()
        await until(lambda: num_in(SleepState.ASLEEP) == 1)
        assert engine.snapshot().num_devices_wanted == 2
        assert await asyncio.gather(*map(served, range(len(prompts)))) == expected
        kinds = [record.kind for record in engine.event_log]
        assert "wake_decided" in kinds and "woken" in kinds
        decided = next(record for record in engine.event_log if record.kind == "wake_decided")
        assert decided.fields["reason"] == "memory keeps the queue out" and decided.fields["way"] == "wake"
        await until(lambda: num_in(SleepState.ASLEEP) == 1)  # and when the burst is over, it may sleep again
        engine.core.check()
    finally:
        await engine.close()

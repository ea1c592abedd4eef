"""Three instances of which one sleeps: by itself after a quiet, until a burst wakes it, or the death of another one.

Every token is what it would be.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from jettison.config import EngineConfig
from jettison.core.moving.sleeping import SleepState
from jettison.device.model.create import create_model
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.verify.fault_rounds import expected_tokens
from jettison.types import Request, SamplingParams
from waiting import until


def make_config(tmp_path: Path, num_blocks: int, **more: object) -> EngineConfig:
    folder = tmp_path / "m"
    create_model(folder, arch="qwen2", layers=4, hidden=64, heads=4, kv_heads=2, seed=5, max_position_embeddings=512)
    flags: dict[str, object] = {
        "model": str(folder), "instances": 3, "memory": "1GiB", "page_size": 4096, "block_size": 4,
        "num_threads": 1, "dtype": "float64", "overload": "recompute",
    } | more  # fmt: skip
    sized = assemble(EngineConfig.resolve(**flags))  # type: ignore[arg-type]
    return EngineConfig.resolve(**flags | {"memory": sized.memory_for_blocks(num_blocks)})  # type: ignore[arg-type]


async def greedy_tokens(engine: Engine, name: str, prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens of a stream, which no end token cuts short."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    events = engine.submit(Request(name, tuple(prompt), params, 0))
    return [token.token_id async for event in events for token in event.tokens]


async def test_a_death_wakes_a_sleeper_at_once(tmp_path: Path) -> None:
    """Put to sleep by hand, and with room to spare: the event that tells the death decides to wake a sleeper.

    Whether the sleeper or the dead one's next life serves first is a race of two processes: neither is asserted."""
    config = make_config(tmp_path, 200)
    prompts = [[7 * i + j for j in range(20)] for i in range(4)]
    expected = expected_tokens(config, prompts, 150)
    engine = Engine(config)

    async def served(i: int) -> list[int]:
        return await greedy_tokens(engine, f"r{i}", prompts[i], 150)

    try:
        await engine.start()
        engine.orders.order(lambda core, now_ns: core.request_sleep([2], 2, now_ns))
        await until(lambda: engine.core.sleepers.state_of(2) is SleepState.ASLEEP)
        streams = asyncio.gather(*map(served, range(len(prompts))))
        await until(lambda: all(engine.core.groups[w].queues.running for w in (0, 1)))
        os.kill(next(w.pid for w in engine.snapshot().workers if w.worker_id == 0), signal.SIGKILL)
        assert await streams == expected
        await until(lambda: {"woken", "worker_joined"} <= {record.kind for record in engine.event_log})
        of_interest = ("worker_lost", "wake_decided", "woken", "worker_joined")
        told = [record for record in engine.event_log if record.kind in of_interest]
        assert [record.kind for record in told[:2]] == list(of_interest[:2])
        assert {record.kind for record in told[2:]} == set(of_interest[2:])
        lost, decided = told[:2]
        assert decided.time_ns == lost.time_ns, "in the same event"
        assert decided.fields["workers"] == [2]
        engine.core.check()
    finally:
        await engine.close()


async def test_a_quiet_puts_one_to_sleep_and_a_burst_wakes_it(tmp_path: Path) -> None:
    config = make_config(tmp_path, 64, sleep="auto", sleep_after_s=0.3)
    prompts = [[7 * i + j for j in range(20)] for i in range(24)]
    expected = expected_tokens(config, prompts, 80)
    engine = Engine(config)

    async def served(i: int) -> list[int]:
        return await greedy_tokens(engine, f"r{i}", prompts[i], 80)

    def num_in(state: SleepState) -> int:
        return sum(engine.core.sleepers.state_of(w) is state for w in engine.core.state.workers)

    try:
        await engine.start()
        await until(lambda: num_in(SleepState.ASLEEP) == 1)
        assert engine.snapshot().num_devices_wanted == 2
        assert await asyncio.gather(*map(served, range(len(prompts)))) == expected
        # The burst may be over before the sleeper is awake.
        await until(lambda: {"wake_decided", "woken"} <= {record.kind for record in engine.event_log})
        decided = next(record for record in engine.event_log if record.kind == "wake_decided")
        assert decided.fields["reason"] == "memory keeps the queue out"
        await until(lambda: num_in(SleepState.ASLEEP) == 1)  # and when the burst is over, it may sleep again
        engine.core.check()
    finally:
        await engine.close()

"""Instances that there may be and that have no process: a burst has one started and filled by its peers, a quiet gives
it back, and one is started where the last process is gone for good. Every token is what it would be."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from test_dozing import greedy_tokens, make_config

from jettison.core.moving.sleeping import SleepState
from jettison.live.engine.engine import Engine
from jettison.live.engine.sleep_orders import SleepOrders
from jettison.live.verify.fault_rounds import expected_tokens
from waiting import until


async def test_a_burst_has_the_third_started_and_a_quiet_gives_it_back(tmp_path: Path) -> None:
    # Not by forecast: a small model's burst may be over before a process could be there.
    config = make_config(
        tmp_path, 64, instances=2, max_instances=3, sleep_after_s=0.3, overload_trigger="pressure"
    )
    prompts = [[7 * i + j for j in range(20)] for i in range(24)]
    expected = expected_tokens(config, prompts, 80)
    engine = Engine(config)

    async def served(name: str, i: int) -> list[int]:
        return await greedy_tokens(engine, f"{name}{i}", prompts[i], 80)

    def state(worker_id: int = 2) -> SleepState:
        return engine.core.sleepers.state_of(worker_id)

    def kinds() -> list[str]:
        return [record.kind for record in engine.event_log]

    try:
        await engine.start()
        assert state() is SleepState.UNPROVISIONED and engine.core.sleepers.provisioning.start_s
        third = engine.snapshot().workers[2]
        assert (third.pid, third.alive, third.is_provisioned, third.sleep) == (0, False, False, "unprovisioned")
        room = engine.info.max_request_tokens
        streams = asyncio.gather(*(served("a", i) for i in range(len(prompts))))
        await until(lambda: "instance_asked" in kinds())
        assert await streams == expected
        # The burst may be over before the third serves: what comes then is served by three.
        await until(lambda: "woken" in kinds())
        assert engine.core.state.workers[2].life == 1
        await until(lambda: "instance_released" in kinds())
        # Any of the three, the one that was idle longest.
        gone = next(int(str(r.fields["worker"])) for r in engine.event_log if r.kind == "instance_released")
        life = engine.core.state.workers[gone].life
        assert state(gone) is SleepState.UNPROVISIONED and engine.info.max_request_tokens == room
        assert "worker_lost" not in kinds()
        await until(lambda: gone not in {w.worker_id for w in engine.snapshot().workers if w.pid})
        SleepOrders(engine).wake(gone)
        await until(lambda: state(gone) is SleepState.AWAKE)
        assert engine.core.state.workers[gone].life == life + 1
        assert await asyncio.gather(*(served("b", i) for i in range(6))) == expected[:6]
        engine.core.check()
    finally:
        await engine.close()


async def test_where_the_last_process_is_gone_for_good_another_is_started_that_serves_on(tmp_path: Path) -> None:
    config = make_config(tmp_path, 64, instances=1, max_instances=2, max_worker_restarts=0)
    prompts = [[7 * i + j for j in range(20)] for i in range(3)]
    expected = expected_tokens(config, prompts, 80)
    engine = Engine(config)

    async def served(i: int) -> list[int]:
        return await greedy_tokens(engine, f"r{i}", prompts[i], 80)

    try:
        await engine.start()
        room = engine.info.max_request_tokens
        early = asyncio.gather(*(served(i) for i in range(2)))
        await until(lambda: any(group.queues.running for group in engine.core.groups.values()))
        os.kill(engine.snapshot().workers[0].pid, signal.SIGKILL)
        await until(lambda: "worker_gone" in {record.kind for record in engine.event_log})
        assert engine.state == "ready" and engine.info.max_request_tokens == room
        late = asyncio.create_task(served(2))
        assert [*await early, await late] == expected
        assert [r.fields["worker"] for r in engine.event_log if r.kind == "instance_asked"] == [1]
        engine.core.check()
    finally:
        await engine.close()

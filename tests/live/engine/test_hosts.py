"""Workers of several hosts over real processes: control and links over TCP, encrypted, with the same tokens as one
worker alone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from host_engines import answers, engine_of

from jettison.device.model.create import create_model
from jettison.live.engine.engine import Engine
from jettison.live.engine.spawn_local import LocalSpawner
from jettison.live.machine.netns import Placement
from jettison.transport.authority import Authority
from waiting import until

pytestmark = pytest.mark.live

FAR = {i: Placement(f"127.0.0.{i + 1}", bytes_per_s=1e9) for i in range(2)}
"""A worker with a limit on its links counts as a host of its own."""


class FarControl(LocalSpawner):
    """The controller is on a host of its own, too."""

    async def open(self, authority: Authority | None) -> str:
        await super().open(authority)
        return "tcp:127.0.0.1:0"


async def test_a_drop_an_exchange_a_restore_and_a_death_between_hosts(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    create_model(folder, arch="qwen2", layers=4, hidden=32, heads=4, kv_heads=2, max_position_embeddings=256, std=0.2)
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(5, 20))] for _ in range(8)]
    alone = engine_of(folder, None, instances=1)
    try:
        await alone.start()
        expected = await answers(alone, prompts)
    finally:
        await alone.close()

    async def moves(engine: Engine) -> None:
        engine.orders.request_drop()
        await until(lambda: engine.snapshot().counters["drops"] == 1)
        while not engine.snapshot().counters["restores"]:  # refused while the merge is under way
            if not engine.core.in_transition:
                engine.orders.request_restore()
            await asyncio.sleep(0.02)

    async def death(engine: Engine) -> None:
        engine.orders.request_drop()
        await until(lambda: engine.snapshot().counters["drops"] == 2)
        os.kill(engine._crew.pids[1], signal.SIGKILL)

    engine = engine_of(folder, FarControl(FAR), instances=2)
    try:
        await engine.start()
        assert len(set(engine.core.params.machine_of.values())) == 2
        assert engine._crew is not None and engine._crew._authority is not None
        assert not any(life.token for life in engine._crew._lives.values()), "each has its certificate"
        assert await answers(engine, prompts, moves) == expected
        await until(lambda: not engine.core.in_transition)
        assert engine.snapshot().counters["restores"] == 1
        assert await answers(engine, prompts, death) == expected
        await until(lambda: all(w.alive for w in engine.core.state.workers.values()))
    finally:
        await engine.close()

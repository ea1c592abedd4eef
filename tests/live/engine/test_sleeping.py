"""A worker put to sleep and woken over real memory: it gives its layers up, and computes the same tokens afterwards."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest
from test_dozing import greedy_tokens

from jettison.config import EngineConfig
from jettison.core.moving.sleeping import EMPTY
from jettison.device.model.create import create_model
from jettison.errors import SleepRefusedError
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.engine.local_cluster import LocalCluster, Until
from jettison.live.engine.sleep_orders import SleepOrders
from jettison.live.verify.fault_rounds import expected_tokens
from jettison.live.verify.scenarios import Setting, blocks_for_all, make_cluster, make_prompts, observed, submit
from waiting import until


def sleeping(cluster: LocalCluster) -> Until:
    sleepers = cluster.core.sleepers
    return Until("an empty layout", lambda: bool(sleepers.asleep) and sleepers.is_idle)


def test_a_worker_that_has_slept_computes_the_same_tokens(tmp_path: Path) -> None:
    create_model(tmp_path / "m", arch="qwen3", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16, seed=3)
    setting = Setting(tmp_path / "m", "float64", 24, seed=1)
    with make_cluster(setting, num_blocks=blocks_for_all(setting, 40), instances=2) as cluster:
        prompts = make_prompts(setting, cluster, 10, 40)
        cluster.request_sleep(1)
        cluster.run(sleeping(cluster))
        assert cluster.core.state.workers[1].layout == EMPTY
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run()
        cluster.request_wake(1)
        cluster.run(Until("all layers", lambda: not cluster.core.in_transition))
        assert len(cluster.core.groups) == 2
        cluster.request_sleep(0)
        cluster.run(sleeping(cluster))
        submit(cluster, prompts, setting.num_output_tokens, len(prompts))
        cluster.run()
        rows = observed(cluster, prompts + prompts)
        assert not any(row.problem for row in rows)
        first, second = rows[: len(prompts)], rows[len(prompts) :]
        assert [row.output for row in first] == [row.output for row in second], "by worker 0, then by worker 1"


async def test_over_processes_streams_go_on_memory_is_given_back_and_a_dead_sleeper_sleeps_on(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    create_model(folder, arch="qwen2", layers=4, hidden=256, heads=4, kv_heads=2, seed=5, max_position_embeddings=512)
    flags: dict[str, object] = {
        "model": str(folder), "instances": 2, "memory": "1GiB", "page_size": 4096, "block_size": 4,
        "num_threads": 1, "dtype": "float64", "restore_dwell_ms": 3_600_000, "overload_min_wait_ms": 3_600_000,
    }  # fmt: skip
    sized = assemble(EngineConfig.resolve(**flags))  # type: ignore[arg-type]
    config = EngineConfig.resolve(**flags | {"memory": sized.memory_for_blocks(600)})  # type: ignore[arg-type]
    prompts = [[7 * i + j for j in range(20)] for i in range(6)]
    expected = expected_tokens(config, prompts, 60)
    engine = Engine(config)
    orders = SleepOrders(engine)

    async def served(name: str) -> None:
        streams = (greedy_tokens(engine, f"{name}{i}", prompt, 60) for i, prompt in enumerate(prompts))
        assert await asyncio.gather(*streams) == expected

    def states() -> list[str]:
        return [str(row["state"]) for row in orders.states()["instances"]]

    try:
        await engine.start()
        streams = asyncio.create_task(served("a"))
        await until(lambda: len(engine.core.groups[0].queues.running) == 3)
        before = engine.snapshot().workers[0]
        with pytest.raises(SleepRefusedError, match="level 1 makes one"):
            orders.sleep(None, 2)
        assert "below --min-awake" in str(orders.sleep(0, 1)["note"])
        await streams
        await until(lambda: states() == ["asleep", "awake"])
        asleep = engine.snapshot().workers[0]
        assert asleep.alive and asleep.parameter_bytes == asleep.kv_bytes == 0
        assert asleep.free_bytes + asleep.workspace_bytes == asleep.budget_bytes
        assert asleep.rss_bytes < before.rss_bytes - before.parameter_bytes // 2
        os.kill(asleep.pid, signal.SIGKILL)
        await until(lambda: engine.core.state.workers[0].life == 1 and states() == ["asleep", "awake"])
        orders.sleep(1, 2)  # the host's copy is one, too
        await until(lambda: states() == ["asleep", "asleep"])
        shutil.rmtree(folder)
        await served("b")  # the first of them wakes one, and only the host's copy can fill it
        assert sorted(states()) == ["asleep", "awake"]
        orders.wake(None)
        await until(lambda: states() == ["awake", "awake"])
        await served("c")
        engine.core.check()
    finally:
        await engine.close()

"""The model folder is overwritten under running workers: one model is served, or none, and the operator is told why.

Each worker process in these tests is killed while the folder holds another model of the same shape.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from jettison.config import EngineConfig
from jettison.device.model.create import create_model
from jettison.errors import ModelError
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.types import Request, SamplingParams
from waiting import until

pytestmark = pytest.mark.live

FILE = "model.safetensors"
PROMPT = tuple(range(3, 15))


def make(folder: Path, seed: int) -> Path:
    create_model(
        folder, arch="qwen3", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16, seed=seed, std=0.2,
        max_position_embeddings=512,
    )
    return folder


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return make(tmp_path / "served", 1)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return make(tmp_path / "other", 2)


def overwrite(served: Path, other: Path) -> None:
    """As a deployment does: the new file takes the old one's name."""
    shutil.copy(other / FILE, served / "new")
    os.replace(served / "new", served / FILE)


@asynccontextmanager
async def running(model_dir: Path, instances: int) -> AsyncIterator[Engine]:
    settings: dict[str, object] = {
        "model": str(model_dir), "dtype": "float64", "instances": instances, "block_size": 4, "num_threads": 1,
        "max_num_batched_tokens": 32, "max_num_seqs": 16, "memory": "64MiB", "restore_dwell_ms": 600_000,
    }
    memory = assemble(EngineConfig.resolve(**settings)).memory_for_blocks(60)  # type: ignore[arg-type]
    engine = Engine(EngineConfig.resolve(**settings | {"memory": memory}))  # type: ignore[arg-type]
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def ask(engine: Engine, name: str, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    tokens: list[int] = []
    async for event in engine.submit(Request(name, prompt, params, 0, cache_salt=name)):
        assert event.error is None
        tokens += [t.token_id for t in event.tokens]
    return tokens


def kinds(engine: Engine) -> list[str]:
    return [record.kind for record in engine.event_log]


async def kill(engine: Engine, worker_id: int) -> None:
    """And wait until its next life is there; whether it could be filled is the test's affair."""
    joined = kinds(engine).count("worker_joined")
    assert engine._crew is not None
    os.kill(engine._crew.pids[worker_id], signal.SIGKILL)
    await until(lambda: kinds(engine).count("worker_joined") > joined)


async def test_what_nobody_has_any_more_stays_down_until_the_file_is_back(
    served: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(served / FILE, served / "kept")
    async with running(served, 1) as engine:
        expected = await ask(engine, "before")
        overwrite(served, other)
        with caplog.at_level(logging.ERROR, logger="jettison.live.engine.move_log"):
            await kill(engine, 0)
            waiting = asyncio.create_task(ask(engine, "waiting"))
            await until(lambda: engine.snapshot().troubles)
            # It goes on trying: what it says is said once.
            failures = engine.core.recoveries.by_worker[0]
            await until(lambda: failures._fetching.is_idle)
            await until(lambda: not failures._fetching.is_idle)
        (reason,) = engine.snapshot().troubles
        assert f"{served / FILE}: changed 20" in reason
        assert "put the old file back, or restart the server" in reason
        assert len([r for r in caplog.records if "stays down" in r.message]) == 1
        assert engine.snapshot().groups == []
        assert not waiting.done()
        os.replace(served / "kept", served / FILE)
        assert await waiting == expected
        assert engine.snapshot().troubles == ()


async def test_half_a_pipeline_that_died_is_not_replaced_by_another_model(served: Path, other: Path) -> None:
    """The survivor of a merged pair lacks layers that only the folder could give."""
    shutil.copy(served / FILE, served / "kept")
    async with running(served, 2) as engine:
        expected = await ask(engine, "before")
        engine.orders.request_drop()
        await until(lambda: "exchange_done" in kinds(engine))
        # KV over all pages that parameters had: those that nothing was written over come back by mapping alone.
        await asyncio.gather(*(ask(engine, f"fill-{i}", PROMPT * 4) for i in range(16)))
        overwrite(served, other)
        await kill(engine, 0)
        waiting = asyncio.create_task(ask(engine, "waiting"))
        await until(lambda: engine.snapshot().troubles)
        os.replace(served / "kept", served / FILE)
        assert await waiting == expected
        await until(lambda: not engine.core.in_transition and len(engine.core.groups) == 2)
        for answer in await asyncio.gather(*(ask(engine, f"again-{i}") for i in range(4))):
            assert answer == expected


async def test_a_nan_in_the_weights_ends_the_start_with_the_tensor_s_name(served: Path) -> None:
    tensors = load_file(served / FILE)
    tensors["model.layers.3.mlp.up_proj.weight"][1, 1] = torch.nan
    save_file(tensors, served / FILE)
    with pytest.raises(ModelError, match=r"model\.layers\.3\.mlp\.up_proj\.weight has values that are not finite"):
        async with running(served, 1):
            pass


class Pair(NamedTuple):
    """Two instances that lose workers, and get them back, in one test after the other."""

    engine: Engine
    folder: Path
    expected: list[int]
    """Its answer before anything happened."""

    async def expect_all_as_before(self) -> None:
        """At both instances."""
        names = [f"again-{self.engine.core.state.next_step_id}-{i}" for i in range(4)]
        for answer in await asyncio.gather(*(ask(self.engine, name) for name in names)):
            assert answer == self.expected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = make(tmp_path_factory.mktemp("pair") / "served", 1)
    async with running(folder, 2) as engine:
        yield Pair(engine, folder, await ask(engine, "before"))


IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")
"""Of tests that share an engine. They come last: it would not be looked after while another loop runs."""


@IN_ONE_LOOP
async def test_a_configuration_that_changed_on_disk_changes_no_worker(pair: Pair) -> None:
    engine, config = pair.engine, pair.folder / "config.json"
    kept = config.read_text()
    config.write_text("{}")
    await kill(engine, 0)
    await kill(engine, 1)
    await until(lambda: not engine.core.in_transition)
    await pair.expect_all_as_before()
    config.write_text(kept)


@IN_ONE_LOOP
async def test_a_worker_that_comes_back_is_filled_by_its_peers(pair: Pair, other: Path) -> None:
    engine = pair.engine
    weights = engine.snapshot().weights
    overwrite(pair.folder, other)
    await kill(engine, 1)
    await until(lambda: not engine.core.in_transition)
    await pair.expect_all_as_before()
    engine.orders.request_drop()
    await until(lambda: "exchange_done" in kinds(engine))
    assert await ask(engine, "pipeline") == pair.expected
    engine.orders.request_restore()
    await until(lambda: not engine.core.in_transition and len(engine.core.groups) == 2)
    await pair.expect_all_as_before()
    snapshot = engine.snapshot()
    assert (snapshot.troubles, snapshot.weights) == ((), weights)
    assert "recovery_stuck" not in kinds(engine)


@IN_ONE_LOOP
async def test_a_worker_that_dies_while_it_is_filled_is_filled_again(pair: Pair, other: Path) -> None:
    engine = pair.engine
    overwrite(pair.folder, other)
    for _ in range(2):
        await kill(engine, 1)  # returns as soon as the new life is there, empty
    await until(lambda: not engine.core.in_transition)
    await pair.expect_all_as_before()

"""A folder of a configuration alone is served: a killed worker's next life has the weights of the one before."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jettison.config import EngineConfig
from jettison.device.model.create import create_model
from jettison.errors import ModelError
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.types import Request, SamplingParams
from waiting import until

pytestmark = pytest.mark.live


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_model(
        tmp_path / "whole", arch="qwen3", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16,
        max_position_embeddings=512,
    )
    folder = tmp_path / "bare"
    folder.mkdir()
    (tmp_path / "whole" / "config.json").rename(folder / "config.json")
    return folder


def config(folder: Path, **more: object) -> EngineConfig:
    settings: dict[str, object] = {
        "model": str(folder), "dtype": "float64", "instances": 2, "block_size": 4, "num_threads": 1,
        "max_num_batched_tokens": 32, "max_num_seqs": 16, "memory": "64MiB", "restore_dwell_ms": 600_000, **more,
    }
    return EngineConfig.resolve(**settings)  # type: ignore[arg-type]


async def ask(engine: Engine, name: str) -> list[int]:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    tokens: list[int] = []
    async for event in engine.submit(Request(name, tuple(range(3, 15)), params, 0, cache_salt=name)):
        assert event.error is None
        tokens += [t.token_id for t in event.tokens]
    return tokens


def kinds(engine: Engine) -> list[str]:
    return [record.kind for record in engine.event_log]


async def test_the_only_worker_of_a_shape_is_killed_and_its_next_life_says_the_same(folder: Path) -> None:
    engine = Engine(config(folder, load_format="random", instances=1))
    try:
        await engine.start()
        expected = await ask(engine, "before")
        assert engine._crew is not None
        os.kill(engine._crew.pids[0], signal.SIGKILL)
        await until(lambda: "worker_joined" in kinds(engine))
        assert await ask(engine, "after") == expected  # from the seed: no peer has the weights
    finally:
        await engine.close()


def test_a_folder_without_weights_is_refused_unless_they_are_random(folder: Path) -> None:
    with pytest.raises(ModelError, match="safetensors"):
        assemble(config(folder)).check()
    assembly = assemble(config(folder, load_format="random"))
    assembly.check()
    assert assembly.byte_tokens == assembly.shape.vocab_size
    assert assemble(config(folder)).byte_tokens is None

"""Rotary tables have rows for what memory can hold of a context, and for no less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.config import EngineConfig
from jettison.device.model.create import create_model
from jettison.errors import BudgetError, ConfigError
from jettison.live.engine.assembly import assemble
from jettison.live.engine.deployed import deployment_of
from jettison.live.engine.local_cluster import LocalCluster
from jettison.live.engine.positions import PositionRoom
from jettison.types import SamplingParams
from puppet import write_puppet

MEMORY = "24MiB"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The same weights with a short context and a long one."""
    root = tmp_path_factory.mktemp("models")
    return {
        context: write_puppet(root / str(context), {}, config={"max_position_embeddings": context})
        for context in (2048, 131_072, 1 << 20)
    }


def assembled(folder: Path, **flags):
    return assemble(EngineConfig.resolve(model=str(folder), num_threads=1, **{"memory": MEMORY} | flags))


def test_a_long_context_leaves_memory_for_kv(models):
    blocks = {}
    for context, folder in models.items():
        with LocalCluster(EngineConfig.resolve(model=str(folder), memory=MEMORY, num_threads=1)) as cluster:
            blocks[context] = cluster.core.max_request_blocks()
            assert cluster.assembly.limits.max_model_len == context
            assert cluster.assembly.model.max_model_len >= min(context, blocks[context] * 16)
    assert blocks[131_072] == blocks[1 << 20] > 0.8 * blocks[2048]


@pytest.mark.parametrize("overload", ["drop", "pipeline"])
@pytest.mark.parametrize("instances", [2, 3])
def test_rows_reach_as_far_as_requests(models, instances, overload):
    """Whatever instances merge: what the core takes on has its positions."""
    config = EngineConfig.resolve(
        model=str(models[131_072]), memory=MEMORY, num_threads=1, instances=instances, overload=overload)
    with LocalCluster(config) as cluster:
        assert cluster.assembly.model.max_model_len >= cluster.core.max_request_blocks() * 16


def test_a_request_that_takes_all_memory_runs_to_its_last_position(tmp_path):
    """The same tokens as from tables for the whole context."""
    done = []
    for context in (400, 1 << 17):
        folder = tmp_path / str(context)
        create_model(folder, arch="llama", layers=2, hidden=64, heads=2, kv_heads=2, std=0.2,
                     max_position_embeddings=context)  # fmt: skip
        memory = assembled(folder, memory="64MiB", dtype="float64").memory_for_blocks(20)
        config = EngineConfig.resolve(model=str(folder), memory=memory, num_threads=1, dtype="float64")
        with LocalCluster(config) as cluster:
            room = cluster.core.max_request_blocks() * 16
            assert 320 <= room <= 512
            assert (cluster.assembly.model.max_model_len < context) == (context > 512)
            cluster.submit("r", list(range(30)), SamplingParams(max_tokens=290, temperature=0.0, ignore_eos=True))
            cluster.run()
            done.append(cluster.completions["r"].token_ids)
    assert len(done[0]) == 290
    assert done[0] == done[1]


def test_memory_for_blocks_holds_just_these(models):
    for context, folder in models.items():
        for blocks in (8, 100, 1000):
            sized = assembled(folder, instances=2).sized_for(blocks)
            memory = sized.config.memory.memory_bytes
            assert memory == sized.memory_for_blocks(blocks)
            config = EngineConfig.resolve(model=str(folder), memory=memory, num_threads=1, instances=2)
            with LocalCluster(config) as cluster:
                (capacity,) = {worker.ledger.capacity for worker in cluster.core.state.workers.values()}
            assert blocks <= capacity <= blocks + 4, (context, blocks)


def test_a_deployment_tells_the_workspace_of_its_memory(models):
    assembly = assembled(models[131_072], memory="1GiB")
    deployment = deployment_of(assembly, kv_tokens=1600)
    sized = assembled(models[131_072], memory=deployment.budget_bytes)
    assert deployment.workspace_bytes == sized.workspace_bytes < assembly.workspace_bytes
    assert deployment_of(assembly).workspace_bytes == assembly.workspace_bytes


def test_too_little_memory_is_told_as_before(models):
    with pytest.raises(BudgetError):
        assembled(models[131_072], memory="1MiB").check()


def test_a_step_of_blocks_that_memory_does_hold_is_still_bounded(models):
    with pytest.raises(ConfigError, match="a step could need"):
        assembled(models[1 << 20], memory="64GiB", max_num_seqs=4096, max_num_batched_tokens=4096)


@given(
    instances=st.integers(1, 5), parameters=st.integers(0, 10**7), fixed=st.integers(0, 10**5),
    row=st.integers(1, 4096), kv=st.integers(1, 10**5), memory=st.integers(0, 10**8),
)  # fmt: skip
def test_tables_never_bound_a_request(instances, parameters, fixed, row, kv, memory):
    block_size = 16
    room = PositionRoom(instances, parameters, fixed, row, kv * block_size, block_size, 1 << 40)
    rows = room.positions(memory)
    left = instances * (memory - fixed - rows * row) - parameters
    assert left // (kv * block_size) * block_size < rows
    assert replace(room, context=100).positions(memory) == min(100, rows)
    assert room.positions(memory + 1) >= rows
    if rows > block_size:  # not one block more than could be used
        fewer = rows - block_size
        assert (instances * (memory - fixed - fewer * row) - parameters) >= fewer * kv

"""Which workers share a machine, as a live cluster's core is told."""

from __future__ import annotations

import pytest

from jettison.config import EngineConfig
from jettison.core.load.distances import known_links
from jettison.device.model.create import create_model
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.engine.spawn_local import LocalSpawner
from jettison.live.engine.spawner import machines_of
from jettison.live.machine.netns import Placement
from jettison.policy.links import FAR, NEAR


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("netns") / "model"
    create_model(folder, arch="qwen2", layers=2, hidden=32, heads=4, kv_heads=2, max_position_embeddings=128)
    return EngineConfig.resolve(
        model=str(folder), instances=2, memory="16MiB", num_threads=1, dtype="float32", max_num_batched_tokens=32,
        max_num_seqs=8,
    )


def test_workers_that_share_memory_share_the_machine() -> None:
    assert machines_of(range(3), LocalSpawner()) == {0: 0, 1: 0, 2: 0}


def test_a_namespace_is_a_machine_whatever_its_addresses() -> None:
    placements = {
        0: Placement("10.0.0.1", "a"), 1: Placement("10.0.0.2", "b"), 2: Placement("10.0.0.3", "a"),
        3: Placement("127.0.0.2"),
    }  # fmt: skip
    machine = machines_of(range(5), LocalSpawner(placements))
    assert machine[0] == machine[2] != machine[1]
    assert machine[3] == machine[4], "the keeper's own, placed there or not at all"
    assert len(set(machine.values())) == 3


def test_the_core_knows_where_workers_are_and_what_their_networks_carried(config: EngineConfig) -> None:
    assembly = assemble(config)
    capacity = dict.fromkeys(range(4), 8)
    together = machines_of(capacity, LocalSpawner())
    assert known_links(assembly.build_core(capacity, b"secret", None, together).state) is None
    placements = {w: Placement(f"10.0.0.{w}", "left" if w < 2 else "right") for w in capacity}
    state = assembly.build_core(capacity, b"secret", None, machines_of(capacity, LocalSpawner(placements))).state
    links = known_links(state)
    assert links is not None
    assert (links.distance(0, 1), links.distance(1, 2)) == (NEAR, FAR)
    state.link_rate((0, 2)).observe(1 << 20, 1.0)
    state.link_rate((3, 1)).observe(1 << 20, 100.0)
    links = known_links(state)
    assert links is not None
    assert links.distance(2, 0) > links.distance(0, 2) == FAR


async def test_an_engine_tells_its_core_where_it_has_put_workers(config: EngineConfig) -> None:
    engine = Engine(config, LocalSpawner({1: Placement("127.0.0.2")}))
    try:
        await engine.start()
        assert engine.core.params.machine_of == {0: 0, 1: 0}
    finally:
        await engine.close()


def test_a_worker_whose_links_are_slowed_down_is_a_machine() -> None:
    placements = {0: Placement("127.0.0.1", bytes_per_s=1e6), 1: Placement("127.0.0.2", bytes_per_s=1e6)}
    machine = machines_of(range(3), LocalSpawner(placements))
    assert len(set(machine.values())) == 3

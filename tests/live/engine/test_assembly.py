"""What a configuration and a model folder make together."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from jettison.config import EngineConfig
from jettison.core.load.pullrates import PullRates
from jettison.device.kind_host import HostKind
from jettison.device.model.create import create_model
from jettison.errors import ConfigError
from jettison.live.engine.assembly import assemble
from jettison.server.launch import health_details
from jettison.types import HEAD_SHARD


def layers_of(tmp_path: Path, num_layers: int, **flags: object) -> list[tuple[int, int] | None]:
    """The layers that each worker loads."""
    folder = tmp_path / "model"
    create_model(folder, arch="llama", layers=num_layers, hidden=16, heads=2, kv_heads=1, max_position_embeddings=64)
    config = EngineConfig.resolve(model=str(folder), memory="16MiB", **flags)  # type: ignore[arg-type]
    return [spec.layers for spec in assemble(config).worker_specs]


@pytest.mark.parametrize(("instances", "layers"), [
    (2, [(0, 2), (2, 4)]), (3, [(0, 2), (2, 4), (0, 4)]), (4, 2 * [(0, 2), (2, 4)]),
])
def test_static_pipelines_take_instances_in_pairs_and_an_odd_one_stays_alone(
    instances: int, layers: list[tuple[int, int]], tmp_path: Path
) -> None:
    assert layers_of(tmp_path, 4, overload="pipeline", instances=instances) == layers


@pytest.mark.parametrize("rate", [1e9, 2.5e9])
def test_a_link_that_none_has_measured_carries_what_the_kind_of_device_says(
    rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostKind, "link_bytes_per_s", rate)
    folder = tmp_path / "model"
    create_model(folder, arch="llama", layers=2, hidden=16, heads=2, kv_heads=1, max_position_embeddings=64)
    made = assemble(EngineConfig.resolve(model=str(folder), memory="16MiB", instances=2))
    core = made.build_core({0: 50, 1: 50}, b"s" * 16)
    assert PullRates(core.state).slowest([0, 1]) == rate


@pytest.mark.parametrize(("num_layers", "instances", "has"), [(4, 1, "--instances 1"), (1, 2, "one layer")])
def test_a_static_pipeline_that_cannot_be_formed_is_refused(
    num_layers: int, instances: int, has: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"--overload pipeline .* with {has}$") as caught:
        layers_of(tmp_path, num_layers, overload="pipeline", instances=instances)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("dtype", "kind", "may_change"), [
    ("float64", "tokens", False), ("float32", "tokens", True), ("float32", "kv", False),
])
def test_health_says_where_a_migration_may_change_near_ties(
    dtype: str, kind: str, may_change: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    create_model(folder, arch="llama", layers=1, hidden=16, heads=2, kv_heads=1, max_position_embeddings=64)
    config = EngineConfig.resolve(model=str(folder), memory="16MiB", dtype=dtype, migration_kind=kind)
    health = health_details(assemble(config))
    assert (health["migration_kind"], health["migration_may_change_near_ties"]) == (kind, may_change)


def test_a_head_of_its_own_has_memory_and_workers_are_told(tmp_path: Path) -> None:
    """Of a folder whose configuration says that the head is the embedding."""
    folder = tmp_path / "model"
    create_model(folder, arch="llama", layers=1, hidden=16, heads=2, kv_heads=1, max_position_embeddings=64, tied=True)
    config = EngineConfig.resolve(model=str(folder), memory="16MiB")
    assert HEAD_SHARD not in assemble(config).shape.all_shards
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    assembly = assemble(config)
    assembly.check()
    assert HEAD_SHARD in assembly.shape.all_shards
    assert [spec.model.tied_embeddings for spec in assembly.worker_specs] == [False]
    random = EngineConfig.resolve(model=str(folder), memory="16MiB", load_format="random")
    assert assemble(random).model.tied_embeddings

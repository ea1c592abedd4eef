"""``--quantized-weights``: what a cluster keeps as integers is decided once, and everything counts with it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from jettison.config import EngineConfig
from jettison.device.model.create import create_model
from jettison.errors import ConfigError
from jettison.live.engine.assembly import Assembly, assemble
from jettison.live.wire.worker_config import WorkerSpec
from jettison.types import layer_shard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantized") / "model"
    create_model(
        path, arch="llama", layers=3, hidden=64, heads=4, kv_heads=2, intermediate=96, quantized="int4-g64",
        extra={"torch_dtype": "bfloat16"}, max_position_embeddings=256,
    )  # fmt: skip
    return path


def assembled(folder: Path, **keys: object) -> Assembly:
    flags = {"model": str(folder), "memory": "8MiB", "kernels": "torch", "instances": 2, "page_size": 4096} | keys
    return assemble(EngineConfig.resolve(**flags))  # type: ignore[arg-type]


def test_kept_weights_are_smaller_in_every_book(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept, widened = assembled(folder), assembled(folder, quantized_weights="widened")
    # down_proj has 96 columns, which are no whole groups of 64: it was not quantized.
    assert {slot for _, slot, _ in kept.model.kept} == {"qkv_weight", "o_weight", "gate_up_weight"}
    assert kept.model.weights == "int4-g64" and widened.model.weights == "plain"
    elements = 64 * (64 + 2 * 32) + 64 * 64 + 2 * 96 * 64
    saved = elements * 2 - elements * (4 + 16 / 64) / 8
    shards = [each.shape.shard_bytes[layer_shard(1)] for each in (widened, kept)]
    assert shards[0] - shards[1] == saved
    assert widened.memory_for_blocks(10) > kept.memory_for_blocks(10)
    assert [kept.fingerprint.differences(widened.fingerprint)] == [["weights 'int4-g64' and not 'plain'"]]
    assert kept.fingerprint.digest() != widened.fingerprint.digest()
    with caplog.at_level("INFO"):
        kept.check()
        widened.check()
    assert "bits a weight in memory; kept as integers but for embed, down_weight of 3 layers, head" in caplog.text
    assert "weights: quantized in the folder, bfloat16 in memory" in caplog.text


def test_workers_are_told(folder: Path) -> None:
    spec = assembled(folder).worker_specs[1]
    assert msgspec.json.decode(msgspec.json.encode(spec), type=WorkerSpec) == spec and spec.model.kept


def test_auto_widens_what_kernels_cannot_keep(folder: Path) -> None:
    assert not assembled(folder, kernels="auto", dtype="float64").model.kept
    assert assembled(folder, dtype="float64", quantized_weights="kept").model.kept  # by torch's kernels


def test_kept_is_refused_where_nothing_can_be(folder: Path, tmp_path: Path) -> None:
    create_model(tmp_path / "odd", arch="llama", layers=1, hidden=48, heads=4, kv_heads=2, quantized="int8-g16")
    assert not assembled(tmp_path / "odd").model.kept
    with pytest.raises(ConfigError, match=r"^--quantized-weights kept: nothing of .*odd can be; it takes matric"):
        assembled(tmp_path / "odd", quantized_weights="kept")
    create_model(tmp_path / "plain", arch="llama", layers=1, hidden=64, heads=4, kv_heads=2)
    with pytest.raises(ConfigError, match=r"^--quantized-weights kept: nothing of .*plain can be; it takes matric"):
        assembled(tmp_path / "plain", quantized_weights="kept")


def test_random_weights_of_a_quantized_shape(folder: Path) -> None:
    """As far as ``config.json`` says: every projection whose columns are whole groups."""
    random = assembled(folder, load_format="random")
    assert {slot for _, slot, _ in random.model.kept} == {"qkv_weight", "o_weight", "gate_up_weight"}

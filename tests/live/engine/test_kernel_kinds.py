"""One kind of kernels for a cluster: settled by the controller, told to workers, profiles and /health.

And a real run of ``native+torch-linear``, named, as a processor with AMX would run it.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from jettison.config import EngineConfig
from jettison.device import beside
from jettison.device.kernels import library
from jettison.device.kernels.processor import AMX_BF16, Processor
from jettison.device.model.create import create_model
from jettison.errors import NotReadyError
from jettison.live.engine.assembly import assemble
from jettison.live.engine.deployed import deployment_of
from jettison.live.engine.engine import Engine
from jettison.live.host.keeper import worker_environment
from jettison.profiles import default_path, fingerprint
from jettison.server.launch import health_details
from jettison.types import FinishReason, Request, SamplingParams

pytestmark = pytest.mark.skipif(not library.supported_variants(), reason="no native kernels built")

WITHOUT_TILES = tuple(name for name in library.supported_variants() if name != library.TILES)
"""Also on a processor that has them, so that it is taken for one whose tiles nothing native uses."""
BEST = f"native-{(WITHOUT_TILES or [''])[0]}"
MIXED = f"{BEST}+torch-linear"
AMX, PLAIN = Processor(AMX_BF16, WITHOUT_TILES), Processor(frozenset(), WITHOUT_TILES)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds") / "model"
    create_model(
        folder, arch="qwen3", layers=4, hidden=64, heads=4, kv_heads=2, seed=5, max_position_embeddings=512, std=0.2
    )
    return folder


def config_of(model_dir: Path, **flags: object) -> EngineConfig:
    base: dict[str, object] = {
        "model": str(model_dir), "instances": 2, "memory": "64MiB", "page_size": 4096, "block_size": 4,
        "max_num_seqs": 16, "max_num_batched_tokens": 64, "num_threads": 1, "dtype": "bfloat16",
    } | flags  # fmt: skip
    return EngineConfig.resolve(**base)  # type: ignore[arg-type]


def environment_of(pid: int) -> str:
    """What a process was started with."""
    return Path(f"/proc/{pid}/environ").read_bytes().decode()


@pytest.mark.parametrize(("flags", "kernels", "independent"), [
    ({}, MIXED, False),
    ({"dtype": "float32"}, BEST, True),
    ({"dtype": "float64"}, BEST, True),
    ({"kernels": "native"}, BEST, True),
    ({"kernels": "native+torch-linear"}, MIXED, False),
    ({"kernels": "native+torch-linear", "dtype": "float64"}, MIXED, True),
    ({"kernels": "torch"}, "torch", False),
])
def test_the_controller_settles_what_all_workers_compute_with(
    flags: dict[str, object], kernels: str, independent: bool, model_dir: Path
) -> None:
    assembly = assemble(config_of(model_dir, **flags), AMX)
    assert {spec.kernels for spec in assembly.worker_specs} == {kernels}
    assert (assembly.kernels, assembly.rows_are_independent) == (kernels, independent)
    mark = deployment_of(assembly).fingerprint
    assert mark is not None and mark.kernels == kernels
    health = health_details(assembly)
    assert (health["kernels"], health["batch_independent"]) == (kernels, independent)
    assert health["token_identity"] == (flags.get("dtype") == "float64")


def test_without_amx_auto_is_native(model_dir: Path) -> None:
    assert assemble(config_of(model_dir), PLAIN).kernels == BEST


@pytest.mark.skipif(library.TILES not in library.supported_variants(), reason="no tile registers here")
def test_where_native_kernels_have_tiles_auto_is_native(model_dir: Path) -> None:
    assembly = assemble(config_of(model_dir))
    assert (assembly.kernels, assembly.rows_are_independent) == (f"native-{library.TILES}", True)


@pytest.mark.parametrize("num_left", range(1, len(WITHOUT_TILES) + 1))
def test_each_lesser_processor_settles_on_the_best_that_it_has(num_left: int, model_dir: Path) -> None:
    """As on a processor without the wider instruction sets."""
    variants = WITHOUT_TILES[-num_left:]
    for dtype in ("bfloat16", "float32", "float64"):
        assembly = assemble(config_of(model_dir, dtype=dtype), Processor(frozenset(), variants))
        assert (assembly.kernels, assembly.rows_are_independent) == (f"native-{variants[0]}", True)


def test_a_profile_of_other_kernels_lies_elsewhere(model_dir: Path) -> None:
    paths = set()
    for kernels in ("native", "native+torch-linear"):
        spec = assemble(config_of(model_dir, kernels=kernels)).worker_specs[0]
        paths.add(default_path(model_dir, fingerprint(model_dir, spec.dtype, spec.num_threads, spec.kernels)))
    assert len(paths) == 2


def test_processes_are_started_with_bounded_caches() -> None:
    env = worker_environment(2)
    assert all(name in env for name in beside.ONEDNN_CACHES)


@pytest.mark.live
async def test_a_cluster_runs_with_torchs_products(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Real workers, a merge and a restore under load; what is printed and reported."""
    rng = random.Random(2)
    engine = Engine(config_of(model_dir, kernels="native+torch-linear", restore_dwell_ms=0))
    here = f"native-{library.supported_variants()[0]}+torch-linear"
    with pytest.raises(NotReadyError):
        engine.deployment_document()
    try:
        with caplog.at_level(logging.INFO):
            await engine.start()
        assert f"kernels {here}: products by torch" in caplog.text
        document = engine.deployment_document()
        assert document["fingerprint"]["kernels"] == here  # type: ignore[index]
        for worker in engine.snapshot().workers:
            assert f"{beside.ONEDNN_CACHES[0]}={beside.NUM_KEPT_PRODUCTS}" in environment_of(worker.pid)
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        streams = [
            engine.submit(Request(f"r{i}", tuple(rng.choices(range(256), k=rng.randint(5, 30))), params, 0))
            for i in range(12)
        ]
        engine.orders.request_drop()
        for stream in streams:
            events = [event async for event in stream]
            assert events[-1].finish_reason is FinishReason.LENGTH
            assert sum(len(event.tokens) for event in events) == 40
        assert any("drop" in record.kind for record in engine.event_log)
    finally:
        await engine.close()

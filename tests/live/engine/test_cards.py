"""An engine on cards, as far as it is assembled: back end, each process's card, page size, memory; and the lines where
it cannot be. The cards are pretended, and so is the back end: the double of a device."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "device"))
sys.path.insert(0, str(Path(__file__).parents[2] / "server"))

from cardbackend import PretendedBackEnd
from doubledevice import DoubleBackEnd
from fake_engine import FakeEngine

from jettison.config import EngineConfig, cards, devices
from jettison.config.cards import Card, CardMemory
from jettison.device import choice
from jettison.device.model.create import create_model
from jettison.errors import BudgetError, ConfigError
from jettison.live.engine import cards as engine_cards
from jettison.live.engine.api import WorkerSnapshot
from jettison.live.engine.assembly import assemble
from jettison.live.engine.local_cluster import REST, LocalCluster, Until
from jettison.live.machine.memory import memory_limit
from jettison.live.worker import main as worker_main
from jettison.live.worker.device_port import device_spec
from jettison.server.metrics import ServerMetrics
from jettison.types import LayerRange, SamplingParams

MIB = 1 << 20
TWO = [Card("GPU-a", "NVIDIA H100"), Card("GPU-b", "NVIDIA H100")]
MEMORY = CardMemory(20 << 30, 1 << 30)


def put_in_place_of_cards(monkeypatch, back_end):
    for places, made in ((choice._BACK_ENDS, back_end), (choice._KINDS, type(back_end.kind))):
        monkeypatch.setitem(places, "cuda", f"{made.__module__}:{made.__name__}")


@pytest.fixture
def plug(monkeypatch):
    def put(found: list[Card], memory: CardMemory = MEMORY) -> None:
        for module in (devices, engine_cards):
            monkeypatch.setattr(module, "visible_cards", lambda: found)
            monkeypatch.setattr(module, "card_memory", lambda card: memory)
            monkeypatch.setattr(module, "missing_software", lambda: None)
        monkeypatch.setattr(cards, "missing_software", lambda: None)

    put_in_place_of_cards(monkeypatch, DoubleBackEnd)
    return put


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cards") / "model"
    create_model(folder, arch="llama", layers=4, hidden=16, heads=2, kv_heads=1, max_position_embeddings=64)
    return str(folder)


def test_each_worker_sees_its_own_card_and_no_other(plug, folder):
    plug(TWO)
    assembly = assemble(EngineConfig.resolve(model=folder, device="cuda", instances=3))
    assert [spec.environment for spec in assembly.worker_specs] == [
        {"CUDA_VISIBLE_DEVICES": uuid} for uuid in ("GPU-a", "GPU-b", "GPU-a")]
    assert {device_spec(spec).back_end for spec in assembly.worker_specs} == {"cuda"}
    assembly.check()


@pytest.mark.parametrize(("device", "more", "num_bytes"), [
    ("cuda", {}, 8 * MIB), ("cuda", {"exchange_piece_bytes": 8192}, 8192), ("cpu", {}, MIB)
])  # fmt: skip
def test_a_card_s_bulk_pieces_are_larger(plug, folder, device, more, num_bytes):
    plug(TWO)
    assembly = assemble(EngineConfig.resolve(model=folder, device=device, instances=1, **more))
    assert [spec.piece_bytes for spec in assembly.worker_specs] == [num_bytes]


def test_pages_and_memory_of_a_card_are_chosen(plug, folder):
    plug(TWO)
    config = EngineConfig.resolve(model=folder, device="cuda", instances=2)
    assembly = assemble(config)
    assert config.memory.page_bytes is None and assembly.config.memory.page_bytes == assembly.page_bytes
    assert assembly.page_bytes % (2 * MIB) == 0
    assert {spec.page_bytes for spec in assembly.worker_specs} == {assembly.page_bytes}
    assert {spec.memory_bytes for spec in assembly.worker_specs} == {16 << 30}
    told = assemble(EngineConfig.resolve(model=folder, device="cuda", memory="64MiB", page_size="4MiB"))
    assert (told.page_bytes, told.worker_specs[0].memory_bytes) == (4 * MIB, 64 * MIB)
    sized = assembly.sized_for(100)
    assert sized.worker_specs[0].memory_bytes == assembly.memory_for_blocks(100)


def test_drops_are_prepared_for_where_there_can_be_some(plug, folder):
    def drop_layers(**flags):
        spec = assemble(EngineConfig.resolve(model=folder, memory="64MiB", **flags)).worker_specs[0]
        return device_spec(spec).drop_layers

    assert drop_layers(instances=2) == (LayerRange(0, 2), LayerRange(2, 4))
    assert drop_layers(instances=1) == drop_layers(instances=2, overload="recompute") == ()


def test_a_model_that_does_not_fit_into_its_share_is_named_in_one_line(plug, folder):
    plug(TWO[:1], CardMemory(2 * (1 << 30), 0))
    config = EngineConfig.resolve(model=folder, device="cuda", instances=1, gpu_memory_utilization=0.502)
    with pytest.raises(BudgetError) as caught:
        assemble(config).check()
    assert "\n" not in str(caught.value) and "--gpu-memory-utilization 0.502 leaves 0.00 GiB" in str(caught.value)


@pytest.mark.parametrize(("found", "flags", "words"), [
    ([], {}, "no NVIDIA driver"), (TWO[:1], {"cards": "1"}, "--cards names card 1, and 1 are visible"),
])
def test_where_no_card_is_no_engine_is_assembled(plug, folder, monkeypatch, found, flags, words):
    plug(found)
    monkeypatch.setattr(cards, "_cards_of_proc", lambda root: [])
    with pytest.raises(ConfigError, match=words) as caught:
        assemble(EngineConfig.resolve(model=folder, device="cuda", **flags))
    assert "\n" not in str(caught.value)


def test_a_card_s_memory_is_not_counted_as_the_machine_s(plug, folder, caplog):
    plug(TWO, CardMemory(8 << 40, 0))
    config = EngineConfig.resolve(model=folder, device="cuda", instances=2)
    assert memory_limit() is None or config.memory.memory_bytes > memory_limit()[0]
    assemble(config).check()
    assert "all instances together" not in caplog.text


def test_cards_that_auto_cannot_use_are_told_of(plug, folder, monkeypatch):
    plug(TWO)
    monkeypatch.setattr(engine_cards, "missing_software", lambda: "triton not installed")
    told = engine_cards.unused_cards(EngineConfig.resolve(model=folder))
    assert told == "2 card(s) (NVIDIA H100) are not used: triton not installed"
    assert engine_cards.unused_cards(EngineConfig.resolve(model=folder, device="cpu")) is None
    plug([])
    assert engine_cards.unused_cards(EngineConfig.resolve(model=folder)) is None


def test_pages_of_living_workers_are_counted_by_card(plug, folder):
    plug(TWO)
    workers = [
        WorkerSnapshot(i, i, i != 2, 1, 0, 0, 0, 0, 0, held_bytes=(i + 1) * 100 * MIB) for i in range(4)
    ]
    config = EngineConfig.resolve(model=folder, device="cuda", instances=4, cards="0,0,0,1")
    uses = engine_cards.watch_cards(config, lambda: workers)()
    assert [(use.name, use.pages_bytes // MIB) for use in uses] == [("NVIDIA H100", 300), ("NVIDIA H100", 400)]
    metrics = ServerMetrics(FakeEngine(), "m", lambda: uses).exposition().decode()
    assert 'jettison:card_memory_bytes{card="1",model_name="m",use="pages"} 4.194304e+08' in metrics
    assert "jettison:card_memory" not in ServerMetrics(FakeEngine(), "m").exposition().decode()


def test_what_uses_a_card_s_memory_is_told_apart(plug):
    plug(TWO)
    uses = engine_cards.card_uses({0: TWO[0], 1: TWO[1]}, {0: 600 * MIB})
    assert [(use.number, use.pages_bytes, use.others_bytes, use.free_bytes) for use in uses] == [
        (0, 600 * MIB, 424 * MIB, 19 << 30), (1, 0, 1 << 30, 19 << 30)]


class BigCard(PretendedBackEnd):
    """With the pages of a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.fake.granularity = 2 * MIB


def test_two_instances_of_one_configuration_serve_through_a_drop_on_a_card(plug, monkeypatch):
    """``--device cuda --page-size auto``, and nothing else said: from the configuration to the same tokens."""
    plug(TWO[:1], CardMemory(3 << 30, 0))
    put_in_place_of_cards(monkeypatch, BigCard)
    with TemporaryDirectory() as folder:
        create_model(Path(folder), arch="llama", layers=4, hidden=32, heads=2, kv_heads=1, max_position_embeddings=256)
        answers = {}
        for device in ("cpu", "cuda"):
            config = EngineConfig.resolve(
                model=folder, device=device, dtype="float64" if device == "cpu" else "auto", instances=2,
                memory="64MiB", block_size=16, host_memory=0, max_num_seqs=4, max_num_batched_tokens=64,
            )
            with LocalCluster(config, seed=1) as cluster:
                for number in range(4):
                    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
                    cluster.submit(str(number), [3 + number, 5, 7 * number + 1], params)
                cluster.request_drop()
                cluster.run(Until(REST, lambda: cluster.num_open == 0))
                answers[device] = {name: done.token_ids for name, done in cluster.completions.items()}
                if device == "cuda":
                    assert cluster.assembly.page_bytes % (2 * MIB) == 0 and cluster.assembly.kernels == "cuda-invariant"
                    assert any(record.kind == "drop" for record in cluster.records)
    assert answers["cpu"] == answers["cuda"] and all(len(tokens) == 24 for tokens in answers["cpu"].values())


def test_a_worker_s_process_sees_its_card_before_it_makes_a_device(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    monkeypatch.setattr(worker_main, "WorkerProcess", lambda config, make_device: SimpleNamespace(
        run=lambda: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]) or 0))  # fmt: skip
    spec = SimpleNamespace(worker_id=1, environment={"CUDA_VISIBLE_DEVICES": "GPU-b"})
    assert worker_main.run_worker(SimpleNamespace(spec=spec, log_level="WARNING")) == 0
    assert seen == ["GPU-b"]

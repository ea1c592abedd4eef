"""A device as one object: serving, dropping, pipelining, pulling back and moving KV change no token."""

from __future__ import annotations

import os
import random
import shutil
import threading

import numpy as np
import pytest
import torch
from cardbackend import PretendedBackEnd
from device_shards import copy_shard, shard_of

from jettison.device.backend_host import HostBackEnd
from jettison.device.beside import open_shared_copy
from jettison.device.kernels import library
from jettison.device.model import weights
from jettison.device.spec import DeviceSpec
from jettison.device.step import StepInput
from jettison.device.worker import DeviceWorker, make_device
from jettison.errors import BudgetError, ConfigError, ModelError, NotReadyError, StalePlanError
from jettison.memory.layout import LayoutSpec
from jettison.memory.pagemap import shard_owner
from jettison.types import LayerRange, ModelShape

NUM_BLOCKS = 72
ALL = LayerRange(0, 4)
EXACT = "native" if library.supported_variants() else "torch"
"""Below float64 ``auto`` may be kernels whose rows depend on their batch."""
LOW, HIGH = LayerRange(0, 1), LayerRange(1, 4)
PROMPTS = {name: random.Random(i).choices(range(256), k=9 + 7 * i) for i, name in enumerate("abc")}


BACK_ENDS = {"host": HostBackEnd, "card": PretendedBackEnd}


def make_worker(model_dir, back_end=None, **changes) -> DeviceWorker:
    options = {
        "model_dir": model_dir,
        "dtype": "float64",
        "budget_bytes": 4 << 20,
        "block_size": 4,
        "max_num_tokens": 64,
        "max_num_seqs": 4,
        "page_bytes": 4096,
        **changes,
    }
    return make_device(DeviceSpec(**options)) if back_end is None else DeviceWorker(DeviceSpec(**options), back_end)


@pytest.fixture(params=BACK_ENDS)
def kind(request) -> str:
    """Of the back end of ``started``."""
    return request.param


@pytest.fixture
def started(kind, tiny_models):
    """Starts workers of the qwen2 model (four layers), and closes them."""
    workers, back_end = [], BACK_ENDS[kind]()

    def start(**changes) -> DeviceWorker:
        workers.append(make_worker(changes.pop("model_dir", tiny_models["qwen2"]), back_end, **changes))
        workers[-1].start()
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


def spec_of(worker: DeviceWorker, layers: LayerRange) -> LayoutSpec:
    return LayoutSpec(worker.shape.shards_for(layers), layers)


def change_layout(worker: DeviceWorker, layers: LayerRange):
    spec = spec_of(worker, layers)
    offer = worker.offer_layout(spec, 0)
    result = worker.apply_layout(spec, 0, offer.version, [])
    assert result.capacity_blocks == offer.capacity_blocks == worker.capacity_blocks
    return result


def run(driver, num_tokens: int) -> dict[str, list[int]]:
    """Prefill in uneven chunks, then decode together."""
    for name, token_ids in PROMPTS.items():
        driver.add(name, token_ids)
    driver.step({"a": 9, "b": 5})
    driver.step({"a": 1, "b": 11, "c": 3})
    driver.step({"a": 1, "b": 1, "c": 20})
    driver.decode(["c", "a", "b"], num_tokens)
    return {name: request.output[:num_tokens] for name, request in driver.requests.items()}


@pytest.fixture(scope="module")
def expected(tiny_models, new_driver):
    """What an undisturbed worker says."""
    worker = make_worker(tiny_models["qwen2"])
    worker.start()
    outputs = run(new_driver([(worker.run_step, ALL)], NUM_BLOCKS), 60)
    worker.close()
    return outputs


def test_output_is_that_of_transformers(expected, tiny_models, reference_logprobs):
    for name, output in expected.items():
        logprobs = reference_logprobs(tiny_models["qwen2"], PROMPTS[name] + output)
        assert output == logprobs[len(PROMPTS[name]) - 1 : -1].argmax(-1).tolist()


def test_two_workers_that_each_hold_a_part_say_the_same(started, new_driver, expected):
    low, high = started(layers=LOW), started(layers=HIGH)
    assert low.ready_for(LOW)
    assert not low.ready_for(ALL)

    def wire(hidden, stage):
        return high.hidden_from_bytes(low.hidden_to_bytes(hidden), hidden.shape[0])

    assert run(new_driver([(low.run_step, LOW), (high.run_step, HIGH)], NUM_BLOCKS, wire=wire), 60) == expected


def test_copies_to_the_host_and_back_beside_steps_tear_no_block_and_change_no_token(started, new_driver, expected):
    """Blocks beyond those of the requests go out and come back all the time, on a thread, while steps write theirs."""
    worker = started(host_bytes=1 << 20, budget_bytes=8 << 20)
    theirs = [NUM_BLOCKS + i for i in range(4)]
    landing = [NUM_BLOCKS + 4 + i for i in range(4)]
    content = torch.arange(4 * 4 * worker.kv_block_bytes, dtype=torch.int64).to(torch.uint8)
    worker.kv_scatter(ALL, theirs, content)
    is_over, rounds = threading.Event(), []
    ways = ((theirs, True), (landing, False))
    pairs = [[worker.copy_beside(ALL, ids, range(4), to_host=to_host) for ids, to_host in ways] for _ in range(2000)]

    def copy():
        for pair in pairs:
            for each in pair:
                each.run()
            rounds.append(all(each.is_complete for each in pair))
            if is_over.is_set():
                return

    thread = threading.Thread(target=copy)
    thread.start()
    outputs = run(new_driver([(worker.run_step, ALL)], NUM_BLOCKS), 60)
    is_over.set()
    thread.join()
    assert outputs == expected and rounds and all(rounds)
    arrived = torch.empty_like(content)
    for blocks in (theirs, landing):
        worker.kv_gather(ALL, blocks, arrived)
        assert torch.equal(arrived, content)


@pytest.mark.parametrize("refill", ["peer", "disk", "intact"])
def test_drop_pipeline_restore(refill, started, new_driver, expected):
    """The whole wave: two full copies become one pipeline, and two full copies again."""
    first, second = started(), started()
    before = first.capacity_blocks
    addresses = {shard: first._memory._arenas[shard_owner(shard)].address for shard in first.shape.all_shards}
    for worker, layers in ((first, LOW), (second, HIGH)):
        assert change_layout(worker, layers).bytes_to_kv > 0
        assert worker.ready_for(layers)
        assert not worker.ready_for(ALL)
    assert first.capacity_blocks > 2 * before
    if refill != "intact":  # use all blocks, so that the pages of dropped shards are overwritten
        stages = [(first.run_step, LOW), (second.run_step, HIGH)]
        num_blocks = min(first.capacity_blocks, second.capacity_blocks)
        assert run(new_driver(stages, num_blocks), 60) == expected
        for worker, layers in ((first, LOW), (second, HIGH)):
            noise = torch.full((len(layers) * worker.shape.block_bytes_per_layer(4),), 0xFF, dtype=torch.uint8)
            for block in range(worker.capacity_blocks):
                worker.kv_scatter(layers, [block], noise)
    for worker, peer in ((first, second), (second, first)):
        result = change_layout(worker, ALL)
        assert bool(result.missing_shards) == (refill != "intact")
        assert worker.ready_for(ALL) == (refill == "intact")
        for shard in result.missing_shards:
            if refill == "disk":
                worker.load_shard_from_disk(shard)
            else:
                source = peer if shard in peer.shape.shards_for(HIGH if peer is second else LOW) else worker
                copy_shard(source, worker, shard)
                worker.mark_shard_filled(shard)
        assert worker.ready_for(ALL)
        assert run(new_driver([(worker.run_step, ALL)], NUM_BLOCKS), 60) == expected
    assert first.capacity_blocks == before
    assert addresses == {shard: first._memory._slabs[shard].data_ptr() for shard in addresses}


def test_a_shard_dropped_while_it_was_being_filled_does_not_come_back_as_intact(started):
    worker = started(layers=LOW)
    missing = change_layout(worker, ALL).missing_shards
    assert missing == worker.shape.all_shards - worker.shape.shards_for(LOW)
    done = sorted(missing)[0]
    worker.load_shard_from_disk(done)
    change_layout(worker, LOW)
    result = change_layout(worker, ALL)
    assert result.intact_shards <= {done}
    assert result.missing_shards >= missing - {done}
    assert not worker.ready_for(ALL)


def test_a_request_moves_between_workers_with_its_kv(started, new_driver, expected):
    source, target = started(), started()
    driver = new_driver([(source.run_step, ALL)], NUM_BLOCKS)
    run(driver, 20)
    request = driver.requests["b"]
    old = request.tables[0]
    new = list(range(NUM_BLOCKS, NUM_BLOCKS + len(old)))
    piece = torch.empty(len(ALL) * len(old) * source.shape.block_bytes_per_layer(4), dtype=torch.uint8)
    assert source.kv_gather(ALL, old, piece) == piece.numel()
    target.kv_scatter(ALL, new, piece)
    moved = new_driver([(target.run_step, ALL)], NUM_BLOCKS)
    moved.requests["b"] = request
    request.tables[0] = new
    moved.decode(["b"], 60 - len(request.output))
    assert request.output == expected["b"]


def test_life(tiny_models, tmp_path):
    make_worker(tmp_path / "missing").close()  # constructing and closing touch nothing
    worker = make_worker(tiny_models["qwen2"], num_threads=torch.get_num_threads())
    with pytest.raises(NotReadyError):
        worker.memory_report()
    worker.start()
    blocks = worker.capacity_blocks
    worker.start()
    assert worker.capacity_blocks == blocks > 0
    assert (worker.config.num_layers, worker.config.hidden_size) == (4, 48)
    assert isinstance(worker.shape, ModelShape)
    assert worker.kernels_name
    assert worker.kv_block_bytes == worker.shape.block_bytes_per_layer(4)
    report = worker.memory_report()
    parts = ("parameter_bytes", "kv_bytes", "workspace_bytes", "free_bytes")
    assert sum(report[part] for part in parts) == report["budget_bytes"] == 4 << 20
    worker.close()
    worker.close()
    with pytest.raises(NotReadyError):
        worker.run_step(make_step(), None)
    worker.start()
    assert worker.ready_for(ALL)
    worker.close()


def make_step(**changes) -> StepInput:
    values = {"layer_lo": 0, "layer_hi": 4, "token_ids": [5, 6], "block_tables": [[0]], **changes}
    arrays = {key: np.array(values[key], np.int32) for key in ("token_ids", "block_tables")}
    one, zero = np.array([2], np.int32), np.zeros(1, np.int32)
    return StepInput(**{**values, **arrays}, step_id=3, query_lens=one, context_lens=zero, sample_rows=zero)


def test_steps_that_would_touch_what_is_not_there_are_refused(started):
    worker = started(layers=HIGH)
    with pytest.raises(NotReadyError, match="layers 0 to 4"):
        worker.run_step(make_step(), None)
    with pytest.raises(IndexError, match=f"block {worker.capacity_blocks} of {worker.capacity_blocks}"):
        worker.run_step(make_step(layer_lo=1, token_ids=[], block_tables=[[worker.capacity_blocks]]), None)
    with pytest.raises(IndexError):
        worker.run_step(make_step(layer_lo=1, token_ids=[], block_tables=[[-1]]), torch.zeros(2, 48).double())
    with pytest.raises(NotReadyError, match="layers 1 to 5"):
        worker.run_step(make_step(layer_lo=1, layer_hi=5, token_ids=[]), torch.zeros(2, 48).double())
    hidden = torch.ones(2, 48, dtype=torch.float64)
    result = worker.run_step(make_step(layer_lo=1, token_ids=[]), hidden)
    assert len(result.tokens) == 1
    assert result.compute_ns > 0


def test_a_shard_that_is_not_filled_is_not_served(started):
    worker = started(layers=LOW)
    missing = sorted(change_layout(worker, ALL).missing_shards)
    for shard in missing:
        assert not worker.ready_for(ALL)
        with pytest.raises(NotReadyError):
            worker.run_step(make_step(), None)
        worker.load_shard_from_disk(shard)
    assert worker.ready_for(ALL)
    assert len(worker.run_step(make_step(), None).tokens) == 1


def test_a_shard_is_loaded_in_pieces_while_steps_of_others_run(started, new_driver, monkeypatch):
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
    worker, whole = started(layers=LOW), started()
    expected = run(new_driver([(whole.run_step, LOW), (whole.run_step, HIGH)], NUM_BLOCKS), 20)
    mapped = LayoutSpec(worker.shape.all_shards, LOW)
    missing = sorted(worker.apply_layout(mapped, 0, worker.layout_version, []).missing_shards)
    num_pieces = 0

    def load_a_piece(step, hidden):
        nonlocal num_pieces
        if next(pieces, "end") is None:
            num_pieces += 1
        return worker.run_step(step, hidden)

    pieces = (None for shard in missing for _ in worker.loading_shard_from_disk(shard))
    assert run(new_driver([(load_a_piece, LOW), (whole.run_step, HIGH)], NUM_BLOCKS), 20) == expected
    assert num_pieces > 10
    for _ in pieces:
        pass
    for shard in missing:
        assert (shard_of(worker, shard) == shard_of(whole, shard)).all()
    change_layout(worker, ALL)
    assert worker.ready_for(ALL)


def test_a_load_that_is_given_up_leaves_the_shard_missing(started, monkeypatch):
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
    worker = started()
    pieces = worker.loading_shard_from_disk("layer:2")
    next(pieces)
    pieces.close()
    assert not worker.ready_for(ALL)
    worker.load_shard_from_disk("layer:2")
    assert worker.ready_for(ALL)


def test_shards_that_are_not_mapped_cannot_be_filled(started):
    worker = started(layers=LOW)
    for call in (worker.mark_shard_filled, worker.load_shard_from_disk):
        with pytest.raises(ValueError, match="layer:2 is not mapped"):
            call("layer:2")
    with pytest.raises(NotReadyError):
        worker.shard_num_bytes("layer:2")


def test_a_stale_layout_changes_nothing(started):
    worker = started()
    version = worker.layout_version
    with pytest.raises(StalePlanError):
        worker.apply_layout(spec_of(worker, LOW), 0, version + 1, [])
    assert worker.layout_version == version
    assert worker.ready_for(ALL)


def test_hidden_states_from_any_bytes(started):
    worker = started()
    hidden = torch.randn(3, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data = hidden.numpy().tobytes()
    shifted = torch.frombuffer(bytearray(b"xyz" + data), dtype=torch.uint8)[3:]
    for source in (data, memoryview(b"x" + data)[1:], shifted.numpy()):
        assert torch.equal(worker.hidden_from_bytes(source, 3), hidden)
    with pytest.raises(ValueError, match="1152 bytes, got 1151"):
        worker.hidden_from_bytes(data[:-1], 3)


def test_a_start_that_fails_says_what_would_do(tiny_models, tmp_path):
    with pytest.raises(BudgetError) as caught:
        make_worker(tiny_models["qwen2"], budget_bytes=100_000).start()
    needed = int(str(caught.value).partition("too small: ")[2].partition(" bytes")[0])
    worker = make_worker(tiny_models["qwen2"], budget_bytes=needed)
    worker.start()
    assert worker.capacity_blocks >= 4
    worker.close()
    with pytest.raises(ModelError, match=r"config\.json"):
        make_worker(tmp_path).start()
    with pytest.raises(ConfigError, match="kernels"):
        make_worker(tiny_models["qwen2"], kernels="magic").start()
    with pytest.raises(ConfigError, match="dtype"):
        make_worker(tiny_models["qwen2"], dtype="int4").start()
    with pytest.raises(ConfigError, match="layers 2 to 9"):
        make_worker(tiny_models["qwen2"], layers=LayerRange(2, 9)).start()


def test_a_start_that_fails_while_loading_leaves_nothing(tiny_models, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_models["qwen2"], tmp_path / "model")
    worker = make_worker(folder)

    def fail(self, shard):
        raise ModelError(f"{shard} broke")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceWorker, "load_shard_from_disk", fail)
        with pytest.raises(ModelError, match="broke"):
            worker.start()
    with pytest.raises(NotReadyError):
        worker.memory_report()
    worker.start()
    assert worker.ready_for(ALL)
    worker.close()


def test_a_shorter_context_takes_less_memory(started, tiny_models):
    short, full = started(max_model_len=64), started()
    assert short.memory_report()["workspace_bytes"] < full.memory_report()["workspace_bytes"]
    assert short.config.max_model_len == 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama3-rope", "qwen3"])
def test_a_pipeline_in_lower_precisions(dtype, name, kind, started, tiny_models, new_driver):
    """Stages hand on the exact residual, so the same kernels give the same tokens there too. One embedding, tied."""
    common = {"model_dir": tiny_models[name], "dtype": dtype, "kernels": "auto" if kind == "card" else EXACT}
    whole = started(**common)
    ranges = [LayerRange(0, 2), LayerRange(2, 3)]
    parts = [started(**common, layers=layers) for layers in ranges]
    stages = [(part.run_step, layers) for part, layers in zip(parts, ranges)]
    outputs = run(new_driver([(whole.run_step, LayerRange(0, 3))], NUM_BLOCKS), 12)
    assert run(new_driver(stages, NUM_BLOCKS), 12) == outputs


EMPTY = LayoutSpec(frozenset(), LayerRange(0, 0))


def test_a_sleeper_is_filled_from_the_hosts_copy_where_that_has_what_is_served(started, tmp_path, tiny_models):
    fd = open_shared_copy()
    folder = shutil.copytree(tiny_models["qwen2"], tmp_path / "m")
    worker, whole = started(shared_copy_fd=fd, model_dir=folder), started()
    for shard in sorted(worker.shape.all_shards):
        for _ in worker.keeping_shard(shard):
            pass
    worker.apply_layout(EMPTY, 0, worker.layout_version, [])
    missing = worker.apply_layout(spec_of(worker, ALL), 0, worker.layout_version, []).missing_shards
    assert missing == worker.shape.all_shards and not worker.ready_for(ALL)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    spoilt = "layer:1"
    worker._shared._sizes, sizes = {spoilt: 8}, worker._shared._sizes
    for _ in worker._shared.writing(spoilt, torch.zeros(8, dtype=torch.uint8)):
        pass
    worker._shared._sizes = sizes
    for shard in sorted(missing - {spoilt}):
        worker.load_shard_from_disk(shard)
        assert (shard_of(worker, shard) == shard_of(whole, shard)).all()
    with pytest.raises(ModelError):
        worker.load_shard_from_disk(spoilt)
    assert not worker.ready_for(ALL)
    os.close(fd)


def test_only_what_is_complete_is_kept(started):
    fd = open_shared_copy()
    worker, without = started(shared_copy_fd=fd, layers=LOW), started()
    os.close(fd)
    with pytest.raises(NotReadyError, match="layer:2 is not complete here"):
        next(worker.keeping_shard("layer:2"))
    with pytest.raises(NotReadyError, match="no host copy"):
        next(without.keeping_shard("layer:0"))

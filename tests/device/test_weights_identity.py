"""Which weights are served: digests of slabs hold wherever the bytes come from, and nothing else is taken for them."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from device_shards import copy_shard, shard_of
from safetensors.torch import load_file, save_file

from jettison.device.dtypes import name_of
from jettison.device.model import weights
from jettison.device.model.hf_config import read_config
from jettison.device.model.identity import FileMark, agreed_identity, changed_at, config_digest, digest_of
from jettison.device.model.weights import WeightFolder
from jettison.device.spec import DeviceSpec
from jettison.device.worker import DeviceWorker, make_device
from jettison.errors import ModelError, NotReadyError
from jettison.memory.layout import LayoutSpec
from jettison.types import LayerRange

LOW, HIGH = LayerRange(0, 2), LayerRange(2, 4)
FILE = "model.safetensors"


@pytest.fixture
def folder(tiny_models, tmp_path):
    """A private copy of the qwen2 folder (four layers, one file)."""
    return shutil.copytree(tiny_models["qwen2"], tmp_path / "model")


@pytest.fixture
def start(folder):
    workers = []

    def make(**changes) -> DeviceWorker:
        options = {
            "model_dir": folder, "dtype": "float64", "budget_bytes": 4 << 20, "block_size": 4, "max_num_tokens": 64,
            "max_num_seqs": 4, "page_bytes": 4096, **changes,
        }
        worker = make_device(DeviceSpec(**options))
        workers.append(worker)
        worker.start()
        return worker

    yield make
    for worker in workers:
        worker.close()


def edit(folder, change) -> None:
    """Write the file anew, under another inode."""
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / "new")
    os.replace(folder / "new", folder / FILE)


def double(name):
    return lambda tensors: tensors[name].mul_(2)


DOWN_2 = "model.layers.2.mlp.down_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("piece_bytes", [1000, 4 << 20])
def test_a_digest_is_of_the_slab_whatever_pieces_filled_it_and_whatever_was_there(
    name, dtype, piece_bytes, tiny_models, monkeypatch
):
    monkeypatch.setattr(weights, "PIECE_BYTES", piece_bytes)
    source = WeightFolder(tiny_models[name], read_config(tiny_models[name]), name_of(dtype))
    for shard, layout in source.layouts.items():
        slabs = [torch.full((layout.num_bytes,), fill, dtype=torch.uint8) for fill in (0, 255)]
        digests = {source.load_shard(shard, slab) for slab in slabs} | {digest_of(slab) for slab in slabs}
        assert len(digests) == 1


def test_every_parameter_counts(folder):
    """One element of any tensor, the least significant bit of it, changes the digest of its shard and no other."""
    config = read_config(folder)
    source = WeightFolder(folder, config, "float64")
    before = {s: source.load_shard(s, torch.empty(n.num_bytes, dtype=torch.uint8)) for s, n in source.layouts.items()}
    for shard, layout in source.layouts.items():
        for name in (source.name for slot in layout.slots for source in slot.sources):
            spare = shutil.copytree(folder, folder.parent / "spare", dirs_exist_ok=True)
            edit(spare, lambda tensors, name=name: tensors[name].view(-1)[-1:].view(torch.uint8)[0:1].bitwise_xor_(1))
            other = WeightFolder(spare, config, "float64")
            after = {s: other.load_shard(s, torch.empty(n.num_bytes, dtype=torch.uint8))
                     for s, n in other.layouts.items()}
            assert {s for s in before if before[s] != after[s]} == {shard}, name


def test_an_overwritten_folder_is_refused_and_the_file_is_named(start, folder):
    worker = start()
    edit(folder, double(DOWN_2))
    worker.load_shard_from_disk("layer:1")  # its bytes are the same
    with pytest.raises(ModelError, match=rf"{FILE}: changed 2\d\d\d-.*, after this model was loaded; its layer:2 "):
        worker.load_shard_from_disk("layer:2")
    assert not worker.ready_for(LayerRange(0, 4))
    assert worker.ready_for(LOW)


def test_what_was_refused_is_read_again_only_when_the_file_changes(start, folder, monkeypatch):
    worker = start()
    shutil.copy(folder / FILE, folder / "old")
    edit(folder, double(DOWN_2))
    num_reads = 0
    read = WeightFolder.loading

    def counting(self, shard, slab):
        nonlocal num_reads
        num_reads += 1
        return read(self, shard, slab)

    monkeypatch.setattr(WeightFolder, "loading", counting)
    messages = set()
    for _ in range(3):
        with pytest.raises(ModelError) as caught:
            worker.load_shard_from_disk("layer:2")
        messages.add(str(caught.value))
    assert len(messages) == num_reads == 1
    os.replace(folder / "old", folder / FILE)
    worker.load_shard_from_disk("layer:2")
    assert worker.ready_for(LayerRange(0, 4))


def test_a_copy_that_keeps_its_times_is_told_by_when_it_was_put_there(start, folder):
    worker = start()
    old = os.stat(folder / FILE).st_mtime
    edit(folder, double(DOWN_2))
    os.utime(folder / FILE, (old - 1e6, old - 1e6))
    with pytest.raises(ModelError) as caught:
        worker.load_shard_from_disk("layer:2")
    assert f"changed {changed_at(FileMark.of(folder / FILE))}, after this model was loaded" in str(caught.value)


def test_a_folder_that_cannot_be_read_is_not_read_again_either(start, folder, monkeypatch):
    worker = start()
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole[:100])
    opened = []
    monkeypatch.setattr(weights, "StoredFile", lambda path, real=weights.StoredFile: opened.append(path) or real(path))
    for _ in range(3):
        with pytest.raises(ModelError, match="truncated"):
            worker.load_shard_from_disk("layer:2")
    assert len(opened) == 1
    (folder / FILE).write_bytes(whole)
    worker.load_shard_from_disk("layer:2")


def test_nothing_fills_a_worker_that_does_not_know_what_it_serves(start):
    whole = start()
    worker = start(config=whole.config, starts_empty=True)
    copy_shard(whole, worker, "layer:0")
    with pytest.raises(NotReadyError):
        worker.mark_shard_filled("layer:0")


def test_equal_bytes_under_another_inode_and_time_are_accepted(start, folder):
    worker = start()
    edit(folder, lambda tensors: None)
    os.utime(folder / FILE, (1, 1))
    for shard in worker.shape.all_shards:
        worker.load_shard_from_disk(shard)
    assert worker.ready_for(LayerRange(0, 4))


def test_a_folder_that_is_gone_or_split_into_other_files_is_opened_anew(start, folder):
    worker = start()
    hidden = folder.rename(folder.parent / "hidden")
    with pytest.raises(ModelError):
        worker.load_shard_from_disk("layer:2")
    hidden.rename(folder)
    worker.load_shard_from_disk("layer:2")


def test_an_empty_start_reads_nothing_until_it_knows_what_it_serves(start, folder):
    whole = start()
    identity, config = whole.weights_identity, whole.config
    (folder / "config.json").unlink()
    hidden = folder.rename(folder.parent / "hidden")
    worker = start(config=config, starts_empty=True)
    assert worker.weights_identity is None
    assert not worker.ready_for(LOW)
    worker.adopt_weights(identity)
    for shard in sorted(worker.shape.all_shards)[1:]:
        copy_shard(whole, worker, shard)
        worker.mark_shard_filled(shard, digest_of(shard_of(whole, shard)))
    hidden.rename(folder)
    worker.load_shard_from_disk(sorted(worker.shape.all_shards)[0])
    assert worker.ready_for(LayerRange(0, 4))
    assert torch.equal(worker._runner.final_norm, whole._runner.final_norm)
    assert worker.weights_identity == identity


def test_a_peer_s_other_bytes_are_not_taken(start):
    one, two = start(), start()
    two.adopt_weights(agreed_identity(one._spec.model_dir, [one.weights_identity, two.weights_identity]))
    two.write_shard("layer:3", 5, shard_of(two, "layer:3")[5:6] + 1)
    for digest in (None, digest_of(shard_of(two, "layer:3"))):
        with pytest.raises(ModelError, match="layer:3: the bytes that came are not those being served"):
            two.mark_shard_filled("layer:3", digest)


def test_bytes_that_went_through_a_drop_and_came_from_a_peer_keep_their_digest(start):
    """KV was written over the slab meanwhile, the gaps between its tensors included."""
    one, two = start(), start()
    spec = LayoutSpec(one.shape.shards_for(LOW), LOW)
    one.apply_layout(spec, 0, one.layout_version, [])
    ids = list(range(one.capacity_blocks))
    one.kv_scatter(LOW, ids, torch.full((len(LOW) * len(ids) * one.kv_block_bytes,), 255, dtype=torch.uint8))
    whole = LayoutSpec(one.shape.all_shards, LayerRange(0, 4))
    result = one.apply_layout(whole, 0, one.layout_version, [])
    assert result.missing_shards
    for shard in sorted(result.missing_shards):
        copy_shard(two, one, shard)
        one.mark_shard_filled(shard)
    assert one.ready_for(LayerRange(0, 4))


def test_workers_that_read_different_bytes_at_the_start_are_told_apart(start, folder):
    one, two = start(layers=LOW), start(layers=HIGH)
    whole = agreed_identity(folder, [one.weights_identity, two.weights_identity])
    assert whole.digests.keys() == one.shape.all_shards
    edit(folder, double(DOWN_2))
    three = start()
    with pytest.raises(ModelError, match=rf"{FILE}: changed 2\d\d\d-.* of layer:2, so the folder was being changed"):
        agreed_identity(folder, [one.weights_identity, two.weights_identity, three.weights_identity])
    with pytest.raises(ModelError):
        three.adopt_weights(whole)
    norm = replace(two.weights_identity, final_norm=bytes(len(two.weights_identity.final_norm)))
    with pytest.raises(ModelError, match="the final norm"):
        agreed_identity(folder, [one.weights_identity, norm])


def test_one_digest_tells_two_models_apart(start, folder):
    first = start().weights_identity
    assert start().weights_identity.summary == first.summary
    edit(folder, double("model.norm.weight"))
    assert start().weights_identity.summary != first.summary
    config = read_config(folder)
    assert config_digest(config) == config_digest(read_config(folder, 32))
    assert config_digest(config) != config_digest(replace(config, norm_eps=2 * config.norm_eps))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [DOWN_2, "model.layers.1.self_attn.q_proj.bias", "model.norm.weight"])
def test_weights_that_are_not_finite_end_the_start(start, folder, name, value):
    def spoil(tensors):
        tensors[name].view(-1)[3] = value

    edit(folder, spoil)
    with pytest.raises(ModelError, match=f"{FILE}: tensor {re.escape(name)} has values that are not finite"):
        start()


def test_values_beyond_the_serving_dtype_are_not_finite_either(start, folder):
    def enlarge(tensors):
        tensors[DOWN_2] = tensors[DOWN_2].to(torch.float64)
        tensors[DOWN_2][0, 0] = 1e300

    edit(folder, enlarge)
    start(dtype="float64")
    with pytest.raises(ModelError, match=r"not finite in float32; .*wider --dtype"):
        start(dtype="float32")

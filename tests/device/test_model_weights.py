"""Loading: every precision, every layout of files, and every way a folder can be wrong."""

from __future__ import annotations

import json
import os
import shutil
import struct

import pytest
import torch
from answers import answers
from safetensors.torch import load_file, save_file

from jettison.device.dtypes import name_of
from jettison.device.model import weights
from jettison.device.model.hf_config import read_config
from jettison.device.model.shards import model_shape, shard_layouts
from jettison.device.model.tying import with_its_own_head
from jettison.device.model.weights import WeightFolder
from jettison.errors import ModelError
from jettison.types import layer_shard

Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tiny_models, tmp_path):
    """A private copy of the llama folder."""
    return shutil.copytree(tiny_models["llama"], tmp_path / "model")


def change(folder, edit) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def load_all(folder, dtype=torch.float64) -> dict[str, dict[str, torch.Tensor]]:
    config = read_config(folder)
    source = WeightFolder(folder, config, name_of(dtype))
    loaded = {}
    for shard, layout in source.layouts.items():
        slab = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8)
        source.load_shard(shard, slab)
        loaded[shard] = layout.views(slab)
    norm = torch.full((config.hidden_size,), torch.nan, dtype=dtype)
    source.load_final_norm(norm)
    loaded["norm"] = {"final": norm}
    return loaded


@pytest.mark.parametrize("name", ["llama", "llama3-rope", "mistral", "qwen2", "qwen3"])
def test_slots_hold_the_checkpoint(name, tiny_models):
    """All of it, each element once, projections stacked in order."""
    folder = tiny_models[name]
    checkpoint = {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
    loaded = load_all(folder)
    config = read_config(folder)
    for shard, layout in shard_layouts(config, "float64").items():
        for slot in layout.slots:
            parts = [checkpoint.pop(source.name) for source in slot.sources]
            assert torch.equal(loaded[shard][slot.name], torch.cat(parts))
    assert torch.equal(loaded["norm"]["final"], checkpoint.pop("model.norm.weight"))
    assert not checkpoint


@pytest.mark.parametrize("name", ["llama", "llama3-rope", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_slots_are_aligned_and_apart(name, dtype, tiny_models):
    config = read_config(tiny_models[name])
    shape = model_shape(config, name_of(dtype))
    layouts = shard_layouts(config, name_of(dtype))
    assert layouts.keys() == shape.shard_bytes.keys() == shape.all_shards
    for shard, layout in layouts.items():
        end = 0
        for slot in layout.slots:
            assert slot.offset % 64 == 0
            assert slot.offset >= end
            end = slot.offset + torch.Size(slot.shape).numel() * dtype.itemsize
        assert end <= layout.num_bytes == shape.shard_bytes[shard]
        assert layout.num_bytes < end + 64


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("serving", [torch.float64, torch.float32, torch.bfloat16])
def test_any_precision_is_converted(folder, stored, serving):
    def convert(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(stored)

    change(folder, convert)
    expected = load_file(folder / "model.safetensors")[Q0].to(serving)
    assert torch.equal(load_all(folder, serving)["layer:0"]["qkv_weight"][:48], expected)


def test_loading_in_pieces(folder, monkeypatch):
    whole = load_all(folder)
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
    for shard, tensors in load_all(folder).items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, whole[shard][name])


def test_spare_tensors_of_old_exporters_are_ignored(folder):
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    load_all(folder)


def test_a_tied_model_may_bring_its_head(tiny_models, tmp_path):
    folder = shutil.copytree(tiny_models["llama3-rope"], tmp_path / "model")
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert "head" not in load_all(folder)


def add_head(folder, change_head) -> None:
    def edit(tensors):
        tensors["lm_head.weight"] = change_head(tensors["model.embed_tokens.weight"].clone())

    change(folder, edit)


def last_row_doubled(table):
    table[-1] *= 2
    return table


@pytest.mark.parametrize(("change_head", "dtype", "is_tied"), [
    (lambda table: table, torch.float64, True),
    (torch.randn_like, torch.float64, False),
    (last_row_doubled, torch.float64, False),
    (torch.Tensor.bfloat16, torch.float64, False),
    (torch.Tensor.bfloat16, torch.bfloat16, True),
])  # fmt: skip
def test_a_head_that_differs_unties(tiny_models, tmp_path, monkeypatch, caplog, change_head, dtype, is_tied):
    """In the serving dtype, whatever the pieces."""
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
    folder = shutil.copytree(tiny_models["llama3-rope"], tmp_path / "model")
    add_head(folder, change_head)
    config = with_its_own_head(read_config(folder), folder, name_of(dtype))
    assert config.tied_embeddings == is_tied
    told = [] if is_tied else [f"{folder / 'config.json'}: tie_word_embeddings is true, but lm_head.weight differs"]
    assert [line.partition(" from ")[0] for line in caplog.messages] == told


def test_a_model_that_its_files_untie_is_the_one_that_says_so(tiny_models, tmp_path, new_driver):
    folder = shutil.copytree(tiny_models["llama3-rope"], tmp_path / "model")
    tied, _ = answers(folder, new_driver)
    add_head(folder, torch.randn_like)
    found, identity = answers(folder, new_driver)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": False}))
    said, identity_said = answers(folder, new_driver)
    assert [each.output for each in found.values()] == [each.output for each in said.values()]
    assert [each.output for each in found.values()] != [each.output for each in tied.values()]
    assert identity.summary == identity_said.summary


@pytest.mark.parametrize("name", ["llama", "llama3-rope"])
def test_without_two_tables_nothing_is_untied(tiny_models, tmp_path, name):
    config = read_config(tiny_models[name])
    assert with_its_own_head(config, tiny_models[name], "float32") == config
    assert with_its_own_head(config, tmp_path, "float32") == config


def test_a_tied_model_may_bring_its_head_alone(tiny_models, tmp_path):
    folder = shutil.copytree(tiny_models["llama3-rope"], tmp_path / "model")
    before = load_all(folder)["embed"]["embed"]
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert with_its_own_head(read_config(folder), folder, "float64").tied_embeddings
    assert torch.equal(load_all(folder)["embed"]["embed"], before)


def test_a_tied_head_of_another_shape_is_refused(tiny_models, tmp_path):
    folder = shutil.copytree(tiny_models["llama3-rope"], tmp_path / "model")
    add_head(folder, lambda table: table[1:].clone())
    with pytest.raises(ModelError, match=r"unexpected tensor lm_head\.weight; weights and config\.json do not match"):
        load_all(folder)


def drop(name):
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop(Q0), rf"tensor {Q0} is missing"),
        (drop("model.norm.weight"), r"tensor model\.norm\.weight is missing"),
        (drop("lm_head.weight"), "lm_head.weight is missing; set tie_word_embeddings"),
        (lambda tensors: [tensors.pop(name) for name in list(tensors)[:3]], "and 2 more is missing"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "unexpected tensor extra"),
        (lambda tensors: tensors.update({"model.layers.3.mlp.up_proj.weight": torch.ones(1)}), "unexpected tensor"),
        (lambda tensors: tensors.update({Q0: torch.ones(48, 47)}), r"q_proj.*shape \(48, 47\), expected \(48, 48\)"),
        (lambda tensors: tensors.update({Q0: tensors[Q0].to(torch.int8)}), "type I8.*unquantized"),
    ],
)
def test_tensors_that_do_not_match_are_refused(folder, edit, message):
    change(folder, edit)
    with pytest.raises(ModelError, match=message) as caught:
        load_all(folder)
    assert str(caught.value).startswith(str(folder / "model.safetensors"))


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_files_are_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated"):
        load_all(folder)


@pytest.mark.parametrize("content", [b"PK\x03\x04" + bytes(100), b"\x80\x04" + bytes(100), struct.pack("<Q", 2**60)])
def test_files_of_another_kind_are_refused(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="not safetensors"):
        load_all(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_never_opened(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match=f"{name}: pickled .* convert"):
        load_all(folder)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights; expected model\.safetensors"):
        load_all(folder)


@pytest.fixture
def sharded(tiny_models, tmp_path):
    """A private copy of the mistral folder, which has several files and an index."""
    return shutil.copytree(tiny_models["mistral"], tmp_path / "model")


def test_a_missing_file_of_several_is_refused(sharded):
    path = sorted(sharded.glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(ModelError, match=f"{path.name}: not found"):
        load_all(sharded)


def test_a_tensor_in_two_files_is_refused(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    save_file({**load_file(second), **load_file(first)}, second)
    with pytest.raises(ModelError, match=f"{second.name}: tensor .* is in {first.name} too"):
        load_all(sharded)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "weight_map is missing"),
        ({"weight_map": []}, "weight_map is missing"),
        ({"weight_map": {Q0: "../model.safetensors"}}, "not the name of a safetensors file"),
        ({"weight_map": {Q0: "/etc/passwd"}}, "not the name of a safetensors file"),
        ({"weight_map": {Q0: "pytorch_model.bin"}}, "not the name of a safetensors file"),
        ({"weight_map": {Q0: 3}}, "not the name of a safetensors file"),
    ],
)
def test_bad_indexes_are_refused(sharded, index, message):
    path = sharded / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message) as caught:
        load_all(sharded)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("keep", [0, 5000])
def test_a_file_that_is_cut_short_while_it_is_read_is_refused(folder, keep, monkeypatch):
    """As when an operator copies another file over it, which cuts it short first: a reader of a mapped file would be
    killed."""
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
    path = folder / "model.safetensors"
    source = WeightFolder(folder, read_config(folder), "float64")
    slab = torch.zeros(source.layouts[layer_shard(1)].num_bytes, dtype=torch.uint8)
    loading = source.loading(layer_shard(1), slab)
    next(loading)
    os.truncate(path, keep)
    with pytest.raises(ModelError, match=r"truncated or not safetensors \(it ends at byte \d+\); download") as caught:
        list(loading)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_breaks_after_the_check_is_refused(folder):
    """As when a restore falls back to the disk, hours after the start."""
    config = read_config(folder)
    source = WeightFolder(folder, config, "float64")
    source.open()
    change(folder, drop(Q0))
    slab = torch.zeros(source.layouts[layer_shard(0)].num_bytes, dtype=torch.uint8)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        source.load_shard(layer_shard(0), slab)

"""Experts from checkpoints that name them one by one, and from ones that stack them: the same bytes in the slab."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from jettison.device.dtypes import name_of
from jettison.device.kernels import library
from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.operands import PackedMatrix
from jettison.device.model import weights
from jettison.device.model.hf_config import read_config
from jettison.device.model.identity import digest_of
from jettison.device.model.quantized.mxfp4 import widened
from jettison.device.model.samples import NAMED, make_sample
from jettison.device.model.seeded import SeededRows
from jettison.device.model.shards import Slice, TensorSource, model_shape, shard_layouts
from jettison.device.model.weights import WeightFolder
from jettison.errors import ModelError
from jettison.types import layer_shard

ONE_BY_ONE = ["Qwen3-MoE, every other", "Mixtral", "GLM-4-MoE"]


@pytest.fixture
def folder_of(tmp_path):
    def make(name: str):
        return make_sample(NAMED[name], tmp_path / name, 1, hidden=64, std=0.15, dtype="float64")

    return make


def load(folder, dtype=torch.float64, kernels=None):
    """(slabs, digests, layouts) of all layers."""
    source = WeightFolder(folder, read_config(folder), name_of(dtype), kernels)
    slabs, digests = {}, {}
    for shard, layout in source.layouts.items():
        slabs[shard] = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8)
        digests[shard] = source.load_shard(shard, slabs[shard])
        assert digests[shard] == digest_of(slabs[shard])
    return slabs, digests, source.layouts


def stacked(folder) -> None:
    """Rewrite a folder as newer transformers save it: all experts of a layer in one tensor."""
    path = folder / "model.safetensors"
    plain, experts = {}, {}
    for name, tensor in load_file(path).items():
        name = name.replace("block_sparse_moe", "mlp")
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            prefix, number, part = found.groups()
            experts.setdefault(prefix, {})[int(number), part] = tensor
        else:
            plain[name] = tensor
    for prefix, tensors in experts.items():
        gate, up, down = ("w1", "w3", "w2") if (0, "w1") in tensors else ("gate_proj", "up_proj", "down_proj")
        numbers = sorted({number for number, _ in tensors})
        both = [torch.cat((tensors[number, gate], tensors[number, up])) for number in numbers]
        plain[f"{prefix}.gate_up_proj"] = torch.stack(both)
        plain[f"{prefix}.down_proj"] = torch.stack([tensors[number, down] for number in numbers])
    save_file(plain, path)


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_stacked_and_one_by_one_are_the_same(name, dtype, folder_of, monkeypatch):
    monkeypatch.setattr(weights, "PIECE_BYTES", 8192)  # several pieces for an expert
    folder, kernels = folder_of(name), load_kernels("native" if library.supported_variants() else "torch")
    slabs, digests, layouts = load(folder, dtype, kernels)
    stacked(folder)
    again, digests_again, stacked_layouts = load(folder, dtype, kernels)
    assert digests == digests_again
    assert all(torch.equal(again[shard], slab) for shard, slab in slabs.items())
    for layout, other in zip(layouts.values(), stacked_layouts.values(), strict=True):
        assert [slot[:3] for slot in layout.slots] == [slot[:3] for slot in other.slots]


def test_transposed_stacks_are_read_by_their_columns(folder_of, monkeypatch):
    monkeypatch.setattr(weights, "PIECE_BYTES", 8192)
    folder = folder_of("gpt-oss")
    slabs, _, layouts = load(folder)
    checkpoint = load_file(folder / "model.safetensors")
    views = layouts[layer_shard(1)].views(slabs[layer_shard(1)])
    for part in ("gate_up", "down"):
        name = f"model.layers.1.mlp.experts.{part}_proj"
        assert torch.equal(views[f"experts_{part}_weight"], checkpoint[name].transpose(1, 2))
        assert torch.equal(views[f"experts_{part}_bias"], checkpoint[f"{name}_bias"])
    assert torch.equal(views["sinks"], checkpoint["model.layers.1.self_attn.sinks"])


def test_each_expert_is_packed_by_itself_and_the_router_is_wide(folder_of):
    if not library.supported_variants():
        pytest.skip("no native kernels")
    kernels, folder = load_kernels("native"), folder_of("GLM-4-MoE")
    slabs, _, layouts = load(folder, torch.bfloat16, kernels)
    plain, _, _ = load(folder, torch.bfloat16)
    shard = layer_shard(1)
    views, wanted = layouts[shard].views(slabs[shard]), layouts[shard].views(plain[shard])
    assert views["router_weight"].dtype == views["router_correction"].dtype == torch.float32
    for name in ("experts_gate_up_weight", "experts_down_weight"):
        for matrix, expected in zip(views[name], wanted[name], strict=True):
            rows = torch.empty_like(expected)
            kernels.gather_rows(PackedMatrix(matrix), torch.arange(len(rows)), rows)
            assert torch.equal(rows, expected)


def test_layers_have_their_own_sizes(folder_of):
    """Layers of experts beside a dense one: the plan, the cost model and pages go by each shard's bytes."""
    config = read_config(folder_of("Qwen3-MoE"))
    sizes = model_shape(config, "bfloat16").shard_bytes
    assert [kind.is_sparse for kind in config.layers] == [True, False, True, True]
    assert sizes[layer_shard(0)] == sizes[layer_shard(2)] != sizes[layer_shard(1)]
    layout = shard_layouts(config, "bfloat16")[layer_shard(0)]
    held = {slot.name: slot.shape for slot in layout.slots}
    assert held["experts_gate_up_weight"] == (5, 128, 64) and held["experts_down_weight"] == (5, 64, 64)
    assert "gate_up_weight" not in held


def test_layers_that_guess_ahead_are_spare(folder_of):
    folder = folder_of("GLM-4-MoE")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.4.eh_proj.weight": torch.ones(2, 2)}, path)
    load(folder)
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.ones(2, 2)}, path)
    with pytest.raises(ModelError, match=r"unexpected tensor model\.layers\.3\.eh_proj"):
        load(folder)


def test_a_missing_expert_is_told(folder_of):
    folder = folder_of("Mixtral")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.2.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"layers\.2\.block_sparse_moe\.experts\.3\.w2\.weight is missing"):
        load(folder)


def test_seeded_slices_are_parts_of_one_tensor():
    whole, parts = torch.empty(12, 10), torch.empty(3, 4, 10)
    SeededRows().copy_rows(TensorSource("model.layers.0.mlp.experts.down_proj", (12, 10)), 0, whole)
    for number, part in enumerate(parts):
        source = TensorSource("model.layers.0.mlp.experts.down_proj", (4, 10), None, Slice(number, 3))
        SeededRows().copy_rows(source, 0, part)
    assert torch.equal(parts.view(12, 10), whole)


def test_mxfp4_experts_are_widened(folder_of):
    """gpt-oss as it is published: experts of four bits, not transposed; the rest plain."""
    folder = folder_of("gpt-oss")
    path, drawn = folder / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        number, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (number, rows, columns // 32, 16), generator=drawn, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            118, 124, (number, rows, columns // 32), generator=drawn, dtype=torch.uint8
        )
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    slabs, _, layouts = load(folder, torch.bfloat16)
    shard = layer_shard(2)
    views = layouts[shard].views(slabs[shard])
    for part in ("gate_up", "down"):
        name = f"model.layers.2.mlp.experts.{part}_proj"
        scales = (tensors[f"{name}_scales"].float() - 127).exp2()
        expected = widened(tensors[f"{name}_blocks"], scales).to(torch.bfloat16)
        assert torch.equal(views[f"experts_{part}_weight"], expected)
        assert torch.equal(views[f"experts_{part}_bias"], tensors[f"{name}_bias"].to(torch.bfloat16))

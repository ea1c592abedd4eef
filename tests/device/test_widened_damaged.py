"""Quantized folders that are damaged, or quantized in an unknown way: one line names file and tensor, or the key."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from quantized_goldens import FOLDERS
from safetensors.torch import load_file, save_file

from jettison.device.model.hf_config import read_config
from jettison.device.model.weights import WeightFolder
from jettison.device.reference import TransformersReference
from jettison.errors import ModelError

Q = "model.layers.0.self_attn.q_proj"
PACKED = f"{Q}.weight_packed"


def load_all(folder):
    source = WeightFolder(folder, read_config(folder), "float32")
    for shard, layout in source.layouts.items():
        source.load_shard(shard, torch.empty(layout.num_bytes, dtype=torch.uint8))


def refusal(folder) -> str:
    with pytest.raises(ModelError) as caught:
        load_all(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def copied(tmp_path):
    return lambda name: shutil.copytree(FOLDERS / name, tmp_path / "model")


def fill(value):
    return lambda tensor: tensor.fill_(value)


@pytest.mark.parametrize(
    ("name", "tensor", "edit", "told"),
    [
        ("ct-int4", f"{Q}.weight_scale", None, "is missing"),
        ("ct-int4", f"{Q}.weight_shape", None, "is missing"),
        ("ct-int4-zeros", f"{Q}.weight_zero_point", None, "is missing"),
        ("gptq-4", f"{Q}.qzeros", None, "is missing"),
        ("gptq-4-ordered", f"{Q}.g_idx", None, "is missing"),
        ("awq", f"{Q}.scales", None, "is missing"),
        ("fp8-block", f"{Q}.weight_scale_inv", None, "is missing"),
        ("ct-int4", PACKED, lambda packed: packed[:, 1:], "has shape (32, 3), expected (32, 4)"),
        ("ct-int4", f"{Q}.weight_scale", lambda scale: scale[:, :1], "has shape (32, 1), expected (32, 2)"),
        ("ct-fp8-tensor", f"{Q}.weight_scale", lambda scale: scale.repeat(2), "has shape (2,), expected (1, 1)"),
        ("gptq-4", f"{Q}.qweight", lambda packed: packed.t(), "has shape (32, 4), expected (4, 32)"),
        ("awq", f"{Q}.qweight", lambda packed: packed.t(), "has shape (4, 32), expected (32, 4)"),
        ("ct-int4", PACKED, lambda packed: packed.float(), "has type F32, expected I32"),
        ("fp8-block", f"{Q}.weight", lambda weight: weight.to(torch.float8_e5m2), "has type F8_E5M2, expected F8_E4M3"),
        ("ct-int4", f"{Q}.weight_scale", fill(torch.nan), "has values that are not finite"),
        ("gptq-4", f"{Q}.scales", fill(torch.inf), "has values that are not finite"),
        ("awq", f"{Q}.scales", fill(torch.nan), "has values that are not finite"),
        ("fp8-block", f"{Q}.weight_scale_inv", fill(torch.nan), "has values that are not finite"),
        ("fp8-block", f"{Q}.weight", lambda weight: weight.view(torch.uint8).fill_(0x7F).view(weight.dtype),
         "has values that are not finite"),
        ("gptq-4-ordered", f"{Q}.g_idx", fill(2), "names groups beyond the 2 that have scales"),
        ("gptq-4-ordered", f"{Q}.g_idx", fill(-1), "names groups beyond the 2 that have scales"),
        ("ct-int4", f"{Q}.weight_shape", fill(31), "says (31, 31), expected (32, 32)"),
    ],
)  # fmt: skip
def test_a_tensor(copied, name, tensor, edit, told):
    folder = copied(name)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    damaged = tensors.pop(tensor)
    if edit is not None:
        tensors[tensor] = edit(damaged).contiguous()
    save_file(tensors, path)
    assert refusal(folder).startswith(f"{path}: tensor {tensor} {told}")


@pytest.mark.parametrize("keep", [4, 3000, -1])
def test_a_truncated_file(copied, keep):
    path = copied("ct-int4") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert refusal(path.parent).startswith(f"{path}: truncated")


def change(folder, **values):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= values
    path.write_text(json.dumps(config))
    return path


GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}}


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("ct-int4", {"quant_method": "bitsandbytes"}, "quantization_config (bitsandbytes): quantized weights are read"),
        ("ct-int4", {"quant_method": "eetq"}, "quantization_config (eetq): "),
        ("ct-int4", {"quant_method": None}, "quantization_config: "),
        ("ct-int4", {"format": "nvfp4-pack-quantized", "config_groups": GROUPS}, "format 'nvfp4-pack-quantized'"),
        ("ct-int4", {"format": "dense", "config_groups": GROUPS}, "format 'dense'"),
        ("ct-int4", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme {"),
        ("ct-int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config {"),
        ("ct-int4", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config {"),
        ("ct-fp8-tensor", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme {"),
        ("fp8-block", {"fmt": "e5m2"}, "fmt 'e5m2'"),
        ("fp8-block", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme {"),
        ("fp8-block", {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("awq", {"bits": 8}, "bits 8"),
        ("gptq-4", {"bits": 5}, "bits 5"),
        ("gptq-4", {"bits": None}, "bits None"),
        ("gptq-4", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("gptq-4", {"is_marlin_format": True}, "is_marlin_format True"),
        ("gptq-4", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic {"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_key(copied, name, values, told):
    path = change(copied(name), **values)
    message = refusal(path.parent)
    assert message.startswith(f"{path}: ")
    assert told in message
    assert message.endswith("use the unquantized model")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ct-int4", {"sparsity_config": {"format": "dense", "sparsity_structure": "unstructured"}}),
        ("ct-int4", {"transform_config": {}, "global_compression_ratio": 1.5, "ignore": ["lm_head", "re:.*gate"]}),
        ("fp8-block", {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}),
        ("gptq-4", {"dynamic": {"-:.*lm_head.*": {}}, "damp_percent": 0.1, "meta": {"quantizer": ["any:1"]}}),
        ("awq", {"modules_to_not_convert": ["visual"], "backend": "auto"}),
    ],
)
def test_a_key_that_changes_nothing(copied, name, values):
    load_all(change(copied(name), **values).parent)


def test_verify_compares_it_with_our_own_kernels(copied):
    with pytest.raises(ModelError, match="compare with our own kernels"):
        TransformersReference(copied("awq"), "float64")


def test_a_matrix_that_is_stored_plainly_is_read_plainly(copied):
    folder = copied("gptq-4")
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(Q)}
    plain = torch.randn(32, 32)
    save_file(tensors | {f"{Q}.weight": plain}, path)
    source = WeightFolder(folder, read_config(folder), "float32")
    layout = source.layouts["layer:0"]
    slab = torch.empty(layout.num_bytes, dtype=torch.uint8)
    source.load_shard("layer:0", slab)
    assert torch.equal(layout.views(slab)["qkv_weight"][:32], plain)


def test_a_matrix_in_two_forms_is_refused(copied):
    path = copied("gptq-4") / "model.safetensors"
    save_file(load_file(path) | {f"{Q}.weight": torch.zeros(32, 32)}, path)
    assert "unexpected tensor model.layers.0.self_attn.q_proj." in refusal(path.parent)


def test_modules_of_several_groups(copied):
    """Each is of the group that its tensors fit."""
    folder = copied("ct-int4")
    other, path = load_file(FOLDERS / "ct-fp8-channel" / "model.safetensors"), folder / "model.safetensors"
    mixed = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(Q)}
    save_file(mixed | {name: tensor for name, tensor in other.items() if name.startswith(Q)}, path)
    assert f"unexpected tensor {Q}.weight;" in refusal(folder)
    floats = {"format": "float-quantized", "targets": [f"re:{Q}"],
              "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}  # fmt: skip
    own = {"group_0": GROUPS["group_0"] | {"format": "pack-quantized"}, "group_1": floats}
    change(folder, format="mixed-precision", config_groups=own)
    load_all(folder)


def test_zeros_that_a_symmetric_folder_need_not_have(copied):
    path = copied("ct-int4") / "model.safetensors"
    save_file(load_file(path) | {f"{Q}.weight_zero_point": torch.zeros(32, 2, dtype=torch.int8)}, path)
    source = WeightFolder(path.parent, read_config(path.parent), "float32")
    without = WeightFolder(FOLDERS / "ct-int4", read_config(FOLDERS / "ct-int4"), "float32")
    slab = torch.empty(source.layouts["layer:0"].num_bytes, dtype=torch.uint8)
    assert source.load_shard("layer:0", slab) == without.load_shard("layer:0", slab)

"""Folders that hold something else than weights that can be served: told by what they are, whatever gives it away."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from jettison.device.model.checkpoint import find_weights
from jettison.device.model.end_tokens import read_end_tokens
from jettison.device.model.hf_config import read_config
from jettison.device.model.quantized.signs import REFUSAL as REFUSED
from jettison.device.model.quantized.signs import sign_of_tensor
from jettison.device.model.tokenizer_files import read_tokenizer
from jettison.device.model.weights import WeightFolder
from jettison.errors import ModelError

LAYER = "model.layers.0.self_attn.q_proj"
Q0 = f"{LAYER}.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4976698672\n"


@pytest.fixture
def folder(tiny_models, tmp_path):
    return shutil.copytree(tiny_models["llama"], tmp_path / "model")


def change(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def read_all(folder):
    config = read_config(folder)
    read_tokenizer(folder)
    read_end_tokens(folder, config.vocab_size)
    WeightFolder(folder, config, "float32").open()


def refusal(folder):
    with pytest.raises(ModelError) as caught:
        WeightFolder(folder, read_config(folder), "float32").open()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "hqq", "bits": 4}},
        {"quantization_config": {"quant_method": ["fp8"]}},
        {"quantization_config": "fp8"},
        {"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}},
        {"compression_config": {"format": "pack-quantized"}},
        {"quantization": {"group_size": 64, "bits": 4}},
        {"quantize_config": {"bits": 4}},
        {"torch_dtype": "int8"}, {"dtype": "torch.float8_e4m3fn"}, {"dtype": "uint8"},
        {"torch_dtype": "float4_e2m1fn_x2"},
    ],
    ids=str,
)  # fmt: skip
def test_a_key_of_the_configuration(folder, config):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    told = refusal(folder)
    assert told.startswith(f"{path}: ")
    assert told.endswith(REFUSED)
    assert next(iter(config)) in told


@pytest.mark.parametrize("config", [{"quantization_config": None}, {"quantization": None}, {"dtype": "float64"}, {
    "quantization_config": {}}], ids=str)  # fmt: skip
def test_a_key_that_says_nothing(folder, config):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    WeightFolder(folder, read_config(folder), "float32").open()


PACKED = torch.zeros(48, 6, dtype=torch.int32)
SCALES = torch.ones(48, 1, dtype=torch.float16)
TENSORS = {
    "MLX": {Q0: PACKED.to(torch.uint32), f"{LAYER}.scales": SCALES, f"{LAYER}.biases": SCALES},
    "MLX, mxfp4": {Q0: PACKED.to(torch.uint32), f"{LAYER}.scales": SCALES.to(torch.uint8)},
    "GPTQ": {Q0: None, f"{LAYER}.qweight": PACKED, f"{LAYER}.qzeros": PACKED, f"{LAYER}.g_idx": PACKED[0],
             f"{LAYER}.scales": SCALES},
    "AWQ": {Q0: None, f"{LAYER}.qweight": PACKED, f"{LAYER}.qzeros": PACKED, f"{LAYER}.scales": SCALES},
    "FP8 with scales": {Q0: torch.zeros(48, 48).to(torch.float8_e4m3fn), f"{LAYER}.weight_scale": SCALES[0]},
    "FP8 by blocks": {Q0: torch.zeros(48, 48).to(torch.float8_e4m3fn), f"{LAYER}.weight_scale_inv": SCALES},
    "a stray scale": {f"{LAYER}.weight_scale": SCALES},
    "a scale of inputs": {f"{LAYER}.input_scale": SCALES[0]},
    "a scale of KV": {"model.layers.0.self_attn.k_scale": SCALES[0]},
    "8 bits without a scale": {Q0: torch.zeros(48, 48).to(torch.float8_e5m2)},
    "bytes": {Q0: torch.zeros(48, 48, dtype=torch.uint8)},
    "bitsandbytes, 4 bits": {
        Q0: torch.zeros(1152, 1, dtype=torch.uint8), f"{Q0}.absmax": SCALES.to(torch.uint8), f"{Q0}.quant_map": SCALES,
        f"{Q0}.quant_state.bitsandbytes__nf4": PACKED},
    "bitsandbytes, 8 bits": {Q0: torch.zeros(48, 48, dtype=torch.int8), f"{LAYER}.SCB": SCALES},
    "HQQ": {Q0: None, f"{LAYER}.W_q": PACKED, f"{LAYER}.scale": SCALES, f"{LAYER}.zero": SCALES},
    "compressed-tensors": {Q0: None, f"{LAYER}.weight_packed": PACKED, f"{LAYER}.weight_shape": PACKED[0],
                           f"{LAYER}.weight_scale": SCALES},
    "ModelOpt, NVFP4": {Q0: torch.zeros(48, 24, dtype=torch.uint8), f"{LAYER}.weight_scale": SCALES,
                        f"{LAYER}.weight_scale_2": SCALES[0], f"{LAYER}.input_scale": SCALES[0]},
    "MXFP4": {Q0: None, f"{LAYER}_blocks": PACKED.to(torch.uint8), f"{LAYER}_scales": SCALES.to(torch.uint8)},
    "torchao": {Q0: None, f"{LAYER}._weight_qdata": PACKED.to(torch.int8), f"{LAYER}._weight_scale": SCALES},
    "Quanto": {Q0: None, f"{Q0}._data": PACKED.to(torch.int8), f"{Q0}._scale": SCALES},
    "EXL2": {Q0: None, f"{LAYER}.q_weight": PACKED, f"{LAYER}.q_scale": PACKED, f"{LAYER}.q_groups": PACKED[0]},
    "AQLM": {Q0: None, f"{LAYER}.codes": PACKED.to(torch.int8), f"{LAYER}.codebooks": SCALES},
    "EETQ": {Q0: torch.zeros(48, 48, dtype=torch.int8), f"{LAYER}.weight_scales": SCALES},
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_of_a_quantizer(folder, kind):
    def edit(tensors):
        for name, tensor in TENSORS[kind].items():
            if tensor is None:
                del tensors[name]
            else:
                tensors[name] = tensor.clone()

    change(folder, edit)
    told = refusal(folder)
    assert told.startswith(f"{folder / 'model.safetensors'}: tensor ")
    assert told.endswith(REFUSED)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_a_file_of_a_quantizer(folder, name):
    (folder / name).write_text("{}")
    WeightFolder(folder, read_config(folder), "float32").open()  # all weights are there
    change(folder, lambda tensors: tensors.update({f"{LAYER}.packed_by_something_new": SCALES}))
    assert refusal(folder).startswith(f"{folder}: {name}")
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-128g.safetensors")
    assert refusal(folder).endswith(REFUSED)


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "v_head.summary.weight", "score.weight", f"{LAYER}.bias", "model.norm.scale", "logit_scale",
     "model.layers.0.self_attn.rotary_emb.inv_freq", "transformer.h.0.attn.masked_bias", "model.embed_tokens.weight",
     "blocks.0.attn.weight", "base_model.model.q_proj.lora_A.weight"],
)  # fmt: skip
def test_names_that_say_nothing(name):
    assert sign_of_tensor(name) is None


def test_another_model_is_no_quantized_one(folder):
    change(folder, lambda tensors: tensors.update({"score.weight": torch.ones(2, 48)}))
    assert refusal(folder).endswith("unexpected tensor score.weight; weights and config.json do not match")


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("model-Q4_K_M.gguf", "`jettison model import model-Q4_K_M.gguf DIR` makes a model folder of it"),
        ("weights.npz", "only safetensors are read"),
    ],
)
def test_weights_of_another_format(folder, name, mend):
    (folder / "model.safetensors").rename(folder / name)
    told = refusal(folder)
    assert name in told
    assert mend in told
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=f"config.json: not found; the folder holds {name}"):
        read_config(folder)


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"an adapter \(LoRA\); merge it"):
        read_config(tmp_path)


def test_files_under_another_name_are_named(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert refusal(folder).endswith("model.safetensors.index.json, beside model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (POINTER, "a Git LFS pointer, not the file itself; run `git lfs pull` in "),
        (b"\n<!DOCTYPE html><html><head>", "a web page, not the file; download it again"),
    ],
    ids=["pointer", "page"],
)
@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
     "special_tokens_map.json", "added_tokens.json", "model.safetensors.index.json"],
)  # fmt: skip
def test_what_stands_in_a_files_place(folder, name, content, told):
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_all(folder)
    assert str(folder / name) in str(caught.value)
    assert told in str(caught.value)


def test_a_link_to_nothing_is_told(folder):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        path = folder / name
        kept = path.read_bytes()
        path.unlink()
        path.symlink_to("../../blobs/4d7a2146")
        with pytest.raises(ModelError, match=rf"{name}.*a link to a file that is not there; copy .*cp -rL"):
            read_all(folder)
        path.unlink()
        path.write_bytes(kept)


class TestWeightsThatLieThereTwice:
    @pytest.fixture
    def both(self, folder):
        """A whole model in one file, and the same, but for one value, in two files with an index."""
        tensors = load_file(folder / "model.safetensors")
        names = sorted(tensors)
        halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, part in halves.items():
            save_file({name: tensors[name] + 1 if name == "model.norm.weight" else tensors[name] for name in part},
                      folder / file)  # fmt: skip
        index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    def found(self, folder):
        source = WeightFolder(folder, read_config(folder), "float32")
        source.open()
        norm = torch.zeros(48)
        source.load_final_norm(norm)
        return source.doubt, torch.equal(norm, load_file(folder / "model.safetensors")["model.norm.weight"])

    def test_the_single_file_is_read_and_that_is_told(self, both):
        doubt, is_single = self.found(both)
        assert is_single
        assert "holds model.safetensors and model.safetensors.index.json: model.safetensors is read" in doubt
        assert "remove the one that is stale" in doubt

    def test_a_single_file_of_another_model_gives_way(self, both):
        change(both, lambda tensors: tensors.update({Q0: torch.ones(2, 2)}))
        doubt, is_single = self.found(both)
        assert not is_single
        assert "what the index names is read, since model.safetensors does not fit config.json" in doubt

    def test_an_index_without_its_files_says_nothing(self, both):
        (both / "model-00002-of-00002.safetensors").unlink()
        assert self.found(both) == (None, True)

    def test_an_index_of_the_single_file_is_no_second_copy(self, both):
        names = load_file(both / "model.safetensors")
        index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
        (both / "model.safetensors.index.json").write_text(json.dumps(index))
        assert self.found(both) == (None, True)

    def test_where_neither_fits_the_first_is_blamed(self, both):
        for file in both.glob("*.safetensors"):
            save_file({"extra": torch.ones(1)}, file)
        assert "model.safetensors: unexpected tensor extra" in refusal(both)


def test_what_is_found(folder):
    source = WeightFolder(folder, read_config(folder), "float32")
    found = find_weights(folder, list(source._sources()), lambda name, shape: False)
    assert found.files == (folder / "model.safetensors",)
    assert set(found.file_of.values()) == {folder / "model.safetensors"}

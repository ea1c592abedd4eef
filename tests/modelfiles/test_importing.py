"""A model that went through a GGUF file computes what it computed before."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from gguf_written import rotated, widened, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from jettison.cli.main import main
from jettison.device.dtypes import name_of
from jettison.device.kernels import integers
from jettison.device.kernels.operands import IntegerMatrix
from jettison.device.kernels.torch_kernels import TorchKernels
from jettison.device.model.create import create_model
from jettison.device.model.end_tokens import read_end_tokens
from jettison.device.model.hf_config import read_config
from jettison.device.model.kept import keep_integers
from jettison.device.model.quantized import block_kinds
from jettison.device.model.weights import WeightFolder
from jettison.errors import ConfigError, ModelError
from jettison.modelfiles import importing
from jettison.modelfiles.gguf_tensors import unpermuted_rows
from jettison.modelfiles.importing import import_gguf

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 96, "max_position_embeddings": 512}
MODELS = {
    "llama": {"arch": "llama", **SIZES},
    "llama3": {"arch": "llama", **SIZES, "tied": True, "rope_scaling": "llama3", "head_dim": 32},
    "mistral": {"arch": "mistral", **SIZES, "head_dim": 32},
    "qwen2": {"arch": "qwen2", **SIZES, "kv_heads": 4},
    "qwen3": {"arch": "qwen3", **SIZES, "head_dim": 32, "kv_heads": 1, "tied": True},
}
STORED = {Kind.F32: "float32", Kind.F16: "float16", Kind.BF16: "bfloat16"}


def made(folder: Path, name: str, dtype: str = "float32", **changes: object) -> Path:
    create_model(folder, **MODELS[name] | changes, dtype=dtype, std=0.2, seed=3)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("llama") / "model", "llama")


def with_biases(folder: Path) -> Path:
    """The folder with biases on everything."""
    shutil.copytree(folder, folder.with_name("biased"))
    folder = folder.with_name("biased")
    config = json.loads((folder / "config.json").read_text()) | {"attention_bias": True, "mlp_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name, tensor in list(tensors.items()):
        if "_proj.weight" in name:
            tensors[name.replace(".weight", ".bias")] = torch.randn(tensor.shape[0])
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(folder: Path) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(40, 120)[None]).logits


@pytest.mark.parametrize("name", [*MODELS, "biased"])
def test_the_folder_computes_what_its_original_does(name: str, tmp_path: Path) -> None:
    original = with_biases(made(tmp_path / "llama", "llama")) if name == "biased" else made(tmp_path / name, name)
    expected = write_gguf(original, tmp_path / "model.gguf")
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    own, theirs = read_config(tmp_path / "imported"), read_config(original)
    differing = {key for key in ("architecture",) if getattr(own, key) != getattr(theirs, key)}
    assert {key: getattr(own, key) for key in own.__slots__ if key not in differing} == {
        key: getattr(theirs, key) for key in theirs.__slots__ if key not in differing
    }
    tensors = widened(tmp_path / "imported")
    assert tensors.keys() == expected.keys() and all((tensors[key] == expected[key]).all() for key in expected)
    assert torch.equal(logits(tmp_path / "imported"), logits(original))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_numbers_are_the_librarys_to_the_bit(name: str, kind: Kind, tmp_path: Path) -> None:
    original = made(tmp_path / "original", name, STORED.get(kind, "float32"))
    expected = write_gguf(original, tmp_path / "model.gguf", kind=kind)
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported", "auto" if kind in STORED else "float32")
    tensors = widened(tmp_path / "imported")
    assert all(tensors[key].tobytes() == expected[key].tobytes() for key in expected)
    if kind in STORED:
        assert all((tensors[key] == value).all() for key, value in widened(original).items())
    assert read_config(tmp_path / "imported").stored_dtype == STORED.get(kind, "float32")


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_blocks_stay_as_they_are(name: str, kind: Kind, tmp_path: Path) -> None:
    """Widened they are the library's numbers to the bit; kept they are the exact ones, in the folder's order."""
    original = made(tmp_path / "original", name)
    expected = write_gguf(original, tmp_path / "model.gguf", kind=kind)
    folder = tmp_path / "imported"
    import_gguf(tmp_path / "model.gguf", folder)
    file_bytes, weights = (tmp_path / "model.gguf").stat().st_size, folder / "model.safetensors"
    assert weights.stat().st_size < file_bytes * 1.1
    config = read_config(folder)
    assert config.stored_dtype == "bfloat16"
    kept = keep_integers(config, folder, "float64", TorchKernels())
    assert {each.form for each in kept.kept} == {block_kinds.KINDS[kind.name.lower()]}
    for served, dtype in ((config, torch.float32), (kept, torch.float64)):
        source = WeightFolder(folder, served, name_of(dtype), TorchKernels())
        for shard, layout in source.layouts.items():
            slab = torch.empty(layout.num_bytes, dtype=torch.uint8)
            source.load_shard(shard, slab)
            for slot in layout.slots:
                whole = slot.view(slab)
                if slot.form is not None:
                    whole = integers.widened(IntegerMatrix(whole, *slot.shape, slot.form), 0, slot.shape[0], dtype)
                for part, each in zip(whole.split([s.shape[0] for s in slot.sources]), slot.sources, strict=True):
                    assert torch.equal(part.float(), torch.from_numpy(expected[each.name])), each.name


def test_a_k_quant_is_widened_in_the_folders_order(tmp_path: Path) -> None:
    """The library writes no K-quants: the file's blocks are drawn, with scales that are numbers."""
    original = made(tmp_path / "original", "llama", hidden=256)
    config = json.loads((original / "config.json").read_text())
    rows, bytes_a_block = 256, gguf.GGML_QUANT_SIZES[Kind.Q6_K][1]
    blocks = np.random.default_rng(0).integers(0, 256, (rows, bytes_a_block), dtype=np.uint8)
    blocks[:, -2:] = np.full((rows, 1), 0.01, dtype=np.float16).view(np.uint8)
    drawn = {"blk.0.attn_q.weight": (blocks, Kind.Q6_K), "blk.1.attn_v.weight": (blocks[:128], Kind.Q6_K)}
    write_gguf(original, tmp_path / "model.gguf", leave_out=tuple(drawn), tensors=drawn)
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    tensors, wide = widened(tmp_path / "imported"), dequantize(blocks, Kind.Q6_K)
    own = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert rotated(own, config["num_attention_heads"]).tobytes() == wide.tobytes()
    assert tensors["model.layers.1.self_attn.v_proj.weight"].tobytes() == wide[:128].tobytes()


@given(st.integers(1, 9), st.integers(1, 16))
def test_the_permutation_is_undone(num_heads: int, half: int) -> None:
    rows = np.arange(num_heads * 2 * half)
    assert (rotated(rows, num_heads)[unpermuted_rows(num_heads, 2 * half)] == rows).all()


def changed(folder: Path, target: Path, **values: object) -> Path:
    """A copy of the folder whose configuration says something else."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | values
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(("factor", "context"), [(8.0, 8192), (32.0, 8192), (4.0, 4096)])
def test_llama_3s_scaling_is_found_in_its_factors(factor: float, context: int, llama: Path, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": context,
    }  # fmt: skip
    folder = changed(
        llama, tmp_path / "scaled", rope_theta=500_000.0, rope_scaling=scaling, max_position_embeddings=131_072)
    write_gguf(folder, tmp_path / "model.gguf")
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    assert read_config(tmp_path / "imported").ropes[0].scaling == read_config(folder).ropes[0].scaling


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 2.0}, 2.0), ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "rope.scaling.finetuned": True}, None),
    ],
)  # fmt: skip
def test_linear_scaling(fields: dict, expected: float | None, llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf", fields={f"llama.{key}": value for key, value in fields.items()})
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    scaling = read_config(tmp_path / "imported").ropes[0].scaling
    assert (scaling and (scaling.kind, scaling.factor)) == (expected and ("linear", expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_that_is_asked_for(dtype: str, llama: Path, tmp_path: Path) -> None:
    expected = write_gguf(llama, tmp_path / "model.gguf", kind=Kind.Q8_0)
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported", dtype)
    with safe_open(tmp_path / "imported" / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (not a dict)
            wanted = torch.from_numpy(expected[name]).to(getattr(torch, dtype))
            assert torch.equal(file.get_tensor(name), wanted)
    assert read_config(tmp_path / "imported").stored_dtype == dtype


def test_the_command_says_how_to_serve_the_folder(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(llama, tmp_path / "my model.gguf")
    monkeypatch.setattr("sys.argv", [".venv/bin/jettison"])
    assert main(["model", "import", str(tmp_path / "my model.gguf"), str(tmp_path / "my model")]) == 0
    assert capsys.readouterr().err == f"serve it: .venv/bin/jettison serve '{tmp_path / 'my model'}'\n"
    assert main(["serve", "my model.gguf"]) == 2
    assert "`jettison model import 'my model.gguf' DIR` makes one" in capsys.readouterr().err


def test_large_tensors_go_through_in_pieces(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = write_gguf(llama, tmp_path / "model.gguf", kind=Kind.Q4_1)
    monkeypatch.setattr("jettison.modelfiles.gguf_tensors._PIECE_NUMBERS", 300)
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported", "float32")
    tensors = widened(tmp_path / "imported")
    assert all(tensors[key].tobytes() == expected[key].tobytes() for key in expected)


def test_end_tokens_and_files_are_those_of_an_ordinary_folder(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf", fields={"tokenizer.ggml.eot_token_id": 258})
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    assert read_end_tokens(tmp_path / "imported", 261).ids == {256, 258}
    assert {path.name for path in (tmp_path / "imported").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert (tmp_path / "imported" / "model.safetensors").stat().st_mode == (
        tmp_path / "imported" / "config.json").stat().st_mode  # fmt: skip


def test_sampling_that_the_file_says_is_the_folders(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf", fields={
        "general.sampling.temp": 0.6, "general.sampling.top_p": 0.95, "general.sampling.top_k": 20,
        "general.sampling.min_p": 0.0, "general.sampling.penalty_repeat": 1.05,
    })  # fmt: skip
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    assert json.loads((tmp_path / "imported" / "generation_config.json").read_text()) == {
        "temperature": 0.6, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05, "top_k": 20, "do_sample": True,
        "eos_token_id": [256],
    }  # fmt: skip


YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64}  # fmt: skip
FOREIGN = np.zeros((4, 64), dtype=np.float32)
REFUSED = {
    "general.architecture gemma3": {"general.architecture": "gemma3"},
    "llama.attention.head_count is missing": {"llama.attention.head_count": None},
    "llama.attention.head_count is [4, 2]": {"llama.attention.head_count": [4, 2]},
    "llama.block_count is 8000000": {"llama.block_count": 8_000_000},
    "llama.expert_count is 8": {"llama.expert_count": 8},
    "llama.logit_scale is not known": {"llama.logit_scale": 0.5},
    "llama.attention.sliding_window is not known": {"llama.attention.sliding_window": 128},
    "llama.attention.causal is False": {"llama.attention.causal": False},
    "llama.attention.value_length is 32": {"llama.attention.value_length": 32},
    "llama.rope.dimension_count is 8": {"llama.rope.dimension_count": 8},
    "llama.rope.scaling.type ntk is not supported": {"llama.rope.scaling.type": "ntk"},
    "llama.rope.scaling.original_context_length is missing": {"llama.rope.scaling.type": "yarn"},
    "llama.rope.scaling.yarn_ext_factor is 0.5": {**YARN, "llama.rope.scaling.yarn_ext_factor": 0.5},
    "llama.rope.scaling.yarn_log_multiplier is 0.1": {**YARN, "llama.rope.scaling.yarn_log_multiplier": 0.1},
    "llama.rope.scaling.yarn_attn_factor is not known": {"llama.rope.scaling.yarn_attn_factor": 1.5},
    "tensor rope_factors_long.weight is missing": {**YARN, "llama.rope.scaling.type": "longrope"},
    "llama.vocab_size is 300": {"llama.vocab_size": 300},
    "split.count is 3: one part of a model": {"split.count": 3},
    "adapter.type is not known": {"adapter.type": "lora"},
    "tokenizer.ggml.model 'bert' is not supported": {"tokenizer.ggml.model": "bert"},
    "tokenizer.ggml.pre 'poro-chat' is not supported": {"tokenizer.ggml.pre": "poro-chat"},
    "tokenizer.ggml.pre is missing": {"tokenizer.ggml.pre": None},
    "tokenizer.ggml.suppress_tokens is not known": {"tokenizer.ggml.suppress_tokens": [1, 2]},
    "tokenizer.ggml.merges do not fit": {"tokenizer.ggml.merges": ["a bb"]},
    "tokenizer.ggml.merges do not fit its tokens (not enough values": {"tokenizer.ggml.merges": ["alone"]},
    "tokenizer.ggml.merges is missing": {"tokenizer.ggml.merges": None},
    "tokenizer.ggml.token_type are 2": {"tokenizer.ggml.token_type": [1, 1]},
    "tokenizer.ggml.add_space_prefix is True": {"tokenizer.ggml.add_space_prefix": True},
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_is_not_known_is_refused_by_name(told: str, llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf", fields=REFUSED[told])
    complains(tmp_path, told)


@pytest.mark.parametrize(
    ("told", "changes"),
    [
        ("tensor blk.0.attn_sinks.weight is not known", {"tensors": {"blk.0.attn_sinks.weight": (FOREIGN, Kind.F32)}}),
        ("tensor blk.1.attn_q.weight is missing", {"leave_out": ("blk.1.attn_q.weight",)}),
        ("tensor token_embd.weight is missing", {"leave_out": ("token_embd.weight",)}),
        ("tensor blk.0.attn_q.bias needs", {"tensors": {"blk.0.attn_q.bias": (FOREIGN[0], Kind.F32)}}),
        ("tensor rope_freqs.weight must hold 8 factors", {"tensors": {"rope_freqs.weight": (FOREIGN[0], Kind.F32)}}),
        ("tensor rope_freqs.weight must hold 8 factors", {
            "tensors": {"rope_freqs.weight": (np.ones(8, dtype=np.float16), Kind.F16)}}),
        ("tensor rope_factors_long.weight is not known", {
            "tensors": {"rope_factors_long.weight": (np.ones(8, dtype=np.float32), Kind.F32)}}),
        ("tensor rope_freqs.weight holds factors that are no", {
            "tensors": {"rope_freqs.weight": (np.full(8, -1.0, dtype=np.float32), Kind.F32)}}),
        ("tensor rope_freqs.weight holds factors of", {
            "tensors": {"rope_freqs.weight": (np.linspace(1, 9, 8, dtype=np.float32), Kind.F32)}}),
        ("tensor output.weight has shape (2, 4, 64), expected", {
            "leave_out": ("output.weight",), "tensors": {"output.weight": (np.stack([FOREIGN] * 2), Kind.F32)}}),
        ("tensor blk.1.ffn_up.weight has shape (261, 64), expected (", {
            "leave_out": ("blk.1.ffn_up.weight",),
            "tensors": {"blk.1.ffn_up.weight": (np.zeros((261, 64), dtype=np.float32), Kind.F32)}}),
        ("tensor blk.1.ffn_norm.weight has shape (64, 1), expected (64,)", {
            "leave_out": ("blk.1.ffn_norm.weight",),
            "tensors": {"blk.1.ffn_norm.weight": (np.zeros((64, 1), dtype=np.float32), Kind.F32)}}),
        ("tensor output.weight has type Q8_1", {
            "leave_out": ("output.weight",),
            "tensors": {"output.weight": (np.zeros((261, 80), dtype=np.uint8), Kind.Q8_1)}}),
    ],
)  # fmt: skip
def test_other_tensors_are_refused_by_name(told: str, changes: dict, llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf", **changes)
    complains(tmp_path, told)


def complains(tmp_path: Path, told: str) -> None:
    """The import fails with one line that says so, and leaves nothing."""
    with pytest.raises(ModelError) as caught:
        import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    assert str(caught.value).startswith(f"{tmp_path / 'model.gguf'}: {told}") and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("size", [0, 3, 20, 200, 3000, -100_000, -1])
def test_a_file_that_is_not_whole(size: int, llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf")
    whole = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(whole[:size])
    complains(tmp_path, "no ")


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_is_told_or_imported(seed: int, llama: Path, tmp_path: Path) -> None:
    """Any byte of its header may be another."""
    write_gguf(llama, tmp_path / "whole.gguf")
    whole, rng = (tmp_path / "whole.gguf").read_bytes(), random.Random(seed)
    for i in range(10):
        at = rng.randrange(4, 9000)
        (tmp_path / "model.gguf").write_bytes(whole[:at] + rng.randbytes(1) + whole[at + 1 :])
        told = ""
        try:
            import_gguf(tmp_path / "model.gguf", tmp_path / f"imported-{i}")
        except ModelError as error:
            told = str(error)
        assert "\n" not in told and (tmp_path / f"imported-{i}").exists() == (told == "")


def test_numbers_beyond_the_dtype_leave_nothing(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf", leave_out=("blk.0.ffn_up.weight",),
               tensors={"blk.0.ffn_up.weight": (np.full((96, 64), 1e6, dtype=np.float32), Kind.F32)})  # fmt: skip
    with pytest.raises(ModelError, match=r"tensor blk.0.ffn_up.weight has numbers beyond F16; choose another --dtype"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "imported", "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_full_disk_is_told_with_the_folder(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_gguf(llama, tmp_path / "model.gguf")
    monkeypatch.setattr(importing, "write_safetensors", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    assert caught.value.filename == str(tmp_path / "imported")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_folder_that_is_in_use_is_kept(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf")
    (tmp_path / "imported").mkdir()
    (tmp_path / "imported" / "mine").touch()
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    (tmp_path / "imported" / "mine").unlink()
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    with pytest.raises(ConfigError, match="--dtype must be one of"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "other", "int8")

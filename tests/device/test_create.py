"""Created models: ordinary folders that transformers loads too, the same bytes from the same seed."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from jettison.device.model.byte_tokenizer import MIN_VOCAB_SIZE, SPECIAL_TOKENS, byte_level_tokenizer
from jettison.device.model.create import create_model
from jettison.device.model.end_tokens import read_end_tokens
from jettison.errors import ConfigError, ModelError

SMALL = {"arch": "qwen2", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2}


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tensors(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        create_model(tmp_path / name, **SMALL, seed=seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a").keys() == contents(tmp_path / "c").keys()
    assert contents(tmp_path / "a")["model.safetensors"] != contents(tmp_path / "c")["model.safetensors"]


def test_several_files_hold_the_same_tensors(tmp_path):
    create_model(tmp_path / "one", **SMALL)
    create_model(tmp_path / "several", **SMALL, shard_bytes=20_000)
    one, several = tensors(tmp_path / "one"), tensors(tmp_path / "several")
    assert one.keys() == several.keys()
    assert all(torch.equal(one[name], several[name]) for name in one)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.numel() * tensor.itemsize for tensor in one.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "several" / file)
    assert len(set(index["weight_map"].values())) == len(list((tmp_path / "several").glob("*.safetensors"))) > 3


def test_weights_have_the_spread_asked_for(tmp_path):
    create_model(tmp_path / "m", **SMALL, std=0.5, dtype="float64")
    for name, tensor in tensors(tmp_path / "m").items():
        centre, spread = (1.0, 0.1) if name.endswith("norm.weight") else (0.0, 0.5)
        assert tensor.dtype == torch.float64
        assert tensor.std().item() == pytest.approx(spread, rel=0.5)
        assert tensor.mean().item() == pytest.approx(centre, abs=4 * spread / tensor.numel() ** 0.5)


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_it(arch, tied, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "m"
    create_model(folder, **{**SMALL, "arch": arch}, tied=tied, dtype="bfloat16", rope_scaling="llama3", vocab=300)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters["rope_type"] == "llama3"
    assert list(model.generation_config.eos_token_id) == sorted(read_end_tokens(folder, 300).ids)


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_transformers_reads_the_tokenizer(arch, tmp_path):
    transformers = pytest.importorskip("transformers")
    create_model(tmp_path / "m", **{**SMALL, "arch": arch}, vocab=500)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    text = "Żółw, <b>naïve</b>  \n\t 🐢 the end"
    ids = tokenizer(text)["input_ids"]
    assert ids == Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(rendered)["input_ids"]
    assert ids.count(259) == 3
    assert tokenizer.decode(ids) == rendered


TOKENIZERS = {size: byte_level_tokenizer(size) for size in (MIN_VOCAB_SIZE, 700)}


@pytest.mark.parametrize("size", TOKENIZERS)
@given(text=st.text())
def test_any_text_goes_there_and_back(size, text):
    tokenizer = TOKENIZERS[size]
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    if size == MIN_VOCAB_SIZE and not any(token in text for token in SPECIAL_TOKENS):
        assert bytes(ids) == text.encode()


@pytest.mark.parametrize("size", [MIN_VOCAB_SIZE, 262, 261 + 26**2, 3000])
def test_every_id_has_a_token(size):
    tokenizer = byte_level_tokenizer(size)
    assert tokenizer.get_vocab_size() == size
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))
    for token in range(MIN_VOCAB_SIZE, size):
        assert len(tokenizer.decode([token])) >= 2


@pytest.mark.parametrize("shard_bytes", [None, 20_000])
def test_who_may_read_the_configuration_may_read_the_weights(tmp_path, shard_bytes):
    create_model(tmp_path / "m", **SMALL, shard_bytes=shard_bytes)
    modes = {path.suffix: path.stat().st_mode for path in (tmp_path / "m").iterdir()}
    assert modes[".safetensors"] == modes[".json"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"arch": "gpt2"}, ConfigError, "arch must be one of llama, mistral, .*seed_oss, not"),
        ({"dtype": "int8"}, ConfigError, "dtype"),
        ({"vocab": 260}, ConfigError, "at least 261"),
        ({"rope_scaling": "yarn"}, ConfigError, "llama3"),
        ({"kv_heads": 3}, ModelError, "multiple"),
        ({"hidden": 36}, ModelError, "odd"),
    ],
)
def test_arguments_that_make_no_model_are_refused(changes, error, message, tmp_path):
    with pytest.raises(error, match=message):
        create_model(tmp_path / "m", **{**SMALL, **changes})
    assert not (tmp_path / "m").exists()


def test_nothing_is_overwritten(tmp_path):
    create_model(tmp_path / "m", **SMALL)
    before = contents(tmp_path / "m")
    with pytest.raises(ConfigError, match="not an empty folder"):
        create_model(tmp_path / "m", **SMALL, seed=5)
    assert contents(tmp_path / "m") == before

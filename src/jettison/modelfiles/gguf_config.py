"""From a GGUF file's fields to the values of ``config.json``, and of sampling in ``generation_config.json``.

Every field below the architecture's name is understood or refused: one that nothing here asks for could change the
model's arithmetic. Not here: rotary scaling (``gguf_rope``), the tokenizer, and tensors but for their names and shapes.
"""

from __future__ import annotations

import itertools
from typing import Any

from jettison.device.model.hf_config import MAX_LAYERS, parse_config
from jettison.device.model.jsonfile import MAX_SIZE, JsonObject
from jettison.modelfiles.architectures import ARCHITECTURES, Architecture
from jettison.modelfiles.gguf_file import GgufFile
from jettison.modelfiles.gguf_rope import rope_scaling

_SAMPLING = "general.sampling."
_SAMPLING_NUMBERS = {
    "temp": "temperature", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def architecture_of(file: GgufFile) -> Architecture:
    """The row of the file's architecture. Raises ModelError for one that cannot be imported."""
    name = file.text("general.architecture")
    if name not in ARCHITECTURES:
        raise file.fail(
            f"general.architecture {name[:60]} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def config_values(file: GgufFile, dtype: str) -> dict[str, Any]:
    """The contents of ``config.json``, but for the ids of tokens. ``dtype``: of the matrices.

    Raises ModelError, one line that names the field, for what is missing, unknown, or cannot be served.
    """
    row, arch = architecture_of(file), file.text("general.architecture")
    values: dict[str, Any] = {"architectures": [row.name], "model_type": row.model_type, "hidden_act": "silu"}
    for key, name in row.keys.items():
        values[name] = file.integer(f"{arch}.{key}", least=1, most=MAX_LAYERS if key == "block_count" else MAX_SIZE)
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = file.integer(f"{arch}.attention.head_count_kv", heads, least=1)
    values["head_dim"] = _head_dim(file, arch, values["hidden_size"], heads)
    values["rms_norm_eps"] = file.number(f"{arch}.attention.layer_norm_rms_epsilon")
    values["vocab_size"] = _vocab_size(file, arch)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    for switch, names in row.switches.items():
        values[switch] = _is_on(file, switch, list(names), values["num_hidden_layers"])
    values["rope_theta"] = file.number(f"{arch}.rope.freq_base", 10_000.0)
    values["rope_scaling"] = rope_scaling(file, arch, values)
    values["torch_dtype"] = dtype
    for key, neutral in row.neutral.items():
        file.expect(f"{arch}.{key}", *neutral)
    if (parts := file.integer("split.count", 1)) > 1:
        raise file.fail(f"split.count is {parts}: one part of a model; join all first (llama-gguf-split --merge)")
    if unknown := file.unread(f"{arch}.", "adapter."):
        raise file.fail(f"{unknown[0]} is not known, and may change what the model computes")
    parse_config(JsonObject(file.path, values))
    return values


def sampling_values(file: GgufFile) -> dict[str, Any]:
    """What the file says of sampling, as ``generation_config.json`` has it."""
    values: dict[str, Any] = {
        name: file.number(f"{_SAMPLING}{key}", or_zero=True)
        for key, name in _SAMPLING_NUMBERS.items() if file.has(f"{_SAMPLING}{key}")
    }  # fmt: skip
    if file.has(f"{_SAMPLING}top_k"):
        values["top_k"] = file.integer(f"{_SAMPLING}top_k", least=-1)
    return values | ({"do_sample": True} if values else {})


def _head_dim(file: GgufFile, arch: str, hidden_size: int, heads: int) -> int:
    if not file.has(f"{arch}.attention.key_length") and hidden_size % heads:
        raise file.fail(f"{arch}.embedding_length {hidden_size} is no multiple of {arch}.attention.head_count {heads}")
    head_dim = file.integer(f"{arch}.attention.key_length", hidden_size // heads, least=1)
    for key in ("attention.value_length", "rope.dimension_count"):
        file.expect(f"{arch}.{key}", head_dim)
    return head_dim


def _vocab_size(file: GgufFile, arch: str) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.fail("tensor token_embd.weight is missing")
    num_rows = int(embedding.shape[-1])  # shapes are the other way round there
    file.expect(f"{arch}.vocab_size", num_rows)
    return num_rows


def _is_on(file: GgufFile, switch: str, names: list[str], num_layers: int) -> bool:
    """Whether a switch's tensors are there: all or none."""
    wanted = [f"blk.{layer}.{name}" for layer, name in itertools.product(range(num_layers), names)]
    found = [name for name in wanted if name in file.tensors]
    if found and len(found) < len(wanted):
        missing = next(name for name in wanted if name not in file.tensors)
        raise file.fail(f"tensor {found[0]} needs {missing} beside it ({switch})")
    return bool(found)

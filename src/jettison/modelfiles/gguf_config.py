"""From a GGUF file's fields to the values of ``config.json``, and of sampling in ``generation_config.json``.

Every field below the architecture's name is understood or refused: one that nothing here asks for could change the
model's arithmetic. Not here: the tokenizer, and tensors but for their names and shapes and the factors of rotary
scaling, which GGUF keeps in a tensor.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from jettison.device.model.hf_config import MAX_LAYERS, parse_config
from jettison.device.model.jsonfile import MAX_SIZE, JsonObject
from jettison.modelfiles.architectures import ARCHITECTURES, Architecture
from jettison.modelfiles.gguf_file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of what each rotary frequency is divided by."""

_SAMPLING = "general.sampling."
_SAMPLING_NUMBERS = {
    "temp": "temperature", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip

_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR = 1.0, 4.0
_PRETRAINING_CONTEXTS = tuple(1 << bits for bits in range(6, 20))
"""Contexts that Llama 3's scaling may begin from, in tokens. Its two other numbers are the same in all its models."""


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
    values["rope_scaling"] = _rope_scaling(file, arch, values["rope_theta"], values["head_dim"])
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


def _rope_scaling(file: GgufFile, arch: str, theta: float, head_dim: int) -> dict[str, Any] | None:
    begin = f"{arch}.rope.scaling."
    kind = file.text(f"{begin}type", "linear")
    older = file.number(f"{arch}.rope.scale_linear", 1.0, or_zero=True)
    factor = file.number(f"{begin}factor", older, or_zero=True)
    is_linear = kind == "linear" and factor not in (0.0, 1.0)  # 0 is written for none, too
    context = file.integer(f"{begin}original_context_length", 0)
    file.has(f"{begin}finetuned")  # a note on how the model was trained
    if kind not in ("none", "linear"):
        raise file.fail(f"{begin}type {kind[:40]} is not supported; supported: none, linear, and {ROPE_FACTORS}")
    if ROPE_FACTORS in file.tensors and (scaling := _llama3(file, theta, head_dim, context)) is not None:
        if is_linear:
            raise file.fail(f"{begin}factor {factor} beside {ROPE_FACTORS} is not supported")
        return scaling
    return {"rope_type": "linear", "factor": factor} if is_linear else None


def _llama3(file: GgufFile, theta: float, head_dim: int, context: int) -> dict[str, Any] | None:
    """Llama 3's scaling whose factors the file holds; None where they are all 1.

    GGUF keeps what follows from its four numbers, not the numbers; they are found by trying contexts. ``context``: the
    pretraining context, where the file says it; 0: it does not.
    """
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.tensor_type != GGMLQuantizationType.F32 or tensor.data.shape != (head_dim // 2,):
        raise file.fail(f"tensor {ROPE_FACTORS} must hold {head_dim // 2} factors in float32")
    factors = np.asarray(tensor.data, dtype=np.float64)
    if (factors == 1.0).all():
        return None
    largest = float(factors.max())
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    for tried in (context,) if context else _PRETRAINING_CONTEXTS:
        turns = tried * frequencies / (2 * math.pi)
        kept = ((turns - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR)).clip(0.0, 1.0)
        if np.allclose(1.0 / ((1.0 - kept) / largest + kept), factors, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3", "factor": float(str(np.float32(largest))),
                "low_freq_factor": _LOW_FREQ_FACTOR, "high_freq_factor": _HIGH_FREQ_FACTOR,
                "original_max_position_embeddings": tried,
            }  # fmt: skip
    raise file.fail(f"tensor {ROPE_FACTORS} holds factors of no known scaling of the context")

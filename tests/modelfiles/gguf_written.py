"""GGUF files written from model folders with the ``gguf`` library, as llama.cpp's converter writes them.

Names come from the library's own map, and the order of rotated rows from the converter's rule, so that nothing here
knows what the importer knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

ARCHES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}


def fields_of(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """Fields of a model's numbers."""
    head_dim = config["head_dim"]
    return {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.rope.freq_base": float(config["rope_theta"]),
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.vocab_size": config["vocab_size"],
    }


def byte_vocabulary(num_tokens: int) -> dict[str, Any]:
    """Fields of a vocabulary that is long enough, and of no use."""
    kinds = [int(gguf.TokenType.NORMAL)] * 256 + [int(gguf.TokenType.CONTROL)] * (num_tokens - 256)
    letters = [*(chr(256 + byte) for byte in range(255)), "Āā"] + [f"<|{i}|>" for i in range(256, num_tokens)]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": ["Ā ā"],
        "tokenizer.ggml.eos_token_id": 256,
    }  # fmt: skip


def rotated(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection as llama.cpp's converter orders them."""
    paired = values.reshape(num_heads, 2, len(values) // num_heads // 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def rope_factors(config: dict[str, Any]) -> np.ndarray:
    """What Llama 3's scaling divides each frequency by."""
    scaling = config["rope_scaling"]
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
    smooth = (scaling["original_max_position_embeddings"] / wavelengths - scaling["low_freq_factor"]) / (
        scaling["high_freq_factor"] - scaling["low_freq_factor"]
    )
    smooth = smooth.clip(0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)


def write_gguf(
    folder: Path, path: Path, *, kind: Kind = Kind.F32, fields: dict[str, Any] | None = None,
    tensors: dict[str, tuple[np.ndarray, Kind]] | None = None, leave_out: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:
    """Write a folder's GGUF file; returns what each tensor of a folder imported from it must hold.

    ``kind``: of matrices; norms and biases are F32. ``fields``, ``tensors``: over the folder's own; a field that is
    None is left out. ``leave_out``: names of tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    said = fields_of(config, arch) | byte_vocabulary(config["vocab_size"]) | (fields or {})
    for key, value in said.items():
        add_field(writer, key, value)
    names = gguf.get_tensor_name_map(ARCHES[arch], config["num_hidden_layers"])
    expected: dict[str, np.ndarray] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        values = tensor.float().numpy()
        num_heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        order: Callable[[np.ndarray], np.ndarray] = lambda values: values  # noqa: E731
        if arch == "llama" and num_heads is not None:
            order = lambda values, num=config[num_heads]: rotated(values, num)  # noqa: E731
        own = kind if values.ndim > 1 else Kind.F32
        data = quantize(order(values), own)
        # Rows are quantized one by one: in the folder's order they hold what they hold in the file's.
        expected[name] = dequantize(quantize(values, own), own)
        if target not in leave_out:
            writer.add_tensor(target, data, raw_dtype=own)
    if config["rope_scaling"]:
        writer.add_tensor("rope_freqs.weight", rope_factors(config))
    for name, (data, own) in (tensors or {}).items():
        writer.add_tensor(name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A field of the type that llama.cpp's converter gives it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def widened(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, in float32."""
    return {name: tensor.to(torch.float32).numpy() for name, tensor in load_file(folder / "model.safetensors").items()}

"""Writes a small random model with a byte-level tokenizer, from a seed, so that trials need no download.

The folder is an ordinary Hugging Face one. Weights are drawn with a standard deviation large enough for varied output,
norms around one and biases around zero, so that tests detect a decoder that ignores any of them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from jettison.device.dtypes import DTYPES, StoredDtype, torch_dtype
from jettison.device.model import byte_tokenizer
from jettison.device.model.checkpoint import INDEX_FILE, SINGLE_FILE
from jettison.device.model.families import FAMILIES
from jettison.device.model.hf_config import DecoderConfig, parse_config
from jettison.device.model.jsonfile import JsonObject
from jettison.device.model.quantized.config import KEY
from jettison.device.model.quantized.writing import Quantization
from jettison.device.model.shards import final_norm_sources, shard_layouts
from jettison.errors import ConfigError

WRITTEN_DTYPES: tuple[StoredDtype, ...] = (*DTYPES, "float16")

_NORM_NOISE = 0.1
_SPECIAL_TOKENS = {
    "bos_token_id": byte_tokenizer.BOS_ID, "eos_token_id": byte_tokenizer.EOS_ID,
    "pad_token_id": byte_tokenizer.PAD_ID,
}  # fmt: skip
_ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_ENDS = {"eos_token_id": [byte_tokenizer.EOS_ID, byte_tokenizer.TURN_END_ID]}
"""Of answers: the end of a text, and that of a turn."""


def create_model(
    dir: Path,
    *,
    arch: str,
    layers: int, hidden: int, heads: int, kv_heads: int,
    head_dim: int | None = None, intermediate: int | None = None,
    vocab: int | None = None,
    seed: int = 0,
    dtype: str = "float32",
    tied: bool = False,
    std: float = 0.08,
    max_position_embeddings: int = 4096,
    rope_scaling: str | None = None,
    shard_bytes: int | None = None,
    extra: Mapping[str, object] | None = None,
    quantized: str | None = None,
    is_widened: bool = False,
) -> None:
    """Write a model folder; the same arguments give the same bytes.

    ``arch``: a ``model_type`` of ``families``. ``head_dim`` None = hidden / heads; ``intermediate`` None = about 8/3
    hidden; ``vocab`` None = what the byte-level tokenizer has. ``rope_scaling``: None or ``"llama3"``.
    ``std``: the default gives varied greedy output from a width of about 256 up (60 different tokens in 80); at 64 it
    takes 0.2.
    ``shard_bytes``: None = one weight file, else several of about this size with an index.
    ``extra``: other keys of ``config.json``.
    ``quantized``: None, or how projections are quantized: see ``Quantization.parse``. ``is_widened``: store the weights
    that they stand for instead, exactly.
    Raises ConfigError for arguments that make no model, or when ``dir`` exists and is not an empty folder;
    ModelError where the resulting config cannot be served (odd head size, heads that do not divide).
    """
    model_dir = Path(dir)
    _check_can_be_made(model_dir, dtype, vocab)
    values = {
        **_family_values(arch, hidden, heads, head_dim),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate or 8 * math.ceil(hidden / 3),
        "vocab_size": vocab or byte_tokenizer.MIN_VOCAB_SIZE,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": std,
        "rope_theta": 10_000.0,
        "rope_scaling": _rope_scaling(rope_scaling, max_position_embeddings),
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        **_SPECIAL_TOKENS,
        **(extra or {}),
    }
    quantization = None if quantized is None else Quantization.parse(quantized)
    if quantization is not None and not is_widened:
        values[KEY] = quantization.keys()
    config = parse_config(JsonObject(model_dir / "config.json", values))
    model_dir.mkdir(parents=True, exist_ok=True)
    _write_json(model_dir / "config.json", values)
    _write_json(model_dir / "generation_config.json", _SPECIAL_TOKENS | _ENDS)
    byte_tokenizer.write_tokenizer(model_dir, config.vocab_size, max_position_embeddings)
    tensors = _random_tensors(config, seed, std, cast(StoredDtype, dtype))
    _write_weights(model_dir, _quantized(tensors, quantization, is_widened), shard_bytes)


def write_random_weights(dir: Path, config: DecoderConfig, seed: int, dtype: str, std: float) -> None:
    """The weights alone, as ``create_model`` draws them, into a folder that has its ``config.json``."""
    _write_weights(dir, _random_tensors(config, seed, std, cast(StoredDtype, dtype)), None)


def _check_can_be_made(model_dir: Path, dtype: str, vocab: int | None) -> None:
    if dtype not in WRITTEN_DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(WRITTEN_DTYPES)}, not {dtype!r}")
    if vocab is not None and vocab < byte_tokenizer.MIN_VOCAB_SIZE:
        raise ConfigError(f"vocab must be at least {byte_tokenizer.MIN_VOCAB_SIZE} (bytes and special tokens)")
    if model_dir.exists() and (not model_dir.is_dir() or any(model_dir.iterdir())):
        raise ConfigError(f"{model_dir} exists and is not an empty folder")


def _family_values(arch: str, hidden: int, heads: int, head_dim: int | None) -> dict[str, Any]:
    texts = ((name, family) for name, family in FAMILIES.items() if not family.text_types)
    by_type = {family.model_type: (name, family) for name, family in texts}
    if arch not in by_type:
        raise ConfigError(f"arch must be one of {', '.join(by_type)}, not {arch!r}")
    name, family = by_type[arch]
    values: dict[str, Any] = {"architectures": [name], "model_type": arch}
    values["head_dim"] = head_dim or hidden // heads
    values[family.keys.eps] = 1e-6
    if family.keys.activation is not None:
        values[family.keys.activation] = _ACTIVATION_NAMES[family.arithmetic.activation]
    if family.windows.rule == "always":
        values["sliding_window"] = None
    for key in (family.biases.qkv_key, family.biases.o_key, family.biases.mlp_key):
        if key is not None:
            values[key] = family.biases.default
    return values


def _rope_scaling(name: str | None, max_position_embeddings: int) -> dict[str, Any] | None:
    if name is None:
        return None
    if name != "llama3":
        raise ConfigError(f"rope_scaling must be llama3, not {name!r}")
    return {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": max(1, max_position_embeddings // 8),
    }


def _random_tensors(
    config: DecoderConfig, seed: int, std: float, dtype: StoredDtype
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint, in a fixed order, each from a random stream of its own."""
    sources = [
        source
        for layout in shard_layouts(config, dtype).values()
        for slot in layout.slots
        for source in slot.sources
    ]
    sources += final_norm_sources(config)
    centre = 0.0 if config.arithmetic.norm == "rms_plus_one" else 1.0
    shapes = {source.name: source.stored_shape for source in sources}
    for i, (name, shape) in enumerate(shapes.items()):
        # Philox is counter-based: (seed, i) is the whole state, so no tensor's values depend on another's size.
        noise = np.random.Generator(np.random.Philox(key=[seed, i])).standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            values = centre + _NORM_NOISE * noise
        else:
            values = std * noise
        yield name, torch.from_numpy(values).to(torch_dtype(dtype))


def _quantized(
    tensors: Iterator[tuple[str, Tensor]], quantization: Quantization | None, is_widened: bool
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if quantization is None or not quantization.takes(name, tuple(tensor.shape)):
            yield name, tensor
        elif is_widened:
            yield name, quantization.exact(tensor)
        else:
            yield from quantization.parts(name, tensor).items()


def _write_weights(model_dir: Path, tensors: Iterator[tuple[str, Tensor]], shard_bytes: int | None) -> None:
    if shard_bytes is None:
        _save(dict(tensors), model_dir / SINGLE_FILE)
        return
    parts: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = pending_bytes = 0

    def flush() -> None:
        if pending:
            _save(pending, _part(model_dir, len(parts)))
            parts.append(list(pending))
            pending.clear()

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.itemsize
        if pending_bytes + num_bytes > shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor
        pending_bytes += num_bytes
        total += num_bytes
    flush()
    weight_map: dict[str, str] = {}
    for i, names in enumerate(parts):  # the number of parts, which every file's name contains, is known only now
        final = model_dir / f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        _part(model_dir, i).rename(final)
        weight_map |= dict.fromkeys(names, final.name)
    _write_json(model_dir / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a weights file that every reader of the configuration may read; the library would make it readable for its
    owner only."""
    save_file(tensors, path, metadata={"format": "pt"})
    shutil.copymode(path.with_name("config.json"), path)


def _part(model_dir: Path, index: int) -> Path:
    return model_dir / f"part-{index}.safetensors"


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

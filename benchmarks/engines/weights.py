"""The models of the comparison: a random Qwen3 as a Hugging Face folder, and the same tensors as a GGUF file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jettison.device.model.create import create_model


@dataclass(frozen=True)
class Shape:
    """What ``create_model`` is asked for."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Of each expert, where there are any."""
    vocab: int
    experts: int = 0
    """Of a layer; 0: dense."""
    chosen: int = 0
    """Experts of a token."""

    def num_parameters(self) -> int:
        """With tied embeddings."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 2 * self.head_dim
        mlp = 3 * self.hidden * self.intermediate * max(1, self.experts) + self.experts * self.hidden
        layer = attention + mlp + 2 * self.hidden
        return self.layers * layer + (self.vocab + 1) * self.hidden


QWEN3_110M = Shape("qwen3-110m", 12, 768, 12, 4, 64, 2304, 32_000)
QWEN3_500M = Shape("qwen3-0.5b", 28, 1024, 16, 8, 64, 3072, 64_000)
QWEN3_02M = Shape("qwen3-0.2m", 4, 64, 2, 1, 32, 176, 512)
QWEN3_700M = Shape("qwen3-0.7b", 24, 1536, 12, 4, 128, 4608, 8192)
"""Its head is 2 % of its weights."""
QWEN3_MOE = Shape("qwen3-moe-0.3b", 14, 768, 12, 4, 64, 256, 32_000, experts=32, chosen=4)
"""A token passes 80 of 311 million parameters."""


def make_folder(folder: Path, shape: Shape, dtype: str = "bfloat16") -> Path:
    """Write the model below ``folder`` unless it is there; returns its path."""
    path = folder / f"{shape.name}-{dtype}"
    if not path.exists():
        arch, extra = "qwen3", {}
        if shape.experts:
            arch, extra = "qwen3_moe", {
                "num_experts": shape.experts, "num_experts_per_tok": shape.chosen, "norm_topk_prob": True,
                "moe_intermediate_size": shape.intermediate, "decoder_sparse_step": 1, "mlp_only_layers": [],
            }  # fmt: skip
        create_model(
            path, arch=arch, layers=shape.layers, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads,
            head_dim=shape.head_dim, intermediate=shape.intermediate, vocab=shape.vocab, dtype=dtype, tied=True,
            extra=extra,
        )  # fmt: skip
    return path


def make_gguf(model_dir: Path, dtype: str = "float16") -> Path:
    """The folder's weights beside it in float16 (OpenVINO reads no bfloat16 GGUF), bfloat16, float32 or q4_0, unless
    they are there. Of q4_0 are the layers' matrices; the embedding, which is the head, stays in bfloat16."""
    import gguf
    from safetensors import safe_open

    path = model_dir.with_name(f"{model_dir.name}-as-{dtype}.gguf")
    if path.exists():
        return path
    config = json.loads((model_dir / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_name(model_dir.name)
    file_types = {
        "float16": gguf.LlamaFileType.MOSTLY_F16, "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
        "float32": gguf.LlamaFileType.ALL_F32, "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    }  # fmt: skip
    writer.add_file_type(file_types[dtype])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, model_dir, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    with safe_open(model_dir / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  (not a mapping)
            target = names.get_name(name, try_suffixes=(".weight",))
            writer.add_tensor(target, *_stored(tensors.get_tensor(name), dtype, is_layer=".layers." in name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(tensor: Any, dtype: str, is_layer: bool) -> tuple[Any, None, Any]:
    """As ``add_tensor`` takes it: its data, and its type where numpy has none."""
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    if tensor.ndim == 1:  # norms stay wide as llama.cpp's
        return tensor.float().numpy(), None, None
    if dtype == "q4_0" and is_layer:
        return quantize(tensor.float().numpy(), GGMLQuantizationType.Q4_0), None, GGMLQuantizationType.Q4_0
    kind = torch.bfloat16 if dtype == "q4_0" else getattr(torch, dtype)
    tensor = tensor.to(kind).contiguous()
    if kind is torch.bfloat16:
        return tensor.view(torch.uint8).numpy(), None, GGMLQuantizationType.BF16
    return tensor.numpy(), None, None


def _add_tokenizer(writer: Any, model_dir: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens = {index: text for text, index in tokenizer["model"]["vocab"].items()} | special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([tokens.get(i, f"<unused{i}>") for i in range(config["vocab_size"])])
    control, normal = 3, 1  # token types of the format
    writer.add_token_types([control if i in special else normal for i in range(config["vocab_size"])])
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in tokenizer["model"]["merges"]]
    writer.add_token_merges(merges or ["a b"])  # readers insist on one
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])

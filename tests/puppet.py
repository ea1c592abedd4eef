"""A model whose greedy output is a chosen chain of tokens: what stops it, and what is made of its text, can be tested
on a real engine.

Each token's embedding is a direction of its own. Attention and MLP add zeros, so the last token alone decides: the
output head's row of its successor points in the same direction, and every other row is orthogonal to it. At
temperature 1 the successor has all but a millionth of the probability.

    write_puppet(folder, chain_of("\\n", "Hi", TURN_END_ID, "User"))

``"\\n"`` is what the template of the byte-level tokenizer ends a prompt with; a token without a successor is followed
by ``default``. A token has one successor, so a chain must not use a token twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jettison.device.model.byte_tokenizer import BOS_ID, EOS_ID, MIN_VOCAB_SIZE, TURN_END_ID, write_tokenizer

ABSENT = object()
"""As a value of ``config``, ``generation`` or ``tokenizer_config``: the key is left out."""

NUM_HEADS = 4
DEFAULT = ord("z")


def tokens_of(*parts: str | int) -> list[int]:
    """Texts as the byte-level tokenizer's tokens (their bytes), numbers as they are."""
    return [token for part in parts for token in (part.encode() if isinstance(part, str) else [part])]


def chain_of(*parts: str | int) -> dict[int, int]:
    """Token -> the token after it. Raises ValueError where a token would have two successors."""
    chain: dict[int, int] = {}
    for token, follower in itertools.pairwise(tokens_of(*parts)):
        if chain.setdefault(token, follower) != follower:
            raise ValueError(f"token {token} is followed by {chain[token]} and by {follower}")
    return chain


def write_puppet(
    folder: Path, chain: Mapping[int, int], *, default: int = DEFAULT, vocab_size: int = 272,
    config: Mapping[str, Any] | None = None, generation: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Llama folder of two layers, whose end token is <|endoftext|> alone; returns ``folder``.

    ``vocab_size``: rows of the embedding; the tokenizer has 261 tokens. ``config``, ``generation`` and
    ``tokenizer_config`` are put over what the three files would hold (``generation={"eos_token_id": ABSENT}``);
    ``tensors`` over the weights by name.
    """
    hidden = -(-vocab_size // 64) * 64
    folder.mkdir(parents=True, exist_ok=True)
    base = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": 2,
        "num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_HEADS, "intermediate_size": 32,
        "vocab_size": vocab_size, "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": BOS_ID, "eos_token_id": EOS_ID,
    }  # fmt: skip
    _write(folder / "config.json", base, config)
    _write(folder / "generation_config.json", {"eos_token_id": EOS_ID}, generation)
    write_tokenizer(folder, MIN_VOCAB_SIZE, 2048)
    path = folder / "tokenizer_config.json"
    _write(path, json.loads(path.read_text(encoding="utf-8")), tokenizer_config)
    weights = _weights(chain, default, vocab_size, hidden) | dict(tensors or {})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write(path: Path, base: Mapping[str, Any], over: Mapping[str, Any] | None) -> None:
    values = {key: value for key, value in {**base, **(over or {})}.items() if value is not ABSENT}
    path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _weights(chain: Mapping[int, int], default: int, vocab_size: int, hidden: int) -> dict[str, Any]:
    head = np.zeros((vocab_size, hidden), np.float32)
    for token in range(vocab_size):
        head[chain.get(token, default), token] = 1.0
    weights = {
        "model.embed_tokens.weight": np.eye(vocab_size, hidden, dtype=np.float32),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(2):
        name = f"model.layers.{layer}."
        for part in ("q", "k", "v", "o"):
            weights[f"{name}self_attn.{part}_proj.weight"] = np.zeros((hidden, hidden), np.float32)
        for part, shape in (("gate", (32, hidden)), ("up", (32, hidden)), ("down", (hidden, 32))):
            weights[f"{name}mlp.{part}_proj.weight"] = np.zeros(shape, np.float32)
        for norm in ("input", "post_attention"):
            weights[f"{name}{norm}_layernorm.weight"] = np.ones(hidden, np.float32)
    return weights


__all__ = ["ABSENT", "DEFAULT", "TURN_END_ID", "chain_of", "tokens_of", "write_puppet"]

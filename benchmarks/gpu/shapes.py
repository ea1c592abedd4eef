"""Shapes of models that the card's benchmarks serve with random weights: ``config.json`` and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Shape(NamedTuple):
    """A decoder of the Qwen family."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    is_tied: bool

    def write(self, folder: Path) -> None:
        """Make a model folder that ``--load-format random`` serves."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({
            "architectures": [f"{self.architecture}ForCausalLM"], "model_type": self.architecture.lower(),
            "hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "intermediate_size": self.inner,
            "vocab_size": self.vocab, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "tie_word_embeddings": self.is_tied, "torch_dtype": "bfloat16", "hidden_act": "silu",
        }, indent=1))  # fmt: skip

    def prefill_flop(self, num_tokens: int) -> float:
        """Of a prompt by itself: products of all layers, attention of each token to those before it, one row of the
        head."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (q + 2 * kv) + q * self.hidden + 3 * self.hidden * self.inner
        products = 2.0 * num_tokens * self.layers * weights
        attention = 2.0 * self.layers * self.heads * self.head_dim * num_tokens**2
        return products + attention + 2.0 * self.hidden * self.vocab


SHAPES = {
    "7b": Shape("Qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False),
    "14b": Shape("Qwen2", 5120, 48, 40, 8, 128, 13824, 152064, False),
    "0.6b": Shape("Qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True),
}
TINY = {name: Shape(shape.architecture, 64, 2, 4, 2, 16, 96, 128, shape.is_tied) for name, shape in SHAPES.items()}


def folder_of(models: Path, shape: str) -> Path:
    """Where a shape's folder is below ``models``."""
    return models / shape

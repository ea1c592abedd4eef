"""Tiny models, made once a session, and a memory that is nothing but tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from jettison.device.model.create import create_model
from jettison.device.model.hf_config import read_config
from jettison.device.model.shards import model_shape
from jettison.device.model.weights import WeightFolder
from jettison.device.runner import Runner

BLOCK_SIZE = 4

TINY = {"layers": 3, "hidden": 48, "heads": 4, "kv_heads": 2, "intermediate": 80, "max_position_embeddings": 512}

TINY_MODELS = {
    "llama": {"arch": "llama", **TINY},
    "llama3-rope": {"arch": "llama", **TINY, "rope_scaling": "llama3", "tied": True, "head_dim": 20},
    "mistral": {"arch": "mistral", **TINY, "head_dim": 16, "shard_bytes": 40_000},
    "qwen2": {"arch": "qwen2", **TINY, "layers": 4, "kv_heads": 4},
    "qwen3": {"arch": "qwen3", **TINY, "head_dim": 16, "kv_heads": 1, "shard_bytes": 100_000},
}
"""Every architecture, and between them: grouped heads, one head, head sizes of their own, tied weights, several files."""


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> dict[str, Path]:
    """Name in ``TINY_MODELS`` -> a folder with float64 weights. Read only."""
    folders = {}
    for seed, (name, options) in enumerate(TINY_MODELS.items()):
        folders[name] = tmp_path_factory.mktemp(name) / "model"
        create_model(folders[name], **options, dtype="float64", seed=seed)
    return folders


@dataclass
class PlainMemory:
    """The decoder's view of a device's memory, without pages: everything is always there."""

    slabs: dict[str, torch.Tensor]
    arenas: list[torch.Tensor]
    space: torch.Tensor
    dropped: set[str] = field(default_factory=set)

    def shard_bytes(self, shard: str) -> torch.Tensor:
        assert shard not in self.dropped, f"{shard} was read though it is dropped"
        return self.slabs[shard]

    def kv_arena(self, layer: int) -> torch.Tensor:
        return self.arenas[layer]

    def workspace(self) -> torch.Tensor:
        return self.space


def make_runner(model_dir: Path, dtype=torch.float64, *, kernels, num_blocks=256, max_num_tokens=64, max_num_seqs=8):
    """A loaded ``Runner`` on a ``PlainMemory``; parameters, KV and workspace start as garbage."""
    config = read_config(model_dir)
    shape = model_shape(config, dtype)
    space = torch.full((Runner.workspace_bytes(config, dtype, max_num_tokens, max_num_seqs),), 0xFF, dtype=torch.uint8)
    slabs = {shard: torch.full((size,), 0xFF, dtype=torch.uint8) for shard, size in shape.shard_bytes.items()}
    arena_shape = (num_blocks, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    arenas = [torch.full(arena_shape, torch.nan, dtype=dtype) for _ in range(config.num_layers)]
    memory = PlainMemory(slabs, arenas, space)
    runner = Runner(config, shape, memory, kernels, dtype, max_num_tokens, max_num_seqs)
    folder = WeightFolder(model_dir, config, dtype)
    for shard, slab in slabs.items():
        folder.load_shard(shard, slab)
    folder.load_final_norm(runner.final_norm)
    return runner

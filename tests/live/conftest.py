"""A model for tests of every room of ``live``."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, with sums that any difference of arithmetic would show in its tokens."""
    from jettison.device.model.create import create_model  # torch, which not every test here needs

    folder = tmp_path_factory.mktemp("model") / "qwen3"
    create_model(
        folder, arch="qwen3", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16, seed=3, std=0.2,
        max_position_embeddings=512,
    )
    return folder

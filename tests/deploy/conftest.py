"""The model folder that manifests name, made on the spot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jettison.device.model.create import create_model

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode puts no test folder on the path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A model folder, small."""
    folder = tmp_path_factory.mktemp("deploy") / "model"
    create_model(folder, arch="qwen3", layers=2, hidden=32, heads=2, kv_heads=1, seed=1)
    return folder

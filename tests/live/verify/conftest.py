"""Makes helpers of this folder and of ``tests/device`` importable: importlib mode puts no test folder on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "device"))

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # processes share the cores, and threads that wait for each other spin

"""Triton's interpreter where there is no GPU, chosen before anything imports Triton; the device that the tests use."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON and not torch.cuda.is_available():
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "imported before it was asked"
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are interpreted or not as their decorator finds it
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_with_index(tensor, scope) -> None:
        """Triton 3.6 makes ints of arrays of one element, which numpy 2.4 refuses."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_index

collect_ignore = [] if HAS_TRITON else []


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

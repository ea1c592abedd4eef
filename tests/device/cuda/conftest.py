"""Triton's interpreter where there is no GPU, chosen before anything imports Triton, and the device of the tests."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # importlib mode puts no test folder on the path

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "imported before it was asked"
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are interpreted or not as their decorator finds it
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_with_index(tensor, scope) -> None:
        """Triton 3.6 makes ints of arrays of one element, which numpy 2.4 refuses."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def _dot_of_rows(self, a, b, d, input_precision, max_num_imprecise_acc):
        """Products whose rows do not depend on how many there are, as on a device; numpy's do."""
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    interpreter._patch_lang_tensor = _patch_with_index
    interpreter.InterpreterBuilder.create_dot = _dot_of_rows


elif importlib.util.find_spec("triton") is not None:
    from jettison.device.cuda.kernels import choose_invariant_products

    choose_invariant_products()  # before any test multiplies: cuBLAS reads its workspace's size once in a process


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

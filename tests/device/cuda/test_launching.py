"""Compiled kernels are found again by all that Triton compiles for, and launched with arguments in their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from jettison.device.cuda import elementwise
from jettison.device.cuda.launching import kind_of, launch


class Compiled:
    def __init__(self, log: list) -> None:
        self.log = log

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append(("again", grid, arguments))


class Kernel:
    """As Triton's: what a call returns is what was compiled for it."""

    device_caches: Any = None
    arg_names = ("x", "rows", "eps", "nothing", "BLOCK", "PDL")
    __name__ = "kernel"

    def __init__(self) -> None:
        self.log: list = []

    def __getitem__(self, grid):
        def first(*arguments, **named):
            self.log.append(("first", grid, arguments, named))
            return Compiled(self.log)

        return first


def test_the_second_launch_of_a_kind_goes_straight_to_what_was_compiled() -> None:
    kernel, memory = Kernel(), torch.zeros(64)
    constants = {"BLOCK": 64, "PDL": False}
    for x, rows in ((memory, 7), (memory[4:], 9), (memory[1:], 7), (memory, 1), (memory, 32), (memory[8:], 48)):
        launch(kernel, (3, 2), (x, rows, 0.5, None), constants, num_warps=4)
    assert [entry[0] for entry in kernel.log] == ["first", "again", "first", "first", "first", "again"]
    assert kernel.log[0][1:] == ((3, 2), (memory, 7, 0.5, None), {**constants, "num_warps": 4})
    _, grid, arguments = kernel.log[1]
    assert grid == (3, 2, 1) and arguments[1:] == (9, 0.5, None, 64, False)
    launch(kernel, (3,), (memory, 7, 0.5, None), constants | {"BLOCK": 32}, num_warps=4)
    launch(kernel, (3,), (memory, 7, 0.5, None), constants, num_warps=8)
    launch(kernel, (3,), (memory.double(), 7, 0.5, None), constants, num_warps=4)
    launch(Kernel(), (3,), (memory, 7, 0.5, None), constants, num_warps=4)
    assert [entry[0] for entry in kernel.log[6:]] == ["first"] * 3


numbers = st.one_of(st.integers(-5, 70), st.sampled_from([2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40]))


@given(numbers | st.floats() | st.none(), numbers | st.floats() | st.none())
def test_what_is_one_kind_here_is_one_kind_for_triton(one, other) -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    if kind_of(one) == kind_of(other):
        kinds = [native_specialize_impl(CUDABackend, value, False, True, True) for value in (one, other)]
        assert kinds[0] == kinds[1]


def test_tensors_are_of_one_kind_where_triton_has_them_so() -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    memory = torch.zeros(64)
    views = [memory[i:] for i in range(9)] + [memory.view(torch.int32)[4:], memory[:8].double()]
    kinds = [(kind_of(view), native_specialize_impl(CUDABackend, view, False, True, True)) for view in views]
    assert all((a[0] == b[0]) == (a[1] == b[1]) for a in kinds for b in kinds)


def test_constants_in_another_order_are_refused() -> None:
    """They are passed by place to what is compiled; interpreted kernels are looked at, too."""
    memory = torch.zeros(4, 64)
    arguments = (memory, memory[0], memory[0], memory.clone(), 64, 64, 64, 1e-6)
    with pytest.raises(ValueError, match="norm_kernel"):
        launch(elementwise.layer_norm_kernel, (4,), arguments, {"HAS_BIAS": True, "PDL": False, "BLOCK": 64})
    with pytest.raises(ValueError, match="kernel"):
        launch(Kernel(), (4, 1), (memory, 3), {"BLOCK": 64, "PDL": False}, num_warps=4)

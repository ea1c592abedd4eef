"""Launches of Triton's kernels without its own look-up of the compiled one, which takes most of a launch's time.

Triton binds, describes and hashes all arguments and options at each call, to find what it has compiled for such ones. A
layer launches the same few kernels with the same sizes again and again, so what Triton found for them is kept here, by
all that it compiles for: types, whether addresses and numbers are multiples of 16, numbers that are 1, constants.

Not here: kernels, and their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_INT32 = 1 << 31

_found: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Mapping[str, Any], **options: Any
) -> None:
    """``kernel[grid](*arguments, **constants, **options)``.

    ``grid``: one to three sizes. ``arguments``: tensors, integers, floats and None. ``constants``: all of the kernel's
    ``constexpr``, in its order, behind the arguments. Raises ValueError, at the first launch of a kind, for another.
    """
    if not hasattr(kernel, "device_caches"):  # it is interpreted
        _check_order(kernel, arguments, constants)
        kernel[grid](*arguments, **constants, **options)
        return
    values = tuple(constants.values())
    key = id(kernel), values, tuple(options.values()), tuple([kind_of(argument) for argument in arguments])
    compiled = _found.get(key)
    if compiled is None:
        _check_order(kernel, arguments, constants)
        _found[key] = kernel[grid](*arguments, **constants, **options)
        return
    compiled[(*grid, 1, 1)[:3]](*arguments, *values)


def _check_order(kernel: Any, arguments: tuple[Any, ...], constants: Mapping[str, Any]) -> None:
    """What is compiled takes constants by place."""
    if [*kernel.arg_names[len(arguments) :]] != [*constants]:
        raise ValueError(f"{kernel.__name__} takes {kernel.arg_names}, not {[*constants]} behind {len(arguments)}")


def kind_of(argument: Any) -> Any:
    """What of an argument Triton compiles for, or more."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return argument if argument == 1 else (argument % 16 == 0, -_INT32 <= argument < _INT32)
    return None if argument is None else type(argument)

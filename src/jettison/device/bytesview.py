"""Flat byte views of tensors and arrays in host memory. Both directions share memory where they can.

Numpy arrays pass through untouched and without importing torch. Not here: bytes of a device (``devicebytes``).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


def as_numpy_uint8(tensor: Any) -> npt.NDArray[np.uint8]:
    """Flat uint8 array over the bytes of a torch tensor or numpy array of any dtype.

    Zero-copy for contiguous memory. Otherwise (strides) it is a copy, so never write through the result unless the
    source is known to be contiguous. Raises ValueError for a tensor that does not lie on the host: its bytes are asked
    of ``device.devicebytes``.
    """
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    import torch

    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on {tensor.device} has no bytes on the host")
    array: npt.NDArray[np.uint8] = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return array


def as_tensor_uint8(data: Any) -> torch.Tensor:
    """Flat uint8 tensor over the bytes of a numpy array, memoryview or tensor; zero-copy, the memory is kept alive.

    Read-only memory (a shared-memory frame) gives a tensor too: writing to it is an error of the caller, and
    a crash where the pages are mapped read-only.
    """
    import torch

    if isinstance(data, torch.Tensor):
        return data.view(-1).view(torch.uint8)
    array = np.ascontiguousarray(np.asarray(data)).reshape(-1).view(np.uint8)
    if array.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    if array.flags.writeable:
        return torch.from_numpy(array)
    # torch warns about memory it may not write; a ctypes view of the same address carries no such flag.
    view = (ctypes.c_uint8 * array.size).from_address(array.ctypes.data)
    view.owner = array  # type: ignore[attr-defined]  # the tensor keeps the view, the view keeps the array
    return torch.frombuffer(view, dtype=torch.uint8)


def widened(rows: torch.Tensor) -> torch.Tensor:
    """The same uint8 rows in the widest unit that divides them. The time of an indexed copy grows with the number of
    elements: a scatter of 64 KiB rows is seven times faster with eight bytes an element than with one."""
    import torch

    for dtype in (torch.int64, torch.int32, torch.int16):
        width = dtype.itemsize
        if not (rows.shape[-1] % width or rows.storage_offset() % width or rows.data_ptr() % width):
            return rows.view(dtype)
    return rows

"""uint8 tensors, by DLPack, over addresses that need not have memory.

PyTorch does not query the driver about memory from DLPack, so a tensor may cover a span that is mapped in part or not
at all (``docs/gpu.md``; with ``__cuda_array_interface__`` PyTorch queries the driver, and fails).
"""

from __future__ import annotations

import ctypes

import torch
from torch.utils.dlpack import from_dlpack

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}
"""DLDeviceType."""
_UNSIGNED = 1


class _Tensor(ctypes.Structure):
    """DLManagedTensor of one dimension, followed by its shape: one allocation."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("num_dims", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("first_dim", ctypes.c_int64),
    ]


def span_tensor(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 ``[num_bytes]`` at ``address`` of a device. It owns no memory, and neither do views of it.

    The structure that describes it lives as long as the last view: PyTorch frees it by the C library's ``free``.
    """
    if device.type == "cuda":
        torch.cuda.init()  # PyTorch may not have initialised the card yet
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    at = libc.malloc(ctypes.sizeof(_Tensor))
    if at is None:
        raise MemoryError
    described = _Tensor.from_address(at)
    described.data = address
    described.device_type = _DEVICE_TYPES[device.type]
    described.device_id = device.index or 0
    described.num_dims = 1
    described.type_code, described.type_bits, described.type_lanes = _UNSIGNED, 8, 1
    described.shape = at + _Tensor.first_dim.offset
    described.strides = None  # compact
    described.byte_offset = 0
    described.manager_context = None
    described.deleter = ctypes.cast(libc.free, ctypes.c_void_p).value
    described.first_dim = num_bytes
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    tensor: torch.Tensor = from_dlpack(new_capsule(at, b"dltensor", None))
    return tensor

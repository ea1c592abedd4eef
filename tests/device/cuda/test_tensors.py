"""Tensors over given addresses: they share the bytes, own nothing, and outlive what made them."""

from __future__ import annotations

import ctypes
import gc

import torch

from jettison.device.cuda.tensors import span_tensor


def test_a_tensor_shares_the_bytes_at_its_address():
    span = (ctypes.c_uint8 * 96)(*range(96))
    tensor = span_tensor(ctypes.addressof(span) + 16, 64, torch.device("cpu"))
    assert tensor.dtype == torch.uint8 and tensor.shape == (64,) and tensor.is_contiguous()
    assert tensor.data_ptr() == ctypes.addressof(span) + 16
    assert tensor.tolist() == list(range(16, 80))
    tensor[:8].view(torch.int64).fill_(-1)
    assert bytes(span)[14:26] == bytes([14, 15]) + b"\xff" * 8 + bytes([24, 25])


def test_views_outlive_the_tensor_and_leave_the_bytes_alone():
    span = (ctypes.c_uint8 * 64)()
    views = [span_tensor(ctypes.addressof(span), 64, torch.device("cpu"))[i : i + 2] for i in range(50)]
    gc.collect()
    for view in views:
        view.add_(1)
    del views
    gc.collect()
    assert sum(span) == 100

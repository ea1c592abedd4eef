"""A card's sampler as its runner uses it, without staging: with Triton's kernels, or in PyTorch."""

from __future__ import annotations

import importlib.util
from unittest import mock

import numpy as np
import pytest
import torch

from jettison.device.cuda import draws
from jettison.device.cuda.sampler import CudaSampler
from jettison.device.step import SamplingRow

VOCAB = 300

PLAIN = "plain"
KERNELS = pytest.param("kernels", marks=[
    pytest.mark.cuda, pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter
])  # fmt: skip
"""On a GPU where there is one, else in the interpreter."""


def device_of(way: str) -> torch.device:
    """Where rows lie that are drawn in one of the ways."""
    return torch.device("cuda" if way == "kernels" and torch.cuda.is_available() else "cpu")


def going(way: str):
    """A context in which rows of ``device_of(way)`` are drawn so."""
    return mock.patch.object(draws, "uses_kernels", return_value=way == "kernels")


def draw(logits: torch.Tensor, rows: list[int], sampling: list[SamplingRow], way=PLAIN, vocab_size=VOCAB):
    """What a runner does, without its staging."""
    sampler, device = CudaSampler(vocab_size), device_of(way)
    plan = sampler.plan(rows, sampling)
    there = logits.to(device)
    likeliest = torch.from_numpy(
        np.where(np.isfinite(logits.float().numpy()).all(1), logits[:, :vocab_size].float().numpy().argmax(1), -1)
    )
    arrays = {name: torch.from_numpy(array).to(device) for name, array in plan.arrays.items()}
    with going(way):
        results = sampler.launch(there, likeliest.to(device), plan, arrays)
    on_host = {name: tensor.cpu().numpy() for name, tensor in results.items()}
    return sampler.finish(plan, on_host)


def row(number: int, **fields) -> SamplingRow:
    defaults = {"position": 7, "seed": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return SamplingRow(row=number, **(defaults | fields))
